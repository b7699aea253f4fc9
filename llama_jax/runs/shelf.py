"""Where the whole checkpoints of a run lie: beside the one that is being written, or in a store."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Protocol

from llama_jax.storage import Location
from llama_jax.storage.atomic_write import flush_folders, replace_path

REMOVED = ".removed"  # after the number of a step in the name of its folder, which is being deleted


class Shelf(Protocol):
    """The steps of one run, each whole or not there.

    Attributes:
      place: the folder of checkpoints, for messages.
      shared: whether all processes write a step into one folder, and not those of each host into one of their own.
      first: the number of the first of the processes that share this one's folder.
    """

    @property
    def place(self) -> Location: ...
    @property
    def shared(self) -> bool: ...
    @property
    def first(self) -> int: ...

    def now(self) -> Location:
        """`place`, as a reader finds it now."""

    def clear_up(self) -> None:
        """Remove what killed runs have left that is no step."""

    def gather(self, written: Path, step: int) -> dict[str, str]:
        """In every process, before `put`: complete what was written in the folder of process 0 by what other hosts have.

        Returns:
          In process 0: {name: checksum} of the files of the step that are not in its folder, since they have been put.

        Raises:
          OSError, TrainingError: see `put`.
        """

    def put(self, written: Path, step: int) -> None:
        """In process 0: make a folder of this machine, with its checksums, the step, which is on the disk, or in the store,
        afterwards.

        Raises:
          OSError: it cannot be written, and there is no such step.
          TrainingError: another run has taken this one's folder over; nothing was written.
        """

    def remove(self, step: int) -> None:
        """Remove a step, so that a reader never finds a half of it."""

    def reading(self, step: int) -> AbstractContextManager[Path]:
        """A folder of this machine that holds the step's files, meanwhile."""

    def check(self) -> None:
        """Raise TrainingError where this run no longer has its folder to itself; asks nobody."""


class LocalShelf:
    """Steps on a disk: a folder gets its name when it is whole."""

    shared, first = True, 0

    def __init__(self, place: Path, check: Callable[[], None] = lambda: None) -> None:
        """`check` is that of `Shelf`."""
        self.place = place.absolute()
        self.check = check

    def now(self) -> Path:
        return self.place

    def clear_up(self) -> None:
        pass  # they lie in the folder where steps are written, which is cleared up before each

    def gather(self, written: Path, step: int) -> dict[str, str]:
        return {}

    def put(self, written: Path, step: int) -> None:
        self.check()
        flush_folders(written)
        replace_path(written, self.place / str(step))

    def remove(self, step: int) -> None:
        # Renamed first: a process that is killed meanwhile leaves no half of a checkpoint under a step's name.
        shutil.rmtree((self.place / str(step)).rename(self.place / f"{step}{REMOVED}"))

    @contextmanager
    def reading(self, step: int) -> Iterator[Path]:
        yield self.place / str(step)
