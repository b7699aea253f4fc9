"""The metrics of a run: lines of JSON, also sent to TensorBoard, Weights & Biases or MLflow.

The authoritative copy is metrics.jsonl.
"""

from __future__ import annotations

import importlib
import json
import math
import os
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal, Protocol

from llama_jax.errors import TrainingError
from llama_jax.runs.log import Log
from llama_jax.storage.atomic_write import write_atomically

METRICS = "metrics.jsonl"  # in the folder of a run


class Metrics:
    """Appends to ``metrics.jsonl`` in a run's folder, one object per line, each written whole before the next step."""

    def __init__(self, folder: Path) -> None:
        self._path = path = folder / METRICS
        # The last line of a killed run may be incomplete: the next one begins on a new line.
        broken = _last_byte(path) not in (b"", b"\n")
        self._file = path.open("a", encoding="utf-8")
        if broken:
            self._file.write("\n")

    def write(self, line_type: str, step: int, **values: Any) -> None:
        """Write a line. Non-finite numbers become null, since JSON cannot express them.

        Raises:
          TrainingError: the disk is full, or the file is no longer writable.
        """
        values = finite(values)
        try:
            self._file.write(json.dumps({"kind": line_type, "step": step, **values}, ensure_ascii=False) + "\n")
            self._file.flush()
        except OSError as error:
            raise TrainingError(
                f"{self._path} cannot be written to ({error.strerror}); fix that and resume from the last checkpoint with"
                " --resume"
            ) from None

    def close(self) -> None:
        """Close the file."""
        with suppress(OSError):  # write errors were reported
            self._file.close()


