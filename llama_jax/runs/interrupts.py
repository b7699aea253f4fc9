"""Signals that ask a process to end, even while its main thread is in compiled code, where Python's handlers do not run."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NoReturn


def ending_signals() -> list[signal.Signals]:
    """The signals that ask a process to end: SIGINT (Ctrl-C), SIGTERM and SIGHUP, except ignored ones (as with nohup)."""
    ending = [signal.SIGINT, signal.SIGTERM, *([signal.SIGHUP] if hasattr(signal, "SIGHUP") else [])]
    return [number for number in ending if signal.getsignal(number) is not signal.SIG_IGN]


def watch_signals(act: Callable[[int], object]) -> Callable[[], None]:
    """Call `act(number)` immediately, in a thread, for every signal that has a handler. The handler itself runs only when
    the main thread returns to Python, and a compilation or a step may delay that for minutes.

    Returns:
      A function that ends the watch and restores the previous one. Call both in the main thread.
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
    """Print a line to stderr, unless it is gone because the terminal has hung up."""
    with suppress(OSError):
        os.write(2, f"\n{text}\n".encode())


_ending = threading.RLock()  # never released: only the first thread that ends the process prints and exits


def end_command(*_: Any, how: str = "stopped") -> NoReturn:
    """End the process immediately, from any thread: the command line's handler for Ctrl-C.

    There is no regular shutdown, because XLA may be compiling in its own threads, which would crash, and because extension
    modules do not survive an exception while they are being imported.
    """
    _ending.acquire()
    say(f"llama-jax: {how}")
    os._exit(128 + signal.SIGINT)


def end_if_command(number: int) -> None:
    """Call `end_command` if it is the handler of the signal."""
    if signal.getsignal(number) is end_command:
        end_command(number, None)


def install() -> None:
    """Make Ctrl-C end the process within a second at any point, unless other code sets its own handler."""
    signal.signal(signal.SIGINT, end_command)
    watch_signals(end_if_command)
