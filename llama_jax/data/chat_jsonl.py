"""Chats in the common published forms; each line of JSONL, object of JSON or row of a table is an example of an assistant's
answers."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from llama_jax.data.documents import RECORD_UNITS, Record, file_type, location, read_records
from llama_jax.errors import DataError, short_repr
from llama_jax.tokenizers import Message

# Names of the roles in ShareGPT and its descendants.
ROLES = {
    **dict.fromkeys(("system",), "system"),
    **dict.fromkeys(("user", "human"), "user"),
    **dict.fromkeys(("assistant", "gpt", "chatgpt", "bing", "bard", "model"), "assistant"),
    **dict.fromkeys(("tool", "function", "observation"), "tool"),
}
OPTIONAL_MESSAGE_FIELDS = ("name", "tool_calls", "tool_call_id")
# Without these fields, an example has another meaning; other unknown fields are ignored.
MEDIA = ("image", "images", "video", "videos", "audio", "audios")
RECORD_UNSUPPORTED = (*MEDIA, "functions", "documents", "history", "chat_template_kwargs")
MESSAGE_UNSUPPORTED = (*MEDIA, "function_call", "reasoning_content", "reasoning", "thinking", "refusal")
LOSS_FLAGS = ("weight", "loss", "train", "training")  # whether a message is a target, which all of the assistant's are
CHAT_FORMS = "messages; conversations; prompt and completion; instruction and output"
TextOrMessages = str | tuple[Message, ...]


class Example(NamedTuple):
    """A line of a file, or an object or row, see `documents.read_records`. A field that is null is not there.

    Attributes:
      prompt: a text, or messages.
      answers: of the same type as the prompt: one; two, of which the first is preferred; or none for a prompt only.
      tools: functions that the model may call.
      columns: all fields of the line, unchanged.
      line: the line number, or the index of the object or row, from 1.
      desirable: whether a single answer is good, if the line has a label.
      ignored: names of the fields that have no effect, those of messages as in "messages[].id".
    """

    prompt: TextOrMessages
    answers: tuple[TextOrMessages, ...]
    tools: tuple[dict[str, Any], ...]
    columns: dict[str, Any]
    line: int
    desirable: bool | None = None
    ignored: tuple[str, ...] = ()


def read_chats(path: Path) -> Iterator[Example]:
    """Examples of an assistant's answers, by the fields of each line; the first form that matches counts:

    - `messages`, a chat: all of the assistant's messages are answers;
    - `conversations`, the same in ShareGPT's form, with `from` and `value`;
    - `prompt` and `completion`, both texts, without a chat format, or both messages;
    - `instruction`, `input` (which may be empty or missing) and `output`, as in Alpaca: a user's message, in which the
      input is a separate paragraph, and its reply.

    A chat may have a `system` text, which becomes its first message, and `tools`, a list or its JSON. Other fields are
    ignored, see `Example.ignored`.

    Raises:
      DataError: any other line; or fields without which it has another meaning, such as images. The message gives file, line
        and field.
    """
    for line in _chat_lines(path):
        prompt: TextOrMessages = ()
        answer: TextOrMessages
        if "messages" in line.values or "conversations" in line.values:
            answer = line.with_system(line.chat("messages" if "messages" in line.values else "conversations"))
        elif "prompt" in line.values and "completion" in line.values:
            prompt, answer = line.completed()
        elif "instruction" in line.values and "output" in line.values:
            instruction = "\n\n".join(filter(None, (line.text("instruction"), line.text("input", optional=True))))
            prompt = line.with_system(({"role": "user", "content": instruction},))
            answer = ({"role": "assistant", "content": line.text("output")},)
        else:
            raise line.wrong(f"the fields are {line.fields()}; rename them to one of: {CHAT_FORMS}")
        line.check_answer(answer, "no message has the role 'assistant', so there is nothing to learn; remove the line")
        yield line.example(prompt, answer)


def read_prompts(path: Path) -> Iterator[Example]:
    """Prompts: `prompt`, a text or messages, with an optional `system` text as the first message. A line may have any other
    fields, the same in all lines, for judging the answers.

    Raises:
      DataError: any other line; the message gives file, line and field.
    """
    columns: list[str] | None = None
    for line in _chat_lines(path):
        columns = list(line.columns) if columns is None else columns
        for name in sorted(set(columns) ^ set(line.columns)):
            where, other = ("the first line", "here") if name in columns else ("this line", "in the first")
            raise line.wrong(
                f"{short_repr(name, 40)} is a field of {where} but not {other}; put it into all lines, possibly as null"
            )
        yield line.example(line.with_system(line.content("prompt")))


def read_preferences(path: Path) -> Iterator[Example]:
    """Pairs of answers: `chosen`, which is preferred, and `rejected`, both texts or both messages, after `prompt`.

    If the answers are messages, the prompt may be messages, or a text, which becomes the user's message. If both answers
    begin with the same messages, these are the prompt, and `prompt` may be omitted.

    Raises:
      DataError: any other line; the message gives file, line and field.
    """
    for line in _chat_lines(path):
        chosen, rejected = line.content("chosen"), line.content("rejected")
        line.check_same_form("chosen", chosen, "rejected", rejected)
        if chosen == rejected:
            raise line.wrong("chosen and rejected are the same, so neither is preferred; remove the line")
        prompt: TextOrMessages
        if isinstance(chosen, str) or isinstance(rejected, str):
            prompt = line.text("prompt")
        else:
            prompt, chosen, rejected = line.answers(chosen, rejected)
            for name, answer in (("chosen", chosen), ("rejected", rejected)):
                line.check_answer(answer, f"{name} has no message of the role 'assistant' after the prompt; remove the line")
        yield line.example(prompt, chosen, rejected)


def read_labeled(path: Path) -> Iterator[Example]:
    """Single answers, each labeled good or bad: `prompt` and `completion` as in `read_chats`, and `label`, which is true
    or false.

    Raises:
      DataError: any other line; the message gives file, line and field.
    """
    for line in _chat_lines(path):
        prompt, answer = line.completed()
        line.check_answer(answer, "completion has no message of the role 'assistant'; remove the line")
        label = line.take("label")
        line.require(isinstance(label, bool), "label", label, "true, for a good answer, or false")
        yield line.example(prompt, answer)._replace(desirable=label)


def _chat_lines(path: Path) -> Iterator[_Line]:
    return (_Line(path, record) for record in read_records(path))


class _Line:
    """A record; reads and checks its fields."""

    def __init__(self, path: Path, record: Record) -> None:
        self._where, self._number = location(path, record.number), record.number
        self._is_row = RECORD_UNITS[file_type(path)] == "row"
        self.columns = record.fields
        self.values = {name: value for name, value in record.fields.items() if value is not None}
        self._taken: set[str] = set()
        self._ignored: set[str] = set()  # of messages

    def example(self, prompt: TextOrMessages, *answers: TextOrMessages) -> Example:
        """The line as an example; texts have no tools, and all fields of a prompt only are columns."""
        is_text = isinstance(answers[0] if answers else prompt, str)
        tools = () if is_text else self.tools()
        unread = {name: value for name, value in self.values.items() if answers and name not in self._taken}
        for name, value in unread.items():
            self.refuse_meaningful(name, value, RECORD_UNSUPPORTED)
        return Example(prompt, answers, tools, self.columns, self._number, ignored=(*unread, *sorted(self._ignored)))

    def check_answer(self, answer: TextOrMessages, what: str) -> None:
        """Raise an error with the message `what` for messages without one of the assistant's."""
        if not isinstance(answer, str) and not any(message["role"] == "assistant" for message in answer):
            raise self.wrong(what)

    def wrong(self, what: str) -> DataError:
        return DataError(f"{self._where}: {what}")

    def require(self, is_valid: bool, name: str, value: Any, requirement: str) -> None:
        """Raise an error for a field with another value than is required, or for a missing one."""
        if not is_valid:
            missing = f"{name}, {requirement}, is missing; the fields are {self.fields()}"
            raise self.wrong(missing if value is None else f"{name}={short_repr(value, 60)} must be {requirement}")

    def refuse_meaningful(self, name: str, value: Any, unsupported: Sequence[str]) -> None:
        """Raise an error for a field that is unsupported and not empty."""
        if name.rpartition(".")[2] in unsupported and value not in ("", [], {}, False):
            raise self.wrong(
                f"{name}={short_repr(value, 60)} is not supported, and without it the example would have another meaning;"
                " remove the line, or the field if it is not part of the example"
            )

    def fields(self) -> str:
        names = short_repr(list(self.values), 200) if self.values else "no fields"
        null = [name for name in self.columns if name not in self.values]
        return f"{names}, and as null {short_repr(null, 200)}" if null else names

    def take(self, name: str) -> Any:
        """The value of a field, which is then not ignored; None if it is missing."""
        self._taken.add(name)
        return self.values.get(name)

    def text(self, name: str, *, optional: bool = False) -> str:
        value = self.take(name)
        self.require(isinstance(value, str) or (optional and value is None), name, value, "a text")
        return value or ""

    def content(self, name: str) -> TextOrMessages:
        """A text, or messages."""
        value = self.take(name)
        self.require(isinstance(value, str | list), name, value, "a text or messages")
        return value if isinstance(value, str) else self.chat(name)

    def completed(self) -> tuple[TextOrMessages, TextOrMessages]:
        """`prompt` and `completion`, both texts or both messages."""
        prompt, answer = self.content("prompt"), self.content("completion")
        self.check_same_form("prompt", prompt, "completion", answer)
        return self.with_system(prompt), answer

    def check_same_form(self, name: str, value: TextOrMessages, other: str, also: TextOrMessages) -> None:
        if isinstance(value, str) != isinstance(also, str):
            forms = [f"{n} {'a text' if isinstance(v, str) else 'messages'}" for n, v in ((name, value), (other, also))]
            raise self.wrong(f"{forms[0]}, but {forms[1]}; write both as texts, or both as messages")

    def with_system(self, content: TextOrMessages) -> Any:
        """Messages, with the field `system` as the first, if it has a text and they have no such message."""
        if isinstance(content, str) or not content or content[0]["role"] == "system":
            return content
        text = self.text("system", optional=True)
        return ({"role": "system", "content": text}, *content) if text else content

    def tools(self) -> tuple[dict[str, Any], ...]:
        value = self.take("tools")
        if isinstance(value, str):
            with suppress(ValueError, RecursionError):
                value = json.loads(value) if value.strip() else None
        if value is None:
            return ()
        are_tools = isinstance(value, list) and all(isinstance(tool, dict) for tool in value)
        self.require(are_tools, "tools", value, "a list of objects in OpenAI's format for functions")
        return tuple(self._stored(value))

    def _stored(self, value: Any) -> Any:
        """A value as it was before it was stored: the objects of a column have all of each other's fields, as null."""
        if self._is_row and isinstance(value, dict):
            return {key: self._stored(entry) for key, entry in value.items() if entry is not None}
        return [self._stored(entry) for entry in value] if self._is_row and isinstance(value, list) else value

    def chat(self, name: str) -> tuple[Message, ...]:
        value = self.take(name)
        self.require(isinstance(value, list) and bool(value), name, value, "a list with at least one message")
        return tuple(self._message(name, i, message) for i, message in enumerate(value))

    def _message(self, chat: str, number: int, value: Any) -> Message:
        name = f"{chat}[{number}]"
        self.require(isinstance(value, dict), name, value, "an object with role and content, or from and value")
        fields = {key: self._stored(entry) for key, entry in value.items() if entry is not None}
        plain = "role" in fields or "from" not in fields
        role_name, content_name = ("role", "content") if plain else ("from", "value")
        role, content = fields.pop(role_name, None), fields.pop(content_name, None)
        self.require(isinstance(role, str) and role in ROLES, f"{name}.{role_name}", role, f"one of {', '.join(ROLES)}")
        message: dict[str, Any] = {"role": ROLES[role], "content": ""}
        for key, entry in fields.items():
            self.refuse_meaningful(f"{name}.{key}", entry, MESSAGE_UNSUPPORTED)
            if key in LOSS_FLAGS and ROLES[role] == "assistant" and entry != 1:
                raise self.wrong(
                    f"{name}.{key}={short_repr(entry, 40)} is not supported, as all of the assistant's messages are targets;"
                    " to train on the last one only, put those before it into `prompt`, and it into `completion`"
                )
            if key in OPTIONAL_MESSAGE_FIELDS and entry not in ("", []):
                message[key] = entry
            elif key not in OPTIONAL_MESSAGE_FIELDS:
                self._ignored.add(f"{chat}[].{short_repr(key, 40)[1:-1]}")
        if isinstance(content, list):
            content = self._joined(f"{name}.{content_name}", content)
        is_text = isinstance(content, str) or (content is None and "tool_calls" in message)
        self.require(is_text, f"{name}.{content_name}", content, "a text")
        message["content"] = content or ""
        return message  # type: ignore[return-value]

    def _joined(self, name: str, parts: list[Any]) -> str:
        for i, part in enumerate(parts):
            is_text = isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)
            self.require(is_text, f"{name}[{i}]", part, "a part of type text; other parts are not supported")
        return "".join(part["text"] for part in parts)

    def answers(
        self, chosen: tuple[Message, ...], rejected: tuple[Message, ...]
    ) -> tuple[tuple[Message, ...], tuple[Message, ...], tuple[Message, ...]]:
        """The prompt, and both answers to it."""
        prompt: tuple[Message, ...] = ()
        prompt_field = self.take("prompt")
        if prompt_field is not None:
            content = self.content("prompt")
            prompt = self.with_system(({"role": "user", "content": content},) if isinstance(content, str) else content)
            if chosen[0]["role"] not in ("system", "user"):
                return prompt, chosen, rejected
        common = 0
        for chosen_message, rejected_message in zip(chosen, rejected, strict=False):
            if chosen_message != rejected_message:
                break
            common += 1
        shared = chosen[:common]
        has_prompt = prompt_field is not None or chosen[0]["role"] != "assistant"
        self.require(has_prompt, "prompt", None, "a text or messages")
        if (
            shared and prompt[-len(shared) :] == shared
        ):  # the prompt may have a system message that the answers do not repeat
            shared = prompt
        if not shared or (prompt and shared[-1]["content"] != prompt[-1]["content"]):
            raise self.wrong(
                "chosen and rejected have different prompts, or not the same as `prompt`; put the prompt into `prompt`,"
                " and only the answers into chosen and rejected"
            )
        return self.with_system(shared), chosen[common:], rejected[common:]
