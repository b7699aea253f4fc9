"""One continuation as text: tokens in; text, log-probabilities and tool calls out, up to a stop string or another end."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from json.encoder import encode_basestring_ascii as quoted  # ASCII: some clients split lines at other characters as well
from typing import NamedTuple

from llama_jax.serving.requests import ScoredToken, Update
from llama_jax.serving.tool_calls import ToolCall, ToolText
from llama_jax.tokenizers import TextStream, Tokenizer
from llama_jax.tokenizers.interface import Text


class PlacedToken(NamedTuple):
    """A token with its log-probability, and the offset of its text in the choice's text."""

    token: ScoredToken
    offset: int


class Delta(NamedTuple):
    """The new part of a choice."""

    text: str
    scored: Sequence[PlacedToken] = ()
    calls: Sequence[ToolCall] = ()


class Choice:
    """A choice that is being generated.

    Attributes:
      count: number of tokens generated so far, including a stop token.
      cached: number of prompt tokens found in the prefix cache.
      finish: OpenAI's finish_reason; None while it continues.

    Args:
      stop: stop strings.
      echo: the prompt's text, if it precedes the continuation; otherwise None.
      at_start: whether the continuation begins a text, so that a vocabulary's leading space is dropped.
      scored: whether log-probabilities are requested.
      tools: recognizes calls; None without tools.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        stop: Sequence[str],
        *,
        echo: str | None,
        at_start: bool,
        scored: bool,
        tools: ToolText | None = None,
    ) -> None:
        self.count = 0
        self.cached = 0
        self.finish: str | None = None
        self._written: list[str] = [echo] if echo else []
        self._echo_length = len(echo or "")
        self._echoed = echo is not None
        self._scored = scored
        self._held_back: deque[PlacedToken] = deque()
        self._tools = tools
        token_names = tools.tokens if tools is not None else None
        self._text = Text(tokenizer, stop, self._written.append, at_start=at_start, special_texts=token_names)
        self._prompt_text = TextStream(tokenizer, at_start=True)
        self._prompt_length = 0

    def take(self, update: Update) -> Delta:
        """Process an update from the engine, and return the part that can be shown. No effect after the finish."""
        if self.finish is not None:
            return Delta("")
        self.cached = max(self.cached, update.cached)
        if update.prompt is not None and self._scored and self._echoed:
            for token in update.prompt:
                self._held_back.append(PlacedToken(token, self._prompt_length))
                self._prompt_length += len(self._prompt_text.push(token.id))
        text = self._text
        for token in update.tokens:
            self._count(token)
            if text.push(token.id):
                self.finish = "stop"
                break
        if update.finish in ("stop", "length") and self.finish is None:
            if update.ended_by is not None:
                self._count(update.ended_by)
            text.finish()
            self.finish = "stop" if text.ended else update.finish
        shown = "".join(self._written)
        self._written.clear()
        calls: Sequence[ToolCall] = ()
        if self._tools is not None:
            shown = self._tools.push(shown)
            if self.finish is not None:
                rest, calls = self._tools.finish()
                shown += rest
                self.finish = "tool_calls" if calls and self.finish == "stop" else self.finish
        return Delta(shown, self._ready(), calls)

    def _count(self, token: ScoredToken) -> None:
        self.count += 1
        if self._scored:
            self._held_back.append(PlacedToken(token, self._echo_length + self._text.length))

    def _ready(self) -> list[PlacedToken]:
        """The tokens whose text has been shown; tokens of held-back text wait with it, or are never shown."""
        end = self._echo_length + len(self._text.shown)
        is_all_shown = not self._text.ended and end == self._echo_length + self._text.length
        ready = []
        while self._held_back and (is_all_shown or self._held_back[0].offset < end):
            ready.append(self._held_back.popleft())
        return ready


class TokenNames:
    """Tokens as they are written in log-probabilities, as JSON."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._special = {token: name for name, token in tokenizer.special_tokens.items()}
        self._known: dict[int, tuple[str, str]] = {}

    def __call__(self, token: int) -> tuple[str, str]:
        """The token's text and bytes; invalid UTF-8 is written as in OpenAI's API: bytes:\\xe2\\x80."""
        if token not in self._known:
            content = b""
            if token not in self._special:
                content = self._tokenizer.token_bytes(token)
            try:
                name = self._special.get(token) or content.decode()
            except UnicodeDecodeError:
                name = "bytes:" + "".join(f"\\x{byte:02x}" for byte in content)
            self._known[token] = quoted(name), f"[{','.join(map(str, content))}]"
        return self._known[token]
