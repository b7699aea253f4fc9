"""Arrays on devices, filled from tensors in files in runs of rows.

A run of rows is read, checked, cast and copied to its place while it is in the processor's cache: apart from the arrays
themselves memory holds a few runs, whatever the size of the model.
"""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from llama_jax.checkpoints.tensors import BFLOAT16, Dense, Tensor
from llama_jax.errors import CheckpointError
from llama_jax.ops.rotary_order import half_from_interleaved

ALIGNMENT = 64  # bytes; what XLA for CPU asks of a buffer that it does not copy
PIECE = 16 << 20  # bytes of memory that small arrays share
LEAST_HUGE = 4 << 20  # bytes from which NumPy asks for huge pages
RUN = 1 << 20  # bytes read at a time
THREADS = min(8, os.cpu_count() or 1)  # on each of which `assemble` fills one array after the other
# Of an object store: its answer takes tens of milliseconds to begin, so that many are asked for at a time.
STORED_RUN, STORED_THREADS = 2 << 20, 16
Place = tuple[slice, ...]  # of a part of an array: a slice for each axis, its ends known


@dataclass(frozen=True)
class Part:
    """A tensor's place in an array.

    Attributes:
      label: for messages: the file and the tensor's name.
      tensor: its rows, in their order, fill the array's leading axes.
      columns: where it lies along the array's second axis, which several parts share; None where it is the whole array.
      interleaved: whether its heads' rows must be converted from the interleaved rotary layout to the half layout.
    """

    label: str
    tensor: Tensor
    columns: slice | None = None
    interleaved: bool = False


@dataclass(frozen=True)
class ArrayParts:
    """What an array is made of: its shape, its parts, whether it is a matrix that may be quantised, whether its files lie in
    a store, and which parameter it is, of which layer."""

    shape: tuple[int, ...]
    parts: tuple[Part, ...]
    is_matrix: bool = False
    stored: bool = False
    path: str = ""
    layer: int = 0

    def rows(self, start: int, stop: int, dtype: np.dtype, out: np.ndarray | None = None) -> np.ndarray:
        """Entries [start, stop) of the leading axis, checked and cast, in `out` if it is given."""
        shape = (stop - start, *self.shape[1:])
        out = np.empty(shape, dtype) if out is None else out
        for part in self.parts:
            per_entry = part.tensor.shape[0] // self.shape[0]
            tensor, is_moved = part.tensor, part.interleaved or part.columns is not None
            if isinstance(tensor, Dense) and tensor.dtype == dtype and not is_moved:
                tensor.read_into(start * per_entry, out)
                check(out, dtype, part.label)
                continue
            found = part.tensor.read(start * per_entry, stop * per_entry)
            check(found, dtype, part.label)
            hole = out if part.columns is None else out[:, part.columns]
            if part.interleaved:
                vector = len(part.tensor.shape) == 1
                found = found.reshape(*hole.shape, 1) if vector else found.reshape(hole.shape)
                found = half_from_interleaved(found)
            cast(found.reshape(hole.shape), hole)
        return out


