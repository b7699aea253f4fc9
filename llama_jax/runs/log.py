"""The lines that a run prints, and the progress bars of long operations."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, TextIO

from llama_jax.storage.atomic_write import discard_output


class Log:
    """Lines on stdout. On a terminal each line of progress replaces the previous one; in a file all of them stay."""

    def __init__(self, stream: TextIO | None = None, *, quiet: bool = False) -> None:
        """`quiet` prints nothing: for all processes except the first, and for callers that want no log."""
        self._stream = sys.stdout if stream is None else stream
        self.quiet = quiet
        self._in_place = self._stream.isatty()
        self._open = False

    def line(self, text: str) -> None:
        """A line that stays."""
        self._write(text, stays=True)

    def progress(self, text: str) -> None:
        """A line that the next one replaces."""
        self._write(text, stays=not self._in_place)

    def _write(self, text: str, *, stays: bool) -> None:
        self._put(("\r\x1b[K" if self._open else "") + text + "\n" * stays)
        self._open = not stays

    def _put(self, text: str) -> None:
        if self.quiet:
            return
        try:
            self._stream.write(text)
            self._stream.flush()
        except OSError:
            # The reader has exited (`| head`), the terminal has hung up, or the disk is full: the run continues silently.
            # Nothing may be flushed there at the end.
            self.quiet = True
            discard_output(self._stream.fileno())

    def end(self) -> None:
        """Keep the last line of progress."""
        if self._open:
            self._put("\n")
            self._open = False


def duration(seconds: float) -> str:
    """A duration, rounded: ``45 s``, ``12 min``, ``3 h 20 min``, ``2 d 4 h``."""
    if seconds < 99.5:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    if minutes < 100:
        return f"{minutes} min"
    hours, minutes = divmod(minutes, 60)
    if hours < 48:
        return f"{hours} h {minutes} min"
    return f"{hours // 24} d {hours % 24} h"


def progress_bar(what: str, unit: str, *, quiet: bool = False, delay: float = 0.0) -> Any:
    """A function that wraps an iterable in a progress bar: `tqdm.tqdm` with common options.

    The bar is on stderr, cleared at the end, and hidden if stderr is not a terminal.

    Args:
      what: the name of the operation.
      unit: the name of the items.
      quiet: show nothing.
      delay: seconds until the bar is shown.
    """
    from tqdm import tqdm

    return partial(tqdm, desc=what, unit=f" {unit}", leave=False, delay=delay, disable=True if quiet else None)


@contextmanager
def progress_counter(what: str, unit: str) -> Iterator[Callable[[int, int], None]]:
    """The same bar for operations that count their items: a function of the number of finished items and of all items."""
    with progress_bar(what, unit, delay=1.0)() as bar:

        def update(done: int, total: int) -> None:
            bar.total = total
            bar.update(done - bar.n)

        yield update
