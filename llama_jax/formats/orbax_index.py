"""Locates the data of a step's arrays in its files from orbax's index, so that a host fetches only its share.
Also merges the indexes of several hosts.

Orbax keeps arrays as zarr, in TensorStore's key-value store OCDBT: each chunk, as a device held it, is contiguous in a file
``ocdbt.process_N/d/...``, and an index of all chunks is in separate files. `CheckpointManager` does not compress chunks, so
that the rows of a chunk are a range of bytes.

https://google.github.io/tensorstore/kvstore/ocdbt/, https://zarr-specs.readthedocs.io/en/latest/v3/codecs/sharding-indexed/
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import unquote

import numpy as np

from llama_jax.formats.lazy_tensors import FLOATS, Unquantized, read_bytes
from llama_jax.storage import StoredPath

DESCRIPTION = "zarr.json"  # after the name of an array
MANIFEST = "manifest.ocdbt"  # names the newest version of an index
CHUNK_INDEX_BYTES = 8 + 8 + 4  # bytes after a chunk's data: its offset, its length, and the CRC of both
MIN_READ_BYTES = 1 << 17  # bytes of a chunk to request at a time
ZARR_DTYPES = {str(dtype): dtype for dtype in FLOATS.values()}


class _Chunk(NamedTuple):
    """The location of a chunk's data: a file and an offset."""

    file: str
    offset: int


