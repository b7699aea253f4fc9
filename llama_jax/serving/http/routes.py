"""The routes, and their description as OpenAPI."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from functools import partial
from importlib.resources import files
from types import SimpleNamespace
from typing import Any, TypeVar

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route

import llama_jax
from llama_jax.serving.http import schema as f
from llama_jax.serving.http.auth import Access, Guard
from llama_jax.serving.http.errors import ApiError
from llama_jax.serving.http.metrics import ServerMetrics
from llama_jax.serving.http.request_schema import read_chat, read_completion
from llama_jax.serving.http.response import unless_disconnected
from llama_jax.serving.http.schema import Schema
from llama_jax.serving.http.service import Service, Submit

T = TypeVar("T")
MODEL_PATH = "/v1/models/{name:path}"
SHUTTING_DOWN = "the server is shutting down"
Handler = Callable[[Request], Awaitable[Response]]


def make_app(service: Service, connections: Callable[[], int] = lambda: 0) -> Starlette:
    """The ASGI application of a service.

    Args:
      connections: returns the current number of connections.
    """
    routes = Routes(service)
    table: dict[str, tuple[str, Handler]] = {
        "/": ("GET", chat_page),
        "/v1/completions": ("POST", routes.completions),
        "/v1/chat/completions": ("POST", routes.chat),
        "/v1/models": ("GET", routes.models),
        MODEL_PATH: ("GET", routes.model),
        "/tokenize": ("POST", routes.tokenize),
        "/detokenize": ("POST", routes.detokenize),
        "/openapi.json": ("GET", routes.openapi),
        **probes(service.metrics, service.trouble, lambda: SHUTTING_DOWN if service.draining else service.trouble()),
    }
    handlers: Any = {ApiError: _api_error, HTTPException: _http_error, Exception: _unexpected_error}
    return guarded(table, service.options.access, service.metrics, connections, handlers)


def guarded(
    table: Mapping[str, tuple[str, Handler]],
    access: Access,
    metrics: ServerMetrics,
    connections: Callable[[], int],
    handlers: Mapping[Any, Callable[[Request, Exception], Awaitable[Response]]],
) -> Starlette:
    """An application with these routes and methods, for requests that `access` allows."""
    guard = Middleware(Guard, access=access, paths=tuple(table), answered=metrics.answered, connections=connections)
    routes = [Route(path, handler, methods=[method]) for path, (method, handler) in table.items()]
    return Starlette(routes=routes, middleware=[guard], exception_handlers=handlers)


class Routes:
    """One method per route."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def completions(self, request: Request) -> Response:
        service = self._service
        read = partial(read_completion, limits=service.limits)
        return await self._generate("/v1/completions", request, read, service.complete)

    async def chat(self, request: Request) -> Response:
        service = self._service
        read = partial(read_chat, limits=service.limits)
        return await self._generate("/v1/chat/completions", request, read, service.chat)

    async def _generate(
        self,
        path: str,
        request: Request,
        read: Callable[..., Any],
        prepare: Callable[[Any], Coroutine[Any, Any, Submit]],
    ) -> Response:
        """Submit a request to the engine, unless its client disconnects or the server begins to shut down earlier."""
        arrived, service = time.monotonic(), self._service
        service.check_open()  # before a body is read for nothing
        submit = await self._post(path, request, read, lambda typed: unless_disconnected(prepare(typed), request.receive))
        return submit(arrived)  # type: ignore[return-value]

    async def _post(
        self, path: str, request: Request, read: Callable[..., Any], use: Callable[[Any], Coroutine[Any, Any, T]]
    ) -> T:
        """The result of `use` for a body, which counts in the budget until its text is converted, even if the client left.

        Args:
          path: path of the route; the URL may have a prefix, if the application is mounted.
          read: builds the typed request from the schema and the value of the body.
          use: is called with that request.
        """
        service = self._service
        with service.preparing():
            async with service.bodies.read(request) as body:
                typed = await service.parse(body, partial(read, service.schemas[path]))
                service.check_model(typed.model)
                return await use(typed)

    async def tokenize(self, request: Request) -> Response:
        use = lambda typed: self._service.tokenize(typed.prompt, typed.add_special_tokens, typed.parse_special)
        return Response(await self._post("/tokenize", request, _read_fields, use), media_type="application/json")

    async def detokenize(self, request: Request) -> Response:
        use = lambda typed: self._service.decode(typed.tokens, "tokens")
        return JSONResponse({"prompt": await self._post("/detokenize", request, _read_fields, use)})

    async def models(self, request: Request) -> Response:
        return JSONResponse({"object": "list", "data": self._models()})

    async def model(self, request: Request) -> Response:
        name = request.path_params["name"]
        self._service.check_model(name)
        return JSONResponse(next(model for model in self._models() if model["id"] == name))

    def _models(self) -> list[dict[str, Any]]:
        service = self._service
        model = {
            "object": "model",
            "created": service.created,
            "owned_by": "llama_jax",
            "max_model_len": service.limits.context,
            "chat": service.served.chat is not None,
            "memory": dict(service.served.memory),
        }
        base, *adapters = service.served.names
        return [{"id": base, **model, "parent": None}, *({"id": name, **model, "parent": base} for name in adapters)]

    async def openapi(self, request: Request) -> Response:
        return JSONResponse(openapi_description(self._service))


