"""The folder of a run: where it works, and where what it writes ends up."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Protocol

from llama_jax.checkpoints.steps import CHECKPOINTS
from llama_jax.parallel.processes import Processes
from llama_jax.runs.errors import TrainingError
from llama_jax.runs.lock import locked
from llama_jax.runs.log import Log
from llama_jax.runs.shelf import LocalShelf, Shelf
from llama_jax.runs.stored_run import StoredRun, StoredShelf
from llama_jax.storage import Location


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

    def __init__(self, place: Path) -> None:
        self.place = self.path = place
        self.shelf = LocalShelf(place / CHECKPOINTS)

    def put(self) -> None:
        pass


class ReadStoredRun:
    """A `RunFolder` in a store, for the processes that do not write: another of their host has it."""

    def __init__(self, place: Location, path: Path, shelf: Shelf) -> None:
        self.place, self.path, self.shelf = place, path, shelf

    def put(self) -> None:
        pass


@contextmanager
def opened(place: Location, processes: Processes, log: Log) -> Iterator[RunFolder]:
    """The folder of a run, which no other run writes to meanwhile.

    Raises:
      TrainingError: another does, it cannot be written to, or several hosts have no file system in common.
    """
    if isinstance(place, Path):
        with locked(place) if processes.index == 0 else nullcontext():
            yield LocalRun(place)
        return
    if place.view.root.startswith("hf://"):
        raise TrainingError(f"{place} is on the hub, where no run can be; give a folder of this machine, s3:// or gs://")
    if processes.index and processes.first_of_host:
        raise TrainingError(
            f"{place}: a run over several hosts writes to a file system that they share; give a folder there as --workdir,"
            " or train on one host"
        )
    if processes.index:
        path = Path(os.fsdecode(processes.hear()))
        yield ReadStoredRun(place, path, StoredShelf(place, path, processes, None))
        return
    run = StoredRun(place, processes, log)
    try:
        processes.tell(os.fsencode(run.path))
        yield run
    except BaseException:
        run.end(failed=True)
        raise
    run.end(failed=False)
