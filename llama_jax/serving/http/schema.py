"""JSON Schema of request bodies, which both validates them and describes them in `/openapi.json`.

Only the keywords that are used here are supported. An object has no fields except its `properties`, and a field that is
`null` or missing has its `default`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import chain
from typing import Any

from llama_jax.errors import short_repr
from llama_jax.serving.http.errors import refused

Schema = dict[str, Any]

JSON_TYPES: dict[str, tuple[type, ...]] = {"integer": (int, float), "number": (int, float), "boolean": (bool,)}
JSON_TYPES |= {"string": (str,), "array": (list,), "object": (dict,)}
NULL: Schema = {"type": "null"}


def integer(minimum: int, maximum: int, default: int | None = None, description: str = "") -> Schema:
    return _annotated({"type": "integer", "minimum": minimum, "maximum": maximum}, default, description)


def number(minimum: float, maximum: float, default: float, description: str = "") -> Schema:
    return _annotated({"type": "number", "minimum": minimum, "maximum": maximum}, default, description)


def boolean(default: bool = False, description: str = "") -> Schema:
    return _annotated({"type": "boolean"}, default, description)


def text(*, longest: int, shortest: int = 0, description: str = "") -> Schema:
    return _annotated({"type": "string", "minLength": shortest, "maxLength": longest}, None, description)


def enum(*values: Any, description: str = "") -> Schema:
    """One of a few values, compared by type too: true is not 1."""
    return _annotated({"enum": list(values)}, None, description)


def unsupported(*values: Any) -> Schema:
    """An unsupported field of OpenAI's API: only values without an effect are accepted."""
    return enum(*values, description="Not supported: only values without an effect are accepted.")


def array(items: Schema, *, most: int, fewest: int = 0) -> Schema:
    """A list, parsed as a tuple."""
    return {"type": "array", "items": items, "minItems": fewest, "maxItems": most}


def object_of(properties: dict[str, Schema], *required: str) -> Schema:
    """An object with these fields and no others."""
    return {"type": "object", "properties": properties, "required": list(required), "additionalProperties": False}


def tagged(tag: str, *alternatives: Schema) -> Schema:
    """One of several objects, distinguished by the `enum` of one field."""
    return {"oneOf": list(alternatives), "discriminator": {"propertyName": tag}}


def _annotated(schema: Schema, default: Any, description: str) -> Schema:
    if default is not None:
        schema["default"] = default
    return schema | {"description": description} if description else schema


def described(schema: Schema) -> Schema:
    """The schema for clients: with `null` for every optional field."""
    schema = {name: [*map(described, part)] if name in ("anyOf", "oneOf") else part for name, part in schema.items()}
    if "items" in schema:
        schema["items"] = described(schema["items"])
    if "properties" in schema:
        fields = {name: described(field) for name, field in schema["properties"].items()}
        schema["properties"] = {
            name: field if name in schema["required"] else or_null(field) for name, field in fields.items()
        }
    return schema


def or_null(schema: Schema) -> Schema:
    """The schema, or null."""
    if isinstance(schema.get("type"), str) and schema["type"] != "null":
        return schema | {"type": [schema["type"], "null"]}
    return {"anyOf": [schema, NULL]}


def read(schema: Schema, value: Any, name: str = "") -> Any:
    """The validated value, with tuples for lists and with all fields of objects; ApiError (400) names what is invalid.

    Args:
      name: name of the value in the body, "" for the body itself.
    """
    if "anyOf" in schema:
        schema = _alternative(schema["anyOf"], value, name)
    elif "oneOf" in schema:
        schema = _tagged_alternative(schema, value, name)
    if "enum" in schema:
        return _read_enum(schema["enum"], value, name)
    json_type = schema["type"]
    if json_type == "null":
        raise refused(f"{name} is not supported here; omit it", name, "unsupported")
    wrong_type = not isinstance(value, JSON_TYPES[json_type]) or (json_type != "boolean" and isinstance(value, bool))
    if json_type in ("integer", "number"):
        low, high = schema["minimum"], schema["maximum"]
        if json_type == "integer" and isinstance(value, float) and value.is_integer():
            value = int(value)
        is_valid = not wrong_type and low <= value <= high and (json_type == "number" or isinstance(value, int))
        _require(is_valid, name, value, f"{_type_name(schema)} from {low} to {high}")
        assert math.isfinite(value)
        return value if json_type == "integer" else float(value)
    _require(not wrong_type, name, value, _type_name(schema))
    if json_type == "string":
        return _read_text(schema, value, name)
    if json_type == "array":
        return _read_array(schema, value, name)
    return _read_object(schema, value, name) if json_type == "object" else value


