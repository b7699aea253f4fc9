"""uvicorn's connection, which receives little at a time, and ends a request with an invalid body in one way."""

from __future__ import annotations

import asyncio
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

RECEIVED_BYTES = 4 << 10  # parsed at a time: chunks of one byte, the slowest, take about 5 ms


class Connection(asyncio.BufferedProtocol):
    """A connection of which the event loop receives RECEIVED_BYTES at a time, between which it serves other connections.

    Its parser, h11, limits heads to 16 KB, and also reads the body of a request that offers to switch protocols, like every
    first request of Java's HttpClient.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        self._received = bytearray(RECEIVED_BYTES)
        self._http = _Http(*args, **options)
        for event in ("connection_made", "connection_lost", "pause_writing", "resume_writing"):
            setattr(self, event, getattr(self._http, event))

    def get_buffer(self, sizehint: int) -> bytearray:
        return self._received

    def buffer_updated(self, nbytes: int) -> None:
        http = self._http
        http.data_received(bytes(self._received[:nbytes]))
        if not http.flow.read_paused:  # uvloop would receive 32 times in a row
            http.flow.pause_reading()
            http.loop.call_soon(http.flow.resume_reading)


class _Http(H11Protocol):
    def send_400_response(self, msg: str) -> None:
        """Called for an invalid request, whose head the application may have got: then it cannot respond any more."""
        if self.cycle is not None:
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            super().send_400_response(msg)
        else:
            self.transport.abort()
