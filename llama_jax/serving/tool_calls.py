"""Calls of tools in a reply: the dialects in which models write them, their grammar, and their recognition in text."""

from __future__ import annotations

import ast
import json
import re
import secrets
import string
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from llama_jax.errors import UserError, shown
from llama_jax.serving.grammar import JSON_STYLE
from llama_jax.tokenizers.interface import Tokenizer, split_special

ID_LETTERS = string.ascii_letters + string.digits
ID_LENGTH = 9  # Mistral's templates accept no other
MAX_PYTHON = 100_000  # characters of calls in Python's syntax, since its parser may need a lot of memory


class ToolCall(NamedTuple):
    """A function call; `arguments` is JSON."""

    id: str
    name: str
    arguments: str

    def as_dict(self) -> dict[str, Any]:
        return {"id": self.id, "type": "function", "function": {"name": self.name, "arguments": self.arguments}}


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
    *("<|START_ACTION|>", "<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>"),
)
# Texts beside calls that belong to them. A model that has them as special tokens writes none of them as text.
TAG = re.compile(
    r"</?tool_calls?>|</?function_call>|<\|/?tool_call\|>|\[TOOL_CALLS\]|<\|python_tag\|>|<\|(?:START|END)_ACTION\|>"
    r"|<｜tool▁calls?▁(?:begin|end)｜>|```[a-z_]{0,10}|Action:|>>>"
)
CLOSING_TAG = re.compile(r"\s*(?:</|<\|/|<\|END|<｜tool▁calls?▁end|```$|[;,])")
CALL_TOKEN = re.compile(rf"(?:{TAG.pattern}|\[ARGS\]|\[CALL_ID\]|<｜tool▁sep｜>)")
SPACE, SEPARATOR = re.compile(r"\s*"), re.compile(r"\s*[;,]")
NAME_KEYS, ARGUMENT_KEYS = ("name", "tool_name"), ("arguments", "parameters")
FUNCTION = re.compile(r"<function=([^>\n]+)>\s*")
PARAMETER = re.compile(
    r"\s*<parameter=([^>\n]+)>\n?(.*?)\n?</parameter>(?=\s*(?:<parameter=|</function>|</tool_call>|$))", re.DOTALL
)
# Between a name and its arguments, with and without the special tokens; at most AFTER_NAME characters.
BETWEEN = r"(?:\[CALL_ID\])?(?:[a-zA-Z0-9]{9})?(?:\[ARGS\])?\s{0,2}(?:```json\s{0,2})?(?=\{)"
AFTER_NAME = 40


def dialect_of(template: str) -> Dialect:
    """The dialect of the models with a chat template."""
    dialect = next(dialect for dialect in DIALECTS.values() if all(mark in template for mark in dialect.marks))
    # Llama 3.1 uses this name for arguments, other templates use OpenAI's. A template's text contains no tool schemas.
    as_parameters = re.search(r'parameters\\?"\s*:', template) and not re.search(r'arguments\\?"\s*:', template)
    return dialect._replace(middle=dialect.middle.replace("{key}", "parameters" if as_parameters else "arguments"))


