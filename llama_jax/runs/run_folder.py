"""The folder of a run: where it works, and where what it writes ends up, on a disk or in a store.

A run in a store works in a folder in TMPDIR, and each finished piece is put to the store. Everything is there whole or
not at all, and in this order: first what a step needs beside it (recipe.json, reference.npz, the metrics so far), then
the files of the step, and its checksums last, without which it is none. Before every request that changes something the
lease is looked at.

Of several hosts each works in a folder of its own. It puts the numbers that it has written, in files whose names nobody
else gives; everything else process 0 puts, which alone has the lease.
"""

from __future__ import annotations

import base64
import logging
import os
import platform
import shutil
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Protocol

from llama_jax.errors import CheckpointError, TrainingError
from llama_jax.formats.orbax_index import MANIFEST, add_index
from llama_jax.formats.step_dirs import ABOUT, CHECKPOINTS, OF_NUMBERS, SUMS, fetch_files, files_in, is_step, sums_of
from llama_jax.parallel.multihost import Processes
from llama_jax.runs import locks
from llama_jax.runs.locks import Lease, locked
from llama_jax.runs.log import Log
from llama_jax.runs.metrics import METRICS, PARTS
from llama_jax.runs.shelf import LocalShelf, Shelf
from llama_jax.storage import Location, StoredPath, consistent_reader
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
        raise TrainingError(
            f"{place} is on the Hub, where runs cannot be stored; pass a folder of this machine, s3:// or gs://"
        )
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


THREADS = 4  # files that are put at a time, large ones in parts
PATIENCE = (60.0,) * 10  # seconds between tries, after those of `storage.consistent_reader`: a run costs more than a reader
METRICS_EVERY = 15.0  # seconds
LEAVING = 20.0  # seconds that what is left of a run that has failed may take
PART = 1 << 20  # bytes of metrics in an object, from which on there is a next one
READING = "reading"  # beside the folder of checkpoints: steps that are brought here

_log = logging.getLogger("llama_jax.storage")


