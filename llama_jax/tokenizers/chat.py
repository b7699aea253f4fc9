"""Chats as token ids: in the checkpoint's own template, in a format by name, or as plain text for base models."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, Literal, NamedTuple, Required, TypedDict, get_args

from llama_jax.errors import GenerationError, short_repr
from llama_jax.tokenizers.chat_template import (
    DEFAULT_FORM,
    PRIVATE_USE,
    PROBE_TOOL,
    Renderer,
    join_parts,
    put_in_form,
    select_template,
    template_parts,
    unused_characters,
)
from llama_jax.tokenizers.interface import TextPart, Tokenizer, split_special

Role = Literal["system", "user", "assistant", "tool"]
Format = Literal["auto", "chatml", "gemma", "llama2", "llama3", "mistral", "phi3", "zephyr", "template", "plain"]
NAMED_FORMATS = get_args(Format)[1:-2]
CHAT_MESSAGE_FIELDS = frozenset({"role", "content", "name", "reasoning_content"})
TOOL_FIELDS = frozenset({"tool_calls", "tool_call_id"})
NO_TOOLS = (
    "the model's chat format does not support tools; omit them, or pass a chat template that has tools (--chat-template)"
)


class Message(TypedDict, total=False):
    """One message of a chat. The role `tool`, calls and their results need a checkpoint's own template.

    Attributes:
      content: a text, or a list of parts, ``{"type": "text", "text": ...}``; None in a message with calls and no text.
      name, reasoning_content: who says it, and what the model thought before; for a template that reads them.
      tool_calls: calls in OpenAI's format, with arguments as an object or as JSON.
    """

    role: Required[Role]
    content: Required[Any]
    name: str
    tool_calls: list[Any]
    tool_call_id: str
    reasoning_content: str


def encode_chat(
    tokenizer: Tokenizer,
    messages: Sequence[Message],
    format: Format = "auto",
    renderer: Renderer | None = None,
    tools: Sequence[Mapping[str, Any]] = (),
    *,
    template_args: Mapping[str, Any] | None = None,
    continue_final: bool = False,
) -> list[int]:
    """Ids of a chat up to the beginning of the assistant's reply, with the begin-of-sequence token if the format has one.

    The name of a special token inside a message is text in every format. Llama 2's "[INST]" is not a special token: its
    format consists of text, which a message can imitate.

    Args:
      messages: an optional system prompt, then turns.
      format: see `resolve_format`.
      renderer: renders the checkpoint's template; by default a shared one.
      tools: functions that the model may call, in OpenAI's format, for a template that supports them.
      template_args: variables of the checkpoint's template, such as `enable_thinking`.
      continue_final: whether the reply continues the last message, which must be the assistant's.

    Raises:
      GenerationError: messages that are not a valid chat, or that the format does not support or would omit; or a format
        with tokens that the vocabulary does not have.
    """
    format = resolve_format(tokenizer, format)
    check_messages(messages, format)
    last = messages[-1]
    needs_user = format in ("llama2", "mistral") and not continue_final and last["role"] != "user"
    are_tools = isinstance(tools, list | tuple) and all(isinstance(tool, Mapping) for tool in tools)
    are_args = isinstance(template_args, Mapping | None)
    if not are_tools:
        raise GenerationError(f"tools={short_repr(tools, 60)} must be a list of functions in OpenAI's format")
    if not are_args:
        raise GenerationError(f"template_args={short_repr(template_args, 60)} must be values by name")
    if tools and not takes_tools(tokenizer, format):
        raise GenerationError(NO_TOOLS)
    if needs_user:
        raise GenerationError(f"the last message is from {last['role']!r}; the format {format} needs one from 'user'")
    if not continue_final:
        return tokenizer.encode_parts(chat_parts(tokenizer, messages, format, renderer, tools, template_args=template_args))
    text = join_parts(last["content"]) if isinstance(last["content"], list | tuple) else last["content"]
    if last["role"] != "assistant" or last.get("tool_calls") or not text.strip():
        raise GenerationError("only a text of the assistant as the last message can be continued; add one")
    body = text.rstrip()
    space, (mark,) = text[len(body) :], unused_characters([messages], 1)
    begun: list[Message] = [*messages[:-1], {**last, "content": body + mark + space}]
    parts = chat_parts(tokenizer, begun, format, renderer, tools, reply=False, template_args=template_args)
    number = next((i for i, part in enumerate(parts) if isinstance(part, str) and mark in part), None)
    if number is None:
        raise GenerationError("the last message does not appear in the prompt, so that no reply can continue it")
    before, _, after = str(parts[number]).partition(mark)
    return tokenizer.encode_parts([*parts[:number], before + (space if after.startswith(space) else "")])


def takes_tools(tokenizer: Tokenizer, format: Format) -> bool:
    """Whether a chat can have tools: whether the checkpoint's own template mentions them."""
    return format == "template" and tokenizer.chat_template is not None and "tools" in select_template(tokenizer, True)


