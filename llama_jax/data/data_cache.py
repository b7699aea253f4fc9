"""The cache of data: texts and corpora of a store, fetched once, and tokenized corpora, all below a limit in bytes."""

from __future__ import annotations

import hashlib
import json
import os
import re
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import platformdirs
from tqdm import tqdm

from llama_jax.errors import DataError, reading
from llama_jax.storage import StoredPath, locate
from llama_jax.storage.atomic_write import remove, write_atomically
from llama_jax.storage.consistent_reader import MAX_REQUEST_BYTES, StoreEntry

CACHE_ENTRY = re.compile(r"[0-9a-f]{32}(\.corpus)?")  # names in a cache: folders of what was fetched, and corpora
RECENT_SECONDS = 600  # seconds
DEFAULT_LIMIT = 100  # gigabytes of a cache
CORPORA, OBJECTS = "corpora", "objects"  # in the cache
SAVED_SPLITS = "dataset_dict.json"  # beside a folder for each split, by DatasetDict.save_to_disk
SAVED_STATE = "state.json"  # beside the files of one, by Dataset.save_to_disk
UNFINISHED = "unfinished-build.json"  # in a folder in which `build` works
DESCRIPTIONS = (SAVED_SPLITS, SAVED_STATE, UNFINISHED)  # what describes the data in a folder
FETCH_THREADS = 8  # files at a time


def cache_folder() -> Path:
    """The folder named by LLAMA_JAX_CACHE, or the user's cache folder."""
    return Path(os.environ.get("LLAMA_JAX_CACHE") or platformdirs.user_cache_dir("llama_jax"))


def cache_limit() -> int:
    """LLAMA_JAX_CACHE_LIMIT in bytes, or DEFAULT_LIMIT.

    Raises:
      DataError: it is not a number of gigabytes.
    """
    text = os.environ.get("LLAMA_JAX_CACHE_LIMIT", str(DEFAULT_LIMIT))
    try:
        limit = int(float(text) * 1e9)
    except (ValueError, OverflowError):
        limit = -1
    if limit < 0:
        raise DataError(f"LLAMA_JAX_CACHE_LIMIT={text} must be a number of gigabytes, at least 0; set it so, or not at all")
    return limit


def cannot_cache(text: str) -> DataError:
    """The message that a cache cannot be written to, with the remedy."""
    return DataError(f"{text}; name another folder as `cache`, or as LLAMA_JAX_CACHE in the environment")


def note_use(path: Path) -> None:
    """Record that an entry of a cache was used just now, for `make_room`."""
    with suppress(OSError):  # a cache that is only read
        os.utime(path)


def make_room(folder: Path, limit: int, kept: Path) -> None:
    """Remove the least recently used entries of a cache until no more than `limit` bytes are left.

    What was used in the last minutes stays, since another process may be about to read it, and so does `kept`. A mapped
    corpus stays readable in the processes that have it open. Only what has the name of an entry is touched.
    """
    found: list[tuple[float, int, Path]] = []
    with suppress(OSError):
        for path in folder.iterdir():
            if CACHE_ENTRY.fullmatch(path.name):
                with suppress(OSError):
                    files = path.rglob("*") if path.is_dir() else [path]
                    size = sum(file.stat().st_size for file in files if file.is_file())
                    found.append((path.stat().st_mtime, size, path))
    total = sum(size for _, size, _ in found)
    for used, size, path in sorted(found):
        if total <= limit or used > time.time() - RECENT_SECONDS:
            break
        if path != kept:
            remove(path)
            if not path.exists():  # else another user owns it
                total -= size


# --- data in a store -----------------------------------------------------------------------------------------------------


def local_copy(path: str | os.PathLike[str], suffixes: tuple[str, ...]) -> Path:
    """A path as it is; for a URL the file, or the folder, that holds what is stored there now.

    Of a folder what is not hidden and has one of the suffixes is fetched, and what describes it: into a folder of the cache
    that appears whole, and is taken again for as long as the store lists the same names, sizes and versions. All of these
    are at most LLAMA_JAX_CACHE_LIMIT gigabytes; the least recently used ones are removed first.

    Raises:
      DataError: nothing there, the store gives no answer, or no room for it.
    """
    where = locate(path)
    if isinstance(where, Path):
        return where
    with reading(path, DataError):
        return _fetched(where.resolve(), suffixes)


def _fetched(place: StoredPath, suffixes: tuple[str, ...]) -> Path:
    if place.is_dir():
        base, single = place, ""
        found = {
            name: listed
            for name, listed in _below(place)
            if name.lower().endswith(suffixes) or name.rpartition("/")[2] in DESCRIPTIONS
        }
        if not any(name.lower().endswith(suffixes) for name in found):
            raise DataError(f"{place} holds no file that ends in {', '.join(suffixes)}; pass the files by name")
    elif (alone := place.view.look(place.key)) is not None:
        base, single, found = place.parent, place.name, {place.name: alone}
    else:
        raise DataError(f"{place}: nothing is stored there; pass files of text, or a folder of them")
    listing = json.dumps([str(place), sorted((name, *listed) for name, listed in found.items())])
    objects = cache_folder() / OBJECTS
    folder = objects / hashlib.sha256(listing.encode()).hexdigest()[:32]
    sizes = {name: int(listed.size or 0) for name, listed in found.items()}
    if not _is_whole(folder, sizes):
        with write_atomically(folder, folder=True, raises=cannot_cache) as target:
            _fetch(base, sizes, target)
        make_room(objects, cache_limit(), folder)
    note_use(folder)
    return folder / single


def _below(folder: StoredPath, before: str = "") -> Iterator[tuple[str, StoreEntry]]:
    """The objects in a folder and those below, by their paths in it."""
    for name, listed in folder.view.names(folder.key).items():
        if name.startswith("."):
            continue
        if listed.size is None:
            yield from _below(folder / name, f"{before}{name}/")
        else:
            yield f"{before}{name}", listed


def _is_whole(folder: Path, sizes: dict[str, int]) -> bool:
    """Whether all is there: it appeared so, but may have been touched since."""
    try:
        return all((folder / name).stat().st_size == size for name, size in sizes.items())
    except OSError:
        return False


def _fetch(base: StoredPath, sizes: dict[str, int], folder: Path) -> None:
    with tqdm(total=sum(sizes.values()), desc=f"fetching {base}", unit="B", unit_scale=True, leave=False, delay=1.0) as bar:

        def fetch(name: str) -> None:
            source, target = base / name, folder / name
            target.parent.mkdir(parents=True, exist_ok=True)
            with target.open("wb") as file:
                for first in range(0, sizes[name], MAX_REQUEST_BYTES):
                    file.write(source.view.read(source.key, first, min(first + MAX_REQUEST_BYTES, sizes[name])))
                    bar.update(file.tell() - first)

        with ThreadPoolExecutor(FETCH_THREADS) as pool:
            list(pool.map(fetch, sizes))
