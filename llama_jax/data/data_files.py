"""The files that a corpus is made from, including the layouts of the Hugging Face Hub and its datasets library; whether they
have changed."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import NamedTuple

from llama_jax.data.mixture import shares
from llama_jax.errors import DataError, reading, short_repr
from llama_jax.storage import StoredPath, locate, resolved
from llama_jax.storage.object_cache import fetch_to_cache, objects_below

Paths = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]
SOURCE_NAME = re.compile(r"[A-Za-z0-9_.-]+")
DATA_TYPES = (".txt", ".jsonl", ".parquet", ".arrow", ".bin", ".array_record", ".corpus")
DATA_SUFFIXES = (*DATA_TYPES, *(suffix + packed for suffix in (".txt", ".jsonl") for packed in (".gz", ".zst")))
SPLIT_PATTERN = r"(?P<split>(?:train|test|validation|valid|val|dev|eval)\w*)"
SHARD_NUMBERS = r"-\d{5}-of-\d{5}(?:-[0-9a-f]+)?"
# On the Hub data/train-00000-of-00002.parquet; in the library's cache name-train.arrow or name-train-00000-of-00002.arrow.
HUB_FILE = re.compile(rf"{SPLIT_PATTERN}{SHARD_NUMBERS}\.(?:parquet|jsonl|txt)(?:\.gz|\.zst)?")
DATASETS_CACHE_FILE = re.compile(rf"\w+-{SPLIT_PATTERN}(?:{SHARD_NUMBERS})?\.arrow")
CORPORA = "corpora"  # in the cache
SAVED_SPLITS = "dataset_dict.json"  # next to a folder per split, by DatasetDict.save_to_disk
SAVED_STATE = "state.json"  # next to the files of one, by Dataset.save_to_disk
UNFINISHED = "unfinished-build.json"  # in the folder of an unfinished `build`
DESCRIPTIONS = (SAVED_SPLITS, SAVED_STATE, UNFINISHED)  # files that describe the data in a folder


@dataclass(frozen=True)
class WeightedData:
    """A source of a mixture, as the user specified it.

    Attributes:
      name: its name in metrics and messages.
      paths: its files and folders, see `find_files`.
      weight: its share of the rows is this over the sum of all weights, exactly as written: 0.7 is 7/10.
    """

    name: str
    paths: Paths
    weight: float | str = 1


Data = Paths | Sequence[WeightedData]


class SourceFiles(NamedTuple):
    """The files of a source; the name is empty and the share 1 if the data is not a mixture."""

    name: str
    files: list[Path]
    share: Fraction


def find_data(data: Data) -> list[SourceFiles]:
    """The files of each source of a mixture, with its name and share; a single source for plain paths.

    Raises:
      DataError: see `find_files` and `mixture.shares`; a duplicate or invalid name; or both paths and sources.
    """
    entries = [data] if isinstance(data, str | os.PathLike) else list(data)
    weighted = [source for source in entries if isinstance(source, WeightedData)]
    plain = [path for path in entries if not isinstance(path, WeightedData)]
    if not weighted:
        return [SourceFiles("", find_files(plain), Fraction(1))]
    if plain:
        raise DataError(f"{plain[0]} has no name and weight, but others do: write all as SOURCE_NAME=PATH:WEIGHT, or none")
    for name, times in Counter(source.name for source in weighted).items():
        if not SOURCE_NAME.fullmatch(name):
            raise DataError(
                f"the name {short_repr(name, 40)} of a source must be letters, digits, dots, dashes and underscores"
            )
        if times > 1:
            raise DataError(f"two sources are named {name}; put their files into one folder, or use two names")
    parts = shares({source.name: source.weight for source in weighted})
    weighted.sort(key=lambda source: source.name)  # independent of the order given
    sources = [SourceFiles(source.name, find_files(source.paths), parts[source.name]) for source in weighted]
    _check_once([file for source in sources for file in source.files])
    return sources


class Source(NamedTuple):
    """A file as it was when it was read."""

    size: int
    modified: int
    sha256: str


def find_files(paths: Paths) -> list[Path]:
    """The files to read, in the given order; for a folder, those below it with a suffix of DATA_SUFFIXES, by name.

    Hidden files and folders, whose names begin with a dot, are ignored. For a dataset in the layout of the Hugging Face Hub
    or `save_to_disk`, all files of a folder with a single split are read.

    Raises:
      DataError: nothing at a path, nothing to read in a folder, an empty file, a duplicate file, or a folder with several
        splits of a dataset or with an unfinished build.
    """
    files: list[Path] = []
    for path in [paths] if isinstance(paths, str | os.PathLike) else paths:
        location = resolved(local_copy(path, DATA_SUFFIXES))
        if location.is_dir():
            check_finished(location)
            inside = sorted(
                file
                for file in location.rglob("[!.]*")
                if file.name.lower().endswith(DATA_SUFFIXES)
                and not any(part.startswith(".") for part in file.relative_to(location).parts)
                and file.is_file()
            )
            if not inside:
                raise DataError(f"{path} holds no file that ends in {', '.join(DATA_TYPES)}; pass the files by name")
            files += _one_split(location, inside)
        elif location.is_file():
            files.append(location)
        else:
            state = "is neither a file nor a folder" if location.exists() else "does not exist"
            raise DataError(f"{path} {state}; pass files of text, or a folder of them")
    if not files:
        raise DataError("no data files given; pass files of text, or a folder of them (--data PATH)")
    _check_once(files)
    for file in files:
        if not file.stat().st_size:
            raise DataError(f"{file} is empty; is it the right file?")
    return files


def check_finished(folder: Path) -> None:
    """Raise DataError for an unfinished build in a folder, or below it."""
    for plan_file in folder.rglob(UNFINISHED):
        if not any(part.startswith(".") for part in plan_file.parent.relative_to(folder).parts):
            raise DataError(f"{plan_file.parent} holds an unfinished build; the same `llama-jax data build` resumes it")


def _one_split(folder: Path, files: Sequence[Path]) -> list[Path]:
    """The files of a dataset's only split below a folder; all files if the folder is not a dataset.

    Raises:
      DataError: it has several splits, which would all be trained on.
    """
    for file in files:
        for above in (file.parent, *file.parent.parents):
            if (above / SAVED_SPLITS).is_file():
                names = sorted(entry.name for entry in above.iterdir() if (entry / SAVED_STATE).is_file())
                raise _several(folder, names, f"{above}/{names[0] if names else 'SOURCE_NAME'}")
            if above == folder:
                break
    data_files = [file for file in files if file.suffix != ".arrow" or _is_saved(file)]
    splits: dict[str, Path] = {}
    for file in data_files:
        if (match := HUB_FILE.fullmatch(file.name) or DATASETS_CACHE_FILE.fullmatch(file.name)) is not None:
            splits.setdefault(match["split"], file)
    if len(splits) > 1:
        name, file = next((pair for pair in splits.items() if pair[0] == "train"), next(iter(splits.items())))
        raise _several(folder, sorted(splits), f"{file.parent}/*{name}*")
    return data_files


def _is_saved(file: Path) -> bool:
    """Whether an Arrow file belongs to the dataset saved in its folder, which may also contain cached results.

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
    return DataError(
        f"{folder} holds several splits of a dataset, {short_repr(names, 200)}; use one of them, such as {example}"
    )


