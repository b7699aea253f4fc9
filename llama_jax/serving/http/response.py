"""The response to a completion or a chat: JSON, complete or as chunks of a stream, until the client disconnects.

Tokens come from the engine's thread. It wakes the event loop once per iteration, not per token.
"""

from __future__ import annotations

import asyncio
import json
import time
import uuid
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from json.encoder import encode_basestring_ascii as quoted  # ASCII: some clients split lines at other characters as well
from typing import Any, TypeVar

from starlette.types import Receive, Scope, Send

from llama_jax.serving.grammar import GrammarConstraint
from llama_jax.serving.http.completion_choice import Choice, Delta, PlacedToken, TokenNames, ToolCall
from llama_jax.serving.http.errors import ApiError, DisconnectedError, refused, shutting_down
from llama_jax.serving.http.metrics import ServerMetrics
from llama_jax.serving.http.request_schema import ApiRequest
from llama_jax.serving.requests import FinishReason, GenerationRequest, ScoredToken, Ticket, Update

T = TypeVar("T")
DONE = b"data: [DONE]\n\n"
compact = json.JSONEncoder(separators=(",", ":")).encode


def event(content: dict[str, Any]) -> bytes:
    """One event of a stream."""
    return b"data: " + compact(content).encode() + b"\n\n"


@dataclass
class WholeChoice:
    """All parts of a choice so far; `logprobs` as returned by `ResponseFormat.logprobs`."""

    texts: list[str] = field(default_factory=list)
    logprobs: dict[str, list[str]] = field(default_factory=dict)
    calls: list[ToolCall] = field(default_factory=list)


class ResponseFormat(ABC):
    """The format of a response. Log-probabilities are written without dictionaries, which would take three times as long.

    Attributes:
      opening, closing: JSON before and after the text of a chunk.
      closing_fields: fields of log-probabilities that are not lists.

    Args:
      model: name of the model in the response.
    """

    id_prefix: str
    object: str
    chunk_object: str
    opening: str
    closing: str
    closing_fields = ""

    def __init__(self, request: ApiRequest, model: str, names: TokenNames) -> None:
        self._fixed = {"id": f"{self.id_prefix}-{uuid.uuid4().hex}", "created": int(time.time()), "model": model}
        self._names = names
        self._scored = request.alternatives is not None
        self._head = "data: " + compact(self._fixed | {"object": self.chunk_object})[:-1] + ',"choices":[{"index":'
        self._end = "}\n\n" if request.usage is None else ',"usage":null}\n\n'
        self._tail = self.closing + ',"logprobs":null,"finish_reason":null}]' + self._end

    def opening_event(self, index: int) -> bytes:
        """The events before the first chunk of a choice."""
        return b""

    def delta_event(self, index: int, delta: Delta, finish: str | None, usage: dict[str, Any] | None) -> bytes:
        """The new part of a choice, as an event."""
        head = f"{self._head}{index}{self.opening}{quoted(delta.text)}"
        if delta.calls:
            head += ',"tool_calls":' + json.dumps([{"index": i} | call.as_dict() for i, call in enumerate(delta.calls)])
        if finish is None and not self._scored and usage is None:
            return (head + self._tail).encode()
        logprobs = self._logprobs_object(self.logprobs(delta.scored))
        end = self._end if usage is None else f',"usage":{json.dumps(usage)}}}\n\n'
        return f'{head}{self.closing},"logprobs":{logprobs},"finish_reason":{json.dumps(finish)}}}]{end}'.encode()

    def usage_event(self, usage: dict[str, Any]) -> bytes:
        """The total usage, as an event without choices."""
        return event(self._fixed | {"object": self.chunk_object, "choices": [], "usage": usage})

    def response_parts(
        self, choices: Sequence[WholeChoice], finishes: Sequence[str | None], usage: dict[str, Any]
    ) -> Iterator[bytes]:
        """The whole response, in one part per choice."""
        before = compact(self._fixed | {"object": self.object})[:-1] + ',"choices":['
        for i, (choice, finish) in enumerate(zip(choices, finishes, strict=True)):
            content = compact({"index": i, **self.content("".join(choice.texts), choice.calls)})[:-1]
            lists = {name: ",".join(choice.logprobs.get(name, ())) for name in self.logprobs([])}
            after = f'],"usage":{compact(usage)}}}' if i == len(choices) - 1 else ""
            logprobs = self._logprobs_object(lists)
            yield f'{before}{content},"logprobs":{logprobs},"finish_reason":{json.dumps(finish)}}}{after}'.encode()
            before = ","

    def _logprobs_object(self, lists: Mapping[str, str]) -> str:
        if not self._scored:
            return "null"
        return "{" + ",".join([f'"{name}":[{elements}]' for name, elements in lists.items()]) + self.closing_fields + "}"

    @abstractmethod
    def logprobs(self, scored: Sequence[PlacedToken]) -> dict[str, str]:
        """Log-probabilities: for each of their lists the elements as JSON."""

    @abstractmethod
    def content(self, text: str, calls: Sequence[ToolCall]) -> dict[str, Any]:
        """The field of a choice that holds its text."""


