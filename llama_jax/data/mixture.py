"""Several corpora read together, each with an exact share of the rows in every interval."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from fractions import Fraction
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from llama_jax.errors import DataError

MAX_PERIOD = 100_000  # rows of a pattern; enough for weights of five digits


def shares(weights: Mapping[str, float | str | Fraction]) -> dict[str, Fraction]:
    """Each weight over the sum of all, as an exact fraction: 0.7 is 7/10, as written.

    Raises:
      DataError: a weight is not a positive number, or the shares' denominator exceeds MAX_PERIOD.
    """
    fractions = dict[str, Fraction]()
    for name, weight in weights.items():
        try:
            fractions[name] = Fraction(str(weight))
        except (ValueError, ZeroDivisionError):  # also for inf and nan
            fractions[name] = Fraction(0)
        if fractions[name] <= 0:
            raise DataError(f"the weight of {name}, {weight}, must be a number above 0; to exclude it, remove its data")
    total = sum(fractions.values())
    fractions = {name: weight / total for name, weight in fractions.items()}
    period = math.lcm(*(share.denominator for share in fractions.values()))
    if period > MAX_PERIOD:
        raise DataError(
            f"the shares of {', '.join(fractions)} repeat only after {period:,} rows, but the maximum is {MAX_PERIOD:,}; use"
            " weights of fewer digits"
        )
    return fractions


@lru_cache(maxsize=16)
def interleave(parts: tuple[int, ...]) -> np.ndarray:
    """A sequence int32[sum(parts)] in which source i occurs parts[i] times, as evenly as possible.

    Among the first n, each count differs by less than 1 from n times its share: Tijdeman 1980 (The chairman assignment
    problem), with the bound 1 - 1 / (2 k - 2) for k sources. Among the sources with a large enough deficit, the next is the
    one with the earliest deadline.

    Args:
      parts: positive, one per source.
    """
    period, k = sum(parts), len(parts)
    if k == 1:
        return np.zeros(period, np.int32)
    slack = 2 * k - 2
    order, assigned = np.empty(period, np.int32), [0] * k
    for n in range(1, period + 1):
        # Each source's deficit if the n-th row is another's, times the period so that all are integers.
        deficits = [n * part - count * period for part, count in zip(parts, assigned, strict=True)]
        eligible = [at for at in range(k) if slack * deficits[at] >= period]
        chosen = min(eligible, key=lambda at: (Fraction((slack - 1) * period - slack * deficits[at], parts[at]), at))
        order[n - 1] = chosen
        assigned[chosen] += 1
    return order


class _Span(NamedTuple):
    """Rows with the same shares.

    Attributes:
      first: the first of the rows.
      done: int64[sources], rows of each source before it.
      order: int32[period], the source of each row, repeated.
      before: int64[period], number of earlier rows of the same source in the period.
      parts: int64[sources], rows of each source in the period.
    """

    first: int
    done: np.ndarray
    order: np.ndarray
    before: np.ndarray
    parts: np.ndarray

    def counts(self, rows: int) -> np.ndarray:
        """int64[sources], rows of each source before this row."""
        periods, rest = divmod(rows - self.first, len(self.order))
        return self.done + periods * self.parts + np.bincount(self.order[:rest], minlength=len(self.parts))


class Mixture:
    """An endless assignment of rows, numbered from 0, to sources by their shares, which may change at given rows.

    The source of row n depends only on n and the changes before it, wherever reading begins.

    Args:
      changes: pairs of a row and the shares from it on; the first is row 0, and all have the same sources in one order.
    """

    def __init__(self, changes: Sequence[tuple[int, Mapping[str, Fraction]]]) -> None:
        self.names = tuple(changes[0][1])
        self._spans: list[_Span] = []
        for first, shares in changes:
            period = math.lcm(*(share.denominator for share in shares.values()))
            parts = tuple(int(share * period) for share in shares.values())
            order, before = interleave(parts), np.empty(period, np.int64)
            for source, count in enumerate(parts):
                before[order == source] = np.arange(count)
            done = self._spans[-1].counts(first) if self._spans else np.zeros(len(parts), np.int64)
            self._spans.append(_Span(first, done, order, before, np.array(parts, np.int64)))

    def _span(self, row: int) -> _Span:
        return self._spans[max(bisect_right(self._spans, row, key=lambda span: span.first) - 1, 0)]

    def source_row(self, row: int) -> tuple[int, int]:
        """The source of a row, as an index into `names`, and the number of earlier rows of that source."""
        span = self._span(row)
        periods, at = divmod(row - span.first, len(span.order))
        source = int(span.order[at])
        return source, int(span.done[source] + periods * span.parts[source] + span.before[at])

    def counts(self, rows: int) -> np.ndarray:
        """int64[sources], rows of each source among the first `rows`."""
        return self._span(rows).counts(rows)
