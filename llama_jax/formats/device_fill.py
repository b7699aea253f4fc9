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
FILL_READ_BYTES = 1 << 20  # bytes read at a time
FILL_THREADS = min(8, os.cpu_count() or 1)  # threads on which `build_params` fills arrays
# An object store takes tens of milliseconds to respond: send many requests at a time.
STORED_READ_BYTES, STORED_THREADS = 2 << 20, 16
Slices = tuple[slice, ...]  # a part of an array: one slice for each axis, with both ends


@dataclass(frozen=True)
class TensorSlice:
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
class ArraySource:
    """The tensors that make up an array.

    Attributes:
      is_quantizable: whether it may be quantized.
      stored: whether its files are in an object store.
      path, layer: the parameter's path and layer.
    """

    shape: tuple[int, ...]
    parts: tuple[TensorSlice, ...]
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
                check_finite(out, dtype, part.label)
                continue
            values = part.tensor.read(start * per_entry, stop * per_entry)
            check_finite(values, dtype, part.label)
            target = out if part.columns is None else out[:, part.columns]
            cast(values.reshape(target.shape), target)
        return out


@dataclass(frozen=True)
class StackedSource:
    """The tensors that make up a parameter of all layers, layer by layer."""

    layers: tuple[ArraySource, ...]

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
                memory = _aligned(size)
            else:
                if padded > len(self._free):
                    self._free = _aligned(min(POOL_BYTES, self._taken))
                memory, self._free = self._free[:size], self._free[padded:]
        return memory.view(dtype).reshape(shape)


@dataclass(frozen=True)
class FillTarget:
    """An array to be made.

    Attributes:
      sharding: its sharding; None is the default device.
    """

    shape: tuple[int, ...]
    dtype: np.dtype
    sharding: jax.sharding.Sharding | None = None

    def device_slices(self) -> dict[jax.Device | None, Slices]:
        """The part that each device of this process holds; without a sharding, all of it under the key None."""
        if self.sharding is None:
            return {None: tuple(slice(0, size) for size in self.shape)}
        return {
            device: tuple(slice(*axis.indices(size)[:2]) for axis, size in zip(index, self.shape, strict=True))
            for device, index in self.sharding.addressable_devices_indices_map(self.shape).items()
            if index is not None
        }


# Called with an array, the first and last of a run of rows, and memory for them in each target that holds the run whole
# (else None).
MakeRows = Callable[[ArraySource, int, int, Sequence[np.ndarray | None]], Sequence[np.ndarray]]


def fill(
    array: ArraySource, dtype: np.dtype, sharding: jax.sharding.Sharding | None, memory: ArrayMemory | None = None
) -> Any:
    """The array on the devices of `sharding`, reading only the rows that they need; a NumPy array without a sharding."""
    filling = FillJob((array,), [FillTarget(array.shape, dtype, sharding)], floats_of(dtype), memory or ArrayMemory())
    filling.fill(0)
    return filling.done()[0]


def floats_of(dtype: np.dtype) -> MakeRows:
    """A function that reads the rows of an array, cast to `dtype`."""
    return lambda array, start, stop, out: [array.rows(start, stop, dtype, out[0])]


