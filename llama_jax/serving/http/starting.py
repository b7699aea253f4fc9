"""What a server answers while the model is loaded and its programs are compiled."""

from __future__ import annotations

import html
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response

from llama_jax.serving.http.app import METRICS_TYPE, guarded, status_response
from llama_jax.serving.http.errors import ApiError
from llama_jax.serving.http.guard import Access
from llama_jax.serving.http.metrics import ServerMetrics

LOG_SECONDS = 10.0  # between two lines of the log
RETRY_SECONDS = 1, 60  # bounds of Retry-After; the first also where the end cannot be estimated
FEW = 2  # after which nothing can be estimated yet
STARTING_PAGE = (
    '<!doctype html><meta charset="utf-8"><meta http-equiv="refresh" content="2"><title>llama_jax</title>'
    "<p>The server is {0}. This page loads itself again."
)


@dataclass
class Startup:
    """How far a server is that is not ready yet. One thread reports, any may read.

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
        """Record what is being done, as "compiling programs", and how much of it."""
        now = time.monotonic()
        if doing != self._now[0]:
            self._begun = now
        self._now = doing, done, of
        if self.log is not None and now - self._logged >= LOG_SECONDS:
            self._logged = now
            self.log(str(self))

    @property
    def seconds_left(self) -> float | None:
        """An estimate for what is being done, at the pace so far; None where there is none yet."""
        _, done, of = self._now
        return (time.monotonic() - self._begun) / done * (of - done) if FEW < done < of else None

    def __str__(self) -> str:
        doing, done, of = self._now
        left = self.seconds_left
        return f"{doing}{f', {done} of {of}' * (of > 0)}{'' if left is None else f', about {left:.0f} s left'}"


def make_starting_app(
    startup: Startup, access: Access, metrics: ServerMetrics, connections: Callable[[], int] = lambda: 0
) -> Starlette:
    """The ASGI application until a server is ready; for the arguments see `make_app`."""

    async def health(request: Request) -> Response:
        return status_response(None, "")

    async def ready(request: Request) -> Response:
        return status_response(f"the server is {startup}", "not_ready")

    async def numbers(request: Request) -> Response:
        return Response(metrics.text(), headers={"Content-Type": METRICS_TYPE})

    async def page(request: Request) -> Response:
        return HTMLResponse(
            STARTING_PAGE.format(html.escape(str(startup))), 503, {"Content-Security-Policy": "default-src 'none'"}
        )

    async def other(request: Request, error: Exception) -> Response:
        least, most = RETRY_SECONDS
        seconds = min(max(round(startup.seconds_left or least), least), most)
        headers = {"Retry-After": str(seconds), "Connection": "close"}
        found = ApiError(503, f"the server is {startup}; /ready says when it has started", code="starting", headers=headers)
        return JSONResponse(found.body(), found.status, found.headers)

    handlers = {"/": page, "/health": health, "/ready": ready, "/metrics": numbers}
    table = {path: ("GET", handler) for path, handler in handlers.items()}
    return guarded(table, access, metrics, connections, {HTTPException: other})
