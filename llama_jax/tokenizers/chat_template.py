"""The checkpoint's own chat template: its rendering in a child process, and the form in which it reads messages."""

from __future__ import annotations

import hashlib
import json
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache, partial
from itertools import islice, product
from pathlib import Path
from typing import Any, NamedTuple

from llama_jax.errors import GenerationError, reason_of, short_repr
from llama_jax.tokenizers.child_process import ChildProcess
from llama_jax.tokenizers.interface import TextPart, Tokenizer, special_pattern, split_special
from llama_jax.tokenizers.tool_dialects import (
    BEGIN_OF_THOUGHT,
    CALL_TOKEN,
    END_OF_THOUGHT,
    Dialect,
    dialect_of,
    write_calls,
)

PRIVATE_USE = range(0xE000, 0xF900)  # Unicode's private-use characters
RENDER_SECONDS = 5
RENDER_MEMORY = 100 << 20  # bytes
OWN_VARIABLES = ("messages", "tools", "documents", "add_generation_prompt")  # variables of every template
TOOL_TEMPLATE = "tool_use"  # name of the template for chats with tools (transformers)
SHORT_ID = re.compile("[a-zA-Z0-9]{9}")  # the only ids of calls that Mistral's templates accept
THOUGHT = (BEGIN_OF_THOUGHT, END_OF_THOUGHT)  # templates drop what an earlier reply has between these
PYTHON_WORDS = {"True": True, "False": False, "None": None}

ChatMessages = Sequence[Mapping[str, Any]]
Tools = Sequence[Mapping[str, Any]]


class Renderer:
    """Renders chats with a checkpoint's own template, which is untrusted, in a child process. All chats share the process,
    to save starting Python and compiling the template for each. Thread-safe.

    The process (`template_worker`, which imports Jinja and nothing of this library) ends if a chat takes more than
    RENDER_SECONDS of CPU time or, on Linux, RENDER_MEMORY bytes.

    Args:
      time: the time that templates write (`strftime_now`), in ISO 8601; None for the local time of each rendering.
      template_args: variables of every chat, such as `enable_thinking`.
    """

    def __init__(self, time: str | None = None, template_args: Mapping[str, Any] | None = None) -> None:
        self.template_args = dict(template_args or {})
        self._time = time
        self._forms: dict[str, MessageForm] = {}
        self._child = ChildProcess(Path(__file__).with_name("template_worker.py"), RENDER_SECONDS, RENDER_MEMORY)

    def render(
        self,
        template: str,
        messages: ChatMessages,
        *,
        reply: bool,
        tools: Tools | None = None,
        variables: Mapping[str, Any] | None = None,
        marks: tuple[str, str] = ("", ""),
    ) -> str:
        """The text of a chat.

        Args:
          messages: each with its "role" and "content".
          reply: whether to append the beginning of the assistant's next message.
          tools: functions that the model may call, in OpenAI's format.
          variables: the template's other variables, such as `bos_token`, the text of that token.
          marks: written before and after text that the template encloses in ``{% generation %}``: the assistant's text.

        Raises:
          GenerationError: a template that is not Jinja, rejects the messages, fails, or needs too much time or memory.
        """
        values = {
            **(variables or {}),
            "messages": [dict(message) for message in messages],
            "add_generation_prompt": reply,
            "tools": None if tools is None else list(tools),
            "documents": None,
        }
        try:
            answer = self._child.ask({"template": template, "values": values, "marks": marks, "time": self._time})
        except (TypeError, ValueError, RecursionError) as error:
            reason = reason_of(error)
            raise GenerationError(f"messages must consist of texts, numbers, lists and objects ({reason})") from None
        if answer is None:
            answer = {"error": f"it exceeds {RENDER_SECONDS} s or {RENDER_MEMORY >> 20} MB, or {sys.executable} fails"}
        if "error" in answer:
            raise GenerationError(f"the checkpoint's chat template cannot be used here: {answer['error']}")
        return str(answer["text"])

    def message_form(self, template: str, variables: Mapping[str, Any]) -> MessageForm:
        """The form in which a template reads messages, found once; with the variables of the first call."""
        if template not in self._forms:
            render = partial(self.render, template, reply=False, variables=variables)
            self._forms[template] = find_message_form(render, template)
        return self._forms[template]

    def close(self) -> None:
        """Kill the process; the next rendering starts a new one."""
        self._child.close()


