"""What every tokenizer can do, and text that arrives token by token."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Protocol


class Tokenizer(Protocol):
    """A vocabulary of V ids; special tokens in user text are text."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def bos_id(self) -> int: ...

    @property
    def eos_id(self) -> int: ...

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """Tokens that end a text, for `generate(stop_tokens=...)`.

        The end-of-sequence token, and the one that begins another text: llama2.c's stories end with it.
        """
        ...

    def encode(self, text: str, bos: bool = True, eos: bool = False) -> list[int]:
        """Ids of the text, with the begin-of-sequence token before and the end-of-sequence token behind if asked for."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """The text of the ids; special tokens give nothing."""
        ...

    def token_bytes(self, token: int) -> bytes:
        """The bytes that a token adds behind others: UTF-8, which may begin or end inside a character."""
        ...


class TextStream:
    """Text from tokens one by one: a character is given out when its last byte has come, never in parts."""

    def __init__(self, tokenizer: Tokenizer, *, at_start: bool = False) -> None:
        """Start behind some text, or with `at_start` at the beginning, where a vocabulary's leading space is dropped."""
        self._tokenizer = tokenizer
        self._drop_space = at_start
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token: int) -> str:
        """The text that is complete with this token; nothing for the padding of a model's vocabulary beyond V."""
        if token >= self._tokenizer.vocab_size:
            return ""
        new = self._tokenizer.token_bytes(token)
        if self._drop_space and new:
            new = new.removeprefix(b" ")
            self._drop_space = False
        return self._decoder.decode(new)

    def finish(self) -> str:
        """What is left when no token follows: a character cut short shows as U+FFFD."""
        return self._decoder.decode(b"", final=True)
