"""The server as an ASGI application, for a host that owns the sockets and the event loop, such as Ray Serve."""

from __future__ import annotations

from typing import Any

from starlette.types import ASGIApp, Receive, Scope, Send

from llama_jax.errors import UserError
from llama_jax.serving.http.request_schema import Limits
from llama_jax.serving.http.routes import make_app
from llama_jax.serving.http.server import ServerOptions
from llama_jax.serving.http.service import Served, Service


class Mounted:
    """An ASGI application with its own engine, which starts and stops with the lifespan events of its host.

    At shutdown it accepts no new requests, and running ones have `options.drain_seconds` to end.

    Args:
      engine: an `Engine` that is warm.

    Raises:
      UserError: a limit on connections, which only the host can count.
    """

    def __init__(self, engine: Any, served: Served, limits: Limits, options: ServerOptions = ServerOptions()) -> None:
        if options.access.most_connections:
            raise UserError(f"most_connections={options.access.most_connections}: the host has the connections; pass 0")
        self._model = engine, served, limits
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
            raise RuntimeError("the host has not begun this application: it must send ASGI's lifespan events")
        else:
            await self._app(scope, receive, send)

    async def _live(self, receive: Receive, send: Send) -> None:
        await receive()
        service = self._service = self._options.service(*self._model)
        self._app = make_app(service, self._options.access)
        service.start_engine()
        await send({"type": "lifespan.startup.complete"})
        await receive()
        if not service.ended.done():
            await service.drain(self._options.drain_seconds)
        service.close()
        await send({"type": "lifespan.shutdown.complete"})
