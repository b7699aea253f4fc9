"""What orbax does when something fails, made quiet and short."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def quiet() -> Iterator[None]:
    """Without the tracebacks that orbax logs of errors which it raises as well."""
    log = logging.getLogger("absl")
    before = log.level
    log.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        log.setLevel(before)


def root_cause(error: BaseException) -> str:
    """The message of the error at the bottom, which names the file: orbax wraps it in what it was about to do."""
    while (below := error.__cause__ or error.__context__) is not None:
        error = below
    return " ".join(str(error).split())[:300]


def wait_for_writers() -> None:
    """Of a save that failed: orbax tells of the first error at once, and its threads go on writing the other arrays."""
    for thread in threading.enumerate():
        if type(thread).__module__.startswith("orbax."):
            thread.join(60)
