"""The schema of settings: a dataclass whose fields have their type, bounds, default and help, and need no other declaration.

    steps: Annotated[int, at_least(1)] = 100
    \"\"\"Steps of the run.\"\"\"

`check_fields` checks every field of a dataclass, `help_of` returns the help texts. The options of commands, the changes of a
recipe and the fields of requests are made from them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, is_dataclass
from functools import cache
from numbers import Integral
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from llama_jax.errors import UserError, short_repr

MAX_INT32, MAX_NUMBER = 2**31 - 1, 1e30
TYPE_NAMES = {bool: "True or False", int: "an integer", float: "a number", str: "a text"}


@dataclass(frozen=True)
class Bounds:
    """The minimum and the maximum of a number, and whether they themselves are excluded."""

    minimum: float = -MAX_NUMBER
    maximum: float = MAX_NUMBER
    open_minimum: bool = False
    open_maximum: bool = False

    def contain(self, value: float) -> bool:
        """Whether the value, which may be NaN, is within the bounds."""
        above = self.minimum < value if self.open_minimum else self.minimum <= value
        return above and (value < self.maximum if self.open_maximum else value <= self.maximum)

    def check(self, name: str, value: Any, raises: type[UserError]) -> None:
        """`check_value` of an argument: of an integer if the bounds are integers."""
        is_integer = isinstance(self.minimum, int) and isinstance(self.maximum, int)
        number = int(value) if isinstance(value, Integral) and not isinstance(value, bool) else value  # also NumPy's
        check_value(name, number, Annotated[int if is_integer else float, self], raises)

    def describe(self, value: float) -> str:
        """What a value must be, without the maximum if that is a technical one and the value is not above it."""
        least = f"{'above' if self.open_minimum else 'at least'} {self.minimum:.10g}"
        if self.maximum in (MAX_INT32, MAX_NUMBER) and not value > self.minimum:
            return least
        return f"{least} and {'below' if self.open_maximum else 'at most'} {self.maximum:.10g}"


def at_least(minimum: int) -> Bounds:
    """Bounds of an integer: from `minimum` to the largest 32-bit integer."""
    return Bounds(minimum, MAX_INT32)


def above(minimum: float) -> Bounds:
    """Bounds of a number above `minimum`."""
    return Bounds(minimum, open_minimum=True)


PositiveInt = Annotated[int, at_least(1)]
NonNegativeInt = Annotated[int, at_least(0)]
PositiveFloat = Annotated[float, above(0)]
NonNegativeFloat = Annotated[float, Bounds(0)]
BelowOne = Annotated[float, Bounds(0, 1, open_maximum=True)]
Share = Annotated[float, Bounds(0, 1)]


def check_fields(settings: Any, raises: type[UserError] = UserError, within: str = "") -> None:
    """Raise an error for the first field of a dataclass, or a nested one, with a value that its type does not allow.

    Args:
      within: prefix of the names of fields in messages, such as "rewards.".
    """
    cls: type = type(settings)
    for name, hint in _hints(cls).items():
        check_value(f"{within}{name}", getattr(settings, name), hint, raises)


def check_value(name: str, value: Any, hint: Any, raises: type[UserError] = UserError) -> None:
    """Raise an error that names a setting, if its type does not allow the value.

    Args:
      hint: a number, bool or text, possibly `Annotated` with `Bounds`; a `Literal`; a dataclass; a tuple of these; or one of
        them or None. Values of other types, and the numbers of `number_fields`, are not checked.
    """
    bounds = None
    if get_origin(hint) is Annotated:
        hint, *annotations = get_args(hint)
        bounds = next((annotation for annotation in annotations if isinstance(annotation, Bounds)), None)
    if get_origin(hint) in (Union, UnionType):
        types_ = [type_ for type_ in get_args(hint) if type_ is not NoneType]
        if len(types_) > 1:  # of several types, only dataclasses are told apart
            bare_types = [get_args(type_)[0] if get_origin(type_) is Annotated else type_ for type_ in types_]
            types_ = [type_ for type_ in bare_types if is_dataclass(type_) and type_ is type(value)]
        if types_ and not (value is None and NoneType in get_args(hint)):
            check_value(name, value, types_[0] if bounds is None else Annotated[types_[0], bounds], raises)
    elif requirement := _requirement(value, hint, bounds):
        raise raises(f"{name}={short_repr(value, 40)} must be {requirement}")
    elif is_dataclass(hint):
        check_fields(value, raises, f"{name}.")
    elif get_origin(hint) is tuple and get_args(hint)[1:] == (...,):
        for i, entry in enumerate(value):
            check_value(f"{name}[{i}]", entry, get_args(hint)[0], raises)


def _requirement(value: Any, hint: Any, bounds: Bounds | None) -> str | None:
    """What a value of this type must be, for a message; None if it is that, or if the type is not known here."""
    if get_origin(hint) is Literal:
        choices = get_args(hint)
        # True is not 1, and an array compares to neither.
        is_choice = any(type(value) is type(choice) and value == choice for choice in choices)
        return None if is_choice else f"one of {', '.join(map(str, choices))}"
    if get_origin(hint) is tuple:
        return None if isinstance(value, tuple) else f"a tuple, not {type(value).__name__}"
    if hint in TYPE_NAMES:
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        has_type = is_number if hint is float else isinstance(value, hint) and (hint is bool or not isinstance(value, bool))
        bound = f", {bounds.describe(-math.inf)}" if bounds is not None else ""
        if not has_type:
            return f"{TYPE_NAMES[hint]}{bound}"
    elif is_dataclass(hint):
        cls: Any = hint
        return None if isinstance(value, cls) else cls.__name__
    return None if bounds is None or hint is Any or bounds.contain(value) else bounds.describe(value)


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


@dataclass(frozen=True)
class NumberField:
    """A field of numbers: its type (int or float), bounds, default and help."""

    type: type
    bounds: Bounds
    default: float
    help: str


@cache
def number_fields(dataclass_type: type) -> dict[str, NumberField]:
    """The fields of a dataclass with `Annotated[Any, int or float, Bounds]`, such as those of `Sampling`, by name."""
    numbers, help_texts = {}, help_of(dataclass_type)
    for field in fields(dataclass_type):
        annotations: Sequence[Any] = get_args(_hints(dataclass_type)[field.name])[1:]
        if annotations[:1] in ((int,), (float,)):
            number_type, bounds = annotations
            default: Any = field.default
            numbers[field.name] = NumberField(number_type, bounds, default, help_texts[field.name])
    return numbers


@cache
def _hints(dataclass_type: type) -> dict[str, Any]:
    hints = get_type_hints(dataclass_type, include_extras=True)
    return {field.name: hints[field.name] for field in fields(dataclass_type)}
