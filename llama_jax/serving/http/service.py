"""The model that a server serves, and how an HTTP request becomes requests to the engine."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeVar

from llama_jax.errors import UserError
from llama_jax.serving.grammar import GrammarConstraint, Grammars
from llama_jax.serving.http.asyncio_bridge import Exchange, Switchboard
from llama_jax.serving.http.completion_choice import Choice, TokenNames
from llama_jax.serving.http.errors import ApiError, refused, shutting_down
from llama_jax.serving.http.json_body import SMALL_BODY, BodyReader, JsonParser
from llama_jax.serving.http.metrics import ServerMetrics
from llama_jax.serving.http.request_schema import (
    USUAL_COMPLETION,
    Asked,
    ChatAsked,
    CompletionAsked,
    Limits,
    chat_fields,
    completion_fields,
)
from llama_jax.serving.http.tools import grammar_of_calls
from llama_jax.serving.requests import BusyError, ClosedError, GenerationRequest
from llama_jax.serving.thread_pool import DaemonThreadPool
from llama_jax.tokenizers import Format, Tokenizer, encode_chat, reply_ends, takes_tools
from llama_jax.tokenizers.chat import Renderer

CHARACTERS_OF_A_TOKEN = 16  # on average, in a prompt that fills the context
SHORT = 4000  # characters or tokens that are converted on the event loop: more would delay other requests
# Threads at most, see `beside_engine`.
TEXT_THREADS = 4  # for texts and chats of up to SMALL_BODY characters
LONG_THREADS = 2  # for longer ones, and the bodies that they come in: they take seconds, and the others do not wait for them
LONG_WAITING = 32  # further requests are refused
BODIES = 4  # times the largest body, that all bodies may have together
GRAMMAR_THREADS = 2
GRAMMARS_WAITING = 16  # further requests are refused
IDS_AT_ONCE = 1 << 14  # ids that are written as JSON while other threads wait
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Served:
    """A model as clients see it.

    Attributes:
      name: the name in requests.
      tokenizer: its vocabulary.
      chat: how messages are put together; None if it is not a chat model.
      no_chat: why not.
      adapters: the names in requests of the model with each adapter, by adapter number.
    """

    name: str
    tokenizer: Tokenizer
    chat: Format | None
    no_chat: str = ""
    adapters: tuple[str, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the model, and of the model with each adapter."""
        return (self.name, *self.adapters)


@dataclass(frozen=True)
class Work:
    """An HTTP request that the engine has taken.

    Attributes:
      prompts: tokens of each prompt; choices i * n to i * n + n - 1 continue prompt i.
      constraints: of each choice, where there are any.
    """

    asked: Asked
    prompts: Sequence[Sequence[int]]
    choices: list[Choice]
    constraints: Sequence[GrammarConstraint]
    exchange: Exchange
    arrived: float


