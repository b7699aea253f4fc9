"""The grammar of tool calls in the dialect of a model, in llguidance's Lark syntax."""

from __future__ import annotations

import json
import keyword
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from llama_jax.errors import UserError, short_repr
from llama_jax.serving.grammar import JSON_STYLE
from llama_jax.tokenizers.interface import split_special
from llama_jax.tokenizers.tool_dialects import CALL_TOKEN, Dialect, first_tag


def grammar_of_calls(
    dialect: Dialect,
    tools: Sequence[dict[str, Any]],
    names: Sequence[str],
    special_tokens: Mapping[str, int],
    *,
    several: bool,
    optional: bool = False,
) -> str:
    """A grammar of tool calls, in llguidance's Lark syntax.

    Args:
      tools: the tools of a `ChatRequest`.
      names: names of the tools that may be called.
      special_tokens: ids of the vocabulary's special tokens, with which calls are written where they exist.
      several: whether more than one call is allowed.
      optional: whether the reply may be a text, or begin with one.

    Raises:
      UserError: parameters that are not an object, or that the dialect cannot express.
    """

    def literal(text: str) -> str:
        parts = split_special(text, special_tokens)
        return " ".join(json.dumps(part, ensure_ascii=False) if isinstance(part, str) else f"<[{part}]>" for part in parts)

    called = [(i, tool["function"]) for i, tool in enumerate(tools) if tool["function"]["name"] in names]
    further_calls = f"({literal(dialect.between + dialect.before)} call)*" if several else ""
    lines = [
        f"calls: call {further_calls} {literal(dialect.closing)}",
        "call: " + " | ".join(f"call_{i}" for i, _ in called),
    ]
    write = {"json": _json_arguments, "tags": _tagged_arguments, "python": _python_arguments}[dialect.arguments]
    is_object = dialect.before.endswith('"')
    for i, function in called:
        name = json.dumps(function["name"], ensure_ascii=False)[1:-1] if is_object else function["name"]
        if dialect.arguments == "python" and not all(
            part.isidentifier() and not keyword.iskeyword(part) for part in name.split(".")
        ):
            raise UserError(
                f"the function {short_repr(name, 70)} has no name of Python, which this model's calls need; rename it"
            )
        lines.append(f"call_{i}: {literal(name + dialect.middle)} arguments_{i} {literal(dialect.after)}")
        lines += write(f"arguments_{i}", _arguments_schema(i, function), literal)
    opening = dialect.opening + dialect.before
    if not optional:
        return "\n".join([f"start: {literal(opening)} calls", *lines])
    # A text does not begin like a call of the dialect. Special tokens, such as those around a thought, may be anywhere.
    tag = first_tag(opening)
    if tag:
        text = rf"/(?s:.)+/ & ~/(?s:.)*{_escaped(tag)}(?s:.)*/"
    elif opening:
        text = r"/\s*[^\s{\[](?s:.)*/"
    else:
        text = rf"/(?s:.)+/ & ~/\s*({'|'.join(_escaped(function['name']) for _, function in called)})\s*\{{(?s:.)*/"
    special_ids = [f"<[{token}]>" for name, token in special_tokens.items() if not CALL_TOKEN.fullmatch(name)]
    lines.append(f"TEXT: {text}")
    if special_ids:  # never two texts in a row, which could divide a tag
        lines += [
            "text: TEXT (special TEXT)* special? | special (TEXT special)* TEXT?",
            f"special: ({' | '.join(special_ids)})+",
        ]
    else:
        lines.append("text: TEXT")
    if not tag:
        return "\n".join([f"start: text | {literal(opening)} calls", *lines])
    if tag in special_tokens:
        return "\n".join([f"start: text | text? {literal(opening)} calls", *lines])
    lines.append(f"before[suffix={json.dumps(tag)}]: /(?s:.)*/")
    return "\n".join([f"start: text | before {literal(opening.removeprefix(tag))} calls", *lines])


