"""The messages of a chat, as OpenAI's clients send them."""

from __future__ import annotations

import json
from typing import Any

from llama_jax.errors import shown
from llama_jax.serving.http import schema as f
from llama_jax.serving.http.errors import refused
from llama_jax.serving.http.schema import Field, Fields
from llama_jax.tokenizers import Message

IGNORED = ("refusal", "audio", "annotations", "function_call")  # clients send these back empty
OWN = {"assistant": ("tool_calls",), "tool": ("tool_call_id", "name")}  # fields of these roles alone
KNOWN = ("role", "content", "name", "tool_calls", "tool_call_id", *IGNORED)
ROLES = ("system", "developer", "user", "assistant", "tool")


def messages_field(longest: int, most: int) -> Field:
    """The field `messages`.

    Args:
      longest: characters of all contents together.
      most: messages.
    """

    def read(name: str, value: Any) -> tuple[Message, ...]:
        if not isinstance(value, list) or not value:
            raise refused(f"{name}={shown(value, 40)} must be a list with at least one message", name)
        if len(value) > most:
            message = f"{name} has {len(value)} messages, more than {most}, the tokens of the context; leave some out"
            raise refused(message, name, "context_length_exceeded")
        found = tuple(_message(f"{name}[{i}]", each, longest) for i, each in enumerate(value))
        length = sum(len(message["content"]) for message in found)
        if length > longest:
            raise refused(f"{name} have {length} characters, more than {longest}", name, "context_length_exceeded")
        return found

    return Field(_schema(longest), read, required=True)


def _call_fields() -> Fields:
    function: Fields = {"name": f.text(longest=64, required=True), "arguments": f.text(longest=1_000_000, required=True)}
    return {
        "id": f.text(longest=1000, required=True),
        "type": Field({"const": "function"}, f.one_of(["function"]).read, required=True),
        "function": Field(f.schema_of(function), f.nested(function).read, required=True),
        "index": f.integer(0, 2**31),
    }


CALLS = f.listed(f.nested(_call_fields()), most=1000)


def _schema(longest: int) -> dict[str, Any]:
    text = {"type": "string", "maxLength": longest}
    part = {
        "type": "object",
        "properties": {"type": {"const": "text"}, "text": text},
        "required": ["type", "text"],
        "additionalProperties": False,
    }
    content: dict[str, Any] = {"anyOf": [text, {"type": "array", "items": part}]}
    more: dict[str, Any] = {name: {"enum": [None, []]} for name in IGNORED}
    name = {"type": ["string", "null"], "maxLength": 1000}

    def message(roles: list[str], **properties: Any) -> dict[str, Any]:
        return {
            "type": "object",
            "properties": {"role": {"enum": roles}, "content": content, "name": {"type": "null"}, **more, **properties},
            "required": ["role"] if "tool_calls" in properties else ["role", "content"],
            "additionalProperties": False,
        }

    calls = {"anyOf": [CALLS.schema, {"type": "null"}]}
    kinds = [
        message(["system", "developer", "user"]),
        message(["assistant"], tool_calls=calls, content={"anyOf": [*content["anyOf"], {"type": "null"}]}),
        message(["tool"], tool_call_id=name, name=name),
    ]
    return {"type": "array", "items": {"oneOf": kinds}, "minItems": 1}


def _message(name: str, value: Any, longest: int) -> Message:
    if not isinstance(value, dict):
        raise refused(f"{name}={shown(value, 40)} must be an object with a role and a content", name)
    role = value.get("role")
    if role not in ROLES:
        raise refused(f"{name}.role={shown(role, 40)} must be one of {', '.join(ROLES)}", f"{name}.role")
    for key, entry in value.items():
        if key not in KNOWN:
            raise refused(f"{name}.{shown(key, 60)}: not known here; leave it out", name, "unknown_field")
        empty = entry is None or (entry == [] and key not in ("name", "tool_call_id"))
        if not empty and key not in ("role", "content", *OWN.get(role, ())):
            raise refused(f"{name}.{key} is not supported here; leave it out", f"{name}.{key}", "unsupported")
    calls = CALLS.read(f"{name}.tool_calls", value.get("tool_calls") or []) if role == "assistant" else ()
    found: Message = {
        "role": "system" if role == "developer" else role,
        "content": _content(f"{name}.content", value.get("content"), longest, optional=bool(calls)),
    }
    if calls:
        found["tool_calls"] = [_as_templates_take_it(f"{name}.tool_calls", call) for call in calls]
    if role == "tool":
        for key in OWN[role]:
            if value.get(key) is not None:
                found[key] = f.read_text(f"{name}.{key}", value[key], 1000)  # type: ignore[literal-required]
    return found


def _content(name: str, content: Any, longest: int, *, optional: bool) -> str:
    if isinstance(content, list):
        for i, part in enumerate(content):
            if not isinstance(part, dict) or set(part) != {"type", "text"} or part["type"] != "text":
                raise refused(f"{name}[{i}] must be a part of type text; others are not supported", name, "unsupported")
        content = "".join(f.read_text(f"{name}[{i}].text", part["text"], longest) for i, part in enumerate(content))
    return "" if content is None and optional else f.read_text(name, content, longest)


def _as_templates_take_it(name: str, call: dict[str, Any]) -> dict[str, Any]:
    """A call whose arguments are an object, not a JSON string."""
    try:
        arguments = json.loads(call["function"]["arguments"])
    except (ValueError, RecursionError):
        raise refused(f"{name} has arguments that are not JSON; send what was received", name) from None
    if not isinstance(arguments, dict):
        raise refused(f"{name} has arguments that are no JSON object; send what was received", name)
    return {"id": call["id"], "type": "function", "function": {"name": call["function"]["name"], "arguments": arguments}}
