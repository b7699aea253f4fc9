"""The server process: responses during startup, the engine on a thread, the sockets on an event loop, and shutdown.

`Mounted` is the same server for a host that owns the sockets and the event loop, such as Ray Serve.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from llama_jax.errors import UserError, reason_of
from llama_jax.serving.http.auth import Access
from llama_jax.serving.http.connection import Connection
from llama_jax.serving.http.errors import ApiError
from llama_jax.serving.http.metrics import ServerMetrics
from llama_jax.serving.http.routes import Handler, chat_page, guarded, make_app, probes
from llama_jax.serving.http.service import Served, ServerOptions, Service
from llama_jax.serving.thread_pool import DaemonThreadPool

SWITCH_SECONDS = 0.001  # thread switch interval, so that converting a long text does not delay the engine and the event loop
LAST_WORDS = 0.5  # seconds after the end of the engine in which clients can read responses before they are disconnected


def listen(host: str, port: int) -> socket.socket:
    """A listening socket; UserError if that fails. Opened before loading the model, which may take minutes."""
    with contextlib.ExitStack() as stack:
        try:
            addresses = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
            family, socket_type, protocol, _, address = addresses[0]
            listening = stack.enter_context(socket.socket(family, socket_type, protocol))
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listening.bind(address)
        except (OSError, OverflowError) as error:
            reason = reason_of(getattr(error, "strerror", None) or error)
            remedy = "choose another --port (0 for a free one) or --host"
            raise UserError(f"cannot listen on {host} port {port} ({reason}); {remedy}") from None
        stack.pop_all()
    listening.setblocking(False)
    return listening


def address_of(listening: socket.socket) -> str:
    """The URL for a browser."""
    host, port = listening.getsockname()[:2]
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"


class Started(NamedTuple):
    """A warmed-up `Engine`, and the model as clients see it."""

    engine: Any
    served: Served


def serve(
    start: Callable[[], Started],
    startup: Startup,
    options: ServerOptions,
    listening: socket.socket,
    ready: Callable[[], None],
) -> None:
    """Serve until SIGTERM or SIGINT, and then until all running requests have ended; call it on the main thread.

    Args:
      start: called on a thread when the server listens. Until it returns, every request is answered with its progress, and
        signal handlers are unchanged, since it cannot be interrupted.
      startup: records the progress of `start`.
      ready: called when requests are accepted.

    Objects that exist by then are excluded from later garbage collections: a full one would scan everything that JAX has
    traced, about 300,000 objects, and stop all threads for a tenth of a second or more.

    Raises:
      the exception of `start`, or of a failed engine, after all requests have been answered.

    Returns within 1.5 seconds after `options.drain_seconds`, whatever clients and engine do. The engine's daemon thread may
    then still be in a step.
    """

    def begin() -> Started:
        started = start()
        gc.collect()
        gc.freeze()
        return started

    sys.setswitchinterval(SWITCH_SECONDS)
    with asyncio.Runner(loop_factory=_loop_factory()) as runner:
        failure = runner.run(_serve(begin, startup, options, listening, ready))
    if failure is not None:
        raise failure


async def _serve(
    start: Callable[[], Started],
    startup: Startup,
    options: ServerOptions,
    listening: socket.socket,
    ready: Callable[[], None],
) -> BaseException | None:
    loop = asyncio.get_running_loop()
    config = uvicorn.Config(
        lambda *arguments: app(*arguments),
        interface="asgi3",
        http=Connection,
        ws="none",
        lifespan="off",
        log_config=None,  # a config would close all existing handlers
        log_level="error",
        access_log=False,
        server_header=False,
        backlog=2048,
    )
    server = _Server(config)
    connections = lambda: len(server.server_state.connections)
    metrics = ServerMetrics()
    app = make_starting_app(startup, options.access, metrics, connections)
    serving = asyncio.create_task(server.serve(sockets=[listening]))
    while not server.started and not serving.done():
        await asyncio.sleep(0.01)
    starting = asyncio.wrap_future(DaemonThreadPool("starting", 1).submit(start))
    first: list[asyncio.Future[Any]] = [starting, serving]
    await asyncio.wait(first, return_when=asyncio.FIRST_COMPLETED)
    if not starting.done() or starting.exception() is not None:
        await server.end(serving, LAST_WORDS)
        return starting.exception() if starting.done() else None
    service = Service(*starting.result(), options, metrics)
    stop: asyncio.Future[None] = loop.create_future()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, partial(_set_stop, number, stop))
    service.start_engine()
    app = make_app(service, connections)
    ready()
    first = [service.ended, stop, serving]
    await asyncio.wait(first, return_when=asyncio.FIRST_COMPLETED)
    if not service.ended.done():
        await service.drain(options.drain_seconds)
    await server.end(serving, LAST_WORDS)
    service.close()
    if service.ended.done():
        return service.ended.result()
    if service.trouble() is not None:
        os._exit(1)  # the engine hangs in a program, so an orderly exit of Python would hang too
    return None  # the engine is in a long step; do not wait for it


def _set_stop(number: int, stop: asyncio.Future[None]) -> None:
    """Start an orderly shutdown on the first signal; end the process immediately on the second."""
    if stop.done():
        os._exit(128 + number)
    stop.set_result(None)


class _Server(uvicorn.Server):
    """A uvicorn server without signal handlers, and with a time limit for its end."""

    async def end(self, serving: asyncio.Task[None], seconds: float) -> None:
        """Close connections when their responses have been sent, and the others after `seconds`."""
        self.should_exit = True
        await asyncio.wait([serving], timeout=seconds)
        self.force_exit = True
        for connection in list(self.server_state.connections):
            connection.transport.abort()  # uvicorn would wait for a client that does not read
        done, _ = await asyncio.wait([serving], timeout=seconds)
        for task in done:
            task.result()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop]:
    """uvloop if it is installed: it halves the cost of writing to sockets."""
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop
    return uvloop.new_event_loop


LOG_SECONDS = 10.0  # between log lines
RETRY_SECONDS = 1, 60  # bounds of Retry-After; the first also if the end cannot be estimated
FEW = 2  # up to this number of finished items no estimate is made


@dataclass
class Startup:
    """The progress of a starting server. One thread reports; any thread may read.

    Attributes:
      log: called with a line every LOG_SECONDS; None for no log.
    """

    log: Callable[[str], None] | None = None
    _now: tuple[str, int, int] = field(init=False, default=("starting", 0, 0))
    _begun: float = field(init=False)
    _logged: float = field(init=False)

    def __post_init__(self) -> None:
        self._begun = self._logged = time.monotonic()

    def report(self, doing: str, done: int = 0, of: int = 0) -> None:
        """Record the current stage, such as "compiling programs", and its progress."""
        now = time.monotonic()
        if doing != self._now[0]:
            self._begun = now
        self._now = doing, done, of
        if self.log is not None and now - self._logged >= LOG_SECONDS:
            self._logged = now
            self.log(str(self))

    @property
    def seconds_left(self) -> float | None:
        """Estimated remaining seconds of the current stage, at its speed so far; None if not known yet."""
        _, done, of = self._now
        return (time.monotonic() - self._begun) / done * (of - done) if FEW < done < of else None

    def __str__(self) -> str:
        doing, done, of = self._now
        left = self.seconds_left
        return f"{doing}{f', {done} of {of}' * (of > 0)}{'' if left is None else f', about {left:.0f} s left'}"


def make_starting_app(
    startup: Startup, access: Access, metrics: ServerMetrics, connections: Callable[[], int] = lambda: 0
) -> Starlette:
    """The ASGI application until the server is ready; for the arguments see `make_app`."""

    async def other(request: Request, error: Exception) -> Response:
        least, most = RETRY_SECONDS
        seconds = min(max(round(startup.seconds_left or least), least), most)
        headers = {"Retry-After": str(seconds), "Connection": "close"}
        message = f"the server is {startup}; /ready reports when it has started"
        return ApiError(503, message, code="starting", headers=headers).response()

    table: dict[str, tuple[str, Handler]] = {
        "/": ("GET", partial(chat_page, status=503)),
        **probes(metrics, lambda: None, lambda: f"the server is {startup}"),
    }
    return guarded(table, access, metrics, connections, {HTTPException: other})


class Mounted:
    """A server as an ASGI application; its engine starts and stops with the lifespan events of the host.

    At shutdown it accepts no new requests, and running ones have `options.drain_seconds` to end.

    Args:
      engine: a warmed-up `Engine`.

    Raises:
      UserError: a limit on connections, which only the host can count.
    """

    def __init__(self, engine: Any, served: Served, options: ServerOptions = ServerOptions()) -> None:
        if options.access.most_connections:
            raise UserError(f"most_connections={options.access.most_connections} must be 0: the host manages connections")
        self._engine = engine
        self._served = served
        self._options = options
        self._service: Service | None = None
        self._app: ASGIApp | None = None

    def trouble(self) -> str | None:
        """Why the server is not healthy, as `/health` reports it, or None. From any thread."""
        return None if self._service is None else self._service.trouble()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._live(receive, send)
        elif self._app is None:
            raise RuntimeError("the host has not started this application: it must send ASGI's lifespan events")
        else:
            await self._app(scope, receive, send)

    async def _live(self, receive: Receive, send: Send) -> None:
        await receive()
        service = self._service = Service(self._engine, self._served, self._options)
        self._app = make_app(service)
        service.start_engine()
        await send({"type": "lifespan.startup.complete"})
        await receive()
        if not service.ended.done():
            await service.drain(self._options.drain_seconds)
        service.close()
        await send({"type": "lifespan.shutdown.complete"})
