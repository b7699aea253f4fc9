"""Paths on this machine and URLs of stores, with the methods that reading a model needs; bounded reads."""

from __future__ import annotations

import fnmatch
import io
import json
import os
import re
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple, overload

import platformdirs

from llama_jax.errors import UserError, reason_of, short_repr
from llama_jax.storage.consistent_reader import FOLDER_ENTRY, Store, StoreView

MAX_JSON_BYTES = 4 << 20  # parsed, they take up to 25 times as many. The index of a 405B model has a thirtieth of this
URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+)://(.*)", re.DOTALL)
LOOKS_STORED = re.compile(r"(s3|gs|hf):/")
EXAMPLES = {"s3": "s3://BUCKET/PATH", "gs": "gs://BUCKET/PATH", "hf": "hf://ORGANIZATION/NAME"}
READ_AHEAD = 1 << 12  # bytes of a buffered read: the beginning of a file, to recognize its format


def cache_folder() -> Path:
    """The folder named by LLAMA_JAX_CACHE, or the user's cache folder: tokenized texts, downloads, compiled programs."""
    return Path(os.environ.get("LLAMA_JAX_CACHE") or platformdirs.user_cache_dir("llama_jax"))


class Status(NamedTuple):
    """The result of `stat` for an object."""

    st_size: int