@cache
def shared_renderer(process: int) -> Renderer:
    """The default renderer of a process (by its id, because a forked process needs its own pipe)."""
    return Renderer()


def select_template(tokenizer: Tokenizer, with_tools: bool) -> str:
    """The checkpoint's template, for chats with or without tools; it must have one."""
    assert tokenizer.chat_template is not None
    return tokenizer.chat_templates.get(TOOL_TEMPLATE, tokenizer.chat_template) if with_tools else tokenizer.chat_template


def uses_tools(messages: ChatMessages, tools: Tools) -> bool:
    """Whether a chat has tools, calls or their results."""
    return bool(tools) or any(message.get("tool_calls") or message["role"] == "tool" for message in messages)


def parse_template_args(texts: Sequence[str]) -> dict[str, Any]:
    """Variables of a template, each as NAME=VALUE, in which VALUE is JSON or else a text; GenerationError for another."""
    arguments: dict[str, Any] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals or not name.isidentifier():
            raise GenerationError(f"the template argument {short_repr(text, 60)} must be NAME=VALUE")
        try:
            arguments[name] = PYTHON_WORDS[value] if value in PYTHON_WORDS else json.loads(value)
        except (ValueError, RecursionError):
            arguments[name] = value
    return arguments


def check_template_args(tokenizer: Tokenizer, template_args: Mapping[str, Any]) -> None:
    """Raise GenerationError for a variable that the checkpoint's template does not read, or that is not the caller's."""
    texts = [tokenizer.chat_template or "", *tokenizer.chat_templates.values()]
    for name in template_args:
        if name in OWN_VARIABLES:
            raise GenerationError(f"{name} is set for every chat and cannot be an argument of the template; omit it")
        if not any(re.search(rf"\b{re.escape(name)}\b", text) for text in texts):
            raise GenerationError(f"the model's chat template has no variable {short_repr(name, 40)}; omit it")


def template_parts(
    tokenizer: Tokenizer,
    messages: ChatMessages,
    renderer: Renderer | None = None,
    tools: Tools = (),
    *,
    reply: bool = True,
    spans: bool = False,
    template_args: Mapping[str, Any] | None = None,
) -> list[tuple[TextPart, bool]]:
    """The parts that the checkpoint's own template writes, each with a flag whether it is inside ``{% generation %}``.

    Messages are passed in the form that the template reads (`MessageForm`). The template's special tokens are distinguished
    from those in messages by a character that is inserted into the latter.

    Args:
      spans: whether to split texts where ``{% generation %}`` begins and ends; if not, all flags are False.
      template_args: variables of the template, in addition to the renderer's, such as `enable_thinking`.

    Raises:
      GenerationError: see `Renderer.render`; or messages that the template omits, have all private-use characters, or are
        nested too deeply.
    """
    renderer = renderer or shared_renderer(os.getpid())
    with_tools = uses_tools(messages, tools)
    template = select_template(tokenizer, with_tools)
    arguments = renderer.template_args | dict(template_args or {})
    check_template_args(tokenizer, arguments)
    form = message_form(tokenizer, renderer, with_tools)
    messages, tools = put_in_form(messages, tools, form, dialect_of(template))
    pattern = special_pattern(tokenizer.special_tokens)
    inside, first, last = unused_characters([template, messages, tools], 3)
    # The assistant's own thoughts and calls, which templates look for, are the tokens that it writes.
    names = [name for name in tokenizer.special_tokens if name not in THOUGHT and not CALL_TOKEN.fullmatch(name)]
    other_tokens = special_pattern(names)

    def marked(value: Any, pattern: re.Pattern[str]) -> Any:
        if isinstance(value, str):
            return pattern.sub(lambda match: match[0][0] + inside + match[0][1:], value)
        if isinstance(value, Mapping):
            return {marked(key, pattern): marked(entry, pattern) for key, entry in value.items()}
        return [marked(entry, pattern) for entry in value] if isinstance(value, list | tuple) else value

    with _depth_errors():
        marked_messages = [
            marked(message, other_tokens if message["role"] == "assistant" else pattern) for message in messages
        ]
        marked_tools = marked(tools, pattern)
    # A template named for tools need not render chats without them.
    shown_tools = marked_tools if tools or template != tokenizer.chat_template else None
    variables = _variables(tokenizer, arguments)
    render = partial(renderer.render, template, reply=reply, tools=shown_tools, variables=variables)
    rendered = render(marked_messages, marks=(first, last) if spans else ("", ""))
    # Some templates write the system prompt only before a last message of the user.
    first_checked = int(form.system and len(messages) > 1 and messages[0]["role"] == "system")
    _check_arrival(marked_messages, marked_tools, rendered, render, first, first_checked)
    parts: list[tuple[TextPart, bool]] = []
    depth = 0
    for piece in re.split(f"([{first}{last}])", rendered):
        if piece in (first, last):
            depth += 1 if piece == first else -1
            continue
        for part in split_special(piece, tokenizer.special_tokens):
            parts.append((part.replace(inside, "") if isinstance(part, str) else part, depth > 0))
    return parts


