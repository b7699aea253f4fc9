"""The files that a corpus is made from, also in the layouts of the Hugging Face hub and its datasets library; whether they
are still the same; and the cache: files of a store, fetched once, and tokenized corpora, all below a limit in bytes."""

from __future__ import annotations

import hashlib
import json
import os
import re
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import NamedTuple

import platformdirs
from tqdm import tqdm

from llama_jax.data.mixture import shares
from llama_jax.errors import DataError, reading, shown
from llama_jax.storage import StoredPath, locate, resolved
from llama_jax.storage.atomic_write import remove, write_atomically
from llama_jax.storage.consistent_reader import MAX_REQUEST_BYTES, StoreEntry

Paths = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]
SOURCE_NAME = re.compile(r"[A-Za-z0-9_.-]+")
DATA_KINDS = (".txt", ".jsonl", ".parquet", ".arrow", ".bin", ".array_record", ".corpus")
DATA_SUFFIXES = (*DATA_KINDS, *(kind + packed for kind in (".txt", ".jsonl") for packed in (".gz", ".zst")))
SPLIT_NAME = r"(?P<split>(?:train|test|validation|valid|val|dev|eval)\w*)"
SHARD_NUMBERS = r"-\d{5}-of-\d{5}(?:-[0-9a-f]+)?"
# On the hub data/train-00000-of-00002.parquet; in the library's cache name-train.arrow or name-train-00000-of-00002.arrow.
HUB_FILE = re.compile(rf"{SPLIT_NAME}{SHARD_NUMBERS}\.(?:parquet|jsonl|txt)(?:\.gz|\.zst)?")
DATASETS_CACHE_FILE = re.compile(rf"\w+-{SPLIT_NAME}(?:{SHARD_NUMBERS})?\.arrow")
CACHE_ENTRY = re.compile(r"[0-9a-f]{32}(\.corpus)?")  # names in a cache: folders of what was fetched, and corpora
RECENT_SECONDS = 600  # seconds
DEFAULT_LIMIT = 100  # gigabytes of a cache
CORPORA, OBJECTS = "corpora", "objects"  # in the cache
SAVED_SPLITS = "dataset_dict.json"  # beside a folder for each split, by DatasetDict.save_to_disk
SAVED_STATE = "state.json"  # beside the files of one, by Dataset.save_to_disk
UNFINISHED = "unfinished-build.json"  # in a folder in which `build` works
DESCRIPTIONS = (SAVED_SPLITS, SAVED_STATE, UNFINISHED)  # what describes the data in a folder
FETCH_THREADS = 8  # files at a time


@dataclass(frozen=True)
class WeightedData:
    """A source of a mixture, as it is given.

    Attributes:
      name: its name in metrics and messages.
      paths: its files and folders, see `find_files`.
      weight: its share of the rows is this over the sum of all weights, exactly as it is written: 0.7 is 7/10.
    """

    name: str
    paths: Paths
    weight: float | str = 1


Data = Paths | Sequence[WeightedData]


class FoundData(NamedTuple):
    """The files of a source; of data that are not a mixture the name is empty and the share 1."""

    name: str
    files: list[Path]
    share: Fraction


def find_data(data: Data) -> list[FoundData]:
    """The files of each source of a mixture by name, with its share; of plain paths a single source.

    Raises:
      DataError: see `find_files` and `mixture.shares`; a name twice or that is none; paths beside sources.
    """
    given = [data] if isinstance(data, str | os.PathLike) else list(data)
    named = [source for source in given if isinstance(source, WeightedData)]
    plain = [path for path in given if not isinstance(path, WeightedData)]
    if not named:
        return [FoundData("", find_files(plain), Fraction(1))]
    if plain:
        raise DataError(f"{plain[0]} has no name and weight, others have: write all as SOURCE_NAME=PATH:WEIGHT, or none")
    for name, times in Counter(source.name for source in named).items():
        if not SOURCE_NAME.fullmatch(name):
            raise DataError(f"the name {shown(name, 40)} of a source must be letters, digits, dots, dashes and underscores")
        if times > 1:
            raise DataError(f"two sources are called {name}; put their files into one folder, or give them two names")
    parts = shares({source.name: source.weight for source in named})
    named.sort(key=lambda source: source.name)  # in whatever order they are given
    found = [FoundData(source.name, find_files(source.paths), parts[source.name]) for source in named]
    _check_once([file for source in found for file in source.files])
    return found


class Source(NamedTuple):
    """A file as it was when it was read."""

    size: int
    modified: int
    sha256: str


