"""``llama-jax train RECIPE --help``: the settings of a recipe, their values and what they mean."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import fields, is_dataclass
from typing import Any, Literal, get_args, get_origin, get_type_hints

from llama_jax.cli.page import filled

FUNCTIONS = ("attend", "loss")  # which a recipe in a file of its own can give, and no command line


def settings_page(name: str, changes: Sequence[str] = ()) -> str:
    """The settings of a recipe, each as its change is written; UserError where there is no such recipe or change."""
    from llama_jax.runs.overrides import override
    from llama_jax.runs.recipes import BUILT_IN, find

    recipe = override(find(name), changes)
    about = (BUILT_IN[name].__doc__ or "") if name in BUILT_IN else ""
    return "\n".join(
        [
            f"usage: llama-jax train {name} [KEY=VALUE ...] --data PATH --workdir PATH [OPTIONS]",
            "",
            *([filled(about), ""] if about else []),
            "The settings, which KEY=VALUE changes. llama-jax train --help lists the options.",
            "",
            *_lines(recipe, ""),
        ]
    )


def _lines(settings: Any, within: str) -> list[str]:
    """A line for each setting, and its meaning below; then those that are dataclasses, with what is in them."""
    from llama_jax.runs.overrides import dataclass_of

    said, types_, found, parts = _meanings(type(settings)), get_type_hints(type(settings)), [], []
    for field in (one for one in fields(settings) if one.name not in FUNCTIONS):
        value, key, part = getattr(settings, field.name), within + field.name, dataclass_of(types_[field.name])
        meaning = said.get(field.name, "")
        if is_dataclass(value):
            parts += ["", filled(f"{key}: {meaning}", indent=2), *_lines(value, f"{key}.")]
            continue
        if part is not None:  # which is made of the settings that are given
            meaning = f"{meaning} Settings: {', '.join(f'{key}.{one.name}' for one in fields(part))}."
        elif get_origin(types_[field.name]) is Literal:
            meaning = f"{meaning} One of {', '.join(map(str, get_args(types_[field.name])))}."
        found += [filled(f"{key}={_written(value)}", indent=2), *([filled(meaning, indent=8)] if meaning else [])]
    return found + parts


def _meanings(kind: type) -> dict[str, str]:
    """What the docstring of a dataclass says of its fields."""
    from docstring_parser import parse

    found: dict[str, str] = {}
    for one in parse(kind.__doc__ or "").params:
        text = (one.description or "").replace("`", "")
        found |= {name.strip(): text[:1].upper() + text[1:] for name in one.arg_name.split(",")}
    return found


def _written(value: Any) -> str:
    """A value as a change is written."""
    if isinstance(value, tuple):
        return json.dumps(value, ensure_ascii=False)
    return str(value).lower() if value is None or isinstance(value, bool) else str(value).replace("\n", "\\n")
