"""The folder of a run: where it works, and where its output is stored, on disk or in an object store.

A run in a store works in a folder in TMPDIR, and uploads each finished file. Objects are whole or missing, and written in
this order: first what a step needs next to it (recipe.json, reference.npz, the metrics so far), then the files of the step,
and its checksums last, without which it is not a step. The lease is checked before every request that changes something.

Each of several hosts works in a separate folder. It uploads the array data that it has written, in files whose names no
other host uses; everything else is uploaded by process 0, which alone holds the lease.
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

from llama_jax.errors import CheckpointError, TrainingError
from llama_jax.formats.orbax_index import MANIFEST, add_index
from llama_jax.formats.step_dirs import ABOUT, CHECKPOINTS, NUMBER_FILES, SUMS, fetch_files, files_in, is_step, sums_of
from llama_jax.parallel.multihost import Processes
from llama_jax.runs.locks import LEASE, Lease, folder_lock
from llama_jax.runs.log import Log
from llama_jax.runs.metrics import METRICS, PARTS
from llama_jax.storage import Location, StoredPath, consistent_reader
from llama_jax.storage.atomic_write import ScratchFolder, flush_folders, replace_path

REMOVED = ".removed"  # suffix to a step's number in the name of a folder being deleted
THREADS = 4  # files uploaded concurrently, large ones in parts
PATIENCE = (60.0,) * 10  # seconds between retries, after those of `storage.consistent_reader`, as a run costs more
METRICS_EVERY = 15.0  # seconds
LEAVING = 20.0  # maximum seconds for uploading the rest of a failed run
PART = 1 << 20  # bytes of metrics in an object, after which another one begins
READING = "reading"  # next to the folder of checkpoints: downloaded steps

_log = logging.getLogger("llama_jax.storage")


class CheckpointStore:
    """The complete steps of a run. This class is a folder on disk, in which a step is renamed once it is complete.

    Attributes:
      checkpoints: the folder of the steps, for messages.
      shared: whether all processes write a step into one folder; otherwise each host has its own.
      first: index of the first of the processes that share this process's folder.
    """

    shared, first = True, 0

    def __init__(self, checkpoints: Location, check: Callable[[], None] = lambda: None) -> None:
        """`check` raises TrainingError if this run no longer has its folder to itself, without a request to a store."""
        self.checkpoints = checkpoints
        self.check = check

    def now(self) -> Location:
        """`checkpoints`, as a reader finds it now."""
        return self.checkpoints

    def clear_up(self) -> None:
        """Remove leftovers of killed runs that are not steps; on disk `CheckpointManager` does, before each save."""

    def gather_step(self, written: Path, step: int) -> dict[str, str]:
        """Add other hosts' files to the folder of process 0; call in every process, before `put_step`.

        Returns:
          In process 0: {name: checksum} of the step's files that are already uploaded and not in its folder.

        Raises:
          OSError, TrainingError: see `put_step`.
        """
        return {}

    def put_step(self, written: Path, step: int) -> None:
        """In process 0: durably store a local folder, with its checksums, as the step.

        Raises:
          OSError: it cannot be written, and there is no such step.
          TrainingError: another run has taken this run's folder over; nothing was written.
        """
        self.check()
        flush_folders(written)
        replace_path(written, Path(self.checkpoints / str(step)))

    def remove_step(self, step: int) -> None:
        """Remove a step, so that a reader never finds part of it."""
        # Renamed first: a process killed in between leaves no partial checkpoint under a step's name.
        folder = Path(self.checkpoints / str(step))
        shutil.rmtree(folder.rename(folder.with_name(f"{step}{REMOVED}")))

    @contextmanager
    def local_step(self, step: int) -> Iterator[Path]:
        """A local folder that contains the step's files, within the context."""
        yield Path(self.checkpoints / str(step))


class RunFolder(CheckpointStore):
    """The folder of a run. This class is a folder on disk, and is written to directly.

    Attributes:
      place: as given, for messages and readers.
      path: the local folder where everything is written.
    """

    def __init__(self, place: Location, path: Path, check: Callable[[], None]) -> None:
        super().__init__(place / CHECKPOINTS, check)
        self.place, self.path = place, path

    def put(self) -> None:
        """Make sure that everything written to `path` is in `place`: whole files, and lines of metrics.

        Raises:
          TrainingError: it cannot be written there, or another run has taken the folder over.
        """
        self.check()


@contextmanager
def open_run(place: Location, processes: Processes, log: Log) -> Iterator[RunFolder]:
    """The folder of a run, to which no other run writes within the context.

    Raises:
      TrainingError: another run does, or it cannot be written to.
    """
    if isinstance(place, Path):
        with folder_lock(place) if processes.index == 0 else nullcontext(lambda: None) as check:
            yield RunFolder(place, place, check)
        return
    if place.view.root.startswith("hf://"):
        raise TrainingError(f"{place} is on the Hub, where runs cannot be stored; pass a local folder, s3:// or gs://")
    run = StoredRun(place, processes, log, Path(os.fsdecode(processes.receive())) if processes.index else None)
    try:
        if processes.index == 0:
            processes.broadcast(os.fsencode(run.path))
        yield run
    except BaseException:
        run.end(failed=True)
        raise
    run.end(failed=False)


