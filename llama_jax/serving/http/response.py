"""The response to a completion or a chat: its JSON, whole or as chunks of a stream, until the client disconnects."""

from __future__ import annotations

import asyncio
import json
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from json.encoder import encode_basestring_ascii as quoted  # ASCII: some clients split lines at other characters as well
from typing import Any, NamedTuple

from starlette.types import Receive, Scope, Send

from llama_jax.serving.http.completion_choice import Delta, PlacedToken, TokenNames, of_chat, of_completion
from llama_jax.serving.http.errors import ApiError, refused
from llama_jax.serving.http.service import Service, Work
from llama_jax.serving.http.tools import Call
from llama_jax.serving.requests import Update

DONE = b"data: [DONE]\n\n"
compact = json.JSONEncoder(separators=(",", ":")).encode


def event(content: dict[str, Any]) -> bytes:
    """One event of a stream."""
    return b"data: " + compact(content).encode() + b"\n\n"


class Written(NamedTuple):
    """A choice that has ended.

    Attributes:
      logprobs: of all its parts, as `Format.logprobs` gives them.
    """

    text: str
    logprobs: Mapping[str, Sequence[str]]
    finish: str
    calls: Sequence[Call] = ()


class Format(ABC):
    """The format of a response.

    Args:
      fixed: "id", "created" and "model".
      scored: whether log-probabilities are wanted.
      usage: whether chunks have the field.
    """

    object: str
    of_chunk: str

    def __init__(self, fixed: dict[str, Any], names: TokenNames, *, scored: bool, usage: bool) -> None:
        self._fixed = fixed
        self._names = names
        self._scored = scored
        self._usage = usage
        fields = fixed | {"object": self.of_chunk}
        self._head = "data: " + compact(fields)[:-1] + ',"choices":[{"index":'
        self._end = ',"usage":null}\n\n' if usage else "}\n\n"
        self._tail = self._closing + ',"logprobs":null,"finish_reason":null}]' + self._end

    _opening: str
    _closing: str

    def begin(self, index: int) -> bytes:
        """What comes before the first chunk of a choice."""
        return b""

    def chunk(self, index: int, delta: Delta, finish: str | None, usage: dict[str, Any] | None) -> bytes:
        """What is new in a choice, as an event."""
        more = self.calls(delta.calls) if delta.calls else ""
        head = f"{self._head}{index}{self._opening}{quoted(delta.text)}{more}"
        if finish is None and not self._scored and usage is None:
            return (head + self._tail).encode()
        logprobs = self._object(self.logprobs(delta.scored)) if self._scored else "null"
        reason = "null" if finish is None else f'"{finish}"'
        end = self._end if usage is None else f',"usage":{json.dumps(usage)}}}\n\n'
        return f'{head}{self._closing},"logprobs":{logprobs},"finish_reason":{reason}}}]{end}'.encode()

    def last(self, usage: dict[str, Any]) -> bytes:
        """The total usage, as an event without choices."""
        return event(self._fixed | {"object": self.of_chunk, "choices": [], "usage": usage})

    def whole(self, choices: Sequence[Written], usage: dict[str, Any]) -> Iterator[bytes]:
        """The whole response, in a part for each choice."""
        before = compact(self._fixed | {"object": self.object})[:-1] + ',"choices":['
        for i, choice in enumerate(choices):
            content = compact({"index": i, **self.content(choice)})[:-1]
            lists = {name: ",".join(parts) for name, parts in choice.logprobs.items()}
            logprobs = self._object(lists) if self._scored else "null"
            after = f'],"usage":{compact(usage)}}}' if i == len(choices) - 1 else ""
            yield f'{before}{content},"logprobs":{logprobs},"finish_reason":{quoted(choice.finish)}}}{after}'.encode()
            before = ","

    def _object(self, lists: Mapping[str, str]) -> str:
        return "{" + ",".join([f'"{name}":[{elements}]' for name, elements in lists.items()]) + self._others + "}"

    _others = ""  # fields of log-probabilities that are no lists

    @abstractmethod
    def logprobs(self, scored: Sequence[PlacedToken]) -> dict[str, str]:
        """Log-probabilities: the elements of each list that they consist of, as JSON."""

    @abstractmethod
    def content(self, choice: Written) -> dict[str, Any]:
        """The field of a choice that holds its text."""

    def calls(self, calls: Sequence[Call]) -> str:
        """What follows the text in a chunk with tool calls."""
        return ',"tool_calls":' + json.dumps([{"index": i} | call.as_dict() for i, call in enumerate(calls)])


