"""Renders a checkpoint's own chat template: Jinja in its sandbox, as a program of `child_process` for `chat.Renderer`.

Templates find what transformers offers: `loopcontrols`,
`{% generation %}`, `tojson`, `raise_exception`, `strftime_now`. What one may spend is limited for the process: time on every
system, memory on Linux.
"""

from __future__ import annotations

import faulthandler
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from typing import Any, BinaryIO

from jinja2 import Template, TemplateError, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

MAX_CHARACTERS = 1 << 23  # characters of a text, where the messages are not longer
MEMORY_PER_BYTE = 16  # of a request: texts on their way are copied


def begin(source: BinaryIO, seconds: str, memory: str) -> Callable[[bytes], bytes]:
    """The function that answers requests, JSON, with "t" and the text or "e" and the reason.

    Args:
      seconds: for each request; then the process ends.
      memory: bytes, and MEMORY_PER_BYTE more for each byte of a request; when they are full the process ends.
    """

    def answer(payload: bytes) -> bytes:
        _limit_memory(int(memory) + MEMORY_PER_BYTE * len(payload))
        # The timer is a thread that needs no lock of Python's, so that it also ends a single endless operation.
        faulthandler.dump_traceback_later(float(seconds), exit=True)
        try:
            return _answer(payload)
        finally:
            faulthandler.cancel_dump_traceback_later()

    return answer


def _answer(payload: bytes) -> bytes:
    try:
        request = json.loads(payload.decode("utf-8", "surrogatepass"))
        text = rendered(request["template"], request["values"], request["marks"])
        if len(text) > max(MAX_CHARACTERS, 4 * len(payload)):
            raise TemplateError(f"it writes {len(text)} characters")
        return b"t" + text.encode("utf-8", "surrogatepass")
    except MemoryError:
        raise
    except Exception as error:
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        return b"e" + reason.encode("utf-8", "replace")


def _limit_memory(memory: int) -> None:
    if sys.platform == "linux":
        import resource

        _, most = resource.getrlimit(resource.RLIMIT_DATA)
        resource.setrlimit(resource.RLIMIT_DATA, (memory, most))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def rendered(template: str, values: Mapping[str, Any], marks: Sequence[str] = ("", "")) -> str:
    """The text; whatever is wrong with the template is an exception of some kind.

    Args:
      marks: written before and after all that stands in ``{% generation %}``.
    """
    return _compiled(template, *marks).render(**values)


@lru_cache(maxsize=4)  # a process renders one template as a rule, and compiling it takes most of the time
def _compiled(template: str, first: str, last: str) -> Template:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _Generation]
    )
    environment.marks = first, last  # type: ignore[attr-defined]
    environment.globals |= {"raise_exception": _raise, "strftime_now": lambda format: datetime.now().strftime(format)}
    environment.filters["tojson"] = _tojson
    return environment.from_string(template)


class _Generation(Extension):
    """``{% generation %}`` encloses what the assistant says, for training: rendered as it is, between the marks."""

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
    """JSON as it is; Jinja's own filter would escape it for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
