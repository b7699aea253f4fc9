"""The progress bar of all long work: on stderr, cleared at its end, hidden where stderr is not a terminal."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any


def progress_bar(what: str, unit: str, *, quiet: bool = False, delay: float = 0.0) -> Any:
    """A function that wraps an iterable in a bar: `tqdm.tqdm` with the options of all bars.

    Args:
      what: the name of the work.
      unit: the name of the items.
      quiet: show nothing.
      delay: seconds until the bar is shown.
    """
    from tqdm import tqdm

    return partial(tqdm, desc=what, unit=f" {unit}", leave=False, delay=delay, disable=True if quiet else None)


@contextmanager
def progress_counter(what: str, unit: str) -> Iterator[Callable[[int, int], None]]:
    """The same bar for work that counts by itself: a function that takes the number of finished items and of all items."""
    with progress_bar(what, unit, delay=1.0)() as bar:

        def update(done: int, total: int) -> None:
            bar.total = total
            bar.update(done - bar.n)

        yield update
