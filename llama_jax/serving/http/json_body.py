"""Bodies of requests: read within one budget of bytes for all of them, and parsed without holding up other requests."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, NoReturn

from starlette.requests import ClientDisconnect, Request

from llama_jax.errors import reason_of
from llama_jax.serving.http.errors import ApiError, refused, shutting_down

BODY_SECONDS = 60  # limit for a client to send a body
SMALL_BODY = 64 << 10  # bytes; so much of each body is outside the budget, and is parsed on the event loop
MOST_SYMBOLS = 1 << 18  # strings, commas and brackets: json.loads holds all threads up for less than 0.1 s


class BodyReader:
    """Reads bodies. Those of all requests together, beyond SMALL_BODY of each, have at most `most_bytes`.

    Attributes:
      held: bytes of the budget in use.
    """

    def __init__(self, largest: int, most_bytes: int) -> None:
        self.held = 0
        self._reading: set[asyncio.Timeout] = set()
        self._ended = False
        self._largest = largest
        self._most_bytes = most_bytes

    @asynccontextmanager
    async def read(self, request: Request) -> AsyncIterator[bytearray]:
        """The body, whose room in the budget is kept until the context ends; ApiError if it is too large or too slow."""
        kind = request.headers.get("content-type", "").partition(";")[0].strip(" \t").lower()
        if kind != "application/json":
            raise ApiError(415, f"the content type {kind or 'that is missing'!r} is not JSON; send application/json")
        length = request.headers.get("content-length", "")
        if length.isdecimal() and int(length[:20]) > self._largest:
            raise self._too_large()
        if self._ended:
            raise shutting_down()
        content, held = bytearray(), 0
        try:
            try:
                async with asyncio.timeout(BODY_SECONDS) as limit:
                    self._reading.add(limit)
                    async for part in request.stream():
                        content += part
                        held += self._take(max(len(content) - SMALL_BODY, 0) - held)
                        if len(content) > self._largest:
                            raise self._too_large()
            except TimeoutError:
                if self._ended:
                    raise shutting_down() from None
                close = {"Connection": "close"}
                raise ApiError(408, f"the body took longer than {BODY_SECONDS} s", headers=close) from None
            except ClientDisconnect:
                raise ApiError(400, "the client left before its body was whole") from None
            finally:
                self._reading.discard(limit)
            yield content
        finally:
            self.held -= held

    def end(self) -> None:
        """Refuse all bodies that are not whole, because the server is shutting down."""
        self._ended = True
        for limit in self._reading:
            limit.reschedule(asyncio.get_running_loop().time())

    def _take(self, more: int) -> int:
        if self.held + more > self._most_bytes:
            raise ApiError(
                429,
                f"other bodies have {self.held} bytes of the {self._most_bytes} that all may have; try again later",
                code="bodies_full",
                headers={"Retry-After": "2", "Connection": "close"},
            )
        self.held += more
        return more

    def _too_large(self) -> ApiError:
        # The rest of the body is not read, so the connection cannot be reused.
        message = f"the body is larger than {self._largest} bytes; send less"
        return ApiError(413, message, headers={"Connection": "close"})


def parse_json(content: bytearray) -> Any:
    """The value of a JSON body; ApiError if it is not JSON, or of too many parts."""
    try:
        text = content.decode("utf-8-sig", "surrogatepass")
        if not _is_small(text):
            raise refused(f"the body has more than {MOST_SYMBOLS} strings, commas and brackets; send less")
        return json.loads(text, parse_constant=_no_number)
    except RecursionError:
        raise refused("the body is nested too deeply") from None
    except ValueError as error:  # also for invalid UTF-8, and for integers of thousands of digits
        raise refused(f"the body is not JSON: {reason_of(error)}", code="invalid_json") from None


def _is_small(text: str) -> bool:
    """Whether a JSON text has at most MOST_SYMBOLS strings, and commas and brackets outside of them."""
    if sum(map(text.count, '",[{')) <= MOST_SYMBOLS:
        return True
    bare = text.replace("\\\\", "").replace('\\"', "")  # without escaped quotes
    strings = (bare.count('"') + 1) // 2
    if strings > MOST_SYMBOLS:
        return False
    outside = "".join(bare.split('"')[::2])
    return strings + sum(map(outside.count, ",[{")) <= MOST_SYMBOLS


def _no_number(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a number in JSON")
