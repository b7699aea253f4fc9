"""The routes."""

from __future__ import annotations

import asyncio
import json
import time
import uuid
from collections.abc import Awaitable, Callable
from importlib.resources import files
from typing import Any, NoReturn

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route

from llama_jax.errors import reason_of
from llama_jax.serving.http import fields as f
from llama_jax.serving.http.answer import Answer
from llama_jax.serving.http.bodies import read_chat, read_completion
from llama_jax.serving.http.errors import ApiError, refused
from llama_jax.serving.http.formats import ChatFormat, CompletionFormat, Format
from llama_jax.serving.http.guard import Access, Guard
from llama_jax.serving.http.openapi import described, detokenize_fields, tokenize_fields
from llama_jax.serving.http.service import Service, Work

BODY_SECONDS = 60  # limit for a client to send a body

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
    guard = Middleware(Guard, access=access, paths=tuple(table), answered=service.metrics.answered, connections=connections)
    return Starlette(
        routes=[Route(path, handler, methods=[method]) for path, (method, handler) in table.items()],
        middleware=[guard],
        exception_handlers={ApiError: _api_error, HTTPException: _http_error, Exception: _surprise},
    )


class Routes:
    """One method per route."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._tokenize = tokenize_fields(service.limits)
        self._detokenize = detokenize_fields(service.limits)

    async def completions(self, request: Request) -> Response:
        arrived, service = time.monotonic(), self._service
        service.check_open()  # before a body is read for nothing
        body = await read_json(request, service.limits.largest_body)
        asked = read_completion(service.completion_fields, service.limits, body)
        service.check_model(asked.model)
        service.check_open()
        work = await service.complete(asked, arrived)
        return Answer(service, work, self._format(CompletionFormat, "cmpl", work))  # type: ignore[return-value]

    async def chat(self, request: Request) -> Response:
        arrived, service = time.monotonic(), self._service
        service.check_open()  # before a body is read for nothing
        body = await read_json(request, service.limits.largest_body)
        asked = read_chat(service.chat_fields, body)
        service.check_model(asked.model)
        service.check_open()
        work = await service.chat(asked, arrived)
        return Answer(service, work, self._format(ChatFormat, "chatcmpl", work))  # type: ignore[return-value]

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
        given = f.read_object(self._tokenize, await read_json(request, service.limits.largest_body))
        service.check_model(given["model"])
        ends = None if given["add_special_tokens"] else False
        ids = await service.encode(given["prompt"], ends, ends)
        return JSONResponse({"count": len(ids), "max_model_len": service.limits.context, "tokens": ids})

    async def detokenize(self, request: Request) -> Response:
        service = self._service
        given = f.read_object(self._detokenize, await read_json(request, service.limits.largest_body))
        service.check_model(given["model"])
        return JSONResponse({"prompt": service.decode(given["tokens"], "tokens")})

    async def health(self, request: Request) -> Response:
        trouble = self._service.trouble()
        return _status(trouble, "unhealthy")

    async def ready(self, request: Request) -> Response:
        trouble = "the server is shutting down" if self._service.draining else self._service.trouble()
        return _status(trouble, "not_ready")

    async def metrics(self, request: Request) -> Response:
        media = "text/plain; version=0.0.4; charset=utf-8"
        return Response(self._service.metrics.text(), headers={"Content-Type": media})

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


async def read_json(request: Request, largest: int) -> Any:
    """The JSON body of a request; ApiError for a body that is not JSON, too large or too slow."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise ApiError(415, f"the content type {kind or 'that is missing'!r} is not JSON; send application/json")
    length = request.headers.get("content-length", "")
    if length.isdecimal() and int(length[:20]) > largest:
        raise _too_large(largest)
    content = bytearray()
    try:
        async with asyncio.timeout(BODY_SECONDS):
            async for part in request.stream():
                content += part
                if len(content) > largest:
                    raise _too_large(largest)
    except TimeoutError:
        raise ApiError(408, f"the body took longer than {BODY_SECONDS} s", headers={"Connection": "close"}) from None
    except ClientDisconnect:
        raise ApiError(400, "the client left before its body was whole") from None
    try:
        return json.loads(content, parse_constant=_no_number)
    except RecursionError:
        raise refused("the body is nested too deeply") from None
    except ValueError as error:  # also for invalid UTF-8, and for integers of thousands of digits
        raise refused(f"the body is not JSON: {reason_of(error)}", code="invalid_json") from None


def _no_number(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a number in JSON")


def _too_large(largest: int) -> ApiError:
    # The rest of the body is not read, so the connection cannot be reused.
    return ApiError(413, f"the body is larger than {largest} bytes; send less", headers={"Connection": "close"})


def _status(trouble: str | None, code: str) -> Response:
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
