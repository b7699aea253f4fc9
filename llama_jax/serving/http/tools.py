"""Tool calls: how a model writes them, in the forms that published templates ask for, and how clients get them."""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Sequence
from typing import Any, NamedTuple

from llama_jax.errors import shown
from llama_jax.serving.grammar import JSON_STYLE
from llama_jax.serving.http.errors import refused

OPENING, CLOSING = "<tool_call>", "</tool_call>"


class ToolCall(NamedTuple):
    """A call of a function; `arguments` are JSON."""

    id: str
    name: str
    arguments: str

    def as_dict(self) -> dict[str, Any]:
        return {"id": self.id, "type": "function", "function": {"name": self.name, "arguments": self.arguments}}


def grammar_of_calls(tools: Sequence[dict[str, Any]], names: Sequence[str], template: str, *, several: bool) -> str:
    """A grammar, in llguidance's Lark, of calls in the form of a template: in tags or as JSON alone.

    Args:
      tools: of a `ChatRequest`.
      names: of the tools that may be called.
      template: of the model's chats.
      several: whether there may be more than one call.

    Raises:
      ApiError: parameters that are not an object.
    """
    tagged = OPENING in template
    # Llama 3.1 uses this name for arguments, other templates OpenAI's. A template's text contains no schemas of tools.
    as_parameters = re.search(r'parameters\\?"\s*:', template) and not re.search(r'arguments\\?"\s*:', template)
    key = "parameters" if as_parameters else "arguments"
    called = [(i, tool["function"]) for i, tool in enumerate(tools) if tool["function"]["name"] in names]
    if tagged:
        one = f"{json.dumps(OPENING + chr(10))} call {json.dumps(chr(10) + CLOSING)}"
        start = f'{one} ("\\n" {one})*' if several else one
    else:
        start = 'call | "[" call (", " call)* "]"' if several else "call"
    lines = [f"start: {start}", "call: " + " | ".join(f"call_{i}" for i, _ in called)]
    for i, function in called:
        head = f'{{"name": {json.dumps(function["name"], ensure_ascii=False)}, "{key}": '
        lines.append(f'call_{i}: {json.dumps(head)} arguments_{i} "}}"')
        lines.append(f"arguments_{i}: %json {json.dumps(_arguments_schema(i, function))}")
    return "\n".join(lines)


def _arguments_schema(i: int, function: dict[str, Any]) -> dict[str, Any]:
    """The schema of a function's arguments, in the style in which JSON is written here."""
    schema = function.get("parameters", {})
    if schema.get("type", "object") != "object":
        name = f"tools[{i}].function.parameters"
        raise refused(f"{name} has type={shown(schema['type'], 40)}; a call needs an object", name)
    style = schema.get("x-guidance", {})
    return {**schema, "type": "object", "x-guidance": JSON_STYLE | style if isinstance(style, dict) else style}


class ToolText:
    """A reply in progress that may be a call: text that may be a call is held back until it is known.

    Calls are JSON objects with a name and arguments (or parameters, as Llama 3.1 writes them). They are the whole reply,
    alone or in a list, or are in `<tool_call>` tags. Anything else, and a call of an unknown function, is text.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self._names = frozenset(names)
        self._held = ""
        self._begun = False  # something was shown
        self._calls = False  # what is held may be calls

    def push(self, text: str) -> str:
        """What can be shown after this text."""
        self._held += text
        start = self._held.lstrip()
        if not self._begun and start[:1] in ("{", "["):
            self._calls = True
        at = self._held.find(OPENING)
        if self._calls or not start:
            return ""
        if at < 0:
            at = len(self._held) - max((n for n in range(1, len(OPENING)) if self._held.endswith(OPENING[:n])), default=0)
        else:
            self._calls = True
        shown, self._held = self._held[:at], self._held[at:]
        self._begun = self._begun or bool(shown.strip())
        return shown

    def finish(self) -> tuple[str, list[ToolCall]]:
        """The rest to be shown, and the calls."""
        calls = _calls_of(self._held, self._names) if self._calls else None
        text, self._held = self._held, ""
        return (text, []) if calls is None else ("", calls)


def _calls_of(text: str, names: frozenset[str]) -> list[ToolCall] | None:
    """The calls that a text consists of, or None where it is something else."""
    if text.lstrip().startswith(OPENING):
        parts = re.findall(f"{OPENING}(.*?)(?:{CLOSING}|$)", text, re.DOTALL)
        whole = re.sub(f"{OPENING}.*?(?:{CLOSING}|$)", "", text, flags=re.DOTALL).strip() == ""
    else:
        parts, whole = [text], True
    values: list[Any] = []
    for part in parts:
        try:
            value = json.loads(part)
        except (ValueError, RecursionError):
            return None
        values += value if isinstance(value, list) else [value]
    calls = [_call(value, names) for value in values]
    known = [call for call in calls if call is not None]
    return known if whole and known and len(known) == len(calls) else None


def _call(value: Any, names: frozenset[str]) -> ToolCall | None:
    if not isinstance(value, dict) or not isinstance(value.get("name"), str) or value["name"] not in names:
        return None
    arguments = value.get("arguments", value.get("parameters", {}))
    if isinstance(arguments, str):  # some write the JSON as a text
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            return None
    if not isinstance(arguments, dict):
        return None
    return ToolCall(f"call_{uuid.uuid4().hex[:24]}", value["name"], json.dumps(arguments, ensure_ascii=False))
