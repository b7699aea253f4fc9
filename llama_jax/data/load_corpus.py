"""Converts files to tokens with document boundaries, and to a corpus, tokenized once."""

from __future__ import annotations

import hashlib
import json
import os
import warnings
from array import array
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from llama_jax.data.corpus import Corpus
from llama_jax.data.corpus_file import CORPUS_SUFFIX, CorpusInfo, TokenBlock, corpus_blocks, read_corpus, write_corpus
from llama_jax.data.data_files import (
    CORPORA,
    Paths,
    Source,
    cannot_cache,
    check_untouched,
    describe_source,
    find_files,
    unchanged,
)
from llama_jax.data.documents import Document, DocumentFormat, Span, errors_at, file_type, location, read_documents
from llama_jax.errors import DataError, TokenizerError, reason_of
from llama_jax.storage.object_cache import cache_limit as limit_of_environment
from llama_jax.storage.object_cache import make_room, note_use
from llama_jax.storage.paths import cache_folder
from llama_jax.tokenizers import Tokenizer

MEGABYTE = 1 << 20
MegabyteProgress = Callable[[range], Iterable[int]]
BIN_TOKENS = 1 << 20  # tokens of a .bin to read at a time
BATCH_CHARACTERS = 1 << 18  # characters of documents to encode at a time
BATCH_DOCUMENTS = 1024  # documents to encode at a time
# White space, digits, contractions and scripts, which vocabularies with the same tokens may pre-tokenize differently.
PROBE = "It's  12345 o'clock,\n\n\tDON'T\r\n   \u00e9te\u0301 \u4f60\u597d \U0001f999 x=1; foo_bar "


def open_corpus(
    paths: Paths,
    tokenizer: Tokenizer,
    *,
    reading: DocumentFormat = DocumentFormat(),
    cache: str | os.PathLike[str] | None = None,
    cache_limit: int | None = None,
    progress: MegabyteProgress | None = None,
) -> Corpus:
    """The documents of files as tokens: tokenized the first time, mapped from a corpus file later.

    The output of `build` is mapped directly. Other files have a corpus file in a cache. It is made again when a source's
    content changes, the tokenizer encodes differently, `reading` differs, or the file is damaged (with a warning). Memory
    use is a block of a file, and 16 bytes per document.

    Args:
      paths: files, or folders, local or in a store, whose files with one of `data_files.DATA_SUFFIXES` are read in order of
        their names. See `DocumentFormat` for where documents end, `read_tokens` for the tokens that they become.
      cache: folder of the cache files; None is corpora/ in the folder named by LLAMA_JAX_CACHE, or in the user's cache.
      cache_limit: maximum bytes of all corpora in it; the least recently opened ones are removed above it. None is
        LLAMA_JAX_CACHE_LIMIT in gigabytes, or 100. Several processes may share a cache.
      progress: wraps the range of megabytes to read, as `tqdm.tqdm` does, if there is something to tokenize.

    Raises:
      DataError: an empty, damaged or binary file, a token outside the vocabulary, or a file that changes while being read; a
        build that is unfinished, or made with another tokenizer.
    """
    files = find_files(paths)
    vocabulary = examine(tokenizer)
    if len(files) == 1 and file_type(files[0]) == CORPUS_SUFFIX:
        corpus, info = read_corpus(files[0])
        check_corpus(files[0], info, vocabulary, reading)
        return corpus
    recipe = {"files": [str(file) for file in files], "reading": asdict(reading), "fingerprint": vocabulary.fingerprint}
    folder = cache_folder() / CORPORA if cache is None else Path(cache)
    limit = limit_of_environment() if cache_limit is None else cache_limit
    path = folder / f"{hashlib.sha256(json.dumps(recipe).encode()).hexdigest()[:32]}{CORPUS_SUFFIX}"
    cached = _cached(path, files, recipe)
    if cached is not None:
        return cached
    sources = [describe_source(file) for file in files]
    blocks = _read_all(files, sources, tokenizer, vocabulary, reading, progress)
    write_corpus(path, blocks, vocabulary.size, recipe | {"sources": sources}, raises=cannot_cache)
    corpus = read_corpus(path)[0]
    make_room(folder, limit, path)
    return corpus


def _cached(path: Path, files: list[Path], recipe: dict[str, Any]) -> Corpus | None:
    """The corpus in a cache file; None if there is none, it has other content, or it is damaged (with a warning)."""
    try:
        corpus, info = read_corpus(path)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except DataError:
        warnings.warn(f"{path} is not a whole corpus of tokens; tokenizing again", stacklevel=3)
        return None
    sources = [Source(*source) for source in info.origin["sources"]]
    if info.origin | recipe != info.origin or not all(map(unchanged, files, sources)):
        return None
    note_use(path)
    return corpus