def finite(value: Any) -> Any:
    """A value for JSON, with None for each non-finite number in it."""
    if isinstance(value, dict):
        return {name: finite(member) for name, member in value.items()}
    if isinstance(value, list | tuple):
        return [finite(member) for member in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _last_byte(path: Path) -> bytes:
    if not (path.exists() and path.stat().st_size):
        return b""
    with path.open("rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read()


Track = Literal["tensorboard", "wandb", "mlflow"]
TRACKER_PACKAGES: dict[Track, str] = {
    "tensorboard": "tensorboardX",
    "wandb": "wandb",
    "mlflow": "mlflow",
}  # imported modules
TRACKER_NAMES = "trackers.json"  # in the folder of a run: its name in each service, so that a resumed run continues there
SENT_LINE_TYPES = ("train", "validation")  # kinds of lines that are sent


class Tracker(Protocol):
    """A service that receives the metrics.

    Attributes:
      name: name of the run in the service, under which a resumed run continues.
    """

    name: str

    def write(self, step: int, values: dict[str, float]) -> None:
        """Send the numbers of a step, with names like "train/loss"."""

    def close(self) -> None:
        """Send the rest and close."""


def check_trackers(track: Sequence[Track]) -> None:
    """Raise TrainingError for a package that is not installed."""
    for name in track:
        try:
            importlib.import_module(TRACKER_PACKAGES[name])
        except ImportError as error:
            raise TrainingError(
                f'--track {name} needs a package ({error}); install it with pip install -e ".[{name}]"'
            ) from None


class Tracking:
    """All trackers of a run. A tracker that fails is dropped, and the run continues."""

    def __init__(self, track: Sequence[Track], folder: Path, recipe: dict[str, Any], step: int, log: Log) -> None:
        """
        Args:
          recipe: from `recipe.to_dict`, for the services' record of settings.
          step: the step at which the run resumes; 0 for a new run.
        """
        self._log, self._trackers = log, dict[str, Tracker]()
        path = folder / TRACKER_NAMES
        known = json.loads(path.read_text("utf-8")) if path.exists() else {}
        for name in dict.fromkeys(track):
            try:
                self._trackers[name] = tracker = TRACKERS[name](folder, recipe, step, known.get(name))
            except Exception as error:  # services may raise anything
                raise TrainingError(f"{name} cannot record this run: {_error_line(error)}") from None
            known[name] = tracker.name
        if self._trackers:
            with write_atomically(path, raises=TrainingError) as target:
                target.write_text(json.dumps(known, indent=2) + "\n", "utf-8")

    def write(self, line_type: str, step: int, values: dict[str, Any]) -> None:
        """Send the finite numbers of a training or validation line of metrics.jsonl."""
        if line_type not in SENT_LINE_TYPES:
            return
        numbers = {
            f"{line_type}/{name}": float(value)
            for name, value in values.items()
            if isinstance(value, int | float) and math.isfinite(value)
        }
        for name in list(self._trackers):
            self._try(name, lambda tracker: tracker.write(step, numbers))

    def close(self) -> None:
        """Close all."""
        for name in list(self._trackers):
            self._try(name, lambda tracker: tracker.close())

    def _try(self, name: str, use: Callable[[Tracker], None]) -> None:
        try:
            use(self._trackers[name])
        except Exception as error:  # services may raise anything, and no run should end because of its curves
            del self._trackers[name]
            self._log.line(f"{name} failed and gets no more metrics; metrics.jsonl has all of them: {_error_line(error)}")


class _TensorBoard:
    name = "tensorboard"  # the folder itself

    def __init__(self, folder: Path, recipe: dict[str, Any], step: int, known: str | None) -> None:
        from tensorboardX import SummaryWriter  # type: ignore[import-not-found, import-untyped, unused-ignore]  # an extra, without types

        # A resumed run redraws the steps after its checkpoint.
        purge = step + 1 if step else None
        self._writer = SummaryWriter(str(folder / self.name), purge_step=purge, filename_suffix=f".{step}")
        if known is None:
            self._writer.add_text("recipe", f"```\n{json.dumps(recipe, indent=2)}\n```", 0)

    def write(self, step: int, values: dict[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()


class _WandB:
    def __init__(self, folder: Path, recipe: dict[str, Any], step: int, known: str | None) -> None:
        import wandb  # type: ignore[import-not-found, import-untyped, unused-ignore]  # an extra

        called, quiet = folder.resolve().name, wandb.Settings(console="off")
        resume: Any = None if known is None else "allow"
        self._run = wandb.init(name=called, dir=str(folder), config=recipe, id=known, resume=resume, settings=quiet)
        # W&B's own step count only increases, but a resumed run returns to its checkpoint.
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")
        self.name = str(self._run.id)

    def write(self, step: int, values: dict[str, float]) -> None:
        self._run.log({**values, "step": step})

    def close(self) -> None:
        self._run.finish()


class _MLflow:
    def __init__(self, folder: Path, recipe: dict[str, Any], step: int, known: str | None) -> None:
        from mlflow import MlflowClient, entities  # type: ignore[import-not-found, import-untyped, unused-ignore]  # an extra

        self._client, self._metric = MlflowClient(), entities.Metric
        if known is not None:
            self._client.update_run(known, status="RUNNING")
        else:
            experiment_name = os.environ.get("MLFLOW_EXPERIMENT_NAME", "llama_jax")
            experiment = self._client.get_experiment_by_name(experiment_name)
            of = self._client.create_experiment(experiment_name) if experiment is None else experiment.experiment_id
            known = str(self._client.create_run(of, run_name=folder.resolve().name).info.run_id)
            params = [entities.Param(name, str(value)[:500]) for name, value in recipe.items()]
            self._client.log_batch(known, params=params)
        self.name = known

    def write(self, step: int, values: dict[str, float]) -> None:
        now = time.time_ns() // 1_000_000
        metrics = [self._metric(name, value, now, step) for name, value in values.items()]
        self._client.log_batch(self.name, metrics=metrics)

    def close(self) -> None:
        self._client.set_terminated(self.name)


TRACKERS: dict[str, Callable[..., Tracker]] = {"tensorboard": _TensorBoard, "wandb": _WandB, "mlflow": _MLflow}


def _error_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), "") or type(error).__name__
