"""Text files, JSONL, JSON, Parquet and Arrow as a stream of documents or records; only a few of them are in memory, however
large the file, except for JSON. Files are divided into spans of whole documents for several processes."""

from __future__ import annotations

import codecs
import gzip
import io
import json
import zlib
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import IO, Annotated, Any, Literal, NamedTuple, TypeVar, cast

from llama_jax.errors import DataError, GenerationError, TokenizerError, reason_of, short_repr
from llama_jax.settings import at_least, check_fields

TEXT_READ_BYTES = 1 << 20  # bytes of a text file to read at a time
TABLE_ROWS = 1024  # rows of a table to read at a time
SEARCH_BYTES = 1 << 20  # bytes to read at a time to find the end of a document
COMPRESSED_SUFFIXES = (".gz", ".zst")
TOKEN_SUFFIXES = (".bin", ".array_record", ".corpus")  # files of token ids
RECORD_UNITS = {".jsonl": "line", ".json": "record", ".parquet": "row", ".arrow": "row"}  # a record by the type of its file
ARROW_MAGIC = b"ARROW1"  # begins Arrow's file format, which has an index
ARROW_END = b"\xff\xff\xff\xff\0\0\0\0"  # ends Arrow's streaming format


@dataclass(frozen=True)
class DocumentFormat:
    """Settings for reading documents.

    A file is text unless its name ends in one of `RECORD_UNITS` or `TOKEN_SUFFIXES`; ``.txt``, ``.jsonl`` and ``.json`` may
    be followed by ``.gz`` or ``.zst``.

    Attributes:
      separator: the text between documents of a text file. White space around documents is removed.
      longest: maximum characters of a document in a text file. A longer one, such as a whole file without separators, is cut
        into several: after the last empty line that leaves more than half of that, else after the last line, else after the
        last word. The default is about 30,000 tokens.
      field: the field of the objects of JSONL and JSON, or column of a table in Parquet or Arrow, that contains a document's
        text, which is used as it is, whatever its length; null and an empty text are no document.
      token_type: dtype of the ids in ``.bin`` and ``.array_record``; None means "uint16" if that fits the vocabulary.

    Raises:
      DataError: an empty separator, a length that is not positive, or an invalid dtype of ids.
    """

    separator: str = "<|endoftext|>"
    longest: Annotated[int, at_least(1)] = 1 << 17
    field: str = "text"
    token_type: Literal["uint16", "uint32"] | None = None

    def __post_init__(self) -> None:
        if not self.separator:
            raise DataError("separator='' separates every two characters; for texts without separators set only `longest`")
        check_fields(self, DataError)


class Document(NamedTuple):
    """A text, the line of the file on which it begins (see `Record.number` for records), and the number of bytes of the file
    read so far."""

    text: str
    line: int
    read: int


class Record(NamedTuple):
    """An object of JSONL or JSON, or a row of a table.

    Attributes:
      fields: its values by name.
      number: its line in JSONL, else its index in the file; from 1, counted from the beginning of a span.
      read: bytes of the file read so far.
    """

    fields: dict[str, Any]
    number: int
    read: int


class Span(NamedTuple):
    """A range of a file with whole documents, in bytes, row groups of Parquet or batches of Arrow."""

    start: int
    stop: int


def text_documents(path: Path, reading: DocumentFormat, span: Span | None = None) -> Iterator[Document]:
    """The documents of a text file in UTF-8, with or without a byte-order mark; all line endings become newlines.

    Lines are counted from the beginning of the span.

    Raises:
      DataError: bytes that are not text, with their line.
    """
    line = 1
    for piece, read in _separated(path, reading.separator, reading.longest, span):
        text = piece.removesuffix(reading.separator)
        begun = text.lstrip()
        if begun:
            yield Document(begun.rstrip(), line + text.count("\n", 0, len(text) - len(begun)), read)
        line += piece.count("\n")


