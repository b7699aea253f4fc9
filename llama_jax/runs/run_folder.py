"""The folder of a run on this machine, and its mirror in an object store.

A run is always written to a disk. If it is given a URL, its folder is in the cache, and after each checkpoint what is new is
uploaded: recipe.json, metrics.jsonl and other files, then the checkpoint, with its checksums last, without which it is not a
step. On another machine, the run first fetches the newest step. There are no locks in a store: a process that finds a newer
step than its own there uploads nothing.
"""

from __future__ import annotations

import hashlib
import logging
import re
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path

from llama_jax.errors import CheckpointError, TrainingError
from llama_jax.formats.step_dirs import (
    ABOUT,
    CHECKPOINTS,
    CHECKSUMS_FILE,
    DamagedError,
    check_checksums,
    is_step,
    read_checksums,
    steps_in,
)
from llama_jax.parallel.multihost import Processes
from llama_jax.runs.log import Log
from llama_jax.storage import Location, StoredPath
from llama_jax.storage.atomic_write import lock_file, write_atomically
from llama_jax.storage.object_cache import fetch_objects, objects_below
from llama_jax.storage.paths import cache_folder

RUN_LOCK = "lock"  # in the folder of a run
RUNS = "runs"  # in the cache: folders of runs that are mirrored
UPLOAD_THREADS = 4  # files uploaded concurrently, large ones in parts

_log = logging.getLogger("llama_jax.storage")


@dataclass(frozen=True)
class RunFolder:
    """The folder of a run, to which no other run on this machine writes.

    Attributes:
      location: as given, for readers.
      path: the folder on this machine.
      check: raises TrainingError once the folder was removed or replaced.
      mirror: uploads it, in process 0 of a run at a URL; otherwise None.
    """

    location: Location
    path: Path
    check: Callable[[], None]
    mirror: Mirror | None = None


@contextmanager
def open_run(location: Location, processes: Processes, log: Log, *, resume: bool) -> Iterator[RunFolder]:
    """The folder of a run; of one at a URL with the newest step in the store, if that is newer than those on this machine.

    Raises:
      TrainingError: another run uses the folder, it cannot be written to, or the store does not respond or has a step and
        the run is not resumed.
    """
    path = location if isinstance(location, Path) else _working_folder(location)
    with lock_run(path) if processes.index == 0 else nullcontext(lambda: None) as check:
        mirror = None
        if isinstance(location, StoredPath):
            if processes.index == 0:
                log.line(f"{location}: the run is written to {path}; checkpoints are uploaded when they are complete")
                mirror = Mirror(path, location)
                mirror.fetch(resume=resume)
            processes.barrier("run fetched")
        yield RunFolder(location, path, check, mirror)


def check_resume(folder: Location, step: int | None, resume: bool) -> None:
    """Raise TrainingError if the folder holds a run, whose newest step this is, that is not resumed."""
    if step is not None and not resume:
        raise TrainingError(f"{folder} holds a run that is at step {step}; continue with --resume, or use another --workdir")


@contextmanager
def lock_run(folder: Path) -> Iterator[Callable[[], None]]:
    """Lock the folder of a run: two runs in it would delete each other's checkpoints.

    Yields:
      A function that raises TrainingError once the folder or the lock was removed, renamed or replaced.
    """
    with lock_file(folder / RUN_LOCK, folder, TrainingError) as is_locked:

        def check() -> None:
            if not is_locked():
                raise TrainingError(
                    f"{folder} is no longer the folder of this run: it, or {RUN_LOCK!r} in it, was removed or replaced;"
                    " nothing more is written; if the folder was renamed, resume there with --resume"
                )

        yield check


def _working_folder(location: StoredPath) -> Path:
    """The folder of a run at a URL: the same one whenever it is resumed on this machine."""
    url = str(location)
    if url.startswith("hf://"):
        raise TrainingError(f"{url} is on the Hub, where runs cannot be stored; pass a local folder, s3:// or gs://")
    name = re.sub(r"[^A-Za-z0-9]+", "-", url)[-60:].strip("-")
    return cache_folder() / RUNS / f"{name}-{hashlib.sha256(url.encode()).hexdigest()[:8]}"