class CompletionFormat(Format):
    object = of_chunk = "text_completion"
    _opening, _closing = ',"text":', ""

    def logprobs(self, scored: Sequence[PlacedToken]) -> dict[str, str]:
        return of_completion(self._names, scored)

    def content(self, choice: Written) -> dict[str, Any]:
        return {"text": choice.text}


class ChatFormat(Format):
    object, of_chunk = "chat.completion", "chat.completion.chunk"
    _opening, _closing = ',"delta":{"content":', "}"
    _others = ',"refusal":null'

    def begin(self, index: int) -> bytes:
        delta = '{"role":"assistant","content":""}'
        return f'{self._head}{index},"delta":{delta},"logprobs":null,"finish_reason":null}}]{self._end}'.encode()

    def logprobs(self, scored: Sequence[PlacedToken]) -> dict[str, str]:
        return of_chat(self._names, scored)

    def content(self, choice: Written) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": choice.text, "refusal": None}
        if choice.calls:
            message |= {"content": choice.text or None, "tool_calls": [call.as_dict() for call in choice.calls]}
        return {"message": message}


STREAM_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # without this nginx buffers a stream
]

SLICE = 64  # tokens that are written at once, in a millisecond or two with log-probabilities; then other tasks run


class Answer:
    """A response, as an ASGI application: the engine's output for a request, streamed or sent when it is complete."""

    def __init__(self, service: Service, work: Work, format: Format) -> None:
        self._service = service
        self._work = work
        self._format = format
        self._open = len(work.choices)
        self._last = [0.0] * len(work.choices)  # when each choice last got tokens
        self._since = 0  # tokens that were written since other tasks could run

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        watching = asyncio.create_task(self._watch(receive))
        try:
            await (self._stream(send) if self._work.asked.stream else self._whole(send))
            if not self._work.exchange.left:
                self._service.metrics.whole.observe(time.monotonic() - self._work.arrived)
        finally:
            watching.cancel()
            self._work.exchange.close()

    async def _watch(self, receive: Receive) -> None:
        """Stop as soon as the client disconnects, streamed or not, also while the request waits in the queue."""
        while (await receive())["type"] != "http.disconnect":
            pass
        self._work.exchange.leave()

    async def _whole(self, send: Send) -> None:
        choices, exchange = self._work.choices, self._work.exchange
        texts: list[list[str]] = [[] for _ in choices]
        logprobs: list[dict[str, list[str]]] = [{name: [] for name in self._format.logprobs([])} for _ in choices]
        calls: list[list[Any]] = [[] for _ in choices]
        while self._open:
            updates = await exchange.next()
            if not updates:
                return
            for i, update in updates.items():
                self._observe(i, update)
                for part in in_slices(update):
                    delta = self._take(i, part)
                    texts[i].append(delta.text)
                    calls[i] += delta.calls
                    if delta.scored:  # written as it comes, so that little is left to be done when the last token has come
                        for name, elements in self._format.logprobs(delta.scored).items():
                            logprobs[i][name].append(elements)
                    if self._due(part):
                        await asyncio.sleep(0)
        parts = zip(texts, logprobs, choices, calls, strict=True)
        written = [Written("".join(text), lists, choice.finish or "", called) for text, lists, choice, called in parts]
        bodies = []
        for body in self._format.whole(written, self._usage()):
            bodies.append(body)
            await asyncio.sleep(0)
        headers = [(b"content-type", b"application/json"), (b"content-length", str(sum(map(len, bodies))).encode())]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        for n, body in enumerate(bodies, 1):
            await send({"type": "http.response.body", "body": body, "more_body": n < len(bodies)})

    async def _stream(self, send: Send) -> None:
        exchange, usage = self._work.exchange, self._work.asked.usage
        begun: set[int] = set()
        started = False
        try:
            while self._open:
                updates = await exchange.next()
                if not updates:
                    return
                events = []
                for i, update in updates.items():
                    self._observe(i, update)
                    for part in in_slices(update):
                        new = self._events(i, part)
                        if new and i not in begun:
                            begun.add(i)
                            events.append(self._format.begin(i))
                        events += new
                        if self._due(part):
                            await asyncio.sleep(0)
                if not self._open:
                    events += [self._format.last(self._usage())] * (usage is not None) + [DONE]
                if events:
                    if not started:
                        await send({"type": "http.response.start", "status": 200, "headers": STREAM_HEADERS})
                        started = True
                    await send({"type": "http.response.body", "body": b"".join(events), "more_body": self._open > 0})
        except ApiError as error:
            if not started:
                raise
            await send({"type": "http.response.body", "body": event(error.body()), "more_body": False})

    def _events(self, index: int, update: Update) -> list[bytes]:
        """The events of an update: one, or none if nothing can be shown yet."""
        before = self._work.choices[index].finish
        delta = self._take(index, update)
        finish = self._work.choices[index].finish
        if not delta.text and not delta.scored and (finish is None or before is not None):
            return []
        usage = self._usage() if self._work.asked.usage == "each" else None
        return [self._format.chunk(index, delta, finish, usage)]

    def _due(self, part: Update) -> bool:
        """Whether, after this part, SLICE tokens have been written since other tasks could run."""
        self._since += len(part.tokens) + len(part.prompt or ())
        if self._since < SLICE:
            return False
        self._since = 0
        return True

    def _observe(self, index: int, update: Update) -> None:
        """Record when a choice gets tokens."""
        if update.tokens and self._work.choices[index].finish is None:
            now, last, metrics = time.monotonic(), self._last[index], self._service.metrics
            if last:
                metrics.between_tokens.observe((now - last) / len(update.tokens), len(update.tokens))
            else:
                metrics.first_token.observe(now - self._work.arrived)
            self._last[index] = now

    def _take(self, index: int, update: Update) -> Any:
        """Advance a choice; ApiError if it failed."""
        choice, work = self._work.choices[index], self._work
        finished = choice.finish is not None
        if not finished:
            _check(update)
        delta = choice.take(update)
        if choice.finish is not None and not finished:
            self._open -= 1
            if update.finish is None:
                work.exchange.tickets[index].cancel()
            if work.constraints and work.constraints[index].error is not None:
                asked_by = "tool_choice" if work.asked.format is None else "response_format"
                raise refused(f"the grammar cannot be followed further: {work.constraints[index].error}", asked_by)
        return delta

    def _usage(self) -> dict[str, Any]:
        """Tokens so far: each prompt once, and every generated token of the continuations, including stop tokens."""
        work = self._work
        prompt = sum(map(len, work.prompts))
        made = sum(choice.count for choice in work.choices)
        cached = sum(choice.cached for choice in work.choices[:: work.asked.n])
        return {
            "prompt_tokens": prompt,
            "completion_tokens": made,
            "total_tokens": prompt + made,
            "prompt_tokens_details": {"cached_tokens": cached},
        }


def in_slices(update: Update) -> Sequence[Update]:
    """An update in parts of at most SLICE tokens: a scored prompt, or what a slow client has let gather, may be long."""
    prompt, tokens = update.prompt or [], update.tokens
    if len(prompt) + len(tokens) <= SLICE:
        return [update]
    first = [Update(prompt=prompt[at : at + SLICE], cached=update.cached) for at in range(0, len(prompt), SLICE)]
    then = [Update(tokens=tokens[at : at + SLICE], cached=update.cached) for at in range(0, len(tokens), SLICE)]
    return [*first, *then, replace(update, prompt=None, tokens=[])]


def _check(update: Update) -> None:
    """Raise ApiError for a request that did not end by its text."""
    if update.finish == "failed":
        raise ApiError(500, f"the engine failed: {update.error}", code="engine_failed")
    if update.finish == "timeout":
        raise ApiError(504, "the request took longer than this server allows (--timeout)", code="timeout")
    if update.finish == "cancelled":
        raise ApiError(503, "the server is shutting down; try another one", code="draining", headers={"Retry-After": "5"})
