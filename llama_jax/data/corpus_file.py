"""The file of a tokenized corpus: written completely or not at all, and verified when it is opened.

    8 bytes     CORPUS_MAGIC
    8 bytes     size of the description
    32 bytes    SHA-256 of the description, which contains that of the data
    tokens      uint16 or uint32 [all], padded to a multiple of 8 bytes
    starts      int64[N + 1], start of each document, and the end of the last
    bytes       int64[N], UTF-8 bytes of each document's text
    description JSON, a `CorpusInfo`

All numbers are little-endian. Caches, builds and the parts of builds use this format.
"""

from __future__ import annotations

import hashlib
import json
import struct
from array import array
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from llama_jax.data.corpus import Corpus
from llama_jax.errors import DataError, UserError, short_repr
from llama_jax.storage.atomic_write import write_atomically

CORPUS_SUFFIX = ".corpus"
CORPUS_MAGIC = b"llamajx2"
CORPUS_HEADER = struct.Struct("<8sQ32s")
REBUILD_REMEDY = "remove it, and build again"


class TokenBlock(NamedTuple):
    """Tokens of consecutive documents; the first may continue from the block before, the last into the next.

    Attributes:
      tokens: int[n].
      starts: int[N], positions in `tokens` where documents begin.
      byte_counts: int, UTF-8 bytes of each document's text in this block: N, or N + 1 if the first continues.
      read: bytes of the source file read so far.
    """

    tokens: np.ndarray
    starts: np.ndarray
    byte_counts: np.ndarray
    read: int = 0


class CorpusInfo(NamedTuple):
    """The description of a corpus file.

    Attributes:
      token_type: dtype of the ids, "uint16" or "uint32".
      documents, tokens, text_bytes: number of each; bytes are those of the texts in UTF-8.
      vocab_size: V.
      sha256: of the tokens and documents.
      origin: what the corpus was made from.
    """

    token_type: str
    documents: int
    tokens: int
    text_bytes: int
    vocab_size: int
    sha256: str
    origin: dict[str, Any]


def write_corpus(
    path: Path,
    blocks: Iterable[TokenBlock],
    vocab_size: int,
    origin: dict[str, Any],
    *,
    raises: Callable[[str], UserError] = DataError,
) -> CorpusInfo:
    """Write blocks as they come: `path` appears only when the corpus is complete.

    Args:
      origin: what the corpus was made from, as JSON values, for `CorpusInfo`.
      raises: makes an error from a message that says why the file cannot be written.
    """
    name = "uint16" if vocab_size <= 1 << 16 else "uint32"
    dtype = np.dtype(name).newbyteorder("<")
    starts, byte_counts = array("q"), array("q")
    total = 0
    digest = hashlib.sha256()
    with write_atomically(path, raises=raises) as target, target.open("wb") as file:

        def put(content: Any) -> None:
            digest.update(content)
            file.write(content)

        file.write(bytes(CORPUS_HEADER.size))
        for block in blocks:
            goes_on = len(block.byte_counts) - len(block.starts)
            if goes_on:
                byte_counts[-1] += int(block.byte_counts[0])
            starts.frombytes((block.starts + total).astype(np.int64).tobytes())
            byte_counts.frombytes(block.byte_counts[goes_on:].astype(np.int64).tobytes())
            total += len(block.tokens)
            put(np.ascontiguousarray(block.tokens, dtype).view(np.uint8).data)
        put(bytes(-total * dtype.itemsize % 8))
        starts.append(total)
        for numbers in (starts, byte_counts):
            put(np.array(numbers, "<i8").tobytes())
        info = CorpusInfo(name, len(byte_counts), total, sum(byte_counts), vocab_size, digest.hexdigest(), origin)
        text = json.dumps(info._asdict()).encode()
        file.write(text)
        file.seek(0)
        file.write(CORPUS_HEADER.pack(CORPUS_MAGIC, len(text), hashlib.sha256(text).digest()))
    return info


