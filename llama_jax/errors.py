"""The one kind of error that the user can fix; the command line prints it as one line and exits with 2."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import chain
from typing import Any


class UserError(ValueError):
    """Something given to llama_jax cannot be used: the message names the thing, its value, the need and the remedy."""


class ConfigError(UserError):
    """Sizes or constants that cannot be a Llama."""


class CheckpointError(UserError):
    """A file that cannot be read as a Llama: damaged, incomplete, or of a kind that is not supported."""


class StuckSaveError(CheckpointError):
    """A checkpoint that is still being written when its time is up: nothing may wait for its threads any more."""


class DataError(UserError):
    """A file that no documents can be read from, or a split or a setting that leaves none."""


class TokenizerError(UserError):
    """A vocabulary that cannot be read."""


class GenerationError(UserError):
    """A prompt, a sampling value or a length that cannot be generated from."""


class MeshError(UserError):
    """A mesh that cannot be: of nonsense sizes, of more devices than there are, or not fitting the model or the batch."""


class TrainingError(UserError):
    """A recipe that cannot be trained, a work directory of another run, or a run that has failed."""


@contextmanager
def reading(path: object, kind: type[UserError]) -> Iterator[None]:
    """Turn what the system says of a file into an error of this kind: no permission, a name too long, a failing disk."""
    try:
        yield
    except OSError as error:
        name = str(error.filename or path)
        raise kind(f"{name if len(name) <= 500 else shown(name, 100)} cannot be read: {error.strerror or error}") from None


def reason_of(error: BaseException | str, length: int = 100) -> str:
    """What an error of a library says, for a message: on one line, and no more than `length` characters of it."""
    return " ".join(str(error).split())[:length]


def shown(value: Any, length: int = 60) -> str:
    """The first `length` characters of `repr(value)`, for a message, in time and memory that `length` bounds.

    `repr` itself would not do for what a file holds: lists that hold one list forty times over take it for ever, deep ones
    overflow its stack, and a number of 4,301 digits makes it raise.
    """
    found = ""
    for part in _parts(value, length):
        found += part
        if len(found) >= length:
            break
    return found[:length]


def _parts(value: Any, length: int) -> Iterator[str]:
    """`repr(value)` in pieces. Each level gives a character before it goes deeper, so whoever stops bounds the depth."""
    kind = type(value)
    if kind in (str, bytes):
        yield repr(value[:length])
    elif kind is int and value.bit_length() > 1 << 12:
        yield f"<a number of {value.bit_length()} bits>"
    elif kind is dict:
        yield "{"
        for i, (key, entry) in enumerate(value.items()):
            yield from chain([", "] * (i > 0), _parts(key, length), [": "], _parts(entry, length))
        yield "}"
    elif kind in (list, tuple, array):
        yield "(" if kind is tuple else "["
        yield from _joined(value, length)
        yield ",)" if kind is tuple and len(value) == 1 else ")" if kind is tuple else "]"
    else:
        yield repr(value)


def _joined(values: Iterable[Any], length: int) -> Iterator[str]:
    for i, value in enumerate(values):
        yield from chain([", "] * (i > 0), _parts(value, length))