def _escaped(text: str) -> str:
    return re.escape(text).replace("/", r"\/")


def _json_arguments(rule: str, schema: dict[str, Any], literal: Callable[[str], str]) -> Iterator[str]:
    yield f"{rule}: %json {json.dumps(schema)}"


def _parameters(rule: str, schema: dict[str, Any]) -> list[tuple[str, str, dict[str, Any], bool]]:
    """For each parameter its name, the rule of its value, its schema, and whether it is required; those first."""
    required = schema.get("required") or ()
    shared: dict[str, Any] = {key: schema[key] for key in ("$defs", "definitions", "x-guidance") if key in schema}
    properties: dict[str, Any] = schema.get("properties") or {}
    order = sorted(enumerate(properties), key=lambda item: (item[1] not in required, item[0]))
    return [(name, f"{rule}_{i}", {**shared, **as_schema(properties[name])}, name in required) for i, name in order]


def as_schema(schema: Any) -> dict[str, Any]:
    """A schema that is an object, or else one that allows anything."""
    return schema if isinstance(schema, dict) else {}


def is_text(schema: Mapping[str, Any]) -> bool:
    """Whether values are texts, possibly null."""
    return schema.get("type") in ("string", ["string"], ["string", "null"], ["null", "string"])


def _tagged_arguments(rule: str, schema: dict[str, Any], literal: Callable[[str], str]) -> Iterator[str]:
    parameters = _parameters(rule, schema)
    yield f"{rule}: " + (" ".join(value if required else f"({value})?" for _, value, _, required in parameters) or '""')
    for name, value, parameter, _ in parameters:
        head, end = literal(f"<parameter={name}>\n"), "\n</parameter>\n"
        if is_text(parameter) and "enum" not in parameter:
            if rest := {"pattern", "format", "minLength", "maxLength"} & parameter.keys():
                raise UserError(
                    f"the parameter {short_repr(name, 40)} has {min(rest)}, which this model's calls cannot follow"
                )
            yield f"{value}: {head} {value}_text"
            yield f"{value}_text[suffix={json.dumps(end)}]: /(?s:.*)/"
        elif is_text(parameter):
            choices = " | ".join(json.dumps(str(choice), ensure_ascii=False) for choice in parameter["enum"])
            yield f"{value}: {head} ({choices}) {json.dumps(end)}"
        else:
            yield f"{value}: {head} {value}_json {json.dumps(end)}"
            yield f"{value}_json: %json {json.dumps(parameter)}"


def _python_arguments(rule: str, schema: dict[str, Any], literal: Callable[[str], str]) -> Iterator[str]:
    parameters = _parameters(rule, schema)
    for name, *_ in parameters:
        if not name.isidentifier() or keyword.iskeyword(name):
            raise UserError(
                f"the parameter {short_repr(name, 40)} is no name of Python, which this model's calls need; rename it"
            )
    rules = [f"{json.dumps(name + '=')} {value}" for name, value, _, _ in parameters]
    count = sum(required for *_, required in parameters)
    later = lambda begin: " ".join(f'(", " {text})?' for text in rules[begin:])
    if count:
        yield f"{rule}: " + ' ", " '.join(rules[:count]) + " " + later(count)
    else:
        yield f"{rule}: " + " | ".join(['""', *(f"{text} {later(i + 1)}" for i, text in enumerate(rules))])
    for _, value, parameter, _ in parameters:
        yield f"{value}: %json {json.dumps(parameter)}"


def _arguments_schema(i: int, function: dict[str, Any]) -> dict[str, Any]:
    """The schema of a function's arguments, with this library's JSON style."""
    schema = function.get("parameters") or {}
    if schema.get("type", "object") != "object":
        json_type = short_repr(schema["type"], 40)
        raise UserError(f"tools[{i}].function.parameters has type={json_type}; a call needs an object")
    style = schema.get("x-guidance", {})
    return {**schema, "type": "object", "x-guidance": JSON_STYLE | style if isinstance(style, dict) else style}
