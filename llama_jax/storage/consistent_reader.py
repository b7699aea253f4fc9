"""A consistent view of a store: folders are listed once, and each object is read in one version."""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple, Protocol

MAX_REQUEST_BYTES = 1 << 24  # larger ranges are requested in parts, because a request has a time limit


class StoreEntry(NamedTuple):
    """A store's entry for a name.

    Attributes:
      size: bytes of an object; None for a folder.
      version: identifies the content, so that no other version is read; None if the store has no versions.
    """

    size: int | None
    version: str | None


FOLDER_ENTRY = StoreEntry(None, None)


class Store(Protocol):
    """The interface to a bucket or repository. Keys are paths in it, without a slash at either end.

    Its library retries requests. What fails nevertheless is raised as an `OSError` that names the URL.
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
        self._single: dict[str, StoreEntry | None] = {}  # objects that were looked up by name

    def url(self, key: str) -> str:
        return f"{self.root}/{key}" if key else self.root

    def names(self, folder: str) -> Mapping[str, StoreEntry]:
        """The entries of a folder, by name."""
        if folder not in self._folders:
            self._folders[folder] = self.store().names(folder)
        return self._folders[folder]

    def lookup(self, key: str) -> StoreEntry | None:
        """The entry of a key, or None. A key in a cached listing needs no request."""
        if self._single.get(key) is not None:
            return self._single[key]
        parent, _, name = key.rpartition("/")
        if key and any(not known or f"{parent}/".startswith(f"{known}/") for known in list(self._folders)):
            within = parent in self._folders or parent == "" or self.lookup(parent) == FOLDER_ENTRY
            return self.names(parent).get(name) if within else None
        if self.names(key):
            return FOLDER_ENTRY
        if key and key not in self._single:
            self._single[key] = self.store().head(key)
        return self._single.get(key)

    def size(self, key: str) -> int:
        """Bytes of an object."""
        return self._object(key)[0]

    def read(self, key: str, start: int, stop: int) -> memoryview:
        """All bytes [start, stop) of an object, in the version that was first seen."""
        _, version = self._object(key)
        content = memoryview(bytearray(stop - start))
        for first in range(start, stop, MAX_REQUEST_BYTES):
            last = min(first + MAX_REQUEST_BYTES, stop)
            part = self.store().read(key, first, last, version)
            if len(part) != last - first:
                raise OSError(errno.EIO, f"only {len(part)} of {last - first} bytes arrived", self.url(key))
            content[first - start : last - start] = part
        return content

    def write(self, key: str, file: Path) -> None:
        """Upload a file under a key, atomically, replacing an existing object."""
        self.store().write(key, file)

    def create(self, key: str, content: bytes) -> None:
        """Create a small object; raises FileExistsError if the key exists."""
        self.store().write(key, content, only_new=True)

    def delete(self, key: str) -> None:
        """Remove an object."""
        self.store().delete(key)

    def refreshed(self) -> StoreView:
        """A new view of the store as it is now."""
        return StoreView(self.root, self.store)

    def store(self) -> Store:
        """The store itself."""
        with self._lock:
            if self._store is None:
                self._store = self._open()
            return self._store

    def _object(self, key: str) -> tuple[int, str | None]:
        entry = self.lookup(key)
        if entry is None:
            raise FileNotFoundError(errno.ENOENT, "there is no such object", self.url(key))
        if entry.size is None:
            raise IsADirectoryError(errno.EISDIR, "it is a folder", self.url(key))
        return entry.size, entry.version
