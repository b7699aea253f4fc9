"""One run at a time in a folder on a disk: the lock of a file, which ends with the process."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

from llama_jax.errors import TrainingError
from llama_jax.formats.step_dirs import CHECKPOINTS
from llama_jax.runs.metrics import METRICS
from llama_jax.runs.recipe import RECIPE_FILE
from llama_jax.storage.atomic_write import cannot_write, hold_lock, sign_lock

RUN_LOCK = "lock"
OF_A_RUN = (RECIPE_FILE, METRICS)


@contextmanager
def folder_lock(folder: Path) -> Iterator[Callable[[], None]]:
    """Lock a folder, which is created if missing. The lock ends with the process, however that ends.

    Two runs in one folder would delete each other's checkpoints while writing. On Windows, which lacks such locks, nothing
    is locked; nor on a file system without them, with a warning. If the body fails before anything is written, files created
    here are removed.

    Yields:
      A function that raises TrainingError once the folder or the lock file was removed, renamed or replaced.

    Raises:
      TrainingError: another process holds the lock, or the folder cannot be written to.
    """
    missing = [path for path in (folder, *folder.absolute().parents) if not path.exists()]
    was_there = (folder / RUN_LOCK).exists()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        descriptor = hold_lock(folder / RUN_LOCK, partial(_taken, folder), "run")
    except OSError as error:
        raise TrainingError(f"{folder} cannot be written to ({error.strerror}); use another --workdir") from None
    try:
        try:
            sign_lock(descriptor)
        except OSError as error:
            raise TrainingError(cannot_write(folder / RUN_LOCK, error)) from None
        try:
            yield partial(_check, folder, descriptor)
        except BaseException:
            if not was_there and _is_held(folder, descriptor):
                _remove_unused(folder, missing)
            raise
    finally:
        os.close(descriptor)


def _is_held(folder: Path, descriptor: int) -> bool:
    """Whether the lock file in the folder is the open one; also True if the file system does not respond."""
    try:
        return os.path.samestat((folder / RUN_LOCK).stat(), os.fstat(descriptor))
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError:  # a network file system that does not respond now
        return True


def _check(folder: Path, descriptor: int) -> None:
    if not _is_held(folder, descriptor):
        raise TrainingError(
            f"{folder} is no longer the folder of this run: it, or {RUN_LOCK!r} in it, was removed or replaced;"
            " nothing more is written; if the folder was renamed, resume there with --resume"
        )


def _taken(folder: Path, holder: str) -> TrainingError:
    return TrainingError(
        f"{folder} is in use by another run, process {holder}; wait until it ends, or use another --workdir"
    )


def _remove_unused(folder: Path, made: list[Path]) -> None:
    """Remove the lock file and created folders, unless checkpoints, metrics or a recipe were written."""
    with suppress(OSError):  # the folder is not empty
        if (folder / CHECKPOINTS).exists():
            (folder / CHECKPOINTS).rmdir()
        if not any((folder / name).exists() for name in OF_A_RUN):
            (folder / RUN_LOCK).unlink()
            for path in made:
                path.rmdir()