def _read_all(
    files: list[Path],
    sources: list[Source],
    tokenizer: Tokenizer,
    vocabulary: VocabularyInfo,
    reading: DocumentFormat,
    progress: MegabyteProgress | None,
) -> Iterator[TokenBlock]:
    """The tokens of all files, reporting each megabyte to `progress`."""
    megabytes = range(-(-sum(source.size for source in sources) // MEGABYTE))
    walk = iter(progress(megabytes) if progress else megabytes)
    before = done = 0
    for file, source in zip(files, sources, strict=True):
        block = None
        for block in read_tokens(file, tokenizer, vocabulary, reading):
            yield block
            while done < (before + min(block.read, source.size)) // MEGABYTE:  # a decompressed file may be larger
                next(walk)
                done += 1
        if block is None:
            raise DataError(f"{file} holds no document; is it the right file?")
        check_untouched(file, source)
        before += source.size
    for _ in walk:  # lets a progress bar see its end
        pass


# --- tokens of a file ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class VocabularyInfo:
    """A tokenizer described by its behavior.

    Attributes:
      size: V.
      bos, eos: ids of the tokens that begin and end a document, or -1. A document begins with BOS if the vocabulary's rule
        adds it to texts, and ends with EOS if there is one.
      lengths: int64[V], bytes of text for each token; 0 for special tokens.
      space_prefix: whether a document's text has one byte less than its tokens.
      fingerprint: hash of everything that determines the tokens of a text.
    """

    size: int
    bos: int
    eos: int
    lengths: np.ndarray
    space_prefix: bool
    fingerprint: str


def examine(tokenizer: Tokenizer) -> VocabularyInfo:
    """The vocabulary of a tokenizer, and a fingerprint from its behavior.

    The fingerprint covers the bytes of every token, the special tokens, and the ids of a text in which all tokens occur, so
    that other merges or another pre-tokenization change it. The tokenizer's file does not matter.
    """
    bos = tokenizer.bos_id if tokenizer.add_bos else -1
    tokens = [tokenizer.token_bytes(token) for token in range(tokenizer.vocab_size)]
    probe = tokenizer.encode(b"".join(tokens).decode(errors="ignore") + PROBE, bos=False, eos=False)
    shape = [
        len(tokens),
        bos,
        tokenizer.eos_id,
        tokenizer.space_prefix,
        sorted(tokenizer.special_tokens.items()),
    ]
    lengths = np.array([len(token) for token in tokens], np.int64)
    digest = hashlib.sha256(json.dumps(shape).encode())
    for part in (lengths.astype("<i8").tobytes(), b"".join(tokens), np.array(probe, "<i8").tobytes()):
        digest.update(part)
    return VocabularyInfo(
        size=len(tokens),
        bos=bos,
        eos=tokenizer.eos_id,
        lengths=lengths,
        space_prefix=tokenizer.space_prefix,
        fingerprint=digest.hexdigest(),
    )


def read_tokens(
    path: Path, tokenizer: Tokenizer, vocabulary: VocabularyInfo, reading: DocumentFormat, span: Span | None = None
) -> Iterator[TokenBlock]:
    """The tokens of a file, or of a span of a text.

    Text becomes BOS, its tokens, EOS, if the vocabulary has them (`VocabularyInfo`). Ids in ``.bin`` (only ids, as nanoGPT
    and llama2.c write them), in ``.array_record`` (the ids of one document per record) and in ``.corpus`` (from
    `tokenize_files`) are used as they are; in a ``.bin`` a document begins with every BOS and after every EOS.

    Raises:
      DataError: a file is damaged or of another kind; the message gives the line or the token's position.
    """
    match file_type(path):
        case ".bin":
            return _from_bin(path, vocabulary, reading)
        case ".array_record":
            return _from_records(path, vocabulary, reading)
        case ".corpus":
            corpus, info = read_corpus(path)
            check_corpus(path, info, vocabulary, reading)
            size = path.stat().st_size
            return (block._replace(read=size) for block in corpus_blocks(corpus))
        case _:
            return _from_text(path, tokenizer, vocabulary, reading, span)


def check_corpus(path: Path, info: CorpusInfo, vocabulary: VocabularyInfo, reading: DocumentFormat) -> None:
    """Raise DataError for a corpus of another vocabulary, or with other ids than `reading.token_type`."""
    made, name = str(info.origin.get("fingerprint", "")), info.origin.get("tokenizer", "that made it")
    token_type, fingerprint = reading.token_type, vocabulary.fingerprint
    another = (
        f"{path} was built with the tokenizer {name} (fingerprint {made[:12]}), but is read with another one"
        f" (fingerprint {fingerprint[:12]}); use --tokenizer {name}, or build with yours"
    )
    if token_type not in (None, info.token_type):
        raise DataError(f"{path} has ids of {info.token_type}, not {token_type=}; omit that")
    if made != fingerprint:
        raise DataError(another)


def _from_text(
    path: Path, tokenizer: Tokenizer, vocabulary: VocabularyInfo, reading: DocumentFormat, span: Span | None
) -> Iterator[TokenBlock]:
    begin, end = (array("I", [token] if token >= 0 else []) for token in (vocabulary.bos, vocabulary.eos))
    for documents in _document_batches(read_documents(path, reading, span)):
        tokens, starts = array("I"), []  # the array type that is fastest to extend by a list of ints
        for ids in _encode_documents(path, tokenizer, documents, span):
            starts.append(len(tokens))
            tokens += begin + array("I", ids) + end
        byte_counts = np.array([len(document.text.encode()) for document in documents])
        yield TokenBlock(np.frombuffer(tokens, np.uint32), np.array(starts), byte_counts, documents[-1].read)


def _document_batches(documents: Iterator[Document]) -> Iterator[list[Document]]:
    """Group documents into lists of about BATCH_CHARACTERS."""
    some: list[Document] = []
    size = 0
    for document in documents:
        some.append(document)
        size += len(document.text)
        if size >= BATCH_CHARACTERS or len(some) == BATCH_DOCUMENTS:
            yield some
            some, size = [], 0
    if some:
        yield some


def _encode_documents(path: Path, tokenizer: Tokenizer, documents: list[Document], span: Span | None) -> list[list[int]]:
    try:
        return tokenizer.encode_batch([document.text for document in documents])
    except TokenizerError:
        where = "" if span is None or not span.start else f" from byte {span.start} on"
        for document in documents:
            with errors_at(f"{location(path, document.line)}{where}"):
                tokenizer.encode_batch([document.text])
        raise


def _from_bin(path: Path, vocabulary: VocabularyInfo, reading: DocumentFormat) -> Iterator[TokenBlock]:
    dtype = _token_type(vocabulary, reading)
    size = path.stat().st_size
    if size % dtype.itemsize:
        raise DataError(
            f"{path} has {size} bytes, not a multiple of the {dtype.itemsize} of a {dtype.name} id; is it complete?"
        )
    bos, eos = vocabulary.bos, vocabulary.eos
    offset = 0
    ended = True  # whether the previous block's last token ended a document
    silent = True  # whether the current document has had no text so far
    with path.open("rb") as file:
        while len(block := np.fromfile(file, dtype, BIN_TOKENS)):
            _check_ids(f"{path}, token", block, offset, vocabulary)
            if offset == 0 and bos == eos:  # one token for both: it begins documents if it begins the file
                bos, eos = (bos, -1) if block[0] == bos else (-1, eos)
            begins = block == bos
            begins[1:] |= block[:-1] == eos
            begins[0] |= ended
            ended = bool(block[-1] == eos)
            starts = np.flatnonzero(begins)
            parts = starts if begins[0] else np.concatenate([[0], starts])
            byte_counts = np.add.reduceat(vocabulary.lengths[block], parts)
            first = np.full(len(parts), True)  # where a document's text begins, possibly after a space
            first[0] = begins[0] or silent
            silent = bool(first[-1] and not byte_counts[-1])
            byte_counts -= vocabulary.space_prefix & first & (byte_counts > 0)
            offset += len(block)
            yield TokenBlock(block, starts, byte_counts, offset * dtype.itemsize)


def _from_records(path: Path, vocabulary: VocabularyInfo, reading: DocumentFormat) -> Iterator[TokenBlock]:
    from array_record.python.array_record_module import ArrayRecordReader

    dtype = _token_type(vocabulary, reading)
    size = path.stat().st_size
    damaged = f"{path} is not a whole array-record; copy it again"
    reader = ArrayRecordReader(str(path))
    if not reader.ok():
        raise DataError(damaged)
    count = reader.num_records()
    for number in range(count):
        try:
            record = reader.read()
        except (RuntimeError, IndexError) as error:
            raise DataError(f"{damaged} (record {number}: {reason_of(error)})") from None
        where = f"{path}, record {number}"
        if not record or len(record) % dtype.itemsize:
            raise DataError(f"{where} has {len(record)} bytes; it must be the {dtype.name} ids of a document, at least one")
        ids = np.frombuffer(record, dtype)
        _check_ids(f"{where}, token", ids, 0, vocabulary)
        text_bytes = int(vocabulary.lengths[ids].sum())
        text_bytes -= vocabulary.space_prefix and text_bytes > 0
        yield TokenBlock(ids, np.array([0]), np.array([text_bytes]), size * (number + 1) // count)


def _token_type(vocabulary: VocabularyInfo, reading: DocumentFormat) -> np.dtype:
    name = reading.token_type or ("uint16" if vocabulary.size <= 1 << 16 else "uint32")
    return np.dtype(name).newbyteorder("<")


def _check_ids(where: str, ids: np.ndarray, offset: int, vocabulary: VocabularyInfo) -> None:
    """Check that ids are within the vocabulary and of the dtype they were written with."""
    outside = np.flatnonzero(ids >= vocabulary.size)
    if len(outside):
        at = int(outside[0])
        raise DataError(
            f"{where} {offset + at} is {ids[at]}, outside the vocabulary of {vocabulary.size}; use the tokenizer that wrote"
            " it, or the token_type it was written with"
        )
    # uint32 ids read as uint16: every second one is the empty upper half.
    if ids.dtype.itemsize == 2 and len(ids) >= 16 and len(ids) % 2 == 0 and not ids[1::2].any():
        raise DataError(f"{where} {offset + 1} and every second one is 0: the ids are uint32; set token_type='uint32'")
