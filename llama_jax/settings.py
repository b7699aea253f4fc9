"""The schema of settings: a dataclass whose fields have a default, bounds in their types, and a help text.

    steps: Annotated[int, at_least(1)] = 100
    \"\"\"Steps of the run.\"\"\"

`check_bounds` checks every field of a dataclass; None stands for a default and is always allowed. `help_of` has the texts.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, is_dataclass
from functools import cache
from typing import Any, get_args, get_type_hints

from llama_jax.errors import UserError, shown

LARGEST = 2**31 - 1


@dataclass(frozen=True)
class Bounds:
    """The smallest and the largest allowed value of a number."""

    minimum: float = -math.inf
    maximum: float = math.inf

    def check(self, name: str, value: float) -> None:
        """Raise UserError, naming the setting, for a number out of bounds or NaN."""
        if not self.minimum <= value <= self.maximum:
            bounded = self.maximum not in (LARGEST, math.inf) or value > self.minimum
            most = f" and at most {self.maximum:.10g}" if bounded else ""
            raise UserError(f"{name}={shown(value, 40)} must be at least {self.minimum:.10g}{most}")


def at_least(minimum: int) -> Bounds:
    """Bounds of an integer: from `minimum` to the largest of 32 bits."""
    return Bounds(minimum, LARGEST)


def check_bounds(settings: Any) -> None:
    """Raise UserError for the first field of a dataclass, or of a dataclass in it, that is out of the bounds in its type."""
    kind: type = type(settings)
    for name, bounds in _bounds_of(kind).items():
        value = getattr(settings, name)
        if is_dataclass(value):
            check_bounds(value)
        elif bounds is not None and value is not None:
            bounds.check(name, value)


@cache
def help_of(kind: type) -> dict[str, str]:
    """The help of each field of a dataclass, by name: the text below the field, or its entry in the class's docstring."""
    from docstring_parser import parse_from_object

    found: dict[str, str] = {}
    for each in reversed([kind for kind in kind.__mro__ if is_dataclass(kind)]):
        for one in parse_from_object(each).params:
            text = " ".join((one.description or "").split())
            found |= dict.fromkeys(map(str.strip, one.arg_name.split(",")), text[:1].upper() + text[1:])
    return found


@cache
def _bounds_of(kind: type) -> dict[str, Bounds | None]:
    hints = get_type_hints(kind, include_extras=True)
    return {
        field.name: next((one for one in _parts(hints[field.name]) if isinstance(one, Bounds)), None)
        for field in fields(kind)
    }


def _parts(hint: Any) -> list[Any]:
    """What a type is annotated with, in a union too."""
    return [part for one in get_args(hint) for part in (one, *_parts(one))]