def reply_ends(tokenizer: Tokenizer, format: Format = "auto", renderer: Renderer | None = None) -> tuple[int, ...]:
    """The tokens that end a reply: the tokenizer's `stop_ids`, and the token that the format puts after a reply, as it is
    found in a short chat that the format accepts.

    Raises:
      GenerationError: a template that renders no chat; or a format with tokens that the vocabulary does not have.
    """
    ends = set(tokenizer.stop_ids)
    format = resolve_format(tokenizer, format)
    question: Message = {"role": "user", "content": "?"}
    reply = chr(PRIVATE_USE[-1])
    chat: list[Message] = [question, {"role": "assistant", "content": reply}, question]
    error: GenerationError | None = None
    for messages, tools in ((chat, ()), (chat[:2], ()), (chat[:1], ()), (chat, (PROBE_TOOL,)), (chat[:1], (PROBE_TOOL,))):
        try:
            parts = chat_parts(tokenizer, messages, format, renderer, tools, reply=False)
        except GenerationError as refused:  # a template may accept other chats
            error = error or refused
            continue
        for part, following in pairwise(parts):
            if isinstance(part, str) and isinstance(following, int) and part.rstrip().endswith(reply):
                ends.add(following)
        return tuple(sorted(ends))
    assert error is not None
    raise error


def resolve_format(tokenizer: Tokenizer, format: Format) -> Format:
    """The chat format to use.

    "template" is the checkpoint's own; "plain" has no roles, so that any model can continue it, but is not a chat; the
    other names are published formats; "auto" is the template if there is one, and otherwise "llama3" for a vocabulary with
    Llama 3's headers.

    Raises:
      GenerationError: "auto" finds no format, or there is no template.
    """
    if format == "auto":
        if tokenizer.chat_template is not None:
            return "template"
        if "<|start_header_id|>" in tokenizer.special_tokens:
            return "llama3"
        raise GenerationError(
            "the model has no chat template, so its chat format is not known (it may not be a chat model);"
            f" choose a format (--format): {', '.join(NAMED_FORMATS)}, or plain to have it continue your text"
        )
    others = f"choose another format: {', '.join(NAMED_FORMATS)} or plain, or pass one (--chat-template)"
    has_none = format == "template" and tokenizer.chat_template is None
    if format not in get_args(Format):
        raise GenerationError(f"{format=} is not a chat format; choose {', '.join(get_args(Format))}")
    if has_none:
        raise GenerationError(f"the model has no chat template; {others}")
    return format


def chat_parts(
    tokenizer: Tokenizer,
    messages: Sequence[Message],
    format: Format,
    renderer: Renderer | None = None,
    tools: Sequence[Mapping[str, Any]] = (),
    *,
    reply: bool = True,
    template_args: Mapping[str, Any] | None = None,
) -> list[TextPart]:
    """A chat as plain texts with special tokens between them, in a format that is not "auto".

    Args:
      reply: whether to append the header of the assistant's next message, if the format has one.
      template_args: variables of the checkpoint's template.
    """
    if format == "template":
        spans = template_parts(tokenizer, messages, renderer, tools, reply=reply, template_args=template_args)
        return [part for part, _ in spans]
    if template_args or (renderer is not None and renderer.template_args):
        raise GenerationError(f"the format {format} has no arguments; omit them, or choose the model's own template")
    texts: Any = put_in_form(messages, (), DEFAULT_FORM)[0]
    if format in TURN_FORMATS:
        return _turns(tokenizer, texts, format, reply)
    return {"llama2": _llama2, "mistral": _mistral, "plain": _plain_text}[format](tokenizer, texts)


