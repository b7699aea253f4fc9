"""Stop signals: how a run ends after the current step, in all processes after the same step."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterable
from types import FrameType
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from llama_jax.runs.interrupts import end_command, end_if_command, ending_signals, say, watch_signals
from llama_jax.runs.log import duration

MAX_STEPS_BETWEEN_VOTES = 250
VOTE_SECONDS = 0.5  # between votes; a vote takes up to 4 ms, measured on two busy cores


class StopRequest:
    """Records SIGTERM, SIGHUP and Ctrl-C, so that the current step can finish and be saved; a second Ctrl-C exits at once.

    Before the first step is done, there is nothing to save: Ctrl-C then ends the command line at once, even within the step,
    which can take minutes; with several processes only until the first step begins. A second SIGTERM does not exit at once:
    schedulers send it to a process and to its parent, which passes it on. Outside the main thread, where no handler can be
    set, signals are not recorded.

    Attributes:
      name: the signal's name once one was received, else None.
      saved_step: the newest step in the folder of the run, or None.
      step_seconds: duration of a step, once one is done, else None.
    """

    def __init__(self, *, alone: bool = True, quiet: bool = False) -> None:
        """`alone` means that there is one process; `quiet` is for all processes but the first."""
        self.name: str | None = None
        self.saved_step: int | None = None
        self.step_seconds: float | None = None
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
        """Handle all stop signals from now on: there may be a step to save."""
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
        """The signal handler, in the main thread. The loop reads `name` before its next step."""
        if number == signal.SIGINT and self._ends_at_once:
            self._leave()
        self.name = self.name or signal.Signals(number).name

    def _act(self, number: int) -> None:
        """Called in the thread that watches for signals, also while the main thread is busy."""
        if number not in self._before:
            end_if_command(number)
            return
        if number == signal.SIGINT and (self._said or self._ends_at_once):
            self._leave()
        self.name = self.name or signal.Signals(number).name
        if not self._said and not self._quiet:
            seconds = ""
            if self.step_seconds and self.step_seconds >= 1:
                seconds = f", which takes about {duration(self.step_seconds)}"
            say(f"{self.name}: finishing and saving this step{seconds}; Ctrl-C stops at once{self._goes_on}")
        self._said = True

    @property
    def _ends_at_once(self) -> bool:
        return self._is_command and self.step_seconds is None

    @property
    def _goes_on(self) -> str:
        return "" if self.saved_step is None else f", and --resume then continues from step {self.saved_step}"

    def _leave(self) -> NoReturn:
        lost = "before its first step; there was nothing to save" if self.step_seconds is None else "without saving"
        end_command(how=f"stopped {lost}{self._goes_on.replace(' then', '')}")


class Stopping:
    """Decides whether to stop before the next step. All processes stop after the same step, whichever got the signal.

    They vote every half second, or at every step if a step takes longer. The number of steps until the next vote is computed
    from the maximum step time in the last vote, so that it is the same in all processes.
    """

    def __init__(self, request: StopRequest, processes: int) -> None:
        self.request = request
        self._vote = StopVote() if processes > 1 else None
        self._name: str | None = None
        self._steps = 0  # since the last vote
        self._vote_every = 1  # steps
        self._last_vote_time = time.perf_counter()

    @property
    def name(self) -> str | None:
        """The name of the signal, once all processes know of it, else None."""
        return self.request.name if self._vote is None else self._name

    def should_stop(self) -> bool:
        """Whether to stop now. Every process calls it exactly once before each step."""
        if self._vote is None or self._name is not None:
            return self.name is not None
        votes = self._vote.read()
        if votes is not None:
            number, microseconds = votes
            vote_every = round(VOTE_SECONDS * 1e6 / max(microseconds, 1))
            # At most doubled: a single fast step says little about the next ones.
            self._vote_every = max(min(vote_every, 2 * self._vote_every, MAX_STEPS_BETWEEN_VOTES), 1)
            if number:
                self._name = signal.Signals(number).name
                return True
        self._steps += 1
        if self._steps >= self._vote_every:
            now = time.perf_counter()
            number = 0 if self.request.name is None else int(signal.Signals[self.request.name])
            self._vote.cast(number, round((now - self._last_vote_time) / self._steps * 1e6))
            self._steps, self._last_vote_time = 0, now
        return False


class StopVote:
    """A vote on stop signals, by which all processes stop after the same step.

    Every process contributes two numbers, and all receive the maximum of each.

    An all-reduce over one device per process, dispatched between two steps and read one step later, so that no process waits
    for it.
    """

    def __init__(self) -> None:
        first_device = {device.process_index: device for device in reversed(jax.devices())}  # of each process
        mesh = Mesh(np.array([first_device[i] for i in sorted(first_device)]), ("process",), axis_types=(AxisType.Auto,))
        self._device = first_device[jax.process_index()]
        self._shape = len(first_device), 2
        self._sharding = NamedSharding(mesh, P("process"))
        self._max = jax.jit(lambda votes: jnp.max(votes, axis=0), out_shardings=NamedSharding(mesh, P()))
        self._result: jax.Array | None = None

    def cast(self, signal: int, microseconds: int) -> None:
        """Contribute this process's numbers; all processes must call this between the same steps."""
        vote = jax.device_put(np.array([[signal, min(microseconds, 2**31 - 1)]], np.int32), self._device)
        self._result = self._max(jax.make_array_from_single_device_arrays(self._shape, self._sharding, [vote]))

    def read(self) -> tuple[int, int] | None:
        """The maxima of the last vote, at the first call after it; else None."""
        if self._result is None:
            return None
        (signal, microseconds), self._result = np.asarray(self._result).tolist(), None
        return signal, microseconds
