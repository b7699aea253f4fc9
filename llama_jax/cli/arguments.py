"""Arguments that may be anywhere on a command line, moved to where the parser accepts them."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence

from llama_jax.errors import UserError

CHANGE = re.compile(r"[A-Za-z_][\w.]*=", re.ASCII)
# The options that no value follows, of the commands that `arranged` knows.
HELP = ("--help", "-h")
FLAGS = ("--resume", "--reweigh", "--distributed", "--json", "--no-cache", *HELP)
LISTS = ("--data", "--validation-data")


def recipe_asked_about(arguments: Sequence[str]) -> tuple[str, list[str]] | None:
    """The recipe and its changes, of ``train RECIPE [KEY=VALUE ...] --help``; None for all other command lines."""
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
                raise UserError(f"{word} is no option of train; settings of a recipe are KEY=VALUE, as {key}=VALUE")


def arranged(arguments: Sequence[str]) -> list[str]:
    """The arguments of a command, its name first, in the order that the parser accepts.

    With ``train`` and ``eval`` one ``--data`` may be followed by several files, or each file by its own
    ``--data``; the changes of the recipe of ``train`` may be anywhere.
    """
    if arguments[:1] == ["train"]:
        return changes_together(each_by_itself(arguments, changes=True))
    return each_by_itself(arguments) if arguments[:1] == ["eval"] else list(arguments)


def changes_together(arguments: Sequence[str]) -> list[str]:
    """The same arguments with the changes of the recipe at the end: the parser accepts them in one place only."""
    options: list[str] = []
    changes: list[str] = []
    for before, argument in zip(["", *arguments], arguments, strict=False):
        value = before.startswith("--") and "=" not in before and before not in FLAGS
        (changes if CHANGE.match(argument) and not value else options).append(argument)
    return [*options, *changes]


def each_by_itself(arguments: Sequence[str], *, changes: bool = False) -> list[str]:
    """The same with ``--data a b`` as ``--data a --data b``, the command's name being the first argument.

    If no other word could be the command's recipe or model, that is the last of the files.
    """
    found: list[str] = list(arguments[:1])
    further: list[int] = []  # where in `found` a list goes on
    option, listing, about = "", "", False
    for word in arguments[1:]:
        if word.startswith("-") and not option:
            option = "" if "=" in word or word in FLAGS else word
            listing = ""
        elif option:
            listing, option = option if option in LISTS else "", ""
        elif changes and CHANGE.match(word):
            pass
        elif listing:
            further.append(len(found))
            found.append(listing)
        else:
            about = True
        found.append(word)
    if further and not about:
        del found[further[-1]]
    return found
