"""Chats in JSONL in the usual published forms, each line an example of an assistant's answers."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from llama_jax.data.documents import jsonl_objects
from llama_jax.data.errors import DataError
from llama_jax.errors import shown
from llama_jax.tokenizers import Message

# What stands for the roles in ShareGPT and its descendants.
ROLES = {
    **dict.fromkeys(("system",), "system"),
    **dict.fromkeys(("user", "human"), "user"),
    **dict.fromkeys(("assistant", "gpt", "chatgpt", "bing", "bard", "model"), "assistant"),
    **dict.fromkeys(("tool", "function", "observation"), "tool"),
}
MESSAGE = ("role", "content", "name", "tool_calls", "tool_call_id")
CHATS = "messages; conversations; prompt and completion; instruction and output"
Said = str | tuple[Message, ...]


class Example(NamedTuple):
    """A line of a file.

    Attributes:
      prompt: a text, or messages.
      answers: of the same kind as the prompt: one, or two, the first of which is preferred.
      tools: functions that the model may call.
      line: the number of the line.
      read: bytes of the file that have been read so far.
      desirable: whether a single answer is good, if the line says so.
    """

    prompt: Said
    answers: tuple[Said, ...]
    tools: tuple[dict[str, Any], ...]
    line: int
    read: int
    desirable: bool | None = None


def read_chats(path: Path) -> Iterator[Example]:
    """Examples of an assistant's answers, by the fields of each line; the first form that fits counts:

    - `messages`, a chat: all of the assistant's messages are answers;
    - `conversations`, the same in ShareGPT's terms, `from` and `value`;
    - `prompt` and `completion`, both texts, without any chat format, or both messages;
    - `instruction`, `input` (which may be empty or missing) and `output`, as Alpaca has them: a user's message, of which
      the input is a paragraph of its own, and its reply.

    A chat may have a `system` text, which is its first message, and `tools`, a list or the JSON of one. Other fields are not
    read.

    Raises:
      DataError: a line with something else, by its file, line and field.
    """
    for found, line, read in jsonl_objects(path):
        at = _Line(f"{path}, line {line}", found)
        answer: Said
        prompt: Said = ()
        if "messages" in found or "conversations" in found:
            answer = at.chat("messages" if "messages" in found else "conversations")
            if answer and answer[0]["role"] != "system":
                answer = (*at.system(), *answer)
        elif "prompt" in found and "completion" in found:
            prompt, answer = at.completed()
        elif "instruction" in found and "output" in found:
            given = "\n\n".join(filter(None, (at.text("instruction"), at.text("input", optional=True))))
            prompt = (*at.system(), {"role": "user", "content": given})
            answer = ({"role": "assistant", "content": at.text("output")},)
        else:
            raise at.wrong(f"the fields are {at.fields()}; name them so: {CHATS}")
        if not isinstance(answer, str) and not any(message["role"] == "assistant" for message in answer):
            raise at.wrong("no message has the role 'assistant', so there is nothing to learn; leave the line out")
        yield Example(prompt, (answer,), () if isinstance(answer, str) else at.tools(), line, read)


class AskedLine(NamedTuple):
    """A line of a file of prompts.

    Attributes:
      prompt: a text, or messages.
      tools: functions that the model may call.
      columns: all fields of the line, as they are there.
      line: the number of the line.
    """

    prompt: Said
    tools: tuple[dict[str, Any], ...]
    columns: dict[str, Any]
    line: int


def read_prompts(path: Path) -> Iterator[AskedLine]:
    """Prompts: `prompt`, a text or messages, with an optional `system` text as the first message. A line may have any other
    fields, the same in all lines: they are for judging the answers.

    Raises:
      DataError: a line with something else, by its file, line and field.
    """
    columns: list[str] | None = None
    for found, line, _ in jsonl_objects(path):
        at = _Line(f"{path}, line {line}", found)
        if "prompt" not in found:
            raise at.wrong(f"prompt is missing, a text or messages; the fields are {at.fields()}")
        columns = list(found) if columns is None else columns
        for name in sorted(set(columns) ^ set(found)):
            where, other = ("the first line", "here") if name in columns else ("this line", "in the first")
            raise at.wrong(f"{shown(name, 40)} is a field of {where} and not {other}; give it in all lines, as null in some")
        prompt = at.said("prompt")
        if not isinstance(prompt, str) and prompt[0]["role"] != "system":
            prompt = (*at.system(), *prompt)
        yield AskedLine(prompt, () if isinstance(prompt, str) else at.tools(), found, line)


def read_preferences(path: Path) -> Iterator[Example]:
    """Pairs of answers: `chosen`, which is preferred, and `rejected`, both texts or both messages, after `prompt`.

    If the answers are messages, the prompt may be messages, or a text, which becomes the user's message. If both answers
    begin with the same messages, these are the prompt, and `prompt` may be missing.

    Raises:
      DataError: a line with something else, by its file, line and field.
    """
    for found, line, read in jsonl_objects(path):
        at = _Line(f"{path}, line {line}", found)
        missing = [name for name in ("chosen", "rejected") if name not in found]
        if missing:
            raise at.wrong(f"{missing[0]} is missing; give prompt, chosen and rejected; the fields are {at.fields()}")
        chosen, rejected = at.said("chosen"), at.said("rejected")
        at.same_kind("chosen", chosen, "rejected", rejected)
        if chosen == rejected:
            raise at.wrong("chosen and rejected are the same, so neither is preferred; leave the line out")
        prompt: Said
        if isinstance(chosen, str) or isinstance(rejected, str):
            prompt = at.text("prompt")
        else:
            prompt, chosen, rejected = at.answers(chosen, rejected)
            for name, answer in (("chosen", chosen), ("rejected", rejected)):
                if not any(message["role"] == "assistant" for message in answer):
                    raise at.wrong(f"{name} has no message of the role 'assistant' after the prompt; leave the line out")
        yield Example(prompt, (chosen, rejected), () if isinstance(chosen, str) else at.tools(), line, read)


def read_judged(path: Path) -> Iterator[Example]:
    """Single answers, each labelled good or bad: `prompt` and `completion` as in `read_chats`, and `label`, which is true
    or false.

    Raises:
      DataError: a line with something else, by its file, line and field.
    """
    for found, line, read in jsonl_objects(path):
        at = _Line(f"{path}, line {line}", found)
        for name in ("prompt", "completion", "label"):
            if name not in found:
                raise at.wrong(f"{name} is missing; give prompt, completion and label; the fields are {at.fields()}")
        prompt, answer = at.completed()
        if not isinstance(answer, str) and not any(message["role"] == "assistant" for message in answer):
            raise at.wrong("completion has no message of the role 'assistant'; leave the line out")
        if not isinstance(found["label"], bool):
            raise at.wrong(f"label={shown(found['label'], 60)} must be true, for a good answer, or false")
        yield Example(prompt, (answer,), () if isinstance(answer, str) else at.tools(), line, read, found["label"])


class _Line:
    """The object of a line, whose fields are looked at one by one."""

    def __init__(self, where: str, found: dict[str, Any]) -> None:
        self._where = where
        self._found = found

    def wrong(self, what: str) -> DataError:
        return DataError(f"{self._where}: {what}")

    def fields(self) -> str:
        return shown(list(self._found), 200) if self._found else "no fields"

    def text(self, name: str, *, optional: bool = False) -> str:
        value = self._found.get(name)
        if isinstance(value, str) or (optional and value is None):
            return value or ""
        if name not in self._found:
            raise self.wrong(f"{name} is missing, which must be a text; the fields are {self.fields()}")
        raise self.wrong(f"{name}={shown(value, 60)} must be a text")

    def said(self, name: str) -> Said:
        """A text, or messages."""
        value = self._found[name]
        if not isinstance(value, str | list):
            raise self.wrong(f"{name}={shown(value, 60)} must be a text, or messages")
        return value if isinstance(value, str) else self.chat(name)

    def completed(self) -> tuple[Said, Said]:
        """`prompt` and `completion`, both texts or both messages."""
        prompt, answer = self.said("prompt"), self.said("completion")
        self.same_kind("prompt", prompt, "completion", answer)
        if not isinstance(prompt, str) and prompt and prompt[0]["role"] != "system":
            prompt = (*self.system(), *prompt)
        return prompt, answer

    def same_kind(self, name: str, value: Said, other: str, also: Said) -> None:
        if isinstance(value, str) != isinstance(also, str):
            kinds = [f"{n} {'a text' if isinstance(v, str) else 'messages'}" for n, v in ((name, value), (other, also))]
            raise self.wrong(f"{kinds[0]}, but {kinds[1]}; give both as texts, or both as messages")

    def system(self) -> tuple[Message, ...]:
        """The message that the field `system` stands for, where it has a text."""
        text = self.text("system", optional=True)
        return ({"role": "system", "content": text},) if text else ()

    def tools(self) -> tuple[dict[str, Any], ...]:
        value = self._found.get("tools")
        if isinstance(value, str):
            try:
                value = json.loads(value) if value.strip() else None
            except (ValueError, RecursionError):
                raise self.wrong(f"tools={shown(value, 60)} is a text, but not JSON; give a list of objects") from None
        if value is None:
            return ()
        if not isinstance(value, list) or not all(isinstance(tool, dict) for tool in value):
            raise self.wrong(f"tools={shown(value, 60)} must be a list of objects, as OpenAI describes functions")
        return tuple(value)

    def chat(self, name: str) -> tuple[Message, ...]:
        value = self._found[name]
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
        unknown = [key for key in more if key not in MESSAGE]
        if unknown:
            raise self.wrong(f"{name}.{shown(unknown[0], 40)[1:-1]} is not read; remove it from the messages")
        message: dict[str, Any] = {"role": ROLES[role], "content": content, **more}
        return message  # type: ignore[return-value]

    def _joined(self, name: str, parts: list[Any]) -> str:
        for i, part in enumerate(parts):
            if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
                raise self.wrong(f"{name}[{i}]={shown(part, 60)} must be a part of type text; other parts cannot be read")
        return "".join(part["text"] for part in parts)

    def answers(
        self, chosen: tuple[Message, ...], rejected: tuple[Message, ...]
    ) -> tuple[tuple[Message, ...], tuple[Message, ...], tuple[Message, ...]]:
        """The prompt, and both answers to it."""
        prompt: Sequence[Message] = ()
        given = self._found.get("prompt")
        if given is not None:
            said = self.said("prompt")
            prompt = ({"role": "user", "content": said},) if isinstance(said, str) else said
            if prompt and prompt[0]["role"] != "system":
                prompt = (*self.system(), *prompt)
            if chosen[0]["role"] not in ("system", "user"):
                return tuple(prompt), chosen, rejected
        common = 0
        for one, other in zip(chosen, rejected, strict=False):
            if one != other:
                break
            common += 1
        shared = chosen[:common]
        if given is None and chosen[0]["role"] == "assistant":
            raise self.wrong(f"prompt is missing, which must be a text or messages; the fields are {self.fields()}")
        if not shared or (prompt and shared[-1]["content"] != prompt[-1]["content"]):
            raise self.wrong(
                "chosen and rejected begin with a message that is not the assistant's, and not with the same prompt; give"
                " the prompt as `prompt`, and in the two only what follows it"
            )
        return shared, chosen[common:], rejected[common:]
