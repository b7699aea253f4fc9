"""Small files that strangers wrote: read whole, within a bound, whatever they claim to be."""

from __future__ import annotations

import json
import os
from typing import Any

from llama_jax.errors import UserError, reason_of
from llama_jax.storage import Location

LARGEST_JSON = 4 << 20  # bytes, each of which can cost 25 here; the index of a 405B model has a thirtieth


def read_whole(path: Location, kind: type[UserError], largest: int, what: str = "settings") -> bytes:
    """The bytes of a file.

    Raises:
      UserError: of this kind, for what is no file or has more than `largest` bytes, which no `what` of a model has.
      OSError: it cannot be read.
    """
    if not path.is_file():  # reading a pipe would wait for ever
        raise kind(f"{path} is not a file; copy it again")
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(0)
        if size > largest:
            raise kind(f"{path} is over {largest} bytes, too large to be a model's {what}; is it another file?")
        return file.read(size)  # and no more, where somebody goes on writing


def read_text(path: Location, kind: type[UserError]) -> str:
    """The text of a settings file, in UTF-8; for the errors see `read_whole`."""
    try:
        return read_whole(path, kind, LARGEST_JSON).decode("utf-8")
    except UnicodeDecodeError as error:
        raise kind(f"{path} is not UTF-8 text ({error}); copy it again") from None


def read_object(path: Location, kind: type[UserError]) -> dict[str, Any]:
    """The object in a JSON file; for the errors see `read_whole`."""
    try:
        found = json.loads(read_text(path, kind))
    except UserError:
        raise
    except (ValueError, RecursionError) as error:
        raise kind(f"{path} is not valid JSON ({reason_of(error)}); copy it again") from None
    if not isinstance(found, dict):
        raise kind(f"{path} holds a {type(found).__name__}, not an object; copy it again")
    return found
