"""Any file as a stream of tokens with the beginnings of documents."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import numpy as np

from llama_jax.data.documents import DocumentFormat, read_documents
from llama_jax.data.errors import DataError
from llama_jax.data.vocabulary import Vocabulary
from llama_jax.errors import TokenizerError, reason_of
from llama_jax.tokenizers import Tokenizer

BLOCK = 1 << 20  # tokens of a .bin that are read at once


class DocumentPart(NamedTuple):
    """A document, or a part of one that is too long to be read at once.

    Attributes:
      tokens: int[n].
      text_bytes: UTF-8 bytes of its text.
      begins: whether a document begins with it.
      read: bytes of the file that have been read so far.
    """

    tokens: np.ndarray
    text_bytes: int
    begins: bool
    read: int


def read_pieces(path: Path, tokenizer: Tokenizer, vocabulary: Vocabulary, reading: DocumentFormat) -> Iterator[DocumentPart]:
    """The tokens of a file.

    Text becomes BOS, its tokens, EOS, each end where the vocabulary has it (`Vocabulary`). Ids in ``.bin`` (nothing but
    ids, as nanoGPT and llama2.c write them) and in ``.array_record`` (the ids of one document a record) are taken as they
    are; in a ``.bin`` a document begins with every BOS and after every EOS.

    Raises:
      DataError: a file that is damaged or of another kind, by its line or the place of the token.
    """
    if path.suffix.lower() == ".bin":
        yield from _from_bin(path, vocabulary, reading)
    elif path.suffix.lower() == ".array_record":
        yield from _from_records(path, vocabulary, reading)
    else:
        for text, line, read in read_documents(path, reading):
            try:
                ids = tokenizer.encode(text, bos=vocabulary.bos >= 0, eos=vocabulary.eos >= 0)
            except TokenizerError as error:
                raise DataError(f"{path}, line {line}: {error}") from None
            yield DocumentPart(np.array(ids), len(text.encode()), True, read)


def _from_bin(path: Path, vocabulary: Vocabulary, reading: DocumentFormat) -> Iterator[DocumentPart]:
    dtype = _token_type(vocabulary, reading)
    size = path.stat().st_size
    if size % dtype.itemsize:
        raise DataError(
            f"{path} has {size} bytes, not a multiple of the {dtype.itemsize} of a {dtype.name} id; is it whole?"
        )
    bos, eos = vocabulary.bos, vocabulary.eos
    offset = 0
    ended = True  # whether a document ended with the last token of the block before
    silent = True  # whether the document has had no text so far
    with path.open("rb") as file:
        while len(block := np.fromfile(file, dtype, BLOCK)):
            _check_ids(f"{path}, token", block, offset, vocabulary)
            if offset == 0 and bos == eos:  # one token for both: it begins documents if it begins the file
                bos, eos = (bos, -1) if block[0] == bos else (-1, eos)
            begins = block == bos
            begins[1:] |= block[:-1] == eos
            begins[0] |= ended
            ended = bool(block[-1] == eos)
            lengths = np.concatenate([[0], np.cumsum(vocabulary.lengths[block])])
            for start, end in pairwise(np.unique([0, *np.flatnonzero(begins), len(block)])):
                text_bytes = int(lengths[end] - lengths[start])
                silent |= bool(begins[start])
                if silent and text_bytes:
                    text_bytes -= vocabulary.space_prefix
                    silent = False
                yield DocumentPart(block[start:end], text_bytes, bool(begins[start]), int(offset + end) * dtype.itemsize)
            offset += len(block)


def _from_records(path: Path, vocabulary: Vocabulary, reading: DocumentFormat) -> Iterator[DocumentPart]:
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
        yield DocumentPart(ids, text_bytes, True, size * (number + 1) // count)


def _token_type(vocabulary: Vocabulary, reading: DocumentFormat) -> np.dtype:
    name = reading.token_type or ("uint16" if vocabulary.size <= 1 << 16 else "uint32")
    return np.dtype(name).newbyteorder("<")


def _check_ids(where: str, ids: np.ndarray, offset: int, vocabulary: Vocabulary) -> None:
    """Ids within the vocabulary, and of the width they were written with.

    Raises:
      DataError: others.
    """
    outside = np.flatnonzero(ids >= vocabulary.size)
    if len(outside):
        at = int(outside[0])
        raise DataError(
            f"{where} {offset + at} is {ids[at]}, outside the vocabulary of {vocabulary.size}; give the tokenizer that wrote"
            " it, or the token_type it was written with"
        )
    # The upper halves of uint32 read as uint16, where a small vocabulary leaves them empty.
    if ids.dtype.itemsize == 2 and len(ids) >= 16 and len(ids) % 2 == 0 and not ids[1::2].any():
        raise DataError(f"{where} {offset + 1} and every second one is 0: the ids are uint32; say so by token_type='uint32'")
