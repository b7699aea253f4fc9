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
from llama_jax.inference.sampling_settings import Sampling
from llama_jax.settings import check_fields, help_of, number_fields

CHANGE = re.compile(r"[A-Za-z_][\w.]*=", re.ASCII)
# The options without a value, of the commands that `arranged` knows.
HELP = ("--help", "-h")
VALUELESS_OPTIONS = ("--resume", "--reweigh", "--distributed", "--exact", "--json", "--no-cache", *HELP)
LIST_OPTIONS = ("--data", "--validation-data")
# An optional setting is not written as None, and a flag has one name.
MARKERS = (tyro.conf.DisallowNone, tyro.conf.FlagCreatePairsOff)
OPTION_RULES = ConstructorRegistry()


def parse_command(command: Any, name: str, arguments: Sequence[str]) -> Any:
    """A command with its options, within their bounds; for wrong options and for --help the process ends here.

    Raises:
      UserError: a number that is out of bounds.
    """
    description = paragraphs(command.__doc__)
    if "\n" in description and set(HELP) & set(arguments):
        print(description, end="\n\n")  # tyro would print each paragraph as one long line
    tyro_description = "" if "\n" in description else description
    options = tyro.cli(
        command,
        prog=f"llama-jax {name}",
        description=tyro_description,
        args=arguments,
        config=MARKERS,
        registry=OPTION_RULES,
    )
    check_fields(options)
    return options


@OPTION_RULES.struct_rule
def _options(info: StructTypeInfo) -> StructConstructorSpec | None:
    """The options of a command: SHOWN_FIRST first and SHOWN_LAST last, since a dataclass begins with inherited fields; each
    with its docstring as a single paragraph, and its default where that says more than the docstring."""
    command = info.type
    if not (is_dataclass(command) and command.__module__.startswith(f"{__package__}.")):
        return None
    types_ = get_type_hints(command, include_extras=True)
    specs = {}
    for field in fields(command):
        default = field.default if field.default is not MISSING else MISSING_NONPROP
        hint = "" if default in (None, "", ()) or isinstance(default, bool) else None
        option_type: Any = Annotated[types_[field.name], tyro.conf.arg(help_behavior_hint=hint)]
        specs[field.name] = StructFieldSpec(
            name=field.name,
            type=option_type,
            default=default,
            helptext=partial(_help, command, field.name),
        )
    first = getattr(command, "SHOWN_FIRST", ())
    last = [name for base in command.__mro__ for name in vars(base).get("SHOWN_LAST", ())]
    middle = [name for name in specs if name not in last]
    return StructConstructorSpec(command, tuple(specs[name] for name in dict.fromkeys((*first, *middle, *last))))


@OPTION_RULES.struct_rule
def _sampling_options(info: StructTypeInfo) -> StructConstructorSpec | None:
    """An option for each field of `Sampling`, except the seed, which commands have their own option for."""
    if info.type is not Sampling:
        return None
    numbers = {name: number for name, number in number_fields(Sampling).items() if name != "seed"}
    specs = [
        StructFieldSpec(name=name, type=number.type, default=getattr(info.default, name), helptext=number.help)
        for name, number in numbers.items()
    ]
    return StructConstructorSpec(Sampling, tuple(specs))


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


def reorder_argv(arguments: Sequence[str]) -> list[str]:
    """The arguments of a command, its name first, in the order that tyro accepts.

    With ``train`` and ``eval`` one ``--data`` may be followed by several files, or each file by its own ``--data``. If no
    other word could be the command's recipe or model, that is the last of the files. The changes of the recipe of ``train``
    may be anywhere.
    """
    if arguments[:1] not in (["train"], ["eval"]):
        return list(arguments)
    argv: list[str] = [arguments[0]]
    changes: list[str] = []
    further: list[int] = []  # where in `found` a list goes on
    option, listing, has_target = "", "", False
    for word in arguments[1:]:
        if option:
            listing, option = option if option in LIST_OPTIONS else "", ""
        elif word.startswith("-"):
            option = "" if "=" in word or word in VALUELESS_OPTIONS else word
            listing = ""
        elif arguments[0] == "train" and CHANGE.match(word):
            changes.append(word)
            continue
        elif listing:
            further.append(len(argv))
            argv.append(listing)
        else:
            has_target = True
        argv.append(word)
    if further and not has_target:
        del argv[further[-1]]
    return [*argv, *changes]
