"""``llama-jax serve``: a model over HTTP."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal

import tyro

from llama_jax.cli.options import LoadOptions
from llama_jax.errors import GenerationError, UserError
from llama_jax.tokenizers import Format, reply_ends, resolve_format

if TYPE_CHECKING:
    from socket import socket

    from llama_jax.serving.http.bodies import Limits
    from llama_jax.serving.http.server import ServerOptions
    from llama_jax.serving.http.service import Served
    from llama_jax.serving.options import EngineOptions
    from llama_jax.tokenizers import Tokenizer

KEY = "LLAMA_JAX_API_KEY"
NEEDED = ("starlette", "uvicorn", "httptools", "prometheus_client")


@dataclass(frozen=True, kw_only=True)
class Serve(LoadOptions):
    """Serve a model over HTTP, as OpenAI's API does: completions, chat, metrics, and a page for browsers.

    It takes requests once all programs are compiled, which it says. SIGTERM and Ctrl-C let running requests end; a second
    one ends at once. docs/serving describes the fields, the limits and what is safe by default.
    """

    host: str = "127.0.0.1"
    """The address to listen on; the default is this machine alone. 0.0.0.0 is every network that it has: give a key then."""
    port: int = 8000
    """0 takes a free one."""
    name: str | None = None
    """What clients call the model; by default its folder's or file's name, stories for the bundled one."""
    format: Format = "auto"
    """How the messages of a chat are put together; auto is the model's own template, else llama3 where the vocabulary is
    Llama 3's. A model with neither completes and does not chat, unless a format is given."""
    api_key: str | None = None
    """What clients must send as their key. Better in the environment, as LLAMA_JAX_API_KEY: arguments can be seen by all."""
    allow_host: Annotated[tuple[str, ...], tyro.conf.UseAppendAction] = ()
    """A name by which this server is reached, beside localhost, --host and addresses; * for any. May be repeated."""
    allow_origin: Annotated[tuple[str, ...], tyro.conf.UseAppendAction] = ()
    """A site whose pages may use the server from browsers, as https://example.org; * for any. May be repeated."""
    rows: int = 16
    """Requests that are decoded at once."""
    long_rows: int = 4
    """The same of long ones, which are apart."""
    short: int = 512
    """Tokens of prompt and continuation from which on a request is long."""
    context: int | None = None
    """Tokens that prompt and continuation may have together; by default all that the model can read."""
    piece: int = 64
    """Tokens of a prompt that are read at once; between pieces all others get a token."""
    cache: Literal["auto", "int8"] = "auto"
    """Keys and values are kept in the type of the weights, or as 8-bit numbers with 4 bytes more for each head."""
    prefix_cache: int = 256
    """Megabytes for what the beginnings of prompts share; 0 reads each prompt whole."""
    most_waiting: int = 256
    """Requests that may wait; more are answered with 429."""
    most_waiting_tokens: int = 262_144
    """Tokens of the prompts that may wait."""
    most_choices: int = 128
    """Continuations that one request may ask for: prompts times n."""
    most_connections: int = 1024
    """Connections at the same time; further ones are answered with 429. 0 is as many as come."""
    body_mb: float = 16.0
    """Megabytes that the body of a request may have."""
    timeout: float = 0.0
    """Seconds that a request may take, waiting included; 0 for as long as it needs."""
    drain: float = 30.0
    """Seconds that running requests get to end after SIGTERM or Ctrl-C."""
    wedged: float = 120.0
    """/health fails when the engine has work and ended no turn for so many seconds."""

    def run(self) -> None:
        started = time.perf_counter()
        _check_extra()
        self._check()
        from llama_jax.cli.runtime import use_compilation_cache
        from llama_jax.serving.http.server import listen

        use_compilation_cache()
        self._engine_options()  # an impossible one is said first
        with listen(self.host, self.port) as listening:  # before minutes go into loading
            self._serve(listening, started)

    def _serve(self, listening: socket, started: float) -> None:
        from llama_jax.cli.runtime import start_backend
        from llama_jax.serving.http.server import address_of, serve

        options, server = self._engine_options(), self._server_options()
        start_backend()
        config, params, tokenizer = self.load()
        served = self._served(tokenizer)
        loaded = time.perf_counter()

        import jax

        from llama_jax.model.trees import bytes_in_memory, kinds_in_memory
        from llama_jax.ops.attention import observed
        from llama_jax.serving.engine import Engine

        with observed() as attention:
            engine = Engine(config, params, options)
            with _bar() as progress:
                compiled = engine.warm(progress)

        def ready() -> None:
            mesh = f" · mesh {self.mesh_sizes()}" if self.mesh else ""
            weights = f"{kinds_in_memory(params)}, {bytes_in_memory(params) / 1e6:,.1f} MB"
            key = "with a key" if server.access.api_key else "without a key"
            _note(
                f"{jax.default_backend()} ({jax.devices()[0].device_kind}){mesh} · {params.embedding.dtype}"
                f" · attention {' and '.join(attention)} · weights {weights}"
            )
            _note(
                f"{served.name} · {f'chat by {served.chat}' if served.chat else 'no chat: it completes texts'}"
                f" · context {engine.context} tokens · {self.rows} + {self.long_rows} rows"
            )
            _note(
                f"listening on {address_of(listening)} {key} · ready after {time.perf_counter() - started:.1f} s"
                f" (load {loaded - started:.1f}, compile {compiled:.1f})"
            )

        serve(engine, served, self._limits(config.vocab_size, engine.context), server, listening, ready)
        _note("ended")

    def _check(self) -> None:
        for name in ("timeout", "drain", "wedged", "body_mb"):
            value = getattr(self, name)
            if not 0 <= value < 1e9:
                raise GenerationError(f"{name}={value} must be a number from 0 to 1e9")
        for name, least in (("most_choices", 1), ("most_connections", 0), ("prefix_cache", 0)):
            value = getattr(self, name)
            if not least <= value < 2**31:
                raise GenerationError(f"{name}={value} must be an integer of at least {least}")
        if not 0 <= self.port < 2**16:
            raise GenerationError(f"port={self.port} must be from 0 to 65535")
        if self._key() == "":
            raise GenerationError(f"the API key is empty; give one, or leave --api-key and {KEY} out")

    def _key(self) -> str | None:
        return os.environ.get(KEY) if self.api_key is None else self.api_key

    def _engine_options(self) -> EngineOptions:
        from llama_jax.model.options import Compute
        from llama_jax.model.window import CacheOptions
        from llama_jax.serving.options import EngineOptions

        return EngineOptions(
            rows=self.rows,
            long_rows=self.long_rows,
            short=self.short,
            context=self.context,
            piece=self.piece,
            most_waiting=self.most_waiting,
            most_waiting_tokens=self.most_waiting_tokens,
            prefix_bytes=self.prefix_cache * 2**20,
            cache=CacheOptions(dtype=None if self.cache == "auto" else self.cache),
            compute=Compute(attention=self.attention),
        )

    def _server_options(self) -> ServerOptions:
        from llama_jax.serving.http.guard import Access
        from llama_jax.serving.http.server import ServerOptions

        access = Access(
            api_key=self._key(),
            hosts=(self.host, *self.allow_host),
            origins=self.allow_origin,
            most_connections=self.most_connections,
        )
        return ServerOptions(access=access, drain_seconds=self.drain, seconds=self.timeout, wedged_after=self.wedged)

    def _limits(self, vocab_size: int, context: int) -> Limits:
        from llama_jax.serving.http.bodies import Limits

        return Limits(
            vocab_size=vocab_size,
            context=context,
            most_choices=self.most_choices,
            largest_body=round(self.body_mb * 2**20),
        )

    def _served(self, tokenizer: Tokenizer) -> Served:
        """The model as clients see it; GenerationError for a format that was asked for and cannot be."""
        from llama_jax.serving.http.service import Served

        name = self.name or ("stories" if self.model is None else self.model.resolve().name)
        try:
            chat = resolve_format(tokenizer, self.format)
            reply_ends(tokenizer, chat)  # which finds out whether the vocabulary has what the format needs
        except GenerationError as error:
            if self.format != "auto":
                raise
            return Served(name=name, tokenizer=tokenizer, chat=None, no_chat=str(error))
        return Served(name=name, tokenizer=tokenizer, chat=chat)


def _check_extra() -> None:
    from importlib.util import find_spec

    missing = [name for name in NEEDED if find_spec(name) is None]
    if missing:
        raise UserError(f'serving needs {", ".join(missing)}; get it with pip install -e ".[serve]"')


@contextmanager
def _bar() -> Iterator[Callable[[int, int], None]]:
    """Shows programs being compiled, where somebody looks at stderr."""
    from tqdm import tqdm

    with tqdm(desc="compiling", unit=" programs", leave=False, delay=1.0, disable=None) as bar:

        def progress(done: int, of: int) -> None:
            bar.total = of
            bar.update(done - bar.n)

        yield progress


def _note(text: str) -> None:
    print(f"llama-jax: {text}", file=sys.stderr, flush=True)