# --- the grammar ---------------------------------------------------------------------------------------------------------


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
    more = f"({literal(dialect.between + dialect.before)} call)*" if several else ""
    lines = [f"calls: call {more} {literal(dialect.closing)}", "call: " + " | ".join(f"call_{i}" for i, _ in called)]
    write = {"json": _json_arguments, "tags": _tagged_arguments, "python": _python_arguments}[dialect.arguments]
    is_object = dialect.before.endswith('"')
    for i, function in called:
        name = json.dumps(function["name"], ensure_ascii=False)[1:-1] if is_object else function["name"]
        if dialect.arguments == "python" and not all(map(str.isidentifier, name.split("."))):
            raise UserError(
                f"the function {shown(name, 70)} has no name of Python, which this model's calls need; rename it"
            )
        lines.append(f"call_{i}: {literal(name + dialect.middle)} arguments_{i} {literal(dialect.after)}")
        lines += write(f"arguments_{i}", _arguments_schema(i, function), literal)
    opening = dialect.opening + dialect.before
    if not optional:
        return "\n".join([f"start: {literal(opening)} calls", *lines])
    # A text is none that would be recognized as a call.
    tag = _first_tag(opening + dialect.between)
    openings = "|".join(re.escape(name).replace("/", r"\/") for name in (*OPENINGS, *([tag] if tag else [])))
    starts = "|".join(re.escape(function["name"]).replace("/", r"\/") for _, function in called)
    refused = rf"((?s:.)*({openings})|(function)?({starts})[\s.({{\[`])(?s:.)*"
    text = rf"/[^\s{{\[`](?s:.)*/ & ~/{refused}/"
    if not tag or not opening.startswith(tag):
        start = f"TEXT | {literal(opening)} calls"
    elif tag in special_tokens:
        start = f"TEXT | TEXT? {literal(opening)} calls"
    else:
        start = f"TEXT | before {literal(opening.removeprefix(tag))} calls"
        lines.append(f"before[suffix={json.dumps(tag)}]: /(?s:.)*/")
    return "\n".join([f"start: {start}", f"TEXT: {text}", *lines])


def _first_tag(text: str) -> str:
    """The tag or other opening with which a text begins; "" for none."""
    opening = next((name for name in OPENINGS if text.startswith(name)), "")
    tag = TAG.match(text)
    return opening or (tag[0] if tag else "")


def _json_arguments(rule: str, schema: dict[str, Any], literal: Callable[[str], str]) -> Iterator[str]:
    yield f"{rule}: %json {json.dumps(schema)}"


def _parameters(rule: str, schema: dict[str, Any]) -> list[tuple[str, str, dict[str, Any], bool]]:
    """For each parameter its name, the rule of its value, its schema, and whether it is required; those first."""
    required = schema.get("required") or ()
    shared: dict[str, Any] = {key: schema[key] for key in ("$defs", "definitions", "x-guidance") if key in schema}
    properties: dict[str, Any] = schema.get("properties") or {}
    order = sorted(enumerate(properties), key=lambda item: (item[1] not in required, item[0]))
    return [(name, f"{rule}_{i}", {**shared, **_object(properties[name])}, name in required) for i, name in order]


def _object(schema: Any) -> dict[str, Any]:
    return schema if isinstance(schema, dict) else {}


def _tagged_arguments(rule: str, schema: dict[str, Any], literal: Callable[[str], str]) -> Iterator[str]:
    parameters = _parameters(rule, schema)
    yield f"{rule}: " + (" ".join(value if required else f"({value})?" for _, value, _, required in parameters) or '""')
    for name, value, parameter, _ in parameters:
        head, end = literal(f"<parameter={name}>\n"), "\n</parameter>\n"
        if _is_text(parameter) and "enum" not in parameter:
            if rest := {"pattern", "format", "minLength", "maxLength"} & parameter.keys():
                raise UserError(f"the parameter {shown(name, 40)} has {min(rest)}, which this model's calls cannot follow")
            yield f"{value}: {head} {value}_text"
            yield f"{value}_text[suffix={json.dumps(end)}]: /(?s:.*)/"
        elif _is_text(parameter):
            choices = " | ".join(json.dumps(str(choice), ensure_ascii=False) for choice in parameter["enum"])
            yield f"{value}: {head} ({choices}) {json.dumps(end)}"
        else:
            yield f"{value}: {head} {value}_json {json.dumps(end)}"
            yield f"{value}_json: %json {json.dumps(parameter)}"


def _python_arguments(rule: str, schema: dict[str, Any], literal: Callable[[str], str]) -> Iterator[str]:
    parameters = _parameters(rule, schema)
    written = [f"{json.dumps(name + '=')} {value}" for name, value, _, _ in parameters]
    count = sum(required for *_, required in parameters)
    later = lambda begin: " ".join(f'(", " {text})?' for text in written[begin:])
    if count:
        yield f"{rule}: " + ' ", " '.join(written[:count]) + " " + later(count)
    else:
        yield f"{rule}: " + " | ".join(['""', *(f"{text} {later(i + 1)}" for i, text in enumerate(written))])
    for _, value, parameter, _ in parameters:
        yield f"{value}: %json {json.dumps(parameter)}"