@dataclass(frozen=True)
class ChunkedArray:
    """An array stored in chunks, viewed as rows along its last axis.

    Attributes:
      folder: contains the files of its chunks.
      shape: has at least two axes: a vector is one row.
      chunk: the shape of a chunk, which divides that of the array.
      chunks: by their indices along each axis; a chunk that is stored in the index itself is given as its bytes.
    """

    folder: StoredPath
    shape: tuple[int, ...]
    chunk: tuple[int, ...]
    dtype: np.dtype
    chunks: Mapping[tuple[int, ...], _Chunk | bytes]

    def rows(self, start: int, stop: int) -> np.ndarray:
        """Rows [start, stop), with all axes except the last flattened: [stop - start, columns]."""
        outer, inner, columns = self.shape[:-1], self.chunk[:-1], self.chunk[-1]
        found = np.empty((stop - start, self.shape[-1]), self.dtype)
        # Consecutive rows are consecutive in a chunk as well, up to the end of the last axis that chunks divide.
        divided = max((i for i in range(len(outer)) if inner[i] < outer[i]), default=0)
        together = math.prod(inner[divided:])
        while start < stop:
            end = min(stop, start - start % together + together)
            index = np.unravel_index(start, outer)
            number = tuple(int(i) // size for i, size in zip(index, inner, strict=True))
            row = int(np.ravel_multi_index(tuple(int(i) % size for i, size in zip(index, inner, strict=True)), inner))
            run = found[start - stop :][: end - start]
            for column in range(self.shape[-1] // columns):
                size = columns * self.dtype.itemsize
                read = self._read(self.chunks[(*number, column)], row * size, (end - start) * size)
                run[:, column * columns : (column + 1) * columns] = read.view(self.dtype).reshape(-1, columns)
            start = end
        return found

    def _read(self, chunk: _Chunk | bytes, start: int, count: int) -> np.ndarray:
        if isinstance(chunk, bytes):
            return np.frombuffer(chunk, np.uint8, count, start)
        return read_bytes(self.folder / chunk.file, chunk.offset + start, count)


@dataclass(frozen=True)
class ArrayRows(Unquantized):
    """A `Tensor`: rows of an array from `first` on; as a vector, only that row."""

    array: ChunkedArray
    first: int
    shape: tuple[int, ...]

    @property
    def dtype(self) -> np.dtype:
        return self.array.dtype

    @property
    def rows_at_once(self) -> int:
        """Many rows if chunks are narrow, since each read is a request."""
        rows = -(-MIN_READ_BYTES // (self.array.chunk[-1] * self.dtype.itemsize))
        return self.shape[0] if len(self.shape) == 1 else min(rows, self.shape[0])

    def read(self, start: int, stop: int) -> np.ndarray:
        if len(self.shape) == 1:
            return self.array.rows(self.first, self.first + 1)[0, start:stop]
        return self.array.rows(self.first + start, self.first + stop).reshape(stop - start, *self.shape[1:])


def read_index(folder: Path, name: str, place: StoredPath) -> dict[str, ChunkedArray] | None:
    """The arrays that orbax wrote under a name into a step; None if they are compressed, or partly in the index.

    Args:
      folder: a local folder with those files of the step that hold no array data.
      place: location of the folder of that name in the store.
    """
    try:
        entries = dict(_entries(folder / name))
    except (ValueError, KeyError, TypeError):  # raised if part of the index is stored with the data
        return None
    found: dict[str, ChunkedArray] = {}
    for key, entry in entries.items():
        array, slash, last = key.rpartition("/")
        if slash and last == DESCRIPTION:
            one = _array(array, entry, entries, place)
            if one is None:
                return None
            found[array] = one
    return found


def add_index(folder: Path, manifest: bytes) -> None:
    """Merge another host's index into the one that orbax wrote into `folder`. No chunk is read.

    Args:
      folder: also contains the files of the other index, except its manifest; chunks may be elsewhere.
      manifest: the content of the other index's manifest.
    """
    import tensorstore

    # TensorStore copies the locations of chunks, instead of their contents, only between stores of one context and base.
    context, base = tensorstore.Context(), {"driver": "file", "path": f"{folder.absolute()}/"}

    def index(manifest: dict[str, str]) -> Any:
        found = {"driver": "ocdbt", "base": base, "manifest": manifest}
        return tensorstore.KvStore.open(found, context=context).result()

    memory = {"driver": "memory", "path": "other/"}
    tensorstore.KvStore.open(memory, context=context).result().write(MANIFEST, manifest).result()
    with tensorstore.Transaction(atomic=True) as together:
        index(memory).experimental_copy_range_to(index(base).with_transaction(together)).result()


def _entries(folder: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """The keys of the key-value store in a folder, each with its value or the location of its value."""
    import tensorstore

    files = tensorstore.KvStore.open({"driver": "file", "path": f"{folder.absolute()}/"}).result()
    manifest = tensorstore.ocdbt.dump(files).result()
    nodes = [("", manifest["versions"][-1]["root"]["location"])]
    while nodes:
        prefix, location = nodes.pop()
        node = tensorstore.ocdbt.dump(files, location).result()
        for entry in node["entries"]:
            key = prefix + entry["key"].decode()
            if node["height"]:
                nodes.append((prefix + entry["subtree_common_prefix"].decode(), entry["location"]))
            else:
                yield key, entry


def _array(
    name: str, entry: Mapping[str, Any], entries: Mapping[str, Mapping[str, Any]], place: StoredPath
) -> ChunkedArray | None:
    """An array from its description; None if that is not in the index, or its chunks have another format."""
    try:
        described = json.loads(entry["inline_value"])
        shape, dtype = tuple(described["shape"]), ZARR_DTYPES[described["data_type"]]
        (codec,), grid = described["codecs"], described["chunk_grid"]
        chunk, codecs = tuple(grid["configuration"]["chunk_shape"]), codec["configuration"]
        if (
            (grid["name"], codec["name"], tuple(codecs["chunk_shape"])) != ("regular", "sharding_indexed", chunk)
            or codecs["codecs"] != [{"name": "bytes", "configuration": {"endian": "little"}}]
            or codecs.get("index_location", "end") != "end"
            or any(size % part for size, part in zip(shape, chunk, strict=True))
        ):
            return None
        size, vector = math.prod(chunk) * dtype.itemsize, (1,) * (len(shape) == 1)
        chunks: dict[tuple[int, ...], _Chunk | bytes] = {}
        for number in np.ndindex(*(whole // part for whole, part in zip(shape, chunk, strict=True))):
            held = entries["/".join([name, "c", *map(str, number)])]
            inline = held.get("inline_value")
            where, length = (inline, len(inline)) if inline is not None else _location(held["indirect_value"])
            if length != size + CHUNK_INDEX_BYTES:
                return None
            chunks[(0,) * len(vector) + number] = where
    except (ValueError, KeyError, TypeError):
        return None
    return ChunkedArray(place, vector + shape, vector + chunk, dtype, chunks)


def _location(value: str) -> tuple[_Chunk, int]:
    """The chunk at ``value:FOLDER:FILE:OFFSET:LENGTH``, and its length."""
    _, folder, file, offset, length = value.split(":")
    return _Chunk(unquote(folder) + unquote(file), int(offset)), int(length)