class CompletionFormat(ResponseFormat):
    """The format of `/v1/completions`."""

    id_prefix = "cmpl"
    object = chunk_object = "text_completion"
    opening, closing = ',"text":', ""

    def logprobs(self, scored: Sequence[PlacedToken]) -> dict[str, str]:
        names = self._names

        def top(token: ScoredToken) -> str:
            if token.logprob is None:
                return "null"
            logprobs = {
                names(i)[0]: _format_number(logprob) for i, logprob in ((token.id, token.logprob), *token.alternatives)
            }
            return "{" + ",".join([f"{name}:{logprob}" for name, logprob in logprobs.items()]) + "}"

        return {
            "tokens": ",".join([names(placed.token.id)[0] for placed in scored]),
            "token_logprobs": ",".join([_format_number(placed.token.logprob) for placed in scored]),
            "top_logprobs": ",".join([top(placed.token) for placed in scored]),
            "text_offset": ",".join([str(placed.offset) for placed in scored]),
        }

    def content(self, text: str, calls: Sequence[ToolCall]) -> dict[str, Any]:
        return {"text": text}


class ChatFormat(ResponseFormat):
    """The format of `/v1/chat/completions`."""

    id_prefix = "chatcmpl"
    object, chunk_object = "chat.completion", "chat.completion.chunk"
    opening, closing = ',"delta":{"content":', "}"
    closing_fields = ',"refusal":null'

    def opening_event(self, index: int) -> bytes:
        delta = '{"role":"assistant","content":""}'
        return f'{self._head}{index},"delta":{delta},"logprobs":null,"finish_reason":null}}]{self._end}'.encode()

    def logprobs(self, scored: Sequence[PlacedToken]) -> dict[str, str]:
        def fields(token: int, logprob: float | None) -> str:
            name, content = self._names(token)
            return f'"token":{name},"logprob":{_format_number(logprob)},"bytes":{content}'

        def top(token: ScoredToken) -> str:
            return ",".join([f"{{{fields(*alternative)}}}" for alternative in token.alternatives])

        tokens = [placed.token for placed in scored]
        content = [f'{{{fields(token.id, token.logprob)},"top_logprobs":[{top(token)}]}}' for token in tokens]
        return {"content": ",".join(content)}

    def content(self, text: str, calls: Sequence[ToolCall]) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": text, "refusal": None}
        if calls:
            message |= {"content": text or None, "tool_calls": [call.as_dict() for call in calls]}
        return {"message": message}


def _format_number(logprob: float | None) -> str:
    """The log-probability as JSON: values below -9999, such as minus infinity, become -9999, as in OpenAI's API."""
    return "null" if logprob is None else repr(logprob if logprob > -9999.0 else -9999.0)


STREAM_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # without this nginx buffers a stream
]

SLICE = 64  # tokens written at once, in a millisecond or two with log-probabilities, before other tasks run


async def unless_disconnected(work: Coroutine[Any, Any, T], receive: Receive) -> T:
    """The result of a coroutine; it is cancelled, with a DisconnectedError, if the client disconnects earlier."""
    task = asyncio.ensure_future(work)
    task.add_done_callback(lambda task: task.cancelled() or task.exception())  # so that asyncio does not log it

    async def until_disconnected() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    disconnected = asyncio.ensure_future(until_disconnected())
    try:
        await asyncio.wait([task, disconnected], return_when=asyncio.FIRST_COMPLETED)
        if disconnected.done():  # receive() does not report it again
            raise DisconnectedError
        return task.result()
    finally:
        task.cancel()
        disconnected.cancel()


