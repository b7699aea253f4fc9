"""Request bodies: read within a byte budget that all share, and parsed as JSON in bounded time."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, NoReturn

from starlette.requests import ClientDisconnect, Request

from llama_jax.serving.http.errors import ApiError, DisconnectedError, refused

BODY_SECONDS = 60  # time limit for a client to send a body
SMALL_BODY = 64 << 10  # bytes of each body outside the budget; bodies up to this size are parsed on the event loop
MAX_JSON_PARTS = 1 << 18  # strings, commas and brackets of a body: `json.loads` holds the GIL for about 0.1 s


class BodyReader:
    """Reads bodies. All requests together, beyond SMALL_BODY of each, take at most `most_bytes`.

    Attributes:
      held: bytes of the budget in use.
    """

    def __init__(self, largest: int, most_bytes: int) -> None:
        self.reserved = 0
        self._largest = largest
        self._most_bytes = most_bytes

    @asynccontextmanager
    async def read(self, request: Request) -> AsyncIterator[bytearray]:
        """The body, counted in the budget until the context manager exits; ApiError if it is too large or too slow."""
        content_type = request.headers.get("content-type", "").partition(";")[0].strip(" \t").lower()
        if content_type != "application/json":
            raise ApiError(415, f"the content type {content_type or 'that is missing'!r} is not JSON; send application/json")
        length = request.headers.get("content-length", "")
        if length.isdecimal() and int(length[:20]) > self._largest:
            raise self._too_large()
        content, reserved = bytearray(), 0
        try:
            try:
                async with asyncio.timeout(BODY_SECONDS):
                    async for part in request.stream():
                        content += part
                        reserved += self._take(max(len(content) - SMALL_BODY, 0) - reserved)
                        if len(content) > self._largest:
                            raise self._too_large()
            except TimeoutError:
                close = {"Connection": "close"}
                raise ApiError(408, f"the body took longer than {BODY_SECONDS} s", headers=close) from None
            except ClientDisconnect:
                raise DisconnectedError from None
            yield content
        finally:
            self.reserved -= reserved

    def _take(self, size: int) -> int:
        if self.reserved + size > self._most_bytes:
            raise ApiError(
                429,
                f"other request bodies use {self.reserved} of {self._most_bytes} bytes; try again later",
                code="bodies_full",
                headers={"Retry-After": "2", "Connection": "close"},
            )
        self.reserved += size
        return size

    def _too_large(self) -> ApiError:
        # The rest of the body is not read, so the connection cannot be reused.
        message = f"the body is larger than {self._largest} bytes; send a smaller one"
        return ApiError(413, message, headers={"Connection": "close"})


def parse_json(content: bytes | bytearray) -> Any:
    """The value of a JSON body; ApiError (400) if it is not JSON, is nested too deeply or has too many parts."""
    try:
        text = content.decode("utf-8-sig", "surrogatepass")
        if not _has_few_parts(text):
            raise refused(f"the body has more than {MAX_JSON_PARTS} strings, commas and brackets; send a smaller one")
        return json.loads(text, parse_constant=_reject_constant)
    except RecursionError:
        raise refused("the body is nested too deeply") from None
    except ValueError as error:  # also for invalid UTF-8, and for integers of thousands of digits
        reason = " ".join(str(error).split())[:100]
        raise refused(f"the body is not JSON: {reason}", code="invalid_json") from None


def _has_few_parts(text: str) -> bool:
    """Whether a JSON text has at most MAX_JSON_PARTS strings, and commas and brackets outside strings."""
    if sum(map(text.count, '",[{')) <= MAX_JSON_PARTS:
        return True
    bare = text.replace("\\\\", "").replace('\\"', "")  # without escaped quotes
    strings = (bare.count('"') + 1) // 2
    if strings > MAX_JSON_PARTS:
        return False
    outside = "".join(bare.split('"')[::2])
    return strings + sum(map(outside.count, ",[{")) <= MAX_JSON_PARTS


def _reject_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a number in JSON")
