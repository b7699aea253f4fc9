"""The folder of a run: where it works, and where what it writes ends up."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Protocol

from llama_jax.formats.step_dirs import CHECKPOINTS
from llama_jax.parallel.processes import Processes
from llama_jax.runs.errors import TrainingError
from llama_jax.runs.locks import locked
from llama_jax.runs.log import Log
from llama_jax.runs.shelf import LocalShelf, Shelf
from llama_jax.runs.stored_run import StoredRun, StoredShelf, cannot_reach, fetch_beside
from llama_jax.storage import Location, StoredPath
from llama_jax.storage.atomic_write import ScratchFolder


class RunFolder(Protocol):
    """What a run asks of its folder.

    Attributes:
      place: as it was given, for messages and readers.
      path: of this machine, where everything is written.
      shelf: for its checkpoints.
    """

    @property
    def place(self) -> Location: ...
    @property
    def path(self) -> Path: ...
    @property
    def shelf(self) -> Shelf: ...

    def put(self) -> None:
        """Make sure that what was written to `path` is in `place`: whole files, and lines of metrics.

        Raises:
          TrainingError: it cannot be written there, or another run has taken the folder over.
        """


class LocalRun:
    """A `RunFolder` that lies on a disk, and is written to as it is."""

    def __init__(self, place: Path, check: Callable[[], None]) -> None:
        """`check` raises TrainingError where the folder is no longer this run's."""
        self.place = self.path = place
        self.shelf = LocalShelf(place / CHECKPOINTS, check)
        self.put = check


class SharedStoredRun:
    """A `RunFolder` in a store, for all processes but the first, which has its lease.

    It works in a folder of the same path, as orbax demands of all processes: the very same where it is of process 0's host.
    """

    def __init__(self, place: StoredPath, path: Path, processes: Processes) -> None:
        """Make the folder where no process of a lower number does, with what a run before has left beside its steps.

        Raises:
          TrainingError: it cannot be made, or the store cannot be read.
        """
        self.place, self.path = place.resolve(), path
        self.shelf: Shelf = StoredShelf(self.place, path, processes, None)
        if not processes.first_of_host:
            return
        try:
            self._scratch = ScratchFolder(path.parent)
            path.mkdir()
        except OSError as error:
            raise TrainingError(
                f"{path.parent} cannot be made on {platform.node()} ({error.strerror}); the variable TMPDIR must name a"
                " folder that is there on every host, and that no two hosts share"
            ) from None
        try:
            fetch_beside(self.place, path)
        except OSError as error:
            raise TrainingError(cannot_reach(self.place, error)) from None

    def put(self) -> None:
        pass


@contextmanager
def opened(place: Location, processes: Processes, log: Log) -> Iterator[RunFolder]:
    """The folder of a run, which no other run writes to meanwhile.

    Raises:
      TrainingError: another does, or it cannot be written to.
    """
    if isinstance(place, Path):
        with locked(place) if processes.index == 0 else nullcontext(lambda: None) as check:
            yield LocalRun(place, check)
        return
    if place.view.root.startswith("hf://"):
        raise TrainingError(f"{place} is on the hub, where no run can be; give a folder of this machine, s3:// or gs://")
    if processes.index:
        yield SharedStoredRun(place, Path(os.fsdecode(processes.hear())), processes)
        return
    run = StoredRun(place, processes, log)
    try:
        processes.tell(os.fsencode(run.path))
        yield run
    except BaseException:
        run.end(failed=True)
        raise
    run.end(failed=False)
