"""``llama-jax serve``: a model over HTTP."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any

import tyro

import llama_jax
from llama_jax.cli.options import (
    AdapterOptions,
    CacheOption,
    DraftOptions,
    FormatOption,
    ProcessOptions,
    unless_auto,
    with_rope,
)
from llama_jax.cli.terminal import print_status
from llama_jax.errors import GenerationError, MeshError, UserError
from llama_jax.runs.log import progress_counter
from llama_jax.settings import Bounds, at_least, check_fields
from llama_jax.storage import StoredPath
from llama_jax.tokenizers import Tokenizer, reply_ends, resolve_format
from llama_jax.tokenizers.chat_template import Renderer

if TYPE_CHECKING:
    from socket import socket

    from llama_jax.parallel.multihost import Processes
    from llama_jax.serving.http.server import Mounted, Started, Startup
    from llama_jax.serving.http.service import Served, ServerOptions
    from llama_jax.serving.options import MemoryPlan

KEY_VARIABLE = "LLAMA_JAX_API_KEY"
REQUIRED_MODULES = ("starlette", "uvicorn", "httptools", "prometheus_client")
COMMAND_ONLY = ("host", "port", "most_connections", "distributed", "coordinator", "processes", "process_id")
AMOUNT_BOUNDS = Bounds(0, 1e9)


@dataclass(frozen=True, kw_only=True)
class Serve(AdapterOptions, CacheOption, DraftOptions, FormatOption, ProcessOptions):
    """Serve a model over HTTP with OpenAI's API: completions, chat and metrics, and a chat page at /.

    The server listens at once and reports its progress until all programs are compiled; then it accepts requests. On
    SIGTERM or Ctrl-C, running requests may finish; a second signal stops at once. docs/serving describes the fields of
    requests, the limits and the security defaults.

    Several processes can serve a model that is too large for one host: run the same command in each, with --distributed or
    a different --process-id. The first process listens.
    """

    SHOWN_FIRST = ("model", "host", "port", "api_key", "name", "context")

    host: Annotated[str, tyro.conf.arg(metavar="ADDRESS")] = "127.0.0.1"
    """Address to listen on. The default accepts connections from this machine only; 0.0.0.0 accepts them from all networks:
    set a key then."""
    port: Annotated[int, Bounds(0, 2**16 - 1)] = 8000
    """Port to listen on; 0 takes a free one."""
    name: Annotated[str | None, tyro.conf.arg(metavar="NAME")] = None
    """Name of the model in the API. The default is the name of its folder or file; the bundled model is called stories."""
    api_key: Annotated[str | None, tyro.conf.arg(metavar="KEY")] = None
    """API key that clients must send. Other users of the machine can see arguments; the environment variable
    LLAMA_JAX_API_KEY avoids this."""
    allow_host: Annotated[tuple[str, ...], tyro.conf.arg(metavar="NAME"), tyro.conf.UseAppendAction] = ()
    """Accept this Host header, in addition to localhost, --host and IP addresses; * accepts any. Can be repeated."""
    allow_origin: Annotated[tuple[str, ...], tyro.conf.arg(metavar="URL"), tyro.conf.UseAppendAction] = ()
    """Allow pages of this site to call the server from browsers (CORS), for example https://example.org; * allows any. Can
    be repeated."""
    rows: int | None = None
    """Number of requests that are served concurrently. The default is 16, or fewer if memory is scarce."""
    cache_tokens: int | None = None
    """Capacity of the key/value cache in tokens, for all requests together. The default is 512 per row, and at least one
    whole context. When it is full, the newest requests are suspended and continue later."""
    context: int | None = None
    """Maximum number of tokens of prompt and continuation together. The default is the model's context, or less if memory is
    scarce; if RoPE scaling extends it, as much of that as a cache for the context without it holds."""
    prefill_chunk: int | None = None
    """Prompt tokens per step, a multiple of 16. In each step, every running request also gets a token. The default is 32 on
    a CPU and 256 elsewhere."""
    prefix_cache: Annotated[int, at_least(0)] = 256
    """Maximum size of the cached prefixes of earlier prompts, in megabytes; 0 turns the prefix cache off."""
    most_waiting: int = 256
    """Maximum number of requests in the queue; others are answered with status 429."""
    most_waiting_tokens: int = 262_144
    """Maximum number of prompt tokens in the queue."""
    most_choices: Annotated[int, at_least(1)] = 128
    """Maximum number of continuations per request (prompts times n); never more than `most-waiting`."""
    most_connections: Annotated[int, at_least(0)] = 1024
    """Maximum number of open connections; others are answered with status 429. 0 means no limit."""
    body_mb: Annotated[float, AMOUNT_BOUNDS] = 4.0
    """Maximum size of the body of a request, in megabytes."""
    timeout: Annotated[float, AMOUNT_BOUNDS] = 0.0
    """Maximum duration of a request in seconds, including waiting; 0 means no limit."""
    drain: Annotated[float, AMOUNT_BOUNDS] = 30.0
    """Seconds that running requests may take to finish after SIGTERM or Ctrl-C."""
    wedged: Annotated[float, AMOUNT_BOUNDS] = 120.0
    """Let /health fail if the engine has work but finished no step for this many seconds."""
    open_metrics: bool = False
    """Let /metrics answer without the API key, for Prometheus and routers."""

    def run(self) -> None:
        started = time.perf_counter()
        _check_extra()
        self._check()
        self.check_template(self.format)
        from llama_jax.cli.jax_setup import use_compilation_cache
        from llama_jax.serving.http.server import listen

        use_compilation_cache(self.no_cache)
        self._engine_options()  # invalid options end the command first
        with self.join_processes() as joined:
            if joined.index > 0:
                self._follow(joined)
                return
            with listen(self.host, self.port) as listening:  # before minutes go into loading
                self._serve(listening, started, joined)

    def application(self) -> Mounted:
        """The server as an ASGI application with a warm engine, for a program that has sockets of its own.

        Raises:
          UserError: an invalid option, or no such model; GenerationError for an option of a process that listens.
        """
        for name in COMMAND_ONLY:
            if getattr(self, name) != type(self).__dataclass_fields__[name].default:
                raise GenerationError(f"{name}={getattr(self, name)!r} is only for `llama-jax serve`; omit it here")
        _check_extra()
        self._check()
        self.check_template(self.format)
        from llama_jax.cli.jax_setup import use_compilation_cache
        from llama_jax.parallel.multihost import Processes
        from llama_jax.serving.http.server import Mounted

        use_compilation_cache(self.no_cache)
        begun = time.perf_counter()
        started = self.start(Processes())
        print_status(f"ready after {time.perf_counter() - begun:.1f} s")
        return Mounted(*started, self._server_options(most_connections=0))

    def _serve(self, listening: socket, started: float, joined: Processes) -> None:
        from llama_jax.serving.http.server import address_of, serve

        server, startup = self._server_options(self.most_connections), self._startup()

        def start() -> Started:
            print_status(f"listening on {address_of(listening)} {'with' if server.access.api_key else 'without'} a key")
            return self.start(joined, startup)

        ready = lambda: print_status(f"ready after {time.perf_counter() - started:.1f} s")
        serve(start, startup, server, listening, ready)
        joined.broadcast(b"")
        print_status("ended")
        if joined.count == 1:
            os._exit(0)  # in order, Python would wait for a step that still runs, and free array by array

    def _follow(self, joined: Processes) -> None:
        """Make the calls of process 0, until that ends."""
        from llama_jax.serving.multihost_engine import follow
        from llama_jax.serving.served_model import ServedModel

        for number in (signal.SIGTERM, signal.SIGINT):  # which a whole group gets: process 0 drains, and ends the others
            signal.signal(number, signal.SIG_IGN)
        startup = self._startup()
        self._begin(joined, startup)
        config, params, tokenizer = self._load(joined, startup)
        options = self._engine_options(self.drafter(tokenizer))
        print_status(f"process {joined.index} of {joined.count} follows process 0")
        follow(ServedModel.of(config, params, options.cache, options.compute, options.draft), joined.receive)

    def _startup(self) -> Startup:
        from llama_jax.serving.http.server import Startup

        return Startup(log=None if sys.stderr.isatty() else print_status)  # a terminal has a bar instead

    def _begin(self, joined: Processes, startup: Startup) -> None:
        """Start the devices' backend, and check that all processes have the same options."""
        import jax

        from llama_jax.cli.jax_setup import start_backend

        startup.report("loading the model")
        start_backend()
        if joined.count > 1:
            sizes, devices = self.mesh_sizes(), jax.device_count()
            if sizes is None or sizes.devices != devices:
                raise MeshError(
                    f"{joined.count} processes have {devices} devices together; set --mesh tensor={devices}, so that each"
                    " holds its part of the model"
                )
            options = {name: getattr(self, name) for name in ("mesh", "dtype", "quantize", "rope", "draft")}
            options["adapters"] = list(self.named_adapters())
            joined.assert_equal("the options", {**options, "the engine": repr(self._engine_options())})
        self.check_draft()

    def _load(self, joined: Processes, startup: Startup) -> tuple[llama_jax.LlamaConfig, llama_jax.LlamaParams, Tokenizer]:
        """The model; with several processes this one's part of it, which is to be the same model in all."""
        from llama_jax.cli.jax_setup import loading_bar

        def progress(layers: Sequence[int]) -> Iterator[int]:
            for done, layer in enumerate(loading_bar(layers)):
                startup.report("loading the model", done, len(layers))
                yield layer

        config, params, tokenizer = self.load(progress)
        tokenizer = self.with_template(tokenizer)
        joined.assert_equal("the model", {"the model": repr(config)})
        return config, params, tokenizer

    def _planned(self, joined: Processes) -> tuple[llama_jax.EngineOptions, MemoryPlan]:
        """Options of the engine for which the memory is large enough, before anything is allocated, without a drafter.

        Raises:
          UserError: what was chosen does not fit.
        """
        import jax

        from llama_jax.formats.loading import open_checkpoint, planned_weights
        from llama_jax.serving.options import (
            ACCELERATOR_SHARES,
            MACHINE_SHARES,
            MemoryPlan,
            fit_options,
            free_memory,
            program_bytes,
        )

        dtype = unless_auto(self.dtype)
        opened = open_checkpoint(self.model_path)
        target, weights = planned_weights(opened, dtype, unless_auto(self.quantize))
        config = with_rope(opened.config, self.rope)
        models = [(config, target)]
        if draft := self.draft_model():
            opened = open_checkpoint(draft)
            target, draft_weights = planned_weights(opened, dtype)
            models.append((replace(opened.config, max_seq_len=config.max_seq_len), target))  # if it is shorter, see `Engine`
            weights += draft_weights
        (device, *_) = jax.local_devices()
        sizes, free = self.mesh_sizes(), free_memory(device)
        parts = 1 if sizes is None else sizes.devices  # of what is divided, one is on each device
        shares: tuple[float, ...] = ACCELERATOR_SHARES
        if device.platform == "cpu":
            parts, shares = 1 if joined.on_one_host else joined.count, MACHINE_SHARES

        def plan_of(options: llama_jax.EngineOptions) -> MemoryPlan:
            pool = sum(options.pool_bytes(*model) for model in models)
            programs = options.programs * sum(program_bytes(model_config, device.platform) for model_config, _ in models)
            programs += (
                4 * options.for_platform(device.platform).chunk_tokens * config.vocab_size
            )  # logits of a scored prompt
            rest = {"weights": weights // parts, "programs": programs}
            return MemoryPlan(pool=pool // parts, free=free, **rest)

        chosen = [name for name in ("rows", "cache_tokens", "context") if getattr(self, name) is not None]
        return fit_options(self._engine_options(), config, plan_of, chosen, shares)

    def start(self, joined: Processes, startup: Startup | None = None) -> Started:
        """The engine, warm, and the model as clients see it; says what they are."""
        import jax

        from llama_jax.model.cache import PAGE_SIZE
        from llama_jax.model.trees import bytes_in_memory, kinds_in_memory
        from llama_jax.ops.attention import record_backends
        from llama_jax.serving.engine import Engine
        from llama_jax.serving.http.server import Started
        from llama_jax.serving.multihost_engine import leading
        from llama_jax.serving.options import return_freed_memory
        from llama_jax.serving.served_model import ServedModel

        begun, startup = time.perf_counter(), startup or self._startup()
        self._begin(joined, startup)
        options, plan = self._planned(joined)
        print_status(f"memory: {plan}")
        config, params, tokenizer = self._load(joined, startup)
        memory = {"weights": plan.weights, "kv_cache": plan.pool, "programs": plan.programs}
        served = replace(self._served(tokenizer), memory=memory)
        options = replace(options, draft=self.drafter(tokenizer))
        loaded = time.perf_counter()
        with record_backends() as attention:
            model = ServedModel.of(config, params, options.cache, options.compute, options.draft)
            engine = Engine(config, params, options, model if joined.count == 1 else leading(model, joined.broadcast))
            with _compiling(startup) as progress:
                compiled = engine.warm(progress)
        return_freed_memory()
        mesh = f" · mesh {self.mesh_sizes()}" if self.mesh else ""
        mesh += f" over {joined.count} processes" if joined.count > 1 else ""
        weights = f"{kinds_in_memory(params)}, {bytes_in_memory(params) / 1e6:,.1f} MB"
        longest = f" of the model's {config.max_seq_len} (--context)" if engine.context < config.max_seq_len else ""
        notes = [
            f"{jax.default_backend()} ({jax.devices()[0].device_kind}){mesh} · {params.embedding.dtype}"
            f" · attention {' and '.join(attention)} · weights {weights}",
            f"{served.name} · {f'chat by {served.chat}' if served.chat else 'no chat: it completes texts'}"
            f" · context {engine.context} tokens{longest} · {options.rows} rows"
            f" · a cache of {engine.scheduler.pages.count * PAGE_SIZE:,} tokens",
        ]
        if served.adapters:
            notes.append(f"adapters, chosen as the model: {', '.join(served.adapters)}")
        print_status(*notes, f"loaded in {loaded - begun:.1f} s, compiled in {compiled:.1f}")
        return Started(engine, served)

    def _check(self) -> None:
        check_fields(self)
        self.parse_draft()
        if self._name() in self.named_adapters():
            raise GenerationError(f"adapter {self._name()!r} has the model's name; choose another, or set --name")
        if self._key() == "":
            raise GenerationError(f"the API key is empty; set one, or omit --api-key and {KEY_VARIABLE}")

    def _key(self) -> str | None:
        return os.environ.get(KEY_VARIABLE) if self.api_key is None else self.api_key

    def _engine_options(self, draft: llama_jax.PromptLookup | llama_jax.DraftModel | None = None) -> llama_jax.EngineOptions:
        return llama_jax.EngineOptions(
            rows=16 if self.rows is None else self.rows,
            cache_tokens=self.cache_tokens,
            context=self.context,
            prefill_chunk=self.prefill_chunk,
            most_waiting=self.most_waiting,
            most_waiting_tokens=self.most_waiting_tokens,
            prefix_bytes=self.prefix_cache * 2**20,
            draft=draft,
            cache=self.cache_options(),
            compute=self.compute(),
        )

    def _server_options(self, most_connections: int) -> ServerOptions:
        from llama_jax.serving.http.auth import Access
        from llama_jax.serving.http.service import ServerOptions

        access = Access(
            api_key=self._key(),
            hosts=(self.host, *self.allow_host),
            origins=self.allow_origin,
            most_connections=most_connections,
            open_metrics=self.open_metrics,
        )
        return ServerOptions(
            access=access,
            most_choices=min(self.most_choices, max(self.most_waiting, 1)),
            largest_body=round(self.body_mb * 2**20),
            seconds=self.timeout,
            drain_seconds=self.drain,
            wedged_after=self.wedged,
        )

    def _served(self, tokenizer: Tokenizer) -> Served:
        """The model as clients see it; GenerationError for a --format that it cannot have."""
        from llama_jax.serving.http.service import Served

        common: Any = {"name": self._name(), "tokenizer": tokenizer, "adapters": tuple(self.named_adapters())}
        try:
            chat = resolve_format(tokenizer, self.format)
            with closing(Renderer(template_args=self.template_args())) as renderer:
                reply_ends(tokenizer, chat, renderer)  # which finds out whether the vocabulary has what the format needs
        except GenerationError as error:
            if self.format != "auto":
                raise
            return Served(**common, chat=None, no_chat=str(error))
        return Served(**common, chat=chat, template_args=self.template_args())

    def _name(self) -> str:
        """What clients call the model."""
        if self.name or self.model is None:
            return self.name or "stories"
        return self.model.name if isinstance(self.model, StoredPath) else self.model.resolve().name


def _check_extra() -> None:
    from importlib.util import find_spec

    missing = [name for name in REQUIRED_MODULES if find_spec(name) is None]
    if missing:
        raise UserError(f'serving needs {", ".join(missing)}; install it with pip install -e ".[serve]"')


@contextmanager
def _compiling(startup: Startup) -> Iterator[Callable[[int, int], None]]:
    """Reports the programs that are compiled: to clients, and in a progress bar."""
    with progress_counter("compiling", "programs") as update:

        def progress(done: int, total: int) -> None:
            startup.report("compiling and trying programs", done, total)
            update(done, total)

        yield progress