def _arguments_schema(i: int, function: dict[str, Any]) -> dict[str, Any]:
    """The schema of a function's arguments, with this library's JSON style."""
    schema = function.get("parameters") or {}
    if schema.get("type", "object") != "object":
        json_type = shown(schema["type"], 40)
        raise UserError(f"tools[{i}].function.parameters has type={json_type}; a call needs an object")
    style = schema.get("x-guidance", {})
    return {**schema, "type": "object", "x-guidance": JSON_STYLE | style if isinstance(style, dict) else style}


# --- recognition ---------------------------------------------------------------------------------------------------------


class ToolText:
    """A reply in progress that may have calls: text is held back until this is known.

    Calls are recognized in every dialect, if the function is one of the tools and its arguments are an object. At the start
    of a reply a call needs no tag; later it begins with one of `OPENINGS`. Anything else is text.

    Args:
      tools: the functions that may be called: their names, or the schemas of their parameters by name.
      dialect: that of the model, whose beginning of a call is recognized anywhere.
      tokens: texts of special tokens that are passed on by name, see `call_tokens`; they are not shown.

    Attributes:
      tokens: see above.
    """

    def __init__(
        self,
        tools: Sequence[str] | Mapping[str, Any],
        dialect: Dialect | None = None,
        tokens: Mapping[int, str] | None = None,
    ) -> None:
        self.tokens = dict(tokens or {})
        self._tools: dict[str, Any] = dict(tools) if isinstance(tools, Mapping) else dict.fromkeys(tools)
        own = "" if dialect is None else _first_tag(dialect.opening + dialect.before + dialect.between)
        self._openings = (*OPENINGS, own) if own else OPENINGS
        self._call = _call_pattern(self._tools)
        self._held = ""
        self._begun = False  # some text was shown
        self._calls = False  # the held text may have calls

    def push(self, text: str) -> str:
        """Add text, and return the part that can be shown."""
        self._held += text
        if not self._begun and not self._calls:
            start = self._held.lstrip()
            if not start or self._may_begin(start):
                return ""
            self._calls = self._begins(start)
        if self._calls:
            return ""
        positions = [at for at in map(self._held.find, self._openings) if at >= 0]
        if positions:
            at, self._calls = min(positions), True
        else:
            starts = (tag[:n] for tag in self._openings for n in range(1, len(tag)))
            at = len(self._held) - max((len(start) for start in starts if self._held.endswith(start)), default=0)
        if not self._begun and not self._held[:at].strip():  # white space before a call is not shown
            return ""
        shown, self._held = self._without_tokens(self._held[:at]), self._held[at:]
        self._begun = self._begun or bool(shown.strip())
        return shown

    def finish(self) -> tuple[str, list[ToolCall]]:
        """The remaining text to show, and the calls."""
        begins = self._calls or (not self._begun and self._begins(self._held.lstrip()))
        text, self._held = self._held, ""
        text, calls = find_calls(text, self._tools) if begins else (text, [])
        return self._without_tokens(text), calls

    def _without_tokens(self, text: str) -> str:
        for name in self.tokens.values():
            text = text.replace(name, "")
        return text

    def _begins(self, start: str) -> bool:
        return start[:1] in ("{", "[") or start.startswith("```") or self._call.match(start) is not None

    def _may_begin(self, start: str) -> bool:
        """Whether it depends on the text after this start whether it is the beginning of a call."""
        if self._begins(start):
            return False
        names = [prefix + name for name in self._tools for prefix in ("", "function")]
        is_name = any(
            name.startswith(start) or (start.startswith(name) and len(start) < len(name) + AFTER_NAME) for name in names
        )
        return "```".startswith(start) or is_name


def call_tokens(tokenizer: Tokenizer) -> dict[int, str]:
    """The special tokens that are tags of calls, and have no text of their own, with their names."""
    names = {token: name for name, token in tokenizer.special_tokens.items() if CALL_TOKEN.fullmatch(name)}
    return {token: name for token, name in names.items() if not tokenizer.token_bytes(token)}


