"""Recognition of tool calls in a reply."""

from __future__ import annotations

import ast
import json
import re
import secrets
import string
import sys
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

from llama_jax.serving.tool_grammar import as_schema, is_text
from llama_jax.tokenizers.interface import Tokenizer
from llama_jax.tokenizers.tool_dialects import (
    CALL_TOKEN,
    CLOSING_TAG,
    END_OF_THOUGHT,
    OPENINGS,
    TAG,
    Dialect,
    first_tag,
)

ID_LETTERS = string.ascii_letters + string.digits
ID_LENGTH = 9  # Mistral's templates accept no other
MAX_PYTHON = 20_000  # characters of calls in Python's syntax, since its parser may need a lot of memory
MAX_ATTEMPTS = 32  # beginnings of a call that turn out to be none; what follows is text
MAX_DIGITS = 1000  # digits of an integer


class ToolCall(NamedTuple):
    """A function call; `arguments` is JSON."""

    id: str
    name: str
    arguments: str

    def as_dict(self) -> dict[str, Any]:
        return {"id": self.id, "type": "function", "function": {"name": self.name, "arguments": self.arguments}}


AT_END = re.compile(r"\s*(?:```)?\s*")
SPACE, SEPARATOR = re.compile(r"\s*"), re.compile(r"\s*[;,]")
NAME_KEYS, ARGUMENT_KEYS = ("name", "tool_name", "function"), ("arguments", "parameters")
FUNCTION_TAG = re.compile(r"<function=([^>\n]+)>\s*")
PARAMETER_TAG = re.compile(
    r"\s*<parameter=([^>\n]+)>\n?(.*?)\n?</parameter>(?=\s*(?:<parameter=|</function>|</tool_call>|$))", re.DOTALL
)
# Between a name and its arguments, with and without the special tokens; at most AFTER_NAME characters.
BETWEEN = r"(?:\[CALL_ID\])?(?:[a-zA-Z0-9]{9})?(?:\[ARGS\]|<｜tool▁sep｜>)?\s{0,2}(?:```json\s{0,2})?(?=\{)"
AFTER_NAME = 50
PREFIXES = ("", "function", "function<｜tool▁sep｜>")  # DeepSeek's, before a name


class ToolText:
    """A reply in progress that may have calls: text is held back until this is known.

    Calls are recognized in every dialect, if the function is one of the tools and its arguments are an object. At the start
    of a reply a call needs no tag; later it begins with one of `OPENINGS`. Anything else is text.

    Args:
      tools: the functions that may be called: their names, or the schemas of their parameters by name.
      dialect: that of the model, whose beginning of a call is recognized anywhere.
      tokens: texts of special tokens that are passed on by name, see `call_tokens`; they are not shown.
      constrained: whether the reply follows the grammar, so that calls of other dialects are text.

    Attributes:
      tokens: see above.
    """

    def __init__(
        self,
        tools: Sequence[str] | Mapping[str, Any],
        dialect: Dialect | None = None,
        tokens: Mapping[int, str] | None = None,
        *,
        constrained: bool = False,
    ) -> None:
        self.tokens = dict(tokens or {})
        self._tools: dict[str, Any] = dict(tools) if isinstance(tools, Mapping) else dict.fromkeys(tools)
        opening = "" if dialect is None else dialect.opening + dialect.before
        tag = first_tag(opening) or ("" if dialect is None else first_tag(dialect.between))
        self._openings = (tag,) if constrained and tag else (*OPENINGS, tag) if tag else OPENINGS
        self._begins_untagged = not (constrained and first_tag(opening))
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
        thought = self._held.find(END_OF_THOUGHT)
        if 0 <= thought < min(positions, default=len(self._held)):  # after a thought a reply begins
            end = thought + len(END_OF_THOUGHT)
            shown, self._held, self._begun = self._held[:end], self._held[end:], False
            return self._without_tokens(shown) + self.push("")
        if positions:
            at, self._calls = min(positions), True
        else:
            starts = (tag[:n] for tag in (*self._openings, END_OF_THOUGHT) for n in range(1, len(tag)))
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
        if not self._begins_untagged:
            return False
        return start[:1] in ("{", "[") or start.startswith("```") or self._call.match(start) is not None

    def _may_begin(self, start: str) -> bool:
        """Whether it depends on the text after this start whether it is the beginning of a call."""
        if self._begins(start) or not self._begins_untagged:
            return False
        names = [prefix + name for name in self._tools for prefix in PREFIXES]
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
    at, may_begin, tagged, failed = 0, True, False, 0
    while at < len(text):
        begin = SPACE.match(text, at).end()  # type: ignore[union-attr]
        read = _read_calls(text, begin, tools, pattern, tagged) if may_begin and failed < MAX_ATTEMPTS else None
        failed += may_begin and read is None
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
        if piece_type == "text" and END_OF_THOUGHT in text[at:end]:  # what was before it is no call
            end = text.rindex(END_OF_THOUGHT, at, end) + len(END_OF_THOUGHT)
            calls, pieces, at, may_begin, tagged = [], [(text[:end], "text")], end, True, False
            continue
        pieces.append((text[at:end], piece_type))  # type: ignore[arg-type]
        at, may_begin, tagged = end, piece_type != "text", piece_type == "tag" and "```" not in text[at:end]
    if not calls:
        return text, []
    return _text_beside(pieces), calls


