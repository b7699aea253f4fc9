"""Paths of this machine and URLs of stores, with the few methods that readers of models need of both.

A store is seen as a reader first saw it (`StoreView`): each folder is listed once, each object is read in one version, and
requests are retried.
"""

from __future__ import annotations

import errno
import fnmatch
import io
import json
import logging
import os
import random
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeVar, overload

from llama_jax.errors import UserError, reason_of, shown

# Seconds before each retry, a minute in all; each is shortened at random, so that not all hosts retry at once.
WAITS = (0.5, 1.0, 2.0, 4.0, 8.0, 15.0, 30.0)
SLOW_TRIES = 3  # tries of a request that times out: fewer than for others, because each takes minutes
MOST_OPEN = 1 << 26  # bytes requested at a time: more are requested in parts
LARGEST_JSON = 4 << 20  # bytes, each of which can cost 25 here; the index of a 405B model has a thirtieth

_log = logging.getLogger("llama_jax.storage")
Given = TypeVar("Given")


class StoreEntry(NamedTuple):
    """A store's entry for a name.

    Attributes:
      size: bytes of an object; None for a folder.
      version: of its content, so that no other is read; None where the store has no versions.
    """

    size: int | None
    version: str | None


FOLDER = StoreEntry(None, None)


class Store(Protocol):
    """A bucket or repository: the interface to its library. Keys are paths in it, without a slash at either end.

    Errors that may not recur in a retry are raised as `TransientError`, all others as an `OSError` that names the URL.
    """

    def names(self, folder: str) -> Mapping[str, StoreEntry]:
        """The content of a folder, by name; empty where there is no such folder."""
        ...

    def head(self, key: str) -> StoreEntry | None:
        """An object; None where there is none."""
        ...

    def read(self, key: str, start: int, stop: int, version: str | None) -> memoryview:
        """Bytes [start, stop) of an object, or fewer where the answer was cut off."""
        ...

    def write(self, key: str, content: Path | bytes, *, only_new: bool = False) -> None:
        """Put a file or bytes under a key; readers see all of it at once.

        Args:
          only_new: raise FileExistsError where something is there; for a few bytes.
        """
        ...

    def delete(self, key: str) -> None:
        """Remove an object."""
        ...


class TransientError(Exception):
    """A request failed, and may succeed when retried: a broken connection, a server that is busy or failing."""


class TimedOutError(TransientError):
    """A request timed out, though some bytes may have come."""


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
        """The content of a folder."""
        if folder not in self._folders:
            self._folders[folder] = with_retries(self.url(folder), lambda: self.store().names(folder))
        return self._folders[folder]

    def look(self, key: str) -> StoreEntry | None:
        """The entry of a key; None where there is none. A key in a known listing needs no request."""
        if self._alone.get(key) is not None:
            return self._alone[key]
        parent, _, name = key.rpartition("/")
        if key and any(folder in self._folders for folder in _and_above(parent)):
            within = parent in self._folders or parent == "" or self.look(parent) == FOLDER
            return self.names(parent).get(name) if within else None
        if self.names(key):
            return FOLDER
        if key and key not in self._alone:
            self._alone[key] = with_retries(self.url(key), lambda: self.store().head(key))
        return self._alone.get(key)

    def size(self, key: str) -> int:
        """Bytes of an object.

        Raises:
          OSError: there is none.
        """
        return self._object(key)[0]

    def read(self, key: str, start: int, stop: int) -> memoryview:
        """Bytes [start, stop) of an object, all of them, as it was when it was first seen.

        Raises:
          OSError: it is missing, unreadable or was replaced, or the store gave no complete answer in all tries.
        """
        _, version = self._object(key)
        url = self.url(key)

        def ask(first: int, last: int) -> memoryview:
            found = self.store().read(key, first, last, version)
            if len(found) != last - first:
                raise TransientError(f"{len(found)} of {last - first} bytes came")
            return found

        if stop - start <= MOST_OPEN:
            return with_retries(url, partial(ask, start, stop))
        whole = memoryview(bytearray(stop - start))
        for first in range(start, stop, MOST_OPEN):
            last = min(first + MOST_OPEN, stop)
            whole[first - start : last - start] = with_retries(url, partial(ask, first, last))
        return whole

    def write(self, key: str, file: Path) -> None:
        """Put a file of this machine under a key: all of it at once, replacing what is there.

        Raises:
          OSError: it cannot be written.
        """
        with_retries(self.url(key), lambda: self.store().write(key, file))

    def create(self, key: str, content: bytes) -> None:
        """Put a few bytes under a key that does not exist.

        Raises:
          FileExistsError: the key exists.
          OSError: it cannot be written.
        """
        tries = 0

        def ask() -> None:
            nonlocal tries
            tries += 1
            try:
                self.store().write(key, content, only_new=True)
            except FileExistsError:
                if tries == 1 or bytes(self.store().read(key, 0, len(content) + 1, None)) != content:
                    raise  # not our own write of an earlier try, whose answer was lost

        with_retries(self.url(key), ask)

    def delete(self, key: str) -> None:
        """Remove an object.

        Raises:
          OSError: it cannot be removed.
        """
        with_retries(self.url(key), lambda: self.store().delete(key))

    def again(self) -> StoreView:
        """The same store as it is now."""
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


