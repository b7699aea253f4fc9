"""Parsing of command lines by tyro, with settings for all commands."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import MISSING, fields, is_dataclass
from functools import cache, partial
from typing import Annotated, Any, get_type_hints

import tyro
from tyro.constructors import MISSING_NONPROP, ConstructorRegistry, StructConstructorSpec, StructFieldSpec, StructTypeInfo

from llama_jax.cli.arguments import HELP
from llama_jax.cli.page import paragraphs

# An option that may be left out is not given as None, and a flag has one name.
MARKERS = (tyro.conf.DisallowNone, tyro.conf.FlagCreatePairsOff)
RULES = ConstructorRegistry()


def parsed(command: Any, name: str, arguments: Sequence[str]) -> Any:
    """A command with its options; if they are wrong or ask for help, the process ends here."""
    about = paragraphs(command.__doc__)
    if "\n" in about and set(HELP) & set(arguments):
        print(about, end="\n\n")  # tyro would print each paragraph as one long line
    given = "" if "\n" in about else about
    return tyro.cli(command, prog=f"llama-jax {name}", description=given, args=arguments, config=MARKERS, registry=RULES)


@RULES.struct_rule
def _options(info: StructTypeInfo) -> StructConstructorSpec | None:
    """The options of a command: those in its SHOWN_FIRST first, in its SHOWN_LAST last, as a dataclass has what it inherits
    before all else; each with its docstring as a single paragraph, and its default where that says more than it does."""
    command = info.type
    if not (is_dataclass(command) and command.__module__.startswith(f"{__package__}.")):
        return None
    types_ = get_type_hints(command, include_extras=True)
    found = {}
    for field in fields(command):
        default = field.default if field.default is not MISSING else MISSING_NONPROP
        hint = "" if default in (None, "", ()) or isinstance(default, bool) else None
        kind: Any = Annotated[types_[field.name], tyro.conf.arg(help_behavior_hint=hint)]
        found[field.name] = StructFieldSpec(
            name=field.name,
            type=kind,
            default=default,
            helptext=partial(_meaning, command, field.name),
        )
    first, last = (getattr(command, name, ()) for name in ("SHOWN_FIRST", "SHOWN_LAST"))
    middle = [name for name in found if name not in last]
    return StructConstructorSpec(command, tuple(found[name] for name in dict.fromkeys((*first, *middle, *last))))


def _meaning(command: type, name: str) -> str | None:
    """The docstring below a field, as a single paragraph."""
    return next((_meanings(kind)[name] for kind in command.__mro__ if name in _meanings(kind)), None)


@cache
def _meanings(kind: type) -> dict[str, str]:
    from docstring_parser import parse_from_object

    if not is_dataclass(kind):
        return {}
    return {one.arg_name: " ".join((one.description or "").split()) for one in parse_from_object(kind).params}
