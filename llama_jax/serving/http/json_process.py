"""Parsing of JSON bodies; large ones in a `child_process` that `json_body` starts.

`json.loads` holds the GIL until it is done, 0.1 s for 16 MB and more on a busy machine, which would stall all streams: so
this runs in another process.
"""

from __future__ import annotations

import json
import marshal
from collections.abc import Callable
from typing import Any, BinaryIO, NoReturn

MAX_SYMBOLS = 1 << 18  # limit of strings, commas and brackets, which are transferred in less than 0.1 s


class JsonError(ValueError):
    """A body that is not JSON, or has too many parts.

    Attributes:
      code: see `ApiError`.
    """

    def __init__(self, message: str, code: str | None = None) -> None:
        super().__init__(message)
        self.code = code


def parse(content: bytes | bytearray) -> Any:
    """The value of a JSON body.

    Raises:
      JsonError: it is not JSON, or has too many parts.
    """
    try:
        text = content.decode("utf-8-sig", "surrogatepass")
        if not _is_small(text):
            raise JsonError(f"the body has more than {MAX_SYMBOLS} strings, commas and brackets; send a smaller one")
        return json.loads(text, parse_constant=_no_number)
    except JsonError:
        raise
    except RecursionError:
        raise JsonError("the body is nested too deeply") from None
    except ValueError as error:  # also for invalid UTF-8, and for integers of thousands of digits
        reason = " ".join(str(error).split())[:100]
        raise JsonError(f"the body is not JSON: {reason}", "invalid_json") from None


def _is_small(text: str) -> bool:
    """Whether a JSON text has at most MAX_SYMBOLS strings, and commas and brackets outside strings."""
    if sum(map(text.count, '",[{')) <= MAX_SYMBOLS:
        return True
    bare = text.replace("\\\\", "").replace('\\"', "")  # without escaped quotes
    strings = (bare.count('"') + 1) // 2
    if strings > MAX_SYMBOLS:
        return False
    outside = "".join(bare.split('"')[::2])
    return strings + sum(map(outside.count, ",[{")) <= MAX_SYMBOLS


def _no_number(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a number in JSON")


def begin(source: BinaryIO) -> Callable[[bytes], bytes]:
    """The function that answers a body with "t" and the marshalled value, or "e" and the marshalled reason and code."""
    return _answer


def _answer(content: bytes) -> bytes:
    try:
        value = parse(content)
        try:
            return b"t" + marshal.dumps(value)
        except ValueError:  # in versions of Python whose parser allows deeper nesting than `marshal`
            raise JsonError("the body is nested too deeply") from None
    except JsonError as error:
        return b"e" + marshal.dumps((str(error), error.code))