class StoredRun:
    """A `RunFolder` in a store, for the process that writes."""

    def __init__(self, place: StoredPath, processes: Processes, log: Log) -> None:
        """Take the lease, and bring here what a run before has left beside its steps.

        Raises:
          TrainingError: another run has the lease, or the store cannot be read and written.
        """
        self.place = place.resolve()
        self._scratch = ScratchFolder()
        self.path = self._scratch.path / "run"
        self.path.mkdir()
        self._lease = Lease(self.place)
        self.shelf: Shelf = StoredShelf(self.place, self.path, processes, self)
        self._there: dict[str, tuple[int, int]] = {}  # of files that are in the store: size, and when they were written here
        self._lock = threading.Lock()
        self._stop = threading.Event()
        try:
            self._lease.take(log.line)
            self._fetch()
        except BaseException as error:
            self.end(failed=True)
            if isinstance(error, OSError):
                raise TrainingError(cannot_reach(self.place, error)) from None
            raise
        threading.Thread(target=self._go_on, name="metrics", daemon=True).start()

    def put(self) -> None:
        try:
            self.put_files()
        except OSError as error:
            raise TrainingError(cannot_reach(self.place, error)) from None

    def put_files(self, *, also_in_folders: bool = False) -> None:
        """Put the files that have changed, and the metrics.

        Those at the top appear there whole (`atomic_write`); in folders TensorBoard and profilers write as they like,
        until the run ends.

        Raises:
          OSError: an object cannot be written.
          TrainingError: another run has the lease.
        """
        with self._lock:
            for file in sorted(self.path.rglob("*") if also_in_folders else self.path.iterdir()):
                name = file.relative_to(self.path).as_posix()
                if not file.is_file() or name == METRICS or name.startswith((".", f"{CHECKPOINTS}/", f"{READING}/")):
                    continue
                mark = file.stat().st_size, file.stat().st_mtime_ns
                if self._there.get(name) != mark:
                    self.write(self.place / name, file)
                    self._there[name] = mark
            self._put_metrics()

    def write(self, path: StoredPath, content: Path | bytes) -> None:
        """Put a file under a name, in the place of what is there."""
        self._trying(path, lambda: path.view.store().write(path.key, content))

    def delete(self, path: StoredPath) -> None:
        """Remove an object."""
        self._trying(path, lambda: path.view.store().delete(path.key))

    def check(self) -> None:
        """Raise TrainingError where it is known that another run has the lease."""
        self._lease.look()

    def end(self, *, failed: bool) -> None:
        """Put what is left, unless the lease is lost, and leave the folder to others.

        Raises:
          TrainingError: it cannot be written; not raised for a run that has failed, which has an error already.
        """
        self._stop.set()
        try:
            if failed:  # perhaps since a request hangs, on which nothing may wait
                thread = threading.Thread(target=self._leave_quietly, name="leaving", daemon=True)
                thread.start()
                thread.join(LEAVING)
            else:
                self._leave()
        except OSError as error:
            raise TrainingError(cannot_reach(self.place, error)) from None
        finally:
            self._scratch.close()

    def _leave_quietly(self) -> None:
        with suppress(OSError, TrainingError):
            self._leave()

    def _leave(self) -> None:
        try:
            if self._lease.is_held:
                self.put_files(also_in_folders=True)
        finally:
            self._lease.end()

    def _trying(self, path: StoredPath, ask: Callable[[], None]) -> None:
        def guarded() -> None:
            self._lease.check()
            ask()

        _trying(path, guarded)

    def _fetch(self) -> None:
        for file in fetch_beside(self.place, self.path):
            self._there[file.name] = file.stat().st_size, file.stat().st_mtime_ns
        names = self.place.view.names(self.place.key)
        parts = self.place.view.names((self.place / PARTS).key) if PARTS in names else ()
        numbers = [int(name.partition(".")[0]) for name in parts if name.partition(".")[0].isdecimal()]
        self._number, self._begun, self._part = max(numbers, default=0) + 1, 0, 0

    def _put_metrics(self) -> None:
        """The lines since the last full part, as a part that grows, each time as a whole."""
        path = self.path / METRICS
        if not path.exists():
            return
        with path.open("rb") as file:
            file.seek(self._begun)
            lines = file.read()
        lines = lines[: lines.rfind(b"\n") + 1]
        if len(lines) > self._part:
            self.write(self.place / PARTS / f"{self._number:06}.jsonl", lines)
            self._part = len(lines)
        if len(lines) >= PART:
            self._number, self._begun, self._part = self._number + 1, self._begun + len(lines), 0

    def _go_on(self) -> None:
        while not self._stop.wait(METRICS_EVERY):
            try:
                self.put_files()
            except TrainingError:  # `check` raises it in the run
                return
            except OSError as error:
                _log.warning("%s", cannot_reach(self.place, error))