def with_retries(url: str, ask: Callable[[], Given], waits: Sequence[float] | None = None) -> Given:
    """The result of `ask`, retried after a wait as long as it raises TransientError; each wait is logged as a warning.

    Args:
      waits: seconds; None is WAITS.

    Raises:
      OSError: the last retry failed too, or SLOW_TRIES tries timed out.
    """
    waits = WAITS if waits is None else waits
    slow = 0
    for tried, wait in enumerate((*waits, None), 1):
        try:
            return ask()
        except TransientError as error:
            slow += isinstance(error, TimedOutError)
            if wait is None or slow == SLOW_TRIES:
                raise OSError(errno.EIO, f"no whole answer in {tried} tries, the last: {error}", url) from None
            _log.warning("%s: %s; asking again in %g s (try %d of %d)", url, error, wait, tried + 1, len(waits) + 1)
            time.sleep(wait * random.uniform(0.5, 1.0))
    raise AssertionError("the last try returns or raises")


def _and_above(folder: str) -> list[str]:
    """A folder and its parents, up to the root of the store."""
    found = [folder]
    while folder:
        folder = folder.rpartition("/")[0]
        found.append(folder)
    return found


URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+)://(.*)", re.DOTALL)
LOOKS_STORED = re.compile(r"(s3|gs|hf):/")
EXAMPLES = {"s3": "s3://BUCKET/PATH", "gs": "gs://BUCKET/PATH", "hf": "hf://ORGANIZATION/NAME"}
READ_AHEAD = 1 << 12  # bytes of a buffered read: the beginning of a file, to recognize its format


class Status(NamedTuple):
    """The result of `stat` for an object."""

    st_size: int


class StoredPath(os.PathLike[str]):
    """An object in a store, or a folder: all objects whose names begin with its name and a slash.

    It has the methods of `pathlib.Path` that reading needs, and its string is its URL. Locations made from one another see
    the store as it was first seen (`StoreView`).
    """

    def __init__(self, view: StoreView, key: str) -> None:
        self.view = view
        self.key = key

    def __fspath__(self) -> str:
        return self.view.url(self.key)

    def __str__(self) -> str:
        return self.view.url(self.key)

    def __repr__(self) -> str:
        return f"StoredPath({str(self)!r})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, StoredPath) and str(self) == str(other)

    def __hash__(self) -> int:
        return hash(str(self))

    def __lt__(self, other: StoredPath) -> bool:
        return str(self) < str(other)

    def __truediv__(self, name: str) -> StoredPath:
        return StoredPath(self.view, f"{self.key}/{name}" if self.key else name)

    @property
    def name(self) -> str:
        return self.key.rpartition("/")[2] or self.view.root.rpartition("/")[2]

    @property
    def suffix(self) -> str:
        return os.path.splitext(self.name)[1]

    @property
    def parent(self) -> StoredPath:
        return StoredPath(self.view, self.key.rpartition("/")[0])

    def with_name(self, name: str) -> StoredPath:
        return self.parent / name

    @property
    def parents(self) -> tuple[StoredPath, ...]:
        """The folders that contain it, up to the root of the store."""
        parts = self.key.split("/") if self.key else []
        return tuple(StoredPath(self.view, "/".join(parts[:count])) for count in reversed(range(len(parts))))

    def resolve(self) -> StoredPath:
        """The same place in the store as it is now."""
        return StoredPath(self.view.again(), self.key)

    def exists(self) -> bool:
        return self.view.look(self.key) is not None

    def is_dir(self) -> bool:
        return self.view.look(self.key) == FOLDER

    def is_file(self) -> bool:
        return self.view.look(self.key) not in (None, FOLDER)

    def iterdir(self) -> Iterator[StoredPath]:
        """The content of a folder. Its sizes are then known, without another request."""
        return (self / name for name in self.view.names(self.key))

    def glob(self, pattern: str) -> Iterator[StoredPath]:
        """The content of a folder whose names match the pattern, which has no slash."""
        return (self / name for name in fnmatch.filter(self.view.names(self.key), pattern))

    def stat(self) -> Status:
        """The size of an object."""
        return Status(self.view.size(self.key))

    def open(self, mode: str = "rb", buffering: int = -1) -> Any:
        """An object as a binary file: each read is one request for exactly these bytes, through a buffer of at least
        `buffering` bytes where that is not 0."""
        if mode != "rb":
            raise ValueError(f"a stored object is opened in mode 'rb', not {mode!r}")
        reader = _Reader(self)
        if buffering == 0:
            return reader
        return io.BufferedReader(reader, READ_AHEAD if buffering < 0 else buffering)


Location = Path | StoredPath