def _text_beside(pieces: Sequence[tuple[str, str]]) -> str:
    """The text that is neither a call nor a tag of one: closing tags are of what is before them, others of what follows."""
    texts: list[str] = []
    tags: list[str] = []
    before = "call"
    for piece, piece_type in (*pieces, ("", "text")):
        if piece_type == "tag":
            tags.append(piece)
        elif piece_type == "call" or piece.strip() or piece == "":
            first = next((i for i, tag in enumerate(tags) if not CLOSING_TAG.match(tag)), len(tags))
            texts += [*(tags[:first] if before == "text" else []), *(tags[first:] if piece_type == "text" else [])]
            texts += [piece] if piece_type == "text" else []
            before, tags = piece_type, []
    text = "".join(texts)
    return text if text.strip() else ""


def _call_pattern(tools: Mapping[str, Any]) -> re.Pattern[str]:
    """A pattern of a name and what stands between it and its arguments."""
    names = "|".join(map(re.escape, sorted(tools, key=len, reverse=True))) or "(?!)"
    prefix = "|".join(map(re.escape, sorted(PREFIXES, key=len, reverse=True)))
    return re.compile(rf"(?:{prefix})({names})(?:{BETWEEN}|((?:\.call)?\())")


def _read_calls(
    text: str, at: int, tools: Mapping[str, Any], pattern: re.Pattern[str], tagged: bool
) -> tuple[int, list[ToolCall]] | None:
    """The end of the calls that begin at this character, and the calls; None if none do.

    Args:
      tagged: whether a tag precedes; otherwise an object needs arguments, and Python's syntax must be the rest of the text.
    """
    if at >= len(text):
        return None
    if text[at] in "{[":
        value, end = _json_at(text, at)
        calls = [_call_of(item, tools, tagged) for item in (value if isinstance(value, list) else [value])]
        if calls and all(calls):
            return end, [call for call in calls if call is not None]
    if text[at] == "[":
        return _python_calls(text, at, tools, tagged)
    if function := FUNCTION_TAG.match(text, at):
        return _tagged_call(text, function, tools)
    if match := pattern.match(text, at):
        if match[2]:
            return _python_calls(text, at, tools, tagged)
        value, end = _json_at(text, match.end())
        return (end, [_new_call(match[1], value)]) if isinstance(value, dict) else None
    return None


def _json_at(text: str, at: int) -> tuple[Any, int]:
    """The JSON value that begins at this character, and its end; (None, `at`) if there is none. Numbers beyond the range of
    float64, which JSON allows, become its largest."""

    def refuse(constant: str) -> None:
        raise ValueError(constant)

    def clip(number: str) -> float:
        return max(-sys.float_info.max, min(float(number), sys.float_info.max))

    def read_integer(digits: str) -> float:
        return int(digits) if len(digits) <= MAX_DIGITS else clip(digits)

    decoder = json.JSONDecoder(strict=False, parse_float=clip, parse_int=read_integer, parse_constant=refuse)
    try:
        return decoder.raw_decode(text, at)
    except (ValueError, RecursionError):
        return None, at


