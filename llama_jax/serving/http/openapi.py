"""`/openapi.json`: requests and responses of the routes. Requests are described by the tables that check them."""

from __future__ import annotations

from typing import Any

import llama_jax
from llama_jax.serving.http import fields as f
from llama_jax.serving.http.bodies import Limits
from llama_jax.serving.http.fields import Fields
from llama_jax.serving.http.service import Service

Schema = dict[str, Any]
TEXT: Schema = {"type": "string"}
COUNT: Schema = {"type": "integer", "minimum": 0}


def tokenize_fields(limits: Limits) -> Fields:
    """The fields of `/tokenize`."""
    return {
        "model": f.text(longest=1000),
        "prompt": f.text(longest=limits.longest_prompt, required=True),
        "add_special_tokens": f.boolean(True, "Put a BOS and an EOS where the vocabulary's own rule says so."),
    }


def detokenize_fields(limits: Limits) -> Fields:
    """The fields of `/detokenize`."""
    ids = f.token_ids(limits.vocab_size, most=1_000_000, fewest=0)
    return {"model": f.text(longest=1000), "tokens": ids}


def described(service: Service) -> Schema:
    """The description, with the limits of this server."""
    limits = service.limits
    chunks = "With stream=true a text/event-stream of chunks, which ends with `data: [DONE]`."
    return {
        "openapi": "3.1.0",
        "info": {"title": "llama_jax", "version": llama_jax.__version__, "description": f"Serves {service.served.name}."},
        "security": [{}, {"key": []}],
        "paths": {
            "/v1/completions": _post("Continue texts.", service.completion_fields, "Completion", chunks, stream=True),
            "/v1/chat/completions": _post("Reply in a chat.", service.chat_fields, "Chat", chunks, stream=True),
            "/v1/models": _get("What is served.", "Models"),
            "/tokenize": _post("Ids of a text.", tokenize_fields(limits), "Tokens"),
            "/detokenize": _post("The text of ids.", detokenize_fields(limits), "Text"),
            "/health": _get("Whether the engine runs; 503 where it has failed, or is stuck.", "Status", probe=True),
            "/ready": _get("Whether new requests are taken; 503 where not.", "Status", probe=True),
            "/metrics": _get("Numbers for Prometheus.", None),
        },
        "components": {"schemas": _schemas(), "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}}},
    }


def _ref(name: str) -> Schema:
    return {"$ref": f"#/components/schemas/{name}"}


def _response(about: str, schema: Schema | None = None, kind: str = "application/json") -> Schema:
    return {"description": about, "content": {kind: {"schema": schema or TEXT}}}


def _errors(*statuses: int) -> Schema:
    return {str(status): _response("An error.", _ref("Error")) for status in statuses}


def _get(about: str, schema: str | None, *, probe: bool = False) -> Schema:
    found = _response(about, _ref(schema)) if schema else _response(about, TEXT, "text/plain")
    errors = _errors(403, 503) if probe else _errors(401, 403, 429)
    return {"get": {"summary": about, "responses": {"200": found} | errors}}


def _post(about: str, fields: Fields, schema: str, more: str = "", *, stream: bool = False) -> Schema:
    found = _response(about, _ref(schema))
    if stream:
        found["content"]["text/event-stream"] = {"schema": TEXT}
    errors = _errors(400, 401, 403, 404, 408, 413, 415, 429) | (_errors(503, 504) if stream else {})
    body = {"required": True, "content": {"application/json": {"schema": f.schema_of(fields)}}}
    return {
        "post": {"summary": about, "description": more or about, "requestBody": body, "responses": {"200": found} | errors}
    }


def _object(**properties: Schema) -> Schema:
    return {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}


def _or_null(schema: Schema) -> Schema:
    return {"anyOf": [schema, {"type": "null"}]}


def _list(schema: Schema) -> Schema:
    return {"type": "array", "items": schema}


def _answer(kind: str, choice: Schema) -> Schema:
    choices = _list(_object(index=COUNT, **choice, finish_reason={"enum": ["stop", "length", "tool_calls"]}))
    return _object(
        id=TEXT, object={"const": kind}, created={"type": "integer"}, model=TEXT, choices=choices, usage=_ref("Usage")
    )


def _schemas() -> Schema:
    logprob = {"type": "number", "maximum": 1e-3}  # because of float32 rounding
    token = {"token": TEXT, "logprob": logprob, "bytes": _list({"type": "integer", "minimum": 0, "maximum": 255})}
    of_tokens = {"type": "object", "additionalProperties": logprob}
    message = _object(role={"const": "assistant"}, content=_or_null(TEXT), refusal={"type": "null"})
    function = _object(name=TEXT, arguments=TEXT)
    message["properties"]["tool_calls"] = _list(_object(id=TEXT, type={"const": "function"}, function=function))
    of_completion = _object(
        tokens=_list(TEXT),
        token_logprobs=_list(_or_null(logprob)),
        top_logprobs=_list(_or_null(of_tokens)),
        text_offset=_list(COUNT),
    )
    of_chat = _object(content=_list(_object(**token, top_logprobs=_list(_object(**token)))), refusal={"type": "null"})
    return {
        "Error": _object(error=_object(message=TEXT, type=TEXT, param=_or_null(TEXT), code=_or_null(TEXT))),
        "Completion": _answer("text_completion", {"text": TEXT, "logprobs": _or_null(of_completion)}),
        "Chat": _answer("chat.completion", {"message": message, "logprobs": _or_null(of_chat)}),
        "Usage": _object(
            prompt_tokens=COUNT,
            completion_tokens=COUNT,
            total_tokens=COUNT,
            prompt_tokens_details=_object(cached_tokens=COUNT),
        ),
        "Models": _object(
            object={"const": "list"},
            data=_list(
                _object(
                    id=TEXT,
                    object={"const": "model"},
                    created=COUNT,
                    owned_by=TEXT,
                    max_model_len=COUNT,
                    chat={"type": "boolean"},
                    parent=_or_null(TEXT),
                )
            ),
        ),
        "Tokens": _object(count=COUNT, max_model_len=COUNT, tokens=_list(COUNT)),
        "Text": _object(prompt=TEXT),
        "Status": _object(status={"const": "ok"}),
    }