class FillJob:
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
        arrays: Sequence[ArraySource],
        targets: Sequence[FillTarget],
        rows: MakeRows,
        memory: ArrayMemory,
        *,
        stacked: bool = False,
    ) -> None:
        self._arrays, self._targets, self._rows, self._stacked = arrays, targets, rows, stacked
        self._slices = [target.device_slices() for target in targets]
        # Several devices may hold the same part.
        self._parts: list[dict[tuple, tuple[Slices, np.ndarray]]] = []
        for target, by_device in zip(targets, self._slices, strict=True):
            distinct = {_ends_of(slices): slices for slices in by_device.values()}
            take = lambda slices, dtype=target.dtype: memory.take([i.stop - i.start for i in slices], dtype)
            self._parts.append({key: (slices, take(slices)) for key, slices in distinct.items()})

    def fill(self, layer: int) -> None:
        """Read, check and cast the parts of a layer that the devices need."""
        array, layer_parts = self._arrays[layer], [self._of_layer(parts, layer) for parts in self._parts]
        whole_parts = [
            next((part for _, part in parts if part.shape == target.shape[int(self._stacked) :]), None)
            for parts, target in zip(layer_parts, self._targets, strict=True)
        ]

        def scatter(start: int, stop: int) -> None:
            made = self._rows(array, start, stop, [None if part is None else part[start:stop] for part in whole_parts])
            for run, parts, complete in zip(made, layer_parts, whole_parts, strict=True):
                for slices, part in parts:
                    low, high = max(start, slices[0].start), min(stop, slices[0].stop)
                    if low < high and part is not complete:
                        run_rows = run[low - start : high - start]
                        part[low - slices[0].start : high - slices[0].start] = run_rows[(slice(None), *slices[1:])]

        _for_each_run(
            array, sorted({(slices[0].start, slices[0].stop) for parts in layer_parts for slices, _ in parts}), scatter
        )

    def _of_layer(self, parts: dict[tuple, tuple[Slices, np.ndarray]], layer: int) -> list[tuple[Slices, np.ndarray]]:
        """The parts of a target that hold some of a layer, without the layer axis."""
        if not self._stacked:
            return list(parts.values())
        return [
            (slices[1:], part[layer - slices[0].start])
            for slices, part in parts.values()
            if slices[0].start <= layer < slices[0].stop
        ]

    def done(self) -> list[Any]:
        """The arrays on their devices; NumPy arrays if there is no sharding."""
        arrays: list[Any] = []
        for target, by_device, parts in zip(self._targets, self._slices, self._parts, strict=True):
            if target.sharding is None:
                arrays += [part for _, part in parts.values()]
                continue
            pieces = [
                jax.device_put(parts[_ends_of(slices)][1], device, may_alias=True) for device, slices in by_device.items()
            ]
            arrays.append(jax.make_array_from_single_device_arrays(target.shape, target.sharding, pieces))
        return arrays


def _ends_of(slices: Slices) -> tuple:
    return tuple((i.start, i.stop) for i in slices)


