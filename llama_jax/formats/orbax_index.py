"""Where the numbers of a step's arrays lie in its files, by orbax's index alone, so that a host fetches only its share.
Also merges the indexes of several hosts.

Orbax keeps arrays as zarr, in the key-value store OCDBT of TensorStore: each chunk, as a device held it, in one run in a
file ``ocdbt.process_N/d/...``, and an index of all chunks in files of its own. As runs here write them (`CheckpointManager`)
chunks are not compressed, so that rows of one are a range of bytes.

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
CHUNK_INDEX_BYTES = 8 + 8 + 4  # bytes after the only part of a chunk: its offset, its length, and the CRC of both
MIN_READ_BYTES = 1 << 17  # bytes of a chunk to ask for at a time
ZARR_DTYPES = {str(dtype): dtype for dtype in FLOATS.values()}


class _Chunk(NamedTuple):
    """Where the numbers of a chunk are: in a file, from an offset on."""

    file: str
    offset: int


@dataclass(frozen=True)
class ChunkedArray:
    """An array in chunks anywhere in a store, seen as rows along its last axis.

    Attributes:
      folder: that the files of its chunks are in.
      shape: with at least two axes: a vector is one row.
      chunk: the shape of each, which divides that of the array.
      chunks: by their numbers along each axis; of one that is in the index itself its bytes.
    """

    folder: StoredPath
    shape: tuple[int, ...]
    chunk: tuple[int, ...]
    dtype: np.dtype
    chunks: Mapping[tuple[int, ...], _Chunk | bytes]

    def rows(self, start: int, stop: int) -> np.ndarray:
        """Rows [start, stop) of all of its axes but the last taken as one: [stop - start, columns]."""
        outer, inner, columns = self.shape[:-1], self.chunk[:-1], self.chunk[-1]
        found = np.empty((stop - start, self.shape[-1]), self.dtype)
        # Rows that follow one another do so in a chunk as well, up to the end of the last axis that chunks divide.
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
    """A `Tensor`: rows of an array from `first` on, or as a vector that row alone."""

    array: ChunkedArray
    first: int
    shape: tuple[int, ...]

    @property
    def dtype(self) -> np.dtype:
        return self.array.dtype

    @property
    def rows_at_once(self) -> int:
        """Many of narrow chunks, since each read is a request."""
        rows = -(-MIN_READ_BYTES // (self.array.chunk[-1] * self.dtype.itemsize))
        return self.shape[0] if len(self.shape) == 1 else min(rows, self.shape[0])

    def read(self, start: int, stop: int) -> np.ndarray:
        if len(self.shape) == 1:
            return self.array.rows(self.first, self.first + 1)[0, start:stop]
        return self.array.rows(self.first + start, self.first + stop).reshape(stop - start, *self.shape[1:])


def read_index(folder: Path, name: str, place: StoredPath) -> dict[str, ChunkedArray] | None:
    """The arrays that orbax wrote under a name into a step; None if they are compressed, or partly in the index.

    Args:
      folder: of this machine, with the files of the step that hold no numbers.
      place: where the folder of that name is in the store.
    """
    try:
        entries = dict(_entries(folder / name))
    except (ValueError, KeyError, TypeError):  # what TensorStore raises where a part of the index lies among the numbers
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
      folder: it also has the files of the other index, except its manifest; chunks may be elsewhere.
      manifest: the content of the other index's manifest.
    """
    import tensorstore

    # Only between stores of one context and base does TensorStore copy the places of chunks, and not their content.
    context, base = tensorstore.Context(), {"driver": "file", "path": f"{folder.absolute()}/"}

    def index(manifest: dict[str, str]) -> Any:
        found = {"driver": "ocdbt", "base": base, "manifest": manifest}
        return tensorstore.KvStore.open(found, context=context).result()

    memory = {"driver": "memory", "path": "other/"}
    tensorstore.KvStore.open(memory, context=context).result().write(MANIFEST, manifest).result()
    with tensorstore.Transaction(atomic=True) as together:
        index(memory).experimental_copy_range_to(index(base).with_transaction(together)).result()


def _entries(folder: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """The keys of the key-value store in a folder, each with its value or the place of its value."""
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
    """An array by its description; None if that is not in the index, or its chunks are of another kind."""
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
