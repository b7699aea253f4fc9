"""Many files tokenised once for all: shards of token ids and a manifest, by as many processes as there are cores.

What comes out depends on the files, the tokenizer and the settings alone: not on how many processes there were, nor on how
often they were stopped. The files are cut into units of some megabytes, each of which becomes a shard; a shard that is there
is not made again.
"""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from llama_jax.data.documents import DocumentFormat, Span, is_compressed, kind_of, open_parquet, read_documents
from llama_jax.data.errors import DataError
from llama_jax.data.sources import Paths, describe, find_files, untouched
from llama_jax.data.vocabulary import Vocabulary, examine
from llama_jax.errors import TokenizerError, shown
from llama_jax.tokenizers import Tokenizer, load_tokenizer
from llama_jax.writing import appearing, cannot_write

UNIT = 64 << 20  # bytes of text that become a shard
SEARCHED = 1 << 20  # bytes that are read at once to find where a document ends
MANIFEST = "manifest.json"
PLAN = "plan.json"  # while shards are made


@dataclass(frozen=True)
class BuildOptions:
    """How shards are made.

    Attributes:
      reading: where documents end, see `DocumentFormat`.
      unit: bytes of a file that become a shard, about: no document is in two. Compressed files are read whole.
      drop_duplicates: whether of documents of the same text only the first is kept.
    """

    reading: DocumentFormat = DocumentFormat()
    unit: int = UNIT
    drop_duplicates: bool = False

    def __post_init__(self) -> None:
        if self.unit < 1:
            raise DataError(f"unit={self.unit} must be at least 1 byte")


@dataclass(frozen=True)
class ShardFacts:
    """What is in a shard.

    Attributes:
      name: of the file; None where no document is left.
      documents, tokens, text_bytes: how many; bytes are those of the texts in UTF-8.
      duplicates: documents that were left out, because they came before.
      sha256: of the file.
    """

    name: str | None
    documents: int
    tokens: int
    text_bytes: int
    duplicates: int
    sha256: str | None


@dataclass(frozen=True)
class Manifest:
    """What was built.

    Attributes:
      plan: what decided it: sources with their bytes and SHA-256, the fingerprint of the tokenizer, the settings.
      vocab_size: V; shards have ids of `token_type`, uint16 or uint32.
      shards: in the order of the documents.
    """

    plan: dict[str, Any]
    vocab_size: int
    token_type: str
    shards: tuple[ShardFacts, ...]

    def total(self, name: str) -> int:
        """A number of `ShardFacts` over all shards."""
        return sum(getattr(shard, name) for shard in self.shards)


class _Unit(NamedTuple):
    """What becomes a shard: a span of a file, or all of it."""

    number: int
    path: str
    span: Span | None


class _Work(NamedTuple):
    """What a process is told once for all units."""

    folder: str
    tokenizer: str
    options: BuildOptions