class StoredPath(os.PathLike[str]):
    """An object in a store, or a folder: all objects whose names begin with its name and a slash.

    It has the methods of `pathlib.Path` that reading needs, and its string is its URL. Paths derived from one another share
    a consistent view of the store (`StoreView`).
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
        """The same location in a new view of the store."""
        return StoredPath(self.view.refreshed(), self.key)

    def exists(self) -> bool:
        return self.view.lookup(self.key) is not None

    def is_dir(self) -> bool:
        return self.view.lookup(self.key) == FOLDER_ENTRY

    def is_file(self) -> bool:
        return self.view.lookup(self.key) not in (None, FOLDER_ENTRY)

    def iterdir(self) -> Iterator[StoredPath]:
        """The content of a folder. Sizes are then known without further requests."""
        return (self / name for name in self.view.names(self.key))

    def glob(self, pattern: str) -> Iterator[StoredPath]:
        """The entries of a folder whose names match the pattern, which has no slash."""
        return (self / name for name in fnmatch.filter(self.view.names(self.key), pattern))

    def stat(self) -> Status:
        """The size of an object."""
        return Status(self.view.size(self.key))

    def open(self, mode: Literal["rb"] = "rb", buffering: int = -1) -> Any:
        """An object as a binary file: each read is one request for exactly these bytes, through a buffer of at least
        `buffering` bytes if that is not 0."""
        reader = _ObjectReader(self)
        if buffering == 0:
            return reader
        return io.BufferedReader(reader, READ_AHEAD if buffering < 0 else buffering)


Location = Path | StoredPath


class _ObjectReader(io.RawIOBase):
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
        position = offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._size}[whence]
        if position < 0:
            raise ValueError(f"{position} is before the beginning of {self._view.url(self._key)}")
        self._at = position
        return position

    def readinto(self, buffer: Any, /) -> int:
        target = memoryview(buffer).cast("B")
        stop = min(self._at + len(target), self._size)
        if stop <= self._at:
            return 0
        content = self._view.read(self._key, self._at, stop)
        target[: len(content)] = content
        self._at = stop
        return len(content)

    def readall(self) -> bytes:
        rest = bytearray(max(0, self._size - self._at))
        self.readinto(rest)
        return bytes(rest)


def locate(path: str | os.PathLike[str]) -> Location:
    """The location of a path or a URL; does not contact the store or import its library.

    Args:
      path: a path on this machine; s3://BUCKET/PATH; gs://BUCKET/PATH; or hf://ORGANIZATION/NAME, optionally followed by
        @REVISION and a path in the repository; for datasets hf://datasets/ORGANIZATION/NAME.

    Raises:
      UserError: an unknown URL scheme, a URL without a bucket or repository, or a URL as a `Path`.
    """
    if isinstance(path, Path) and LOOKS_STORED.match(os.fspath(path)):
        raise UserError(f"{short_repr(os.fspath(path), 100)}: a URL as a Path has lost a slash; pass it as a str")
    if isinstance(path, Path | StoredPath):
        return path
    text = os.fspath(path)
    match = URL.fullmatch(text)
    if match is None:
        return Path(text)
    scheme = match[1].lower()
    if scheme not in EXAMPLES:
        raise UserError(
            f"{short_repr(text, 100)}: {scheme}:// is not supported; use a path or {', '.join(EXAMPLES.values())}"
        )
    names = [name for name in match[2].split("/") if name]
    first = 1 if scheme != "hf" else 3 if names[:1] == ["datasets"] else 2
    if len(names) < first or match[2].startswith("/") or any(name in (".", "..") for name in names):
        raise UserError(f"{short_repr(text, 100)} names nothing in a store; write it as {EXAMPLES[scheme]}")
    root = f"{scheme}://{'/'.join(names[:first])}"
    return StoredPath(StoreView(root, partial(_open_store, scheme, root)), "/".join(names[first:]))


@overload
def resolved(path: Path) -> Path: ...
@overload
def resolved(path: Location) -> Location: ...
def resolved(path: Location) -> Location:
    """The same path with symlinks resolved, or the same location in a new view of the store.

    Symlink loops are returned unchanged, and opening them raises an OSError; `Path.resolve` would raise a RuntimeError
    before Python 3.13.
    """
    return path.resolve() if isinstance(path, StoredPath) else Path(os.path.realpath(path))


def on_disk(path: str | os.PathLike[str], what: str) -> Path:
    """The path of something that must be on this machine.

    Args:
      what: a name for it in the error message.

    Raises:
      UserError: a URL.
    """
    text = os.fspath(path)
    if LOOKS_STORED.match(text):  # also as a `Path`, which keeps only one of the two slashes
        raise UserError(
            f"{short_repr(text, 100)}: {what} must be on this machine, because it is written in place; pass a path"
        )
    return Path(text)


def _open_store(scheme: str, root: str) -> Store:
    """Open the store at a URL with its library."""
    if scheme == "hf":
        from llama_jax.storage.hub import open_hub

        return open_hub(root)
    from llama_jax.storage.object_store import open_bucket

    return open_bucket(root)


def read_whole(path: Location, error_type: type[UserError], max_bytes: int, what: str = "settings") -> bytes:
    """The bytes of a file; an error of this `error_type` if it is not a file, or has more than `max_bytes` bytes."""
    if not path.is_file():  # reading a pipe would wait forever
        raise error_type(f"{path} is not a file; copy it again")
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(0)
        if size > max_bytes:
            raise error_type(f"{path} is over {max_bytes} bytes, too large to be a model's {what}; is it another file?")
        return file.read(size)  # and no more, if another process is still writing


def read_text(path: Location, error_type: type[UserError]) -> str:
    """The text of a settings file, in UTF-8; for errors see `read_whole`."""
    try:
        return read_whole(path, error_type, MAX_JSON_BYTES).decode("utf-8")
    except UnicodeDecodeError as error:
        raise error_type(f"{path} is not UTF-8 text ({error}); copy it again") from None


def read_object(path: Location, error_type: type[UserError]) -> dict[str, Any]:
    """The object in a JSON file; for errors see `read_whole`."""
    try:
        content = json.loads(read_text(path, error_type))
    except UserError:
        raise
    except (ValueError, RecursionError) as error:
        raise error_type(f"{path} is not valid JSON ({reason_of(error)}); copy it again") from None
    if not isinstance(content, dict):
        raise error_type(f"{path} holds a {type(content).__name__}, not an object; copy it again")
    return content