class UpdateStream:
    """The choices of one HTTP request: their tickets, and the updates that have not been taken yet.

    Updates of a choice that have not been taken are merged, so that a slow client costs only the memory of its tokens.
    """

    def __init__(self, closed: Callable[[UpdateStream], None]) -> None:
        self.tickets: list[Ticket] = []
        self._updates: dict[int, Update] = {}
        self._has_updates = asyncio.Event()
        self._limit: asyncio.TimerHandle | None = None
        self._closed = closed

    async def next(self) -> dict[int, Update]:
        """The new updates, by choice."""
        await self._has_updates.wait()
        self._has_updates.clear()
        updates, self._updates = self._updates, {}
        return updates

    def put(self, index: int, update: Update) -> None:
        """Store an update that the engine has delivered."""
        merged = self._updates.setdefault(index, update)
        if merged is not update:
            merged.tokens += update.tokens
            merged.prompt = merged.prompt if update.prompt is None else update.prompt
            merged.cached = max(merged.cached, update.cached)
            merged.finish, merged.error, merged.ended_by = update.finish, update.error, update.ended_by
        self._has_updates.set()

    def end(self, reason: FinishReason) -> None:
        """End every choice that has not ended, without the engine."""
        for index in range(len(self.tickets)):
            if index not in self._updates or self._updates[index].finish is None:
                self.put(index, Update(finish=reason))

    def end_after(self, seconds: float) -> None:
        """After this time, end the choices that have not ended as "timeout", in any stage."""
        self._limit = asyncio.get_running_loop().call_later(seconds, self.end, "timeout")

    def close(self) -> None:
        """End the response: cancel the requests that are still running."""
        if self._limit is not None:
            self._limit.cancel()
        for ticket in self.tickets:
            ticket.cancel()
        self._closed(self)


class EngineBridge:
    """All update streams of an engine. Everything here runs on the event loop, except functions that the engine calls."""

    def __init__(self, engine: Any, loop: asyncio.AbstractEventLoop) -> None:
        self.open: set[UpdateStream] = set()
        self._engine = engine
        self.loop = loop
        self._arrived: deque[tuple[UpdateStream, int, Update]] = deque()
        engine.after_iteration = self.wake

    def submit(self, requests: Sequence[GenerationRequest]) -> UpdateStream:
        """Submit all requests or none to the engine; `UpdateStream.close` must be called at the end.

        Raises:
          see `Engine.submit`.
        """
        self._engine.check_room(len(requests))  # otherwise admitted ones would fill the queue until they are withdrawn
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
        """End every response as cancelled, without the engine, which may be in a long step."""
        for stream in list(self.open):
            stream.end("cancelled")

    def wake(self) -> None:
        """Wake the loop to process delivered updates. From any thread; the engine calls it after each iteration."""
        if self._arrived:
            with suppress(RuntimeError):  # the loop is closed
                self.loop.call_soon_threadsafe(self._flush)

    def _deliver(self, stream: UpdateStream, index: int, update: Update) -> None:
        self._arrived.append((stream, index, update))

    def _flush(self) -> None:
        for _ in range(len(self._arrived)):  # only those that have arrived by now, so that other tasks can run
            stream, index, update = self._arrived.popleft()
            stream.put(index, update)


