"""One run at a time in a folder of a store: an object that its holder renews, and that another takes when it has run out.

Every change of it is conditional on the version that was seen before, so of two that want it one gets it, and who has lost
it learns so at the next renewal, which comes before every other write. How old it is, is told by the store's own clock
alone: the clocks of two machines are never compared.
"""

from __future__ import annotations

import json
import logging
import os
import platform
import threading
import time
import uuid
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

from llama_jax.errors import TrainingError
from llama_jax.storage import StoredPath
from llama_jax.storage.buckets import ObjectBucket, Stamped
from llama_jax.storage.view import PassingError, trying

NAME = "lease.json"  # in the folder of a run
SECONDS = 60.0  # until one that is not renewed may be taken
RENEWALS = 4  # in that time
POLL = 2.0  # seconds between looks at one that another has

_log = logging.getLogger("llama_jax.storage")


class Lease:
    """The right to write into a run's folder. `take` it first; `check` comes before every write."""

    def __init__(self, folder: StoredPath) -> None:
        self._folder = folder
        self._object = folder / NAME
        self._lock = threading.RLock()
        self._told: dict[str, Any] = {
            "holder": f"{os.getpid()} on {platform.node()}",
            "since": datetime.now(UTC).isoformat(" ", "seconds"),
            "seconds": SECONDS,
            "run": uuid.uuid4().hex,
            "renewals": 0,
            "ended": False,
        }
        self._held: Stamped | None = None  # as it was written last
        self._renewed = 0.0
        self._taken = False
        self._lost: TrainingError | None = None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._go_on, name="lease", daemon=True)

    def take(self, say: Callable[[str], None]) -> None:
        """Become the holder. Of one that has not run out it is waited for, until that is renewed or has run out.

        Args:
          say: is given a line that tells what is waited for.

        Raises:
          TrainingError: another holds it; the message says who.
          OSError: the store gives no answer.
        """
        seen: bytes | None = None
        deadline = 0.0
        while True:
            found = trying(str(self._object), self._look)
            if found is not None:
                told = _read(found)
                if seen is not None and found.content != seen and not told.get("ended"):
                    raise TrainingError(
                        f"{self._folder} is in use by another run, {_holder(told)}; wait until that has ended, or give"
                        " another --workdir"
                    )
                if seen is None and not told.get("ended"):
                    seconds = told.get("seconds")
                    left = (seconds if isinstance(seconds, int | float) else SECONDS) - self._age(found)
                    deadline = _clock() + left
                    if left > 0:
                        say(f"{self._folder} was in use by {_holder(told)}: waiting {left:.0f} s to see whether it still is")
                seen = found.content
                if not told.get("ended") and _clock() < deadline:
                    time.sleep(min(POLL, max(0.0, deadline - _clock())))
                    continue
            else:
                seen = b""
            with self._lock:
                self._held = found
                if trying(str(self._object), self._write):
                    break
        self._taken = True
        self._thread.start()

    def check(self) -> None:
        """Before something is written: renews a lease that is no longer fresh.

        Raises:
          TrainingError: another run has taken it.
          PassingError, OSError: it cannot be renewed.
        """
        with self._lock:
            self.look()
            if _clock() - self._renewed > SECONDS / 2:
                self._renew()

    def look(self) -> None:
        """Raise TrainingError where it is known that another run has taken it."""
        if self._lost is not None:
            raise self._lost

    @property
    def is_held(self) -> bool:
        """Whether it was taken, and is not known to be lost."""
        return self._taken and self._lost is None

    def end(self) -> None:
        """Leave the folder to others, at once."""
        self._stop.set()
        with self._lock:
            if self.is_held:
                self._told["ended"] = True
                try:
                    self._write()
                except (OSError, PassingError) as error:
                    _log.warning("%s: %s; it runs out in %g s", self._object, error, SECONDS)
            if self._lost is None:
                self._lost = TrainingError(f"{self._folder} is no longer written to")  # by threads that live on

    def _go_on(self) -> None:
        while not self._stop.wait(SECONDS / RENEWALS):
            try:
                with self._lock:
                    if self._stop.is_set():
                        return
                    self._renew()
            except TrainingError:
                return
            except (OSError, PassingError) as error:
                _log.warning("%s: not renewed (%s); trying again in %g s", self._object, error, SECONDS / RENEWALS)

    def _renew(self) -> None:
        self.look()
        self._told["renewals"] += 1
        while not self._write():
            found = self._look()
            told = {} if found is None else _read(found)
            if told.get("run") == self._told["run"]:  # a renewal before this one was written, whose answer was lost
                self._held = found
                continue
            who = "removed" if found is None else f"taken over by another run, {_holder(told)}"
            self._lost = TrainingError(
                f"{self._object} was {who}, since this run was not heard of for {SECONDS:g} s, or by hand; nothing more is"
                " written; let the other end, and go on with --resume"
            )
            raise self._lost

    def _write(self) -> bool:
        """Put what is told now in the place of what was held; False where that is no longer what is there."""
        content, began = json.dumps(self._told).encode(), _clock()
        mark = self._bucket().swap(self._object.key, content, None if self._held is None else self._held.mark)
        if mark is None:
            found = self._look()
            if found is None or found.content != content:
                return False
            mark = found.mark  # a try before has written it, whose answer was lost
        self._held, self._renewed = Stamped(content, mark, 0.0), began
        return True

    def _look(self) -> Stamped | None:
        return self._bucket().stamped(self._object.key)

    def _age(self, found: Stamped) -> float:
        """Seconds since it was renewed, by the clock of the store: of an object that is put there now."""
        probe = self._folder / f".clock-{uuid.uuid4().hex}"

        def ask() -> float:
            self._bucket().write(probe.key, b"now")
            now = self._bucket().stamped(probe.key)
            if now is None:
                raise PassingError("an object that was just written is not there")
            return now.modified

        try:
            now = trying(str(probe), ask)
        finally:
            trying(str(probe), lambda: self._bucket().delete(probe.key))
        return max(0.0, now - found.modified - 1.0)  # clocks of stores count whole seconds

    def _bucket(self) -> ObjectBucket:
        return _bucket_of(self._object)


def run_of(folder: StoredPath) -> str | None:
    """The name of the run that has the lease of a folder, which no other run has; None where none does.

    Raises:
      OSError: the store gives no answer.
    """
    place = folder / NAME
    found = trying(str(place), lambda: _bucket_of(place).stamped(place.key))
    return None if found is None else _read(found).get("run")


def _bucket_of(path: StoredPath) -> ObjectBucket:
    store = path.view.store()
    assert isinstance(store, ObjectBucket)
    return store


def _read(found: Stamped) -> dict[str, Any]:
    """What a lease tells; nothing of one that is none."""
    try:
        told = json.loads(found.content)
    except ValueError:
        told = {}
    return told if isinstance(told, dict) else {}


def _holder(told: dict[str, Any]) -> str:
    return f"process {told.get('holder', 'unknown')}, since {told.get('since', 'a time that it does not tell')}"


def _clock() -> float:
    """Seconds that also pass while the machine sleeps."""
    return time.clock_gettime(time.CLOCK_BOOTTIME) if hasattr(time, "CLOCK_BOOTTIME") else time.monotonic()
