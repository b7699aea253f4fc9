"""Documents cut into windows, and windows packed into rows: what a model reads so that every token is predicted once."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from llama_jax.data import Corpus

OPEN = 64  # rows that still take windows: enough to fill them, few enough to search


class Windows(NamedTuple):
    """Runs of tokens of a corpus; each is inside one document.

    Attributes:
      start: int64[n], where in `corpus.tokens` a window begins.
      read: int64[n], how many tokens the model reads; the same number, one further on, could be predicted.
      context: int64[n], how many of these are not, as an earlier window has predicted them.
    """

    start: np.ndarray
    read: np.ndarray
    context: np.ndarray

    @property
    def predicted(self) -> np.ndarray:
        """int64[n], tokens that each window predicts."""
        return self.read - self.context


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
    """Every token but a document's first predicted by one window, from as much before it as the window holds.

    A document's first window predicts `length` tokens; each that follows begins `stride` tokens further on and predicts
    the `stride` tokens that are new to it, each from at least `length - stride` tokens before.
    """
    predicted = corpus.stops - corpus.starts - 1
    counts = np.where(predicted > 0, 1 + np.maximum(-(-(predicted - length) // stride), 0), 0)
    document = np.repeat(np.arange(len(counts)), counts)
    number = np.arange(len(document)) - np.repeat(np.cumsum(counts) - counts, counts)
    return Windows(
        start=corpus.starts[document] + number * stride,
        read=np.minimum(length, predicted[document] - number * stride),
        context=np.where(number > 0, length - stride, 0),
    )


def pack(sizes: Sequence[int], length: int) -> list[list[int]]:
    """Which windows share a row of `length` tokens: each goes where it leaves the least room (best fit)."""
    rows: list[list[int]] = []
    rooms: list[tuple[int, int]] = []  # of the open rows, in order: tokens that are free, and the row
    for window, size in enumerate(sizes):
        at = bisect_left(rooms, (size, 0))
        if at < len(rooms):
            room, row = rooms.pop(at)
        else:
            room, row = length, len(rows)
            rows.append([])
        rows[row].append(window)
        if room > size:
            insort(rooms, (room - size, row))
        if len(rooms) > OPEN:
            del rooms[0]  # the fullest is closed
    return rows


def lay_rows(
    corpus: Corpus, windows: Windows, rows: Sequence[Sequence[int]], batch: int, length: int
) -> tuple[WindowRows, np.ndarray]:
    """The rows as the model reads them, filled up to `batch` rows of `length` tokens with padding.

    Returns:
      The rows, and int64[B, T], the window that predicts each target, or -1.
    """
    laid = WindowRows(*(np.full((batch, length), value, np.int32) for value in (0, -1, 0, 0)))
    owner = np.full((batch, length), -1)
    for row, members in enumerate(rows):
        begin = 0
        for segment, window in enumerate(members, 1):
            start, read, context = (int(column[window]) for column in windows)
            end, scored = begin + read, begin + context
            laid.tokens[row, begin:end] = corpus.tokens[start : start + read]
            laid.targets[row, scored:end] = corpus.tokens[start + context + 1 : start + read + 1]
            laid.segment_ids[row, begin:end] = segment
            laid.positions[row, begin:end] = np.arange(read)
            owner[row, scored:end] = window
            begin = end
    return laid, owner
