"""Request bodies: read within a byte budget that all share, and parsed without blocking other requests."""

from __future__ import annotations

import asyncio
import marshal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from starlette.requests import ClientDisconnect, Request

from llama_jax.child_process import ChildProcess, isolated
from llama_jax.serving.http import json_process
from llama_jax.serving.http.errors import ApiError, DisconnectedError, refused
from llama_jax.serving.thread_pool import LOW

BODY_SECONDS = 60  # time limit for a client to send a body
SMALL_BODY = 64 << 10  # bytes of each body outside the budget; bodies up to this size are parsed on the event loop
PARSE_SECONDS = 30  # time limit to parse a body


class BodyReader:
    """Reads bodies. All requests together, beyond SMALL_BODY of each, take at most `most_bytes`.

    Attributes:
      held: bytes of the budget in use.
    """

    def __init__(self, largest: int, most_bytes: int) -> None:
        self.held = 0
        self._largest = largest
        self._most_bytes = most_bytes

    @asynccontextmanager
    async def read(self, request: Request) -> AsyncIterator[bytearray]:
        """The body, counted in the budget until the context manager exits; ApiError if it is too large or too slow."""
        kind = request.headers.get("content-type", "").partition(";")[0].strip(" \t").lower()
        if kind != "application/json":
            raise ApiError(415, f"the content type {kind or 'that is missing'!r} is not JSON; send application/json")
        length = request.headers.get("content-length", "")
        if length.isdecimal() and int(length[:20]) > self._largest:
            raise self._too_large()
        content, held = bytearray(), 0
        try:
            try:
                async with asyncio.timeout(BODY_SECONDS):
                    async for part in request.stream():
                        content += part
                        held += self._take(max(len(content) - SMALL_BODY, 0) - held)
                        if len(content) > self._largest:
                            raise self._too_large()
            except TimeoutError:
                close = {"Connection": "close"}
                raise ApiError(408, f"the body took longer than {BODY_SECONDS} s", headers=close) from None
            except ClientDisconnect:
                raise DisconnectedError from None
            yield content
        finally:
            self.held -= held

    def _take(self, more: int) -> int:
        if self.held + more > self._most_bytes:
            raise ApiError(
                429,
                f"other request bodies use {self.held} of {self._most_bytes} bytes; try again later",
                code="bodies_full",
                headers={"Retry-After": "2", "Connection": "close"},
            )
        self.held += more
        return more

    def _too_large(self) -> ApiError:
        # The rest of the body is not read, so the connection cannot be reused.
        message = f"the body is larger than {self._largest} bytes; send a smaller one"
        return ApiError(413, message, headers={"Connection": "close"})


class JsonParser:
    """Parses JSON bodies, from any thread: large ones in a child process."""

    def __init__(self) -> None:
        self._child = ChildProcess(*isolated(Path(json_process.__file__), (), niceness=LOW), PARSE_SECONDS)

    def close(self) -> None:
        """Kill the child process, if there is one; the next large body starts a new one."""
        self._child.close()

    def parse(self, content: bytearray) -> Any:
        """The value of a body; ApiError if it is not JSON, or has too many parts."""
        if len(content) <= SMALL_BODY:
            try:
                return json_process.parse(content)
            except json_process.JsonError as error:
                raise refused(str(error), code=error.code) from None
        answer = self._child.ask(bytes(content))
        if answer is None:
            raise refused(f"the body takes over {PARSE_SECONDS} s or too much memory to parse; send a smaller one")
        value = marshal.loads(memoryview(answer)[1:])
        if answer[:1] == b"t":
            return value
        reason, code = value
        raise refused(reason, code=code)
