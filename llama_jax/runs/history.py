"""What runs wrote into their metrics.jsonl, as arrays."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from llama_jax.errors import UserError
from llama_jax.runs.metrics import METRICS


@dataclass(frozen=True)
class RunHistory:
    """What a run wrote down, in the order of its steps.

    Attributes:
      name: of its folder.
      train: float64[n] each, by the names of `TRAIN` and those of `MORE` that it has; nan where a value is missing or not
        finite.
      validation: float64[m] each, likewise by `VALIDATION`, `MORE` and what begins with `OF_SOURCE`; tokens are those of the
        training line at that step.
      unreadable: lines, counted from 1, that are not whole: of a run that was killed while it wrote.
    """

    name: str
    train: dict[str, np.ndarray]
    validation: dict[str, np.ndarray]
    unreadable: tuple[int, ...] = ()


TRAIN = ("step", "tokens", "loss", "learning_rate", "grad_norm", "tokens_per_second")
VALIDATION = ("step", "tokens", "loss")
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

    Of several lines for a step the last holds, and where a run went on from a step, what an earlier process wrote
    of later steps is dropped.

    Raises:
      UserError: no metrics there, or none of training.
    """
    path = Path(folder) / METRICS
    if not path.is_file():
        raise UserError(f"{folder} holds no {METRICS}; give the folder of a run, the --workdir of llama-jax train")
    kept: dict[str, dict[int, dict[str, Any]]] = {"train": {}, "validation": {}}
    unreadable = []
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
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
        raise UserError(f"{path} has no line of training to draw{damage}; has the run logged a step yet?")
    train, validation = (
        {name: _column(lines, name) for name in (*names, *_more(lines.values()))}
        for lines, names in ((kept["train"], TRAIN), (kept["validation"], VALIDATION))
    )
    known = np.isfinite(train["tokens"])
    if known.any():
        validation["tokens"] = np.interp(validation["step"], train["step"][known], train["tokens"][known])
    return RunHistory(Path(folder).resolve().name, train, validation, tuple(unreadable))


def read_runs(folders: Sequence[str | os.PathLike[str]]) -> list[RunHistory]:
    """The metrics of several folders, each with a name that no other has: as much of its path as that takes.

    Raises:
      UserError: no folder, one that is given twice, or one without metrics.
    """
    if not folders:
        raise UserError("no run was given; give the folder of at least one")
    parts = [Path(folder).resolve().parts for folder in folders]
    for i, folder in enumerate(folders):
        if parts[i] in parts[:i]:
            raise UserError(f"{folder} is given twice; one curve would hide the other")
    runs = [read_run(folder) for folder in folders]
    return [replace(run, name=_shortest(part, parts)) for run, part in zip(runs, parts, strict=True)]


def _shortest(path: tuple[str, ...], paths: Sequence[tuple[str, ...]]) -> str:
    """The end of a path by which it is known among others."""
    depth = next(n for n in range(1, len(path) + 1) if sum(other[-n:] == path[-n:] for other in paths) == 1)
    return os.path.join(*path[-depth:])


def _more(lines: Iterable[dict[str, Any]]) -> list[str]:
    """Names that only some kinds of runs have: those of MORE, and the losses of the sources of a mixture."""
    names = dict.fromkeys(name for line in lines for name in line)
    return [*(name for name in MORE if name in names), *(name for name in names if name.startswith(OF_SOURCE))]


def _column(lines: dict[int, dict[str, Any]], name: str) -> np.ndarray:
    """A value of every line in the order of the steps, nan where there is none: float64[n]."""
    return np.array([_number(step) if name == "step" else _number(lines[step].get(name)) for step in sorted(lines)])


def _number(value: Any) -> float:
    """nan for what is not a finite number; an integer can be too large for a float."""
    return float(value) if isinstance(value, int | float) and abs(value) < 1e300 else np.nan
