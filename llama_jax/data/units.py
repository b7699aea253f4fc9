"""Files cut into units that become shards, each with whole documents."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from llama_jax.data.documents import DocumentFormat, Span, arrow_batches, is_compressed, kind_of, open_parquet

SEARCHED = 1 << 20  # bytes that are read at once to find where a document ends


class Unit(NamedTuple):
    """The source of a shard: a span of a file, or all of it."""

    number: int
    path: str
    span: Span | None


def units_of(files: Sequence[Path], spans: Sequence[Sequence[Span | None]]) -> list[Unit]:
    """The units of files in order, from the spans of each."""
    found = ((str(file), span) for file, some in zip(files, spans, strict=True) for span in some)
    return [Unit(number, *unit) for number, unit in enumerate(found)]


def spans_of(file: Path, reading: DocumentFormat, size: int) -> list[Span | None]:
    """Where a file is cut, into parts of about `size` bytes; None stands for a file that is read as a whole."""
    return list(_spans_of(file, reading, size))


def _spans_of(file: Path, reading: DocumentFormat, size: int) -> Iterator[Span | None]:
    if is_compressed(file):
        yield None
    elif kind_of(file) == ".parquet":
        description = open_parquet(file).metadata
        groups = range(description.num_row_groups)
        yield from _joined((description.row_group(group).total_byte_size for group in groups), size)
    elif kind_of(file) == ".arrow":
        yield from _joined((batch.nbytes for _, batch, _ in arrow_batches(file)), size)
    else:
        mark = b"\n" if kind_of(file) == ".jsonl" else reading.separator.encode()
        start, end = 0, file.stat().st_size
        while start < end:
            stop = _end_after(file, mark, start + size, end)
            yield Span(start, stop)
            start = stop


def _joined(sizes: Iterable[int], least: int) -> Iterator[Span]:
    """Runs of parts that together have at least so many bytes; the last may have fewer."""
    start = stop = total = 0
    for stop, size in enumerate(sizes, 1):
        total += size
        if total >= least:
            yield Span(start, stop)
            start, total = stop, 0
    if stop > start:
        yield Span(start, stop)


def _end_after(file: Path, mark: bytes, start: int, size: int) -> int:
    """The end of the first mark from `start` on, or of the file."""
    with file.open("rb") as opened:
        while start < size:
            opened.seek(start)
            found = opened.read(SEARCHED + len(mark)).find(mark)
            if found >= 0:
                return start + found + len(mark)
            start += SEARCHED
    return size
