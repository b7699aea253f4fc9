"""What renders a checkpoint's own chat template: Jinja in its sandbox, on a budget, as a program that `template` starts.

It imports nothing of this library, so that it starts quickly.

What transformers offers is there: `loopcontrols`, `{% generation %}`, `tojson`, `raise_exception`, `strftime_now`. A
template may spend BUDGET: each turn of a loop, call and operation costs what it can at most build. That names the usual ways
to run for ever or to fill the memory, on every system; it does not know all (large numbers divided, methods of numbers and
bytes, slices, searches), and what it does not know the limits of the process end.
"""

from __future__ import annotations

import faulthandler
import json
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime
from functools import lru_cache, wraps
from inspect import unwrap
from types import CodeType
from typing import Any

from jinja2 import Template, TemplateError, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

BUDGET = 1 << 27  # characters; published templates cost a few times what they write
LONGEST = 1 << 23  # characters of a text, where the messages are not longer
STEP = 512  # what a turn of a loop and a call cost: all of the budget is a second or two
ENTRY = 64  # what looking at an entry of a list costs
# Filters whose result can be longer than what they are given.
GROWING = {"batch", "center", "format", "indent", "join", "pprint", "replace", "slice", "string", "sum", "tojson"}
GROWING |= {"truncate", "urlize", "wordwrap", "xmlattr"}


def main(seconds: float, memory: int, several: bool = False) -> None:
    """Answer one request, JSON on standard input, with "r", and then with "t" and the text or "e" and the reason.

    Args:
      several: answer one after the other, until the input ends. Requests and answers then begin with their lengths, as 8
        bytes, and each has its own time; the memory is all that they have together.
    """
    source, out = sys.stdin.buffer, sys.stdout.buffer
    _limit_memory(memory)
    _limit_time(seconds)
    out.write(b"r")
    out.flush()
    if not several:
        out.write(_answer(source.read))
        return
    faulthandler.cancel_dump_traceback_later()
    while size := source.read(8):
        _limit_time(seconds)
        answer = _answer(lambda: source.read(int.from_bytes(size, "big")))
        faulthandler.cancel_dump_traceback_later()
        out.write(len(answer).to_bytes(8, "big") + answer)
        out.flush()


def _answer(read: Callable[[], bytes]) -> bytes:
    try:
        asked = read()
        request = json.loads(asked.decode("utf-8", "surrogatepass"))
        text = rendered(request["template"], request["values"], request["marks"])
        if len(text) > max(LONGEST, 4 * len(asked)):
            raise TemplateError(f"it writes {len(text)} characters")
        return b"t" + text.encode("utf-8", "surrogatepass")
    except MemoryError:
        return b"e"
    except Exception as error:
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        return b"e" + reason.encode("utf-8", "replace")


def _limit_time(seconds: float) -> None:
    # The timer is a thread that needs no lock of Python's, so that it also ends a single endless operation.
    faulthandler.dump_traceback_later(seconds, exit=True)


def _limit_memory(memory: int) -> None:
    if sys.platform == "linux":
        import resource

        resource.setrlimit(resource.RLIMIT_DATA, (memory, memory))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def rendered(template: str, values: Mapping[str, Any], marks: Sequence[str] = ("", "")) -> str:
    """The text; whatever is wrong with the template is an exception of some kind.

    Args:
      marks: written before and after all that stands in ``{% generation %}``.
    """
    environment = Environment(marks)
    code, cost = _compiled(template, *marks)
    environment.spend(cost)
    return Template.from_code(environment, code, environment.make_globals(None)).render(**values)


@lru_cache(maxsize=4)  # a process that stays renders one template, and compiling it takes most of the time
def _compiled(template: str, first: str, last: str) -> tuple[CodeType, int]:
    """The template as code, and what that took of the budget."""
    environment = Environment((first, last))
    left = environment.left
    code = environment.compile(_Metered().visit(environment.parse(template)))
    return code, left - environment.left