def find_files(paths: Paths) -> list[Path]:
    """The files to read, in the order given; of a folder those with a suffix of DATA_SUFFIXES below it, by name.

    What is hidden in a folder, by a name that begins with a dot, is not read: neither files nor folders. Of a dataset as the
    Hugging Face hub has it, or `save_to_disk` writes it, all files of a folder are read that has one split of it.

    Raises:
      DataError: nothing at a path, nothing to read in a folder, an empty file, a file twice, or a folder with several
        splits of a dataset or with a build that is not finished.
    """
    found: list[Path] = []
    for path in [paths] if isinstance(paths, str | os.PathLike) else paths:
        given = resolved(local_copy(path, DATA_SUFFIXES))
        if not given.exists():
            raise DataError(f"{path} does not exist; pass files of text, or a folder of them")
        if given.is_dir():
            check_finished(given)
            inside = sorted(
                file
                for file in given.rglob("[!.]*")
                if file.name.lower().endswith(DATA_SUFFIXES)
                and not any(part.startswith(".") for part in file.relative_to(given).parts)
                and file.is_file()
            )
            if not inside:
                raise DataError(f"{path} holds no file that ends in {', '.join(DATA_KINDS)}; pass the files by name")
            found += _one_split(given, inside)
        elif given.is_file():
            found.append(given)
        else:
            raise DataError(f"{path} is neither a file nor a folder; pass files of text, or a folder of them")
    if not found:
        raise DataError("no files of data were given; pass files of text, or a folder of them (--data PATH)")
    _check_once(found)
    for file in found:
        if not file.stat().st_size:
            raise DataError(f"{file} is empty; is it the right file?")
    return found


def check_finished(folder: Path) -> None:
    """Raise DataError for a build in a folder, or below it, that is not finished."""
    for found in folder.rglob(UNFINISHED):
        if not any(part.startswith(".") for part in found.parent.relative_to(folder).parts):
            raise DataError(
                f"{found.parent} holds a build that is not finished; the same `llama-jax data build` continues it"
            )


def _one_split(folder: Path, files: Sequence[Path]) -> list[Path]:
    """The files below a folder that are the one split of a dataset; all of them if the folder is not a dataset.

    Raises:
      DataError: it holds several splits, which would all be trained on.
    """
    for file in files:
        for above in (file.parent, *file.parent.parents):
            if (above / SAVED_SPLITS).is_file():
                names = sorted(entry.name for entry in above.iterdir() if (entry / SAVED_STATE).is_file())
                raise _several(folder, names, f"{above}/{names[0] if names else 'SOURCE_NAME'}")
            if above == folder:
                break
    found = [file for file in files if file.suffix != ".arrow" or _is_saved(file)]
    splits: dict[str, Path] = {}
    for file in found:
        if (match := HUB_FILE.fullmatch(file.name) or DATASETS_CACHE_FILE.fullmatch(file.name)) is not None:
            splits.setdefault(match["split"], file)
    if len(splits) > 1:
        name, file = next((pair for pair in splits.items() if pair[0] == "train"), next(iter(splits.items())))
        raise _several(folder, sorted(splits), f"{file.parent}/*{name}*")
    return found


def _is_saved(file: Path) -> bool:
    """Whether an Arrow file belongs to the dataset saved in its folder, which may also hold cached results of computations.

    Raises:
      DataError: the list of its files is damaged.
    """
    state = file.parent / SAVED_STATE
    if not state.is_file():
        return True
    try:
        names = {entry["filename"] for entry in json.loads(state.read_bytes())["_data_files"]}
    except (OSError, ValueError, TypeError, KeyError, RecursionError) as error:
        raise DataError(f"{state} does not list the files of a dataset ({type(error).__name__}); save it again") from None
    return file.name in names


def _several(folder: Path, names: list[str], example: str) -> DataError:
    return DataError(f"{folder} holds several splits of a dataset, {shown(names, 200)}; use one of them, as {example}")


def _check_once(files: Sequence[Path]) -> None:
    for file, times in Counter(files).items():
        if times > 1:
            raise DataError(f"{file} is given twice; its documents would count twice, and could be on both sides of a split")


def describe(path: Path) -> Source:
    """The file as it is now."""
    stat = path.stat()
    with path.open("rb") as file:
        return Source(stat.st_size, stat.st_mtime_ns, hashlib.file_digest(file, "sha256").hexdigest())


def untouched(path: Path, source: Source) -> bool:
    """Whether nothing has written to a file: then its content need not be read to know that it is the same."""
    stat = path.stat()
    return (stat.st_size, stat.st_mtime_ns) == (source.size, source.modified)


def unchanged(path: Path, source: Source) -> bool:
    """Whether a file has the same content, which is read only where something has written to it."""
    return untouched(path, source) or (path.stat().st_size == source.size and describe(path).sha256 == source.sha256)


# --- files in a store ----------------------------------------------------------------------------------------------------


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


# --- cache ---------------------------------------------------------------------------------------------------------------


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