class _Reader(io.RawIOBase):
    def __init__(self, path: StoredPath) -> None:
        self._view, self._key = path.view, path.key
        self._size = path.stat().st_size
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = os.SEEK_SET, /) -> int:
        found = offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._size}[whence]
        if found < 0:
            raise ValueError(f"{found} is before the beginning of {self._view.url(self._key)}")
        self._at = found
        return found

    def readinto(self, buffer: Any, /) -> int:
        wanted = memoryview(buffer).cast("B")
        stop = min(self._at + len(wanted), self._size)
        if stop <= self._at:
            return 0
        found = self._view.read(self._key, self._at, stop)
        wanted[: len(found)] = found
        self._at = stop
        return len(found)

    def readall(self) -> bytes:
        rest = bytearray(max(0, self._size - self._at))
        self.readinto(rest)
        return bytes(rest)


def locate(path: str | os.PathLike[str]) -> Location:
    """The location of a path or a URL; the store is not contacted yet, nor is its library imported.

    Args:
      path: of this machine; or s3://BUCKET/PATH, gs://BUCKET/PATH, or hf://ORGANIZATION/NAME, which @REVISION and the path
        of a file or folder in the repository may follow; for data sets hf://datasets/ORGANIZATION/NAME.

    Raises:
      UserError: a URL of another kind, one without a bucket or a repository, or one as a `Path`.
    """
    if isinstance(path, Path) and LOOKS_STORED.match(os.fspath(path)):
        raise UserError(f"{shown(os.fspath(path), 100)}: a URL as a Path has lost a slash; give it as text")
    if isinstance(path, Path | StoredPath):
        return path
    text = os.fspath(path)
    found = URL.fullmatch(text)
    if found is None:
        return Path(text)
    scheme = found[1].lower()
    if scheme not in EXAMPLES:
        raise UserError(f"{shown(text, 100)}: {scheme}:// is not read; {', '.join(EXAMPLES.values())} and paths are")
    names = [name for name in found[2].split("/") if name]
    first = 1 if scheme != "hf" else 3 if names[:1] == ["datasets"] else 2
    if len(names) < first or found[2].startswith("/") or any(name in (".", "..") for name in names):
        raise UserError(f"{shown(text, 100)} names nothing in a store; write it as {EXAMPLES[scheme]}")
    root = f"{scheme}://{'/'.join(names[:first])}"
    return StoredPath(StoreView(root, partial(_open, scheme, root)), "/".join(names[first:]))


@overload
def resolved(place: Path) -> Path: ...
@overload
def resolved(place: Location) -> Location: ...
def resolved(place: Location) -> Location:
    """The same place without links on the way to it, or in the store as it is now.

    Of links that lead to one another the path stays, and whoever opens it gets an OSError; `Path.resolve` raises a
    RuntimeError before Python 3.13.
    """
    return place.resolve() if isinstance(place, StoredPath) else Path(os.path.realpath(place))


def on_disk(path: str | os.PathLike[str], what: str) -> Path:
    """The path of something that can only be on this machine so far.

    Args:
      what: what it is, for the message.

    Raises:
      UserError: a URL.
    """
    text = os.fspath(path)
    if LOOKS_STORED.match(text):  # also as a `Path`, which keeps only one of the two slashes
        raise UserError(f"{shown(text, 100)}: {what} must be on this machine: it is written to as disks are")
    return Path(text)


def _open(scheme: str, root: str) -> Store:
    """The store of a URL, by the library that reads it."""
    if scheme == "hf":
        from llama_jax.storage.hub import open_hub

        return open_hub(root)
    from llama_jax.storage.object_store import open_bucket

    return open_bucket(root)


def read_whole(path: Location, kind: type[UserError], largest: int, what: str = "settings") -> bytes:
    """The bytes of a file.

    Raises:
      UserError: of this kind, for what is no file or has more than `largest` bytes, which no `what` of a model has.
      OSError: it cannot be read.
    """
    if not path.is_file():  # reading a pipe would wait for ever
        raise kind(f"{path} is not a file; copy it again")
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(0)
        if size > largest:
            raise kind(f"{path} is over {largest} bytes, too large to be a model's {what}; is it another file?")
        return file.read(size)  # and no more, where somebody goes on writing


def read_text(path: Location, kind: type[UserError]) -> str:
    """The text of a settings file, in UTF-8; for the errors see `read_whole`."""
    try:
        return read_whole(path, kind, LARGEST_JSON).decode("utf-8")
    except UnicodeDecodeError as error:
        raise kind(f"{path} is not UTF-8 text ({error}); copy it again") from None


def read_object(path: Location, kind: type[UserError]) -> dict[str, Any]:
    """The object in a JSON file; for the errors see `read_whole`."""
    try:
        found = json.loads(read_text(path, kind))
    except UserError:
        raise
    except (ValueError, RecursionError) as error:
        raise kind(f"{path} is not valid JSON ({reason_of(error)}); copy it again") from None
    if not isinstance(found, dict):
        raise kind(f"{path} holds a {type(found).__name__}, not an object; copy it again")
    return found
