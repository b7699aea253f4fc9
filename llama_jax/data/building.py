"""Tokenising many files ahead of training into shards of token ids and a manifest, on all cores.

The result depends on the files, the tokenizer and the settings alone, not on the number of processes or of interruptions.
The files are cut into units of some megabytes, each of which becomes a shard; a shard that exists is not made again.
"""

from __future__ import annotations

import hashlib
import json
import os
import shlex
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from llama_jax.data import near, shards
from llama_jax.data.documents import DocumentFormat, kind_of
from llama_jax.data.errors import DataError
from llama_jax.data.manifest import MANIFEST, Manifest, read_manifest, write_manifest
from llama_jax.data.sources import Paths, describe, find_files, untouched
from llama_jax.data.units import Unit, spans_of, units_of
from llama_jax.data.vocabulary import Vocabulary, examine
from llama_jax.data.workers import Progress, Workers, cores, working
from llama_jax.errors import shown
from llama_jax.storage import locate, on_disk, resolved
from llama_jax.storage.atomic_write import cannot_write, hold_lock, sign_lock, write_atomically
from llama_jax.tokenizers import load_tokenizer

# Bytes of a file that become a shard, at least and at most: to put one on the disk for good takes some 30 ms.
UNITS = (8 << 20, 64 << 20)
MANY = 128  # shards, where that leaves them between these sizes: enough for the processes of a large machine
LOCK = ".lock"
LISTING = "near_duplicates.tsv"


@dataclass(frozen=True)
class BuildOptions:
    """How shards are made.

    Attributes:
      reading: where documents end, see `DocumentFormat`.
      unit: approximate bytes of a file in a shard: no document is in two. Compressed files are read whole. None means a
        128th of all files, between 8 and 64 MiB.
      drop_duplicates: whether to keep only the first of documents with the same text.
      near_duplicates: the least similarity, above 0 and up to 1, to an earlier document that is kept at which a document is
        left out: see `data.near`. Documents with the same text are left out too.
    """

    reading: DocumentFormat = DocumentFormat()
    unit: int | None = None
    drop_duplicates: bool = False
    near_duplicates: float | None = None

    def __post_init__(self) -> None:
        if self.unit is not None and self.unit < 1:
            raise DataError(f"unit={self.unit} must be at least 1 byte")
        if self.near_duplicates is not None and not 0 < self.near_duplicates <= 1:
            raise DataError(f"near_duplicates={self.near_duplicates} must be a similarity above 0 and up to 1, such as 0.8")


def build(
    paths: Paths,
    out: str | os.PathLike[str],
    tokenizer: str | os.PathLike[str],
    *,
    options: BuildOptions = BuildOptions(),
    processes: int | None = None,
    workers: Workers | None = None,
    progress: Progress | None = None,
) -> Manifest:
    """Tokenise files into a folder of array-record shards with a manifest, which `open_corpus` and ``train`` read.

    A build that was stopped in the folder is continued; if it is finished its manifest is returned.

    Args:
      paths: text, JSONL, Parquet and Arrow, text and JSONL also compressed by gzip or zstd, or folders of them.
      tokenizer: a vocabulary's file or folder; every process reads it.
      processes: by default one for each core that this one may use; 1 starts no other.
      workers: replace processes of this machine; they see `out`, the files and the tokenizer under the same paths.
      progress: called after each shard with the numbers done and in all; where documents are left out every unit of the
        files is read once before, and counts likewise.

    Raises:
      DataError: files that cannot be read, that changed or that hold no document; a folder that holds something else, was
        begun with other settings, or in which another process builds.
    """
    files, folder = find_files(paths), resolved(on_disk(out, "the folder of a build"))
    given = [paths] if isinstance(paths, str | os.PathLike) else paths
    for path in map(locate, given):
        if isinstance(path, Path) and path.is_dir() and folder.is_relative_to(resolved(path)):
            raise DataError(f"{folder} is inside {path}, and its shards would be read as data next time; give one elsewhere")
    for file in files:
        if kind_of(file) in (".bin", ".array_record"):
            raise DataError(f"{file} holds token ids already; build from text, JSONL, Parquet or Arrow")
    vocabulary = examine(load_tokenizer(tokenizer))
    command = _command(given, folder, tokenizer, options)
    with _held(folder):
        if workers is not None:
            return _build(files, folder, tokenizer, vocabulary, options, command, workers, progress)
        with working(processes or cores()) as workers:
            return _build(files, folder, tokenizer, vocabulary, options, command, workers, progress)


