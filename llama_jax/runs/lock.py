"""One process at a time in the folder of a run."""

from __future__ import annotations

import os
import platform
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from llama_jax.runs.errors import TrainingError
from llama_jax.writing import cannot_write

FILE = "lock"


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold a folder, which is made where there is none. The lock ends with the process, however that ends.

    Two runs in one folder would delete each other's checkpoints while they are written. On Windows, which has no such
    locks, nothing is held; on a file system without them neither, which warns.

    Raises:
      TrainingError: another process holds it, or a folder that cannot be written to.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = (folder / FILE).open("a+", encoding="utf-8")
    except OSError as error:
        raise TrainingError(f"{folder} cannot be written to ({error.strerror}); give another --workdir") from None
    with file:
        _lock(file.fileno(), folder)
        holder = f"{os.getpid()} on {platform.node()}\n".encode()
        try:
            os.ftruncate(file.fileno(), 0)
            os.write(file.fileno(), holder)
        except OSError as error:
            raise TrainingError(cannot_write(folder / FILE, error)) from None
        yield


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
