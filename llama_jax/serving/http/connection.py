"""uvicorn's connection, with limits on the size and time of request heads, and on the time that a client does not read."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from functools import partial
from http import HTTPStatus
from typing import Any

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from llama_jax.serving.http.errors import ApiError

MAX_HEAD_BYTES = 64 << 10  # bytes of a head, or between the chunks of a body
HEAD_SECONDS = 60  # time limit for a client to send a head
FEED = 16 << 10  # bytes that are parsed at once: their heads block the event loop for a few hundredths of a second
UNREAD_SECONDS = 60  # time limit for a client that reads nothing
LINGER_SECONDS = 1  # time in which a rejected client may continue to send


class Connection(HttpToolsProtocol):
    """uvicorn accepts heads of any size and duration: here both are limited, with an error in the usual format.

    uvicorn also waits forever for a client to read. Here a response pauses when the kernel's buffer is full, and if no byte
    is sent for UNREAD_SECONDS, the connection is closed and its request is cancelled.

    A client may send many requests before it reads a response (pipelining): only those in the first FEED bytes are parsed;
    the others follow after all of these have been answered.

    Invalid data is answered with an error after all earlier requests have been answered; uvicorn closes the connection
    immediately.

    Requests with a body that offer to switch protocols (like every first request of Java's HttpClient) are answered, too:
    the parser would treat the bytes after such a head as the other protocol.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._unfed = b""  # received bytes that are parsed after the earlier requests have been answered
        self._unused = 0  # bytes received that belong to neither a finished head nor a body
        self._late: asyncio.TimerHandle | None = None
        self._in_body = False
        self._unread: asyncio.TimerHandle | None = None
        self._running: Any = None  # the cycle of the request that is being answered; uvicorn only knows the last one
        self._refusal: bytes | None = None  # an error response before the connection is closed; no more data is parsed

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        transport.set_write_buffer_limits(high=0)  # pause writing whenever bytes are left in the buffer
        self._expect_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._had_head()
        self._has_read()
        self._unfed = b""
        if self._running is not None:
            _disconnect(self._running)
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._expect_reading(self.transport.get_write_buffer_size())

    def resume_writing(self) -> None:
        self._has_read()
        super().resume_writing()

    def data_received(self, data: bytes) -> None:
        if self._refusal is None:
            self._unfed += data
            self._feed_more()

    def _feed_more(self) -> None:
        """Parse received bytes, until requests wait for the responses to earlier ones."""
        while self._unfed and not self.pipeline and self._refusal is None and not self.transport.is_closing():
            data, self._unfed = self._unfed[:FEED], self._unfed[FEED:]
            self._unset_keepalive_if_required()
            self._unused += len(data)
            try:
                self._feed(data)
            except httptools.HttpParserError:
                self.send_400_response("the request is not HTTP")
                return
            if self._unused > MAX_HEAD_BYTES:
                self._refuse(431, f"the head of the request is larger than {MAX_HEAD_BYTES} bytes; send a smaller one")
        if self._unfed:
            self.flow.pause_reading()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._in_body = False
        self._expect_head()

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._in_body:  # headers after a body (trailers) are ignored
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._had_head()
        self._in_body = True
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._unused = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._unused = 0
        super().on_message_complete()

    def send_400_response(self, msg: str) -> None:
        """Called by uvicorn for an invalid request."""
        self._refuse(400, msg)

    def _expect_head(self) -> None:
        if self._late is None:
            why = f"the head of the request took longer than {HEAD_SECONDS} s"
            self._late = self.loop.call_later(HEAD_SECONDS, self._refuse, 408, why)

    def _had_head(self) -> None:
        self._unused = 0
        if self._late is not None:
            self._late.cancel()
            self._late = None

    def _expect_reading(self, left: int) -> None:
        """Close the connection if this many bytes are still unsent at the time limit; nothing is written meanwhile."""

        def check() -> None:
            now = self.transport.get_write_buffer_size()
            if now < left:
                self._expect_reading(now)
            else:
                self.transport.abort()

        self._unread = self.loop.call_later(UNREAD_SECONDS, check)

    def _has_read(self) -> None:
        if self._unread is not None:
            self._unread.cancel()
            self._unread = None

    def _start_asgi_task(self, cycle: Any, app: Any) -> None:
        self._running = cycle
        super()._start_asgi_task(cycle, app)

    def on_response_complete(self) -> None:
        was_last = not self.pipeline
        super().on_response_complete()
        if was_last:
            self._send_refusal()
        if self._unfed:
            self.flow.pause_reading()  # which uvicorn has just resumed
            if not self.pipeline:
                self.loop.call_soon(self._feed_more)

    def _refuse(self, status: int, message: str) -> None:
        """Send an error response after all earlier requests have been answered, and close the connection."""
        if self.transport.is_closing() or self._refusal is not None:
            return
        body = json.dumps(ApiError(status, message).body()).encode()
        head = f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\ncontent-type: application/json\r\n"
        head += f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
        self._refusal = head.encode() + body
        cycle, running = self.cycle, self._running
        if cycle is not None and cycle.more_body:  # the invalid data is its body, which the application gets no more of
            if cycle is not running:
                self.pipeline.popleft()
            elif not cycle.response_started:
                _disconnect(cycle)
                running = None
        if running is None or running.response_complete:
            self._send_refusal()

    def _send_refusal(self) -> None:
        """Send the error response once, and close after the client has closed, or soon: closing before its bytes are read
        would reset the connection, and the response could be lost.
        """
        if self._refusal and not self.transport.is_closing():
            self.transport.write(self._refusal)
            self._refusal = b""  # further data is discarded
            self.transport.write_eof()
            self.flow.resume_reading()
            self.loop.call_later(LINGER_SECONDS, self.transport.close)

    def _feed(self, data: bytes) -> None:
        while data:
            try:
                self.parser.feed_data(data)
                return
            except httptools.HttpParserUpgrade as upgrade:
                data = data[upgrade.args[0] :]
            framing = [
                name + b": " + value for name, value in self.headers if name in (b"content-length", b"transfer-encoding")
            ]
            if framing:
                self.cycle.more_body = True
                self.parser = httptools.HttpRequestParser(_Resumed(self))
                data = b"\r\n".join([b"POST / HTTP/1.1", *framing, b"", data])


def _disconnect(cycle: Any) -> None:
    """Notify the application that its client has disconnected, as uvicorn does when a connection is lost."""
    if not cycle.response_complete:
        cycle.disconnected = True
    cycle.message_event.set()


class _Resumed:
    """The parser callbacks for the body of a message with an already parsed head, and for the messages after it."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._body_ended = False
        self.on_body = connection.on_body
        for name in ("on_message_begin", "on_url", "on_header", "on_headers_complete"):
            setattr(self, name, partial(self._forward, getattr(connection, name)))

    def on_message_complete(self) -> None:
        self._body_ended = True
        self._connection.on_message_complete()

    def _forward(self, callback: Callable[..., None], *args: bytes) -> None:
        if self._body_ended:
            callback(*args)
