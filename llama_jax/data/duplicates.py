"""Documents that occur more than once: they must not be on both sides of a split."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import numpy as np

from llama_jax.data.corpus import Corpus
from llama_jax.data.errors import DataError


def digests(contents: Iterable[bytes | memoryview]) -> np.ndarray:
    """uint64[N]: the same number for the same content, 8 bytes of BLAKE2b.

    Of n different contents two have one number with a probability of n² / 2^65: 3e-6 of ten million, 0.03 of a billion.
    """
    return np.frombuffer(b"".join(hashlib.blake2b(content, digest_size=8).digest() for content in contents), "<u8")


def fingerprints(corpus: Corpus) -> np.ndarray:
    """uint64[N]: the same number for documents of the same tokens, in all corpora of one vocabulary."""
    width = corpus.tokens.dtype.itemsize
    data = corpus.tokens.view(np.uint8).data
    spans = zip((corpus.starts * width).tolist(), (corpus.stops * width).tolist(), strict=True)
    return digests(data[start:stop] for start, stop in spans)


def keep_together(corpus: Corpus, order: np.ndarray, chosen: int) -> tuple[np.ndarray, int]:
    """Reorder documents so that none of the first `chosen` occurs among the others; without duplicates nothing changes.

    Documents with the same tokens are moved to the first of them, all or none, and no more than `chosen` in all.

    Returns:
      The order, and how many at its beginning are chosen now.

    Raises:
      DataError: all documents are the same.
    """
    _, groups, sizes = np.unique(fingerprints(corpus), return_inverse=True, return_counts=True)
    if len(sizes) == len(order):
        return order, chosen
    if len(sizes) < 2:
        raise DataError(f"the corpus is one document {len(order)} times, which cannot be on both sides of a split")
    _, first = np.unique(groups[order], return_index=True)
    take, total = np.zeros(len(sizes), bool), 0
    for group in np.argsort(first, kind="stable").tolist():
        if total == chosen:
            break
        if total + sizes[group] <= chosen:
            take[group] = True
            total += int(sizes[group])
    if not total:  # each occurs more often than documents were asked for
        take[int(np.argmin(sizes))] = True
    here = take[groups[order]]
    return np.concatenate([order[here], order[~here]]), int(here.sum())


def without(corpus: Corpus, other: Corpus) -> Corpus:
    """The documents of a corpus that are not in another one of the same vocabulary.

    Raises:
      DataError: all of them are.
    """
    left = np.flatnonzero(~np.isin(fingerprints(corpus), fingerprints(other)))
    if not len(left):
        raise DataError("every document of the training data is in the validation data too; give others for one of them")
    return corpus if len(left) == corpus.document_count else corpus.select(left)
