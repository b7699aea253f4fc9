"""Chats as token ids: the formats of Llama 2, Llama 3 and Zephyr (TinyLlama), the checkpoint's Jinja template, and plain
text for base models."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from itertools import islice, pairwise
from pathlib import Path
from typing import Any, Literal, Required, TypedDict, get_args

from llama_jax.child_process import START_SECONDS, ChildProcess, isolated
from llama_jax.errors import GenerationError, reason_of, shown
from llama_jax.tokenizers.interface import Part, Tokenizer, special_pattern, split_special

Role = Literal["system", "user", "assistant", "tool"]
Format = Literal["auto", "llama2", "llama3", "zephyr", "template", "plain"]
PRIVATE_USE = range(0xE000, 0xF900)  # Unicode's private-use characters
RENDER_SECONDS = 5
RENDER_MEMORY = 100 << 20  # bytes
RENDER_PACKAGES = ("jinja2", "markupsafe")  # packages of the child process


class Message(TypedDict, total=False):
    """One message of a chat. The role `tool` and the fields for tools need a checkpoint's own template."""

    role: Required[Role]
    content: Required[str]
    name: str
    tool_calls: list[Any]
    tool_call_id: str


def encode_chat(
    tokenizer: Tokenizer,
    messages: Sequence[Message],
    format: Format = "auto",
    renderer: Renderer | None = None,
    tools: Sequence[Mapping[str, Any]] = (),
) -> list[int]:
    """Ids of a chat up to the beginning of the assistant's reply, with the begin-of-sequence token if the format has one.

    The name of a special token inside a message is text in every format. Llama 2's "[INST]" is not a special token: its
    format consists of text, which a message can imitate.

    Args:
      messages: an optional system prompt, then turns; the last message is the user's.
      format: see `resolve_format`.
      renderer: renders the checkpoint's template; by default a shared one.
      tools: functions that the model may call, in OpenAI's format, for a template that supports them.

    Raises:
      GenerationError: messages that are not a valid chat, or that the format does not support; or a format with tokens that
        the vocabulary does not have.
    """
    format = resolve_format(tokenizer, format)
    check_messages(messages, format)
    if messages[-1]["role"] not in ("user", "tool"):
        raise GenerationError(f"the last message is from {messages[-1]['role']!r}; a reply needs one from 'user'")
    if tools and not takes_tools(tokenizer, format):
        raise GenerationError("the model's chat format does not support tools; omit them")
    return tokenizer.encode_parts(chat_parts(tokenizer, messages, format, renderer, tools))


def takes_tools(tokenizer: Tokenizer, format: Format) -> bool:
    """Whether a chat can have tools: whether the checkpoint's own template mentions them."""
    return format == "template" and tokenizer.chat_template is not None and "tools" in tokenizer.chat_template


def reply_ends(tokenizer: Tokenizer, format: Format = "auto") -> tuple[int, ...]:
    """The tokens that end a reply: the tokenizer's `stop_ids`, and the token that the format puts after a reply."""
    ends = set(tokenizer.stop_ids)
    reply = chr(PRIVATE_USE[-1])
    chat: list[Message] = [
        {"role": "user", "content": "?"},
        {"role": "assistant", "content": reply},
        {"role": "user", "content": "?"},
    ]
    parts = chat_parts(tokenizer, chat, resolve_format(tokenizer, format))
    for part, following in pairwise(parts):
        if isinstance(part, str) and isinstance(following, int) and part.rstrip().endswith(reply):
            ends.add(following)
    return tuple(sorted(ends))


def resolve_format(tokenizer: Tokenizer, format: Format) -> Format:
    """The chat format to use.

    "llama2", "llama3" and "zephyr" are the published formats; "template" is the checkpoint's own; "plain" has no roles, so
    that any model can continue it, but is not a chat; "auto" is the template if there is one, and otherwise "llama3" for a
    vocabulary with Llama 3's headers.

    Raises:
      GenerationError: "auto" finds no format, or the vocabulary lacks the format's tokens.
    """
    if format == "auto":
        if tokenizer.chat_template is not None:
            return "template"
        if "<|start_header_id|>" in tokenizer.special_tokens:
            return "llama3"
        raise GenerationError(
            "the model has no chat template, so its chat format is not known (it may not be a chat model);"
            " choose a format (--format): llama2, llama3 or zephyr, or plain to have it continue your text"
        )
    if format not in get_args(Format):
        raise GenerationError(f"format={format!r} is not a chat format; choose {', '.join(get_args(Format))}")
    if format == "template" and tokenizer.chat_template is None:
        raise GenerationError("the model has no chat template; choose another format: llama2, llama3, zephyr or plain")
    return format


def chat_parts(
    tokenizer: Tokenizer,
    messages: Sequence[Message],
    format: Format,
    renderer: Renderer | None = None,
    tools: Sequence[Mapping[str, Any]] = (),
    *,
    reply: bool = True,
) -> list[Part]:
    """A chat as plain texts with special tokens between them, in a format that is not "auto".

    Args:
      reply: whether to append the header of the assistant's next message, if the format has one.
    """
    if format == "template":
        found = template_parts(tokenizer, messages, renderer, tools, reply=reply)
        return [part for part, _ in found]
    write = {"llama2": _llama2, "llama3": _llama3, "zephyr": _zephyr, "plain": _plain}[format]
    return write(tokenizer, messages, reply)