async def chat_page(request: Request, status: int = 200) -> Response:
    """The chat page, which polls `/ready` until the server is ready."""
    # It shows model output, so it may load and run only its own content.
    policy = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'; base-uri 'none'"
    headers = {
        "Content-Security-Policy": f"{policy}; form-action 'none'; frame-ancestors 'none'",
        "X-Content-Type-Options": "nosniff",
    }
    content = files("llama_jax.serving.http").joinpath("page.html").read_text("utf-8")
    return HTMLResponse(content, status, headers)


def probes(
    metrics: ServerMetrics, unhealthy: Callable[[], str | None], not_ready: Callable[[], str | None]
) -> dict[str, tuple[str, Handler]]:
    """The routes for monitoring a server.

    Args:
      unhealthy, not_ready: return the problem, or None.
    """

    async def health(request: Request) -> Response:
        return status(unhealthy(), "unhealthy")

    async def ready(request: Request) -> Response:
        return status(not_ready(), "not_ready")

    async def numbers(request: Request) -> Response:
        return Response(metrics.text(), headers={"Content-Type": "text/plain; version=0.0.4; charset=utf-8"})

    def status(trouble: str | None, code: str) -> Response:
        return JSONResponse({"status": "ok"}) if trouble is None else ApiError(503, trouble, code=code).response()

    return {"/health": ("GET", health), "/ready": ("GET", ready), "/metrics": ("GET", numbers)}


def _read_fields(schema: Schema, body: Any) -> SimpleNamespace:
    return SimpleNamespace(**f.read(schema, body))


async def _api_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return error.response()


async def _unexpected_error(request: Request, error: Exception) -> Response:
    """The response to an unexpected exception: the traceback is logged; the client gets only its type."""
    message = f"the server failed to handle this request ({type(error).__name__}); see its log"
    return ApiError(500, message, code="internal").response()


async def _http_error(request: Request, error: Exception) -> Response:
    """The response to an unknown path or method."""
    assert isinstance(error, HTTPException)
    messages = {404: f"there is no {request.url.path[:200]}; /openapi.json lists the paths"}
    messages[405] = f"{request.url.path[:200]} does not support {request.method}; /openapi.json lists the methods"
    return ApiError(error.status_code, messages.get(error.status_code, error.detail), headers=error.headers).response()


TEXT_SCHEMA: Schema = {"type": "string"}
COUNT_SCHEMA: Schema = {"type": "integer", "minimum": 0}


