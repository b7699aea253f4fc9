"""The model that a server serves, and the conversion of HTTP requests to requests to the engine."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

from llama_jax.errors import UserError
from llama_jax.serving.grammar import GrammarConstraint, Grammars
from llama_jax.serving.http.auth import Access
from llama_jax.serving.http.completion_choice import Choice, TokenNames
from llama_jax.serving.http.errors import ApiError, refused, shutting_down
from llama_jax.serving.http.json_body import SMALL_BODY, BodyReader, parse_json
from llama_jax.serving.http.metrics import ServerMetrics
from llama_jax.serving.http.request_schema import (
    DEFAULT_COMPLETION,
    ApiRequest,
    ChatRequest,
    CompletionRequest,
    Limits,
    request_schemas,
    text_length,
)
from llama_jax.serving.http.response import ChatFormat, CompletionFormat, EngineBridge, GeneratedResponse, ResponseFormat
from llama_jax.serving.requests import BusyError, ClosedError, GenerationRequest
from llama_jax.serving.thread_pool import LOW_NICENESS, DaemonThreadPool
from llama_jax.serving.tool_calls import ToolText, call_tokens
from llama_jax.serving.tool_grammar import grammar_of_calls
from llama_jax.tokenizers import Format, Tokenizer, encode_chat, reply_ends, takes_tools
from llama_jax.tokenizers.chat import NO_TOOLS
from llama_jax.tokenizers.chat_template import Renderer, message_form, select_template
from llama_jax.tokenizers.interface import check_token_rows
from llama_jax.tokenizers.tool_dialects import Dialect, dialect_of

MAX_PROMPT_LENGTH = 1_000_000  # characters; more if the context is long
CHARACTERS_OF_A_TOKEN = 16  # maximum average, in a prompt that fills the context
SHORT = 4000  # characters or tokens converted on the event loop: more would delay other requests
# Maximum numbers of threads, see `threads_beside_engine`.
TEXT_THREADS = 4  # for texts and chats of up to SMALL_BODY characters
LONG_THREADS = 2  # for longer ones and their bodies, which take seconds
LONG_WAITING = 32  # further requests are rejected
BODIES = 4  # budget for all bodies together, as a multiple of the largest body
GRAMMAR_THREADS = 2
GRAMMARS_WAITING = 16  # further requests are rejected
IDS_AT_ONCE = 1 << 14  # ids written as JSON at a time, while other threads wait
ENGINE_SECONDS = 0.5  # time for the engine to end its step after draining; then clients are answered without it
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Served:
    """A model as clients see it.

    Attributes:
      name: name of the model in requests.
      tokenizer: its tokenizer.
      chat: the chat format; None if it is not a chat model.
      no_chat: the reason why `chat` is None.
      template_args: variables of the chat template for every chat; requests can set others.
      adapters: names in requests of the model with each adapter, by adapter index.
      memory: planned bytes per device, by purpose; empty if nothing was planned.
    """

    name: str
    tokenizer: Tokenizer
    chat: Format | None
    no_chat: str = ""
    template_args: Mapping[str, Any] = field(default_factory=dict)
    adapters: tuple[str, ...] = ()
    memory: Mapping[str, int] = field(default_factory=dict)

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the model, and of the model with each adapter."""
        return (self.name, *self.adapters)


@dataclass(frozen=True, kw_only=True)
class ServerOptions:
    """Access, limits of requests, and shutdown of a server.

    Attributes:
      access: which requests are allowed.
      most_choices: maximum number of continuations per HTTP request: prompts times n.
      largest_body: maximum bytes of a body.
      seconds: time limit for a request, 0 for no limit.
      drain_seconds: time limit for running requests to end after shutdown was requested.
      wedged_after: seconds without an iteration of a busy engine after which `/health` fails.
    """

    access: Access = Access()
    most_choices: int = 128
    largest_body: int = 4 << 20
    seconds: float = 0.0
    drain_seconds: float = 30.0
    wedged_after: float = 120.0