class Mirror:
    """The copy of a run's folder in an object store, written by one process."""

    def __init__(self, folder: Path, location: StoredPath) -> None:
        self._folder = folder
        self._location = location
        self._uploaded: dict[Path, tuple[int, int]] = {}  # sizes and modification times of files of the run
        self._error: OSError | CheckpointError | None = None

    def fetch(self, *, resume: bool) -> None:
        """Fetch the newest step, after the files beside the checkpoints, unless this machine has it or a newer one.

        Raises:
          TrainingError: there is one and the run is not resumed, it is damaged, or the store or the disk fails.
        """
        try:
            store = self._location.resolve()
            newest = max(steps_in(store / CHECKPOINTS), default=None)
            check_resume(store, newest, resume)
            if newest is None or newest <= max(steps_in(self._folder / CHECKPOINTS), default=-1):
                return
            beside = store.view.names(store.key).items()
            files = {name: entry for name, entry in beside if entry.size is not None and not name.startswith(".")}
            fetch_objects(store, files, self._folder)
            step, local = store / CHECKPOINTS / str(newest), self._folder / CHECKPOINTS / str(newest)
            with write_atomically(local, folder=True, raises=TrainingError) as target:
                fetch_objects(step, dict(objects_below(step)), target)
                try:
                    check_checksums(target)
                except DamagedError as error:
                    damage = str(error).replace(str(target), str(step))
                    raise TrainingError(f"{damage}; remove {step} to resume from an older step") from None
        except OSError as error:
            raise TrainingError(f"{self._location} cannot be fetched to {self._folder} ({_reason(error)})") from None

    def upload(self, choose_steps: Callable[[Location], set[int]]) -> None:
        """Upload what is new, and remove steps that are not kept. A failure is logged; the next call tries again.

        Args:
          choose_steps: returns the steps to keep of those in a folder of checkpoints.
        """
        try:
            self._upload(choose_steps)
            self._error = None
        except (OSError, CheckpointError) as error:
            self._error = error
            _log.warning(
                "%s: not uploaded (%s); the checkpoints are in %s, and the next upload tries again",
                self._location,
                _reason(error),
                self._folder,
            )

    def finish(self, choose_steps: Callable[[Location], set[int]]) -> None:
        """Upload what is new at the end of the run, as `upload`.

        Raises:
          TrainingError: it cannot be uploaded.
        """
        self.upload(choose_steps)
        if self._error is not None:
            raise TrainingError(
                f"{self._location} does not have all of this run ({_reason(self._error)}), which is complete in"
                f" {self._folder}; run the same command with --resume to upload it"
            )

    def _upload(self, choose_steps: Callable[[Location], set[int]]) -> None:
        store = self._location.resolve()
        checkpoints = self._folder / CHECKPOINTS
        newest = max(steps_in(store / CHECKPOINTS), default=-1)
        if newest > max(steps_in(checkpoints), default=-1):
            raise CheckpointError(f"it has step {newest} of another process, which writes there too; end one of the two")
        for file in sorted(self._folder.rglob("*")):
            name = file.relative_to(self._folder).as_posix()
            if not file.is_file() or name == RUN_LOCK or name.startswith((".", f"{CHECKPOINTS}/")):
                continue
            mark = (file.stat().st_size, file.stat().st_mtime_ns)
            if self._uploaded.get(file) != mark:
                store.view.write((store / name).key, file)
                self._uploaded[file] = mark
        for step in sorted(choose_steps(checkpoints)):
            if not _is_uploaded(checkpoints / str(step), store / CHECKPOINTS / str(step)):
                _upload_step(checkpoints / str(step), store / CHECKPOINTS / str(step))
        stored = store.resolve() / CHECKPOINTS
        kept_steps = choose_steps(stored)
        for name in stored.view.names(stored.key):
            if name.isdecimal() and int(name) not in kept_steps:
                _remove_step(stored / name)


def _is_uploaded(folder: Path, step: StoredPath) -> bool:
    try:
        return is_step(step) and read_checksums(step) == read_checksums(folder)
    except DamagedError:
        return False


def _upload_step(folder: Path, step: StoredPath) -> None:
    """Upload a step, its checksums last, in place of what the store has of this number."""
    _remove_step(step)
    files = [file for file in sorted(folder.rglob("*")) if file.is_file() and file != folder / ABOUT / CHECKSUMS_FILE]
    with ThreadPoolExecutor(UPLOAD_THREADS) as pool:
        list(pool.map(lambda file: step.view.write((step / file.relative_to(folder).as_posix()).key, file), files))
    step.view.write((step / ABOUT / CHECKSUMS_FILE).key, folder / ABOUT / CHECKSUMS_FILE)


def _remove_step(step: StoredPath) -> None:
    """Remove a step, its checksums first."""
    names = [name for name, _ in objects_below(step)]
    for name in sorted(names, key=lambda name: name != f"{ABOUT}/{CHECKSUMS_FILE}"):
        step.view.delete((step / name).key)


def _reason(error: OSError | CheckpointError) -> str:
    return f"{error.filename}: {error.strerror}" if isinstance(error, OSError) and error.filename else str(error)
