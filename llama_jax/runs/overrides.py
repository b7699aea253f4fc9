"""Changes to a recipe from the command line: ``steps=100 optimizer.learning_rate=1e-3 model=stories-15m``."""

from __future__ import annotations

import dataclasses
import difflib
import json
import types
from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from llama_jax.config import LlamaConfig, Parts
from llama_jax.config.parts import PartFunction
from llama_jax.config.presets import preset
from llama_jax.errors import TrainingError

Settings = TypeVar("Settings")


def override(settings: Settings, changes: Sequence[str]) -> Settings:
    """Apply changes to a frozen dataclass in order; a dot selects a field of a nested one.

    Values are parsed by the field's type: a model is the name of a preset, a tuple is JSON or a single text, a tuple of
    dataclasses a JSON list of objects; in texts ``\\n`` is a line break. A nested dataclass that is None or changes its
    ``kind``, as by ``model.rope_scaling.kind=yarn model.rope_scaling.factor=4``, is built from only the given parts.

    Raises:
      TrainingError: a change that is not ``key=value``, an unknown key (the message suggests the nearest), or a value of the
        wrong type.
      UserError: a value that the dataclass rejects.
    """
    nested: dict[str, Any] = {}
    for change in changes:
        key, equals, value = change.partition("=")
        if not equals:
            raise TrainingError(f"{change!r} is not key=value; write a change such as steps=100")
        section = nested
        *outer, last = key.strip().split(".")
        for part in outer:
            section = section.setdefault(part, {})
            if not isinstance(section, dict):
                break
        if not isinstance(section, dict) or isinstance(section.get(last), dict):
            raise TrainingError(f"{change!r}: a setting is set both as a whole and in parts; use only one")
        section[last] = value
    return _apply(settings, type(settings), nested, "", keys_of(settings))


def _apply(settings: Any, dataclass_type: Any, changes: dict[str, Any], within: str, known: list[str]) -> Any:
    """Apply all changes of one dataclass at once, so that values that are only valid together may come in any order; None
    for the settings builds a new dataclass from only the changes."""
    types_, fields = get_type_hints(dataclass_type), {f.name: f for f in dataclasses.fields(dataclass_type)}
    values = {}
    for name, value in changes.items():
        key = f"{within}{name}"
        if name not in fields:
            raise TrainingError(f"{key!r} is not a setting of the recipe; {_suggest(key, within, known)}")
        if isinstance(value, dict):
            inner, inner_type = getattr(settings, name, None), dataclass_of(types_[name])
            if inner_type is None:
                raise TrainingError(f"{key!r} has no parts; write {key}=VALUE")
            values[name] = _apply(None if "kind" in value else inner, inner_type, value, f"{key}.", known)
        else:
            values[name] = _parse(value, types_[name], key)
    if settings is not None:
        return dataclasses.replace(settings, **values)
    missing = [
        name for name, f in fields.items() if dataclasses.MISSING is f.default is f.default_factory and name not in values
    ]
    if missing:
        raise TrainingError(f"{within}{next(iter(values))} needs {within}{missing[0]} as well; set both")
    return dataclass_type(**values)


def dataclass_of(field_type: Any) -> Any:
    """The dataclass that a field of this type contains, possibly as an alternative to None; None for any other type."""
    options = [option for option in get_args(field_type) or (field_type,) if option is not type(None)]
    return options[0] if len(options) == 1 and dataclasses.is_dataclass(options[0]) else None


def _suggest(key: str, within: str, known: list[str]) -> str:
    """Suggest the nearest key at that level, or at any level for the recipe itself; otherwise list that level's keys."""
    last = {k: k.rpartition(".")[2] for k in known if k.startswith(within)}
    close = difflib.get_close_matches(key.rpartition(".")[2], list(last.values()), 1, 0.7)
    near = [k for k in last if last[k] in close]
    if near:
        return f"did you mean {near[0]!r}?"
    beside = [k.removeprefix(within) for k in known if k.startswith(within) and "." not in k.removeprefix(within)]
    return f"{within.rstrip('.') or 'it'} has {', '.join(beside)}"


def _parse(text: str, field_type: Any, key: str) -> Any:
    """Parse a text as a value for a field of this type."""
    origin = get_origin(field_type)
    if field_type in (Parts, PartFunction) or origin is Callable:
        raise TrainingError(f"{key} must be set to functions in a recipe file (FILE.py:FUNCTION)")
    if origin in (Union, types.UnionType):
        if text.lower() in ("none", "null") and type(None) in get_args(field_type):
            return None
        field_type = next(option for option in get_args(field_type) if option is not type(None))
        return _parse(text, field_type, key)
    if field_type is LlamaConfig:
        return preset(text)
    if field_type is str:
        return text.replace("\\n", "\n").replace("\\t", "\t")
    value: Any
    if origin is tuple:
        value, requirement = _parse_items(text, get_args(field_type)[0])
    elif origin is Literal:
        value, requirement = text if text in get_args(field_type) else None, f"one of {', '.join(get_args(field_type))}"
    elif field_type is bool:
        value, requirement = {"true": True, "false": False}.get(text.lower()), "true or false"
    elif field_type in (int, float):
        value, requirement = _number_or_none(text, field_type), "an integer" if field_type is int else "a number"
    else:
        raise TrainingError(f"{key} cannot be set as a whole on the command line; set its parts with {key}.NAME=VALUE")
    if value is None:
        raise TrainingError(f"{key}={text!r} must be {requirement}")
    return value


def _number_or_none(text: str, number_type: type[int] | type[float]) -> float | None:
    try:
        return int(text, 10) if number_type is int else float(text.replace("_", ""))
    except ValueError:
        return None


def _parse_items(text: str, item_type: Any) -> tuple[tuple[Any, ...] | None, str]:
    """The items of a tuple: texts, or a single one without brackets; numbers; or dataclasses as JSON objects. None if the
    text is something else; and what it must be."""
    requirement = 'a text, or several, such as ["one", "two"]' if item_type is str else "numbers, such as [1.0, 1.5]"
    if item_type is str and not text.startswith("["):
        return (text,) if text else (), requirement
    items = _json(text)
    dataclass_type = dataclass_of(item_type)
    if dataclass_type:
        names = [f.name for f in dataclasses.fields(dataclass_type)]
        requirement = f"a JSON list of objects with {', '.join(names)}"
        fits: Any = lambda item: isinstance(item, dict) and item.keys() <= set(names)
    else:
        fits = lambda item: isinstance(item, str if item_type is str else int | float)
    if not isinstance(items, list) or not all(map(fits, items)):
        return None, requirement
    return tuple(dataclass_type(**item) for item in items) if dataclass_type else tuple(items), requirement


def _json(text: str) -> Any:
    """A text parsed as JSON; None if it is not JSON, or is nested too deeply to be a setting."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def keys_of(settings: Any, within: str = "") -> list[str]:
    """Every key that `override` accepts, with dots for nested dataclasses."""
    keys, types_ = [], get_type_hints(type(settings))
    for f in dataclasses.fields(settings):
        inner = getattr(settings, f.name)
        if isinstance(inner, Parts):  # not settable on the command line
            continue
        keys.append(f"{within}{f.name}")
        if inner is None and (made := dataclass_of(types_[f.name])):
            keys += [f"{within}{f.name}.{part.name}" for part in dataclasses.fields(made)]
        elif dataclasses.is_dataclass(inner):
            keys += keys_of(inner, f"{within}{f.name}.")
    return keys
