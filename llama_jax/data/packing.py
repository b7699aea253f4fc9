"""Documents concatenated and cut into rows, or packed into rows whole: every row follows from its number alone."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from llama_jax.data.corpus import Corpus, row_order, shuffled
from llama_jax.errors import DataError
from llama_jax.training.batch import Batch

OPEN = 64  # rows that are still open: enough to fill them well, few enough to search


class Epoch(NamedTuple):
    """One pass over a corpus.

    Attributes:
      documents: int64[N], their order.
      ends: int64[N], where each ends in the stream of all documents concatenated in this order.
      rows: int64[R], the order of the rows that the stream is cut into.
    """

    documents: np.ndarray
    ends: np.ndarray
    rows: np.ndarray


def row_count(corpus: Corpus, length: int) -> int:
    """R, rows of `length` = T predicted tokens in an epoch.

    Raises:
      DataError: nothing to predict.
    """
    tokens = corpus.token_count
    if tokens < 2:
        raise DataError(f"the corpus has {tokens} tokens, and a token is predicted from the one before; give more data")
    return -(-(tokens - 1) // length)


def order_epoch(corpus: Corpus, length: int, seed: int | None, epoch: int) -> Epoch:
    """The order of an epoch: of documents and of rows, so that the parts of a long document are not all in one batch.

    Args:
      length: T.
      seed: decides it together with the epoch's number; None keeps the order of the corpus.
    """
    rows = row_count(corpus, length)
    count = corpus.document_count
    documents = np.arange(count) if seed is None else shuffled(count, seed, 2 * epoch + 1)
    return Epoch(documents, np.cumsum((corpus.stops - corpus.starts)[documents]), row_order(rows, seed, epoch))


def empty_batch(rows: int, length: int, *, masked: bool = False) -> Batch:
    """A batch [rows, length + 1] of padding, with a mask if asked for."""
    tokens, segment_ids, positions = (np.zeros((rows, length + 1), np.int32) for _ in range(3))
    return Batch(tokens, segment_ids, positions, np.zeros(tokens.shape, bool) if masked else None)


def fill_row(batch: Batch, at: int, corpus: Corpus, epoch: Epoch, row: int) -> None:
    """Write a row of an epoch into a batch of padding, at its row `at`.

    Row r is what the stream holds from r·T to r·T + T, both included: its last token is the next row's first. So over an
    epoch every token is read once and every token but a document's first is predicted once. A document that goes on in the
    next row is a new segment there.
    """
    length = batch.tokens.shape[1] - 1
    start = row * length
    stop = min(start + length + 1, int(epoch.ends[-1]))
    first, last = np.searchsorted(epoch.ends, [start, stop - 1], side="right")
    within = slice(first, last + 1)
    segments = np.zeros(stop - start, np.int64)
    breaks = epoch.ends[first:last] - start  # where in the row another document begins
    segments[breaks] = 1
    np.cumsum(segments, out=segments)
    place = np.arange(stop - start)
    # From the place in the stream to the place in the corpus it is the same way for all tokens of a document.
    shift = corpus.stops[epoch.documents[within]] - epoch.ends[within] + start
    batch.tokens[at, : stop - start] = corpus.tokens[shift[segments] + place]
    batch.segment_ids[at, : stop - start] = segments + 1
    batch.positions[at, : stop - start] = place - np.concatenate([[0], breaks])[segments]


def pack(sizes: Sequence[int], length: int) -> list[list[int]]:
    """Best-fit packing: which documents, by their sizes, share a row of `length` tokens."""
    rows: list[list[int]] = []
    rooms: list[tuple[int, int]] = []  # of the open rows, in order: tokens that are free, and the row
    for run, size in enumerate(sizes):
        at = bisect_left(rooms, (size, 0))
        if at < len(rooms):
            room, row = rooms.pop(at)
        else:
            room, row = length, len(rows)
            rows.append([])
        rows[row].append(run)
        if room > size:
            insort(rooms, (room - size, row))
        if len(rooms) > OPEN:
            del rooms[0]  # the fullest is closed
    return rows


def whole_rows(corpus: Corpus, length: int, seed: int | None) -> list[list[int]]:
    """The documents that share each row of `length` = T predicted tokens, each of them whole: the same in every epoch.

    Args:
      seed: decides in which order they are packed; None keeps the order of the corpus.

    Raises:
      DataError: a document of more than T + 1 tokens, or nothing to predict.
    """
    sizes = corpus.stops - corpus.starts
    if not len(sizes):
        raise DataError("the corpus has no documents; give more data")
    longest = int(sizes.max())
    if longest > length + 1:
        raise DataError(
            f"a conversation has {longest} tokens, and rows of length={length} hold {length + 1}; read the data for rows of"
            " this length, or give longer rows"
        )
    order = np.arange(len(sizes)) if seed is None else shuffled(len(sizes), seed, 0)
    return [order[members].tolist() for members in pack(sizes[order].tolist(), length + 1)]


def fill_whole(batch: Any, at: tuple[int, ...], corpus: Corpus, members: Sequence[int]) -> None:
    """Write whole documents side by side into a batch of padding, at its row `at`: each is a segment, whose targets are the
    mask."""
    assert corpus.targets is not None
    begin = 0
    for segment, document in enumerate(members, 1):
        where = slice(int(corpus.starts[document]), int(corpus.stops[document]))
        size = where.stop - where.start
        row = *at, slice(begin, begin + size)
        batch.tokens[row] = corpus.tokens[where]
        batch.segment_ids[row] = segment
        batch.positions[row] = np.arange(size)
        batch.mask[row] = corpus.targets[where]
        begin += size