def _for_each_run(array: ArraySource, ranges: Sequence[tuple[int, int]], work: Callable[[int, int], None]) -> None:
    """Call work(start, stop) for runs that cover the union of ranges of the leading axis; on threads for stored arrays."""
    entry = max(1, sum(math.prod(p.tensor.shape) * p.tensor.dtype.itemsize for p in array.parts) // array.shape[0])
    least = max(min_rows(p.tensor) * array.shape[0] // p.tensor.shape[0] for p in array.parts)
    step = max(1, (STORED_READ_BYTES if array.stored else FILL_READ_BYTES) // entry, least)
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


def check_finite(values: np.ndarray, target: np.dtype, label: str) -> None:
    """Raise unless all entries are finite and within the target's range.

    Without its sign bit a float sorts as the unsigned integer of the same bits, and NaN and infinity are the largest. As
    signed integers the positive floats are the largest, as unsigned ones the negative: the two maxima, several times as fast
    as isfinite and abs for bfloat16, cover both.
    """
    size, flat = values.dtype.itemsize, values.reshape(-1)
    sign = 1 << (8 * size - 1)
    positive, negative = (int(flat.view(f"{letter}{size}").max()) for letter in "iu")
    bits = max(positive, negative - sign)
    largest = np.asarray([bits], f"u{size}").view(values.dtype)[0]
    check_largest(float(largest), target, label, "the file is damaged")


def check_largest(largest: float, target: Any, label: str, remedy: str) -> None:
    """Raise if the largest absolute value of an array is not finite, or outside the target's range."""
    if not math.isfinite(largest):
        raise CheckpointError(f"{label} holds NaN or infinity; {remedy}")
    if largest > float(jnp.finfo(target).max):
        raise CheckpointError(f"{label} holds numbers too large for {target}; use another dtype")


def cast(values: np.ndarray, out: np.ndarray) -> None:
    """Write finite floats into `out`; if `out` is narrower, round to nearest even.

    float32 is bfloat16 plus 16 bits; on integers this is several times as fast as the casts of ml_dtypes, and unlike them
    it lets other threads run.
    """
    if values.dtype == out.dtype:
        out[...] = values
    elif values.dtype == BFLOAT16:
        wide = out.view(np.uint32) if out.dtype == np.float32 else np.empty(out.shape, np.uint32)
        np.left_shift(values.view(np.uint16), 16, out=wide, dtype=np.uint32)
        if out.dtype != np.float32:
            out[...] = wide.view(np.float32)
    elif out.dtype == BFLOAT16:
        bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
        rounded = bits >> 16
        rounded &= 1
        rounded += bits
        rounded += 0x7FFF
        np.right_shift(rounded, 16, out=out.view(np.uint16), casting="unsafe")
    else:
        out[...] = values


MAX_READ_RATIO = 1.05  # bytes of an array that a process may read per byte kept


def reads_others(
    shape: tuple[int, ...], sharding: Any, process_of: Callable[[Any], int] = lambda device: device.process_index
) -> bool:
    """Whether a process that reads whole rows would read more of an array than it keeps; equal on all processes."""
    if not isinstance(sharding, NamedSharding):
        return False
    cuts_by_process: dict[int, set[tuple[tuple[int, int], ...]]] = {}
    for device, index in sharding.devices_indices_map(shape).items():
        cut = tuple(axis.indices(size)[:2] for axis, size in zip(index, shape, strict=True))
        cuts_by_process.setdefault(process_of(device), set()).add(cut)
    if len(cuts_by_process) == 1:
        return False
    row = math.prod(shape[1:])
    for cuts in cuts_by_process.values():
        kept_entries = sum(math.prod(stop - start for start, stop in cut) for cut in cuts)
        rows = {cut[0] for cut in cuts}  # ranges of different places do not overlap
        if sum(stop - start for start, stop in rows) * row > MAX_READ_RATIO * kept_entries:
            return True
    return False


def fill_by_rows(array: ArraySource, dtype: np.dtype, sharding: NamedSharding) -> jax.Array:
    """Like `fill`, but each device reads an equal part of the rows. All processes must call it, in the same order.

    While it runs, a device holds its share of the array twice.
    """
    mesh = Mesh(sharding.mesh.devices.reshape(-1), ("rows",), axis_types=(AxisType.Auto,))
    apart = NamedSharding(mesh, P("rows"))
    layouts = [(p.tensor.shape[0], None if p.columns is None else p.columns.stop - p.columns.start) for p in array.parts]
    program = _program(array.shape, tuple(layouts), sharding)
    filled = program([fill(_padded_source(part, mesh.size), dtype, apart) for part in array.parts])
    return jax.block_until_ready(filled)


def _padded_source(part: TensorSlice, devices: int) -> ArraySource:
    """A part's tensor as a separate array, padded to a number of rows that the devices divide."""
    rows, *rest = part.tensor.shape
    padded = -(-rows // devices) * devices
    tensor = part.tensor if padded == rows else pad_tensor(part.tensor, padded)
    return ArraySource((padded, *rest), (TensorSlice(part.label, tensor),), stored=True)


@cache
def _program(
    shape: tuple[int, ...], layouts: tuple[tuple[int, int | None], ...], sharding: NamedSharding
) -> Callable[[Any], jax.Array]:
    """A function that brings the rows of tensors to their places, as `ArraySource.rows` does on the host.

    Args:
      layouts: for each tensor, its number of unpadded rows and its width along the second axis; None for all of it.
    """

    def arrange(tensors: list[jax.Array]) -> jax.Array:
        parts = [
            tensor[:rows].reshape(shape if width is None else (shape[0], width, *shape[2:]))
            for tensor, (rows, width) in zip(tensors, layouts, strict=True)
        ]
        return parts[0] if len(parts) == 1 else jnp.concatenate(parts, axis=1)

    return jax.jit(arrange, out_shardings=sharding)