Submit = Callable[[float], GeneratedResponse]  # called with the time at which the request arrived


class Service:
    """The shared state of the routes. Must be created on the event loop that runs it.

    Attributes:
      draining: whether new requests are rejected.
      failure: why the engine has failed; None if it has not.
      ended: resolved when the engine's thread ends, with the exception that ended it or None.

    Args:
      engine: a warmed-up `Engine`.
      metrics: metrics that have already counted during startup.
    """

    def __init__(
        self,
        engine: Any,
        served: Served,
        options: ServerOptions = ServerOptions(),
        metrics: ServerMetrics | None = None,
    ) -> None:
        longest = max(MAX_PROMPT_LENGTH, CHARACTERS_OF_A_TOKEN * engine.context)
        self.engine, self.served, self.options = engine, served, options
        self.limits = Limits(
            vocab_size=engine.vocab_size,
            known_ids=max(engine.vocab_size, served.tokenizer.vocab_size),
            context=engine.context,
            most_choices=options.most_choices,
            longest_prompt=longest,
        )
        self.schemas = request_schemas(self.limits)
        self.names = TokenNames(served.tokenizer)
        self.created = int(time.time())
        self.draining = False
        self.failure: str | None = None
        self.bridge = EngineBridge(engine, asyncio.get_running_loop())
        self.ended: asyncio.Future[BaseException | None] = self.bridge.loop.create_future()
        self.bodies = BodyReader(options.largest_body, BODIES * options.largest_body)
        self.metrics = ServerMetrics() if metrics is None else metrics
        self.metrics.stats, self.metrics.compiling = engine.stats, lambda: self.compiling
        self._busy_since = 0.0
        self._preparing: set[asyncio.Task[Any]] = set()
        self._ends = served.tokenizer.stop_ids
        self._renderer = Renderer(template_args=served.template_args)
        self._chat_ends = () if served.chat is None else reply_ends(served.tokenizer, served.chat, self._renderer)
        self._grammars = Grammars(served.tokenizer, engine.vocab_size, self._ends)
        same = set(self._ends) == set(self._chat_ends)
        self._chat_grammars = self._grammars if same else Grammars(served.tokenizer, engine.vocab_size, self._chat_ends)
        self._call_tokens = call_tokens(served.tokenizer)
        self._texts = DaemonThreadPool("texts", threads_beside_engine(TEXT_THREADS), niceness=LOW_NICENESS)
        self._long_texts = DaemonThreadPool("long texts", threads_beside_engine(LONG_THREADS), LONG_WAITING, LOW_NICENESS)
        self._compiling = DaemonThreadPool(
            "grammars", threads_beside_engine(GRAMMAR_THREADS), GRAMMARS_WAITING, LOW_NICENESS
        )

    @property
    def compiling(self) -> int:
        """The number of grammars that wait for a thread."""
        return self._compiling.waiting

    def check_model(self, name: str | None) -> None:
        """Raise ApiError (404) for a model that is not served."""
        if name not in (None, *self.served.names):
            verb = "is" if len(self.served.names) == 1 else "are"
            message = f"model={name!r} is not served; {', '.join(map(repr, self.served.names))} {verb}; or omit it"
            raise ApiError(404, message, param="model", code="model_not_found")

    def check_open(self) -> None:
        """Raise ApiError if no requests are accepted any more (503), or none at the moment (429)."""
        if self.draining or self.failure is not None:
            raise shutting_down()
        with _as_api_errors():
            self.engine.check_room(1 + self.compiling)

    def start_engine(self) -> None:
        """Run the engine on its own thread, and build the grammar tables before there are streams to delay."""
        for grammars in {self._grammars, self._chat_grammars}:
            self._compiling.submit(grammars.prepare)
        threading.Thread(target=self._run_engine, name="engine", daemon=True).start()

    def _run_engine(self) -> None:
        failure: BaseException | None = None
        try:
            self.engine.run()
        except BaseException as error:
            failure = error
            self.failure = f"the engine failed: {type(error).__name__}: {error}"
        self.bridge.wake()
        with suppress(RuntimeError):  # the loop has already ended
            self.bridge.loop.call_soon_threadsafe(self.ended.set_result, failure)

    def begin_drain(self) -> None:
        """Accept no new requests; those that the engine has not admitted yet are rejected."""
        self.draining = True
        for task in self._preparing:
            task.cancel()

    async def drain(self, seconds: float) -> None:
        """Accept no new requests, wait `seconds` for the running ones, and then cancel the rest."""
        self.begin_drain()
        end = time.monotonic() + seconds
        while self.bridge.open and not self.ended.done() and time.monotonic() < end:
            await asyncio.sleep(0.02)
        self.engine.close()
        await asyncio.wait([self.ended], timeout=ENGINE_SECONDS)
        if not self.ended.done():
            self.bridge.cancel()

    @contextmanager
    def preparing(self) -> Iterator[None]:
        """A context for the preparation of a request: its task is cancelled, with an ApiError, if the server drains."""
        task = asyncio.current_task()
        assert task is not None
        if self.draining:
            raise shutting_down()
        self._preparing.add(task)
        try:
            yield
        except asyncio.CancelledError:
            if self.draining:
                task.uncancel()
                raise shutting_down() from None
            raise
        finally:
            self._preparing.discard(task)

    async def parse(self, body: bytearray, read: Callable[[Any], T]) -> T:
        """The result of `read` for the value of a JSON body, computed in a thread if it is large."""
        run = lambda: read(parse_json(body))
        return await self._convert(run, "body", self._long_texts if len(body) > SMALL_BODY else None)

    def _pool(self, size: int) -> DaemonThreadPool | None:
        """The pool for this many characters or tokens; None for the event loop."""
        return None if size <= SHORT else self._texts if size <= SMALL_BODY else self._long_texts

    async def complete(self, body: CompletionRequest) -> Submit:
        """A function that submits a completion to the engine.

        Raises:
          ApiError: the request is invalid, or a queue is full.
        """
        self.check_open()
        bos = None if body.add_special_tokens else False
        settings: dict[str, Any] = {"bos": bos, "eos": False, "special": body.parse_special}
        encode = partial(self._encode, partial(self.served.tokenizer.encode, **settings))
        prompts = [
            await self._convert(partial(encode, prompt), "prompt", self._pool(len(prompt)))
            if isinstance(prompt, str)
            else prompt
            for prompt in body.prompts
        ]
        echo = None
        if body.echo:
            echo = [prompt if isinstance(prompt, str) else await self.decode(prompt, "prompt") for prompt in body.prompts]
        scores = body.echo and (body.alternatives is not None or body.max_tokens == 0)
        constraint = await self._constraint(body.format, self._grammars)
        settings = {"echo": echo, "scores": scores, "default_tokens": DEFAULT_COMPLETION}
        return partial(self._submit, CompletionFormat, body, prompts, self._ends, constraint, **settings)

    async def chat(self, body: ChatRequest) -> Submit:
        """A function that submits a chat to the engine; for errors see `complete`."""
        self.check_open()
        tokenizer, format = self.served.tokenizer, self.served.chat
        if format is None:
            raise refused(f"{self.served.name} does not support chat: {self.served.no_chat}", "messages", "no_chat")
        if body.tools and not takes_tools(tokenizer, format):
            raise refused(NO_TOOLS, "tools", "unsupported")
        options = {"template_args": body.template_args, "continue_final": body.continue_final}
        encode_messages = partial(encode_chat, **options)  # type: ignore[arg-type]
        encode = partial(self._encode, encode_messages, tokenizer, body.messages, format, self._renderer, body.tools)
        pool = self._pool(sum(map(text_length, body.messages))) or self._texts  # a template is never rendered on the loop
        prompt = await self._convert(encode, "messages", pool)
        dialect = dialect_of(select_template(tokenizer, True)) if body.tools else None
        if dialect is not None and (body.must_call or body.strict):
            compile = partial(self._compile_calls, body, dialect)
            constraint: GrammarConstraint | None = await self._convert(compile, "tools", self._compiling)
        else:
            constraint = await self._constraint(body.format, self._chat_grammars)
        return partial(self._submit, ChatFormat, body, [prompt], self._chat_ends, constraint, dialect=dialect)

    def _compile_calls(self, body: ChatRequest, dialect: Dialect) -> GrammarConstraint:
        """The constraint of a reply with calls that the model's template can render when they come back."""
        tokenizer = self.served.tokenizer
        one_call = message_form(tokenizer, self._renderer, True).one_call
        grammar = grammar_of_calls(
            dialect,
            body.tools,
            body.must_call or [tool["function"]["name"] for tool in body.tools],
            tokenizer.special_tokens,
            several=body.several and not one_call,
            optional=not body.must_call,
        )
        return self._chat_grammars.lark(grammar, "grammar of the tools")

    async def tokenize(self, text: str, add_special_tokens: bool, parse_special: bool) -> bytes:
        """The JSON of a text's ids."""
        special = None if add_special_tokens else False

        def run() -> bytes:
            ids = self.served.tokenizer.encode(text, special, special, parse_special)
            parts = [",".join(map(str, ids[at : at + IDS_AT_ONCE])) for at in range(0, len(ids), IDS_AT_ONCE)]
            head = f'{{"count":{len(ids)},"max_model_len":{self.limits.context},"tokens":['
            return f"{head}{','.join(parts)}]}}".encode()

        return await self._convert(run, "prompt", self._pool(len(text)))

    async def decode(self, ids: Sequence[int], param: str) -> str:
        """The text of ids from the field `param`."""
        return await self._convert(partial(self.served.tokenizer.decode, ids), param, self._pool(len(ids)))

    def _encode(self, encode: Callable[..., list[int]], *arguments: Any) -> list[int]:
        """The ids of a prompt; TokenizerError for a token that the model has no row for."""
        ids = encode(*arguments)
        check_token_rows(self.served.tokenizer, ids, self.engine.vocab_size, "the prompt")
        return ids

    async def _convert(self, run: Callable[[], T], param: str, pool: DaemonThreadPool | None) -> T:
        """Call a function, in a thread of a pool if it may take long; its UserError becomes an ApiError (400)."""
        try:
            if pool is None:
                return run()
            with _as_api_errors():
                future = pool.submit(run)
            return await asyncio.wrap_future(future)
        except UserError as error:
            raise refused(str(error), param) from None

    def _submit(
        self,
        format: type[ResponseFormat],
        body: ApiRequest,
        prompts: Sequence[Sequence[int]],
        ends: Sequence[int],
        constraint: GrammarConstraint | None,
        arrived: float,
        *,
        default_tokens: int | None = None,
        echo: Sequence[str] | None = None,
        scores: bool = False,
        dialect: Dialect | None = None,
    ) -> GeneratedResponse:
        requests, choices, constraints = [], [], []
        name = body.model or self.served.name
        stop_tokens = tuple(dict.fromkeys((*(() if body.ignore_eos else ends), *body.stop_token_ids)))
        for i, prompt in enumerate(prompts):
            limit = self._limit(body, len(prompt), default_tokens)
            at_start = not any(map(self.served.tokenizer.token_bytes, prompt))
            for j in range(body.n):
                if constraint is not None:
                    constraints.append(constraint.copy())
                requests.append(
                    GenerationRequest(
                        prompt=prompt,
                        max_new_tokens=limit,
                        sampling=body.sampling.replace(seed=(body.sampling.seed + j) % 2**32),
                        stop_tokens=stop_tokens,
                        min_new_tokens=min(body.min_tokens, limit),
                        alternatives=body.alternatives or 0,
                        score_prompt=scores,
                        constraint=constraints[-1] if constraints else None,
                        adapter=self.served.names.index(name) - 1,
                    )
                )
                choices.append(
                    Choice(
                        self.served.tokenizer,
                        body.stop,
                        echo=None if echo is None else echo[i],
                        at_start=at_start,
                        scored=body.alternatives is not None,
                        tools=None if dialect is None else self._tool_text(body, dialect, constraint is not None),
                    )
                )
        if not self.bridge.open:
            self._busy_since = time.monotonic()
        with _as_api_errors():
            updates = self.bridge.submit(requests)
        if self.options.seconds:
            updates.end_after(arrived + self.options.seconds - time.monotonic())
        self.metrics.requests[name] += len(requests)
        response_format = format(body, name, self.names)
        return GeneratedResponse(body, response_format, prompts, choices, constraints, updates, self.metrics, arrived)

    def _tool_text(self, body: ApiRequest, dialect: Dialect, constrained: bool) -> ToolText:
        functions = [tool["function"] for tool in body.tools] if isinstance(body, ChatRequest) else []
        schemas = {function["name"]: function.get("parameters") for function in functions}
        return ToolText(schemas, dialect, self._call_tokens, constrained=constrained)

    def _limit(self, body: ApiRequest, length: int, default: int | None) -> int:
        """The maximum number of tokens to generate."""
        room = self.engine.room(length)
        if length == 0:
            raise refused("the prompt has no tokens; send some text", "prompt")
        if room < (1 if body.max_tokens is None else body.max_tokens):
            max_tokens_text = "" if body.max_tokens is None else f" and max_tokens={body.max_tokens}"
            raise refused(
                f"a prompt of {length} tokens{max_tokens_text} exceed the context of {length + room}; shorten the prompt, or"
                f" generate at most {max(room, 0)}",
                "max_tokens" if room > 0 else "prompt",
                "context_length_exceeded",
            )
        if body.max_tokens is not None:
            return body.max_tokens
        return room if default is None else min(default, room)

    async def _constraint(self, format: dict[str, Any] | None, grammars: Grammars) -> GrammarConstraint | None:
        if format is None:
            return None
        if format["type"] == "regex":
            compile = lambda: grammars.regex(format["regex"])
        else:
            schema = format["json_schema"]["schema"] if format["type"] == "json_schema" else None
            compile = lambda: grammars.json_schema({"type": "object"} if schema is None else schema)
        return await self._convert(compile, "response_format", self._compiling)

    def trouble(self) -> str | None:
        """Why the server is unhealthy, or None: the engine has failed, or is busy and has finished no iteration for long."""
        if self.failure is not None:
            return self.failure
        stats = self.engine.stats()
        since = time.monotonic() - max(stats.last_iteration, self._busy_since)
        if stats.busy and self.bridge.open and since > self.options.wedged_after:
            return f"the engine is busy, but has not finished an iteration for {since:.0f} s"
        return None

    def close(self) -> None:
        """Kill the child processes that render chats and compile grammars."""
        for child in (self._renderer, self._grammars, self._chat_grammars):
            child.close()


def threads_beside_engine(most: int) -> int:
    """The number of threads of a pool: at most a quarter of the CPU cores, which the steps of the engine need."""
    return max(min(most, (os.cpu_count() or 1) // 4), 1)


@contextmanager
def _as_api_errors() -> Iterator[None]:
    """Convert errors of the engine about a request to `ApiError`."""
    try:
        yield
    except BusyError as error:
        headers = {"Retry-After": str(max(1, round(error.retry_after)))}
        raise ApiError(429, str(error), code="queue_full", headers=headers) from None
    except ClosedError:
        raise shutting_down() from None
    except UserError as error:
        raise refused(str(error)) from None