class TurnFormat(NamedTuple):
    """A format in which each message stands between a header with its role and an end.

    Attributes:
      header: text before a message; {role} stands for its role.
      end: text after a message; {eos} stands for the end-of-sequence token.
      between: text between two messages.
      begin: text at the beginning; None for the begin-of-sequence token, if the tokenizer adds one.
      strip: whether white space around messages is removed.
      assistant: the name of the assistant's role.
      system: whether there is a role for the system prompt, which otherwise precedes the first message.
      tokens: special tokens that the vocabulary must have.
    """

    header: str
    end: str
    between: str = ""
    begin: str | None = None
    strip: bool = False
    assistant: str = "assistant"
    system: bool = True
    tokens: tuple[str, ...] = ()


# Published templates: OpenAI's ChatML as Qwen has it; Gemma 3; Meta's llama/tokenizer.py of Llama 3, ChatFormat; Phi-3;
# Zephyr and TinyLlama.
LLAMA3_TOKENS = ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")
TURN_FORMATS: Mapping[str, TurnFormat] = {
    "chatml": TurnFormat("<|im_start|>{role}\n", "<|im_end|>\n", tokens=("<|im_start|>", "<|im_end|>")),
    "gemma": TurnFormat(
        "<start_of_turn>{role}\n",
        "<end_of_turn>\n",
        begin="<bos>",
        strip=True,
        assistant="model",
        system=False,
        tokens=("<bos>", "<start_of_turn>", "<end_of_turn>"),
    ),
    "llama3": TurnFormat(
        "<|start_header_id|>{role}<|end_header_id|>\n\n", "<|eot_id|>", "", LLAMA3_TOKENS[0], True, tokens=LLAMA3_TOKENS
    ),
    "phi3": TurnFormat("<|{role}|>\n", "<|end|>\n", tokens=("<|user|>", "<|assistant|>", "<|end|>")),
    "zephyr": TurnFormat("<|{role}|>\n", "{eos}", between="\n", begin=""),
}


def _turns(tokenizer: Tokenizer, messages: Sequence[Message], name: str, reply: bool) -> list[TextPart]:
    format = TURN_FORMATS[name]
    if missing := [token for token in format.tokens if token not in tokenizer.special_tokens]:
        raise GenerationError(
            f"the format {name} needs the token {missing[0]}, which the vocabulary does not have; choose another format"
        )
    _, eos = _ends(tokenizer, name) if "{eos}" in format.end else (-1, -1)
    system, messages = ("", messages) if format.system else _system_prompt(messages)

    def to_parts(text: str) -> list[TextPart]:
        return split_special(text, tokenizer.special_tokens)

    parts: list[TextPart] = [tokenizer.bos_id] * tokenizer.add_bos if format.begin is None else to_parts(format.begin)
    for i, message in enumerate(messages):
        text, role = message["content"], message["role"]
        if system and i == 0:
            text, system = f"{system}\n\n{text.strip() if format.strip else text}", ""
        between = format.between if i else ""
        parts += to_parts(between + format.header.format(role=format.assistant if role == "assistant" else role))
        parts += [text.strip() if format.strip else text, *([eos] if format.end == "{eos}" else to_parts(format.end))]
    if reply:
        parts += to_parts((format.between if messages else "") + format.header.format(role=format.assistant))
    return _join_texts(parts)


def _join_texts(parts: Sequence[TextPart]) -> list[TextPart]:
    """The parts, with adjacent texts as one, since no token spans two."""
    joined: list[TextPart] = []
    for part in parts:
        if isinstance(part, str) and joined and isinstance(joined[-1], str):
            joined[-1] += part
        elif part != "":
            joined.append(part)
    return joined


def _system_prompt(messages: Sequence[Message]) -> tuple[str, Sequence[Message]]:
    """The system prompt, "" for none, and the messages after it."""
    is_first = messages[0]["role"] == "system"
    return (messages[0]["content"], messages[1:]) if is_first else ("", messages)


def _exchanges(messages: Sequence[Message], format: str) -> tuple[str, list[tuple[str, str | None]]]:
    """The system prompt, and each message of the user with the reply to it, which the last may lack."""
    system, turns = _system_prompt(messages)
    for i, turn in enumerate(turns):
        if turn["role"] != ("user", "assistant")[i % 2]:
            raise GenerationError(
                f"message {len(messages) - len(turns) + i} is from {turn['role']!r}; the format {format} needs an optional"
                " system prompt, and then 'user' and 'assistant' in turn"
            )
    replies = [turn["content"] for turn in turns[1::2]]
    questions = [turn["content"] for turn in turns[::2]]
    return system, [(question, replies[i] if i < len(replies) else None) for i, question in enumerate(questions)]


