"""Signals that ask a process to end, also while its main thread is in compiled code, where Python's handlers do not run."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NoReturn


def ending_signals() -> list[signal.Signals]:
    """The signals that ask a process to end: SIGINT (Ctrl-C), SIGTERM and SIGHUP, without ignored ones, as under nohup."""
    ending = [signal.SIGINT, signal.SIGTERM, *([signal.SIGHUP] if hasattr(signal, "SIGHUP") else [])]
    return [number for number in ending if signal.getsignal(number) is not signal.SIG_IGN]


def watch_signals(act: Callable[[int], object]) -> Callable[[], None]:
    """Call `act(number)` in a thread, at once, for every signal that has a handler, besides the handler: that only runs when
    the main thread is back in Python, which a compilation or a step can keep for minutes.

    Returns:
      A function that ends the watch and starts the one before again. Call both in the main thread.
    """
    read, write = os.pipe()
    os.set_blocking(write, False)
    before = signal.set_wakeup_fd(write, warn_on_full_buffer=False)

    def watch() -> None:
        with os.fdopen(read, "rb", buffering=0) as numbers:
            while number := numbers.read(1):
                act(number[0])

    thread = threading.Thread(target=watch, name="signals", daemon=True)
    thread.start()

    def end() -> None:
        signal.set_wakeup_fd(before)
        os.close(write)
        thread.join()

    return end


def say(text: str) -> None:
    """Print a line to stderr, if it still exists: it does not after a terminal has hung up."""
    with suppress(OSError):
        os.write(2, f"\n{text}\n".encode())


_ending = threading.RLock()  # never released: only the first thread that ends the process prints and exits


def end_command(*_: Any, how: str = "stopped") -> NoReturn:
    """End the process at once, from any thread: the handler of Ctrl-C of the command line.

    At once, for XLA may be compiling in its own threads, which crash when the interpreter shuts down in order; and extension
    modules do not survive an exception while they are imported.
    """
    _ending.acquire()
    say(f"llama-jax: {how}")
    os._exit(128 + signal.SIGINT)


def end_if_command(number: int) -> None:
    """`end_command` if that is the handler of a signal."""
    if signal.getsignal(number) is end_command:
        end_command(number, None)


def install() -> None:
    """Let Ctrl-C end the process within a second wherever it is, unless other code sets a handler of its own."""
    signal.signal(signal.SIGINT, end_command)
    watch_signals(end_if_command)
