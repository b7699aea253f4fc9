"""The input of every section of `gpu_report`, and its rows."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax

from gpu_parts.plan import Plan

RUNNER = Path(__file__).parents[1] / "gpu_report.py"  # workers are started from it, too

Row = dict[str, Any]
Section = Callable[["Run"], Iterable[Row]]


@dataclass
class Run:
    """The input of every section: the device, the sizes, the time left and the results so far.

    Attributes:
      before: results of this section from an earlier run, which are not measured again.
    """

    device: jax.Device
    plan: Plan
    time_limit: float
    results: dict[str, list[Row]] = field(default_factory=dict)
    before: list[Row] = field(default_factory=list)
    start: float = field(default_factory=time.monotonic)
    longest: float = 0.0

    def time_left(self) -> float:
        return self.time_limit - (time.monotonic() - self.start)

    def attempt(self, row: Row, measure: Callable[[], Row]) -> Row:
        """`row` with the result of `measure`, or with the reason of its failure, which does not affect other rows.

        A running measurement cannot be interrupted, so it is skipped unless the longest one so far would still fit.
        """
        for i, found in enumerate(self.before):
            if row.items() <= found.items():
                return self.before.pop(i)
        if self.time_left() <= self.longest:
            return row | {"skipped": "time limit"}
        start = time.monotonic()
        try:
            return row | measure()
        except Exception as error:
            return row | {"error": describe(error)}
        finally:
            self.longest = max(self.longest, time.monotonic() - start)

    def found(self, section: str, key: str, **where: Any) -> float | None:
        """The value of `key` in the first row of `section` that has it and matches, or None."""
        for row in self.results.get(section, []):
            if key in row and all(row.get(name) == value for name, value in where.items()):
                return row[key]
        return None


def is_result(row: Row) -> bool:
    """Whether a row was measured, and did not fail a check."""
    return not {"error", "skipped"} & row.keys() and row.get("ok", True)


def describe(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"[:2000]


def number(value: Any) -> float | str:
    """A float, or its name if JSON cannot represent it."""
    return float(value) if math.isfinite(value) else str(value)


def memory_limit(device: jax.Device) -> int | None:
    return (device.memory_stats() or {}).get("bytes_limit")