def find_calls(text: str, tools: Mapping[str, Any]) -> tuple[str, list[ToolCall]]:
    """The calls in a text that begins with a call or a tag, and the text beside them; the whole text if there are none.

    Args:
      tools: the schemas of the functions' parameters by name, or None.
    """
    pattern = _call_pattern(tools)
    calls: list[ToolCall] = []
    pieces: list[tuple[str, Literal["text", "tag", "call"]]] = []
    at, may_begin = 0, True
    while at < len(text):
        begin = SPACE.match(text, at).end()  # type: ignore[union-attr]
        read = _read_calls(text, begin, tools, pattern) if may_begin else None
        if read is not None:
            calls += read[1]
            end, piece_type = read[0], "call"
        elif tag := TAG.match(text, begin):
            end, piece_type = tag.end(), "tag"
        elif pieces and pieces[-1][1] == "call" and (separator := SEPARATOR.match(text, at)):
            end, piece_type = separator.end(), "tag"
        else:
            following = TAG.search(text, begin)
            end, piece_type = following.start() if following else len(text), "text"
        pieces.append((text[at:end], piece_type))  # type: ignore[arg-type]
        at, may_begin = end, piece_type != "text"
    if not calls:
        return text, []
    return _text_beside(pieces), calls


def _text_beside(pieces: Sequence[tuple[str, str]]) -> str:
    """The text that is neither a call nor a tag of one: closing tags are of what is before them, others of what follows."""
    kept: list[str] = []
    tags: list[str] = []
    before = "call"
    for piece, piece_type in (*pieces, ("", "text")):
        if piece_type == "tag":
            tags.append(piece)
        elif piece_type == "call" or piece.strip() or piece == "":
            first = next((i for i, tag in enumerate(tags) if not CLOSING_TAG.match(tag)), len(tags))
            kept += [*(tags[:first] if before == "text" else []), *(tags[first:] if piece_type == "text" else [])]
            kept += [piece] if piece_type == "text" else []
            before, tags = piece_type, []
    text = "".join(kept)
    return text if text.strip() else ""


def _call_pattern(tools: Mapping[str, Any]) -> re.Pattern[str]:
    """A pattern of a name and what stands between it and its arguments."""
    names = "|".join(map(re.escape, sorted(tools, key=len, reverse=True))) or "(?!)"
    return re.compile(rf"(?:function(?:<｜tool▁sep｜>)?)?({names})(?:{BETWEEN}|((?:\.call)?\())")


def _read_calls(text: str, at: int, tools: Mapping[str, Any], pattern: re.Pattern[str]) -> tuple[int, list[ToolCall]] | None:
    """The end of the calls that begin at this character, and the calls; None if none do."""
    if at >= len(text):
        return None
    if text[at] in "{[":
        value, end = _json_at(text, at)
        calls = [_call_of(item, tools) for item in (value if isinstance(value, list) else [value])]
        if calls and all(calls):
            return end, [call for call in calls if call is not None]
    if text[at] == "[":
        return _python_calls(text, at, tools)
    if function := FUNCTION.match(text, at):
        return _tagged_call(text, function, tools)
    if named := pattern.match(text, at):
        if named[2]:
            return _python_calls(text, at, tools)
        value, end = _json_at(text, named.end())
        return (end, [_new_call(named[1], value)]) if isinstance(value, dict) else None
    return None


def _json_at(text: str, at: int) -> tuple[Any, int]:
    """The JSON value that begins at this character, and its end; (None, `at`) if there is none. Numbers beyond the range of
    float64, which JSON allows, become its largest."""

    def refuse(constant: str) -> None:
        raise ValueError(constant)

    def clip(number: str) -> float:
        return max(-sys.float_info.max, min(float(number), sys.float_info.max))

    try:
        return json.JSONDecoder(strict=False, parse_float=clip, parse_constant=refuse).raw_decode(text, at)
    except (ValueError, RecursionError):
        return None, at


