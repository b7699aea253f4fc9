"""Documents as runs of one long array of tokens, and their division for training and validation."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np

from llama_jax.data.errors import DataError
from llama_jax.data.shuffle import shuffled


@dataclass(frozen=True, eq=False)
class Corpus:
    """Documents of tokens, of which nothing is in memory but where they are. A part of a corpus is a corpus.

    Attributes:
      tokens: uint16 or uint32 [all], mapped from the cache file.
      starts, stops: int64[N], where in `tokens` each document is.
      byte_counts: int64[N], UTF-8 bytes of each document's text: with them a loss becomes bits per byte.
      vocab_size: V of the tokenizer; every token is below it.
      digest: SHA-256 of the whole file's tokens and documents: the same on every machine that read the same data.
    """

    tokens: np.ndarray = field(repr=False)
    starts: np.ndarray = field(repr=False)
    stops: np.ndarray = field(repr=False)
    byte_counts: np.ndarray = field(repr=False)
    vocab_size: int
    digest: str

    @property
    def document_count(self) -> int:
        return len(self.starts)

    @property
    def token_count(self) -> int:
        return int((self.stops - self.starts).sum())

    @property
    def byte_count(self) -> int:
        return int(self.byte_counts.sum())

    def document(self, number: int) -> np.ndarray:
        """The tokens of a document."""
        return self.tokens[self.starts[number] : self.stops[number]]

    def select(self, documents: np.ndarray) -> Corpus:
        """The corpus of these documents only, by their numbers here, in that order."""
        return replace(
            self, starts=self.starts[documents], stops=self.stops[documents], byte_counts=self.byte_counts[documents]
        )


class Split(NamedTuple):
    """Two corpora without a document in common."""

    train: Corpus
    validation: Corpus


def split(corpus: Corpus, validation: float, *, seed: int = 0) -> Split:
    """Divide the documents by chance, the same for a seed; both parts keep the corpus's order.

    Documents of the same tokens are on the same side, so that it may be some fewer to validate on where there are any.

    Args:
      validation: how many documents to validate on: an int is their number, a float their fraction (one at least).

    Raises:
      DataError: no document would be left on one of the sides, or all are the same.
    """
    count = corpus.document_count
    chosen = validation if isinstance(validation, int) else _part_of(count, validation)
    if count < 2:
        raise DataError(
            "the corpus is a single document, of which nothing can be split off; give files of their own for validation,"
            " or cut a long text into more by a smaller Reading(longest=...)"
        )
    if not 0 < chosen < count:
        raise DataError(
            f"validation={validation} leaves nothing to train or to validate on; of {count} documents give 1 to {count - 1},"
            " or a fraction between 0 and 1"
        )
    from llama_jax.data.duplicates import keep_together  # which knows what a corpus is

    order, chosen = keep_together(corpus, shuffled(count, seed, 0), chosen)
    return Split(corpus.select(np.sort(order[chosen:])), corpus.select(np.sort(order[:chosen])))


def _part_of(count: int, fraction: float) -> int:
    return max(1, round(fraction * count)) if 0 < fraction < 1 else 0
