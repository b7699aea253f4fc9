"""Documents cut into windows, and windows packed into rows, so that every token is predicted once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from llama_jax.data import Corpus


class Windows(NamedTuple):
    """Spans of tokens of a corpus, each inside one document.

    Attributes:
      start: int64[n], the index in `corpus.tokens` at which a window begins.
      read: int64[n], the number of tokens that the model reads; each could predict its next token.
      context: int64[n], how many of these predict nothing, since an earlier window has predicted the tokens after them.
      predicted: int64[n], the number of predicted tokens: the others, or those of them that are targets of the corpus.
    """

    start: np.ndarray
    read: np.ndarray
    context: np.ndarray
    predicted: np.ndarray


class WindowRows(NamedTuple):
    """Windows side by side, int32[B, T] each.

    Attributes:
      tokens: what is read.
      targets: the token that follows, or -1 where nothing is predicted.
      segment_ids: 1 for the tokens of a row's first window, 2 for those of its second, and so on; 0 for padding.
      positions: from 0 in every window.
    """

    tokens: np.ndarray
    targets: np.ndarray
    segment_ids: np.ndarray
    positions: np.ndarray


def cut_windows(corpus: Corpus, length: int, stride: int) -> Windows:
    """Cut documents so that every token but a document's first is predicted in one window, from what the window holds before
    it; in a corpus with targets, these alone.

    A document's first window predicts `length` tokens; each that follows begins `stride` tokens further on and predicts
    the `stride` tokens that are new to it, each from at least `length - stride` tokens before.
    """
    predicted = corpus.stops - corpus.starts - 1
    counts = np.where(predicted > 0, 1 + np.maximum(-(-(predicted - length) // stride), 0), 0)
    document = np.repeat(np.arange(len(counts)), counts)
    number = np.arange(len(document)) - np.repeat(np.cumsum(counts) - counts, counts)
    start = corpus.starts[document] + number * stride
    read = np.minimum(length, predicted[document] - number * stride)
    context = np.where(number > 0, length - stride, 0)
    if corpus.targets is None:
        return Windows(start, read, context, read - context)
    before = np.concatenate([[0], np.cumsum(corpus.targets)])
    return Windows(start, read, context, before[start + read + 1] - before[start + context + 1])


def lay_rows(
    corpus: Corpus, windows: Windows, rows: Sequence[Sequence[int]], batch: int, length: int
) -> tuple[WindowRows, np.ndarray]:
    """The rows as the model reads them, padded to `batch` rows of `length` tokens.

    Returns:
      The rows, and int64[B, T], the window that predicts each target, or -1.
    """
    laid = WindowRows(*(np.full((batch, length), value, np.int32) for value in (0, -1, 0, 0)))
    owner = np.full((batch, length), -1)
    for row, members in enumerate(rows):
        begin = 0
        for segment, window in enumerate(members, 1):
            start, read, context, _ = (int(column[window]) for column in windows)
            end, scored = begin + read, begin + context
            laid.tokens[row, begin:end] = corpus.tokens[start : start + read]
            laid.targets[row, scored:end] = corpus.tokens[start + context + 1 : start + read + 1]
            laid.segment_ids[row, begin:end] = segment
            laid.positions[row, begin:end] = np.arange(read)
            owner[row, scored:end] = window
            if corpus.targets is not None:
                left_out = scored + np.flatnonzero(~corpus.targets[start + context + 1 : start + read + 1])
                laid.targets[row, left_out] = owner[row, left_out] = -1
            begin = end
    return laid, owner
