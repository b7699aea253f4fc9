"""A consistent view of a store: folders are listed once, each object is read in one version, and requests are retried."""

from __future__ import annotations

import errno
import logging
import random
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple, Protocol, TypeVar

# Seconds before each retry, a minute in total; each is randomly shortened, so that not all hosts retry at once.
RETRY_WAITS = (0.5, 1.0, 2.0, 4.0, 8.0, 15.0, 30.0)
TIMEOUT_TRIES = 3  # tries of a request that times out: fewer than for other errors, because each takes minutes
MAX_REQUEST_BYTES = 1 << 26  # bytes per request; larger ranges are requested in parts

_log = logging.getLogger("llama_jax.storage")
Result = TypeVar("Result")


class StoreEntry(NamedTuple):
    """A store's entry for a name.

    Attributes:
      size: bytes of an object; None for a folder.
      version: identifies the content, so that no other version is read; None if the store has no versions.
    """

    size: int | None
    version: str | None


FOLDER = StoreEntry(None, None)


class Store(Protocol):
    """The interface to a bucket or repository. Keys are paths in it, without a slash at either end.

    Errors that a retry may resolve are raised as `TransientError`, all others as an `OSError` that names the URL.
    """

    def names(self, folder: str) -> Mapping[str, StoreEntry]:
        """The entries of a folder, by name; empty if there is no such folder."""
        ...

    def head(self, key: str) -> StoreEntry | None:
        """The entry of an object, or None."""
        ...

    def read(self, key: str, start: int, stop: int, version: str | None) -> memoryview:
        """Bytes [start, stop) of an object, or fewer if the response was cut off."""
        ...

    def write(self, key: str, content: Path | bytes, *, only_new: bool = False) -> None:
        """Write a file or bytes under a key; readers see all of it at once.

        Args:
          only_new: raise FileExistsError if the key exists; for small objects.
        """
        ...

    def delete(self, key: str) -> None:
        """Remove an object."""
        ...


class TransientError(Exception):
    """A request failed, but may succeed when retried: a broken connection, a server that is busy or failing."""


class TimedOutError(TransientError):
    """A request timed out, though some bytes may have arrived."""


class StoreView:
    """A store, opened at the first request, and a cache of its listings.

    Attributes:
      root: the URL of the whole store, without a slash at the end.
    """

    def __init__(self, root: str, open_store: Callable[[], Store]) -> None:
        self.root = root
        self._open = open_store
        self._store: Store | None = None
        self._lock = threading.Lock()
        self._folders: dict[str, Mapping[str, StoreEntry]] = {}
        self._alone: dict[str, StoreEntry | None] = {}  # objects that were looked up by name

    def url(self, key: str) -> str:
        return f"{self.root}/{key}" if key else self.root

    def names(self, folder: str) -> Mapping[str, StoreEntry]:
        """The entries of a folder, by name."""
        if folder not in self._folders:
            self._folders[folder] = with_retries(self.url(folder), lambda: self.store().names(folder))
        return self._folders[folder]

    def look(self, key: str) -> StoreEntry | None:
        """The entry of a key, or None. A key in a cached listing needs no request."""
        if self._alone.get(key) is not None:
            return self._alone[key]
        parent, _, name = key.rpartition("/")
        if key and any(not known or f"{parent}/".startswith(f"{known}/") for known in list(self._folders)):
            within = parent in self._folders or parent == "" or self.look(parent) == FOLDER
            return self.names(parent).get(name) if within else None
        if self.names(key):
            return FOLDER
        if key and key not in self._alone:
            self._alone[key] = with_retries(self.url(key), lambda: self.store().head(key))
        return self._alone.get(key)

    def size(self, key: str) -> int:
        """Bytes of an object."""
        return self._object(key)[0]

    def read(self, key: str, start: int, stop: int) -> memoryview:
        """All bytes [start, stop) of an object, in the version that was first seen."""
        _, version = self._object(key)
        url = self.url(key)

        def request(first: int, last: int) -> memoryview:
            found = self.store().read(key, first, last, version)
            if len(found) != last - first:
                raise TransientError(f"only {len(found)} of {last - first} bytes arrived")
            return found

        if stop - start <= MAX_REQUEST_BYTES:
            return with_retries(url, partial(request, start, stop))
        whole = memoryview(bytearray(stop - start))
        for first in range(start, stop, MAX_REQUEST_BYTES):
            last = min(first + MAX_REQUEST_BYTES, stop)
            whole[first - start : last - start] = with_retries(url, partial(request, first, last))
        return whole

    def write(self, key: str, file: Path) -> None:
        """Upload a file under a key, atomically, replacing an existing object."""
        with_retries(self.url(key), lambda: self.store().write(key, file))

    def create(self, key: str, content: bytes) -> None:
        """Create a small object under a key that does not exist.

        Raises:
          FileExistsError: the key exists.
          OSError: it cannot be written.
        """
        tries = 0

        def request() -> None:
            nonlocal tries
            tries += 1
            try:
                self.store().write(key, content, only_new=True)
            except FileExistsError:
                if tries == 1 or bytes(self.store().read(key, 0, len(content) + 1, None)) != content:
                    raise  # unless an earlier try has written it, and the response was lost

        with_retries(self.url(key), request)

    def delete(self, key: str) -> None:
        """Remove an object."""
        with_retries(self.url(key), lambda: self.store().delete(key))

    def again(self) -> StoreView:
        """A new view of the store as it is now."""
        return StoreView(self.root, self.store)

    def store(self) -> Store:
        """The store itself."""
        with self._lock:
            if self._store is None:
                self._store = self._open()
            return self._store

    def _object(self, key: str) -> tuple[int, str | None]:
        found = self.look(key)
        if found is None:
            raise FileNotFoundError(errno.ENOENT, "there is no such object", self.url(key))
        if found.size is None:
            raise IsADirectoryError(errno.EISDIR, "it is a folder", self.url(key))
        return found.size, found.version


def with_retries(url: str, request: Callable[[], Result], waits: Sequence[float] | None = None) -> Result:
    """The result of `request`, retried after a wait as long as it raises TransientError; each wait is logged as a warning.

    Args:
      waits: seconds before each retry; None is RETRY_WAITS.

    Raises:
      OSError: the last retry failed too, or TIMEOUT_TRIES tries timed out.
    """
    waits = RETRY_WAITS if waits is None else waits
    slow = 0
    for tried, wait in enumerate((*waits, None), 1):
        try:
            return request()
        except TransientError as error:
            slow += isinstance(error, TimedOutError)
            if wait is None or slow == TIMEOUT_TRIES:
                raise OSError(errno.EIO, f"no complete response in {tried} tries, the last: {error}", url) from None
            _log.warning("%s: %s; retrying in %g s (try %d of %d)", url, error, wait, tried + 1, len(waits) + 1)
            time.sleep(wait * random.uniform(0.5, 1.0))
    raise AssertionError("the last try returns or raises")
