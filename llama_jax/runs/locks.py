"""One run at a time in a folder: by a locked file on disk, by a renewed lease object in an object store.

On disk the lock ends with the process. An object store has no locks: there the lease is an object that its holder renews,
and that another run takes when it has expired. Every change is conditional on the version read before, so exactly one of two
runs gets it, and the other finds out at its next renewal, which precedes every other write. Its age is measured only by the
store's clock: clocks of two machines are never compared.
"""

from __future__ import annotations

import json
import logging
import os
import platform
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

from llama_jax.errors import TrainingError
from llama_jax.formats.step_dirs import CHECKPOINTS
from llama_jax.runs.metrics import METRICS
from llama_jax.runs.recipe import RECIPE_FILE
from llama_jax.storage import StoredPath
from llama_jax.storage.atomic_write import cannot_write, hold_lock, sign_lock
from llama_jax.storage.consistent_reader import TransientError, with_retries
from llama_jax.storage.object_store import ObjectBucket, VersionedObject

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


LEASE = "lease.json"  # in the folder of a run
SECONDS = 60.0  # until a lease that is not renewed may be taken
RENEWALS = 4  # within SECONDS
POLL = 2.0  # seconds between checks of another run's lease

_log = logging.getLogger("llama_jax.storage")


class Lease:
    """The right to write into a run's folder. Call `acquire` first, and `check` before every write."""

    def __init__(self, folder: StoredPath) -> None:
        self._folder = folder
        self._object = folder / LEASE
        self._lock = threading.RLock()
        self._content: dict[str, Any] = {
            "holder": f"{os.getpid()} on {platform.node()}",
            "since": datetime.now(UTC).isoformat(" ", "seconds"),
            "seconds": SECONDS,
            "run": uuid.uuid4().hex,
            "renewals": 0,
            "ended": False,
        }
        self._held: VersionedObject | None = None  # as last written
        self._renewed = 0.0
        self._taken = False
        self._lost: TrainingError | None = None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._renew_regularly, name="lease", daemon=True)

    def acquire(self, say: Callable[[str], None]) -> None:
        """Become the holder. If another lease is unexpired, wait until it is renewed or has expired.

        Args:
          say: called with a line about the lease that this run waits for.

        Raises:
          TrainingError: another run holds it; the message names its process.
          OSError: the store does not respond.
        """
        first: bytes | None = None  # the lease as first found, b"" for none
        deadline = 0.0
        while True:
            found = with_retries(str(self._object), self._read)
            other = {"ended": True} if found is None else _content_of(found)
            if not other.get("ended"):
                assert found is not None
                if first is None:
                    seconds = other.get("seconds")
                    left = (seconds if isinstance(seconds, int | float) else SECONDS) - self._age(found)
                    deadline = _clock() + left
                    if left > 0:
                        say(
                            f"{self._folder} was in use by {_holder(other)}: waiting {left:.0f} s to see whether it still is"
                        )
                elif found.content != first:
                    raise TrainingError(
                        f"{self._folder} is in use by another run, {_holder(other)}; wait until it ends, or use"
                        " another --workdir"
                    )
                if _clock() < deadline:
                    first = found.content
                    time.sleep(min(POLL, max(0.0, deadline - _clock())))
                    continue
            first = b"" if found is None else found.content
            with self._lock:
                self._held = found
                if with_retries(str(self._object), self._write):
                    break
        self._taken = True
        self._thread.start()

    def check(self) -> None:
        """Call before writing: renews a lease that is not fresh.

        Raises:
          TrainingError: another run has taken it.
          TransientError, OSError: it cannot be renewed.
        """
        with self._lock:
            self.raise_if_lost()
            if _clock() - self._renewed > SECONDS / 2:
                self._renew()

    def raise_if_lost(self) -> None:
        """Raise TrainingError if another run is known to have taken the lease."""
        if self._lost is not None:
            raise self._lost

    @property
    def is_held(self) -> bool:
        """Whether the lease was taken, and is not known to be lost."""
        return self._taken and self._lost is None

    def release(self) -> None:
        """Release the folder to other runs, immediately."""
        self._stop.set()
        with self._lock:
            if self.is_held:
                self._content["ended"] = True
                try:
                    self._write()
                except (OSError, TransientError) as error:
                    _log.warning("%s: %s; it expires in %g s", self._object, error, SECONDS)
            if self._lost is None:
                self._lost = TrainingError(f"{self._folder} is no longer written to")  # for threads that still run

    def _renew_regularly(self) -> None:
        while not self._stop.wait(SECONDS / RENEWALS):
            try:
                with self._lock:
                    if self._stop.is_set():
                        return
                    self._renew()
            except TrainingError:
                return
            except (OSError, TransientError) as error:
                _log.warning("%s: not renewed (%s); trying again in %g s", self._object, error, SECONDS / RENEWALS)

    def _renew(self) -> None:
        self.raise_if_lost()
        self._content["renewals"] += 1
        while not self._write():
            found = self._read()
            other = {} if found is None else _content_of(found)
            if other.get("run") == self._content["run"]:  # an earlier renewal was written, but its response was lost
                self._held = found
                continue
            who = "removed" if found is None else f"taken over by another run, {_holder(other)}"
            self._lost = TrainingError(
                f"{self._object} was {who}, because this run did not renew it for {SECONDS:g} s, or by hand; nothing more is"
                " written; wait until the other run ends, and resume with --resume"
            )
            raise self._lost

    def _write(self) -> bool:
        """Replace the version that was held by the current content; False if there is another version."""
        content, began = json.dumps(self._content).encode(), _clock()
        mark = _bucket_of(self._object).swap(self._object.key, content, None if self._held is None else self._held.mark)
        if mark is None:
            found = self._read()
            if found is None or found.content != content:
                return False
            mark = found.mark  # an earlier try wrote it, but its response was lost
        self._held, self._renewed = VersionedObject(content, mark, 0.0), began
        return True

    def _read(self) -> VersionedObject | None:
        return _bucket_of(self._object).stamped(self._object.key)

    def _age(self, found: VersionedObject) -> float:
        """Seconds since it was renewed, by the store's clock: compared with an object that is written now."""
        probe = self._folder / f".clock-{uuid.uuid4().hex}"
        bucket = _bucket_of(probe)

        def ask() -> float:
            bucket.write(probe.key, b"now")
            now = bucket.stamped(probe.key)
            if now is None:
                raise TransientError("an object that was just written is not there")
            return now.modified

        try:
            now = with_retries(str(probe), ask)
        finally:
            with_retries(str(probe), lambda: bucket.delete(probe.key))
        return max(0.0, now - found.modified - 1.0)  # store clocks have a resolution of seconds


def run_of(folder: StoredPath) -> str | None:
    """The id of the run that holds the lease of a folder; None if there is no lease.

    Raises:
      OSError: the store does not respond.
    """
    place = folder / LEASE
    found = with_retries(str(place), lambda: _bucket_of(place).stamped(place.key))
    return None if found is None else _content_of(found).get("run")


def _bucket_of(path: StoredPath) -> ObjectBucket:
    store = path.view.store()
    assert isinstance(store, ObjectBucket)
    return store


def _content_of(found: VersionedObject) -> dict[str, Any]:
    """The content of a lease; empty if it is not one."""
    try:
        content = json.loads(found.content)
    except ValueError:
        content = {}
    return content if isinstance(content, dict) else {}


def _holder(content: dict[str, Any]) -> str:
    return f"process {content.get('holder', 'unknown')}, since {content.get('since', 'an unknown time')}"


def _clock() -> float:
    """Seconds, including time when the machine sleeps."""
    return time.clock_gettime(time.CLOCK_BOOTTIME) if hasattr(time, "CLOCK_BOOTTIME") else time.monotonic()