def _call_of(value: Any, tools: Mapping[str, Any]) -> ToolCall | None:
    """The call in an object with a name and arguments."""
    if isinstance(value, dict) and isinstance(value.get("function"), dict):
        value = value["function"]
    if not isinstance(value, dict):
        return None
    name = next((value[key] for key in NAME_KEYS if key in value), None)
    arguments: Any = next((value[key] for key in ARGUMENT_KEYS if key in value), {})
    if isinstance(arguments, str):  # some models write the JSON as a string
        arguments = _json_at(arguments.strip() or "{}", 0)[0] or ""
    arguments = {} if arguments is None else arguments
    known = isinstance(name, str) and name in tools
    return _new_call(name, arguments) if known and isinstance(arguments, dict) else None  # type: ignore[arg-type]


def _tagged_call(text: str, function: re.Match[str], tools: Mapping[str, Any]) -> tuple[int, list[ToolCall]] | None:
    """A call as ``<function=NAME>``, with arguments as JSON or a tag for each."""
    name, end = function[1].strip(), function.end()
    if name not in tools:
        return None
    arguments: Any = {}
    if text[end : end + 1] == "{":
        arguments, end = _json_at(text, end)
    while parameter := PARAMETER.match(text, end):
        arguments[parameter[1].strip()] = _typed(parameter[2], tools[name], parameter[1].strip())
        end = parameter.end()
    closing = re.compile(r"\s*(?:</function>|(?=</tool_call>)|$)").match(text, end)
    return (closing.end(), [_new_call(name, arguments)]) if closing and isinstance(arguments, dict) else None


def _typed(value: str, schema: Any, name: str) -> Any:
    """The value of a parameter that is written as a text, by its schema."""
    parameter = _object(_object(_object(schema).get("properties")).get(name))
    if _is_text(parameter):
        return value
    decoded, end = _json_at(value.strip(), 0)
    return decoded if end == len(value.strip()) and end else value


def _is_text(schema: Mapping[str, Any]) -> bool:
    return schema.get("type") == "string"


def _python_calls(text: str, at: int, tools: Mapping[str, Any]) -> tuple[int, list[ToolCall]] | None:
    """Calls in Python's syntax: one, or a list of them."""
    end = _closing_bracket(text, at)
    if end is None:
        return None
    try:
        tree = ast.parse(text[at:end], mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    calls: list[ToolCall] = []
    for node in tree.elts if isinstance(tree, ast.List) else [tree]:
        if not isinstance(node, ast.Call) or node.args or any(keyword.arg is None for keyword in node.keywords):
            return None
        name = ast.unparse(node.func)
        name = name if name in tools else name.removesuffix(".call")
        if name not in tools:
            return None
        try:
            arguments = {str(keyword.arg): _literal(keyword.value) for keyword in node.keywords}
            calls.append(_new_call(name, arguments))
        except (ValueError, TypeError, RecursionError):
            return None
    return (end, calls) if calls else None


def _literal(node: ast.expr) -> Any:
    """The value of an expression, with JSON's names beside Python's."""

    class Names(ast.NodeTransformer):
        def visit_Name(self, name: ast.Name) -> ast.expr:
            return ast.Constant({"true": True, "false": False, "null": None}[name.id])

    try:
        return ast.literal_eval(Names().visit(node))
    except KeyError:
        raise ValueError("a name") from None


def _closing_bracket(text: str, at: int) -> int | None:
    """The end of the brackets that are opened at this character or after a name there; None if they are not closed."""
    depth, quote, i = 0, "", at
    while i < min(len(text), at + MAX_PYTHON):
        letter = text[i]
        if quote:
            i += letter == "\\"
            quote = "" if letter == quote else quote
        elif letter in "\"'":
            quote = letter
        elif letter in "([{":
            depth += 1
        elif letter in ")]}":
            depth -= 1
            if depth == 0:
                return i + 1
        i += 1
    return None


def _new_call(name: str, arguments: dict[str, Any]) -> ToolCall:
    """Raises TypeError or ValueError for arguments that JSON cannot express."""
    call_id = "".join(secrets.choice(ID_LETTERS) for _ in range(ID_LENGTH))
    return ToolCall(call_id, name, json.dumps(arguments, ensure_ascii=False, allow_nan=False))