class StoredShelf:
    """A `Shelf` in a store."""

    def __init__(self, run: StoredPath, path: Path, processes: Processes, writer: StoredRun | None) -> None:
        """`writer` is None in all processes but the first."""
        self.place = run / CHECKPOINTS
        self.shared, self.first = processes.on_one_host, processes.host
        self._brought = path / READING
        self._processes = processes
        self._writer = writer

    def now(self) -> StoredPath:
        return self.place.resolve()

    def clear_up(self) -> None:
        now = self.now()
        for name in now.view.names(now.key):
            if name.isdecimal() and not is_step(now / name):
                self._empty(now / name)

    def gather(self, written: Path, step: int) -> dict[str, str]:
        if self._writer is not None:
            self._writer.put_files()
            self._empty(self.now() / str(step))
        self._processes.wait(f"room for step {step}")
        share: dict[str, dict[str, str]] = {"sums": {}, "files": {}}
        if self._processes.first_of_host:
            shutil.rmtree(self._brought, ignore_errors=True)
            names = files_in(written)
            numbers = [name for name in names if OF_NUMBERS.fullmatch(name)]
            self._put_files(written, step, numbers)
            if self._writer is None:
                small = [name for name in names if name not in numbers]
                share["files"] = {name: base64.b64encode((written / name).read_bytes()).decode() for name in small}
                share["sums"] = sums_of(written, numbers)
                shutil.rmtree(written)
        elsewhere: dict[str, str] = {}
        for other in self._processes.gather(f"step {step} put", share)[1:]:
            elsewhere |= other["sums"]
            for name, content in other["files"].items():  # by their names: of an index its manifest last
                _add(written, name, base64.b64decode(content))
        return elsewhere

    def put(self, written: Path, step: int) -> None:
        last = f"{ABOUT}/{SUMS}"
        names = [name for name in files_in(written) if name != last and not OF_NUMBERS.fullmatch(name)]
        self._put_files(written, step, names)
        self._put_files(written, step, [last])
        shutil.rmtree(written)

    def remove(self, step: int) -> None:
        self._empty(self.now() / str(step))

    @contextmanager
    def reading(self, step: int) -> Iterator[Path]:
        folder, place = self._brought / str(step), self.now() / str(step)
        if self._processes.first_of_host:
            shutil.rmtree(self._brought, ignore_errors=True)
            try:
                fetch_files(place, folder)
            except OSError as error:
                raise CheckpointError(f"{error.filename or place} cannot be read: {error.strerror or error}") from None
            except CheckpointError as error:
                if self._processes.count == 1:
                    raise
                raise CheckpointError(str(error)) from None  # the others wait for it, and look at no older step
        self._processes.wait("step fetched")
        yield folder

    def check(self) -> None:
        if self._writer is not None:
            self._writer.check()

    def _put_files(self, written: Path, step: int, names: Sequence[str]) -> None:
        place = self.now() / str(step)

        def put(name: str) -> None:
            if self._writer is not None:
                self._writer.write(place / name, written / name)
            else:
                _trying(place / name, lambda: place.view.store().write((place / name).key, written / name))

        with ThreadPoolExecutor(THREADS) as pool:
            list(pool.map(put, names))

    def _empty(self, folder: StoredPath) -> None:
        """Remove what lies in a step's folder, what makes it a step first."""
        assert self._writer is not None
        found = list(_below(folder))
        for path in sorted(found, key=lambda path: path.name != SUMS):
            self._writer.delete(path)


def fetch_beside(place: StoredPath, path: Path) -> list[Path]:
    """Download the files at the top of the run in `place`, without metrics, into a folder; return their paths."""
    found = []
    for name, listed in place.view.names(place.key).items():
        if listed.size is None or name.startswith(".") or name in (locks.LEASE, METRICS):
            continue
        (path / name).write_bytes(place.view.read((place / name).key, 0, listed.size))
        found.append(path / name)
    return found


def _add(step: Path, name: str, content: bytes) -> None:
    """Add to a step what another host has written: to an index its own, and of the rest what is not there."""
    file = step / name
    if not file.exists():
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(content)
    elif file.name == MANIFEST:
        add_index(file.parent, content)


def _trying(path: StoredPath, ask: Callable[[], None]) -> None:
    consistent_reader.with_retries(str(path), ask, (*consistent_reader.WAITS, *PATIENCE))


def _below(folder: StoredPath) -> Iterator[StoredPath]:
    for name, found in folder.view.names(folder.key).items():
        if found.size is None:
            yield from _below(folder / name)
        else:
            yield folder / name


def cannot_reach(place: StoredPath, error: Exception) -> str:
    """The error that a store does not answer, or refuses."""
    if isinstance(error, TrainingError):
        return str(error)
    name, why = getattr(error, "filename", None) or place, getattr(error, "strerror", None) or error
    return f"{name} cannot be read and written ({why}); see to that, and go on with --resume"
