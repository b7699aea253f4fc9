"""The work of a build's processes: collect digests of a unit's documents to find duplicates, and write its shard."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import numpy as np

from llama_jax.data import near
from llama_jax.data.documents import Document, DocumentFormat, read_documents
from llama_jax.data.duplicates import digests
from llama_jax.data.errors import DataError
from llama_jax.data.manifest import ShardFacts, read_facts, write_json
from llama_jax.data.units import Unit
from llama_jax.data.vocabulary import Vocabulary, examine
from llama_jax.errors import TokenizerError
from llama_jax.storage.atomic_write import cannot_write, write_atomically
from llama_jax.tokenizers import Tokenizer, load_tokenizer

BATCH = 1 << 18  # characters of documents that are encoded at once
MOST = 1024  # documents of them
KEPT, DUPLICATE, NEAR = 0, 1, 2
"""What is done with a document: it is written, or left out."""


class BuildJob(NamedTuple):
    """The settings of a process, the same for all units."""

    folder: str
    tokenizer: str
    reading: DocumentFormat
    near: bool


def token_type(vocabulary: Vocabulary) -> str:
    """Of the ids in shards."""
    return "uint16" if vocabulary.size <= 1 << 16 else "uint32"


def facts_of(unit: Unit) -> str:
    """The file that says that a shard is there."""
    return f"shard-{unit.number:05d}.json"


def looks_of(unit: Unit) -> str:
    """The file with the digests and signatures of a unit's documents."""
    return f"unit-{unit.number:05d}.seen"


def columns(near_too: bool) -> int:
    """Numbers of a document in such a file, uint32: two are the digest of its text, the others its signature."""
    return 2 + near.MINIMA * near_too


@lru_cache(maxsize=1)
def _loaded(path: str) -> tuple[Tokenizer, Vocabulary]:
    tokenizer = load_tokenizer(path)
    return tokenizer, examine(tokenizer)


def look(job: BuildJob, unit: Unit) -> None:
    """Write digests and signatures of the documents of a unit, unless they are there: uint32[N, columns]."""
    path = Path(job.folder) / looks_of(unit)
    if path.is_file():
        return
    with write_atomically(path, raises=DataError) as target, target.open("wb") as file:
        for some in _batches(read_documents(Path(unit.path), job.reading, unit.span)):
            texts = [document.text for document in some]
            found = [digests(text.encode() for text in texts).view("<u4").reshape(-1, 2)]
            if job.near:
                found.append(near.signatures(texts))
            file.write(np.concatenate(found, axis=1).astype("<u4").tobytes())


def read_looks(path: Path, near_too: bool) -> np.ndarray:
    """What `look` wrote, mapped.

    Raises:
      DataError: something else is there.
    """
    width = columns(near_too)
    try:
        size = path.stat().st_size
        if size % (4 * width):
            raise ValueError
        return np.memmap(path, "<u4", "r").reshape(-1, width) if size else np.zeros((0, width), "<u4")
    except (OSError, ValueError):
        raise DataError(f"{path} is not what was written; remove it, and build again") from None


def make(job: BuildJob, unit: Unit, fates: np.ndarray | None) -> ShardFacts:
    """Write a shard, unless it is there whole: its facts are written when it is.

    Args:
      fates: uint8[N], what is done with each document; None keeps all.
    """
    facts = Path(job.folder) / facts_of(unit)
    path = facts.with_suffix(".array_record")
    if facts.is_file():
        known = read_facts(facts)
        if known.name is None or (path.is_file() and _sha256(path) == known.sha256):
            return known
    with write_atomically(path, raises=DataError) as target:
        found = write_shard(job, unit, fates, path.name, target)
    if not found.documents:
        path.unlink()
    write_json(facts, asdict(found))
    return found


def write_shard(job: BuildJob, unit: Unit, fates: np.ndarray | None, name: str, target: Path) -> ShardFacts:
    """Write the documents of a unit that are kept into an array-record."""
    from array_record.python.array_record_module import ArrayRecordWriter

    tokenizer, vocabulary = _loaded(job.tokenizer)
    begin, end = (array("I", [token] if token >= 0 else []) for token in (vocabulary.bos, vocabulary.eos))
    dtype = np.dtype(token_type(vocabulary)).newbyteorder("<")
    read = read_documents(Path(unit.path), job.reading, unit.span)
    documents = tokens = text_bytes = 0
    left_out = [0, 0, 0]
    writer = ArrayRecordWriter(str(target), "group_size:64")
    try:
        for some in _batches(read if fates is None else _kept(unit, read, fates, left_out)):
            whole, ends = array("I"), []  # of the types of arrays a list of ints becomes this one soonest
            for ids in _encode(tokenizer, unit, some):
                whole += begin + array("I", ids) + end
                ends.append(len(whole))
            content = np.frombuffer(whole, np.uint32).astype(dtype)
            with _recording(target.with_name(name)):
                for start, stop in pairwise([0, *ends]):
                    writer.write(content[start:stop].tobytes())
            documents, tokens = documents + len(some), tokens + len(whole)
            text_bytes += sum(len(document.text.encode()) for document in some)
    finally:
        with _recording(target.with_name(name)):
            writer.close()
    if not documents:
        return ShardFacts(None, 0, 0, 0, left_out[DUPLICATE], left_out[NEAR], None)
    return ShardFacts(name, documents, tokens, text_bytes, left_out[DUPLICATE], left_out[NEAR], _sha256(target))


@contextmanager
def _recording(path: Path) -> Iterator[None]:
    """Turn what array_record says of a file that cannot be written into an error that names it: it has no OSError."""
    try:
        yield
    except RuntimeError as error:
        raise DataError(cannot_write(path, error)) from None


def _kept(unit: Unit, documents: Iterator[Document], fates: np.ndarray, counts: list[int]) -> Iterator[Document]:
    """The documents that are not left out; the others are counted by what they are."""
    for number, document in enumerate(documents):
        if number == len(fates):
            raise DataError(f"{unit.path} changed while it was read; build when nothing writes to it")
        fate = int(fates[number])
        counts[fate] += 1
        if fate == KEPT:
            yield document


def _batches(documents: Iterator[Document]) -> Iterator[list[Document]]:
    """Documents in lists of about BATCH characters."""
    some: list[Document] = []
    size = 0
    for document in documents:
        some.append(document)
        size += len(document.text)
        if size >= BATCH or len(some) == MOST:
            yield some
            some, size = [], 0
    if some:
        yield some


def _encode(tokenizer: Tokenizer, unit: Unit, documents: list[Document]) -> list[list[int]]:
    try:
        return tokenizer.encode_batch([document.text for document in documents])
    except TokenizerError:
        for document in documents:
            try:
                tokenizer.encode_batch([document.text])
            except TokenizerError as error:
                where = "" if unit.span is None or not unit.span.start else f" from byte {unit.span.start} on"
                raise DataError(f"{unit.path}, line {document.line}{where}: {error}") from None
        raise


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
