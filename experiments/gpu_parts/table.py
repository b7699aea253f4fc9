"""Rows as a table for the terminal."""

from __future__ import annotations

from typing import Any

from gpu_parts.run import Row

REASONS = ("error", "refused", "does_not_fit", "skipped")


def table(rows: list[Row]) -> str:
    """The rows as lines, with a column for every key; if a row has no numbers, the reason is at its end."""
    if not rows:
        return "nothing"
    columns = list(dict.fromkeys(key for row in rows for key in row if key not in REASONS))
    cells = [columns, *([short_repr(row.get(column)) for column in columns] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) for line in cells]
    for i, row in enumerate(rows, start=1):
        for reason in REASONS:
            if reason in row:
                lines[i] = f"{lines[i]}  {reason}: {row[reason].splitlines()[0][:150]}"
    return "\n".join(line.strip() for line in lines if line.strip())  # rows with only reasons have no heading


def short_repr(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
    return str(value)