def _llama2(tokenizer: Tokenizer, messages: Sequence[Message], _: bool) -> list[Part]:
    """Meta's llama/generation.py, chat_completion: each exchange is a sequence, the system prompt in the first."""
    bos, eos = _ends(tokenizer, "llama2")
    system, turns = "", messages
    if messages[0]["role"] == "system":
        system, turns = f"<<SYS>>\n{messages[0]['content']}\n<</SYS>>\n\n", messages[1:]
    for i, turn in enumerate(turns):
        if turn["role"] != ("user", "assistant")[i % 2]:
            raise GenerationError(
                f"message {len(messages) - len(turns) + i} is from {turn['role']!r}; the format llama2 needs an optional"
                " system prompt, and then 'user' and 'assistant' in turn"
            )
    parts: list[Part] = []
    for i in range(0, len(turns), 2):
        text = f"[INST] {(system + turns[i]['content']).strip()} [/INST]"
        system = ""
        if i + 1 < len(turns):
            parts += [bos, f"{text} {turns[i + 1]['content'].strip()} ", eos]
        else:
            parts += [bos, text]
    return parts


def _llama3(tokenizer: Tokenizer, messages: Sequence[Message], reply: bool) -> list[Part]:
    """Meta's llama/tokenizer.py of Llama 3, ChatFormat: a header with the role before each message, a token after it."""
    names = ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")
    missing = [name for name in names if name not in tokenizer.special_tokens]
    if missing:
        raise GenerationError(
            f"the format llama3 needs the token {missing[0]}, which the vocabulary does not have; choose another format"
        )
    bos, start, end, eot = (tokenizer.special_tokens[name] for name in names)
    parts: list[Part] = [bos]
    for message in messages:
        parts += [start, message["role"], end, f"\n\n{message['content'].strip()}", eot]
    return [*parts, start, "assistant", end, "\n\n"] if reply else parts


def _zephyr(tokenizer: Tokenizer, messages: Sequence[Message], reply: bool) -> list[Part]:
    """The template of Zephyr and TinyLlama's chat models, which has no begin-of-sequence token."""
    _, eos = _ends(tokenizer, "zephyr")
    parts: list[Part] = []
    for i, message in enumerate(messages):
        parts += [("\n" if i else "") + f"<|{message['role']}|>\n{message['content']}", eos]
    return [*parts, "\n<|assistant|>\n"] if reply else parts


def _plain(tokenizer: Tokenizer, messages: Sequence[Message], _: bool) -> list[Part]:
    """One text: every message of the user begins a paragraph, which the reply continues."""
    text = ""
    for message in messages:
        begins = text and message["role"] == "user"
        text += ("\n\n" if begins else "") + message["content"]
    return [tokenizer.bos_id, text] if tokenizer.add_bos else [text]


# --- the checkpoint's own template ---------------------------------------------------------------------------------------


class Renderer:
    """Renders chats with a checkpoint's own template, which is untrusted, in a child process. All chats share the process,
    to save starting Python and compiling the template for each. Thread-safe.

    The process (`template_worker`, which imports Jinja and nothing of this library) is killed if a chat takes longer than
    RENDER_SECONDS. On Linux its memory is limited to RENDER_MEMORY bytes, plus a few for each byte of the request.

    Args:
      time: the time that templates write (`strftime_now`), in ISO 8601; None for the local time of each rendering.
    """

    def __init__(self, time: str | None = None) -> None:
        self._time = time
        script, limits = Path(__file__).with_name("template_worker.py"), (str(RENDER_SECONDS), str(RENDER_MEMORY))
        command, environment = isolated(script, RENDER_PACKAGES, *limits)
        self._child = ChildProcess(
            command, environment, RENDER_SECONDS + START_SECONDS
        )  # unless halted it has a timer of its own

    def render(
        self,
        template: str,
        messages: Sequence[Mapping[str, Any]],
        *,
        bos_token: str,
        eos_token: str,
        reply: bool,
        tools: Sequence[Mapping[str, Any]] = (),
        marks: tuple[str, str] = ("", ""),
    ) -> str:
        """The text of a chat.

        Args:
          messages: each with its "role" and "content".
          bos_token, eos_token: texts of these tokens, "" for none.
          reply: whether to append the beginning of the assistant's next message.
          tools: functions that the model may call, in OpenAI's format.
          marks: written before and after text that the template encloses in ``{% generation %}``: the assistant's text.

        Raises:
          GenerationError: a template that is not Jinja, rejects the messages, fails, or needs too much time or memory.
        """
        values = {
            "messages": [dict(message) for message in messages],
            "bos_token": bos_token,
            "eos_token": eos_token,
            "add_generation_prompt": reply,
            "tools": list(tools) or None,
            "documents": None,
        }
        payload = {"template": template, "values": values, "marks": marks, "time": self._time}
        try:
            request = json.dumps(payload, ensure_ascii=False).encode("utf-8", "surrogatepass")
        except (TypeError, ValueError, RecursionError) as error:
            reason = reason_of(error)
            raise GenerationError(f"messages must consist of texts, numbers, lists and objects ({reason})") from None
        answer = self._child.ask(request, again=True)  # earlier chats may have filled the memory
        if answer is None:
            limits = f"{RENDER_SECONDS} s or {RENDER_MEMORY >> 20} MB"
            answer = f"eit exceeds {limits}, or {sys.executable} fails".encode()
        if answer[:1] != b"t":
            raise GenerationError(f"the checkpoint's chat template cannot be used here: {answer[1:].decode()}")
        return answer[1:].decode("utf-8", "surrogatepass")

    def close(self) -> None:
        """Kill the process; the next rendering starts a new one."""
        self._child.close()


