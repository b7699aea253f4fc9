"""Fill arrays on devices from tensors in files, a run of rows at a time.

A run of rows is read, checked, cast and copied to its place while it is in the CPU's cache: apart from the arrays, memory
holds only a few runs, whatever the size of the model.
"""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from llama_jax.errors import CheckpointError
from llama_jax.formats.lazy_tensors import BFLOAT16, Dense, Tensor, min_rows, pad_tensor

ALIGNMENT = 64  # bytes; XLA:CPU adopts aligned buffers without a copy
POOL_BYTES = 16 << 20  # bytes of memory that small arrays share
MIN_HUGE_BYTES = 4 << 20  # bytes; NumPy requests huge pages for arrays of this size
READ_BYTES = 1 << 20  # bytes read at a time
FILL_THREADS = min(8, os.cpu_count() or 1)  # threads on which `build_params` fills arrays
# An object store takes tens of milliseconds to respond: send many requests at a time.
STORED_READ_BYTES, STORED_THREADS = 2 << 20, 16
Slices = tuple[slice, ...]  # a part of an array: one slice for each axis, with both ends


@dataclass(frozen=True)
class Part:
    """A tensor's place in an array.

    Attributes:
      label: the file and the tensor's name, for messages.
      tensor: its rows fill the leading axes of the array in order.
      columns: its range along the array's second axis, which several parts share; None if it is the whole array.
    """

    label: str
    tensor: Tensor
    columns: slice | None = None


@dataclass(frozen=True)
class ArrayParts:
    """The tensors that make up an array.

    Attributes:
      is_quantizable: whether it may be quantized.
      stored: whether its files are in an object store.
      path, layer: the parameter's path and layer.
    """

    shape: tuple[int, ...]
    parts: tuple[Part, ...]
    is_quantizable: bool = False
    stored: bool = False
    path: str = ""
    layer: int = 0

    def rows(self, start: int, stop: int, dtype: np.dtype, out: np.ndarray | None = None) -> np.ndarray:
        """Entries [start, stop) of the leading axis, checked and cast, in `out` if given."""
        shape = (stop - start, *self.shape[1:])
        out = np.empty(shape, dtype) if out is None else out
        for part in self.parts:
            per_entry = part.tensor.shape[0] // self.shape[0]
            if isinstance(part.tensor, Dense) and part.tensor.dtype == dtype and part.columns is None:
                part.tensor.read_into(start * per_entry, out)
                check(out, dtype, part.label)
                continue
            found = part.tensor.read(start * per_entry, stop * per_entry)
            check(found, dtype, part.label)
            target = out if part.columns is None else out[:, part.columns]
            cast(found.reshape(target.shape), target)
        return out