def message_form(tokenizer: Tokenizer, renderer: Renderer, with_tools: bool) -> MessageForm:
    """The form in which the checkpoint's template reads messages, see `select_template`."""
    return renderer.message_form(select_template(tokenizer, with_tools), _variables(tokenizer, renderer.template_args))


def _variables(tokenizer: Tokenizer, template_args: Mapping[str, Any]) -> dict[str, Any]:
    names = {token: name for name, token in tokenizer.special_tokens.items()}
    ends = {"bos_token": names.get(tokenizer.bos_id, ""), "eos_token": names.get(tokenizer.eos_id, "")}
    return {**tokenizer.named_tokens, **ends, **template_args}


# --- the form of messages ------------------------------------------------------------------------------------------------


class MessageForm(NamedTuple):
    """The form in which a template reads messages.

    Attributes:
      texts: whether it reads a content that is a text; otherwise a list with a part, as templates of models for images do.
      system: whether a first message of the system appears in a usual chat.
      calls: whether calls appear; otherwise they are written into the content.
      call_content: the content of messages that have calls and no text; {} if they must have none.
      text_apart: whether a text and calls must be two messages, since the template writes only one of the two.
      text_arguments: whether the arguments of a call must be JSON, instead of an object.
      short_ids: whether the ids of calls must have nine letters and digits.
      one_call: whether a message may have only one call.
      tool_defaults: fields that every function must have.
    """

    texts: bool = True
    system: bool = False
    calls: bool = False
    call_content: Mapping[str, Any] = {"content": ""}
    text_apart: bool = False
    text_arguments: bool = False
    short_ids: bool = False
    one_call: bool = False
    tool_defaults: Mapping[str, Any] = {}


DEFAULT_FORM = MessageForm()
# Words that no template has, to find in what it renders.
PROBE_TEXT, PROBE_NAME, PROBE_KEY, PROBE_VALUE = "qzxtext", "qzxname", "qzxkey", "qzxvalue"
PROBE_TOOL = {"type": "function", "function": {"name": "qzxtool", "description": "?", "parameters": {"type": "object"}}}
PROBE_TOOL["function"]["parameters"]["properties"] = {"a": {"type": "string", "description": "?"}}  # type: ignore[index]
TOOL_DEFAULTS: Sequence[Mapping[str, Any]] = (
    {},
    {"parameters": {"type": "object", "properties": {}}},
    {"description": "", "parameters": {"type": "object", "properties": {}}},
    {"description": "", "parameters": {"type": "object", "properties": {}, "required": []}},
)


