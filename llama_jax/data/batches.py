"""Batches in order, starting at any point, for any number of hosts. Documents are concatenated and cut into rows, or packed
into rows whole: every row follows from its number alone."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence
from functools import lru_cache, partial
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np

from llama_jax.data.corpus import Corpus, check_seed, row_order, shuffled
from llama_jax.data.mixture import Mixture
from llama_jax.errors import DataError
from llama_jax.training.batch import Batch

ENDLESS = 1 << 62
PREFETCHED = 8  # batches that are made ahead
OPEN = 64  # rows that are still open: enough to fill them well, few enough to search


# --- rows ----------------------------------------------------------------------------------------------------------------


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
        raise DataError(f"the corpus has {tokens} tokens, and a token is predicted from the one before; add more data")
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
    """A batch [rows, length + 1] of padding, optionally with a mask."""
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
    batch.position_ids[at, : stop - start] = place - np.concatenate([[0], breaks])[segments]


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


def pack_shuffled(sizes: np.ndarray, length: int, seed: int | None) -> list[list[int]]:
    """`pack` documents into rows of T predicted tokens, in an order that the seed decides; None keeps theirs."""
    order = np.arange(len(sizes)) if seed is None else shuffled(len(sizes), seed, 0)
    return [order[members].tolist() for members in pack(sizes[order].tolist(), length + 1)]


def whole_rows(corpus: Corpus, length: int, seed: int | None) -> list[list[int]]:
    """The documents that share each row of `length` = T predicted tokens, each of them whole: the same in every epoch.

    Args:
      seed: decides in which order they are packed; None keeps the order of the corpus.

    Raises:
      DataError: a document of more than T + 1 tokens, or nothing to predict.
    """
    sizes = corpus.stops - corpus.starts
    if not len(sizes):
        raise DataError("the corpus has no documents; add more data")
    longest = int(sizes.max())
    if longest > length + 1:
        raise DataError(
            f"a conversation has {longest} tokens, and rows of length={length} hold {length + 1}; read the data for rows of"
            " this length, or use longer rows"
        )
    return pack_shuffled(sizes, length, seed)


def fill_whole(batch: Any, at: tuple[int, ...], corpus: Corpus, members: Sequence[int]) -> None:
    """Write whole documents side by side into a batch of padding, at its row `at`: each is a segment, and its
    targets are the mask."""
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


class HostBatches(Generic[BatchT]):
    """The batches of one host by number, made of its rows: all rows are numbered on through all batches of all hosts.

    Args:
      epoch_rows: rows in an epoch.
      batch: B, rows of a step on all hosts together.
      seed: None for a single pass.
      host, hosts: this host's number and how many there are.

    Raises:
      DataError: invalid sizes, or an invalid seed.
    """

    def __init__(self, epoch_rows: int, batch: int, seed: int | None, host: int, hosts: int) -> None:
        if hosts < 1 or not 0 <= host < hosts:
            raise DataError(f"host={host} must be at least 0 and below hosts={hosts}")
        if batch < 1 or batch % hosts:
            raise DataError(f"batch={batch} must be a positive multiple of hosts={hosts}: each host takes the same share")
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

    def __getitem__(self, number: int) -> BatchT:
        """This host's rows of a global batch."""
        raise NotImplementedError


class Batches(Iterator[BatchT]):
    """Batches one by one, with the next ones prepared in the background. The only state is the number of the next batch."""

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
        """The position in the data: `training_batches(..., start=state["next_batch"])` returns to it, for any hosts."""
        return {"next_batch": self._next}

    def close(self) -> None:
        """Stop making batches."""
        self._batches.close()


class _Source:
    """The endless rows of one corpus by number, epoch after epoch."""

    def __init__(self, corpus: Corpus, length: int, seed: int | None) -> None:
        self._corpus, self._seed = corpus, seed
        self._whole = None if corpus.targets is None else whole_rows(corpus, length, seed)
        self.rows = row_count(corpus, length) if self._whole is None else len(self._whole)  # of an epoch
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
        """With a seed, epoch after epoch; with None one pass in the order of a single corpus.

        Raises:
          DataError: invalid sizes or seed, or a corpus with nothing to predict.
        """
        if length < 1:
            raise DataError(f"length={length} must be at least 1 token")
        several = [corpora] if isinstance(corpora, Corpus) else list(corpora)
        if len(several) != (1 if mixture is None else len(mixture.names)):
            raise DataError(f"{len(several)} corpora need a mixture that has a share for each of them")
        self._sources = [_Source(corpus, length, seed) for corpus in several]
        if len({source.masked for source in self._sources}) > 1:
            raise DataError("text and chats do not mix: text has all tokens as targets, chats the assistant's messages")
        super().__init__(self._sources[0].rows, batch, seed, host, hosts)
        self._mixture = mixture
        self._length = length

    def epochs(self, number: int) -> list[float]:
        """How many times the first `number` batches of all hosts have read each corpus."""
        rows = number * self.batch
        counts = [rows] if self._mixture is None else self._mixture.counts(rows).tolist()
        return [count / source.rows for count, source in zip(counts, self._sources, strict=True)]

    def __getitem__(self, number: int) -> Batch:
        """This host's rows of a global batch: int32[B / hosts, T + 1] each."""
        rows = self.rows(number)
        batch = empty_batch(len(rows), self._length, masked=self._sources[0].masked)
        for at, row in enumerate(rows):
            source, own = (0, row) if self._mixture is None else self._mixture.place(row)
            self._sources[source].fill(batch, at, own)
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
    """Endless batches, with another order in every epoch.

    Documents of a corpus with `targets` are packed whole: none is in two rows, and the batch's mask marks its targets. The
    order depends on the corpus, the seed, `batch` and `length` alone: batch n is the same after any number of resumptions.

    Args:
      corpus: one, or those of a mixture in its order.
      batch: B, rows of a step on all hosts together; a batch may span the end of an epoch.
      length: T, tokens of a row that are predicted.
      host, hosts: this host's number and how many there are: it gets rows [host·B/hosts, (host+1)·B/hosts).
      start: the number of the first batch: `Batches.state` of the run that is continued.
      mixture: which rows come from which corpus. Each is read in the same order as alone, in its own epochs.

    Raises:
      DataError: invalid sizes, seed or start, or a corpus with nothing to predict.
    """
    if start < 0:
        raise DataError(f"start={start} must be at least 0: batches are counted from there")
    return Batches(Rows(corpus, batch, length, seed, host, hosts, mixture), start)


def validation_batches(corpus: Corpus, batch: int, length: int, *, host: int = 0, hosts: int = 1) -> Batches[Batch]:
    """The corpus once and in its order; the last batch is padded, with segment 0.

    See `training_batches` for the arguments and errors.
    """
    return Batches(Rows(corpus, batch, length, None, host, hosts), 0)
