"""Signals that ask a run to stop."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterable
from types import FrameType
from typing import Any, NoReturn

from llama_jax.interrupts import end_command, end_if_command, ending_signals, say, watch_signals
from llama_jax.parallel.stop_signal import StopVote
from llama_jax.runs.log import duration

MAX_STEPS_BETWEEN_VOTES = 250
VOTE_SECONDS = 0.5  # between votes: one takes up to 4 ms of waiting for each other, measured on two busy cores


class StopRequest:
    """Notes SIGTERM, SIGHUP and Ctrl-C, so that the step in progress can end and be saved; a second Ctrl-C leaves at once.

    Before this process has taken a step there is nothing to save: Ctrl-C then ends the command line at once, and within a
    step too, since that can take minutes; with several processes only until the first step begins. A second SIGTERM does
    not leave: schedulers send it to a process and to its parent, which passes it on. Outside the main thread, where no
    handler can be set, nothing is noted.

    Attributes:
      name: the signal's name once one has come, else None.
      kept: the newest step in the folder of the run, or None.
      seconds: of a step, once one is done, else None.
    """

    def __init__(self, *, alone: bool = True, quiet: bool = False) -> None:
        """`alone` means that there is one process; `quiet` is for all processes but the first."""
        self.name: str | None = None
        self.kept: int | None = None
        self.seconds: float | None = None
        self._alone, self._quiet = alone, quiet
        self._said = False
        self._before: dict[int, Any] = {}
        self._end_watch: Callable[[], None] | None = None

    def __enter__(self) -> StopRequest:
        if threading.current_thread() is threading.main_thread():
            self._is_command = self._alone and signal.getsignal(signal.SIGINT) is end_command
            self._end_watch = watch_signals(self._act)
            if self._is_command:
                self._install([signal.SIGINT])
        return self

    def begin_steps(self) -> None:
        """From here on there may be something to save."""
        if self._end_watch is not None:
            self._install(ending_signals())

    def _install(self, numbers: Iterable[signal.Signals]) -> None:
        for number in numbers:
            before = signal.signal(number, self._note)
            self._before.setdefault(number, before)

    def __exit__(self, *error: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler or signal.SIG_DFL)
        if self._end_watch is not None:
            self._end_watch()

    def _note(self, number: int, frame: FrameType | None) -> None:
        """The handler, in the main thread, where the loop finds the name before its next step."""
        if number == signal.SIGINT and self._ends_at_once:
            self._leave()
        self.name = self.name or signal.Signals(number).name

    def _act(self, number: int) -> None:
        """In the thread of the watch."""
        if number not in self._before:
            end_if_command(number)
            return
        if number == signal.SIGINT and (self._said or self._ends_at_once):
            self._leave()
        self.name = self.name or signal.Signals(number).name
        if not self._said and not self._quiet:
            seconds = f", which takes about {duration(self.seconds)}" if self.seconds and self.seconds >= 1 else ""
            say(f"{self.name}: finishing and saving this step{seconds}; Ctrl-C stops at once{self._goes_on}")
        self._said = True

    @property
    def _ends_at_once(self) -> bool:
        return self._is_command and self.seconds is None

    @property
    def _goes_on(self) -> str:
        return "" if self.kept is None else f", and --resume then continues from step {self.kept}"

    def _leave(self) -> NoReturn:
        lost = "before its first step; there was nothing to save" if self.seconds is None else "without saving"
        end_command(how=f"stopped {lost}{self._goes_on.replace(' then', '')}")


class Stopping:
    """Whether to stop before the next step: all processes stop after the same one, whichever got the signal.

    They vote every half second, or at every step if one takes longer. The step of the next vote follows from the step time
    agreed on in the last one, so that it is the same in all processes.
    """

    def __init__(self, request: StopRequest, processes: int) -> None:
        self.request = request
        self._vote = StopVote() if processes > 1 else None
        self._name: str | None = None
        self._steps = 0  # since the last vote
        self._every = 1
        self._last = time.perf_counter()

    @property
    def name(self) -> str | None:
        """The name of the signal that all processes know of, else None."""
        return self.request.name if self._vote is None else self._name

    def now(self) -> bool:
        """Call once before each step, in every process."""
        if self._vote is None or self._name is not None:
            return self.name is not None
        votes = self._vote.read()
        if votes is not None:
            number, microseconds = votes
            wanted = round(VOTE_SECONDS * 1e6 / max(microseconds, 1))
            self._every = max(
                min(wanted, 2 * self._every, MAX_STEPS_BETWEEN_VOTES), 1
            )  # gradually: one quick step proves little
            if number:
                self._name = signal.Signals(number).name
                return True
        self._steps += 1
        if self._steps >= self._every:
            now = time.perf_counter()
            number = 0 if self.request.name is None else int(signal.Signals[self.request.name])
            self._vote.cast(number, round((now - self._last) / self._steps * 1e6))
            self._steps, self._last = 0, now
        return False
