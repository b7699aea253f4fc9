"""Calls of tools: what a model writes to call one, in the forms that published templates ask for, and how clients get it."""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Sequence
from typing import Any, NamedTuple

from llama_jax.serving.http import fields as f
from llama_jax.serving.http.fields import Field

MOST_TOOLS = 128
OPENING, CLOSING = "<tool_call>", "</tool_call>"


class Call(NamedTuple):
    """A call of a function; `arguments` are JSON."""

    id: str
    name: str
    arguments: str

    def as_dict(self) -> dict[str, Any]:
        return {"id": self.id, "type": "function", "function": {"name": self.name, "arguments": self.arguments}}


def tools_field() -> Field:
    """The field `tools` of a chat: a list of functions."""
    name = f.text(longest=64, shortest=1, required=True)
    function = {
        "name": name,
        "description": f.text(longest=100_000),
        "parameters": f.any_object(),
        "strict": f.one_of([False], about="Arguments follow no grammar here."),
    }
    tool = {
        "type": Field({"const": "function"}, f.one_of(["function"]).read, required=True),
        "function": Field(f.schema_of(function), f.nested(function).read, required=True),
    }
    return f.listed(f.nested(tool), most=MOST_TOOLS)


def as_given(tools: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Tools as a template is given them: without the fields that were left out."""
    functions = [{name: value for name, value in tool["function"].items() if value is not None} for tool in tools]
    return [{"type": "function", "function": function} for function in functions]


class ToolText:
    """A reply as it comes, that may be a call: of what may be one nothing is shown before it is known.

    Calls are JSON objects with a name and arguments (or parameters, as Llama 3.1 writes them), which are the whole reply,
    alone or in a list, or stand in `<tool_call>` tags. What is none, or calls what was not offered, is text.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self._names = frozenset(names)
        self._held = ""
        self._begun = False  # something was shown
        self._calls = False  # what is held may be calls

    def push(self, text: str) -> str:
        """What can be shown with this text."""
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

    def finish(self) -> tuple[str, list[Call]]:
        """What is left to be shown, and the calls."""
        calls = _calls_of(self._held, self._names) if self._calls else None
        text, self._held = self._held, ""
        return (text, []) if calls is None else ("", calls)


def _calls_of(text: str, names: frozenset[str]) -> list[Call] | None:
    """The calls that a text consists of, or None where it is something else."""
    if text.lstrip().startswith(OPENING):
        parts = re.findall(f"{OPENING}(.*?)(?:{CLOSING}|$)", text, re.DOTALL)
        whole = re.sub(f"{OPENING}.*?(?:{CLOSING}|$)", "", text, flags=re.DOTALL).strip() == ""
    else:
        parts, whole = [text], True
    found: list[Any] = []
    for part in parts:
        try:
            value = json.loads(part)
        except (ValueError, RecursionError):
            return None
        found += value if isinstance(value, list) else [value]
    calls = [_call(value, names) for value in found]
    known = [call for call in calls if call is not None]
    return known if whole and known and len(known) == len(calls) else None


def _call(value: Any, names: frozenset[str]) -> Call | None:
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
    return Call(f"call_{uuid.uuid4().hex[:24]}", value["name"], json.dumps(arguments, ensure_ascii=False))
