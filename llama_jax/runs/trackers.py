"""A run's metrics in other services: TensorBoard, Weights & Biases, MLflow. The authoritative copy is metrics.jsonl."""

from __future__ import annotations

import importlib
import json
import math
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal, Protocol, get_args

from llama_jax.runs.errors import TrainingError
from llama_jax.runs.log import Log
from llama_jax.storage.atomic_write import write_atomically

Track = Literal["tensorboard", "wandb", "mlflow"]
PACKAGES: dict[Track, str] = {"tensorboard": "tensorboardX", "wandb": "wandb", "mlflow": "mlflow"}  # what is imported
NAMES = "trackers.json"  # in the folder of a run: its name in each service, so that a resumed run continues there
KINDS = ("train", "validation")  # whose numbers are sent


class Tracker(Protocol):
    """A service that gets the metrics.

    Attributes:
      name: of the run in the service, by which a resumed run continues there.
    """

    name: str

    def write(self, step: int, values: dict[str, float]) -> None:
        """The numbers of a step, by names like "train/loss"."""

    def close(self) -> None:
        """Send the rest and close."""


def check_trackers(track: Sequence[Track]) -> None:
    """Raise TrainingError for an unknown name, or a package that is not installed."""
    for name in track:
        if name not in PACKAGES:
            raise TrainingError(f"track={name!r} must be one of {', '.join(get_args(Track))}")
        try:
            importlib.import_module(PACKAGES[name])
        except ImportError as error:
            raise TrainingError(
                f'--track {name} needs a package ({error}); get it with pip install -e ".[{name}]"'
            ) from None


class Tracking:
    """All trackers of a run. One that fails is dropped, and the run continues."""

    def __init__(self, track: Sequence[Track], folder: Path, recipe: dict[str, Any], step: int, log: Log) -> None:
        """
        Args:
          recipe: as `recipe.to_dict` gives it, for the services' own record of settings.
          step: at which the run is resumed; 0 for a new one.
        """
        self._log, self._trackers = log, dict[str, Tracker]()
        path = folder / NAMES
        known = json.loads(path.read_text("utf-8")) if path.exists() else {}
        for name in dict.fromkeys(track):
            try:
                self._trackers[name] = tracker = MADE[name](folder, recipe, step, known.get(name))
            except Exception as error:  # services may raise anything
                raise TrainingError(f"{name} cannot record this run: {_first_line(error)}") from None
            known[name] = tracker.name
        if self._trackers:
            with write_atomically(path, raises=TrainingError) as target:
                target.write_text(json.dumps(known, indent=2) + "\n", "utf-8")

    def write(self, kind: str, step: int, values: dict[str, Any]) -> None:
        """Send the finite numbers of a line of metrics.jsonl, of training or of validation."""
        if kind not in KINDS:
            return
        numbers = {
            f"{kind}/{name}": float(value)
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
            self._log.line(f"{name} failed and gets no more metrics; metrics.jsonl has them all: {_first_line(error)}")


class _TensorBoard:
    name = "tensorboard"  # the folder itself

    def __init__(self, folder: Path, recipe: dict[str, Any], step: int, known: str | None) -> None:
        from tensorboardX import SummaryWriter  # type: ignore[import-not-found, import-untyped, unused-ignore]  # an extra, without types

        # A resumed run draws the steps after its checkpoint anew.
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
        # Its own count of steps only rises, and a resumed run goes back to its checkpoint.
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
            wanted = os.environ.get("MLFLOW_EXPERIMENT_NAME", "llama_jax")
            experiment = self._client.get_experiment_by_name(wanted)
            of = self._client.create_experiment(wanted) if experiment is None else experiment.experiment_id
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


MADE: dict[str, Callable[..., Tracker]] = {"tensorboard": _TensorBoard, "wandb": _WandB, "mlflow": _MLflow}


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), "") or type(error).__name__
