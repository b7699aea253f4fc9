"""Errors that the user can fix; the command line prints them as one line and exits with 2."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import chain
from typing import Any


class UserError(ValueError):
    """An input that llama_jax cannot use. The message names it, its value, what is needed and the remedy."""


class ConfigError(UserError):
    """Invalid sizes or constants of a model."""


class CheckpointError(UserError):
    """A file that cannot be read as a Llama: damaged, incomplete, or in an unsupported format."""


class StuckSaveError(CheckpointError):
    """A checkpoint was still being written at the time limit. The process must not wait for its threads."""


class DataError(UserError):
    """A file without readable documents, or a split or a setting that leaves no documents."""


class TokenizerError(UserError):
    """A vocabulary that cannot be read."""


class GenerationError(UserError):
    """An invalid prompt, sampling value or length."""


class MeshError(UserError):
    """An invalid mesh: bad sizes, more devices than there are, or a mismatch with the model or the batch."""


class TrainingError(UserError):
    """An invalid recipe, a work directory of another run, or a run that has failed."""


@contextmanager
def reading(path: object, error_type: type[UserError]) -> Iterator[None]:
    """Convert an OSError about a file (no permission, a name too long, a failing disk) to an error of this kind."""
    try:
        yield
    except OSError as error:
        name = str(error.filename or path)
        raise error_type(
            f"{name if len(name) <= 500 else short_repr(name, 100)} cannot be read: {error.strerror or error}"
        ) from None


def reason_of(error: BaseException | str, length: int = 100) -> str:
    """The text of a library's error for use in a message: one line of at most `length` characters."""
    return " ".join(str(error).split())[:length]


def short_repr(value: Any, length: int = 60) -> str:
    """The first `length` characters of `repr(value)`, for a message, in time and memory bounded by `length`.

    `repr` itself is not safe for the content of files: nested lists that share their elements take exponential time, deeply
    nested ones overflow the stack, and a number with 4,301 digits raises.
    """
    text = ""
    for part in _repr_parts(value, length):
        text += part
        if len(text) >= length:
            break
    return text[:length]


def _repr_parts(value: Any, length: int) -> Iterator[str]:
    """`repr(value)` in parts. Each level yields a character before the next level, so the caller bounds the depth."""
    value_type = type(value)
    if value_type in (str, bytes):
        yield repr(value[:length])
    elif value_type is int and value.bit_length() > 1 << 12:
        yield f"<a number of {value.bit_length()} bits>"
    elif value_type is dict:
        yield "{"
        for i, (key, entry) in enumerate(value.items()):
            yield from chain([", "] * (i > 0), _repr_parts(key, length), [": "], _repr_parts(entry, length))
        yield "}"
    elif value_type in (list, tuple, array):
        yield "(" if value_type is tuple else "["
        yield from _repr_items(value, length)
        yield ",)" if value_type is tuple and len(value) == 1 else ")" if value_type is tuple else "]"
    else:
        yield repr(value)


def _repr_items(values: Iterable[Any], length: int) -> Iterator[str]:
    for i, value in enumerate(values):
        yield from chain([", "] * (i > 0), _repr_parts(value, length))
