"""The routes."""

from __future__ import annotations

import time
import uuid
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from functools import partial
from importlib.resources import files
from typing import Any, TypeVar

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route

from llama_jax.serving.http import fields as f
from llama_jax.serving.http.answer import Answer
from llama_jax.serving.http.bodies import ChatAsked, CompletionAsked, read_chat, read_completion
from llama_jax.serving.http.errors import ApiError
from llama_jax.serving.http.formats import ChatFormat, CompletionFormat, Format
from llama_jax.serving.http.guard import Access, Guard
from llama_jax.serving.http.metrics import ServerMetrics
from llama_jax.serving.http.openapi import described, detokenize_fields, tokenize_fields
from llama_jax.serving.http.service import Service, Work

A = TypeVar("A", CompletionAsked, ChatAsked)
METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"
Handler = Callable[[Request], Awaitable[Response]]


def make_app(service: Service, access: Access, connections: Callable[[], int] = lambda: 0) -> Starlette:
    """The ASGI application of a service.

    Args:
      connections: returns how many there are now.
    """
    routes = Routes(service)
    table: dict[str, tuple[str, Handler]] = {
        "/": ("GET", routes.page),
        "/v1/completions": ("POST", routes.completions),
        "/v1/chat/completions": ("POST", routes.chat),
        "/v1/models": ("GET", routes.models),
        "/tokenize": ("POST", routes.tokenize),
        "/detokenize": ("POST", routes.detokenize),
        "/health": ("GET", routes.health),
        "/ready": ("GET", routes.ready),
        "/metrics": ("GET", routes.metrics),
        "/openapi.json": ("GET", routes.openapi),
    }
    handlers: Any = {ApiError: _api_error, HTTPException: _http_error, Exception: _surprise}
    return guarded(table, access, service.metrics, connections, handlers)


def guarded(
    table: Mapping[str, tuple[str, Handler]],
    access: Access,
    metrics: ServerMetrics,
    connections: Callable[[], int],
    handlers: Mapping[Any, Callable[[Request, Exception], Awaitable[Response]]],
) -> Starlette:
    """An application of routes, each with its method, that only those may ask whom `access` allows to."""
    guard = Middleware(Guard, access=access, paths=tuple(table), answered=metrics.answered, connections=connections)
    routes = [Route(path, handler, methods=[method]) for path, (method, handler) in table.items()]
    return Starlette(routes=routes, middleware=[guard], exception_handlers=handlers)


class Routes:
    """One method per route."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._tokenize = tokenize_fields(service.limits)
        self._detokenize = detokenize_fields(service.limits)

    async def completions(self, request: Request) -> Response:
        service, fields = self._service, self._service.completion_fields
        work = await self._work(request, lambda body: read_completion(fields, service.limits, body), service.complete)
        return Answer(service, work, self._format(CompletionFormat, "cmpl", work))  # type: ignore[return-value]

    async def chat(self, request: Request) -> Response:
        service, fields = self._service, self._service.chat_fields
        work = await self._work(request, lambda body: read_chat(fields, body), service.chat)
        return Answer(service, work, self._format(ChatFormat, "chatcmpl", work))  # type: ignore[return-value]

    async def _work(
        self, request: Request, read: Callable[[Any], A], submit: Callable[[A, float], Coroutine[Any, Any, Work]]
    ) -> Work:
        """Hand a request to the engine, unless its client disconnects or the server begins to shut down before."""
        arrived, service = time.monotonic(), self._service
        service.check_open()  # before a body is read for nothing
        async with service.bodies.read(request) as body:
            asked = await service.parse(body, read)
            service.check_model(asked.model)
            service.check_open()
            return await service.unless_ended(submit(asked, arrived), request.receive)

    def _format(self, kind: type[Format], prefix: str, work: Work) -> Format:
        asked = work.asked
        name = asked.model or self._service.served.name
        fixed = {"id": f"{prefix}-{uuid.uuid4().hex}", "created": int(time.time()), "model": name}
        return kind(fixed, self._service.names, scored=asked.alternatives is not None, usage=asked.usage is not None)

    async def models(self, request: Request) -> Response:
        service = self._service
        model = {
            "object": "model",
            "created": service.created,
            "owned_by": "llama_jax",
            "max_model_len": service.limits.context,
            "chat": service.served.chat is not None,
        }
        base, *adapters = service.served.names
        data = [{"id": base, **model, "parent": None}, *({"id": name, **model, "parent": base} for name in adapters)]
        return JSONResponse({"object": "list", "data": data})

    async def tokenize(self, request: Request) -> Response:
        service = self._service
        async with service.bodies.read(request) as body:
            given = await service.parse(body, partial(f.read_object, self._tokenize))
            service.check_model(given["model"])
            ends = None if given["add_special_tokens"] else False
            return Response(await service.tokenize(given["prompt"], ends), media_type="application/json")

    async def detokenize(self, request: Request) -> Response:
        service = self._service
        async with service.bodies.read(request) as body:
            given = await service.parse(body, partial(f.read_object, self._detokenize))
            service.check_model(given["model"])
            return JSONResponse({"prompt": await service.decode(given["tokens"], "tokens")})

    async def health(self, request: Request) -> Response:
        trouble = self._service.trouble()
        return status_response(trouble, "unhealthy")

    async def ready(self, request: Request) -> Response:
        trouble = "the server is shutting down" if self._service.draining else self._service.trouble()
        return status_response(trouble, "not_ready")

    async def metrics(self, request: Request) -> Response:
        return Response(self._service.metrics.text(), headers={"Content-Type": METRICS_TYPE})

    async def openapi(self, request: Request) -> Response:
        return JSONResponse(described(self._service))

    async def page(self, request: Request) -> Response:
        # The page shows what a model wrote, so it may load and run only its own content.
        policy = (
            "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'; base-uri 'none'"
        )
        headers = {
            "Content-Security-Policy": f"{policy}; form-action 'none'; frame-ancestors 'none'",
            "X-Content-Type-Options": "nosniff",
        }
        return HTMLResponse(files("llama_jax.serving.http").joinpath("page.html").read_text("utf-8"), headers=headers)


def status_response(trouble: str | None, code: str) -> Response:
    """The answer to a probe: 200, or 503 with what is not as it should be."""
    if trouble is None:
        return JSONResponse({"status": "ok"})
    return JSONResponse(ApiError(503, trouble, code=code).body(), 503)


async def _api_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return JSONResponse(error.body(), error.status, error.headers)


async def _surprise(request: Request, error: Exception) -> Response:
    """The response to an unexpected exception: the log has the traceback; the client is told only its type."""
    found = ApiError(500, f"the server failed at this request ({type(error).__name__}); its log says why", code="internal")
    return JSONResponse(found.body(), found.status)


async def _http_error(request: Request, error: Exception) -> Response:
    """The response to an unknown path or method."""
    assert isinstance(error, HTTPException)
    said = {404: f"{request.url.path[:200]} is not here; /openapi.json lists what is"}
    said[405] = f"{request.method} is not for {request.url.path[:200]}; /openapi.json says what is"
    found = ApiError(error.status_code, said.get(error.status_code, error.detail), headers=error.headers)
    return JSONResponse(found.body(), found.status, found.headers)
