"""The metrics of a run: written as lines of JSON, and read as arrays."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from llama_jax.errors import TrainingError, UserError, reading
from llama_jax.storage import Location, StoredPath, locate, resolved

METRICS = "metrics.jsonl"  # in the folder of a run
PARTS = "metrics"  # of one in a store, which appends to nothing: a folder of 000001.jsonl and so on


class Metrics:
    """Appends to ``metrics.jsonl`` in a run's folder, one object a line, each written whole before the next step."""

    def __init__(self, folder: Path) -> None:
        self._path = path = folder / METRICS
        # The last line of a killed run may be incomplete: the next one begins on a new line.
        broken = _last_byte(path) not in (b"", b"\n")
        self._file = path.open("a", encoding="utf-8")
        if broken:
            self._file.write("\n")

    def write(self, kind: str, step: int, **values: Any) -> None:
        """Write a line. A number that is not finite becomes null, for JSON cannot express it.

        Raises:
          TrainingError: the disk is full, or the file cannot be written to any more.
        """
        values = finite(values)
        try:
            self._file.write(json.dumps({"kind": kind, "step": step, **values}, ensure_ascii=False) + "\n")
            self._file.flush()
        except OSError as error:
            raise TrainingError(
                f"{self._path} cannot be written to ({error.strerror}); fix that and go on from the last checkpoint with"
                " --resume"
            ) from None

    def close(self) -> None:
        """End it."""
        with suppress(OSError):  # what could not be written has been told of
            self._file.close()


def finite(value: Any) -> Any:
    """A value as JSON can hold it: None for each number in it that is not finite."""
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
      name: of its folder.
      train: float64[n] each, by the names of `TRAIN` and those of `MORE` that it has; nan where a value is missing or not
        finite.
      validation: float64[m] each, likewise by `VALIDATION`, `MORE` and names that begin with `OF_SOURCE`; tokens are those
        of the training line at that step.
      unreadable: numbers, from 1, of incomplete lines, left by a run that was killed while it wrote.
    """

    name: str
    train: dict[str, np.ndarray]
    validation: dict[str, np.ndarray]
    unreadable: tuple[int, ...] = ()


TRAIN = ("step", "tokens", "loss", "learning_rate", "grad_norm", "tokens_per_second")
VALIDATION = ("step", "tokens", "loss")
READERS = 8  # of parts in a store, at a time
OF_SOURCE = "loss/"  # before the name of a source
# What runs of some kinds have beside, in panels of their own.
MORE = {
    "reward": "Reward",
    "length": "Answers, tokens",
    "stopped": "Share of answers that ended",
    "flat": "Share of groups without variance",
    "clipped": "Share of tokens that were clipped",
    "kl": "Divergence from the reference, nats per token",
}


def read_run(folder: str | os.PathLike[str]) -> RunHistory:
    """The metrics of a run's folder.

    Of several lines for a step the last one counts, and where a run was resumed at a step, lines of later steps that an
    earlier process wrote are dropped.

    Raises:
      UserError: no metrics there, or none of training.
    """
    where = locate(folder)
    with reading(where, UserError):
        files = _files(resolved(where))
        if not files:
            raise UserError(f"{folder} holds no {METRICS}; give the folder of a run, the --workdir of llama-jax train")
        with ThreadPoolExecutor(READERS) as pool:
            parts = list(pool.map(_content, files))
    kept: dict[str, dict[int, dict[str, Any]]] = {"train": {}, "validation": {}}
    unreadable = []
    for number, line in enumerate(chain.from_iterable(part.splitlines() for part in parts), 1):
        try:
            found = json.loads(line)
            step, kind = int(found["step"]), str(found["kind"])
        except (ValueError, TypeError, KeyError, OverflowError, RecursionError):
            if line.strip():
                unreadable.append(number)
            continue
        if kind == "event" and found.get("event") in ("start", "resume"):
            for lines in kept.values():
                for later in [one for one in lines if one > step]:
                    del lines[later]
        elif kind in kept:
            kept[kind][step] = found
    if not kept["train"]:
        damage = f"; {len(unreadable)} of its lines are not whole" if unreadable else ""
        raise UserError(f"{where / METRICS} has no line of training to draw{damage}; has the run logged a step yet?")
    train, validation = (
        {name: _column(lines, name) for name in (*names, *_more(lines.values()))}
        for lines, names in ((kept["train"], TRAIN), (kept["validation"], VALIDATION))
    )
    known = np.isfinite(train["tokens"])
    if known.any():
        validation["tokens"] = np.interp(validation["step"], train["step"][known], train["tokens"][known])
    return RunHistory(resolved(where).name, train, validation, tuple(unreadable))


def read_runs(folders: Sequence[str | os.PathLike[str]]) -> list[RunHistory]:
    """The metrics of several folders, each with a unique name: as much of the end of its path as that needs.

    Raises:
      UserError: no folder, one that is given twice, or one without metrics.
    """
    if not folders:
        raise UserError("no run was given; give the folder of at least one")
    parts = [_parts(locate(folder)) for folder in folders]
    for i, folder in enumerate(folders):
        if parts[i] in parts[:i]:
            raise UserError(f"{folder} is given twice; one curve would hide the other")
    runs = [read_run(folder) for folder in folders]
    return [replace(run, name=_shortest(part, parts)) for run, part in zip(runs, parts, strict=True)]


def _files(folder: Location) -> list[Location]:
    """Those that hold a run's metrics, in order: what was written in parts, to a store, and in one file, to a disk.

    Of a run that has been on both, the older are the former on a disk, and the latter in a store.
    """
    whole: list[Location] = [folder / METRICS] if (folder / METRICS).is_file() else []
    parts: list[Location] = []
    if (folder / PARTS).is_dir():
        parts = sorted((folder / PARTS).glob("*.jsonl"), key=lambda part: part.name)
    return [*whole, *parts] if isinstance(folder, StoredPath) else [*parts, *whole]


def _content(file: Location) -> bytes:
    with file.open("rb") as opened:
        return opened.read()


def _parts(path: Location) -> tuple[str, ...]:
    return tuple(str(path).split("/")) if isinstance(path, StoredPath) else resolved(path).parts


def _shortest(path: tuple[str, ...], paths: Sequence[tuple[str, ...]]) -> str:
    """The shortest end of a path that tells it from the others."""
    depth = next(n for n in range(1, len(path) + 1) if sum(other[-n:] == path[-n:] for other in paths) == 1)
    return os.path.join(*path[-depth:])


def _more(lines: Iterable[dict[str, Any]]) -> list[str]:
    """Names that only some kinds of runs have: those of MORE, and the losses of the sources of a mixture."""
    names = dict.fromkeys(name for line in lines for name in line)
    return [*(name for name in MORE if name in names), *(name for name in names if name.startswith(OF_SOURCE))]


def _column(lines: dict[int, dict[str, Any]], name: str) -> np.ndarray:
    """One value of every line in the order of steps, nan where there is none: float64[n]."""
    return np.array([_number(step) if name == "step" else _number(lines[step].get(name)) for step in sorted(lines)])


def _number(value: Any) -> float:
    """nan for what is not a finite number; an integer can be too large for a float."""
    return float(value) if isinstance(value, int | float) and abs(value) < 1e300 else np.nan
