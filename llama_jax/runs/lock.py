"""One process at a time in the folder of a run."""

from __future__ import annotations

import os
import platform
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TextIO

from llama_jax.checkpoints.steps import CHECKPOINTS
from llama_jax.runs.errors import TrainingError
from llama_jax.runs.metrics import METRICS
from llama_jax.runs.recipe import RECIPE
from llama_jax.writing import cannot_write

FILE = "lock"
OF_A_RUN = (RECIPE, METRICS)


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold a folder, which is made where there is none. The lock ends with the process, however that ends.

    Two runs in one folder would delete each other's checkpoints while they are written. On Windows, which has no such
    locks, nothing is held; on a file system without them neither, which warns. Where what runs meanwhile fails before it has
    written anything, what was made here is removed.

    Raises:
      TrainingError: another process holds it, or a folder that cannot be written to.
    """
    missing = [path for path in (folder, *folder.absolute().parents) if not path.exists()]
    was_there = (folder / FILE).exists()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = _opened(folder)
    except OSError as error:
        raise TrainingError(f"{folder} cannot be written to ({error.strerror}); give another --workdir") from None
    with file:
        holder = f"{os.getpid()} on {platform.node()}\n".encode()
        try:
            os.ftruncate(file.fileno(), 0)
            os.write(file.fileno(), holder)
        except OSError as error:
            raise TrainingError(cannot_write(folder / FILE, error)) from None
        try:
            yield
        except BaseException:
            if not was_there:
                _remove_unused(folder, missing)
            raise


def _opened(folder: Path) -> TextIO:
    """The lock's file, held. Another run may remove it between opening and holding: then there is a new one."""
    while True:
        file = (folder / FILE).open("a+", encoding="utf-8")
        try:
            _lock(file.fileno(), folder)
            with suppress(FileNotFoundError):
                if os.path.samestat((folder / FILE).stat(), os.fstat(file.fileno())):
                    return file
        except BaseException:
            file.close()
            raise
        file.close()


def _remove_unused(folder: Path, made: list[Path]) -> None:
    """Remove the lock's file and the folders made, unless checkpoints, metrics or a recipe were written meanwhile."""
    with suppress(OSError):  # of a folder that is not empty
        if (folder / CHECKPOINTS).exists():
            (folder / CHECKPOINTS).rmdir()
        if not any((folder / name).exists() for name in OF_A_RUN):
            (folder / FILE).unlink()
            for path in made:
                path.rmdir()


def _lock(descriptor: int, folder: Path) -> None:
    if sys.platform == "win32":
        return
    import fcntl

    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = (folder / FILE).read_text(encoding="utf-8").strip() or "unknown"
        raise TrainingError(
            f"{folder} is in use by another run, process {holder}; wait until that has ended, or give another --workdir"
        ) from None
    except OSError as error:
        warnings.warn(f"{folder} cannot be locked ({error.strerror}): start no second run in it", stacklevel=4)
