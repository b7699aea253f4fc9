"""Texts and corpora in a store: fetched once, into a folder of the cache, from which they are read like any others."""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

from tqdm import tqdm

from llama_jax.data.cache import RECENT, cache_folder, cache_limit, elsewhere, note_use
from llama_jax.data.errors import DataError
from llama_jax.data.hub import SPLITS, STATE
from llama_jax.data.manifest import MANIFEST
from llama_jax.errors import reading
from llama_jax.storage import StoredPath, locate
from llama_jax.storage.atomic_write import remove, write_atomically
from llama_jax.storage.consistent_reader import MOST_OPEN, StoreEntry

OBJECTS = "objects"  # in the cache
BESIDE = (MANIFEST, SPLITS, STATE)  # what tells of the data in a folder
THREADS = 8  # files at a time


def on_this_machine(path: str | os.PathLike[str], suffixes: tuple[str, ...]) -> Path:
    """A path as it is; for a URL the file, or the folder, that holds what is stored there now.

    Of a folder what is not hidden and has one of the suffixes is fetched, and what tells of it: into a folder of the cache
    that appears whole, and is taken again for as long as the store lists the same names, sizes and versions. All of these
    are at most LLAMA_JAX_CACHE_LIMIT gigabytes; those go first that were not used for longest.

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
            if name.lower().endswith(suffixes) or name.rpartition("/")[2] in BESIDE
        }
        if not any(name.lower().endswith(suffixes) for name in found):
            raise DataError(f"{place} holds no file that ends in {', '.join(suffixes)}; give the files by name")
    elif (alone := place.view.look(place.key)) is not None:
        base, single, found = place.parent, place.name, {place.name: alone}
        manifest = (base / MANIFEST).view.look((base / MANIFEST).key) if place.name.endswith(".array_record") else None
        if manifest is not None:
            found[MANIFEST] = manifest
    else:
        raise DataError(f"{place}: nothing is stored there; give files of text, or a folder of them")
    told = json.dumps([str(place), sorted((name, *listed) for name, listed in found.items())])
    objects = cache_folder() / OBJECTS
    folder = objects / hashlib.sha256(told.encode()).hexdigest()[:32]
    sizes = {name: int(listed.size or 0) for name, listed in found.items()}
    if not _is_whole(folder, sizes):
        with write_atomically(folder, folder=True, raises=elsewhere) as target:
            _fetch(base, sizes, target)
        _make_room(objects, cache_limit(), folder)
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
                for first in range(0, sizes[name], MOST_OPEN):
                    file.write(source.view.read(source.key, first, min(first + MOST_OPEN, sizes[name])))
                    bar.update(file.tell() - first)

        with ThreadPoolExecutor(THREADS) as pool:
            list(pool.map(fetch, sizes))


def _make_room(objects: Path, limit: int, kept: Path) -> None:
    """Remove folders, those first that were not used for longest; what was used in the last minutes stays, and `kept`."""
    found: list[tuple[float, int, Path]] = []
    for folder in objects.iterdir():
        with suppress(OSError):
            size = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
            found.append((folder.stat().st_mtime, size, folder))
    total = sum(size for _, size, _ in found)
    for used, size, folder in sorted(found):
        if total <= limit or used > time.time() - RECENT:
            break
        if folder != kept and len(folder.name) == 32:
            remove(folder)
            total -= size
