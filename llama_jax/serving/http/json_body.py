"""Bodies of requests: read within one budget of bytes for all of them, and parsed without holding up other requests."""

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

BODY_SECONDS = 60  # limit for a client to send a body
SMALL_BODY = 64 << 10  # bytes; so much of each body is outside the budget, and is parsed on the event loop
PARSE_SECONDS = 30  # limit for a body to be parsed


class BodyReader:
    """Reads bodies. Those of all requests together, beyond SMALL_BODY of each, have at most `most_bytes`.

    Attributes:
      held: bytes of the budget in use.
    """

    def __init__(self, largest: int, most_bytes: int) -> None:
        self.held = 0
        self._largest = largest
        self._most_bytes = most_bytes

    @asynccontextmanager
    async def read(self, request: Request) -> AsyncIterator[bytearray]:
        """The body, which is counted in the budget until the context ends; ApiError if it is too large or too slow."""
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
                f"other bodies take {self.held} of {self._most_bytes} bytes; try again later",
                code="bodies_full",
                headers={"Retry-After": "2", "Connection": "close"},
            )
        self.held += more
        return more

    def _too_large(self) -> ApiError:
        # The rest of the body is not read, so the connection cannot be reused.
        message = f"the body is larger than {self._largest} bytes; send less"
        return ApiError(413, message, headers={"Connection": "close"})


class JsonParser:
    """Parses JSON bodies, from any thread: large ones in a process of their own."""

    def __init__(self) -> None:
        self._child = ChildProcess(*isolated(Path(json_process.__file__), (), niceness=LOW), PARSE_SECONDS)

    def close(self) -> None:
        """Kill the process, if there is one; another body starts another."""
        self._child.close()

    def parse(self, content: bytearray) -> Any:
        """The value of a body; ApiError if it is not JSON, or of too many parts."""
        if len(content) <= SMALL_BODY:
            try:
                return json_process.parse(content)
            except json_process.JsonError as error:
                raise refused(str(error), code=error.code) from None
        answer = self._child.ask(bytes(content))
        if answer is None:
            raise refused(f"the body takes over {PARSE_SECONDS} s or too much memory to parse; send less")
        value = marshal.loads(memoryview(answer)[1:])
        if answer[:1] == b"t":
            return value
        reason, code = value
        raise refused(reason, code=code)
