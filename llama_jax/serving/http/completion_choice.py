"""One continuation as text: tokens in; text, log-probabilities and tool calls out, up to a stop string or another end.

Tool calls have the formats that published templates request.
"""

from __future__ import annotations

import json
import re
import uuid
from collections import deque
from collections.abc import Sequence
from json.encoder import encode_basestring_ascii as quoted  # ASCII: some clients split lines at other characters as well
from typing import Any, NamedTuple

from llama_jax.errors import shown
from llama_jax.serving.grammar import JSON_STYLE
from llama_jax.serving.http.errors import refused
from llama_jax.serving.requests import ScoredToken, Update
from llama_jax.tokenizers import TextStream, Tokenizer
from llama_jax.tokenizers.interface import Text

OPENING, CLOSING = "<tool_call>", "</tool_call>"


class PlacedToken(NamedTuple):
    """A token with its log-probability, and the offset of its text in the choice's text."""

    token: ScoredToken
    offset: int


class Delta(NamedTuple):
    """The new part of a choice."""

    text: str
    scored: Sequence[PlacedToken] = ()
    calls: Sequence[ToolCall] = ()


class Choice:
    """A choice that is being generated.

    Attributes:
      count: number of tokens generated so far, including a stop token.
      cached: number of prompt tokens found in the prefix cache.
      finish: OpenAI's finish_reason; None while it continues.

    Args:
      stop: stop strings.
      echo: the prompt's text, if it precedes the continuation; otherwise None.
      at_start: whether the continuation begins a text, so that a vocabulary's leading space is dropped.
      scored: whether log-probabilities are requested.
      tools: names of the functions that it may call.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        stop: Sequence[str],
        *,
        echo: str | None,
        at_start: bool,
        scored: bool,
        tools: Sequence[str] = (),
    ) -> None:
        self.count = 0
        self.cached = 0
        self.finish: str | None = None
        self._written: list[str] = [echo] if echo else []
        self._echo_length = len(echo or "")
        self._echoed = echo is not None
        self._scored = scored
        self._held_back: deque[PlacedToken] = deque()
        self._tools = ToolText(tools) if tools else None
        self._text = Text(tokenizer, stop, self._written.append, at_start=at_start)
        self._prompt_text = TextStream(tokenizer, at_start=True)
        self._prompt_length = 0

    def take(self, update: Update) -> Delta:
        """Process an update from the engine, and return the part that can be shown. No effect after the finish."""
        if self.finish is not None:
            return Delta("")
        self.cached = max(self.cached, update.cached)
        if update.prompt is not None and self._scored and self._echoed:
            for token in update.prompt:
                self._held_back.append(PlacedToken(token, self._prompt_length))
                self._prompt_length += len(self._prompt_text.push(token.id))
        text = self._text
        for token in update.tokens:
            self._count(token)
            if text.push(token.id):
                self.finish = "stop"
                break
        if update.finish in ("stop", "length") and self.finish is None:
            if update.ended_by is not None:
                self._count(update.ended_by)
            text.finish()
            self.finish = "stop" if text.ended else update.finish
        shown = "".join(self._written)
        self._written.clear()
        calls: Sequence[ToolCall] = ()
        if self._tools is not None:
            shown = self._tools.push(shown)
            if self.finish is not None:
                rest, calls = self._tools.finish()
                shown += rest
                self.finish = "tool_calls" if calls else self.finish
        return Delta(shown, self._ready(), calls)

    def _count(self, token: ScoredToken) -> None:
        self.count += 1
        if self._scored:
            self._held_back.append(PlacedToken(token, self._echo_length + self._text.length))

    def _ready(self) -> list[PlacedToken]:
        """The tokens whose text has been shown; tokens of held-back text wait with it, or are never shown."""
        end = self._echo_length + len(self._text.shown)
        whole = not self._text.ended and end == self._echo_length + self._text.length
        ready = []
        while self._held_back and (whole or self._held_back[0].offset < end):
            ready.append(self._held_back.popleft())
        return ready


class TokenNames:
    """Tokens as they are written in log-probabilities, as JSON."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._special = {token: name for name, token in tokenizer.special_tokens.items()}
        self._known: dict[int, tuple[str, str]] = {}

    def __call__(self, token: int) -> tuple[str, str]:
        """The token's text and bytes; invalid UTF-8 is written as in OpenAI's API: bytes:\\xe2\\x80."""
        if token not in self._known:
            content = b""
            if token not in self._special:
                content = self._tokenizer.token_bytes(token)
            try:
                name = self._special.get(token) or content.decode()
            except UnicodeDecodeError:
                name = "bytes:" + "".join(f"\\x{byte:02x}" for byte in content)
            self._known[token] = quoted(name), f"[{','.join(map(str, content))}]"
        return self._known[token]


class ToolCall(NamedTuple):
    """A function call; `arguments` is JSON."""

    id: str
    name: str
    arguments: str

    def as_dict(self) -> dict[str, Any]:
        return {"id": self.id, "type": "function", "function": {"name": self.name, "arguments": self.arguments}}


def grammar_of_calls(tools: Sequence[dict[str, Any]], names: Sequence[str], template: str, *, several: bool) -> str:
    """A grammar, in llguidance's Lark syntax, of tool calls in the format of a chat template: in tags or as plain JSON.

    Args:
      tools: the tools of a `ChatRequest`.
      names: names of the tools that may be called.
      template: the model's chat template.
      several: whether more than one call is allowed.

    Raises:
      ApiError: parameters that are not an object.
    """
    tagged = OPENING in template
    # Llama 3.1 uses this name for arguments, other templates use OpenAI's. A template's text contains no tool schemas.
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
    """The schema of a function's arguments, with this library's JSON style."""
    schema = function.get("parameters", {})
    if schema.get("type", "object") != "object":
        name = f"tools[{i}].function.parameters"
        raise refused(f"{name} has type={shown(schema['type'], 40)}; a call needs an object", name)
    style = schema.get("x-guidance", {})
    return {**schema, "type": "object", "x-guidance": JSON_STYLE | style if isinstance(style, dict) else style}


class ToolText:
    """A reply in progress that may be a tool call: text is held back until this is known.

    Calls are JSON objects with a name and arguments (or parameters, as in Llama 3.1). They are the whole reply, as one
    object or a list, or are in `<tool_call>` tags. Anything else, and a call of an unknown function, is text.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self._names = frozenset(names)
        self._held = ""
        self._begun = False  # some text was shown
        self._calls = False  # the held text may be calls

    def push(self, text: str) -> str:
        """Add text, and return the part that can be shown."""
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
        """The remaining text to show, and the calls."""
        calls = _calls_of(self._held, self._names) if self._calls else None
        text, self._held = self._held, ""
        return (text, []) if calls is None else ("", calls)


def _calls_of(text: str, names: frozenset[str]) -> list[ToolCall] | None:
    """The calls of which a text consists, or None if it is something else."""
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
    if isinstance(arguments, str):  # some models write the JSON as a string
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            return None
    if not isinstance(arguments, dict):
        return None
    return ToolCall(f"call_{uuid.uuid4().hex[:24]}", value["name"], json.dumps(arguments, ensure_ascii=False))