@dataclass
class Service:
    """Everything that the routes share; made by `connect`, on the event loop.

    Attributes:
      seconds: limit for a request, 0 for no limit.
      wedged_after: seconds without a turn of a busy engine after which `/health` fails.
      draining: no new requests are accepted.
    """

    engine: Any
    served: Served
    limits: Limits
    seconds: float
    wedged_after: float
    switchboard: Switchboard
    metrics: ServerMetrics
    names: TokenNames
    created: int = field(default_factory=lambda: int(time.time()))
    draining: bool = False
    failure: str | None = None
    _busy_since: float = 0.0

    def __post_init__(self) -> None:
        tokenizer, chat = self.served.tokenizer, self.served.chat
        self.completion_fields = completion_fields(self.limits)
        self.chat_fields = chat_fields(self.limits)
        self._ends = tokenizer.stop_ids
        self._chat_ends = () if chat is None else reply_ends(tokenizer, chat)
        self._grammars = Grammars(tokenizer, self.limits.vocab_size, self._ends)
        same = set(self._ends) == set(self._chat_ends)
        self._chat_grammars = self._grammars if same else Grammars(tokenizer, self.limits.vocab_size, self._chat_ends)
        self._renderer = Renderer()
        self._json = JsonParser()
        self._texts = DaemonThreadPool("texts", beside_engine(TEXT_THREADS))
        self._long_texts = DaemonThreadPool("long texts", beside_engine(LONG_THREADS), LONG_WAITING)
        self._compiling = DaemonThreadPool("grammars", beside_engine(GRAMMAR_THREADS), GRAMMARS_WAITING)
        self.metrics.compiling = lambda: self.compiling
        self._ending: asyncio.Future[None] = self.switchboard.loop.create_future()
        self.bodies = BodyReader(self.limits.largest_body, BODIES * self.limits.largest_body)

    @property
    def compiling(self) -> int:
        """Grammars that wait for a thread."""
        return self._compiling.waiting

    def check_model(self, name: str | None) -> None:
        """Raise ApiError (404) for a model that is not served."""
        if name not in (None, *self.served.names):
            verb = "is" if len(self.served.names) == 1 else "are"
            message = f"model={name!r} is not served here; {', '.join(map(repr, self.served.names))} {verb}, or leave it out"
            raise ApiError(404, message, param="model", code="model_not_found")

    def check_open(self) -> None:
        """Raise ApiError where no work is accepted any more (503), or none for now (429)."""
        if self.draining or self.failure is not None:
            raise shutting_down()
        with _as_api_errors():
            self.engine.check_room(1 + self.compiling)

    def begin_drain(self) -> None:
        """Accept no new requests; those that the engine has not taken yet are refused."""
        self.draining = True
        self.bodies.end()
        if not self._ending.done():
            self._ending.set_result(None)

    async def unless_ended(self, working: Coroutine[Any, Any, Work], receive: Callable[[], Awaitable[Any]]) -> Work:
        """The work of a request; cancelled, with an ApiError, if the client disconnects or the server drains before."""
        task = asyncio.ensure_future(working)
        left = asyncio.ensure_future(_disconnected(receive))
        try:
            some: set[asyncio.Future[Any]] = {task, left, self._ending}
            await asyncio.wait(some, return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                work = task.result()
                if left.done():  # in the same moment; that is not reported again
                    work.exchange.leave()
                return work
            raise shutting_down() if self.draining else ApiError(400, "the client left before its request was taken")
        finally:
            task.cancel()
            left.cancel()

    async def parse(self, body: bytearray, read: Callable[[Any], T]) -> T:
        """What `read` makes of a JSON body; of a large one in a thread."""
        run = lambda: read(self._json.parse(body))
        return await self._checked(run, "body", self._long_texts if len(body) > SMALL_BODY else None)

    def _pool(self, size: int) -> DaemonThreadPool | None:
        """Where so many characters or tokens are converted: None for the event loop."""
        return None if size <= SHORT else self._texts if size <= SMALL_BODY else self._long_texts

    async def complete(self, asked: CompletionAsked, arrived: float) -> Work:
        """Hand a completion to the engine.

        Raises:
          ApiError: the request is impossible, or there is no room.
        """
        bos = None if asked.add_special_tokens else False
        prompts: list[Sequence[int]] = []
        for prompt in asked.prompts:
            prompts.append(prompt if isinstance(prompt, tuple) else await self.encode(prompt, bos))
        echo = None
        if asked.echo:
            echo = [p if isinstance(p, str) else await self.decode(p, "prompt") for p in asked.prompts]
        scores = asked.echo and (asked.alternatives is not None or asked.max_tokens == 0)
        ends = () if asked.ignore_eos else self._ends
        constraint = await self._constraint(asked.format, self._grammars)
        return await self._submit(asked, prompts, ends, USUAL_COMPLETION, constraint, arrived, echo=echo, scores=scores)

    async def chat(self, asked: ChatAsked, arrived: float) -> Work:
        """Hand a chat to the engine; raises as `complete` does."""
        format = self.served.chat
        if format is None:
            raise refused(f"{self.served.name} does not chat: {self.served.no_chat}", "messages", "no_chat")
        if asked.tools and not takes_tools(self.served.tokenizer, format):
            raise refused("the model's chat format takes no tools; leave them out", "tools", "unsupported")
        encode = partial(encode_chat, self.served.tokenizer, asked.messages, format, self._renderer, asked.tools)
        size = sum(len(message["content"]) for message in asked.messages)
        ids = await self._checked(
            encode, "messages", self._pool(size) or self._texts
        )  # a template is never rendered on the loop
        ends = () if asked.ignore_eos else self._chat_ends
        constraint = await (self._call(asked) if asked.must_call else self._constraint(asked.format, self._chat_grammars))
        tools = [tool["function"]["name"] for tool in asked.tools]
        return await self._submit(asked, [ids], ends, None, constraint, arrived, tools=tools)

    async def encode(self, text: str, bos: bool | None, eos: bool | None = False) -> list[int]:
        """Ids of a text; long ones in a thread."""
        encode = partial(self.served.tokenizer.encode, text, bos, eos)
        return await self._checked(encode, "prompt", self._pool(len(text)))

    async def tokenize(self, text: str, ends: bool | None) -> bytes:
        """The JSON of a text's ids."""

        def run() -> bytes:
            ids = self.served.tokenizer.encode(text, ends, ends)
            parts = [",".join(map(str, ids[at : at + IDS_AT_ONCE])) for at in range(0, len(ids), IDS_AT_ONCE)]
            head = f'{{"count":{len(ids)},"max_model_len":{self.limits.context},"tokens":['
            return f"{head}{','.join(parts)}]}}".encode()

        return await self._checked(run, "prompt", self._pool(len(text)))

    async def decode(self, ids: Sequence[int], param: str) -> str:
        """The text of ids from the field `param`; ids beyond the vocabulary, a model's padding, have none."""
        tokenizer = self.served.tokenizer
        run = lambda: tokenizer.decode([token for token in ids if token < tokenizer.vocab_size])
        return await self._checked(run, param, self._pool(len(ids)))

    async def _checked(self, run: Callable[[], T], param: str, pool: DaemonThreadPool | None) -> T:
        """Call a function, in a thread of a pool if it may take long; its UserError becomes an ApiError (400)."""
        try:
            if pool is None:
                return run()
            with _as_api_errors():
                future = asyncio.wrap_future(pool.submit(run))
            try:
                some: set[asyncio.Future[Any]] = {future, self._ending}
                await asyncio.wait(some, return_when=asyncio.FIRST_COMPLETED)
                if future.done():
                    return future.result()
                raise shutting_down()
            finally:
                future.cancel()
        except UserError as error:
            raise refused(str(error), param) from None

    async def _submit(
        self,
        asked: Asked,
        prompts: Sequence[Sequence[int]],
        ends: Sequence[int],
        usual: int | None,
        constraint: GrammarConstraint | None,
        arrived: float,
        *,
        echo: Sequence[str] | None = None,
        scores: bool = False,
        tools: Sequence[str] = (),
    ) -> Work:
        requests, choices, constraints = [], [], []
        name = asked.model or self.served.name
        adapter = self.served.names.index(name) - 1
        for i, prompt in enumerate(prompts):
            limit = self._limit(asked, len(prompt), usual)
            at_start = not any(map(self._shows, prompt))
            for j in range(asked.n):
                if constraint is not None:
                    constraints.append(constraint.copy())
                requests.append(
                    GenerationRequest(
                        prompt=prompt,
                        max_new_tokens=limit,
                        sampling=asked.sampling.replace(seed=(asked.sampling.seed + j) % 2**32),
                        stop_tokens=tuple(dict.fromkeys((*ends, *asked.stop_token_ids))),
                        min_new_tokens=min(asked.min_tokens, limit),
                        alternatives=asked.alternatives or 0,
                        score_prompt=scores,
                        constraint=constraints[-1] if constraints else None,
                        adapter=adapter,
                        deadline=arrived + self.seconds if self.seconds else None,
                    )
                )
                text = None if echo is None else echo[i]
                scored = asked.alternatives is not None
                settings: dict[str, Any] = {"at_start": at_start, "scored": scored, "tools": tools}
                choices.append(Choice(self.served.tokenizer, asked.stop, echo=text, **settings))
        if self.draining:
            raise shutting_down()
        if not self.switchboard.open:
            self._busy_since = time.monotonic()
        with _as_api_errors():
            exchange = self.switchboard.submit(requests)
        self.metrics.asked[name] += len(requests)
        return Work(asked, prompts, choices, constraints, exchange, arrived)

    def _shows(self, token: int) -> bool:
        tokenizer = self.served.tokenizer
        return token < tokenizer.vocab_size and tokenizer.token_bytes(token) != b""

    def _limit(self, asked: Asked, length: int, usual: int | None) -> int:
        """The maximum number of tokens to generate."""
        room = self.engine.room(length)
        if length == 0:
            raise refused("the prompt has no tokens; give some text", "prompt")
        if room < (1 if asked.max_tokens is None else asked.max_tokens):
            more = "" if asked.max_tokens is None else f" and max_tokens={asked.max_tokens}"
            raise refused(
                f"a prompt of {length} tokens{more} exceed the context of {length + room}; shorten the prompt, or"
                f" generate at most {max(room, 0)}",
                "max_tokens" if room > 0 else "prompt",
                "context_length_exceeded",
            )
        if asked.max_tokens is not None:
            return asked.max_tokens
        return room if usual is None else min(usual, room)

    async def _call(self, asked: ChatAsked) -> GrammarConstraint:
        """A constraint to tool calls."""
        template = self.served.tokenizer.chat_template or ""
        grammar = grammar_of_calls(asked.tools, asked.must_call, template, several=asked.several)
        make = lambda: self._chat_grammars.lark(grammar, "grammar of the tools")
        return await self._checked(make, "tools", self._compiling)

    async def _constraint(self, format: dict[str, Any] | None, grammars: Grammars) -> GrammarConstraint | None:
        if format is None:
            return None
        if format["type"] == "regex":
            make = lambda: grammars.regex(format["regex"])
        else:
            schema = format["json_schema"]["schema"] if format["type"] == "json_schema" else None
            make = lambda: grammars.json_schema({"type": "object"} if schema is None else schema)
        return await self._checked(make, "response_format", self._compiling)

    def trouble(self) -> str | None:
        """Why the server is not healthy, or None: the engine has failed, or has work but has long not ended a turn."""
        if self.failure is not None:
            return self.failure
        stats = self.engine.stats()
        since = time.monotonic() - max(stats.last_turn, self._busy_since)
        if stats.busy and self.switchboard.open and since > self.wedged_after:
            return f"the engine has work, and has ended no turn for {since:.0f} s"
        return None

    def close(self) -> None:
        """End the processes that parse bodies, render chats and compile grammars."""
        self._json.close()
        self._renderer.close()
        self._grammars.close()
        self._chat_grammars.close()


def connect(
    engine: Any,
    served: Served,
    limits: Limits,
    *,
    seconds: float = 0.0,
    wedged_after: float = 120.0,
    metrics: ServerMetrics | None = None,
) -> Service:
    """A service of an engine; call on the event loop that is to run it.

    Args:
      metrics: those that have counted before there was an engine.
    """
    metrics = ServerMetrics() if metrics is None else metrics
    metrics.stats = engine.stats
    switchboard = Switchboard(engine, asyncio.get_running_loop())
    longest = max(limits.longest_prompt, CHARACTERS_OF_A_TOKEN * engine.context)
    limits = replace(limits, context=engine.context, longest_prompt=longest)
    names = TokenNames(served.tokenizer)
    return Service(engine, served, limits, seconds, wedged_after, switchboard, metrics, names)


def beside_engine(most: int) -> int:
    """Threads of a pool: at most a fourth of the processor's cores, which the steps of an engine may need."""
    return max(min(most, (os.cpu_count() or 1) // 4), 1)


async def _disconnected(receive: Callable[[], Awaitable[Any]]) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


@contextmanager
def _as_api_errors() -> Iterator[None]:
    """What the engine raises for a request, as an error for clients."""
    try:
        yield
    except BusyError as error:
        headers = {"Retry-After": str(max(1, round(error.retry_after)))}
        raise ApiError(429, str(error), code="queue_full", headers=headers) from None
    except ClosedError:
        raise shutting_down() from None
    except UserError as error:
        raise refused(str(error)) from None