def openapi_description(service: Service) -> Schema:
    """The OpenAPI description of the routes, with the limits of this server."""
    schemas = service.schemas
    chunks = "With stream=true, a text/event-stream of chunks that ends with `data: [DONE]`."
    return {
        "openapi": "3.1.0",
        "info": {"title": "llama_jax", "version": llama_jax.__version__, "description": f"Serves {service.served.name}."},
        "security": [{}, {"key": []}],
        "paths": {
            "/v1/completions": _post("Continue texts.", schemas["/v1/completions"], "Completion", chunks, stream=True),
            "/v1/chat/completions": _post("Reply in a chat.", schemas["/v1/chat/completions"], "Chat", chunks, stream=True),
            "/v1/models": _get("The served models.", "Models"),
            "/v1/models/{name}": _get_model(),
            "/tokenize": _post("Ids of a text.", schemas["/tokenize"], "Tokens"),
            "/detokenize": _post("The text of ids.", schemas["/detokenize"], "Text"),
            "/health": _get("Whether the engine runs; 503 if it has failed or is stuck.", "Status", probe=True),
            "/ready": _get("Whether new requests are accepted; 503 if not.", "Status", probe=True),
            "/metrics": _get("Metrics for Prometheus.", None),
        },
        "components": {"schemas": _schemas(), "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}}},
    }


def _ref(name: str) -> Schema:
    return {"$ref": f"#/components/schemas/{name}"}


def _response(summary: str, schema: Schema | None = None, media_type: str = "application/json") -> Schema:
    return {"description": summary, "content": {media_type: {"schema": schema or TEXT_SCHEMA}}}


def _errors(*statuses: int) -> Schema:
    return {str(status): _response("An error.", _ref("Error")) for status in statuses}


def _get(summary: str, schema: str | None, *, probe: bool = False) -> Schema:
    response = _response(summary, _ref(schema)) if schema else _response(summary, TEXT_SCHEMA, "text/plain")
    errors = _errors(403, 503) if probe else _errors(401, 403, 429)
    return {"get": {"summary": summary, "responses": {"200": response} | errors}}


def _get_model() -> Schema:
    described = _get("A served model; 404 if it is not served.", "Model")
    described["get"]["responses"] |= _errors(404)
    described["get"]["parameters"] = [{"name": "name", "in": "path", "required": True, "schema": TEXT_SCHEMA}]
    return described


def _post(summary: str, request: Schema, schema: str, details: str = "", *, stream: bool = False) -> Schema:
    response = _response(summary, _ref(schema))
    if stream:
        # OpenAPI 3.1 does not say whether a schema is that of the text or of an event.
        response["content"]["text/event-stream"] = {"schema": {"description": "Events with chunks."}}
    errors = _errors(400, 401, 403, 404, 408, 413, 415, 429) | (_errors(503, 504) if stream else {})
    body = {"required": True, "content": {"application/json": {"schema": f.described(request)}}}
    return {
        "post": {
            "summary": summary,
            "description": details or summary,
            "requestBody": body,
            "responses": {"200": response} | errors,
        }
    }


def _object(**properties: Schema) -> Schema:
    return f.object_of(properties, *properties)


def _list(schema: Schema) -> Schema:
    return {"type": "array", "items": schema}


def _answer_schema(object_type: str, choice: Schema) -> Schema:
    choices = _list(_object(index=COUNT_SCHEMA, **choice, finish_reason={"enum": ["stop", "length", "tool_calls"]}))
    return _object(
        id=TEXT_SCHEMA,
        object={"const": object_type},
        created={"type": "integer"},
        model=TEXT_SCHEMA,
        choices=choices,
        usage=_ref("Usage"),
    )


def _schemas() -> Schema:
    logprob = {"type": "number", "maximum": 1e-3}  # because of float32 rounding
    token = {"token": TEXT_SCHEMA, "logprob": logprob, "bytes": _list({"type": "integer", "minimum": 0, "maximum": 255})}
    of_tokens = {"type": "object", "additionalProperties": logprob}
    message = _object(role={"const": "assistant"}, content=f.or_null(TEXT_SCHEMA), refusal={"type": "null"})
    function = _object(name=TEXT_SCHEMA, arguments=TEXT_SCHEMA)
    message["properties"]["tool_calls"] = _list(_object(id=TEXT_SCHEMA, type={"const": "function"}, function=function))
    of_completion = _object(
        tokens=_list(TEXT_SCHEMA),
        token_logprobs=_list(f.or_null(logprob)),
        top_logprobs=_list(f.or_null(of_tokens)),
        text_offset=_list(COUNT_SCHEMA),
    )
    of_chat = _object(content=_list(_object(**token, top_logprobs=_list(_object(**token)))), refusal={"type": "null"})
    return {
        "Error": _object(
            error=_object(message=TEXT_SCHEMA, type=TEXT_SCHEMA, param=f.or_null(TEXT_SCHEMA), code=f.or_null(TEXT_SCHEMA))
        ),
        "Completion": _answer_schema("text_completion", {"text": TEXT_SCHEMA, "logprobs": f.or_null(of_completion)}),
        "Chat": _answer_schema("chat.completion", {"message": message, "logprobs": f.or_null(of_chat)}),
        "Usage": _object(
            prompt_tokens=COUNT_SCHEMA,
            completion_tokens=COUNT_SCHEMA,
            total_tokens=COUNT_SCHEMA,
            prompt_tokens_details=_object(cached_tokens=COUNT_SCHEMA),
        ),
        "Models": _object(object={"const": "list"}, data=_list(_ref("Model"))),
        "Model": _object(
            id=TEXT_SCHEMA,
            object={"const": "model"},
            created=COUNT_SCHEMA,
            owned_by=TEXT_SCHEMA,
            max_model_len=COUNT_SCHEMA,
            chat={"type": "boolean"},
            memory={"type": "object", "additionalProperties": COUNT_SCHEMA},
            parent=f.or_null(TEXT_SCHEMA),
        ),
        "Tokens": _object(count=COUNT_SCHEMA, max_model_len=COUNT_SCHEMA, tokens=_list(COUNT_SCHEMA)),
        "Text": _object(prompt=TEXT_SCHEMA),
        "Status": _object(status={"const": "ok"}),
    }
