"""Output of commands: sizes, columns, names from files made safe for a terminal, and JSON."""

from __future__ import annotations

import json
import sys
import textwrap
from collections.abc import Sequence
from typing import Any


def note(*texts: str) -> None:
    """Print lines for people on stderr."""
    for text in texts:
        print(f"llama-jax: {text}", file=sys.stderr, flush=True)


def printable(text: str) -> str:
    """A text from a file on one line: control characters and those that a terminal cannot show are escaped."""
    return text if text.isprintable() else ascii(text)[1:-1]


def size(count: int) -> str:
    """Bytes in the unit that leaves one to three digits before the point: 4.1 GB."""
    number = float(count)
    for unit in ("bytes", "kB", "MB", "GB"):
        if number < 999.5:
            return f"{number:.0f} {unit}" if unit == "bytes" or number >= 99.95 else f"{number:.1f} {unit}"
        number /= 1000
    return f"{number:,.1f} TB"


def columns(rows: Sequence[Sequence[str]], right: Sequence[int] = (), indent: str = "") -> str:
    """Rows of equally many cells in columns; the columns whose numbers are in `right` are aligned right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = (
        "  ".join(
            cell.rjust(width) if i in right else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    )
    return "\n".join((indent + line).rstrip() for line in lines)


def filled(text: str, width: int = 80, indent: int = 0) -> str:
    """A text on lines of at most `width` characters; a path or an option stays whole."""
    start = " " * indent
    words = " ".join(text.split())
    return textwrap.fill(
        words, width, initial_indent=start, subsequent_indent=start, break_on_hyphens=False, break_long_words=False
    )


def paragraphs(text: str, width: int = 80) -> str:
    """A docstring for a terminal: its paragraphs, each filled anew."""
    return "\n\n".join(filled(part, width) for part in text.strip().split("\n\n"))


def as_json(facts: dict[str, Any]) -> str:
    """One JSON object on one line, with null for nan and infinities."""
    from llama_jax.runs.metrics import finite

    return json.dumps(finite(facts), ensure_ascii=False)