def build(
    paths: Paths,
    out: str | os.PathLike[str],
    tokenizer: str | os.PathLike[str],
    *,
    options: BuildOptions = BuildOptions(),
    processes: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Manifest:
    """Tokenise files into a folder of array-record shards with a manifest, which `open_corpus` and ``train`` read.

    A folder in which a build was stopped is gone on with; of one that is done the manifest is given.

    Args:
      paths: text, JSONL and Parquet, also compressed by gzip or zstd, or folders of them.
      tokenizer: a vocabulary's file or folder; every process reads it.
      processes: by default one for each core that this one may use; 1 starts no other.
      progress: told after each shard how many are done, of how many.

    Raises:
      DataError: files that cannot be read, or that changed; a folder that holds something else, or was begun otherwise.
    """
    files, folder = find_files(paths), Path(out)
    for file in files:
        if kind_of(file) in (".bin", ".array_record"):
            raise DataError(f"{file} holds token ids already; build from text, JSONL or Parquet")
    sources = [describe(file) for file in files]
    vocabulary = examine(load_tokenizer(tokenizer))
    plan: dict[str, Any] = {
        "sources": [[str(file), source.size, source.sha256] for file, source in zip(files, sources, strict=True)],
        "tokenizer": vocabulary.fingerprint,
        **asdict(options),
    }
    if (done := _begun(folder, plan)) is not None:
        return done
    units = [_Unit(number, *unit) for number, unit in enumerate(unit for file in files for unit in _units_of(file, options))]
    count = min(processes or len(os.sched_getaffinity(0)), len(units))
    work = _Work(str(folder.resolve()), str(Path(tokenizer).resolve()), options)
    repeated: Sequence[np.ndarray | None] = [None] * len(units)
    if options.drop_duplicates:
        repeated = _repeated(_over(count, [(_fingerprints, unit, options.reading) for unit in units], None))
    shards = _over(count, [(_make, work, unit, drop) for unit, drop in zip(units, repeated, strict=True)], progress)
    for file, source in zip(files, sources, strict=True):
        if not untouched(file, source):
            raise DataError(f"{file} changed while it was read; remove {folder}, and build when nothing writes to it")
    manifest = Manifest(plan, vocabulary.size, _token_type(vocabulary), tuple(shards))
    _write(folder / MANIFEST, asdict(manifest))
    for path in [folder / PLAN, *(folder / _facts_of(unit) for unit in units)]:
        path.unlink(missing_ok=True)
    return manifest


def read_manifest(folder: str | os.PathLike[str]) -> Manifest:
    """What `build` wrote.

    Raises:
      DataError: there is none, or no whole one.
    """
    path = Path(folder) / MANIFEST
    try:
        found = json.loads(path.read_text("utf-8"))
        return Manifest(**{**found, "shards": tuple(ShardFacts(**shard) for shard in found["shards"])})
    except (OSError, ValueError, TypeError, KeyError, RecursionError) as error:
        raise DataError(f"{path} is no manifest of a build ({type(error).__name__}); build again") from None


def _begun(folder: Path, plan: dict[str, Any]) -> Manifest | None:
    """Make or find the folder of a build; the manifest of one that is done.

    Raises:
      DataError: it holds something else.
    """
    if (folder / MANIFEST).is_file():
        manifest = read_manifest(folder)
        _check_same(folder, manifest.plan, plan)
        return manifest
    if (folder / PLAN).is_file():
        _check_same(folder, json.loads((folder / PLAN).read_text("utf-8")), plan)
        return None
    try:
        folder.mkdir(parents=True, exist_ok=True)
        other = next((entry for entry in sorted(folder.iterdir()) if not entry.name.startswith(".")), None)
    except OSError as error:
        raise DataError(cannot_write(folder, error)) from None
    if other is not None:
        raise DataError(
            f"{folder} holds {shown(other.name, 40)}, and no build; give an empty folder, or one that is not there"
        )
    _write(folder / PLAN, plan)
    return None


def _check_same(folder: Path, before: dict[str, Any], now: dict[str, Any]) -> None:
    now = json.loads(json.dumps(now))
    if changed := [name for name in now if before.get(name) != now[name]]:
        raise DataError(f"{folder} was built with other {', '.join(changed)}; give another folder, or remove that one")


def _write(path: Path, found: dict[str, Any]) -> None:
    with appearing(path, raises=DataError) as target:
        target.write_text(json.dumps(found, indent=1) + "\n", "utf-8")


# --- units ---------------------------------------------------------------------------------------------------------------


def _units_of(file: Path, options: BuildOptions) -> Iterator[tuple[str, Span | None]]:
    """The parts of a file that become shards, none of which has a part of a document."""
    if is_compressed(file):
        yield str(file), None
    elif kind_of(file) == ".parquet":
        description, start, size = open_parquet(file).metadata, 0, 0
        for group in range(description.num_row_groups):
            size += description.row_group(group).total_byte_size
            if size >= options.unit or group + 1 == description.num_row_groups:
                yield str(file), Span(start, group + 1)
                start, size = group + 1, 0
    else:
        mark = b"\n" if kind_of(file) == ".jsonl" else options.reading.separator.encode()
        start, size = 0, file.stat().st_size
        while start < size:
            stop = _end_after(file, mark, start + options.unit, size)
            yield str(file), Span(start, stop)
            start = stop


def _end_after(file: Path, mark: bytes, start: int, size: int) -> int:
    """The end of the first mark from `start` on, or of the file."""
    with file.open("rb") as opened:
        while start < size:
            opened.seek(start)
            found = opened.read(SEARCHED + len(mark)).find(mark)
            if found >= 0:
                return start + found + len(mark)
            start += SEARCHED
    return size


# --- in each process -----------------------------------------------------------------------------------------------------


def _over(processes: int, calls: Sequence[tuple[Any, ...]], progress: Callable[[int, int], None] | None) -> list[Any]:
    """What functions give of their arguments, in order; the first that fails ends it, and what has begun is finished."""
    if processes == 1:
        found = []
        for function, *args in calls:
            found.append(function(*args))
            if progress is not None:
                progress(len(found), len(calls))
        return found
    # Anew and not by fork: the threads of libraries that are imported here would be missing there.
    with ProcessPoolExecutor(processes, multiprocessing.get_context("spawn"), _begin_process) as pool:
        running: list[Future[Any]] = [pool.submit(*call) for call in calls]
        try:
            for done, future in enumerate(as_completed(running), 1):
                future.result()
                if progress is not None:
                    progress(done, len(calls))
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
        return [future.result() for future in running]


def _begin_process() -> None:
    """Ctrl-C is for the first process to heed; and of whatever that one dies, this one ends with it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_the_first, daemon=True).start()


def _end_with_the_first() -> None:
    if (first := multiprocessing.parent_process()) is not None:
        first.join()
        os._exit(1)


@lru_cache(maxsize=1)
def _loaded(path: str) -> tuple[Tokenizer, Vocabulary]:
    tokenizer = load_tokenizer(path)
    return tokenizer, examine(tokenizer)


def _token_type(vocabulary: Vocabulary) -> str:
    return "uint16" if vocabulary.size <= 1 << 16 else "uint32"


def _facts_of(unit: _Unit) -> str:
    return f"shard-{unit.number:05d}.json"


def _fingerprints(unit: _Unit, reading: DocumentFormat) -> np.ndarray:
    """uint64[N]: the same number for documents of the same text."""
    texts = (document.text.encode() for document in read_documents(Path(unit.path), reading, unit.span))
    return np.frombuffer(b"".join(hashlib.blake2b(text, digest_size=8).digest() for text in texts), "<u8")


def _repeated(units: Sequence[np.ndarray]) -> list[np.ndarray]:
    """bool[N] of each unit: which of its documents came before, there or in an earlier unit."""
    whole = np.concatenate(units)
    again = np.ones(len(whole), bool)
    again[np.unique(whole, return_index=True)[1]] = False
    return np.split(again, np.cumsum([len(unit) for unit in units])[:-1])


def _make(work: _Work, unit: _Unit, drop: np.ndarray | None) -> ShardFacts:
    """Write a shard, unless it is there: its facts are written when it is."""
    facts = Path(work.folder) / _facts_of(unit)
    if facts.is_file():
        return ShardFacts(**json.loads(facts.read_text("utf-8")))
    path = facts.with_suffix(".array_record")
    with appearing(path, raises=DataError) as target:
        found = _write_shard(work, unit, drop, path.name, target)
    if not found.documents:
        path.unlink()
    _write(facts, asdict(found))
    return found


def _write_shard(work: _Work, unit: _Unit, drop: np.ndarray | None, name: str, target: Path) -> ShardFacts:
    from array_record.python.array_record_module import ArrayRecordWriter

    tokenizer, vocabulary = _loaded(work.tokenizer)
    dtype = np.dtype(_token_type(vocabulary)).newbyteorder("<")
    documents = tokens = text_bytes = duplicates = 0
    writer = ArrayRecordWriter(str(target), "group_size:64")
    try:
        for number, document in enumerate(read_documents(Path(unit.path), work.options.reading, unit.span)):
            if drop is not None and drop[number]:
                duplicates += 1
                continue
            try:
                ids = tokenizer.encode(document.text, bos=vocabulary.bos >= 0, eos=vocabulary.eos >= 0)
            except TokenizerError as error:
                where = "" if unit.span is None or not unit.span.start else f" from byte {unit.span.start} on"
                raise DataError(f"{unit.path}, line {document.line}{where}: {error}") from None
            writer.write(np.array(ids, dtype).tobytes())
            documents, tokens = documents + 1, tokens + len(ids)
            text_bytes += len(document.text.encode())
    finally:
        writer.close()
    if not documents:
        return ShardFacts(None, 0, 0, 0, duplicates, None)
    with target.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return ShardFacts(name, documents, tokens, text_bytes, duplicates, digest)
