"""The model that a server serves, and how an HTTP request becomes requests to the engine."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeVar

from llama_jax.errors import UserError
from llama_jax.serving.grammar import GrammarConstraint, Grammars
from llama_jax.serving.http.bodies import (
    USUAL_COMPLETION,
    Asked,
    ChatAsked,
    CompletionAsked,
    Limits,
    chat_fields,
    completion_fields,
)
from llama_jax.serving.http.choice import Choice, TokenNames
from llama_jax.serving.http.errors import ApiError, refused
from llama_jax.serving.http.exchange import Exchange, Switchboard
from llama_jax.serving.http.metrics import ServerMetrics
from llama_jax.serving.http.tools import grammar_of_calls
from llama_jax.serving.requests import BusyError, ClosedError, GenerationRequest
from llama_jax.tokenizers import Format, Tokenizer, encode_chat, reply_ends, takes_tools
from llama_jax.tokenizers.template import Renderer

SHORT = 4000  # characters that are encoded on the event loop: longer texts would delay other requests
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
        self._chat_grammars = Grammars(tokenizer, self.limits.vocab_size, self._chat_ends)
        self._renderer = Renderer()

    def check_model(self, name: str | None) -> None:
        """Raise ApiError (404) for a model that is not served."""
        if name not in (None, *self.served.names):
            verb = "is" if len(self.served.names) == 1 else "are"
            message = f"model={name!r} is not served here; {', '.join(map(repr, self.served.names))} {verb}, or leave it out"
            raise ApiError(404, message, param="model", code="model_not_found")

    def check_open(self) -> None:
        """Raise ApiError where no work is accepted any more (503), or none for now (429)."""
        if self.draining or self.failure is not None:
            raise _shutting_down()
        with _as_api_errors():
            self.engine.check_room()

    async def complete(self, asked: CompletionAsked, arrived: float) -> Work:
        """Hand a completion to the engine.

        Raises:
          ApiError: the request is impossible, or there is no room.
        """
        bos = None if asked.add_special_tokens else False
        prompts: list[Sequence[int]] = []
        for prompt in asked.prompts:
            prompts.append(prompt if isinstance(prompt, tuple) else await self.encode(prompt, bos))
        echo = [p if isinstance(p, str) else self.decode(p, "prompt") for p in asked.prompts] if asked.echo else None
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
        ids = await _checked(encode, "messages", apart=True)
        ends = () if asked.ignore_eos else self._chat_ends
        constraint = await (self._call(asked) if asked.must_call else self._constraint(asked.format, self._chat_grammars))
        tools = [tool["function"]["name"] for tool in asked.tools]
        return await self._submit(asked, [ids], ends, None, constraint, arrived, tools=tools)

    async def encode(self, text: str, bos: bool | None, eos: bool | None = False) -> list[int]:
        """Ids of a text; long ones in a thread."""
        encode = partial(self.served.tokenizer.encode, text, bos, eos)
        return await _checked(encode, "prompt", apart=len(text) > SHORT)

    def decode(self, ids: Sequence[int], param: str) -> str:
        """The text of ids from the field `param`; ids beyond the vocabulary, a model's padding, have none."""
        tokenizer = self.served.tokenizer
        try:
            return tokenizer.decode([token for token in ids if token < tokenizer.vocab_size])
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
            raise _shutting_down()
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
        return await _checked(make, "tools", apart=True)

    async def _constraint(self, format: dict[str, Any] | None, grammars: Grammars) -> GrammarConstraint | None:
        if format is None:
            return None
        if format["type"] == "regex":
            make = lambda: grammars.regex(format["regex"])
        else:
            schema = format["json_schema"]["schema"] if format["type"] == "json_schema" else None
            make = lambda: grammars.json_schema({"type": "object"} if schema is None else schema)
        return await _checked(make, "response_format", apart=True)

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
        """End the process that renders chats, if there is one."""
        self._renderer.close()


def connect(engine: Any, served: Served, limits: Limits, *, seconds: float = 0.0, wedged_after: float = 120.0) -> Service:
    """A service of an engine; call on the event loop that is to run it."""
    switchboard = Switchboard(engine, asyncio.get_running_loop())
    limits = replace(limits, context=engine.context)
    names = TokenNames(served.tokenizer)
    return Service(engine, served, limits, seconds, wedged_after, switchboard, ServerMetrics(engine.stats), names)


async def _checked(run: Callable[[], T], param: str, *, apart: bool) -> T:
    """Call a function, in a thread if it may take long; its UserError becomes an ApiError (400)."""
    try:
        return await asyncio.to_thread(run) if apart else run()
    except UserError as error:
        raise refused(str(error), param) from None


def _shutting_down() -> ApiError:
    headers = {"Retry-After": "5", "Connection": "close"}
    return ApiError(503, "the server is shutting down; try another one", code="draining", headers=headers)


@contextmanager
def _as_api_errors() -> Iterator[None]:
    """What the engine raises for a request, as an error for clients."""
    try:
        yield
    except BusyError as error:
        headers = {"Retry-After": str(max(1, round(error.retry_after)))}
        raise ApiError(429, str(error), code="queue_full", headers=headers) from None
    except ClosedError:
        raise _shutting_down() from None
    except UserError as error:
        raise refused(str(error)) from None