def read_info(path: Path) -> CorpusInfo:
    """The description of a corpus file; its data is not read.

    Raises:
      DataError: the file is not a corpus, or its description is damaged.
    """
    with path.open("rb") as file:
        header = file.read(CORPUS_HEADER.size)
        magic, length, checksum = CORPUS_HEADER.unpack(header) if len(header) == CORPUS_HEADER.size else (b"", 0, b"")
        if magic == CORPUS_MAGIC and CORPUS_HEADER.size + length <= path.stat().st_size:
            file.seek(-length, 2)
            text = file.read()
            if hashlib.sha256(text).digest() == checksum:
                return _parse_info(path, text)
    raise DataError(f"{path} is not a whole corpus of tokens; {REBUILD_REMEDY}")


def _parse_info(path: Path, text: bytes) -> CorpusInfo:
    """Parse and check a description; raises DataError."""
    fields: Any = None
    with suppress(ValueError, TypeError, RecursionError):
        fields = json.loads(text)
        info = CorpusInfo(**fields)
        counts = info.documents, info.tokens, info.text_bytes, info.vocab_size
        are_counts = all(type(count) is int and count >= 0 for count in counts)
        if are_counts and info.token_type in ("uint16", "uint32") and isinstance(info.origin, dict):
            return info
    raise DataError(f"{path} has an invalid description, {short_repr(fields, 200)}; {REBUILD_REMEDY}")


def read_corpus(path: Path) -> tuple[Corpus, CorpusInfo]:
    """The corpus in a file, with its tokens mapped, and its description. All of it is read once to verify it.

    Raises:
      DataError: the file is not what was written, or its values are invalid.
    """
    info = read_info(path)
    mapped = np.asarray(np.memmap(path, np.uint8, "r"))
    length = CORPUS_HEADER.unpack(mapped[: CORPUS_HEADER.size].tobytes())[1]
    data = mapped[CORPUS_HEADER.size : len(mapped) - length]
    dtype = np.dtype(info.token_type).newbyteorder("<")
    size = info.tokens * dtype.itemsize
    padded = -(-size // 8) * 8
    is_whole = len(data) == padded + 8 * (2 * info.documents + 1)
    if not is_whole or hashlib.sha256(data.data).hexdigest() != info.sha256:
        raise DataError(f"{path} is not a whole corpus of tokens; {REBUILD_REMEDY}")
    tokens, numbers = data[:size].view(dtype), np.frombuffer(data[padded:].tobytes(), "<i8")
    starts, byte_counts = numbers[: info.documents + 1], numbers[info.documents + 1 :]
    are_consecutive = starts[0] == 0 and starts[-1] == info.tokens and (starts[1:] >= starts[:-1]).all()
    have_bytes = (byte_counts >= 0).all() and byte_counts.sum() == info.text_bytes
    have_rows = not info.tokens or int(tokens.max()) < info.vocab_size
    if not (are_consecutive and have_bytes and have_rows):
        raise DataError(f"{path} has documents or tokens that differ from its description; {REBUILD_REMEDY}")
    corpus = Corpus(
        tokens=tokens,
        starts=starts[:-1],
        stops=starts[1:],
        byte_counts=byte_counts,
        vocab_size=info.vocab_size,
        digest=info.sha256,
    )
    return corpus, info


def corpus_blocks(corpus: Corpus) -> Iterator[TokenBlock]:
    """The documents of a corpus as blocks, one for each run of documents that are consecutive in its tokens."""
    breaks = np.flatnonzero(corpus.starts[1:] != corpus.stops[:-1]) + 1
    for documents in np.split(np.arange(corpus.document_count), breaks):
        if len(documents):
            start = corpus.starts[documents[0]]
            tokens = corpus.tokens[start : corpus.stops[documents[-1]]]
            yield TokenBlock(tokens, corpus.starts[documents] - start, corpus.byte_counts[documents])
