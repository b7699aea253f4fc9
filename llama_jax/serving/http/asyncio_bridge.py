"""The bridge between the engine's thread and the event loop, which is woken once per turn, not per token."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from llama_jax.serving.requests import FinishReason, GenerationRequest, Ticket, Update


class UpdateStream:
    """The choices of one HTTP request: their tickets, and the updates that have not been taken yet.

    Updates of a choice that have not been taken are merged, so that a slow client costs only the memory of its tokens.
    """

    def __init__(self, closed: Callable[[UpdateStream], None]) -> None:
        self.tickets: list[Ticket] = []
        self._updates: dict[int, Update] = {}
        self._waiter: asyncio.Future[None] | None = None
        self._limit: asyncio.TimerHandle | None = None
        self._closed = closed

    async def next(self) -> dict[int, Update]:
        """What is new, by choice."""
        while not self._updates:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        updates, self._updates = self._updates, {}
        return updates

    def put(self, index: int, update: Update) -> None:
        """Store what the engine has delivered."""
        merged = self._updates.setdefault(index, update)
        if merged is not update:
            merged.tokens += update.tokens
            merged.prompt = merged.prompt if update.prompt is None else update.prompt
            merged.cached = max(merged.cached, update.cached)
            merged.finish, merged.error, merged.ended_by = update.finish, update.error, update.ended_by
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def end(self, reason: FinishReason) -> None:
        """End every choice that has not ended, without the engine."""
        for index in range(len(self.tickets)):
            if index not in self._updates or self._updates[index].finish is None:
                self.put(index, Update(finish=reason))

    def end_after(self, seconds: float) -> None:
        """End as "timeout" what has not ended by then, in any stage."""
        self._limit = asyncio.get_running_loop().call_later(seconds, self.end, "timeout")

    def close(self) -> None:
        """End the response: cancel the requests that still run."""
        if self._limit is not None:
            self._limit.cancel()
        for ticket in self.tickets:
            ticket.cancel()
        self._closed(self)


class EngineBridge:
    """All update streams of an engine. Everything here runs on the event loop, except what the engine calls."""

    def __init__(self, engine: Any, loop: asyncio.AbstractEventLoop) -> None:
        self.open: set[UpdateStream] = set()
        self._engine = engine
        self.loop = loop
        self._arrived: deque[tuple[UpdateStream, int, Update]] = deque()
        engine.after_turn = self.wake

    def submit(self, requests: Sequence[GenerationRequest]) -> UpdateStream:
        """Hand requests to the engine, all or none; `UpdateStream.close` must be called in the end.

        Raises:
          what `Engine.submit` raises.
        """
        self._engine.check_room(len(requests))  # otherwise those admitted would fill the queue until they are withdrawn
        stream = UpdateStream(self.open.discard)
        try:
            for i, request in enumerate(requests):
                stream.tickets.append(self._engine.submit(request, partial(self._deliver, stream, i)))
        except BaseException:
            stream.close()
            raise
        self.open.add(stream)
        return stream

    def cancel(self) -> None:
        """End every response as cancelled without the engine, which is in a long step."""
        for stream in list(self.open):
            stream.end("cancelled")

    def wake(self) -> None:
        """Wake the loop to take what was delivered. From any thread; the engine calls it after each turn."""
        if self._arrived:
            with suppress(RuntimeError):  # the loop is closed
                self.loop.call_soon_threadsafe(self._flush)

    def _deliver(self, stream: UpdateStream, index: int, update: Update) -> None:
        self._arrived.append((stream, index, update))

    def _flush(self) -> None:
        for _ in range(len(self._arrived)):  # no more than have arrived by now, so that other tasks can run
            stream, index, update = self._arrived.popleft()
            stream.put(index, update)
