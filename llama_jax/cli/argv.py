"""Parsing of command lines by tyro; before it, arguments that may be anywhere are moved to where tyro accepts them."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import MISSING, fields, is_dataclass
from functools import partial
from typing import Annotated, Any, get_type_hints

import tyro
from tyro.constructors import MISSING_NONPROP, ConstructorRegistry, StructConstructorSpec, StructFieldSpec, StructTypeInfo

from llama_jax.cli.terminal import paragraphs
from llama_jax.errors import UserError
from llama_jax.settings import check_bounds, help_of

CHANGE = re.compile(r"[A-Za-z_][\w.]*=", re.ASCII)
# The options without a value, of the commands that `arranged` knows.
HELP = ("--help", "-h")
FLAGS = ("--resume", "--reweigh", "--distributed", "--exact", "--json", "--no-cache", *HELP)
LISTS = ("--data", "--validation-data")
# An optional setting is not written as None, and a flag has one name.
MARKERS = (tyro.conf.DisallowNone, tyro.conf.FlagCreatePairsOff)
RULES = ConstructorRegistry()


def parsed(command: Any, name: str, arguments: Sequence[str]) -> Any:
    """A command with its options, within their bounds; for wrong options and for --help the process ends here.

    Raises:
      UserError: a number that is out of bounds.
    """
    about = paragraphs(command.__doc__)
    if "\n" in about and set(HELP) & set(arguments):
        print(about, end="\n\n")  # tyro would print each paragraph as one long line
    shown = "" if "\n" in about else about
    found = tyro.cli(command, prog=f"llama-jax {name}", description=shown, args=arguments, config=MARKERS, registry=RULES)
    check_bounds(found)
    return found


@RULES.struct_rule
def _options(info: StructTypeInfo) -> StructConstructorSpec | None:
    """The options of a command: SHOWN_FIRST first and SHOWN_LAST last, since a dataclass begins with inherited fields; each
    with its docstring as a single paragraph, and its default where that says more than the docstring."""
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
            helptext=partial(_help, command, field.name),
        )
    first = getattr(command, "SHOWN_FIRST", ())
    last = [name for kind in command.__mro__ for name in vars(kind).get("SHOWN_LAST", ())]
    middle = [name for name in found if name not in last]
    return StructConstructorSpec(command, tuple(found[name] for name in dict.fromkeys((*first, *middle, *last))))


def _help(command: type, name: str) -> str | None:
    return help_of(command).get(name)


def requested_recipe(arguments: Sequence[str]) -> tuple[str, list[str]] | None:
    """The recipe and its changes in ``train RECIPE [KEY=VALUE ...] --help``; None for all other command lines."""
    if arguments[:1] != ["train"] or not set(HELP) & set(arguments) or arguments[1].startswith("-"):
        return None
    return arguments[1], [word for word in arguments[2:] if CHANGE.match(word)]


def check_settings(options: Collection[str], arguments: Sequence[str]) -> None:
    """UserError for a setting of a recipe that is written as an option of ``train``: ``--steps 100`` for ``steps=100``.

    Args:
      options: names of the fields of the command.
    """
    for word in arguments:
        name = word.partition("=")[0].strip("-").replace("-", "_")
        if not word.startswith("--") or name in (*options, "help"):
            continue
        from llama_jax.runs.overrides import keys_of
        from llama_jax.runs.recipes import tiny

        for key in keys_of(tiny()):
            if name in (key, key.rpartition(".")[2]):
                raise UserError(f"{word} is not an option of train; write a setting of the recipe as {key}=VALUE")


def arranged(arguments: Sequence[str]) -> list[str]:
    """The arguments of a command, its name first, in the order that tyro accepts.

    With ``train`` and ``eval`` one ``--data`` may be followed by several files, or each file by its own ``--data``. If no
    other word could be the command's recipe or model, that is the last of the files. The changes of the recipe of ``train``
    may be anywhere.
    """
    if arguments[:1] not in (["train"], ["eval"]):
        return list(arguments)
    found: list[str] = [arguments[0]]
    changes: list[str] = []
    further: list[int] = []  # where in `found` a list goes on
    option, listing, about = "", "", False
    for word in arguments[1:]:
        if option:
            listing, option = option if option in LISTS else "", ""
        elif word.startswith("-"):
            option = "" if "=" in word or word in FLAGS else word
            listing = ""
        elif arguments[0] == "train" and CHANGE.match(word):
            changes.append(word)
            continue
        elif listing:
            further.append(len(found))
            found.append(listing)
        else:
            about = True
        found.append(word)
    if further and not about:
        del found[further[-1]]
    return [*found, *changes]