@dataclass(frozen=True)
class StackParts:
    """The tensors that make up a parameter of all layers, layer by layer."""

    layers: tuple[ArrayParts, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the array of all layers."""
        return (len(self.layers), *self.layers[0].shape)


class ArrayMemory:
    """Memory for the arrays of a model. Small ones share large blocks, which have huge pages: allocating 98 MB takes 8 ms
    with them, and 50 with pages of 4 KB. A block is freed with the last of its arrays."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._free = np.empty(0, np.uint8)
        self._taken = MIN_HUGE_BYTES // 4  # a small model has less than a piece

    def take(self, shape: Sequence[int], dtype: np.dtype) -> np.ndarray:
        """Aligned, uninitialized memory."""
        size = math.prod(shape) * dtype.itemsize
        padded = -(-size // ALIGNMENT) * ALIGNMENT
        with self._lock:
            self._taken += padded
            if size >= MIN_HUGE_BYTES:
                found = _aligned(size)
            else:
                if padded > len(self._free):
                    self._free = _aligned(min(POOL_BYTES, self._taken))
                found, self._free = self._free[:size], self._free[padded:]
        return found.view(dtype).reshape(shape)


@dataclass(frozen=True)
class ArrayToFill:
    """An array to be made.

    Attributes:
      sharding: its sharding; None is the default device.
    """

    shape: tuple[int, ...]
    dtype: np.dtype
    sharding: jax.sharding.Sharding | None = None

    def places(self) -> dict[jax.Device | None, Slices]:
        """The part that each device of this process holds; without a sharding, all of it under the key None."""
        if self.sharding is None:
            return {None: tuple(slice(0, size) for size in self.shape)}
        return {
            device: tuple(slice(*index.indices(size)[:2]) for index, size in zip(place, self.shape, strict=True))
            for device, place in self.sharding.addressable_devices_indices_map(self.shape).items()
            if place is not None
        }


# Called with an array, the first and last of a run of rows, and memory for them in each target that holds the run whole
# (else None).
MakeRows = Callable[[ArrayParts, int, int, Sequence[np.ndarray | None]], Sequence[np.ndarray]]


def fill(
    array: ArrayParts, dtype: np.dtype, sharding: jax.sharding.Sharding | None, memory: ArrayMemory | None = None
) -> Any:
    """The array on the devices of `sharding`, reading only the rows that they need; a NumPy array without a sharding."""
    filling = Filling((array,), [ArrayToFill(array.shape, dtype, sharding)], floats_of(dtype), memory or ArrayMemory())
    filling.fill(0)
    return filling.done()[0]


def floats_of(dtype: np.dtype) -> MakeRows:
    """A function that reads the rows of an array, cast to `dtype`."""
    return lambda array, start, stop, out: [array.rows(start, stop, dtype, out[0])]


class Filling:
    """Arrays that are filled from files layer by layer; each run of rows that any of them needs is read once.

    A device's part is written once, into memory aligned for XLA, so that a CPU device takes the memory over without a second
    copy. NumPy requests huge pages for it; XLA's own allocator does not.

    Args:
      arrays: the parts of each layer, all of one shape; or a single entry for an array without a layer axis.
      targets: the arrays to fill, with a leading layer axis if `stacked`.
      rows: makes their rows.
    """

    def __init__(
        self,
        arrays: Sequence[ArrayParts],
        targets: Sequence[ArrayToFill],
        rows: MakeRows,
        memory: ArrayMemory,
        *,
        stacked: bool = False,
    ) -> None:
        self._arrays, self._targets, self._rows, self._stacked = arrays, targets, rows, stacked
        self._places = [target.places() for target in targets]
        # Several devices may hold the same part.
        self._parts: list[dict[tuple, tuple[Slices, np.ndarray]]] = []
        for target, there in zip(targets, self._places, strict=True):
            distinct = {_key(place): place for place in there.values()}
            take = lambda place, dtype=target.dtype: memory.take([i.stop - i.start for i in place], dtype)
            self._parts.append({key: (place, take(place)) for key, place in distinct.items()})

    def fill(self, layer: int) -> None:
        """Read, check and cast the parts of a layer that the devices need."""
        array, wanted = self._arrays[layer], [self._of_layer(parts, layer) for parts in self._parts]
        whole = [
            next((part for _, part in parts if part.shape == target.shape[int(self._stacked) :]), None)
            for parts, target in zip(wanted, self._targets, strict=True)
        ]

        def scatter(start: int, stop: int) -> None:
            found = self._rows(array, start, stop, [None if part is None else part[start:stop] for part in whole])
            for run, parts, complete in zip(found, wanted, whole, strict=True):
                for place, part in parts:
                    low, high = max(start, place[0].start), min(stop, place[0].stop)
                    if low < high and part is not complete:
                        some = run[low - start : high - start]
                        part[low - place[0].start : high - place[0].start] = some[(slice(None), *place[1:])]

        _for_each_run(array, sorted({(place[0].start, place[0].stop) for parts in wanted for place, _ in parts}), scatter)

    def _of_layer(self, parts: dict[tuple, tuple[Slices, np.ndarray]], layer: int) -> list[tuple[Slices, np.ndarray]]:
        """The parts of a target that hold some of a layer, without the layer axis."""
        if not self._stacked:
            return list(parts.values())
        return [
            (place[1:], part[layer - place[0].start])
            for place, part in parts.values()
            if place[0].start <= layer < place[0].stop
        ]

    def done(self) -> list[Any]:
        """The arrays on their devices; NumPy arrays if there is no sharding."""
        found: list[Any] = []
        for target, there, parts in zip(self._targets, self._places, self._parts, strict=True):
            if target.sharding is None:
                found += [part for _, part in parts.values()]
                continue
            pieces = [jax.device_put(parts[_key(place)][1], device, may_alias=True) for device, place in there.items()]
            found.append(jax.make_array_from_single_device_arrays(target.shape, target.sharding, pieces))
        return found


def _key(place: Slices) -> tuple:
    return tuple((i.start, i.stop) for i in place)


def _for_each_run(array: ArrayParts, ranges: Sequence[tuple[int, int]], work: Callable[[int, int], None]) -> None:
    """Call work(start, stop) for runs that cover the union of ranges of the leading axis; on threads for stored arrays."""
    entry = max(1, sum(math.prod(p.tensor.shape) * p.tensor.dtype.itemsize for p in array.parts) // array.shape[0])
    least = max(min_rows(p.tensor) * array.shape[0] // p.tensor.shape[0] for p in array.parts)
    step = max(1, (STORED_READ_BYTES if array.stored else READ_BYTES) // entry, least)
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
        for _ in threads.map(lambda run: work(*run), runs):  # re-raises a run's error
            pass


def _aligned(size: int) -> np.ndarray:
    memory = np.empty(size + ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % ALIGNMENT
    return memory[start : start + size]


def check(found: np.ndarray, target: np.dtype, label: str) -> None:
    """Raise unless all entries are finite and within the target's range.

    Without its sign bit a float sorts as the unsigned integer of the same bits, and NaN and infinity are the largest. As
    signed integers the positive floats are the largest, as unsigned ones the negative: the two maxima, several times as fast
    as isfinite and abs for bfloat16, cover both.
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
    """Write finite floats into `out`; if `out` is narrower, round to nearest even.

    float32 is bfloat16 plus 16 bits; on integers this is several times as fast as the casts of ml_dtypes, and unlike them
    it lets other threads run.
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


MAX_READ_RATIO = 1.05  # bytes of an array that a process may read per byte kept


def reads_others(
    shape: tuple[int, ...], sharding: Any, process_of: Callable[[Any], int] = lambda device: device.process_index
) -> bool:
    """Whether a process that reads whole rows would read more of an array than it keeps; equal on all processes."""
    if not isinstance(sharding, NamedSharding):
        return False
    held: dict[int, set[tuple[tuple[int, int], ...]]] = {}
    for device, place in sharding.devices_indices_map(shape).items():
        cut = tuple(each.indices(size)[:2] for each, size in zip(place, shape, strict=True))
        held.setdefault(process_of(device), set()).add(cut)
    if len(held) == 1:
        return False
    row = math.prod(shape[1:])
    for places in held.values():
        kept = sum(math.prod(stop - start for start, stop in place) for place in places)
        rows = {place[0] for place in places}  # ranges of different places do not overlap
        if sum(stop - start for start, stop in rows) * row > MAX_READ_RATIO * kept:
            return True
    return False


def fill_by_rows(array: ArrayParts, dtype: np.dtype, sharding: NamedSharding) -> jax.Array:
    """Like `fill`, but each device reads an equal part of the rows. All processes must call it, in the same order.

    While it runs, a device holds its share of the array twice.
    """
    mesh = Mesh(sharding.mesh.devices.reshape(-1), ("rows",), axis_types=(AxisType.Auto,))
    apart = NamedSharding(mesh, P("rows"))
    places = [(p.tensor.shape[0], None if p.columns is None else p.columns.stop - p.columns.start) for p in array.parts]
    program = _program(array.shape, tuple(places), sharding)
    found = program([fill(_alone(part, mesh.size), dtype, apart) for part in array.parts])
    return jax.block_until_ready(found)


def _alone(part: Part, devices: int) -> ArrayParts:
    """A part's tensor as a separate array, padded to a number of rows that the devices divide."""
    rows, *rest = part.tensor.shape
    padded = -(-rows // devices) * devices
    tensor = part.tensor if padded == rows else pad_tensor(part.tensor, padded)
    return ArrayParts((padded, *rest), (Part(part.label, tensor),), stored=True)


@cache
def _program(
    shape: tuple[int, ...], places: tuple[tuple[int, int | None], ...], sharding: NamedSharding
) -> Callable[[Any], jax.Array]:
    """A function that brings the rows of tensors to their places, as `ArrayParts.rows` does on the host.

    Args:
      places: for each tensor, its number of unpadded rows and its width along the second axis; None for all of it.
    """

    def arrange(tensors: list[jax.Array]) -> jax.Array:
        found = [
            tensor[:rows].reshape(shape if width is None else (shape[0], width, *shape[2:]))
            for tensor, (rows, width) in zip(tensors, places, strict=True)
        ]
        return found[0] if len(found) == 1 else jnp.concatenate(found, axis=1)

    return jax.jit(arrange, out_shardings=sharding)