@dataclass(eq=False)
class GeneratedResponse:
    """A response, as an ASGI application: the engine's output for a request, streamed or sent when it is complete.

    Attributes:
      prompts: tokens of each prompt; choices i * n to i * n + n - 1 continue prompt i.
      constraints: constraint of each choice; empty without constraints.
      arrived: time of arrival, by `time.monotonic`.
    """

    body: ApiRequest
    format: ResponseFormat
    prompts: Sequence[Sequence[int]]
    choices: list[Choice]
    constraints: Sequence[GrammarConstraint]
    updates: UpdateStream
    metrics: ServerMetrics
    arrived: float

    def __post_init__(self) -> None:
        self._open = len(self.choices)
        self._last = [0.0] * len(self.choices)  # time of the last tokens of each choice
        self._since = 0  # tokens written since other tasks could run

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Respond until the client disconnects, streamed or not, also while the request waits in the queue."""
        try:
            with suppress(DisconnectedError):
                await unless_disconnected(self._stream(send) if self.body.stream else self._whole(send), receive)
                self.metrics.request_seconds.observe(time.monotonic() - self.arrived)
        finally:
            self.updates.close()

    async def _next(self, write: Callable[[int, Update], None]) -> None:
        """Write the new updates, in slices between which other tasks run."""
        for i, update in (await self.updates.next()).items():
            self._observe(i, update)
            for part in in_slices(update):
                write(i, part)
                self._since += len(part.tokens) + len(part.prompt or ())
                if self._since >= SLICE:
                    self._since = 0
                    await asyncio.sleep(0)

    async def _whole(self, send: Send) -> None:
        choices = [WholeChoice() for _ in self.choices]

        def write(index: int, update: Update) -> None:
            choice, delta = choices[index], self._take(index, update)
            choice.texts.append(delta.text)
            choice.calls += delta.calls
            if delta.scored:  # written early, so that little work is left after the last token
                for name, elements in self.format.logprobs(delta.scored).items():
                    choice.logprobs.setdefault(name, []).append(elements)

        while self._open:
            await self._next(write)
        bodies = []
        for body in self.format.response_parts(choices, [choice.finish for choice in self.choices], self._usage()):
            bodies.append(body)
            await asyncio.sleep(0)
        headers = [(b"content-type", b"application/json"), (b"content-length", str(sum(map(len, bodies))).encode())]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        for n, body in enumerate(bodies, 1):
            await send({"type": "http.response.body", "body": body, "more_body": n < len(bodies)})

    async def _stream(self, send: Send) -> None:
        usage = self.body.usage
        events: list[bytes] = []
        begun: set[int] = set()
        started = False

        def write(index: int, update: Update) -> None:
            before = self.choices[index].finish
            delta = self._take(index, update)
            finish = self.choices[index].finish
            if not delta.text and not delta.scored and (finish is None or before is not None):
                return  # nothing can be shown yet
            if index not in begun:
                begun.add(index)
                events.append(self.format.opening_event(index))
            events.append(self.format.delta_event(index, delta, finish, self._usage() if usage == "each" else None))

        try:
            while self._open:
                events.clear()
                await self._next(write)
                if not self._open:
                    events += [self.format.usage_event(self._usage())] * (usage is not None) + [DONE]
                if events:
                    if not started:
                        await send({"type": "http.response.start", "status": 200, "headers": STREAM_HEADERS})
                        started = True
                    await send({"type": "http.response.body", "body": b"".join(events), "more_body": self._open > 0})
        except ApiError as error:
            if not started:
                raise
            await send({"type": "http.response.body", "body": event(error.body()), "more_body": False})

    def _observe(self, index: int, update: Update) -> None:
        """Record the times at which a choice gets tokens."""
        if update.tokens and self.choices[index].finish is None:
            now, last = time.monotonic(), self._last[index]
            if last:
                self.metrics.between_tokens.observe((now - last) / len(update.tokens), len(update.tokens))
            else:
                self.metrics.first_token.observe(now - self.arrived)
            self._last[index] = now

    def _take(self, index: int, update: Update) -> Delta:
        """Advance a choice; ApiError if it failed."""
        choice = self.choices[index]
        finished = choice.finish is not None
        if not finished:
            _check_finish(update)
        delta = choice.take(update)
        if choice.finish is not None and not finished:
            self._open -= 1
            if update.finish is None:
                self.updates.tickets[index].cancel()
            if self.constraints and (error := self.constraints[index].error) is not None:
                constrained_by = "tool_choice" if self.body.format is None else "response_format"
                raise refused(f"the grammar could not be followed to its end: {error}", constrained_by)
        return delta

    def _usage(self) -> dict[str, Any]:
        """The usage so far: each prompt once, and all generated tokens, including stop tokens."""
        prompt = sum(map(len, self.prompts))
        generated = sum(choice.count for choice in self.choices)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": generated,
            "total_tokens": prompt + generated,
            "prompt_tokens_details": {"cached_tokens": sum(choice.cached for choice in self.choices[:: self.body.n])},
        }


def in_slices(update: Update) -> Sequence[Update]:
    """An update in parts of at most SLICE tokens: a scored prompt, or the backlog of a slow client, may be long."""
    prompt, tokens = update.prompt or [], update.tokens
    if len(prompt) + len(tokens) <= SLICE:
        return [update]
    first = [Update(prompt=prompt[at : at + SLICE], cached=update.cached) for at in range(0, len(prompt), SLICE)]
    then = [Update(tokens=tokens[at : at + SLICE], cached=update.cached) for at in range(0, len(tokens), SLICE)]
    return [*first, *then, replace(update, prompt=None, tokens=[])]


def _check_finish(update: Update) -> None:
    """Raise ApiError for a request that did not end normally."""
    errors = {
        "failed": ApiError(500, f"the engine failed: {update.error}", code="engine_failed"),
        "timeout": ApiError(504, "the request exceeded this server's time limit (--timeout)", code="timeout"),
        "cancelled": shutting_down(),
    }
    if update.finish in errors:
        raise errors[update.finish]