class StoredRun(RunFolder):
    """A run in a store. Process 0 holds its lease; all processes work in folders with the same path, as orbax requires."""

    def __init__(self, place: StoredPath, processes: Processes, log: Log, path: Path | None = None) -> None:
        """Take the lease, and download files of an earlier run other than its steps.

        Args:
          path: the path of process 0, in all other processes: they take no lease.

        Raises:
          TrainingError: another run has the lease, the store cannot be read and written, or the path cannot be created.
        """
        self._store = place.resolve()
        self._scratch = ScratchFolder() if path is None else None
        super().__init__(self._store, self._scratch.path / "run" if self._scratch else Path(path or ""), self._check)
        self.shared, self.first = processes.on_one_host, processes.host
        self._lease = Lease(self._store) if path is None else None
        self._processes = processes
        self._downloaded = self.path / READING
        self._uploaded: dict[str, tuple[int, int]] = {}  # size and local modification time of files in the store
        self._lock = threading.Lock()
        self._stop = threading.Event()
        if path is not None and not processes.first_of_host:
            return
        try:
            self._scratch = self._scratch or ScratchFolder(self.path.parent)
            self.path.mkdir()
        except OSError as error:
            raise TrainingError(
                f"{self.path.parent} cannot be created on {platform.node()} ({error.strerror}); TMPDIR must be set to a"
                " folder that exists on every host, and that no two hosts share"
            ) from None
        try:
            if self._lease is not None:
                self._lease.acquire(log.line)
            self._fetch()
        except BaseException as error:
            self.end(failed=True)
            if isinstance(error, OSError):
                raise TrainingError(self._cannot_reach(error)) from None
            raise
        if self._lease is not None:
            threading.Thread(target=self._upload_regularly, name="metrics", daemon=True).start()

    def put(self) -> None:
        try:
            self.put_files()
        except OSError as error:
            raise TrainingError(self._cannot_reach(error)) from None

    def put_files(self, *, also_in_folders: bool = False) -> None:
        """In process 0: upload changed files, and the metrics.

        Files at the top level are complete (`atomic_write`); those in folders, which TensorBoard and profilers write at any
        time, are uploaded when the run ends.

        Raises:
          OSError: an object cannot be written.
          TrainingError: another run has the lease.
        """
        if self._lease is None:
            return
        with self._lock:
            for file in sorted(self.path.rglob("*") if also_in_folders else self.path.iterdir()):
                name = file.relative_to(self.path).as_posix()
                if not file.is_file() or name == METRICS or name.startswith((".", f"{CHECKPOINTS}/", f"{READING}/")):
                    continue
                mark = _mark(file)
                if self._uploaded.get(name) != mark:
                    self._write(self._store / name, file)
                    self._uploaded[name] = mark
            self._put_metrics()

    def end(self, *, failed: bool) -> None:
        """Upload remaining files, unless the lease is lost, and release the folder to other runs.

        Raises:
          TrainingError: they cannot be written; not raised for a failed run, which has an error already.
        """
        self._stop.set()
        try:
            if failed:  # a request may hang, and nothing may wait for it
                thread = threading.Thread(target=self._leave_quietly, name="leaving", daemon=True)
                thread.start()
                thread.join(LEAVING)
            else:
                self._leave()
        except OSError as error:
            raise TrainingError(self._cannot_reach(error)) from None
        finally:
            if self._scratch is not None and self._lease is not None:
                self._scratch.close()

    def now(self) -> StoredPath:
        return (self._store / CHECKPOINTS).resolve()

    def clear_up(self) -> None:
        now = self.now()
        for name in now.view.names(now.key):
            if name.isdecimal() and str(int(name)) == name and not is_step(now / name):
                self.remove_step(int(name))

    def gather_step(self, written: Path, step: int) -> dict[str, str]:
        if self._lease is not None:
            self.put_files()
            self.remove_step(step)
        self._processes.barrier(f"room for step {step}")
        share: dict[str, dict[str, str]] = {"sums": {}, "files": {}}
        if self._processes.first_of_host:
            shutil.rmtree(self._downloaded, ignore_errors=True)
            names = files_in(written)
            numbers = [name for name in names if NUMBER_FILES.fullmatch(name)]
            self._put_step_files(written, step, numbers)
            if self._lease is None:
                small = [name for name in names if name not in numbers]
                share["files"] = {name: base64.b64encode((written / name).read_bytes()).decode() for name in small}
                share["sums"] = sums_of(written, numbers)
                shutil.rmtree(written)
        elsewhere: dict[str, str] = {}
        for other in self._processes.gather(f"step {step} put", share)[1:]:
            elsewhere |= other["sums"]
            for name, content in other["files"].items():  # in order of names: the manifest of an index is last
                _add(written, name, base64.b64decode(content))
        return elsewhere

    def put_step(self, written: Path, step: int) -> None:
        last = f"{ABOUT}/{SUMS}"
        names = [name for name in files_in(written) if name != last and not NUMBER_FILES.fullmatch(name)]
        self._put_step_files(written, step, names)
        self._put_step_files(written, step, [last])
        shutil.rmtree(written)

    def remove_step(self, step: int) -> None:
        """The checksums, which make it a step, are removed first."""
        for path in sorted(_below(self.now() / str(step)), key=lambda path: path.name != SUMS):
            self._delete(path)

    @contextmanager
    def local_step(self, step: int) -> Iterator[Path]:
        folder, place = self._downloaded / str(step), self.now() / str(step)
        if self._processes.first_of_host:
            shutil.rmtree(self._downloaded, ignore_errors=True)
            try:
                fetch_files(place, folder)
            except OSError as error:
                raise CheckpointError(f"{error.filename or place} cannot be read: {error.strerror or error}") from None
            except CheckpointError as error:
                if self._processes.count == 1:
                    raise
                raise CheckpointError(str(error)) from None  # the others wait for it, and try no older step
        self._processes.barrier("step fetched")
        yield folder

    def _check(self) -> None:
        if self._lease is not None:
            self._lease.raise_if_lost()

    def _with_lease(self, path: StoredPath, ask: Callable[[], None]) -> None:
        """Make a request that changes something, with retries; in process 0 only while it has the lease."""

        def guarded() -> None:
            if self._lease is not None:
                self._lease.check()
            ask()

        consistent_reader.with_retries(str(path), guarded, (*consistent_reader.RETRY_WAITS, *PATIENCE))

    def _write(self, path: StoredPath, content: Path | bytes) -> None:
        self._with_lease(path, lambda: path.view.store().write(path.key, content))

    def _delete(self, path: StoredPath) -> None:
        self._with_lease(path, lambda: path.view.store().delete(path.key))

    def _put_step_files(self, written: Path, step: int, names: Sequence[str]) -> None:
        place = self.now() / str(step)
        with ThreadPoolExecutor(THREADS) as pool:
            list(pool.map(lambda name: self._write(place / name, written / name), names))

    def _fetch(self) -> None:
        """Download the files at the top level, without metrics; find the number of the next part of the metrics."""
        names = self._store.view.names(self._store.key)
        for name, listed in names.items():
            if listed.size is not None and not name.startswith(".") and name not in (LEASE, METRICS):
                (self.path / name).write_bytes(self._store.view.read((self._store / name).key, 0, listed.size))
                self._uploaded[name] = _mark(self.path / name)
        parts = self._store.view.names((self._store / PARTS).key) if PARTS in names else ()
        numbers = [int(name.partition(".")[0]) for name in parts if name.partition(".")[0].isdecimal()]
        self._number, self._begun, self._part = max(numbers, default=0) + 1, 0, 0

    def _put_metrics(self) -> None:
        """Upload the lines since the last full part, as a growing part, written whole each time."""
        path = self.path / METRICS
        if not path.exists():
            return
        with path.open("rb") as file:
            file.seek(self._begun)
            lines = file.read()
        lines = lines[: lines.rfind(b"\n") + 1]
        if len(lines) > self._part:
            self._write(self._store / PARTS / f"{self._number:06}.jsonl", lines)
            self._part = len(lines)
        if len(lines) >= PART:
            self._number, self._begun, self._part = self._number + 1, self._begun + len(lines), 0

    def _upload_regularly(self) -> None:
        while not self._stop.wait(METRICS_EVERY):
            try:
                self.put_files()
            except TrainingError:  # raised in the run by `check`
                return
            except OSError as error:
                _log.warning("%s", self._cannot_reach(error))

    def _leave_quietly(self) -> None:
        with suppress(OSError, TrainingError):
            self._leave()

    def _leave(self) -> None:
        if self._lease is None:
            return
        try:
            if self._lease.is_held:
                self.put_files(also_in_folders=True)
        finally:
            self._lease.release()

    def _cannot_reach(self, error: OSError) -> str:
        """The message for a store that does not respond, or denies access."""
        name, why = error.filename or self.place, error.strerror or error
        return f"{name} cannot be read and written ({why}); fix that, and resume with --resume"


def _mark(file: Path) -> tuple[int, int]:
    stat = file.stat()
    return stat.st_size, stat.st_mtime_ns


def _add(step: Path, name: str, content: bytes) -> None:
    """Add another host's file to a step: merge its index with the local one, and add other files if missing."""
    file = step / name
    if not file.exists():
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(content)
    elif file.name == MANIFEST:
        add_index(file.parent, content)


def _below(folder: StoredPath) -> Iterator[StoredPath]:
    for name, found in folder.view.names(folder.key).items():
        if found.size is None:
            yield from _below(folder / name)
        else:
            yield folder / name
