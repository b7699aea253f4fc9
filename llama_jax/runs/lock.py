"""One process at a time in the folder of a run."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

from llama_jax.checkpoints.steps import CHECKPOINTS
from llama_jax.errors import TrainingError
from llama_jax.runs.metrics import METRICS
from llama_jax.runs.recipe import RECIPE
from llama_jax.writing import cannot_write, hold, sign

FILE = "lock"
OF_A_RUN = (RECIPE, METRICS)


@contextmanager
def locked(folder: Path) -> Iterator[Callable[[], None]]:
    """Lock a folder, which is created if missing. The lock ends with the process, however that ends.

    Two runs in one folder would delete each other's checkpoints while they are written. On Windows, which has no such
    locks, nothing is locked; nor on a file system without them, with a warning. If the body fails before it has written
    anything, what was created here is removed.

    Yields:
      A function that raises TrainingError once the folder or the lock's file is another one than at the beginning: removed,
      renamed or replaced.

    Raises:
      TrainingError: another process holds the lock, or the folder cannot be written to.
    """
    missing = [path for path in (folder, *folder.absolute().parents) if not path.exists()]
    was_there = (folder / FILE).exists()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        descriptor = hold(folder / FILE, partial(_taken, folder), "run")
    except OSError as error:
        raise TrainingError(f"{folder} cannot be written to ({error.strerror}); give another --workdir") from None
    try:
        try:
            sign(descriptor)
        except OSError as error:
            raise TrainingError(cannot_write(folder / FILE, error)) from None
        try:
            yield partial(_check, folder, descriptor)
        except BaseException:
            if not was_there and _is_held(folder, descriptor):
                _remove_unused(folder, missing)
            raise
    finally:
        os.close(descriptor)


def _is_held(folder: Path, descriptor: int) -> bool:
    """Whether the lock's file in the folder is the one that is open; so too where the system does not say."""
    try:
        return os.path.samestat((folder / FILE).stat(), os.fstat(descriptor))
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError:  # a network file system that does not answer now
        return True


def _check(folder: Path, descriptor: int) -> None:
    if not _is_held(folder, descriptor):
        raise TrainingError(
            f"{folder} is no longer the folder of this run: it, or {FILE!r} in it, was removed or replaced meanwhile;"
            " nothing more is written; if the folder was renamed, go on there with --resume"
        )


def _taken(folder: Path, holder: str) -> TrainingError:
    return TrainingError(
        f"{folder} is in use by another run, process {holder}; wait until that has ended, or give another --workdir"
    )


def _remove_unused(folder: Path, made: list[Path]) -> None:
    """Remove the lock's file and the folders made, unless checkpoints, metrics or a recipe were written meanwhile."""
    with suppress(OSError):  # of a folder that is not empty
        if (folder / CHECKPOINTS).exists():
            (folder / CHECKPOINTS).rmdir()
        if not any((folder / name).exists() for name in OF_A_RUN):
            (folder / FILE).unlink()
            for path in made:
                path.rmdir()
