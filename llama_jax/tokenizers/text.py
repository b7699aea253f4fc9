"""Text as it comes, ended by stop strings."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from llama_jax.tokenizers.base import TextStream, Tokenizer


class Text:
    """Turns tokens into text and ends at a stop string, holding back what may be the beginning of one.

    Attributes:
      shown: what was written so far.
      ended: whether a stop string has been met.
    """

    def __init__(
        self, tokenizer: Tokenizer, stop: Sequence[str], write: Callable[[str], None], *, at_start: bool = False
    ) -> None:
        self._stream = TextStream(tokenizer, at_start=at_start)
        self._stop = stop
        self._write = write
        self._held = ""
        self.ended = False
        self.shown = ""

    @property
    def length(self) -> int:
        """Characters so far, those held back included."""
        return len(self.shown) + len(self._held)

    def push(self, token: int) -> bool:
        """Add a token; True when a stop string has been met."""
        self._add(self._stream.push(token))
        return self.ended

    def finish(self) -> None:
        """Give out what was held back, now that nothing follows."""
        if not self.ended:
            self._add(self._stream.finish())
            if not self.ended:
                self._show(self._held)
            self._held = ""

    def _add(self, text: str) -> None:
        if not self._stop:
            self._show(text)
            return
        self._held += text
        found = [at for at in map(self._held.find, self._stop) if at >= 0]
        self.ended = bool(found)
        if found:
            ready = min(found)
        else:
            held = self._held  # of which no beginning of a stop string can be more: some have thousands of characters
            starts = (stop[:n] for stop in self._stop for n in range(min(len(stop), len(held) + 1)))
            ready = len(held) - max((len(start) for start in starts if held.endswith(start)), default=0)
        self._show(self._held[:ready])
        self._held = self._held[ready:]

    def _show(self, text: str) -> None:
        self.shown += text
        self._write(text)