def find_message_form(render: Callable[..., str], template: str) -> MessageForm:
    """The form that arrives in what a template renders, by trying each with a short chat; the usual form if none does.

    Args:
      render: renders messages, with `tools`.
    """

    def rendered(messages: ChatMessages, tools: Tools | None = None) -> str:
        try:
            return render(messages, tools=tools)
        except GenerationError:
            return ""

    def reads(content: Any) -> bool:
        chat = [{"role": "user", "content": content}]
        text = rendered(chat) or rendered(chat, [PROBE_TOOL])
        return PROBE_TEXT in text and not re.search(r"""['"]type\\?['"]""", text)

    only_parts = not reads(PROBE_TEXT) and reads([{"type": "text", "text": PROBE_TEXT}])
    form = DEFAULT_FORM._replace(texts=not only_parts)
    system = put_in_form([{"role": "system", "content": PROBE_TEXT}, {"role": "user", "content": "?"}], (), form)[0]
    form = form._replace(system=PROBE_TEXT in (rendered(system) or rendered(system, [PROBE_TOOL])))
    if "tools" not in template and "tool_calls" not in template:
        return form
    question = put_in_form([{"role": "user", "content": "?"}], (), form)[0]
    for defaults in TOOL_DEFAULTS:
        if PROBE_NAME in rendered(question, [{"type": "function", "function": {"name": PROBE_NAME, **defaults}}]):
            form = form._replace(tool_defaults=defaults)
            break

    def calls(form: MessageForm, count: int, text: str) -> ChatMessages:
        ids = [f"callnumber{i}" for i in range(count)]
        function = [{"name": f"{PROBE_NAME}{i}", "arguments": {PROBE_KEY: PROBE_VALUE}} for i in range(count)]
        called = [{"id": ids[i], "type": "function", "function": function[i]} for i in range(count)]
        results = [
            {"role": "tool", "name": f"{PROBE_NAME}{i}", "tool_call_id": ids[i], "content": "?"} for i in range(count)
        ]
        chat: list[dict[str, Any]] = [
            {"role": "user", "content": "?"},
            {"role": "assistant", "content": text, "tool_calls": called},
            *results,
        ]
        if text:  # two messages in place of one must not break the order of roles that a template requires
            chat += [{"role": "assistant", "content": "."}, {"role": "user", "content": "?"}]
        return put_in_form(chat, (), form)[0]

    def arrives(form: MessageForm, count: int = 1, reply: str = "") -> bool:
        text = rendered(calls(form, count, reply), [PROBE_TOOL])
        names = all(f"{PROBE_NAME}{i}" in text for i in range(count))
        # Arguments of the other form are written as Python's dict, or as a text in JSON.
        as_json = PROBE_VALUE in text and not re.search(rf"'{PROBE_KEY}'|\\\"{PROBE_KEY}", text)
        return names and as_json and reply in text and text.count("None") <= template.count("None")

    contents: tuple[Mapping[str, Any], ...] = ({"content": None}, {"content": ""}, {})
    usual = form
    form = form._replace(calls=True)
    for short_ids, text_arguments, call_content in product((False, True), (False, True), contents):
        candidate = form._replace(short_ids=short_ids, text_arguments=text_arguments, call_content=call_content)
        if arrives(candidate):
            form = candidate._replace(one_call=not arrives(candidate, 2))
            apart = form._replace(text_apart=True)
            return apart if not arrives(form, reply=PROBE_TEXT) and arrives(apart, reply=PROBE_TEXT) else form
    return usual._replace(calls=f"{PROBE_NAME}0" in rendered(calls(form, 1, ""), [PROBE_TOOL]))


