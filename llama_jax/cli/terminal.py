"""What commands write for people and programs, and how they end when a signal or a fatal error comes."""

from __future__ import annotations

import json
import os
import signal
import sys
import textwrap
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any, NoReturn

from llama_jax.runs.interrupts import ending_signals


def print_status(*texts: str) -> None:
    """Print lines for people on stderr."""
    for text in texts:
        print(f"llama-jax: {text}", file=sys.stderr, flush=True)


def printable(text: str) -> str:
    """A text from a file on one line: control characters and those that a terminal cannot show are escaped."""
    return text if text.isprintable() else ascii(text)[1:-1]


def size(count: int) -> str:
    """Bytes in the unit that leaves one to three digits before the point: 4.1 GB."""
    number = float(count)
    for unit in ("bytes", "kB", "MB", "GB"):
        if number < 999.5:
            return f"{number:.0f} {unit}" if unit == "bytes" or number >= 99.95 else f"{number:.1f} {unit}"
        number /= 1000
    return f"{number:,.1f} TB"


def columns(rows: Sequence[Sequence[str]], right: Sequence[int] = (), indent: str = "") -> str:
    """Rows of equally many cells in columns; the columns whose numbers are in `right` are aligned right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = (
        "  ".join(
            cell.rjust(width) if i in right else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    )
    return "\n".join((indent + line).rstrip() for line in lines)


def filled(text: str, width: int = 80, indent: int = 0) -> str:
    """A text on lines of at most `width` characters; a path or an option stays whole."""
    start = " " * indent
    words = " ".join(text.split())
    return textwrap.fill(
        words, width, initial_indent=start, subsequent_indent=start, break_on_hyphens=False, break_long_words=False
    )


def paragraphs(text: str, width: int = 80) -> str:
    """A docstring for a terminal: its paragraphs, each filled anew."""
    return "\n\n".join(filled(part, width) for part in text.strip().split("\n\n"))


def as_json(facts: dict[str, Any]) -> str:
    """One JSON object on one line, with null for nan and infinities."""
    from llama_jax.runs.metrics import finite

    return json.dumps(finite(facts), ensure_ascii=False)


# --- ends ----------------------------------------------------------------------------------------------------------------


def end_at_once(error: BaseException) -> NoReturn:
    """Say what went wrong and exit with 2, from any thread: an end in order would wait for threads that hang."""
    with suppress(OSError):  # a terminal that has hung up
        print("llama-jax: error:", " ".join(str(error).split("\n")), file=sys.stderr, flush=True)
    os._exit(2)


class _Stopped(KeyboardInterrupt):
    def __init__(self, number: int) -> None:
        self.number = number


@contextmanager
def clean_exit(message: str) -> Iterator[None]:
    """Turn Ctrl-C, SIGTERM and SIGHUP into an exception in the body, after which the process prints a line and exits.

    The exit code is 128 plus the number of the signal, as for a process that the signal kills.
    """

    def stop(number: int, _: FrameType | None) -> None:
        raise _Stopped(number)

    def resend_signal(unraisable: Any) -> None:
        """Send a signal once more that came in a destructor, where Python prints what is raised, and goes on."""
        if isinstance(unraisable.exc_value, _Stopped):
            threading.Timer(0.02, os.kill, (os.getpid(), unraisable.exc_value.number)).start()
        else:
            hook(unraisable)

    before: dict[signal.Signals, Any] = {}
    hook, sys.unraisablehook = sys.unraisablehook, resend_signal
    try:
        for number in ending_signals():
            before[number] = signal.signal(number, stop)
        yield
    except _Stopped as stopped:
        with suppress(OSError):  # a terminal that has hung up
            print(f"\nllama-jax: {message}", file=sys.stderr, flush=True)
        os._exit(128 + stopped.number)
    finally:
        sys.unraisablehook = hook
        for number, handler in before.items():
            signal.signal(number, handler or signal.SIG_DFL)
