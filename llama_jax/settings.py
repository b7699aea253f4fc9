"""The schema of settings: a dataclass whose fields have defaults, bounds or literals in their types, and help texts.

    steps: Annotated[int, at_least(1)] = 100
    \"\"\"Steps of the run.\"\"\"

`check_bounds` checks every field of a dataclass; None is always allowed, as a default. `help_of` returns the help texts.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, is_dataclass
from functools import cache
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from llama_jax.errors import UserError, shown

MAX_INT32 = 2**31 - 1


@dataclass(frozen=True)
class Bounds:
    """The minimum and the maximum allowed value of a number."""

    minimum: float = -math.inf
    maximum: float = math.inf

    def check(self, name: str, value: float, raises: type[UserError] = UserError) -> None:
        """Raise an error that names the setting, if the value is out of bounds or NaN."""
        if not self.minimum <= value <= self.maximum:
            bounded = self.maximum not in (MAX_INT32, math.inf) or value > self.minimum
            most = f" and at most {self.maximum:.10g}" if bounded else ""
            raise raises(f"{name}={shown(value, 40)} must be at least {self.minimum:.10g}{most}")


def at_least(minimum: int) -> Bounds:
    """Bounds of an integer: from `minimum` to the largest 32-bit integer."""
    return Bounds(minimum, MAX_INT32)


def check_bounds(settings: Any, raises: type[UserError] = UserError, within: str = "") -> None:
    """Raise an error for the first field of a dataclass, or a nested one, with a value that its type does not allow.

    Args:
      within: prefix of the names of fields in messages, such as "rewards.".
    """
    owner: type = type(settings)
    for name, (bounds, field_type) in _declared(owner).items():
        key, value = f"{within}{name}", getattr(settings, name)
        if is_dataclass(value):
            check_bounds(value, raises, f"{key}.")
        elif value is None:
            continue
        elif get_origin(field_type) is Literal and value not in get_args(field_type):
            raise raises(f"{key}={shown(value, 40)} must be one of {', '.join(map(str, get_args(field_type)))}")
        elif bounds is not None:
            if field_type is int and (not isinstance(value, int) or isinstance(value, bool)):
                raise raises(f"{key}={shown(value, 40)} must be an integer")
            bounds.check(key, value, raises)


@cache
def help_of(dataclass_type: type) -> dict[str, str]:
    """The help of each field of a dataclass, by name: the text below the field, or its entry in the class's docstring."""
    from docstring_parser import parse_from_object

    texts: dict[str, str] = {}
    for base in filter(is_dataclass, reversed(dataclass_type.__mro__)):
        for param in parse_from_object(base).params:
            text = " ".join((param.description or "").split())
            texts |= dict.fromkeys(map(str.strip, param.arg_name.split(",")), text[:1].upper() + text[1:])
    return texts


@cache
def _declared(dataclass_type: type) -> dict[str, tuple[Bounds | None, Any]]:
    """For each field, the bounds in its type, and the type without the bounds and None."""
    hints = get_type_hints(dataclass_type, include_extras=True)
    declared = {}
    for field in fields(dataclass_type):
        parts = [hints[field.name], *_nested_types(hints[field.name])]
        types_ = [part for part in parts if get_origin(part) not in (Annotated, Union, UnionType) and part is not type(None)]
        declared[field.name] = next((part for part in parts if isinstance(part, Bounds)), None), types_[0]
    return declared


def _nested_types(hint: Any) -> list[Any]:
    """The arguments of a type and, recursively, of its arguments: annotations and members of unions."""
    return [part for argument in get_args(hint) for part in (argument, *_nested_types(argument))]
