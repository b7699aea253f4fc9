"""The checkpoints of a training run on the disk: a folder with a self-contained folder for each step.

    checkpoints/40/params   the parameters (orbax)
                   ema      their moving average, if the run keeps one (orbax)
                   rest     the rest of the training state (orbax)
                   about    config.json, the tokenizer's files, note.json, and SHA256SUMS of all files of the step

A folder whose name is a number is complete, since it gets that name when all of it is written. A store cannot rename: there
the checksums are written last, and a folder without them is not a step.
"""

from __future__ import annotations

import math
from typing import Any

from llama_jax.errors import CheckpointError
from llama_jax.files import read_object
from llama_jax.storage import Location, StoredPath

CHECKPOINTS = "checkpoints"  # in the folder of a run
PARAMS, EMA, REST, ABOUT = "params", "ema", "rest", "about"
NOTE, SUMS = "note.json", "SHA256SUMS"


class DamagedError(CheckpointError):
    """A file of a step that is proven to differ from what was saved."""


def steps_in(folder: Location) -> list[int]:
    """The steps in a folder of checkpoints, ascending."""
    if not folder.is_dir():
        return []
    names = (entry.name for entry in folder.iterdir() if entry.is_dir())
    steps = sorted(int(name) for name in names if name.isascii() and name.isdecimal() and str(int(name)) == name)
    return [step for step in steps if is_step(folder / str(step))] if isinstance(folder, StoredPath) else steps


def is_step(folder: Location) -> bool:
    """Whether a folder is a step of a run."""
    return (folder / ABOUT / SUMS).exists() if isinstance(folder, StoredPath) else (folder / ABOUT).is_dir()


def existing_step(folder: Location, step: int | None) -> int:
    """The given step, or the newest for None.

    Raises:
      CheckpointError: the folder does not have it.
    """
    steps = steps_in(folder)
    if not steps:
        raise CheckpointError(f"{folder} holds no checkpoint; train until the first one is saved")
    if step is not None and step not in steps:
        raise CheckpointError(f"{folder} holds no step {step}; give one of {', '.join(map(str, steps))}")
    return steps[-1] if step is None else step


def read_note(folder: Location, step: int | None = None) -> dict[str, Any]:
    """The note that a run wrote beside a step's arrays, which are not read; `step` None is the newest.

    Raises:
      CheckpointError: no such step, or a note that cannot be read; a DamagedError where it is no note.
    """
    path = folder / str(existing_step(folder, step)) / ABOUT / NOTE
    try:
        path.stat()  # raises where it is missing, which proves no damage: the step may have been removed
        return read_object(path, DamagedError)
    except OSError as error:
        raise CheckpointError(cannot_read(path, error.strerror or str(error))) from None


def cannot_read(path: Location, reason: str) -> str:
    """The error that a path cannot be read, for a reason that says nothing about its contents."""
    return f"{path} cannot be read ({reason}), which proves nothing about its contents; mend that, and try again"


def validation_loss(folder: Location, step: int) -> float:
    """The validation loss in a step's note; infinity where it has none, or cannot be read."""
    try:
        loss = read_note(folder, step).get("validation_loss")
    except CheckpointError:
        return math.inf
    return float(loss) if isinstance(loss, (int, float)) and math.isfinite(loss) else math.inf


def by_loss(folder: Location) -> list[int]:
    """The steps that have a validation loss, the best first; of equal ones the later first."""
    losses = {step: validation_loss(folder, step) for step in steps_in(folder)}
    return sorted((step for step in losses if losses[step] < math.inf), key=lambda step: (losses[step], -step))


def find_checkpoints(path: Location) -> Location | None:
    """The folder of checkpoints that a path is or, as the folder of a run, holds; None for another folder."""
    if (path / CHECKPOINTS).is_dir():
        return path / CHECKPOINTS
    return path if any(is_step(path / str(step)) for step in steps_in(path)) else None