def _llama2(tokenizer: Tokenizer, messages: Sequence[Message]) -> list[TextPart]:
    """Meta's llama/generation.py, chat_completion: each exchange is a sequence, the system prompt in the first."""
    bos, eos = _ends(tokenizer, "llama2")
    system, exchanges = _exchanges(messages, "llama2")
    begin = f"<<SYS>>\n{system}\n<</SYS>>\n\n" if messages[0]["role"] == "system" else ""
    parts: list[TextPart] = []
    for question, reply in exchanges:
        text = f"[INST] {(begin + question).strip()} [/INST]"
        begin = ""
        parts += [bos, text] if reply is None else [bos, f"{text} {reply.strip()} ", eos]
    return parts


def _mistral(tokenizer: Tokenizer, messages: Sequence[Message]) -> list[TextPart]:
    """Templates of Mistral 7B Instruct: v0.3, in whose vocabulary [INST] is a token, or v0.1 and v0.2."""
    bos, eos = _ends(tokenizer, "mistral")
    system, exchanges = _exchanges(messages, "mistral")
    special = {name: tokenizer.special_tokens.get(name) for name in ("[INST]", "[/INST]")}
    opening, closing = special.values()
    parts: list[TextPart] = [bos]
    for question, reply in exchanges:
        text = f"{system}\n\n{question}" if system else question
        system = ""
        if opening is None or closing is None:
            parts += [f"[INST] {text} [/INST]"]
        else:
            parts += [opening, f" {text}", closing]
        parts += [] if reply is None else [f" {reply.strip()}", eos]
    return parts


def _plain_text(tokenizer: Tokenizer, messages: Sequence[Message]) -> list[TextPart]:
    """One text: every message of the user begins a paragraph, which the reply continues."""
    text = ""
    for message in messages:
        begins = text and message["role"] == "user"
        text += ("\n\n" if begins else "") + message["content"]
    return [tokenizer.bos_id, text] if tokenizer.add_bos else [text]


def _ends(tokenizer: Tokenizer, format: str) -> tuple[int, int]:
    if min(tokenizer.bos_id, tokenizer.eos_id) < 0:
        raise GenerationError(
            f"the format {format} needs a bos and an eos token, which the vocabulary does not have; choose another format"
        )
    return tokenizer.bos_id, tokenizer.eos_id


def check_messages(messages: Sequence[Message], format: Format) -> None:
    """Raise GenerationError for messages that are not a valid chat, with the index of the message."""
    if isinstance(messages, str) or not isinstance(messages, Sequence) or not messages:
        raise GenerationError("messages must be a list with at least one message, from the user")
    known = CHAT_MESSAGE_FIELDS | TOOL_FIELDS if format == "template" else CHAT_MESSAGE_FIELDS
    roles = get_args(Role) if format == "template" else get_args(Role)[:-1]
    for i, message in enumerate(messages):
        needed = {"role"} if isinstance(message, Mapping) and message.get("tool_calls") else {"role", "content"}
        if not isinstance(message, Mapping) or not needed <= set(message):
            raise GenerationError(f"message {i} is {short_repr(message)}; it must be an object with a role and a content")
        role, content, unknown = message["role"], message.get("content"), min(set(message) - known, key=str, default=None)
        is_content = isinstance(content, str) or _are_parts(content) or (content is None and message.get("tool_calls"))
        has, texts = f"message {i} has the", "a text, or a list of parts of the type text"
        if role not in roles:
            raise GenerationError(f"{has} role {short_repr(role, 40)}; in the format {format} use {', '.join(roles)}")
        if unknown is not None:
            raise GenerationError(f"{has} field {short_repr(unknown, 40)}, which the format {format} does not have; omit it")
        if not is_content:
            raise GenerationError(f"{has} content {short_repr(content, 40)}; it must be {texts}")


def _are_parts(content: Any) -> bool:
    return isinstance(content, list | tuple) and all(
        isinstance(part, Mapping) and part.get("type") == "text" and isinstance(part.get("text"), str) for part in content
    )
