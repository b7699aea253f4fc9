"""A profile of some steps of a run, for TensorBoard or Perfetto."""

from __future__ import annotations

from pathlib import Path

import jax

from llama_jax.runs.log import Log
from llama_jax.training.step import TrainState


class Profile:
    """Profiles the steps of a range, counted from 1, into `trace` in a run's folder; none where the range is None."""

    def __init__(self, folder: Path, steps: range | None, log: Log) -> None:
        self._folder, self._steps, self._log = folder / "trace", steps, log
        self._running = False

    def before(self, step: int, state: TrainState) -> None:
        """Begin or end where the range does; call before `step` is taken, with the state after the one before."""
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
        """End one that is running."""
        if self._running:
            self._running = False
            jax.profiler.stop_trace()
            self._log.line(f"profile in {self._folder}")

    def tell_of_missed(self, done: int) -> None:
        """Say so where the range began before the steps that are done."""
        if self._steps and done >= self._steps.start:
            self._log.line(f"no profile: step {self._steps.start} has been taken before")