def _require(is_valid: bool, name: str, value: Any, requirement: str, code: str | None = None) -> None:
    """Raise ApiError (400) for a value that is not as required."""
    if not is_valid:
        raise refused(f"{name or 'the body'}={short_repr(value, 40)} must be {requirement}", name or None, code)


def _read_enum(values: Sequence[Any], value: Any, name: str) -> Any:
    is_valid = any(value == choice and isinstance(value, bool) == isinstance(choice, bool) for choice in values)
    _require(is_valid, name, value, " or ".join(map(_to_json, values)), "unsupported")
    return value


def _read_text(schema: Schema, value: str, name: str) -> str:
    """A string that can be encoded in UTF-8."""
    _check_length(schema["minLength"], schema["maxLength"], len(value), "characters", name)
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise refused(f"{name} is not valid Unicode: character {error.start} is half a surrogate pair", name) from None
    return value


def _read_array(schema: Schema, value: list[Any], name: str) -> tuple[Any, ...]:
    _check_length(schema["minItems"], schema["maxItems"], len(value), "entries", name)
    items = schema["items"]
    all_integers = items.get("type") == "integer" and {*map(type, value)} == {int}
    if all_integers and items["minimum"] <= min(value) and max(value) <= items["maximum"]:  # a prompt may have many
        return tuple(value)
    return tuple(read(items, entry, f"{name}[{i}]") for i, entry in enumerate(value))


def _check_length(fewest: int, most: int, length: int, unit: str, name: str) -> None:
    if not fewest <= length <= most:
        raise refused(f"{name} has {length} {unit}; it must have from {fewest} to {most}", name)


def _read_object(schema: Schema, value: dict[str, Any], name: str) -> dict[str, Any]:
    if "properties" not in schema:
        return value
    before, fields = f"{name}." if name else "", schema["properties"]
    unknown = [field for field in value if field not in fields]
    if unknown:
        names = ", ".join(short_repr(before + field, 60) for field in unknown[:5])
        raise refused(
            f"{names}: unknown; omit it (/openapi.json lists all fields)", before + unknown[0][:60], "unknown_field"
        )
    values = {}
    for field, part in fields.items():
        if value.get(field) is not None:
            values[field] = read(part, value[field], before + field)
        elif field in schema["required"]:
            raise refused(f"{before}{field} is missing", before + field, "missing_field")
        else:
            values[field] = part.get("default")
    return values


def _alternative(alternatives: Sequence[Schema], value: Any, name: str) -> Schema:
    """The alternative for the type of a value, and of its first entry."""

    def matches(schema: Schema, value: Any) -> bool:
        if "enum" in schema or "oneOf" in schema:
            return isinstance(value, dict) == ("oneOf" in schema)
        right_type = isinstance(value, JSON_TYPES[schema["type"]])
        return right_type and (schema["type"] != "array" or not value or matches(schema["items"], value[0]))

    for schema in alternatives:
        if matches(schema, value):
            return schema
    raise refused(f"{name}={short_repr(value, 40)} must be {' or '.join(map(_type_name, alternatives))}", name)


def _tagged_alternative(schema: Schema, value: Any, name: str) -> Schema:
    tag = schema["discriminator"]["propertyName"]
    _require(isinstance(value, dict), name, value, f"an object with the field {tag}")
    tags = [alternative["properties"][tag]["enum"] for alternative in schema["oneOf"]]
    tag_value = _read_enum([*chain(*tags)], value.get(tag), f"{name}.{tag}")
    return next(alternative for alternative, values in zip(schema["oneOf"], tags, strict=True) if tag_value in values)


def _type_name(schema: Schema) -> str:
    if "enum" in schema:
        return " or ".join(map(_to_json, schema["enum"]))
    if schema.get("type") == "array":
        return f"a list, each entry {_type_name(schema['items'])}"
    names = {"integer": "an integer", "object": "a JSON object", "string": "a text", "boolean": "true or false"}
    return names.get(schema.get("type", "object"), "a number")


def _to_json(value: Any) -> str:
    return {True: "true", False: "false"}[value] if isinstance(value, bool) else repr(value).replace("'", '"')
