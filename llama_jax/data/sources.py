"""The files that a corpus is made from, and whether they are still the same."""

from __future__ import annotations

import hashlib
import os
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from llama_jax.data.errors import DataError

Paths = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]
SUFFIXES = (".txt", ".jsonl", ".bin", ".array_record")


class Source(NamedTuple):
    """A file as it was when it was read."""

    size: int
    modified: int
    sha256: str


def find_files(paths: Paths) -> list[Path]:
    """The files to read, in the order given; of a folder those with a suffix of SUFFIXES below it, by name.

    What is hidden in a folder, by a name that begins with a dot, is not read: neither files nor folders.

    Raises:
      DataError: nothing at a path, nothing to read in a folder, an empty file, or a file twice.
    """
    found: list[Path] = []
    for path in [paths] if isinstance(paths, str | os.PathLike) else paths:
        given = Path(path).resolve()
        if not given.exists():
            raise DataError(f"{path} does not exist; give files of text, or a folder of them")
        if given.is_dir():
            inside = sorted(
                file
                for file in given.rglob("[!.]*")
                if file.suffix.lower() in SUFFIXES
                and not any(part.startswith(".") for part in file.relative_to(given).parts)
                and file.is_file()
            )
            if not inside:
                raise DataError(f"{path} holds no file that ends in {', '.join(SUFFIXES)}; give the files by name")
            found += inside
        elif given.is_file():
            found.append(given)
        else:
            raise DataError(f"{path} is neither a file nor a folder; give files of text, or a folder of them")
    if not found:
        raise DataError("no files of data were given")
    for file, times in Counter(found).items():
        if times > 1:
            raise DataError(f"{file} is given twice; its documents would count twice, and could be on both sides of a split")
        if not file.stat().st_size:
            raise DataError(f"{file} is empty; is it the right file?")
    return found


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