def _build(
    files: Sequence[Path],
    folder: Path,
    tokenizer: str | os.PathLike[str],
    vocabulary: Vocabulary,
    options: BuildOptions,
    command: str,
    workers: Workers,
    progress: Progress | None,
) -> Manifest:
    sources = workers([(describe, file) for file in files], None)
    plan: dict[str, Any] = {
        "sources": [[str(file), source.size, source.sha256] for file, source in zip(files, sources, strict=True)],
        "tokenizer": vocabulary.fingerprint,
        **asdict(options),
        "signatures": None if options.near_duplicates is None else near.library(),
    }
    where = os.fspath(resolved(locate(tokenizer)))
    begun = _begun(folder, Manifest(plan, command, where, vocabulary.size, shards.token_type(vocabulary)))
    if begun.finished:
        return begun
    size = options.unit or min(max(sum(source.size for source in sources) // MANY, UNITS[0]), UNITS[1])
    units = units_of(files, workers([(spans_of, file, options.reading, size) for file in files], None))
    job = shards.BuildJob(str(folder), where, options.reading, options.near_duplicates is not None)
    fates: Sequence[np.ndarray | None] = [None] * len(units)
    listing = None
    if units and (options.drop_duplicates or job.near):
        workers([(shards.look, job, unit) for unit in units], _part(progress, 0, 2 * len(units)))
        progress = _part(progress, len(units), 2 * len(units))
        fates, listing = _decide(folder, units, options)
    made = workers([(shards.make, job, unit, fate) for unit, fate in zip(units, fates, strict=True)], progress)
    for file, source in zip(files, sources, strict=True):
        if not untouched(file, source):
            raise DataError(f"{file} changed while it was read; remove {folder}, and build when nothing writes to it")
    manifest = replace(begun, command="", finished=True, shards=tuple(made), listing=listing)
    own = [folder / name(unit) for unit in units for name in (shards.facts_of, shards.looks_of)]
    if not manifest.total("documents"):
        for path in (folder / MANIFEST, folder / LISTING, *own):
            path.unlink(missing_ok=True)
        raise DataError(f"{_named(files)} no document; are these the right files?")
    write_manifest(folder, manifest)
    for path in own:
        path.unlink(missing_ok=True)
    return manifest


def _part(progress: Progress | None, before: int, of: int) -> Progress | None:
    """What is told of a part of the work, as of the whole of it."""
    return None if progress is None else lambda done, _: progress(before + done, of)


def _named(files: Sequence[Path]) -> str:
    return f"{files[0]} holds" if len(files) == 1 else f"{files[0]} and {len(files) - 1} more hold"


# --- the folder ----------------------------------------------------------------------------------------------------------


@contextmanager
def _held(folder: Path) -> Iterator[None]:
    """Lock a folder, which is created if missing and removed again if nothing was written.

    Raises:
      DataError: another process holds the lock, or the folder cannot be written to.
    """
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = hold_lock(folder / LOCK, partial(_taken, folder), "build")
    except OSError as error:
        raise DataError(cannot_write(folder, error)) from None
    try:
        with suppress(OSError):  # on a full disk it is held all the same
            sign_lock(lock)
        yield
    finally:
        with suppress(OSError):
            (folder / LOCK).unlink()
        os.close(lock)
        with suppress(OSError):  # of a folder that is not empty
            for path in missing:
                path.rmdir()


def _taken(folder: Path, holder: str) -> DataError:
    return DataError(f"{folder} is being built by process {holder}; wait until that has ended, or give another folder")


def _begun(folder: Path, begun: Manifest) -> Manifest:
    """The manifest of a build in a folder: a new one, or that of the same build, begun or finished.

    Raises:
      DataError: the folder holds something else.
    """
    if (folder / MANIFEST).is_file():
        found = read_manifest(folder)
        now = json.loads(json.dumps(begun.plan))
        changed = [name for name in now if found.plan.get(name) != now[name]]
        if not changed:
            return found
        if found.finished or any(folder.glob("shard-*")) or any(folder.glob("unit-*")):
            raise DataError(f"{folder} was built with other {', '.join(changed)}; give another folder, or remove that one")
    else:
        try:
            other = next((entry for entry in sorted(folder.iterdir()) if not entry.name.startswith(".")), None)
        except OSError as error:
            raise DataError(cannot_write(folder, error)) from None
        if other is not None:
            raise DataError(
                f"{folder} holds {shown(other.name, 40)}, and no build; give an empty folder, or one that is not there"
            )
    write_manifest(folder, begun)
    return begun


def _command(paths: Sequence[Any], folder: Path, tokenizer: str | os.PathLike[str], options: BuildOptions) -> str:
    """The command that continues a build."""
    if (options.unit or 0) % (1 << 20) or options.reading.token_type is not None:  # no options of the command line
        return f"llama_jax.data.building.build(..., {str(folder)!r}, ...), from Python as before"
    parts = [*(os.fspath(resolved(locate(path))) for path in paths), "--out", str(folder)]
    parts += ["--tokenizer", os.fspath(resolved(locate(tokenizer)))]
    if options.unit is not None:
        parts += ["--unit", str(options.unit >> 20)]
    if options.drop_duplicates:
        parts += ["--drop-duplicates"]
    if options.near_duplicates is not None:
        parts += ["--near-duplicates", str(options.near_duplicates)]
    for field in fields(DocumentFormat):
        if (value := getattr(options.reading, field.name)) != field.default:
            parts += [f"--{field.name.replace('_', '-')}", str(value)]
    return f"llama-jax data build {shlex.join(parts)}"


# --- documents that are left out -----------------------------------------------------------------------------------------


def _decide(folder: Path, units: Sequence[Unit], options: BuildOptions) -> tuple[list[np.ndarray], tuple[str, str] | None]:
    """The fate of each document, uint8[n] for each unit; and the list of near duplicates, which is written here."""
    near_too = options.near_duplicates is not None
    looks = [shards.read_looks(folder / shards.looks_of(unit), near_too) for unit in units]
    counts = [len(look) for look in looks]
    whole = np.concatenate([np.ascontiguousarray(look[:, :2]).view("<u8")[:, 0] for look in looks])
    fates = np.full(len(whole), shards.DUPLICATE, np.uint8)
    fates[np.unique(whole, return_index=True)[1]] = shards.KEPT
    listing = None
    if options.near_duplicates is not None:
        found = near.find_near([look[:, 2:] for look in looks], fates != shards.KEPT, options.near_duplicates)
        fates[[one.document for one in found]] = shards.NEAR
        listing = _list(folder / LISTING, units, counts, found)
    return np.split(fates, np.cumsum(counts)[:-1]), listing


def _list(path: Path, units: Sequence[Unit], counts: Sequence[int], found: Sequence[near.Near]) -> tuple[str, str]:
    """Write which document of which file is near which other, counted from 1; return the list's name and SHA-256."""
    ends = np.cumsum(counts)
    first: dict[str, int] = {}  # number in all files of the first document of each file
    for unit, end, count in zip(units, ends.tolist(), counts, strict=True):
        first.setdefault(unit.path, end - count)

    def place(document: int) -> str:
        file = units[int(np.searchsorted(ends, document, "right"))].path
        return f"{shown(file, 4096)[1:-1]}\t{document - first[file] + 1}"

    lines = (f"{place(one.document)}\t{place(one.other)}\t{one.similarity:.3f}\n" for one in found)
    digest = hashlib.sha256()
    with write_atomically(path, raises=DataError) as target, target.open("wb") as file:
        for line in ("file\tdocument\tnear_file\tnear_document\tsimilarity\n", *lines):
            digest.update(line.encode())
            file.write(line.encode())
    return path.name, digest.hexdigest()