def put_in_form(
    messages: ChatMessages, tools: Tools, form: MessageForm, dialect: Dialect | None = None
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Messages and tools in the form that a template reads.

    Args:
      messages: a content is a text or a list of parts, or None beside calls; the arguments of a call are an object or JSON.
      dialect: that of the model, in which calls are written into a content.
    """
    formed: list[dict[str, Any]] = []
    for message in messages:
        changed = {**message}
        content, called = message.get("content"), message.get("tool_calls")
        if isinstance(content, list | tuple):
            content = join_parts(content)
        if called and not form.calls and dialect is not None:
            content = "\n".join(filter(None, (content, write_calls(dialect, list(map(_name_and_arguments, called))))))
            del changed["tool_calls"]
            called = None
        if content is not None:
            changed["content"] = content if form.texts else [{"type": "text", "text": content}]
        if called:
            changed["tool_calls"] = [_call_in_form(call, form) for call in called]
            if content and form.text_apart:
                formed.append({"role": message["role"], "content": changed["content"]})
            if not content or form.text_apart:
                changed = {name: value for name, value in changed.items() if name != "content"} | dict(form.call_content)
        if form.short_ids and message.get("tool_call_id"):
            changed["tool_call_id"] = shorten_id(message["tool_call_id"])
        formed.append(changed)
    if form.one_call:
        formed = _split_calls(formed, form)
    return formed, [_tool_in_form(tool, form) for tool in tools]


def join_parts(content: Sequence[Any]) -> str:
    """The text of a content that consists of parts of the type text."""
    return "".join(part["text"] for part in content)


def shorten_id(call_id: str) -> str:
    """An id with nine letters and digits: the same if it has, and otherwise one that depends on it alone."""
    return call_id if SHORT_ID.fullmatch(call_id) else hashlib.sha256(call_id.encode(errors="replace")).hexdigest()[:9]


def _call_in_form(call: Any, form: MessageForm) -> Any:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping):
        return call
    arguments = function.get("arguments")
    if isinstance(arguments, str) and not form.text_arguments:
        try:
            arguments = json.loads(arguments or "{}")
        except (ValueError, RecursionError):
            arguments = function["arguments"]
    elif form.text_arguments and not isinstance(arguments, str):
        arguments = json.dumps(arguments or {}, ensure_ascii=False)
    changed = {**call, "function": {**function, "arguments": {} if arguments is None else arguments}}
    if form.short_ids and isinstance(call.get("id"), str):
        changed["id"] = shorten_id(call["id"])
    return changed


def _name_and_arguments(call: Any) -> tuple[str, Mapping[str, Any]]:
    function = _call_in_form(call, DEFAULT_FORM).get("function") or {}
    arguments = function.get("arguments")
    return str(function.get("name", "")), arguments if isinstance(arguments, Mapping) else {}


def _tool_in_form(tool: Mapping[str, Any], form: MessageForm) -> dict[str, Any]:
    function = tool.get("function")
    if not isinstance(function, Mapping):
        return dict(tool)
    return {**tool, "function": {**function, **{k: v for k, v in form.tool_defaults.items() if k not in function}}}


def _split_calls(messages: Sequence[dict[str, Any]], form: MessageForm) -> list[dict[str, Any]]:
    """Messages with several calls as several messages, each before the result of its call."""
    split: list[dict[str, Any]] = []
    rest = list(messages)
    while rest:
        message = rest.pop(0)
        calls = message.get("tool_calls") or ()
        if len(calls) < 2:
            split.append(message)
            continue
        count = next((i for i, later in enumerate(rest) if later["role"] != "tool"), len(rest))
        results, rest = rest[:count], rest[count:]
        for call in calls:
            split.append({**message, "tool_calls": [call]})
            message = {"role": message["role"], **form.call_content}
            call_id, none = call.get("id"), [result for result in results if result.get("tool_call_id") is None]
            answers = (
                none[:1] if call_id is None else [result for result in results if result.get("tool_call_id") == call_id]
            )
            split += answers
            results = [result for result in results if result not in answers]
        split += results
    return split


def _check_arrival(
    messages: ChatMessages, tools: Tools, rendered: str, render: Callable[..., str], mark: str, first_checked: int
) -> None:
    """Raise GenerationError if the template left out the text of a message, the name of a call, or a tool.

    The content of a message with calls, and a reply's text before the end of a thought, may be left out.

    Args:
      render: renders the messages again.
      mark: a character that is in none of the texts.
      first_checked: index of the first message that must appear.
    """
    calls = [call for message in messages for call in message.get("tool_calls") or ()]
    for what, names in (("tool", _names(tools)), ("call", _names(calls))):
        for name in names:
            if not _is_in(name, rendered):
                raise GenerationError(
                    f"the {what} {short_repr(name, 70)} does not appear in the prompt: the model's chat template omits it;"
                    " remove it, or choose a template with tools (--chat-template)"
                )
    missing = [
        i
        for i, message in enumerate(messages)
        if i >= first_checked
        and not message.get("tool_calls")
        and not all(_is_in(text, rendered) for text in map(_after_thought, _texts_of(message.get("content"))))
    ]
    if not missing:
        return
    # A template may change a text: so a mark must arrive, which is written into the middle of each.
    numbered = [
        {**message, "content": _with_mark(message["content"], f"{mark}{i}{mark}")} if i in missing else message
        for i, message in enumerate(messages)
    ]
    try:
        rerendered = render(numbered)
    except GenerationError:  # it reads the text
        return
    for i in missing:
        if f"{mark}{i}{mark}" not in rerendered:
            text = short_repr("".join(_texts_of(messages[i]["content"])), 60)
            raise GenerationError(
                f"the message {text} of the role {messages[i]['role']!r} does not appear in the prompt: the model's chat"
                " template omits it; remove it, or choose another template (--chat-template) or format (--format)"
            )


def _is_in(text: str, rendered: str) -> bool:
    """Whether a text is in a rendered chat, as it is or in JSON."""
    text = text.strip()
    return text in rendered or any(json.dumps(text, ensure_ascii=way)[1:-1] in rendered for way in (False, True))


def _after_thought(text: str) -> str:
    return text.rpartition(END_OF_THOUGHT)[2]


def _texts_of(content: Any) -> list[str]:
    """The texts of a content, which is a text or a list of parts."""
    if isinstance(content, str):
        return [content]
    return [part["text"] for part in content or () if isinstance(part, Mapping) and isinstance(part.get("text"), str)]


def _with_mark(content: Any, mark: str) -> Any:
    """A content with a mark in the middle of its text, or of each of its parts."""
    if isinstance(content, str):
        body = _after_thought(content)
        middle = len(content) - len(body.lstrip()) + (len(body.strip()) + 1) // 2
        return content[:middle] + mark + content[middle:]
    return [{**part, "text": _with_mark(part["text"], mark)} for part in content]


def _names(functions: Sequence[Any]) -> list[str]:
    """The names of functions in OpenAI's format, of tools or of calls."""
    inner = [function.get("function") for function in functions if isinstance(function, Mapping)]
    return [
        function["name"] for function in inner if isinstance(function, Mapping) and isinstance(function.get("name"), str)
    ]


def unused_characters(values: Any, count: int) -> list[str]:
    """Private characters of Unicode that are in no text of lists and objects; GenerationError if there are too few."""
    with _depth_errors():
        text = "".join(_iterate_texts(values))
    unused = list(islice((chr(code) for code in PRIVATE_USE if chr(code) not in text), count))
    if len(unused) < count:
        raise GenerationError("the messages have every private character of Unicode (U+E000 to U+F8FF); remove some")
    return unused


@contextmanager
def _depth_errors() -> Iterator[None]:
    try:
        yield
    except RecursionError:
        raise GenerationError("messages or tools are nested too deeply; reduce their depth") from None


def _iterate_texts(value: Any) -> Iterator[str]:
    """Every text in lists and objects."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        yield from _iterate_texts([*value.keys(), *value.values()])
    elif isinstance(value, list | tuple):
        for entry in value:
            yield from _iterate_texts(entry)
