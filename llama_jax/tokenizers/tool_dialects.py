"""The forms in which families of models write calls of tools."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple


class Dialect(NamedTuple):
    """How a family of models writes calls: `opening`, then `before` NAME `middle` ARGUMENTS `after` for each call with
    `between` between two of them, then `closing`.

    Attributes:
      marks: texts that are all in the chat templates of these models.
      arguments: the syntax of arguments: JSON, a tag for each (Qwen3-Coder), or Python's.
    """

    marks: tuple[str, ...]
    opening: str
    before: str
    middle: str
    after: str
    between: str
    closing: str
    arguments: Literal["json", "tags", "python"] = "json"


# The first whose marks are all in the template. "{key}" stands for the name that the template has for arguments.
DIALECTS = {
    "qwen3-coder": Dialect(
        ("<function=", "<parameter="), "", "<tool_call>\n<function=", ">\n", "</function>\n</tool_call>", "\n", "", "tags"
    ),
    "functionary-v3.1": Dialect(("<function=",), "", "<function=", ">", "</function>", "\n", ""),
    "functionary-v3.2": Dialect((">>>all",), "", "", "\n", "", ">>>", ""),
    "deepseek": Dialect(
        ("<｜tool▁call▁begin｜>",),
        "<｜tool▁calls▁begin｜>",
        "<｜tool▁call▁begin｜>function<｜tool▁sep｜>",
        "\n```json\n",
        "\n```<｜tool▁call▁end｜>",
        "\n",
        "<｜tool▁calls▁end｜>",
    ),
    "mistral-args": Dialect(("[TOOL_CALLS]", "[ARGS]"), "", "[TOOL_CALLS]", "[ARGS]", "", "", ""),
    "mistral": Dialect(("[TOOL_CALLS]",), "[TOOL_CALLS][", '{"name": "', '", "arguments": ', "}", ", ", "]"),
    "command-r7b": Dialect(
        ("<|START_ACTION|>",), "<|START_ACTION|>[", '{"tool_name": "', '", "parameters": ', "}", ", ", "]<|END_ACTION|>"
    ),
    "command-r": Dialect(
        ("Action:", "tool_name"), "Action: ```json\n[", '{"tool_name": "', '", "parameters": ', "}", ", ", "]\n```"
    ),
    "phi4": Dialect(
        ("<|tool_call|>", "<|/tool_call|>"),
        "<|tool_call|>[",
        '{"name": "',
        '", "{key}": ',
        "}",
        ", ",
        "]<|/tool_call|>",
    ),
    "granite": Dialect(("<|tool_call|>",), "<|tool_call|>[", '{"name": "', '", "{key}": ', "}", ", ", "]"),
    "hermes": Dialect(("<tool_call>",), "", '<tool_call>\n{"name": "', '", "{key}": ', "}\n</tool_call>", "\n", ""),
    "python": Dialect(("[func_name1(",), "[", "", "(", ")", ", ", "]", "python"),
    "json": Dialect((), "", '{"name": "', '", "{key}": ', "}", "\n", ""),
}
# Texts with which calls begin anywhere in a reply; other beginnings count only at its start.
OPENINGS: tuple[str, ...] = (
    *("<tool_call>", "<function=", "<function_call>", "<|tool_call|>", "[TOOL_CALLS]", "<|python_tag|>"),
    *("<|START_ACTION|>", "<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<|python_start|>", "<TOOLCALL>", "functools["),
)
# Texts beside calls that belong to them. A model that has them as special tokens writes none of them as text.
TAG = re.compile(
    r"</?tool_calls?>|</?TOOLCALL>|</?function_call>|<\|/?tool_call\|>|\[TOOL_CALLS\]|<\|python_(?:tag|start|end)\|>"
    r"|<\|(?:START|END)_ACTION\|>|<｜tool▁calls?▁(?:begin|end)｜>|```[a-z_]{0,10}|functools(?=\[)|Action:|>>>"
)
CLOSING_TAG = re.compile(r"\s*(?:</|<\|/|<\|END|<\|python_end|<｜tool▁calls?▁end|```$|[;,])")
BEGIN_OF_THOUGHT, END_OF_THOUGHT = "<think>", "</think>"  # around what a model thinks before it replies
CALL_TOKEN = re.compile(rf"(?:{TAG.pattern}|\[ARGS\]|\[CALL_ID\]|<｜tool▁sep｜>)")


def dialect_of(template: str) -> Dialect:
    """The dialect of the models with a chat template."""
    dialect = next(dialect for dialect in DIALECTS.values() if all(mark in template for mark in dialect.marks))
    # Llama 3.1 uses this name for arguments, other templates use OpenAI's. A template's text contains no tool schemas.
    as_parameters = re.search(r'parameters\\?"\s*:', template) and not re.search(r'arguments\\?"\s*:', template)
    return dialect._replace(middle=dialect.middle.replace("{key}", "parameters" if as_parameters else "arguments"))


def first_tag(text: str) -> str:
    """The tag or other opening with which a text begins; "" for none."""
    opening = next((name for name in OPENINGS if text.startswith(name)), "")
    tag = TAG.match(text)
    return opening or (tag[0] if tag else "")


def write_calls(dialect: Dialect, calls: Sequence[tuple[str, Mapping[str, Any]]]) -> str:
    """Calls, each a name and arguments, as a model of the dialect writes them."""
    write = {"json": _write_json, "tags": _write_tags, "python": _write_python}[dialect.arguments]
    written = [dialect.before + name + dialect.middle + write(arguments) + dialect.after for name, arguments in calls]
    return dialect.opening + dialect.between.join(written) + dialect.closing


def _write_json(arguments: Mapping[str, Any]) -> str:
    return json.dumps(arguments, ensure_ascii=False)


def _write_tags(arguments: Mapping[str, Any]) -> str:
    texts = {name: value if isinstance(value, str) else json.dumps(value) for name, value in arguments.items()}
    return "".join(f"<parameter={name}>\n{text}\n</parameter>\n" for name, text in texts.items())


def _write_python(arguments: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={value!r}" for name, value in arguments.items())
