"""The progress bar of everything that takes long."""

from __future__ import annotations

from functools import partial
from typing import Any


def progress_bar(what: str, unit: str, *, quiet: bool = False, delay: float = 0.0) -> Any:
    """Wraps an iterable in a bar on stderr, which is cleared at its end: `tqdm.tqdm` with the options of all bars.

    Args:
      what: is done.
      unit: of which each item is one.
      quiet: show nothing, which is also so where stderr is no terminal.
      delay: seconds until the bar is shown.
    """
    from tqdm import tqdm

    return partial(tqdm, desc=what, unit=f" {unit}", leave=False, delay=delay, disable=True if quiet else None)