class ArrayMemory:
    """Memory for the arrays of a model. Small ones lie side by side in large pieces, which have huge pages: to be given
    98 MB takes 8 ms by those, and 50 by pages of 4 KB. A piece is freed with the last of its arrays."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._free = np.empty(0, np.uint8)
        self._taken = LEAST_HUGE // 4  # a small model has less than a piece

    def take(self, shape: Sequence[int], dtype: np.dtype) -> np.ndarray:
        """Aligned memory that is not initialized."""
        size = math.prod(shape) * dtype.itemsize
        padded = -(-size // ALIGNMENT) * ALIGNMENT
        with self._lock:
            self._taken += padded
            if size >= LEAST_HUGE:
                found = _aligned(size)
            else:
                if padded > len(self._free):
                    self._free = _aligned(min(PIECE, self._taken))
                found, self._free = self._free[:size], self._free[padded:]
        return found.view(dtype).reshape(shape)


@dataclass(frozen=True)
class ArrayToFill:
    """An array to be made.

    Attributes:
      sharding: where it is to lie; None is the default device.
    """

    shape: tuple[int, ...]
    dtype: np.dtype
    sharding: jax.sharding.Sharding | None = None

    def places(self) -> dict[jax.Device | None, Place]:
        """The part of it that each device of this process holds; all of it under None where no sharding says."""
        if self.sharding is None:
            return {None: tuple(slice(0, size) for size in self.shape)}
        return {
            device: tuple(slice(*index.indices(size)[:2]) for index, size in zip(place, self.shape, strict=True))
            for device, place in self.sharding.addressable_devices_indices_map(self.shape).items()
            if place is not None
        }


# Given the first and the last of some rows, and the memory for them in each target where one holds them whole (else None).
Rows = Callable[[int, int, Sequence[np.ndarray | None]], Sequence[np.ndarray]]


def fill(
    array: ArrayParts, dtype: np.dtype, sharding: jax.sharding.Sharding | None, memory: ArrayMemory | None = None
) -> Any:
    """The array on the devices of `sharding`, of which only the rows that they need are read; of NumPy where it is None."""
    target = ArrayToFill(array.shape, dtype, sharding)
    rows: Rows = lambda start, stop, out: [array.rows(start, stop, dtype, out[0])]
    return fill_targets(array, [target], rows, memory or ArrayMemory())[0]


def fill_targets(array: ArrayParts, targets: Sequence[ArrayToFill], rows: Rows, memory: ArrayMemory) -> list[Any]:
    """Arrays with one leading axis, made of the rows of `array` by `rows`; of NumPy where they have no sharding."""
    places = [target.places() for target in targets]
    distinct = [{_key(place): place for place in there.values()} for there in places]  # several devices may hold the same
    wanted = [(target, list(parts.values())) for target, parts in zip(targets, distinct, strict=True)]
    found: list[Any] = []
    for target, there, keys, held in zip(targets, places, distinct, shards(array, wanted, rows, memory), strict=True):
        if target.sharding is None:
            found += held
            continue
        parts = dict(zip(keys, held, strict=True))
        pieces = [jax.device_put(parts[_key(place)], device, may_alias=True) for device, place in there.items()]
        found.append(jax.make_array_from_single_device_arrays(target.shape, target.sharding, pieces))
    return found


def shards(
    array: ArrayParts, wanted: Sequence[tuple[ArrayToFill, Sequence[Place]]], rows: Rows, memory: ArrayMemory
) -> list[list[np.ndarray]]:
    """The parts of each target that lie at its places, checked and cast; each run of rows that any needs is read once.

    What a device will hold is written once, into memory aligned as XLA wants it, so that a CPU device takes that memory over
    and no second copy is made. NumPy asks for huge pages for it, XLA's own allocator does not.
    """
    held = [[memory.take([i.stop - i.start for i in place], target.dtype) for place in places] for target, places in wanted]
    whole = [
        next((part for part in parts if part.shape == target.shape), None)
        for (target, _), parts in zip(wanted, held, strict=True)
    ]

    def scatter(start: int, stop: int) -> None:
        found = rows(start, stop, [None if part is None else part[start:stop] for part in whole])
        for run, (_, places), parts, complete in zip(found, wanted, held, whole, strict=True):
            for place, part in zip(places, parts, strict=True):
                low, high = max(start, place[0].start), min(stop, place[0].stop)
                if low < high and part is not complete:
                    some = run[low - start : high - start]
                    part[low - place[0].start : high - place[0].start] = some[(slice(None), *place[1:])]

    _each_run(array, sorted({(place[0].start, place[0].stop) for _, places in wanted for place in places}), scatter)
    return held


def _key(place: Place) -> tuple:
    return tuple((i.start, i.stop) for i in place)


def _each_run(array: ArrayParts, ranges: Sequence[tuple[int, int]], work: Callable[[int, int], None]) -> None:
    """Call work(start, stop) for runs that cover the union of ranges of the leading axis; of stored ones on threads."""
    entry = max(1, sum(math.prod(p.tensor.shape) * p.tensor.dtype.itemsize for p in array.parts) // array.shape[0])
    least = max(getattr(p.tensor, "rows_at_once", 1) * array.shape[0] // p.tensor.shape[0] for p in array.parts)
    step = max(1, (STORED_RUN if array.stored else RUN) // entry, least)
    runs: list[tuple[int, int]] = []
    reached = 0
    for start, stop in ranges:
        runs += [(i, min(i + step, stop)) for i in range(max(start, reached), stop, step)]
        reached = max(reached, stop)
    if not array.stored or len(runs) == 1:
        for run in runs:
            work(*run)
        return
    with ThreadPoolExecutor(STORED_THREADS) as threads:
        for _ in threads.map(lambda run: work(*run), runs):  # raises what a run raised
            pass


def _aligned(size: int) -> np.ndarray:
    memory = np.empty(size + ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % ALIGNMENT
    return memory[start : start + size]


def check(found: np.ndarray, target: np.dtype, label: str) -> None:
    """Raise unless all entries are finite and within the target's range.

    Without its sign bit a float orders as the unsigned integer of the same bits, and NaN and infinity are the largest. As
    signed integers the positive ones are above all others, as unsigned ones the negative: two maxima, which are several
    times as fast as isfinite and abs for bfloat16, say both.
    """
    size, flat = found.dtype.itemsize, found.reshape(-1)
    sign = 1 << (8 * size - 1)
    positive, negative = (int(flat.view(f"{letter}{size}").max()) for letter in "iu")
    bits = max(positive, negative - sign)
    largest = np.asarray([bits], f"u{size}").view(found.dtype)[0]
    if not np.isfinite(largest):
        raise CheckpointError(f"{label} holds NaN or infinity; the file is damaged")
    if found.dtype != target and float(largest) > float(jnp.finfo(target).max):
        raise CheckpointError(f"{label} holds numbers too large for {target}; use another dtype")


def cast(found: np.ndarray, out: np.ndarray) -> None:
    """Write finite floats into `out`, rounding to nearest even where it is narrower.

    float32 is bfloat16 and 16 more bits; done on integers, this is several times as fast as the casts of ml_dtypes, and
    unlike them lets other threads run.
    """
    if found.dtype == out.dtype:
        out[...] = found
    elif found.dtype == BFLOAT16:
        wide = out.view(np.uint32) if out.dtype == np.float32 else np.empty(out.shape, np.uint32)
        np.left_shift(found.view(np.uint16), 16, out=wide, dtype=np.uint32)
        if out.dtype != np.float32:
            out[...] = wide.view(np.float32)
    elif out.dtype == BFLOAT16:
        bits = np.ascontiguousarray(found, np.float32).view(np.uint32)
        rounded = bits >> 16
        rounded &= 1
        rounded += bits
        rounded += 0x7FFF
        np.right_shift(rounded, 16, out=out.view(np.uint16), casting="unsafe")
    else:
        out[...] = found