@cache
def shared_renderer(process: int) -> Renderer:
    """The default renderer of a process (by its id, because a forked process needs its own pipe)."""
    return Renderer()


def template_parts(
    tokenizer: Tokenizer,
    messages: Sequence[Message],
    renderer: Renderer | None = None,
    tools: Sequence[Mapping[str, Any]] = (),
    *,
    reply: bool = True,
    spans: bool = False,
) -> list[tuple[Part, bool]]:
    """The parts that the checkpoint's own template writes, each with a flag whether it is inside ``{% generation %}``.

    The template's special tokens are distinguished from those in messages by a character that is inserted into the latter.

    Args:
      spans: whether to split texts where ``{% generation %}`` begins and ends; if not, all flags are False.

    Raises:
      GenerationError: see `Renderer.render`; or messages with all private-use characters, or nested too deeply.
    """
    assert tokenizer.chat_template is not None
    names = {token: name for name, token in tokenizer.special_tokens.items()}
    pattern = special_pattern(names.values())
    with _depth_errors():
        text = "".join([tokenizer.chat_template, *_texts([messages, tools])])
    unused = list(islice((chr(code) for code in PRIVATE_USE if chr(code) not in text), 3))
    if len(unused) < 3:
        raise GenerationError("the messages have every private character of Unicode (U+E000 to U+F8FF); remove some")
    inside, first, last = unused

    def marked(value: Any) -> Any:
        if isinstance(value, str):
            return pattern.sub(lambda found: found[0][0] + inside + found[0][1:], value)
        if isinstance(value, Mapping):
            return {marked(key): marked(entry) for key, entry in value.items()}
        return [marked(entry) for entry in value] if isinstance(value, list | tuple) else value

    with _depth_errors():
        marked_messages, marked_tools = marked(messages), marked(tools)
    rendered = (renderer or shared_renderer(os.getpid())).render(
        tokenizer.chat_template,
        marked_messages,
        bos_token=names.get(tokenizer.bos_id, ""),
        eos_token=names.get(tokenizer.eos_id, ""),
        reply=reply,
        tools=marked_tools,
        marks=(first, last) if spans else ("", ""),
    )
    parts: list[tuple[Part, bool]] = []
    depth = 0
    for piece in re.split(f"([{first}{last}])", rendered):
        if piece in (first, last):
            depth += 1 if piece == first else -1
            continue
        for part in split_special(piece, tokenizer.special_tokens):
            parts.append((part.replace(inside, "") if isinstance(part, str) else part, depth > 0))
    return parts


@contextmanager
def _depth_errors() -> Iterator[None]:
    try:
        yield
    except RecursionError:
        raise GenerationError("messages or tools are nested too deeply; reduce their depth") from None


def _ends(tokenizer: Tokenizer, format: str) -> tuple[int, int]:
    if min(tokenizer.bos_id, tokenizer.eos_id) < 0:
        raise GenerationError(
            f"the format {format} needs a bos and an eos token, which the vocabulary does not have; choose another format"
        )
    return tokenizer.bos_id, tokenizer.eos_id


def _texts(value: Any) -> Iterator[str]:
    """Every text in lists and objects."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        yield from _texts([*value.keys(), *value.values()])
    elif isinstance(value, list | tuple):
        for entry in value:
            yield from _texts(entry)


def check_messages(messages: Sequence[Message], format: Format) -> None:
    """Raise GenerationError for messages that are not a valid chat, with the index of the message."""
    if isinstance(messages, str) or not isinstance(messages, Sequence) or not messages:
        raise GenerationError("messages must be a list with at least one message, from the user")
    more = {"name", "tool_calls", "tool_call_id"} if format == "template" else set()
    roles = get_args(Role) if more else get_args(Role)[:-1]
    for i, message in enumerate(messages):
        if not isinstance(message, Mapping) or not {"role", "content"} <= set(message) <= {"role", "content", *more}:
            raise GenerationError(f"message {i} is {shown(message)}; it must be an object with a role and a content")
        if message["role"] not in roles:
            raise GenerationError(f"message {i} has the role {shown(message['role'], 40)}; use {', '.join(roles)}")
        if not isinstance(message["content"], str):
            raise GenerationError(f"message {i} has the content {shown(message['content'], 40)}; it must be a text")
