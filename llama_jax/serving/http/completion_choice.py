"""One continuation as text: tokens in, text and log-probabilities out, up to a stop text or another end."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from json.encoder import encode_basestring_ascii as quoted  # ASCII: some clients split lines at other characters as well
from typing import NamedTuple

from llama_jax.serving.http.tools import Call, ToolText
from llama_jax.serving.requests import ScoredToken, Update
from llama_jax.tokenizers import TextStream, Tokenizer
from llama_jax.tokenizers.interface import Text


class PlacedToken(NamedTuple):
    """A token with its log-probability, and where its text begins in the choice's text."""

    token: ScoredToken
    offset: int


class Delta(NamedTuple):
    """What is new in a choice."""

    text: str
    scored: list[PlacedToken]
    calls: Sequence[Call] = ()


class Choice:
    """A choice that is being generated.

    Attributes:
      count: tokens generated so far, a stop token included.
      cached: tokens of the prompt that were in the prefix cache.
      finish: OpenAI's finish_reason; None while it continues.

    Args:
      stop: texts that end it.
      echo: the prompt's text, if it precedes the continuation; otherwise None.
      at_start: whether the continuation begins a text, with a vocabulary's leading space dropped.
      scored: whether log-probabilities are wanted.
      tools: names of the functions that it may call.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        stop: Sequence[str],
        *,
        echo: str | None,
        at_start: bool,
        scored: bool,
        tools: Sequence[str] = (),
    ) -> None:
        self.count = 0
        self.cached = 0
        self.finish: str | None = None
        self._written: list[str] = [echo] if echo else []
        self._before = len(echo or "")
        self._echoed = echo is not None
        self._scored = scored
        self._waiting: deque[PlacedToken] = deque()
        self._tools = ToolText(tools) if tools else None
        self._text = Text(tokenizer, stop, self._written.append, at_start=at_start)
        self._prompt_text = TextStream(tokenizer, at_start=True)
        self._prompt_length = 0

    def take(self, update: Update) -> Delta:
        """Take what the engine has delivered, and return what can be shown. Nothing changes after a finish."""
        if self.finish is not None:
            return Delta("", [])
        self.cached = max(self.cached, update.cached)
        if update.prompt is not None and self._scored and self._echoed:
            self._waiting.extend(self._of_prompt(update.prompt))
        text = self._text
        for token in update.tokens:
            self.count += 1
            if self._scored:
                self._waiting.append(PlacedToken(token, self._before + text.length))
            if text.push(token.id):
                self.finish = "stop"
                break
        if update.finish in ("stop", "length") and self.finish is None:
            if update.ended_by is not None:
                self.count += 1
                if self._scored:
                    self._waiting.append(PlacedToken(update.ended_by, self._before + text.length))
            text.finish()
            self.finish = "stop" if text.ended else update.finish
        shown = "".join(self._written)
        self._written.clear()
        calls: Sequence[Call] = ()
        if self._tools is not None:
            shown = self._tools.push(shown)
            if self.finish is not None:
                rest, calls = self._tools.finish()
                shown += rest
                self.finish = "tool_calls" if calls else self.finish
        return Delta(shown, self._ready() if self._scored else [], calls)

    def _ready(self) -> list[PlacedToken]:
        """The tokens whose text has been shown; those of text that is held back wait with it, or are never shown."""
        end = self._before + len(self._text.shown)
        whole = not self._text.ended and end == self._before + self._text.length
        ready = []
        while self._waiting and (whole or self._waiting[0].offset < end):
            ready.append(self._waiting.popleft())
        return ready

    def _of_prompt(self, prompt: Sequence[ScoredToken]) -> list[PlacedToken]:
        """The next tokens of the prompt."""
        found = []
        for token in prompt:
            found.append(PlacedToken(token, self._prompt_length))
            self._prompt_length += len(self._prompt_text.push(token.id))
        return found


class TokenNames:
    """How tokens are written in log-probabilities, as JSON."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._special = {token: name for name, token in tokenizer.special_tokens.items()}
        self._known: dict[int, tuple[str, str]] = {}

    def __call__(self, token: int) -> tuple[str, str]:
        """The token's text and bytes. One that is not valid UTF-8 by itself is written as OpenAI does: bytes:\\xe2\\x80."""
        found = self._known.get(token)
        if found is None:
            name, content = self._find(token)
            found = self._known[token] = quoted(name), f"[{','.join(map(str, content))}]"
        return found

    def _find(self, token: int) -> tuple[str, bytes]:
        if token in self._special:
            return self._special[token], b""
        content = self._tokenizer.token_bytes(token) if token < self._tokenizer.vocab_size else b""
        try:
            return content.decode(), content
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in content), content


def number(logprob: float | None) -> str:
    """The log-probability as JSON: values below -9999, such as minus infinity, become -9999, as with OpenAI."""
    return "null" if logprob is None else repr(logprob if logprob > -9999.0 else -9999.0)


def of_completion(names: TokenNames, scored: Sequence[PlacedToken]) -> dict[str, str]:
    """Log-probabilities in the form of `/v1/completions`: the elements of its lists, as JSON.

    It is written without dictionaries of every token, which take three times as long.
    """

    def top(token: ScoredToken) -> str:
        if token.logprob is None:
            return "null"
        found = {names(i)[0]: number(logprob) for i, logprob in ((token.id, token.logprob), *token.alternatives)}
        return "{" + ",".join([f"{name}:{logprob}" for name, logprob in found.items()]) + "}"

    return {
        "tokens": ",".join([names(each.token.id)[0] for each in scored]),
        "token_logprobs": ",".join([number(each.token.logprob) for each in scored]),
        "top_logprobs": ",".join([top(each.token) for each in scored]),
        "text_offset": ",".join([str(each.offset) for each in scored]),
    }


def of_chat(names: TokenNames, scored: Sequence[PlacedToken]) -> dict[str, str]:
    """Log-probabilities in the form of `/v1/chat/completions`: the elements of its list, as JSON."""

    def fields(token: int, logprob: float | None) -> str:
        name, content = names(token)
        return f'"token":{name},"logprob":{number(logprob)},"bytes":{content}'

    def top(token: ScoredToken) -> str:
        return ",".join([f"{{{fields(*one)}}}" for one in token.alternatives])

    found = [f'{{{fields(each.token.id, each.token.logprob)},"top_logprobs":[{top(each.token)}]}}' for each in scored]
    return {"content": ",".join(found)}
