"""The files that a corpus is made from, and whether they are still the same."""

from __future__ import annotations

import hashlib
import os
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import NamedTuple

from llama_jax.data.errors import DataError
from llama_jax.data.fetched import on_this_machine
from llama_jax.data.hub import data_files
from llama_jax.data.mixture import shares
from llama_jax.errors import shown
from llama_jax.storage import resolved

Paths = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]
NAME = re.compile(r"[A-Za-z0-9_.-]+")
KINDS = (".txt", ".jsonl", ".parquet", ".arrow", ".bin", ".array_record")
SUFFIXES = (*KINDS, *(kind + packed for kind in (".txt", ".jsonl") for packed in (".gz", ".zst")))


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
    """The files of a source; of data that are no mixture the name is empty and the share 1."""

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
        raise DataError(f"{plain[0]} has no name and weight, others have: give all as NAME=PATH:WEIGHT, or none")
    for name, times in Counter(source.name for source in named).items():
        if not NAME.fullmatch(name):
            raise DataError(f"the name {shown(name, 40)} of a source must be letters, digits, dots, dashes and underscores")
        if times > 1:
            raise DataError(f"two sources are called {name}; put their files into one folder, or give them two names")
    parts = shares({source.name: source.weight for source in named})
    named.sort(key=lambda source: source.name)  # in whatever order they are given
    found = [FoundData(source.name, find_files(source.paths), parts[source.name]) for source in named]
    _check_once([file for source in found for file in source.files])
    return found


def given_paths(paths: Paths) -> list[Path]:
    """The paths as they are on this machine; what a URL names is fetched."""
    return [on_this_machine(path, SUFFIXES) for path in ([paths] if isinstance(paths, str | os.PathLike) else paths)]


class Source(NamedTuple):
    """A file as it was when it was read."""

    size: int
    modified: int
    sha256: str


def find_files(paths: Paths) -> list[Path]:
    """The files to read, in the order given; of a folder those with a suffix of SUFFIXES below it, by name.

    What is hidden in a folder, by a name that begins with a dot, is not read: neither files nor folders. Of a dataset as the
    Hugging Face hub has it, or `save_to_disk` writes it, all files of a folder are read that has one split of it.

    Raises:
      DataError: nothing at a path, nothing to read in a folder, an empty file, a file twice, or a folder with several
        splits of a dataset.
    """
    found: list[Path] = []
    for path in [paths] if isinstance(paths, str | os.PathLike) else paths:
        given = resolved(on_this_machine(path, SUFFIXES))
        if not given.exists():
            raise DataError(f"{path} does not exist; give files of text, or a folder of them")
        if given.is_dir():
            inside = sorted(
                file
                for file in given.rglob("[!.]*")
                if file.name.lower().endswith(SUFFIXES)
                and not any(part.startswith(".") for part in file.relative_to(given).parts)
                and file.is_file()
            )
            if not inside:
                raise DataError(f"{path} holds no file that ends in {', '.join(KINDS)}; give the files by name")
            found += data_files(given, inside)
        elif given.is_file():
            found.append(given)
        else:
            raise DataError(f"{path} is neither a file nor a folder; give files of text, or a folder of them")
    if not found:
        raise DataError("no files of data were given; give files of text, or a folder of them (--data PATH)")
    _check_once(found)
    for file in found:
        if not file.stat().st_size:
            raise DataError(f"{file} is empty; is it the right file?")
    return found


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
