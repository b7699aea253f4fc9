"""Renders a checkpoint's chat template with Jinja's sandbox, as a program of `child_process` for `chat.Renderer`.

Templates have the extensions and functions of transformers: `loopcontrols`, `{% generation %}`, `tojson`, `raise_exception`,
`strftime_now`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from typing import Any

from jinja2 import Template, TemplateError, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

MAX_CHARACTERS = 1 << 23  # maximum length of the text, unless the messages are longer


def begin(initial: None) -> Callable[[Mapping[str, Any]], dict[str, str]]:
    """The function that answers a request, the arguments of `render`, with the text or the error."""
    return _answer_request


def _answer_request(request: Mapping[str, Any]) -> dict[str, str]:
    try:
        text = render(**request)
        if len(text) > MAX_CHARACTERS and len(text) > 4 * len(json.dumps(request)):
            raise TemplateError(f"it writes {len(text)} characters")
        return {"text": text}
    except MemoryError:
        raise
    except Exception as error:
        return {"error": " ".join(str(error).split())[:200] or type(error).__name__}


def render(template: str, values: Mapping[str, Any], marks: Sequence[str] = ("", ""), time: str | None = None) -> str:
    """The rendered text; a faulty template may raise any exception.

    Args:
      marks: written before and after the content of ``{% generation %}``.
      time: that of `strftime_now`, in ISO 8601; None for the current local time.
    """
    now = datetime.now() if time is None else datetime.fromisoformat(time)
    return _compile_template(template, *marks).render(strftime_now=now.strftime, **values)


@lru_cache(maxsize=4)  # a process usually renders one template, and compiling it takes most of the time
def _compile_template(template: str, first: str, last: str) -> Template:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _Generation]
    )
    environment.marks = first, last  # type: ignore[attr-defined]
    environment.globals["raise_exception"] = _raise
    environment.filters["tojson"] = _tojson
    return environment.from_string(template)


class _Generation(Extension):
    """``{% generation %}`` encloses the assistant's text, for training; its content is rendered between the marks."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> list[nodes.Node]:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        marks = self.environment.marks  # type: ignore[attr-defined]
        first, last = (nodes.Output([nodes.TemplateData(mark)], lineno=line) for mark in marks)
        return [first, *body, last]


def _raise(message: str) -> None:
    raise TemplateError(message)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Plain JSON; Jinja's own filter would escape it for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
