"""Batches in order, starting at any batch, for any number of hosts. Documents are concatenated and cut into rows, or packed
whole into rows: each row is determined by its index."""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence
from functools import lru_cache, partial
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np

from llama_jax.data.corpus import Corpus, check_seed, row_order, shuffled
from llama_jax.data.mixture import Mixture
from llama_jax.errors import DataError
from llama_jax.settings import Bounds, at_least
from llama_jax.training.batch import Batch

ENDLESS = 1 << 62
PREFETCHED = 8  # batches prepared in advance
OPEN_ROWS = 64  # rows being filled: enough to fill them well, few enough to search


# --- rows ----------------------------------------------------------------------------------------------------------------


class Epoch(NamedTuple):
    """One pass over a corpus.

    Attributes:
      documents: int64[N], order of the documents.
      ends: int64[N], end of each in the stream of all documents concatenated in this order.
      rows: int64[R], order of the rows that the stream is cut into.
    """

    documents: np.ndarray
    ends: np.ndarray
    rows: np.ndarray


def row_count(corpus: Corpus, length: int) -> int:
    """R, the number of rows of `length` = T predicted tokens in an epoch.

    Raises:
      DataError: there is nothing to predict.
    """
    tokens = corpus.token_count
    if tokens < 2:
        raise DataError(f"the corpus has {tokens} tokens, but predicting a token needs at least 2; add more data")
    return -(-(tokens - 1) // length)


def order_epoch(corpus: Corpus, length: int, seed: int | None, epoch: int) -> Epoch:
    """The order of documents and rows in an epoch; rows are shuffled so that a long document is spread over batches.

    Args:
      length: T.
      seed: determines the order together with `epoch`; None keeps the order of the corpus.
    """
    rows = row_count(corpus, length)
    count = corpus.document_count
    documents = np.arange(count) if seed is None else shuffled(count, seed, 2 * epoch + 1)
    return Epoch(documents, np.cumsum((corpus.stops - corpus.starts)[documents]), row_order(rows, seed, epoch))


def empty_batch(rows: int, length: int, *, masked: bool = False) -> Batch:
    """A batch [rows, length + 1] of padding, optionally with a mask."""
    tokens, segment_ids, positions = (np.zeros((rows, length + 1), np.int32) for _ in range(3))
    return Batch(tokens, segment_ids, positions, np.zeros(tokens.shape, bool) if masked else None)


def fill_row(batch: Batch, at: int, corpus: Corpus, epoch: Epoch, row: int) -> None:
    """Write a row of an epoch into row `at` of a batch of padding.

    Row r is the stream from r·T to r·T + T, both included: its last token is the next row's first. So in an epoch every
    token is read once, and every token except a document's first is predicted once. A document that continues in the next
    row is a new segment there.
    """
    length = batch.tokens.shape[1] - 1
    start = row * length
    stop = min(start + length + 1, int(epoch.ends[-1]))
    first, last = np.searchsorted(epoch.ends, [start, stop - 1], side="right")
    within = slice(first, last + 1)
    segments = np.zeros(stop - start, np.int64)
    breaks = epoch.ends[first:last] - start  # positions in the row where another document begins
    segments[breaks] = 1
    np.cumsum(segments, out=segments)
    position = np.arange(stop - start)
    # The offset from stream to corpus is the same for all tokens of a document.
    shift = corpus.stops[epoch.documents[within]] - epoch.ends[within] + start
    batch.tokens[at, : stop - start] = corpus.tokens[shift[segments] + position]
    batch.segment_ids[at, : stop - start] = segments + 1
    batch.position_ids[at, : stop - start] = position - np.concatenate([[0], breaks])[segments]


def pack_documents(sizes: Sequence[int], length: int) -> list[list[int]]:
    """Best-fit packing: the documents, given by their sizes, that share each row of `length` tokens."""
    rows: list[list[int]] = []
    rooms: list[tuple[int, int]] = []  # open rows in order: free tokens, and the row
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
        if len(rooms) > OPEN_ROWS:
            del rooms[0]  # close the fullest
    return rows


def pack_shuffled(sizes: np.ndarray, length: int, seed: int | None) -> list[list[int]]:
    """`pack_documents` into rows of T predicted tokens, in an order determined by the seed; None keeps their order."""
    order = np.arange(len(sizes)) if seed is None else shuffled(len(sizes), seed, 0)
    return [order[members].tolist() for members in pack_documents(sizes[order].tolist(), length + 1)]


def whole_rows(corpus: Corpus, length: int, seed: int | None) -> list[list[int]]:
    """The documents that share each row of `length` = T predicted tokens, none of them split: the same in every epoch.

    Args:
      seed: determines the order of packing; None keeps the order of the corpus.

    Raises:
      DataError: a document has more than T + 1 tokens, or there is nothing to predict.
    """
    sizes = corpus.stops - corpus.starts
    if not len(sizes):
        raise DataError("the corpus has no documents; add more data")
    longest = int(sizes.max())
    if longest > length + 1:
        raise DataError(
            f"a conversation has {longest} tokens, but rows of length={length} hold {length + 1}; read the data for rows of"
            " this length, or use longer rows"
        )
    return pack_shuffled(sizes, length, seed)


def fill_whole(batch: Any, at: tuple[int, ...], corpus: Corpus, members: Sequence[int]) -> None:
    """Write whole documents next to each other into row `at` of a batch of padding: each is a segment, and its targets are
    the mask."""
    assert corpus.targets is not None
    begin = 0
    for segment, document in enumerate(members, 1):
        where = slice(int(corpus.starts[document]), int(corpus.stops[document]))
        size = where.stop - where.start
        row = *at, slice(begin, begin + size)
        batch.tokens[row] = corpus.tokens[where]
        batch.segment_ids[row] = segment
        batch.position_ids[row] = np.arange(size)
        batch.loss_mask[row] = corpus.targets[where]
        begin += size


# --- batches -------------------------------------------------------------------------------------------------------------


BatchT = TypeVar("BatchT")


class HostBatches(ABC, Generic[BatchT]):
    """The batches of one host by index, made of its rows: rows are numbered through all batches of all hosts.

    Args:
      epoch_rows: rows in an epoch.
      batch: B, rows of a step on all hosts.
      seed: None for a single pass.
      host, hosts: this host's index, and the number of hosts.

    Raises:
      DataError: invalid sizes, or an invalid seed.
    """

    def __init__(self, epoch_rows: int, batch: int, seed: int | None, host: int, hosts: int) -> None:
        Bounds(0, hosts - 1).check("host", host, DataError)
        if batch < 1 or batch % hosts:
            raise DataError(f"batch={batch} must be a positive multiple of hosts={hosts}: all hosts take equal shares")
        if seed is not None:
            check_seed(seed)
        self.batch, self._epoch_rows, self._seed = batch, epoch_rows, seed
        self._share, self._first = batch // hosts, batch // hosts * host

    def __len__(self) -> int:
        return -(-self._epoch_rows // self.batch) if self._seed is None else ENDLESS

    def rows(self, number: int) -> range:
        """This host's rows of a batch."""
        begin = number * self.batch + self._first
        return range(begin, begin + self._share)

    @abstractmethod
    def __getitem__(self, number: int) -> BatchT:
        """This host's rows of a global batch."""


class Batches(Iterator[BatchT]):
    """Iterator of batches, with the next ones prepared in the background. Its only state is the index of the next batch."""

    def __init__(self, rows: HostBatches[BatchT], start: int) -> None:
        import grain

        options = grain.ReadOptions(num_threads=1, prefetch_buffer_size=PREFETCHED)
        source: Any = rows
        self._batches: Any = iter(grain.MapDataset.source(source)[start:].to_iter_dataset(options))
        self._next = start

    def __next__(self) -> BatchT:
        batch: BatchT = next(self._batches)
        self._next += 1
        return batch

    @property
    def state(self) -> dict[str, int]:
        """The position in the data: `training_batches(..., start=state["next_batch"])` resumes there, on any hosts."""
        return {"next_batch": self._next}

    def close(self) -> None:
        """Stop preparing batches."""
        self._batches.close()


class _Source:
    """The endless rows of one corpus by index, epoch after epoch."""

    def __init__(self, corpus: Corpus, length: int, seed: int | None) -> None:
        self._corpus, self._seed = corpus, seed
        self._whole = None if corpus.targets is None else whole_rows(corpus, length, seed)
        self.rows = row_count(corpus, length) if self._whole is None else len(self._whole)  # rows per epoch
        self._order = lru_cache(maxsize=1)(partial(row_order, self.rows, seed))
        self._epoch = lru_cache(maxsize=1)(partial(order_epoch, corpus, length, seed))

    @property
    def masked(self) -> bool:
        return self._whole is not None

    def fill(self, batch: Batch, at: int, number: int) -> None:
        """Write a row into a batch of padding."""
        epoch, row = divmod(number, self.rows)
        if epoch and self._seed is None:
            return  # after the end of a single pass the last batch is padding
        if self._whole is not None:
            fill_whole(batch, (at,), self._corpus, self._whole[self._order(epoch)[row]])
        else:
            epoch_order = self._epoch(epoch)
            fill_row(batch, at, self._corpus, epoch_order, int(epoch_order.rows[row]))


class Rows(HostBatches[Batch]):
    """Packed rows of documents; see `HostBatches`."""

    def __init__(
        self,
        corpora: Corpus | Sequence[Corpus],
        batch: int,
        length: int,
        seed: int | None,
        host: int,
        hosts: int,
        mixture: Mixture | None = None,
    ) -> None:
        """Endless epochs with a seed; with None, a single pass in the order of a single corpus.

        Raises:
          DataError: invalid sizes or seed, or a corpus with nothing to predict.
        """
        at_least(1).check("length", length, DataError)
        several = [corpora] if isinstance(corpora, Corpus) else list(corpora)
        if len(several) != (1 if mixture is None else len(mixture.names)):
            raise DataError(f"{len(several)} corpora need a mixture with a share for each of them")
        self._sources = [_Source(corpus, length, seed) for corpus in several]
        if len({source.masked for source in self._sources}) > 1:
            raise DataError("text and chats cannot be mixed: all tokens of text are targets, but only some of chats")
        super().__init__(self._sources[0].rows, batch, seed, host, hosts)
        self._mixture = mixture
        self._length = length

    def epochs(self, number: int) -> list[float]:
        """Epochs of each corpus in the first `number` batches of all hosts."""
        rows = number * self.batch
        counts = [rows] if self._mixture is None else self._mixture.counts(rows).tolist()
        return [count / source.rows for count, source in zip(counts, self._sources, strict=True)]

    def __getitem__(self, number: int) -> Batch:
        """This host's rows of a global batch: int32[B / hosts, T + 1] each."""
        rows = self.rows(number)
        batch = empty_batch(len(rows), self._length, masked=self._sources[0].masked)
        for at, row in enumerate(rows):
            source, source_row = (0, row) if self._mixture is None else self._mixture.source_row(row)
            self._sources[source].fill(batch, at, source_row)
        return batch


def training_batches(
    corpus: Corpus | Sequence[Corpus],
    batch: int,
    length: int,
    *,
    seed: int,
    host: int = 0,
    hosts: int = 1,
    start: int = 0,
    mixture: Mixture | None = None,
) -> Batches[Batch]:
    """Endless batches, in a different order in every epoch.

    Documents of a corpus with `targets` are packed whole: none is split, and the batch's mask marks its targets. The order
    depends only on the corpus, the seed, `batch` and `length`: batch n is the same however often a run was resumed.

    Args:
      corpus: a corpus, or those of a mixture in its order.
      batch: B, rows of a step on all hosts; a batch may span the end of an epoch.
      length: T, predicted tokens per row.
      host, hosts: this host's index, and the number of hosts: it returns rows [host·B/hosts, (host+1)·B/hosts).
      start: index of the first batch: `Batches.state` of the run to resume.
      mixture: assigns rows to corpora. Each is read in the same order as by itself, in its own epochs.

    Raises:
      DataError: invalid sizes, seed or start, or a corpus with nothing to predict.
    """
    at_least(0).check("start", start, DataError)
    return Batches(Rows(corpus, batch, length, seed, host, hosts, mixture), start)


def validation_batches(corpus: Corpus, batch: int, length: int, *, host: int = 0, hosts: int = 1) -> Batches[Batch]:
    """The corpus once, in order; the last batch is padded, with segment 0.

    See `training_batches` for the arguments and errors.
    """
    return Batches(Rows(corpus, batch, length, None, host, hosts), 0)