def _call_of(value: Any, tools: Mapping[str, Any], tagged: bool) -> ToolCall | None:
    """The call in an object with a name and arguments, which it needs if no tag precedes."""
    if isinstance(value, dict) and isinstance(value.get("function"), dict):
        value = value["function"]
    if not isinstance(value, dict):
        return None
    name = next((value[key] for key in NAME_KEYS if key in value), None)
    if not tagged and not any(key in value for key in ARGUMENT_KEYS):
        return None
    arguments: Any = next((value[key] for key in ARGUMENT_KEYS if key in value), {})
    if isinstance(arguments, str):  # some models write the JSON as a string
        arguments = _json_at(arguments.strip() or "{}", 0)[0] or ""
    arguments = {} if arguments is None else arguments
    if not isinstance(name, str) or name not in tools or not isinstance(arguments, dict):
        return None
    is_schema = arguments.get("type") == "object" and isinstance(arguments.get("properties"), dict)
    properties = as_schema(as_schema(tools[name]).get("properties"))
    return None if is_schema and "properties" not in properties else _new_call(name, arguments)


def _tagged_call(text: str, function: re.Match[str], tools: Mapping[str, Any]) -> tuple[int, list[ToolCall]] | None:
    """A call as ``<function=NAME>``, with arguments as JSON or a tag for each."""
    name, end = function[1].strip(), function.end()
    if name not in tools:
        return None
    arguments: Any = {}
    if text[end : end + 1] == "{":
        arguments, end = _json_at(text, end)
    while parameter := PARAMETER_TAG.match(text, end):
        arguments[parameter[1].strip()] = _typed(parameter[2], tools[name], parameter[1].strip())
        end = parameter.end()
    closing = re.compile(r"\s*(?:</function>|(?=</tool_call>)|$)").match(text, end)
    return (closing.end(), [_new_call(name, arguments)]) if closing and isinstance(arguments, dict) else None


def _typed(value: str, schema: Any, name: str) -> Any:
    """The value of a parameter that is written as a text, by its schema."""
    parameter = as_schema(as_schema(as_schema(schema).get("properties")).get(name))
    if is_text(parameter) or value in (parameter.get("enum") or ()):
        return value
    if value in ("True", "False", "None"):
        value = {"True": "true", "False": "false", "None": "null"}[value]
    decoded, end = _json_at(value.strip(), 0)
    return decoded if end == len(value.strip()) and end else value


def _python_calls(text: str, at: int, tools: Mapping[str, Any], tagged: bool) -> tuple[int, list[ToolCall]] | None:
    """Calls in Python's syntax: one, or a list of them; without a tag, only if nothing else follows."""
    end = _closing_bracket(text, at)
    if end is None or not (tagged or AT_END.fullmatch(text, end)):
        return None
    try:
        tree = ast.parse(text[at:end], mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    calls: list[ToolCall] = []
    for node in tree.elts if isinstance(tree, ast.List) else [tree]:
        if not isinstance(node, ast.Call) or node.args or any(keyword.arg is None for keyword in node.keywords):
            return None
        name = _dotted_name(node.func)
        name = name if name in tools else name.removesuffix(".call")
        if name not in tools:
            return None
        try:
            arguments = {str(keyword.arg): _literal(keyword.value) for keyword in node.keywords}
            calls.append(_new_call(name, arguments))
        except (ValueError, TypeError, RecursionError):
            return None
    return (end, calls) if calls else None


def _dotted_name(node: ast.expr) -> str:
    """The name ``a.b.c``; "" for another expression."""
    names: list[str] = []
    while isinstance(node, ast.Attribute):
        names.append(node.attr)
        node = node.value
    return ".".join([node.id, *reversed(names)]) if isinstance(node, ast.Name) else ""


def _literal(node: ast.expr) -> Any:
    """The value of an expression, with JSON's names beside Python's, and numbers within float64."""

    class Names(ast.NodeTransformer):
        def visit_Name(self, name: ast.Name) -> ast.expr:
            return ast.Constant({"true": True, "false": False, "null": None}[name.id])

        def visit_Constant(self, constant: ast.Constant) -> ast.expr:
            return ast.Constant(sys.float_info.max) if constant.value == float("inf") else constant

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
    """A call; half a surrogate pair in its arguments becomes a question mark.

    Raises:
      TypeError, ValueError: arguments that JSON cannot express.
    """
    call_id = "".join(secrets.choice(ID_LETTERS) for _ in range(ID_LENGTH))
    text = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
    return ToolCall(call_id, name, text.encode(errors="replace").decode())