def read_records(path: Path, span: Span | None = None, columns: list[str] | None = None) -> Iterator[Record]:
    """The records of a file of one of `RECORD_UNITS`. A ``.json`` has an array of objects, a single object, or JSONL.

    Args:
      columns: the columns of a table to read; by default all.

    Raises:
      DataError: a record that is not an object; a damaged file; pyarrow is missing, or a table has no such column.
    """
    match file_type(path):
        case ".jsonl":
            return _complete(path, _jsonl_records(path, span))
        case ".json":
            return _complete(path, _json_records(path))
        case _:
            return _table_records(path, span, columns)


def location(path: Path, number: int) -> str:
    """The file and the line, record or row, for messages."""
    return f"{path}, {RECORD_UNITS.get(file_type(path), 'line')} {number}"


@contextmanager
def errors_at(where: str) -> Iterator[None]:
    """Convert an error about a text or messages to a DataError that says where they are."""
    try:
        yield
    except (GenerationError, TokenizerError) as error:
        raise DataError(f"{where}: {error}") from None


def _jsonl_records(path: Path, span: Span | None) -> Iterator[Record]:
    read = 0
    with open_bytes(path) as file:
        if span is not None:
            file.seek(span.start)

        def lines() -> Iterator[bytes]:
            nonlocal read
            for line in file:
                read += len(line)
                if span is not None and read > span.stop - span.start:
                    return
                yield line

        for fields, number in json_objects(lines(), str(path)):
            yield Record(fields, number, read)


