"""The fields of request bodies: one table both checks what is sent and describes it in `/openapi.json`."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from llama_jax.errors import shown
from llama_jax.serving.http.errors import refused

Schema = dict[str, Any]


@dataclass(frozen=True)
class Field:
    """One field.

    Attributes:
      schema: JSON Schema of what is accepted, without `null`.
      read: gives the value to use, from the field's name and what was sent; ApiError for what is not accepted.
      default: the value where the field is left out, or is null.
      required: whether it must be there.
    """

    schema: Schema
    read: Callable[[str, Any], Any]
    default: Any = None
    required: bool = False

    def described(self) -> Schema:
        """The schema, with `null` for a field that may be left out."""
        if self.required:
            return self.schema
        if isinstance(self.schema.get("type"), str) and "enum" not in self.schema:
            return self.schema | {"type": [self.schema["type"], "null"]}
        return {"anyOf": [self.schema, {"type": "null"}]}


Fields = Mapping[str, Field]


def schema_of(fields: Fields) -> Schema:
    """JSON Schema of an object with these fields and no others."""
    required = [name for name, field in fields.items() if field.required]
    return {
        "type": "object",
        "properties": {name: field.described() for name, field in fields.items()},
        "additionalProperties": False,
    } | ({"required": required} if required else {})


def read_object(fields: Fields, given: Any, where: str = "") -> dict[str, Any]:
    """The values of an object's fields, ready to use; ApiError (400) names what is not accepted.

    Args:
      where: the name of the object in the body, "" for the body itself.
    """
    before = f"{where}." if where else ""
    if not isinstance(given, dict):
        raise refused(f"{where or 'the body'} is {shown(given, 40)}; it must be a JSON object", where or None)
    unknown = [name for name in given if name not in fields]
    if unknown:
        names = ", ".join(shown(before + name, 60) for name in unknown[:5])
        raise refused(
            f"{names}: not known here; leave it out (/openapi.json lists what is)", before + unknown[0][:60], "unknown_field"
        )
    found = {}
    for name, field in fields.items():
        value = given.get(name)
        if value is not None:
            found[name] = field.read(before + name, value)
        elif field.required:
            raise refused(f"{before}{name} is missing; give it", before + name, "missing_field")
        else:
            found[name] = field.default
    return found


def integer(minimum: int, maximum: int, default: int | None = None, about: str = "") -> Field:
    schema = {"type": "integer", "minimum": minimum, "maximum": maximum}
    return Field(_about(schema, about), lambda name, value: read_integer(name, value, minimum, maximum), default)


def read_integer(name: str, value: Any, minimum: int, maximum: int) -> int:
    """An integer, which may be written as 1.0; ApiError for another value."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int) or not minimum <= value <= maximum:
        raise refused(f"{name}={shown(value, 40)} must be an integer from {minimum} to {maximum}", name)
    return value


def number(minimum: float, maximum: float, default: float, about: str = "") -> Field:
    def read(name: str, value: Any) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float) or not minimum <= value <= maximum:
            raise refused(f"{name}={shown(value, 40)} must be a number from {minimum:g} to {maximum:g}", name)
        assert math.isfinite(value)
        return float(value)

    return Field(_about({"type": "number", "minimum": minimum, "maximum": maximum}, about), read, default)


def boolean(default: bool = False, about: str = "") -> Field:
    def read(name: str, value: Any) -> bool:
        if not isinstance(value, bool):
            raise refused(f"{name}={shown(value, 40)} must be true or false", name)
        return value

    return Field(_about({"type": "boolean"}, about), read, default)


def text(*, longest: int, shortest: int = 0, required: bool = False, about: str = "") -> Field:
    schema: Schema = {"type": "string", "maxLength": longest} | ({"minLength": shortest} if shortest else {})

    def read(name: str, value: Any) -> str:
        return read_text(name, value, longest, shortest)

    return Field(_about(schema, about), read, required=required)


def read_text(name: str, value: Any, longest: int, shortest: int = 0) -> str:
    """A string that can be encoded in UTF-8; ApiError for another value."""
    if not isinstance(value, str):
        raise refused(f"{name}={shown(value, 40)} must be a text", name)
    if not shortest <= len(value) <= longest:
        least = f"from {shortest} to" if shortest else "at most"
        raise refused(f"{name} has {len(value)} characters; it must have {least} {longest}", name)
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise refused(f"{name} is not valid Unicode: character {error.start} is half a surrogate pair", name) from None
    return value


def one_of(values: Sequence[Any], default: Any = None, about: str = "") -> Field:
    """One of a few values, compared by type too: true is not 1."""

    def read(name: str, value: Any) -> Any:
        if not any(value == each and isinstance(value, bool) == isinstance(each, bool) for each in values):
            need = " or ".join(map(_as_json, values))
            raise refused(
                f"{name}={shown(value, 40)} is not supported here; leave it out, or give {need}", name, "unsupported"
            )
        return value

    return Field(_about({"enum": list(values)}, about), read, default)


def listed(each: Field, *, most: int, fewest: int = 0, about: str = "", required: bool = False) -> Field:
    """A list whose entries are each read as a field; gives a tuple."""
    schema: Schema = {"type": "array", "items": each.schema, "maxItems": most}
    schema |= {"minItems": fewest} if fewest else {}

    def read(name: str, value: Any) -> tuple[Any, ...]:
        if not isinstance(value, list):
            raise refused(f"{name}={shown(value, 40)} must be a list", name)
        if not fewest <= len(value) <= most:
            raise refused(f"{name} has {len(value)} entries; it must have from {fewest} to {most}", name)
        return tuple(each.read(f"{name}[{i}]", entry) for i, entry in enumerate(value))

    return Field(_about(schema, about), read, () if not required else None, required)


def token_ids(vocab_size: int, *, most: int, fewest: int = 1) -> Field:
    """A list of token ids, checked all at once, because a prompt may have many."""
    schema: Schema = {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": vocab_size - 1}}
    schema |= {"minItems": fewest, "maxItems": most}

    def read(name: str, value: Any) -> tuple[int, ...]:
        if not isinstance(value, list) or not fewest <= len(value) <= most:
            raise refused(f"{name} must be a list of {fewest} to {most} token ids", name)
        if {int} != set(map(type, value)) or min(value) < 0 or max(value) >= vocab_size:
            return tuple(read_integer(f"{name}[{i}]", entry, 0, vocab_size - 1) for i, entry in enumerate(value))
        return tuple(value)

    return Field(schema, read, required=True)


def nested(fields: Fields, default: Any = None, about: str = "") -> Field:
    """An object with fields of its own."""
    return Field(_about(schema_of(fields), about), lambda name, value: read_object(fields, value, name), default)


def any_object(about: str = "") -> Field:
    def read(name: str, value: Any) -> dict[str, Any]:
        if not isinstance(value, dict):
            raise refused(f"{name}={shown(value, 40)} must be an object", name)
        return value

    return Field(_about({"type": "object"}, about), read)


def neutral(*values: Any) -> Field:
    """A field of OpenAI's that is not supported: only values that ask for nothing are accepted."""
    return one_of(values, about="Not supported: only what asks for nothing is accepted.")


def _about(schema: Schema, about: str) -> Schema:
    return schema | {"description": about} if about else schema


def _as_json(value: Any) -> str:
    return {True: "true", False: "false"}[value] if isinstance(value, bool) else repr(value).replace("'", '"')
