"""The formats of responses: whole, or as chunks of a stream, whose fixed parts are made once."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from json.encoder import encode_basestring_ascii as quoted  # ASCII: some clients split lines at other characters as well
from typing import Any, NamedTuple

from llama_jax.serving.http.choice import Delta, PlacedToken, TokenNames, of_chat, of_completion
from llama_jax.serving.http.tools import Call

DONE = b"data: [DONE]\n\n"
compact = json.JSONEncoder(separators=(",", ":")).encode


def event(content: dict[str, Any]) -> bytes:
    """One event of a stream."""
    return b"data: " + compact(content).encode() + b"\n\n"


class Written(NamedTuple):
    """A choice that has ended.

    Attributes:
      logprobs: of all its parts, as `Format.logprobs` gives them.
    """

    text: str
    logprobs: Mapping[str, Sequence[str]]
    finish: str
    calls: Sequence[Call] = ()


class Format(ABC):
    """The format of a response.

    Args:
      fixed: "id", "created" and "model".
      scored: whether log-probabilities are wanted.
      usage: whether chunks have the field.
    """

    object: str
    of_chunk: str

    def __init__(self, fixed: dict[str, Any], names: TokenNames, *, scored: bool, usage: bool) -> None:
        self._fixed = fixed
        self._names = names
        self._scored = scored
        self._usage = usage
        fields = fixed | {"object": self.of_chunk}
        self._head = "data: " + compact(fields)[:-1] + ',"choices":[{"index":'
        self._end = ',"usage":null}\n\n' if usage else "}\n\n"
        self._tail = self._closing + ',"logprobs":null,"finish_reason":null}]' + self._end

    _opening: str
    _closing: str

    def begin(self, index: int) -> bytes:
        """What comes before the first chunk of a choice."""
        return b""

    def chunk(self, index: int, delta: Delta, finish: str | None, usage: dict[str, Any] | None) -> bytes:
        """What is new in a choice, as an event."""
        more = self.calls(delta.calls) if delta.calls else ""
        head = f"{self._head}{index}{self._opening}{quoted(delta.text)}{more}"
        if finish is None and not self._scored and usage is None:
            return (head + self._tail).encode()
        logprobs = self._object(self.logprobs(delta.scored)) if self._scored else "null"
        reason = "null" if finish is None else f'"{finish}"'
        end = self._end if usage is None else f',"usage":{json.dumps(usage)}}}\n\n'
        return f'{head}{self._closing},"logprobs":{logprobs},"finish_reason":{reason}}}]{end}'.encode()

    def last(self, usage: dict[str, Any]) -> bytes:
        """The total usage, as an event without choices."""
        return event(self._fixed | {"object": self.of_chunk, "choices": [], "usage": usage})

    def whole(self, choices: Sequence[Written], usage: dict[str, Any]) -> Iterator[bytes]:
        """The whole response, in a part for each choice."""
        before = compact(self._fixed | {"object": self.object})[:-1] + ',"choices":['
        for i, choice in enumerate(choices):
            content = compact({"index": i, **self.content(choice)})[:-1]
            lists = {name: ",".join(parts) for name, parts in choice.logprobs.items()}
            logprobs = self._object(lists) if self._scored else "null"
            after = f'],"usage":{compact(usage)}}}' if i == len(choices) - 1 else ""
            yield f'{before}{content},"logprobs":{logprobs},"finish_reason":{quoted(choice.finish)}}}{after}'.encode()
            before = ","

    def _object(self, lists: Mapping[str, str]) -> str:
        return "{" + ",".join([f'"{name}":[{elements}]' for name, elements in lists.items()]) + self._others + "}"

    _others = ""  # fields of log-probabilities that are no lists

    @abstractmethod
    def logprobs(self, scored: Sequence[PlacedToken]) -> dict[str, str]:
        """Log-probabilities: the elements of each list that they consist of, as JSON."""

    @abstractmethod
    def content(self, choice: Written) -> dict[str, Any]:
        """The field of a choice that holds its text."""

    def calls(self, calls: Sequence[Call]) -> str:
        """What follows the text in a chunk with tool calls."""
        return ',"tool_calls":' + json.dumps([{"index": i} | call.as_dict() for i, call in enumerate(calls)])


class CompletionFormat(Format):
    object = of_chunk = "text_completion"
    _opening, _closing = ',"text":', ""

    def logprobs(self, scored: Sequence[PlacedToken]) -> dict[str, str]:
        return of_completion(self._names, scored)

    def content(self, choice: Written) -> dict[str, Any]:
        return {"text": choice.text}


class ChatFormat(Format):
    object, of_chunk = "chat.completion", "chat.completion.chunk"
    _opening, _closing = ',"delta":{"content":', "}"
    _others = ',"refusal":null'

    def begin(self, index: int) -> bytes:
        delta = '{"role":"assistant","content":""}'
        return f'{self._head}{index},"delta":{delta},"logprobs":null,"finish_reason":null}}]{self._end}'.encode()

    def logprobs(self, scored: Sequence[PlacedToken]) -> dict[str, str]:
        return of_chat(self._names, scored)

    def content(self, choice: Written) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": choice.text, "refusal": None}
        if choice.calls:
            message |= {"content": choice.text or None, "tool_calls": [call.as_dict() for call in choice.calls]}
        return {"message": message}