class Environment(ImmutableSandboxedEnvironment):
    """The sandbox of one rendering, with its budget."""

    intercepted_binops = frozenset(("+", "*", "**", "%"))

    def __init__(self, marks: Sequence[str] = ("", "")) -> None:
        super().__init__(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _Generation], finalize=self.measured
        )
        self.marks = marks
        self.left = BUDGET
        del self.globals["lipsum"]
        self.globals |= {"raise_exception": _raise, "strftime_now": _strftime_now}
        self.filters["tojson"] = _tojson
        self.filters |= {name: self.metered(self.filters[name]) for name in GROWING}

    def turn(self) -> None:
        """What a turn of a loop calls, and pays for as for any call."""

    def spend(self, cost: int) -> None:
        self.left -= cost
        if self.left < 0:
            raise TemplateError("it runs too long or builds too much text")

    def measure(self, value: Any) -> int:
        """About as many characters as the value has when it is written; what is looked at is paid for."""
        if isinstance(value, str):
            return len(value)
        if not isinstance(value, Mapping | list | tuple):
            return 1
        self.spend(ENTRY * len(value))
        entries = [*value.keys(), *value.values()] if isinstance(value, Mapping) else value
        return 1 + sum(map(self.measure, entries))

    def measured(self, value: Any) -> Any:
        """The value, when it is written, or built of others."""
        self.spend(self.measure(value))
        return value

    def growth(self, *values: Any) -> int:
        """How long a text can get that is made of these texts and numbers: as long as their product."""
        product = 1
        for value in values:
            product *= max(1, abs(value) if isinstance(value, int) else self.measure(value))
        return product

    def metered(self, function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def paid(*args: Any, **named: Any) -> Any:
            values = [value for value in (*args, *named.values()) if isinstance(value, str | int | Mapping | list | tuple)]
            self.spend(self.growth(*map(_widest, values)))
            return function(*args, **named)

        return paid

    def call(self, context: Any, function: Any, *args: Any, **named: Any) -> Any:
        self.spend(STEP)
        text = getattr(unwrap(function), "__self__", None)
        if isinstance(text, str):
            own = [value for name, value in named.items() if name not in ("_loop_vars", "_block_vars")]  # others are Jinja's
            self.spend(self.growth(*map(_widest, (text, *args, *own))))
        result = super().call(context, function, *args, **named)
        return self.measured(result) if isinstance(result, Mapping | list | tuple) else result

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if operator == "+":
            self.spend(self.measure(left) + self.measure(right))
        elif isinstance(left, int) and isinstance(right, int):
            self.spend(left.bit_length() * (right if operator == "**" else right.bit_length()))
        elif not isinstance(left, float) and not isinstance(right, float):
            self.spend(self.growth(_widest(left), *(right if isinstance(right, tuple) else (right,))))
        return super().call_binop(context, operator, left, right)

    def concatenate(self, *values: Any) -> str:
        """What ``a ~ b`` does."""
        return self.concat(str(self.measured(value)) for value in values)

    def concat(self, texts: Iterable[str]) -> str:
        """How Jinja puts written texts together."""
        found = []
        for text in texts:
            self.spend(len(text))
            found.append(text)
        return "".join(found)


class _Metered(NodeTransformer):
    """Makes calls, which pay, of what Jinja does without asking: turns of loops, bodies of macros, ``~`` and new lists.

    A list pays for all that is in it, so that lists of lists cannot hold more than the budget, however often they repeat.
    """

    def visit_For(self, node: nodes.For) -> nodes.For:  # noqa: N802
        self.generic_visit(node)
        node.body.insert(0, nodes.ExprStmt(_call("turn", [], node), lineno=node.lineno))
        return node

    visit_Macro = visit_CallBlock = visit_For  # noqa: N815

    def visit_Concat(self, node: nodes.Concat) -> nodes.Call:  # noqa: N802
        self.generic_visit(node)
        return _call("concatenate", node.nodes, node)

    def visit_List(self, node: nodes.List | nodes.Tuple | nodes.Dict) -> nodes.Expr:  # noqa: N802
        self.generic_visit(node)
        is_target = isinstance(node, nodes.Tuple) and node.ctx != "load"  # of an assignment
        return node if is_target else _call("measured", [node], node)

    visit_Tuple = visit_Dict = visit_List  # noqa: N815


def _call(name: str, arguments: list[nodes.Expr], node: nodes.Node) -> nodes.Call:
    return nodes.Call(nodes.EnvironmentAttribute(name), arguments, [], None, None, lineno=node.lineno)


class _Generation(Extension):
    """``{% generation %}`` encloses what the assistant says, for training: rendered as it is, between the marks."""

    tags = {"generation"}  # noqa: RUF012
    environment: Environment

    def parse(self, parser: Parser) -> list[nodes.Node]:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        first, last = (nodes.Output([nodes.TemplateData(mark)], lineno=line) for mark in self.environment.marks)
        return [first, *body, last]


def _widest(value: Any) -> Any:
    """A text as long as its length and any width that it may ask for as a format ("%1000d", "{:1000}")."""
    if not isinstance(value, str) or not ("%" in value or "{" in value):
        return value
    return len(value) + sum(int(number[:12]) for number in re.findall(r"\d{4,}", value))


def _raise(message: str) -> None:
    raise TemplateError(message)


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as it is; Jinja's own filter would escape it for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


if __name__ == "__main__":
    main(float(sys.argv[1]), int(sys.argv[2]), sys.argv[3:] == ["several"])
