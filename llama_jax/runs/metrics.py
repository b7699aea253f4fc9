"""The metrics of a run: lines of JSON, read as arrays and sent to TensorBoard, Weights & Biases or MLflow.

The authoritative copy is metrics.jsonl.
"""

from __future__ import annotations

import importlib
import json
import math
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any, Literal, Protocol, get_args

import numpy as np

from llama_jax.errors import TrainingError, UserError, reading
from llama_jax.runs.log import Log
from llama_jax.storage import Location, StoredPath, locate, resolved
from llama_jax.storage.atomic_write import write_atomically

METRICS = "metrics.jsonl"  # in the folder of a run
PARTS = "metrics"  # in a store, which cannot append: a folder of 000001.jsonl and so on


class Metrics:
    """Appends to ``metrics.jsonl`` in a run's folder, one object per line, each written whole before the next step."""

    def __init__(self, folder: Path) -> None:
        self._path = path = folder / METRICS
        # The last line of a killed run may be incomplete: the next one begins on a new line.
        broken = _last_byte(path) not in (b"", b"\n")
        self._file = path.open("a", encoding="utf-8")
        if broken:
            self._file.write("\n")

    def write(self, kind: str, step: int, **values: Any) -> None:
        """Write a line. Non-finite numbers become null, since JSON cannot express them.

        Raises:
          TrainingError: the disk is full, or the file is no longer writable.
        """
        values = finite(values)
        try:
            self._file.write(json.dumps({"kind": kind, "step": step, **values}, ensure_ascii=False) + "\n")
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
        return {name: finite(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _last_byte(path: Path) -> bytes:
    if not (path.exists() and path.stat().st_size):
        return b""
    with path.open("rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read()


@dataclass(frozen=True)
class RunHistory:
    """The metrics of a run, in the order of its steps.

    Attributes:
      name: unique name from the folder's path.
      train: float64[n] each, by the names of `TRAIN_METRICS` and available `OPTIONAL_METRICS`; nan if a value is missing or
        not finite.
      validation: float64[m] each, likewise by `VALIDATION_METRICS`, `OPTIONAL_METRICS` and names that begin with
        `SOURCE_PREFIX`; tokens are from the training line of that step.
      unreadable: line numbers, from 1, of incomplete lines of a run that was killed while writing.
    """

    name: str
    train: dict[str, np.ndarray]
    validation: dict[str, np.ndarray]
    unreadable: tuple[int, ...] = ()


TRAIN_METRICS = ("step", "tokens", "loss", "learning_rate", "grad_norm", "tokens_per_second")
VALIDATION_METRICS = ("step", "tokens", "loss")
READERS = 8  # parts in a store read concurrently
SOURCE_PREFIX = "loss/"  # before the name of a source
# Metrics of only some kinds of runs, each drawn in a separate panel.
OPTIONAL_METRICS = {
    "reward": "Reward",
    "length": "Answers, tokens",
    "stopped": "Share of answers that ended",
    "flat": "Share of groups without variance",
    "clipped": "Share of tokens that were clipped",
    "kl": "Divergence from the reference, nats per token",
}


def read_run(folder: str | os.PathLike[str]) -> RunHistory:
    """The metrics of a run's folder.

    The last of several lines for a step counts, and if a run was resumed at a step, lines of later steps by earlier
    processes are dropped.

    Raises:
      UserError: the folder has no metrics, or none of training.
    """
    where = locate(folder)
    with reading(where, UserError):
        files = _files(resolved(where))
        if not files:
            raise UserError(f"{folder} holds no {METRICS}; pass the folder of a run, the --workdir of llama-jax train")

        def read(file: Location) -> bytes:
            with file.open("rb") as opened:
                return opened.read()

        with ThreadPoolExecutor(READERS) as pool:
            parts = list(pool.map(read, files))
    kept: dict[str, dict[int, dict[str, Any]]] = {"train": {}, "validation": {}}
    unreadable = []
    for number, found in read_lines(parts):
        try:
            step, kind = int(found["step"]), str(found["kind"])
        except (ValueError, TypeError, KeyError, OverflowError):
            unreadable.append(number)
            continue
        if kind == "event" and found.get("event") in ("start", "resume"):
            for lines in kept.values():
                for later in [one for one in lines if one > step]:
                    del lines[later]
        elif kind in kept:
            kept[kind][step] = found
    if not kept["train"]:
        damage = f"; {len(unreadable)} of its lines are incomplete" if unreadable else ""
        raise UserError(f"{where / METRICS} has no line of training to draw{damage}; has the run logged a step yet?")
    train, validation = _columns(kept["train"], TRAIN_METRICS), _columns(kept["validation"], VALIDATION_METRICS)
    known = np.isfinite(train["tokens"])
    if known.any():
        validation["tokens"] = np.interp(validation["step"], train["step"][known], train["tokens"][known])
    return RunHistory(resolved(where).name, train, validation, tuple(unreadable))


def read_lines(parts: Iterable[bytes]) -> Iterator[tuple[int, Any]]:
    """The non-empty lines of metrics with their numbers from 1; None for an incomplete line."""
    for number, line in enumerate(chain.from_iterable(part.splitlines() for part in parts), 1):
        if line.strip():
            try:
                yield number, json.loads(line)
            except (ValueError, RecursionError):
                yield number, None


def read_runs(folders: Sequence[str | os.PathLike[str]]) -> list[RunHistory]:
    """The metrics of several folders, each with a unique name: the shortest unique end of its path.

    Raises:
      UserError: no folder, a folder given twice, or one without metrics.
    """
    if not folders:
        raise UserError("no run given; pass the folder of at least one")
    places = [resolved(locate(folder)) for folder in folders]
    parts = [tuple(str(place).split("/")) if isinstance(place, StoredPath) else place.parts for place in places]
    for i, folder in enumerate(folders):
        if parts[i] in parts[:i]:
            raise UserError(f"{folder} is given twice; one curve would hide the other")
    runs = []
    for i, folder in enumerate(folders):
        ends = (parts[i][-depth:] for depth in range(1, len(parts[i]) + 1))
        end = next(end for end in ends if sum(other[-len(end) :] == end for other in parts) == 1)
        runs.append(replace(read_run(folder), name=os.path.join(*end)))
    return runs


def _files(folder: Location) -> list[Location]:
    """The files of a run's metrics, in order: parts from a store, and a single file from a disk.

    If a run has been on both, the older lines are in the parts for a folder on disk, and in the file for one in a store.
    """
    whole: list[Location] = [folder / METRICS] if (folder / METRICS).is_file() else []
    parts: list[Location] = []
    if (folder / PARTS).is_dir():
        parts = sorted((folder / PARTS).glob("*.jsonl"), key=lambda part: part.name)
    return [*whole, *parts] if isinstance(folder, StoredPath) else [*parts, *whole]


def _columns(lines: dict[int, dict[str, Any]], usual: Sequence[str]) -> dict[str, np.ndarray]:
    """All lines' values by name in order of steps, nan if not a finite number: float64[n] each."""
    present = dict.fromkeys(name for line in lines.values() for name in line)
    sources = [name for name in present if name.startswith(SOURCE_PREFIX)]
    rows = [lines[step] | {"step": step} for step in sorted(lines)]
    return {
        name: np.array(
            [
                float(value) if isinstance(value := row.get(name), int | float) and abs(value) < 1e300 else np.nan
                for row in rows
            ]
        )  # an integer can be too large for a float
        for name in (*usual, *(name for name in OPTIONAL_METRICS if name in present), *sources)
    }


Track = Literal["tensorboard", "wandb", "mlflow"]
TRACKER_PACKAGES: dict[Track, str] = {
    "tensorboard": "tensorboardX",
    "wandb": "wandb",
    "mlflow": "mlflow",
}  # imported modules
TRACKER_NAMES = "trackers.json"  # in the folder of a run: its name in each service, so that a resumed run continues there
SENT_KINDS = ("train", "validation")  # kinds of lines that are sent


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
    """Raise TrainingError for an unknown name, or a package that is not installed."""
    for name in track:
        if name not in TRACKER_PACKAGES:
            raise TrainingError(f"track={name!r} must be one of {', '.join(get_args(Track))}")
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
                raise TrainingError(f"{name} cannot record this run: {_first_line(error)}") from None
            known[name] = tracker.name
        if self._trackers:
            with write_atomically(path, raises=TrainingError) as target:
                target.write_text(json.dumps(known, indent=2) + "\n", "utf-8")

    def write(self, kind: str, step: int, values: dict[str, Any]) -> None:
        """Send the finite numbers of a training or validation line of metrics.jsonl."""
        if kind not in SENT_KINDS:
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
            self._log.line(f"{name} failed and gets no more metrics; metrics.jsonl has all of them: {_first_line(error)}")


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


TRACKERS: dict[str, Callable[..., Tracker]] = {"tensorboard": _TensorBoard, "wandb": _WandB, "mlflow": _MLflow}


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), "") or type(error).__name__
