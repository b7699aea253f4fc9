"""Signals and fatal errors: some work ends in order, so that no temporary files are left, and some ends at once."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any, NoReturn


def end_at_once(error: BaseException) -> NoReturn:
    """Say what went wrong and exit with 2, from any thread: an end in order would wait for threads that hang."""
    with suppress(OSError):  # a terminal that has hung up
        print("llama-jax: error:", " ".join(str(error).split("\n")), file=sys.stderr, flush=True)
    os._exit(2)


class _Stopped(KeyboardInterrupt):
    def __init__(self, number: int) -> None:
        self.number = number


@contextmanager
def ending_in_order(said: str) -> Iterator[None]:
    """Turn Ctrl-C, SIGTERM and SIGHUP into an exception in the body, after which the process prints a line and exits.

    The exit code is 128 plus the number of the signal, as for a process that the signal kills.
    """
    from llama_jax.runs.signals import ending_signals

    def stop(number: int, _: FrameType | None) -> None:
        raise _Stopped(number)

    def again(unraisable: Any) -> None:
        """Send a signal once more that came in a destructor, where Python prints what is raised, and goes on."""
        if isinstance(unraisable.exc_value, _Stopped):
            threading.Timer(0.02, os.kill, (os.getpid(), unraisable.exc_value.number)).start()
        else:
            hook(unraisable)

    before: dict[signal.Signals, Any] = {}
    hook, sys.unraisablehook = sys.unraisablehook, again
    try:
        for number in ending_signals():
            before[number] = signal.signal(number, stop)
        yield
    except _Stopped as stopped:
        with suppress(OSError):  # a terminal that has hung up
            print(f"\nllama-jax: {said}", file=sys.stderr, flush=True)
        os._exit(128 + stopped.number)
    finally:
        sys.unraisablehook = hook
        for number, handler in before.items():
            signal.signal(number, handler or signal.SIG_DFL)
