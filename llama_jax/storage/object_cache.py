"""Local copies of objects, and the cache of copies and tokenized corpora, which is limited in bytes."""

from __future__ import annotations

import hashlib
import json
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

from tqdm import tqdm

from llama_jax.errors import UserError
from llama_jax.storage.atomic_write import remove, write_atomically
from llama_jax.storage.consistent_reader import MAX_REQUEST_BYTES, StoreEntry
from llama_jax.storage.paths import StoredPath, cache_folder

OBJECTS = "objects"  # in the cache
CACHE_ENTRY = re.compile(r"[0-9a-f]{32}(\.corpus)?")  # names in a cache: folders of fetched files, and corpora
RECENT_SECONDS = 600  # seconds
DEFAULT_LIMIT = 100  # gigabytes of a cache
FETCH_THREADS = 8  # files fetched concurrently


def objects_below(folder: StoredPath, before: str = "") -> Iterator[tuple[str, StoreEntry]]:
    """The objects in a folder and below that are not hidden, by their paths relative to it, each after `before`."""
    for name, entry in folder.view.names(folder.key).items():
        if name.startswith("."):
            continue
        if entry.size is None:
            yield from objects_below(folder / name, f"{before}{name}/")
        else:
            yield f"{before}{name}", entry


def fetch_to_cache(base: StoredPath, entries: Mapping[str, StoreEntry], raises: Callable[[str], UserError]) -> Path:
    """The folder in the cache that holds these objects under their names; they are fetched if it is not there.

    It appears only when complete, and is used as long as the store lists the same names, sizes and versions. The cache is
    limited to LLAMA_JAX_CACHE_LIMIT gigabytes; the least recently used copies are removed first.

    Args:
      entries: by their paths relative to `base`.
      raises: makes the error from a message that says that the cache cannot be written to, and why.
    """
    listing = json.dumps([str(base), sorted((name, *entry) for name, entry in entries.items())])
    objects = cache_folder() / OBJECTS
    folder = objects / hashlib.sha256(listing.encode()).hexdigest()[:32]
    if not _is_complete(folder, entries):
        with write_atomically(folder, folder=True, raises=raises) as target:
            fetch_objects(base, entries, target)
        make_room(objects, cache_limit(), folder)
    note_use(folder)
    return folder


def _is_complete(folder: Path, entries: Mapping[str, StoreEntry]) -> bool:
    """Whether all files are there: the folder was complete, but may have been modified since."""
    try:
        return all((folder / name).stat().st_size == entry.size for name, entry in entries.items())
    except OSError:
        return False


def fetch_objects(base: StoredPath, entries: Mapping[str, StoreEntry], folder: Path) -> None:
    """Copy objects into a folder on this machine, under their paths relative to `base`."""
    total = sum(entry.size or 0 for entry in entries.values())
    with tqdm(total=total, desc=f"fetching {base}", unit="B", unit_scale=True, leave=False, delay=1.0) as bar:

        def fetch(name: str) -> None:
            source, target, size = base / name, folder / name, entries[name].size or 0
            target.parent.mkdir(parents=True, exist_ok=True)
            with target.open("wb") as file:
                for first in range(0, size, MAX_REQUEST_BYTES):
                    file.write(source.view.read(source.key, first, min(first + MAX_REQUEST_BYTES, size)))
                    bar.update(file.tell() - first)

        with ThreadPoolExecutor(FETCH_THREADS) as pool:
            list(pool.map(fetch, entries))


def cache_limit() -> int:
    """LLAMA_JAX_CACHE_LIMIT in bytes, or DEFAULT_LIMIT.

    Raises:
      UserError: it is not a number of gigabytes.
    """
    text = os.environ.get("LLAMA_JAX_CACHE_LIMIT", str(DEFAULT_LIMIT))
    try:
        limit = int(float(text) * 1e9)
    except (ValueError, OverflowError):
        limit = -1
    if limit < 0:
        raise UserError(f"LLAMA_JAX_CACHE_LIMIT={text} must be a number of gigabytes, at least 0; correct it, or unset it")
    return limit


def note_use(path: Path) -> None:
    """Record that an entry of a cache was just used, for `make_room`."""
    with suppress(OSError):  # a read-only cache
        os.utime(path)


def make_room(folder: Path, limit: int, keep: Path) -> None:
    """Remove the least recently used entries of a cache until no more than `limit` bytes are left.

    Recently used entries stay, since another process may be about to read them, and so does `keep`. A mapped corpus stays
    readable in processes that have it open. Only names of cache entries are touched.
    """
    entries: list[tuple[float, int, Path]] = []
    with suppress(OSError):
        for path in folder.iterdir():
            if CACHE_ENTRY.fullmatch(path.name):
                with suppress(OSError):
                    files = path.rglob("*") if path.is_dir() else [path]
                    size = sum(file.stat().st_size for file in files if file.is_file())
                    entries.append((path.stat().st_mtime, size, path))
    total = sum(size for _, size, _ in entries)
    for used, size, path in sorted(entries):
        if total <= limit or used > time.time() - RECENT_SECONDS:
            break
        if path != keep:
            remove(path)
            if not path.exists():  # otherwise another user owns it
                total -= size
