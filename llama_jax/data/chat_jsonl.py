"""Chats in JSONL in the common published forms; each line is an example of an assistant's answers."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from llama_jax.data.documents import jsonl_objects
from llama_jax.errors import DataError, shown
from llama_jax.tokenizers import Message

# Names of the roles in ShareGPT and its descendants.
ROLES = {
    **dict.fromkeys(("system",), "system"),
    **dict.fromkeys(("user", "human"), "user"),
    **dict.fromkeys(("assistant", "gpt", "chatgpt", "bing", "bard", "model"), "assistant"),
    **dict.fromkeys(("tool", "function", "observation"), "tool"),
}
MESSAGE_FIELDS = ("role", "content", "name", "tool_calls", "tool_call_id")
CHAT_FORMS = "messages; conversations; prompt and completion; instruction and output"
TextOrMessages = str | tuple[Message, ...]


class Example(NamedTuple):
    """A line of a file.

    Attributes:
      prompt: a text, or messages.
      answers: of the same type as the prompt: one; two, of which the first is preferred; or none for a prompt only.
      tools: functions that the model may call.
      columns: all fields of the line, unchanged.
      line: the line number.
      desirable: whether a single answer is good, if the line has a label.
    """

    prompt: TextOrMessages
    answers: tuple[TextOrMessages, ...]
    tools: tuple[dict[str, Any], ...]
    columns: dict[str, Any]
    line: int
    desirable: bool | None = None


def read_chats(path: Path) -> Iterator[Example]:
    """Examples of an assistant's answers, by the fields of each line; the first form that matches counts:

    - `messages`, a chat: all of the assistant's messages are answers;
    - `conversations`, the same in ShareGPT's form, with `from` and `value`;
    - `prompt` and `completion`, both texts, without a chat format, or both messages;
    - `instruction`, `input` (which may be empty or missing) and `output`, as in Alpaca: a user's message, in which the
      input is a separate paragraph, and its reply.

    A chat may have a `system` text, which becomes its first message, and `tools`, a list or its JSON. Other fields are
    ignored.

    Raises:
      DataError: any other line; the message gives file, line and field.
    """
    for line in _lines(path):
        prompt: TextOrMessages = ()
        answer: TextOrMessages
        if "messages" in line.found or "conversations" in line.found:
            answer = line.with_system(line.chat("messages" if "messages" in line.found else "conversations"))
        elif "prompt" in line.found and "completion" in line.found:
            prompt, answer = line.completed()
        elif "instruction" in line.found and "output" in line.found:
            given = "\n\n".join(filter(None, (line.text("instruction"), line.text("input", optional=True))))
            prompt = line.with_system(({"role": "user", "content": given},))
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
    for line in _lines(path):
        if "prompt" not in line.found:
            raise line.wrong(f"prompt, a text or messages, is missing; the fields are {line.fields()}")
        columns = list(line.found) if columns is None else columns
        for name in sorted(set(columns) ^ set(line.found)):
            where, other = ("the first line", "here") if name in columns else ("this line", "in the first")
            raise line.wrong(
                f"{shown(name, 40)} is a field of {where} but not {other}; put it into all lines, possibly as null"
            )
        yield line.example(line.with_system(line.content("prompt")))


def read_preferences(path: Path) -> Iterator[Example]:
    """Pairs of answers: `chosen`, which is preferred, and `rejected`, both texts or both messages, after `prompt`.

    If the answers are messages, the prompt may be messages, or a text, which becomes the user's message. If both answers
    begin with the same messages, these are the prompt, and `prompt` may be omitted.

    Raises:
      DataError: any other line; the message gives file, line and field.
    """
    for line in _lines(path):
        missing = [name for name in ("chosen", "rejected") if name not in line.found]
        if missing:
            raise line.wrong(f"{missing[0]} is missing; write prompt, chosen and rejected; the fields are {line.fields()}")
        chosen, rejected = line.content("chosen"), line.content("rejected")
        line.same_kind("chosen", chosen, "rejected", rejected)
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
    for line in _lines(path):
        for name in ("prompt", "completion", "label"):
            if name not in line.found:
                raise line.wrong(f"{name} is missing; write prompt, completion and label; the fields are {line.fields()}")
        prompt, answer = line.completed()
        line.check_answer(answer, "completion has no message of the role 'assistant'; remove the line")
        label = line.found["label"]
        if not isinstance(label, bool):
            raise line.wrong(f"label={shown(label, 60)} must be true, for a good answer, or false")
        yield line.example(prompt, answer)._replace(desirable=label)


def _lines(path: Path) -> Iterator[_Line]:
    return (_Line(path, number, found) for found, number, _ in jsonl_objects(path))


class _Line:
    """The object of a line; reads and checks its fields."""

    def __init__(self, path: Path, number: int, found: dict[str, Any]) -> None:
        self._where, self._number = f"{path}, line {number}", number
        self.found = found

    def example(self, prompt: TextOrMessages, *answers: TextOrMessages) -> Example:
        """The line as an example; texts have no tools."""
        is_text = isinstance(answers[0] if answers else prompt, str)
        return Example(prompt, answers, () if is_text else self.tools(), self.found, self._number)

    def check_answer(self, answer: TextOrMessages, what: str) -> None:
        """Raise an error with the message `what` for messages without one of the assistant's."""
        if not isinstance(answer, str) and not any(message["role"] == "assistant" for message in answer):
            raise self.wrong(what)

    def wrong(self, what: str) -> DataError:
        return DataError(f"{self._where}: {what}")

    def fields(self) -> str:
        return shown(list(self.found), 200) if self.found else "no fields"

    def text(self, name: str, *, optional: bool = False) -> str:
        value = self.found.get(name)
        if isinstance(value, str) or (optional and value is None):
            return value or ""
        if name not in self.found:
            raise self.wrong(f"{name}, a text, is missing; the fields are {self.fields()}")
        raise self.wrong(f"{name}={shown(value, 60)} must be a text")

    def content(self, name: str) -> TextOrMessages:
        """A text, or messages."""
        value = self.found[name]
        if not isinstance(value, str | list):
            raise self.wrong(f"{name}={shown(value, 60)} must be a text, or messages")
        return value if isinstance(value, str) else self.chat(name)

    def completed(self) -> tuple[TextOrMessages, TextOrMessages]:
        """`prompt` and `completion`, both texts or both messages."""
        prompt, answer = self.content("prompt"), self.content("completion")
        self.same_kind("prompt", prompt, "completion", answer)
        return self.with_system(prompt), answer

    def same_kind(self, name: str, value: TextOrMessages, other: str, also: TextOrMessages) -> None:
        if isinstance(value, str) != isinstance(also, str):
            kinds = [f"{n} {'a text' if isinstance(v, str) else 'messages'}" for n, v in ((name, value), (other, also))]
            raise self.wrong(f"{kinds[0]}, but {kinds[1]}; write both as texts, or both as messages")

    def with_system(self, content: TextOrMessages) -> Any:
        """Messages, with the field `system` as the first, if it has a text and they have no such message."""
        if isinstance(content, str) or not content or content[0]["role"] == "system":
            return content
        text = self.text("system", optional=True)
        return ({"role": "system", "content": text}, *content) if text else content

    def tools(self) -> tuple[dict[str, Any], ...]:
        value = self.found.get("tools")
        if isinstance(value, str):
            try:
                value = json.loads(value) if value.strip() else None
            except (ValueError, RecursionError):
                raise self.wrong(f"tools={shown(value, 60)} is a text, but not JSON; write a list of objects") from None
        if value is None:
            return ()
        if not isinstance(value, list) or not all(isinstance(tool, dict) for tool in value):
            raise self.wrong(f"tools={shown(value, 60)} must be a list of objects in OpenAI's format for functions")
        return tuple(value)

    def chat(self, name: str) -> tuple[Message, ...]:
        value = self.found[name]
        if not isinstance(value, list) or not value:
            raise self.wrong(f"{name}={shown(value, 60)} must be a list with at least one message")
        return tuple(self._message(f"{name}[{i}]", each) for i, each in enumerate(value))

    def _message(self, name: str, value: Any) -> Message:
        if not isinstance(value, dict):
            raise self.wrong(f"{name}={shown(value, 60)} must be an object with role and content, or from and value")
        plain = "role" in value or "from" not in value
        role_name, content_name = ("role", "content") if plain else ("from", "value")
        role, content = value.get(role_name), value.get(content_name)
        if not isinstance(role, str) or role not in ROLES:
            known = ", ".join(ROLES)
            raise self.wrong(f"{name}.{role_name}={shown(role, 40)} is not a role; rename it to one of {known}")
        if isinstance(content, list):
            content = self._joined(f"{name}.{content_name}", content)
        if content is None and value.get("tool_calls"):
            content = ""
        if not isinstance(content, str):
            raise self.wrong(f"{name}.{content_name}={shown(content, 60)} must be a text")
        more = {key: entry for key, entry in value.items() if key not in (role_name, content_name) and entry is not None}
        unknown = [key for key in more if key not in MESSAGE_FIELDS]
        if unknown:
            raise self.wrong(f"{name}.{shown(unknown[0], 40)[1:-1]} is not supported; remove it from the messages")
        message: dict[str, Any] = {"role": ROLES[role], "content": content, **more}
        return message  # type: ignore[return-value]

    def _joined(self, name: str, parts: list[Any]) -> str:
        for i, part in enumerate(parts):
            if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
                raise self.wrong(f"{name}[{i}]={shown(part, 60)} must be a part of type text; other parts are not supported")
        return "".join(part["text"] for part in parts)

    def answers(
        self, chosen: tuple[Message, ...], rejected: tuple[Message, ...]
    ) -> tuple[tuple[Message, ...], tuple[Message, ...], tuple[Message, ...]]:
        """The prompt, and both answers to it."""
        prompt: Sequence[Message] = ()
        given = self.found.get("prompt")
        if given is not None:
            content = self.content("prompt")
            prompt = self.with_system(({"role": "user", "content": content},) if isinstance(content, str) else content)
            if chosen[0]["role"] not in ("system", "user"):
                return tuple(prompt), chosen, rejected
        common = 0
        for one, other in zip(chosen, rejected, strict=False):
            if one != other:
                break
            common += 1
        shared = chosen[:common]
        if given is None and chosen[0]["role"] == "assistant":
            raise self.wrong(f"prompt, a text or messages, is missing; the fields are {self.fields()}")
        if not shared or (prompt and shared[-1]["content"] != prompt[-1]["content"]):
            raise self.wrong(
                "chosen and rejected have different prompts, or not the same as `prompt`; put the prompt into `prompt`,"
                " and only the answers into chosen and rejected"
            )
        return shared, chosen[common:], rejected[common:]
