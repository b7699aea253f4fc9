"""Signals that ask a run to stop."""

from __future__ import annotations

import os
import signal
import threading
import time
from contextlib import suppress
from types import FrameType
from typing import Any

from llama_jax.parallel.stop_signal import StopVote

MOST_STEPS = 250  # between votes
VOTE_SECONDS = 0.5  # between votes: one takes up to 4 ms of waiting for each other, measured on two busy cores


class StopRequest:
    """Notes SIGTERM, SIGHUP and the first Ctrl-C, so that the step in progress can end and be saved.

    A second Ctrl-C leaves at once. A second SIGTERM does not: schedulers send it to a process and to its parent, which
    passes it on. `name` is the signal's name once one has come, else None. Outside the main thread, where no handler can be
    set, nothing is noted.
    """

    def __init__(self, *, quiet: bool = False) -> None:
        """`quiet` is for all processes but the first."""
        self._quiet = quiet
        self.name: str | None = None
        self._before: dict[int, Any] = {}

    def __enter__(self) -> StopRequest:
        if threading.current_thread() is threading.main_thread():
            for number in ending_signals():
                self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler or signal.SIG_DFL)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.name is None:
            self.name = signal.Signals(number).name
            if not self._quiet:
                _say(f"{self.name}: this step ends and is saved; Ctrl-C leaves at once")
        elif number == signal.SIGINT:
            _say("llama-jax: stopped without saving")
            os._exit(128 + number)


def ending_signals() -> list[signal.Signals]:
    """The signals that ask a process to end: SIGINT (Ctrl-C), SIGTERM and SIGHUP, without ignored ones, as under nohup."""
    ending = [signal.SIGINT, signal.SIGTERM, *([signal.SIGHUP] if hasattr(signal, "SIGHUP") else [])]
    return [number for number in ending if signal.getsignal(number) is not signal.SIG_IGN]


def _say(text: str) -> None:
    """Print a line to stderr, if it still exists: it does not after a terminal has hung up."""
    with suppress(OSError):
        os.write(2, f"\n{text}\n".encode())


class Stopping:
    """Whether to stop before the next step: all processes stop after the same one, whichever got the signal.

    They vote every half second, or at every step if one takes longer. The step of the next vote follows from the step time
    agreed on in the last one, so that it is the same in all processes.
    """

    def __init__(self, request: StopRequest, processes: int) -> None:
        self._request = request
        self._vote = StopVote() if processes > 1 else None
        self._name: str | None = None
        self._steps = 0  # since the last vote
        self._every = 1
        self._last = time.perf_counter()

    @property
    def name(self) -> str | None:
        """The name of the signal that all processes know of, else None."""
        return self._request.name if self._vote is None else self._name

    def now(self) -> bool:
        """Call once before each step, in every process."""
        if self._vote is None or self._name is not None:
            return self.name is not None
        votes = self._vote.read()
        if votes is not None:
            number, microseconds = votes
            wanted = round(VOTE_SECONDS * 1e6 / max(microseconds, 1))
            self._every = max(min(wanted, 2 * self._every, MOST_STEPS), 1)  # gradually: one quick step proves little
            if number:
                self._name = signal.Signals(number).name
                return True
        self._steps += 1
        if self._steps >= self._every:
            now = time.perf_counter()
            number = 0 if self._request.name is None else int(signal.Signals[self._request.name])
            self._vote.cast(number, round((now - self._last) / self._steps * 1e6))
            self._steps, self._last = 0, now
        return False
