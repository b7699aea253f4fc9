"""A profile of some steps of a run, for TensorBoard or Perfetto."""

from __future__ import annotations

from pathlib import Path

import jax

from llama_jax.runs.log import Log
from llama_jax.training.step import TrainState


class Profile:
    """Profiles a range of steps, counted from 1, into `trace` in a run's folder; nothing if the range is None."""

    def __init__(self, folder: Path, steps: range | None, log: Log) -> None:
        self._folder, self._steps, self._log = folder / "trace", steps, log
        self._running = False

    def before(self, step: int, state: TrainState) -> None:
        """Start or stop the profile at the ends of the range; call before `step`, with the state after the one before."""
        if self._steps and step in (self._steps.start, self._steps.stop):
            jax.block_until_ready(state)
            self.end()
            if step == self._steps.start:
                # Without Python's own frames: the hook that records them ends a thread which starts at a bad moment, and
                # a save whose thread has died waits for it.
                options = jax.profiler.ProfileOptions()
                options.python_tracer_level = 0
                jax.profiler.start_trace(str(self._folder), profiler_options=options)
                self._running = True

    def end(self) -> None:
        """Stop a profile that is running."""
        if self._running:
            self._running = False
            jax.profiler.stop_trace()
            self._log.line(f"profile in {self._folder}")

    def tell_of_missed(self, done: int) -> None:
        """Report it if the range began before the first step of this process."""
        if self._steps and done >= self._steps.start:
            self._log.line(f"no profile: step {self._steps.start} has been taken before")