def _json_records(path: Path) -> Iterator[Record]:
    with open_bytes(path) as file:
        content = file.read()
    size = path.stat().st_size
    try:
        value = json.loads(content)
    except UnicodeDecodeError:
        raise DataError(f"{path} is not UTF-8; save the file as UTF-8") from None
    except (ValueError, RecursionError) as error:
        if content.lstrip(codecs.BOM_UTF8 + b" \t\r\n").startswith(b"["):
            raise DataError(f"{path} is not a whole JSON array ({reason_of(error)}); copy it again") from None
        for fields, number in json_objects(content.split(b"\n"), str(path)):
            yield Record(fields, number, size)
        return
    records = value if isinstance(value, list) else [value]
    for number, fields in enumerate(records, 1):
        if not isinstance(fields, dict):
            raise DataError(f"{location(path, number)} is a {type(fields).__name__}; write an array of objects")
        yield Record(fields, number, size * number // len(records))


def first_fields(files: Sequence[Path]) -> set[str]:
    """The fields of the first record in the first file of records; empty if there is no such file."""
    records = (record for file in files if file_type(file) in RECORD_UNITS for record in read_records(file))
    return {name for record in islice(records, 1) for name in record.fields}


def json_objects(lines: Iterable[bytes], where: str) -> Iterator[tuple[dict[str, Any], int]]:
    """The objects of lines of JSON, each with its line number from 1; empty lines are skipped.

    Args:
      where: the file's name, for messages.

    Raises:
      DataError: a line that is not a JSON object.
    """
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        remedy = "JSONL has one object per line"
        if number == 1 and line.lstrip().startswith(b"["):
            remedy += f"; if this is an array, jq -c '.[]' {Path(where).name} converts it"
        try:
            record = json.loads(line)
            problem = "" if isinstance(record, dict) else f"is a {type(record).__name__}; {remedy}"
        except UnicodeDecodeError:
            problem = "is not UTF-8; save the file as UTF-8"
        except (ValueError, RecursionError) as error:
            reason = f"{error.msg} at column {error.colno}" if isinstance(error, json.JSONDecodeError) else error
            problem = f"is not JSON ({reason}); {remedy}"
        if problem:
            raise DataError(f"{where}, line {number} {problem}")
        yield record, number


def record_documents(path: Path, reading: DocumentFormat, span: Span | None = None) -> Iterator[Document]:
    """The texts in a field of records; null and empty ones are skipped.

    Raises:
      DataError: a record without this field, or with something else in it; see also `read_records`.
    """
    field, remedy = reading.field, "set `field` to the one with the text"
    for fields, number, read in read_records(path, span, [field]):
        text = fields.get(field)
        if text and isinstance(text, str):
            yield Document(text, number, read)
        elif text not in (None, ""):
            raise DataError(f"{location(path, number)}: {field}={short_repr(text, 60)} must be a text; {remedy}")
        elif field not in fields:
            names = short_repr(list(fields), 200) if fields else "no fields"
            raise DataError(f"{location(path, number)} has no text in the field {field!r}; it has {names}: {remedy}")


def _table_records(path: Path, span: Span | None, columns: list[str] | None) -> Iterator[Record]:
    """The rows of a table in Parquet, or in Arrow as written by the datasets library."""
    batches = (_parquet_batches if file_type(path) == ".parquet" else _arrow_batches)(path, span, columns)
    rows = ((fields, read) for batch, read in batches for fields in batch)
    return (Record(fields, number, read) for number, (fields, read) in enumerate(rows, 1))


def _parquet_batches(path: Path, span: Span | None, columns: list[str] | None) -> Iterator[tuple[list[Any], int]]:
    """Rows, at most TABLE_ROWS at a time, and the number of bytes of the file read after their group."""
    file, size = open_parquet(path), path.stat().st_size
    _check_column_names(path, columns, file.schema_arrow.names)
    groups = range(file.num_row_groups) if span is None else range(*span)
    for done, group in enumerate(groups, 1):
        batches = map(_batch_rows, file.iter_batches(TABLE_ROWS, row_groups=[group], columns=columns))
        with _damage_named(path, f"row group {group}"):
            yield from ((rows, size * done // len(groups)) for rows in batches)


def _arrow_batches(path: Path, span: Span | None, columns: list[str] | None) -> Iterator[tuple[list[Any], int]]:
    """Like `_parquet_batches`, for each batch of the file."""
    for number, batch, read in arrow_batches(path, span):
        _check_column_names(path, columns, batch.schema.names)
        chosen = batch if columns is None else batch.select(columns)
        batches = (_batch_rows(chosen.slice(at, TABLE_ROWS)) for at in range(0, len(chosen), TABLE_ROWS))
        with _damage_named(path, f"batch {number}"):
            yield from ((rows, min(read, path.stat().st_size)) for rows in batches)


def _batch_rows(batch: Any) -> list[dict[str, Any]]:
    """The rows of a batch; faster than its own `to_pylist`."""
    names, columns = batch.schema.names, [column.to_pylist() for column in batch.columns]
    return [dict(zip(names, values, strict=True)) for values in zip(*columns, strict=True)]


def arrow_batches(path: Path, span: Span | None = None) -> Iterator[tuple[int, Any, int]]:
    """The batches of rows of an Arrow file, memory-mapped, each with its index and its end in the file.

    Raises:
      DataError: pyarrow is missing, or the file is damaged or not in Arrow.
    """
    pyarrow_for(path)
    import pyarrow.ipc  # type: ignore[import-untyped, import-not-found, unused-ignore]  # an extra, without types

    with _damage_named(path, "its batches"), pyarrow.memory_map(str(path)) as mapped:
        if mapped.read(len(ARROW_MAGIC)) == ARROW_MAGIC:  # the format with an index; datasets writes streams
            opened = pyarrow.ipc.open_file(mapped)
            count = opened.num_record_batches
            some = range(count) if span is None else range(*span)
            yield from ((number, opened.get_batch(number), mapped.size() * (number + 1) // count) for number in some)
            return
        mapped.seek(0)
        for number, batch in enumerate(pyarrow.ipc.open_stream(mapped)):
            if span is not None and number >= span.stop:
                return
            if span is None or number >= span.start:
                yield number, batch, mapped.tell()
        mapped.seek(mapped.size() - len(ARROW_END))
        if mapped.read(len(ARROW_END)) != ARROW_END:
            raise OSError("the end of the stream is missing")


def _check_column_names(path: Path, columns: list[str] | None, names: list[str]) -> None:
    for name in columns or ():
        if name not in names:
            raise DataError(
                f"{path} has no column {name!r}; it has {short_repr(names, 200)}: set `field` to the one with the text"
            )


Read = TypeVar("Read")


@contextmanager
def _damage_named(path: Path, where: str) -> Iterator[None]:
    """Read with pyarrow, turning its errors, which name no file, into a DataError that does."""
    try:
        yield
    except (pyarrow_for(path).ArrowException, OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path} cannot be read in {where} ({reason_of(error)}); copy it again") from None


def read_documents(path: Path, reading: DocumentFormat, span: Span | None = None) -> Iterator[Document]:
    """The documents of a file: JSONL, JSON, Parquet or Arrow by its name, otherwise text.

    Raises:
      DataError: a file that is damaged.
    """
    if file_type(path) in RECORD_UNITS:
        return record_documents(path, reading, span)
    return _complete(path, text_documents(path, reading, span))


def _complete(path: Path, items: Iterator[Read]) -> Iterator[Read]:
    """What is read from a file; DataError if it is compressed and incomplete."""
    try:
        yield from items
    except (EOFError, zlib.error, OSError) as error:  # from decompression; pyarrow's are OSErrors without a number
        if not is_compressed(path) or (isinstance(error, OSError) and error.errno is not None):
            raise
        raise DataError(f"{path} is incomplete ({reason_of(error)}); copy it again") from None


def spans_of(path: Path, reading: DocumentFormat, size: int) -> list[Span | None]:
    """The spans of about `size` bytes into which a file is divided; None is a file that is read as a whole."""
    return list(_spans_of(path, reading, size))


def _spans_of(path: Path, reading: DocumentFormat, size: int) -> Iterator[Span | None]:
    if is_compressed(path) or file_type(path) == ".json":
        yield None
    elif file_type(path) == ".parquet":
        description = open_parquet(path).metadata
        groups = range(description.num_row_groups)
        yield from _join_spans((description.row_group(group).total_byte_size for group in groups), size)
    elif file_type(path) == ".arrow":
        yield from _join_spans((batch.nbytes for _, batch, _ in arrow_batches(path)), size)
    else:
        mark = b"\n" if file_type(path) == ".jsonl" else reading.separator.encode()
        start, end = 0, path.stat().st_size
        while start < end:
            stop = _end_after(path, mark, start + size, end)
            yield Span(start, stop)
            start = stop


def _join_spans(sizes: Iterable[int], least: int) -> Iterator[Span]:
    """Runs of parts with a total of at least `least` bytes; the last may have fewer."""
    start = stop = total = 0
    for stop, size in enumerate(sizes, 1):
        total += size
        if total >= least:
            yield Span(start, stop)
            start, total = stop, 0
    if stop > start:
        yield Span(start, stop)


def _end_after(path: Path, mark: bytes, start: int, size: int) -> int:
    """The end of the first `mark` at or after `start`, or of the file."""
    with path.open("rb") as opened:
        while start < size:
            opened.seek(start)
            offset = opened.read(SEARCH_BYTES + len(mark)).find(mark)
            if offset >= 0:
                return start + offset + len(mark)
            start += SEARCH_BYTES
    return size


def file_type(path: Path) -> str:
    """The suffix of a file's type, without that of compression."""
    suffixes = [suffix.lower() for suffix in path.suffixes]
    if suffixes and suffixes[-1] in COMPRESSED_SUFFIXES:
        suffixes.pop()
    return suffixes[-1] if suffixes else ""


def is_compressed(path: Path) -> bool:
    """Whether a file can only be read from its beginning."""
    return path.suffix.lower() in COMPRESSED_SUFFIXES


def open_bytes(path: Path) -> IO[bytes]:
    """The bytes of a file, decompressed if its name ends in .gz or .zst.

    Raises:
      DataError: pyarrow is missing.
    """
    if path.suffix.lower() == ".gz":
        return cast(IO[bytes], gzip.open(path, "rb"))
    if path.suffix.lower() == ".zst":
        return io.BufferedReader(pyarrow_for(path).CompressedInputStream(str(path), "zstd"))
    return path.open("rb")


def open_parquet(path: Path) -> Any:
    """A Parquet file; only its metadata is read."""
    pyarrow_for(path)
    import pyarrow.parquet  # type: ignore[import-untyped, import-not-found, unused-ignore]  # an extra, without types

    with _damage_named(path, "its metadata"):
        return pyarrow.parquet.ParquetFile(path, page_checksum_verification=True)  # if it has checksums


def pyarrow_for(path: Path) -> Any:
    """pyarrow, which reads Parquet and .zst."""
    try:
        import pyarrow  # type: ignore[import-untyped, import-not-found, unused-ignore]  # an extra, without types
    except ImportError:
        raise DataError(f'{path} needs pyarrow; install it with pip install -e ".[data]"') from None
    return pyarrow


def _separated(path: Path, separator: str, longest: int, span: Span | None) -> Iterator[tuple[str, int]]:
    """Pieces whose concatenation is the file, each with the separator that ends it, and the bytes read so far."""
    rest = ""
    read = 0
    for block, read in _decoded(path, span):
        *pieces, rest = (rest + block).split(separator)
        for text in pieces:
            last = yield from _cut_text(text, longest, longest, read)
            yield last + separator, read
        # The rest of a separator may follow: cut only where no part of one can be within reach.
        rest = yield from _cut_text(rest, longest, longest + len(separator), read)
    last = yield from _cut_text(rest, longest, longest, read)
    yield last, read


def _cut_text(text: str, longest: int, keep: int, read: int) -> Generator[tuple[str, int], None, str]:
    """Pieces of at most `longest` characters from the front, until at most `keep` are left, which it returns."""
    start = 0
    while len(text) - start > keep:
        end = start + longest
        for mark in ("\n\n", "\n", " "):
            mark_at = text.rfind(mark, start + longest // 2, end)
            if mark_at >= 0:
                end = mark_at + len(mark)
                break
        yield text[start:end], read
        start = end
    return text[start:]


def _decoded(path: Path, span: Span | None) -> Iterator[tuple[str, int]]:
    """The text of a file in chunks, and the bytes read so far."""
    encoding = "utf-8" if span is not None and span.start else "utf-8-sig"
    decoder = io.IncrementalNewlineDecoder(codecs.getincrementaldecoder(encoding)(), translate=True)
    line, read = 1, 0
    with open_bytes(path) as file:
        if span is not None:
            file.seek(span.start)
        while True:
            block = file.read(TEXT_READ_BYTES if span is None else min(TEXT_READ_BYTES, span.stop - span.start - read))
            read += len(block)
            binary = block.find(b"\0")
            if binary >= 0:
                at = line + block.count(b"\n", 0, binary)
                raise DataError(
                    f"{path}, line {at} has a zero byte, so it is not text; use text in UTF-8, or files that end in"
                    " .jsonl, .bin or .array_record"
                )
            try:
                text = decoder.decode(block, final=not block)
            except UnicodeDecodeError as error:
                # What the decoder kept of the previous chunk is part of a character, without an end of line.
                at = line + error.object.count(b"\n", 0, error.start)
                raise DataError(
                    f"{path}, line {at} is not UTF-8 (byte {error.object[error.start]:#04x}); save the text as UTF-8"
                ) from None
            line += block.count(b"\n")
            yield text, read
            if not block:
                return
