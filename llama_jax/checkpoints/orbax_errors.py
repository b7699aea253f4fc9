"""Short errors from orbax, without the tracebacks that it prints besides."""

from __future__ import annotations

import errno
import logging
import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from llama_jax.writing import FULL

# Memory, disks and networks that fail, stale mounts, rights, too many open files.
NAMES = ("ENOMEM", "EIO", "ESTALE", "ENOTCONN", "ETIMEDOUT", "EHOSTDOWN", "EACCES", "EPERM", "EMFILE", "ENFILE", "EREMOTEIO")
OF_WRITING = (*FULL, errno.EFBIG, errno.EROFS, errno.EACCES, errno.EPERM)
PASSING = tuple(getattr(errno, name) for name in NAMES if hasattr(errno, name))


@contextmanager
def quiet() -> Iterator[None]:
    """Suppress the tracebacks of errors that orbax also raises: those that its threads log, and those of messages that
    TensorStore sends to an event loop that has ended with the first error.

    TensorStore may send them later, so after an error that part stays. Two may overlap, in several threads, and end in any
    order.
    """

    def is_of_others(record: logging.LogRecord) -> bool:
        return f"{os.sep}orbax{os.sep}" not in record.pathname or record.levelno >= logging.CRITICAL

    log, before = logging.getLogger("absl"), sys.unraisablehook
    hook = before if isinstance(before, _WithoutClosedLoops) else _WithoutClosedLoops(before)
    log.addFilter(is_of_others)
    sys.unraisablehook = hook
    try:
        yield
        if sys.unraisablehook is hook:
            sys.unraisablehook = before
    finally:
        log.removeFilter(is_of_others)


class _WithoutClosedLoops:
    """`sys.unraisablehook`, but for what an event loop that has ended leaves: messages to it, and the coroutines of orbax,
    which raise an error when they are collected."""

    def __init__(self, before: Callable[[Any], object]) -> None:
        self._before = before

    def __call__(self, told: Any) -> None:
        code = getattr(told.object, "cr_code", None)
        of_orbax = code is not None and f"{os.sep}orbax{os.sep}" in code.co_filename
        if str(told.exc_value) != "Event loop is closed" and not of_orbax:
            self._before(told)


def root_cause(error: BaseException, most: int = 300) -> str:
    """The message of the error at the bottom, which names the file: orbax wraps it in what it was about to do."""
    while (below := error.__cause__ or error.__context__) is not None:
        error = below
    return " ".join(str(error).split())[:most]


def error_of_writing(error: BaseException) -> OSError:
    """The reason of a failed write, with its errno for a full disk or missing permissions.

    TensorStore's errors have only a text, which ends, after long paths, in the system's message.
    """
    said = root_cause(error, most=10_000)
    number = next((number for number in OF_WRITING if os.strerror(number) in said), None)
    return OSError(root_cause(error)) if number is None else OSError(number, os.strerror(number))


def is_passing(error: BaseException) -> bool:
    """Whether an error is about the machine, a disk or a network rather than the contents of the files."""
    chain: list[BaseException] = []
    at: BaseException | None = error
    while at is not None:
        chain.append(at)
        at = at.__cause__ or at.__context__
    if any(isinstance(each, MemoryError) or getattr(each, "errno", None) in PASSING for each in chain):
        return True
    said = " ".join(map(str, chain))
    return any(text in said for text in (*map(os.strerror, PASSING), "RESOURCE_EXHAUSTED", "out of memory", "Out of memory"))


def wait_for_writers() -> None:
    """Wait for the threads of a failed save: orbax raises the first error while they go on writing the other arrays."""
    for thread in threading.enumerate():
        if type(thread).__module__.startswith("orbax."):
            threading.Thread.join(thread, 60)  # their own `join` raises the error of each