def _check_once(files: Sequence[Path]) -> None:
    for file, times in Counter(files).items():
        if times > 1:
            raise DataError(f"{file} is given twice; its documents could be in both parts of a split")


def describe_source(path: Path) -> Source:
    """The file as it is now."""
    stat = path.stat()
    with path.open("rb") as file:
        return Source(stat.st_size, stat.st_mtime_ns, hashlib.file_digest(file, "sha256").hexdigest())


def check_untouched(path: Path, source: Source) -> None:
    """Raise DataError for a file that was written to."""
    if not untouched(path, source):
        raise DataError(f"{path} changed while being read; try again when nothing writes to it")


def untouched(path: Path, source: Source) -> bool:
    """Whether a file was not written to: then it is unchanged without reading its content."""
    stat = path.stat()
    return (stat.st_size, stat.st_mtime_ns) == (source.size, source.modified)


def unchanged(path: Path, source: Source) -> bool:
    """Whether a file has the same content, which is read only if the file was written to."""
    return untouched(path, source) or (path.stat().st_size == source.size and describe_source(path).sha256 == source.sha256)


# --- files in a store ----------------------------------------------------------------------------------------------------


def local_copy(path: str | os.PathLike[str], suffixes: tuple[str, ...]) -> Path:
    """The path itself; for a URL, the local file or folder with a copy of what is stored there now.

    In a folder, files that are not hidden and have one of the suffixes are fetched, and those that describe the data; see
    `fetch_to_cache`.

    Raises:
      DataError: nothing is there, the store does not respond, or there is no room.
    """
    where = locate(path)
    if isinstance(where, Path):
        return where
    with reading(path, DataError):
        return _fetched(where.resolve(), suffixes)


def _fetched(location: StoredPath, suffixes: tuple[str, ...]) -> Path:
    if location.is_dir():
        base, single = location, ""
        objects = {
            name: listed
            for name, listed in objects_below(location)
            if name.lower().endswith(suffixes) or name.rpartition("/")[2] in DESCRIPTIONS
        }
        if not any(name.lower().endswith(suffixes) for name in objects):
            raise DataError(f"{location} holds no file that ends in {', '.join(suffixes)}; pass the files by name")
    elif (stored_object := location.view.lookup(location.key)) is not None:
        base, single, objects = location.parent, location.name, {location.name: stored_object}
    else:
        raise DataError(f"{location}: nothing is stored there; pass files of text, or a folder of them")
    folder = fetch_to_cache(base, objects, cannot_cache)
    return folder / single


def cannot_cache(text: str) -> DataError:
    """The error for a cache that cannot be written to, with the remedy."""
    return DataError(f"{text}; set another folder as `cache`, or as LLAMA_JAX_CACHE in the environment")
