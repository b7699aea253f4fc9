"""The progress bar for all long operations: on stderr, cleared at the end, hidden if stderr is not a terminal."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any


def progress_bar(what: str, unit: str, *, quiet: bool = False, delay: float = 0.0) -> Any:
    """A function that wraps an iterable in a progress bar: `tqdm.tqdm` with common options.

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
