"""Quantization formats: the arrays that store a matrix, and how to decode them.

A matrix [*out, D] is stored as planes: arrays with an entry per value, per group, or per pair of 4-bit values along the last
axis. Functions accept NumPy and JAX arrays, so that file readers and computations share them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jaxtyping import Float32, Int8, Integer, Shaped, UInt8

from llama_jax.ops.platform import lowering_platform
from llama_jax.ops.weights.words import WordDecoder

EitherArray: TypeAlias = Any  # numpy.ndarray or jax.Array

# GPUs and TPUs store two int4 per byte. In files, in NumPy and on CPUs they are packed in uint8, see `device_layout`.
INT4 = np.dtype(ml_dtypes.int4)
FP8 = np.dtype(ml_dtypes.float8_e4m3fn)


@dataclass(frozen=True)
class QuantField:
    """One of the arrays (planes) of a format.

    Attributes:
      name: such as "scales".
      dtype: dtype of its entries.
      entries, numbers: `numbers` values of a row share `entries` entries; 0 entries means one entry per row, and the plane
        lacks the last axis.
      grouped: its last two axes are the groups and the entries of a group.
    """

    name: str
    dtype: Any
    entries: int
    numbers: int
    grouped: bool = False

    def shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of the plane for a matrix of this shape."""
        *out, columns = shape
        return (*out, *self.last_axes(columns))

    def last_axes(self, columns: int) -> tuple[int, ...]:
        """Sizes of the axes that replace the last axis of a matrix."""
        if not self.entries:
            return ()
        if self.grouped:
            return (columns // self.numbers, self.entries)
        return (columns * self.entries // self.numbers,)

    def packed_shape(self, shape: tuple[int, ...]) -> tuple[tuple[int, ...], np.dtype]:
        """Shape and dtype of the plane for a matrix of this shape, with int4 packed, see `pack_int4`."""
        *out, entries = whole = self.shape(shape)
        return ((*out, entries // 2), np.dtype(np.uint8)) if self.dtype == INT4 else (whole, np.dtype(self.dtype))


@dataclass(frozen=True)
class QuantFormat:
    """A quantization format.

    Attributes:
      name: such as "int8".
      block: rows must have a multiple of this length.
      planes: the arrays, in the order of the leaf and, for GGUF, of the bytes of a block.
      decode: planes to float32[*out, D].
      encode: NumPy float32[*out, D] to planes, with int4 packed; None for formats that are only read from files.
      words: decodes the same values by words, for GPUs; None for formats that are not decoded by words.
      is_gguf: whether GGUF files have such blocks.
    """

    name: str
    block: int
    planes: tuple[QuantField, ...]
    decode: Callable[..., EitherArray]
    encode: Callable[[np.ndarray], tuple[np.ndarray, ...]] | None = None
    words: WordDecoder | None = None
    is_gguf: bool = False

    @property
    def bits_per_weight(self) -> float:
        """Bits per weight, scales included. Scales per row are not counted."""
        return sum(bits_of(plane.dtype) * plane.entries / plane.numbers for plane in self.planes)

    @property
    def has_row_scales(self) -> bool:
        """Whether there is one scale per row and nothing else."""
        return len(self.planes) == 2 and not self.planes[1].entries

    def bytes_of_row(self, columns: int) -> int:
        """Bytes of a row, as `from_rows` reads it."""
        return sum(math.prod(plane.last_axes(columns)) * bits_of(plane.dtype) // 8 for plane in self.planes)

    def to_rows(self, planes: tuple[np.ndarray, ...]) -> UInt8[np.ndarray, "rows row_bytes"]:
        """Planes of a matrix [rows, D] as the bytes of each row."""
        rows = [np.ascontiguousarray(plane).reshape(len(plane), -1) for plane in planes]
        return np.concatenate([array.view(np.uint8) for array in rows], axis=1)

    def from_rows(self, raw: UInt8[np.ndarray, "*batch row_bytes"], columns: int) -> tuple[np.ndarray, ...]:
        """The planes of rows in bytes: the blocks of a GGUF, or the result of `to_rows`."""
        if self.is_gguf:
            return planes_from_blocks(raw.reshape(*raw.shape[:-1], columns // self.block, -1), self.planes)
        planes, at = [], 0
        for plane in self.planes:
            shape, dtype = plane.packed_shape((*raw.shape[:-1], columns))
            size = math.prod(shape[raw.ndim - 1 :]) * dtype.itemsize
            planes.append(np.ascontiguousarray(raw[..., at : at + size]).view(dtype).reshape(shape))
            at += size
        return tuple(planes)


def regroup(planes: tuple[np.ndarray, ...], quant_format: QuantFormat, smaller: QuantFormat) -> tuple[np.ndarray, ...]:
    """Convert planes to a format with smaller groups by repeating each group's entries, such as its scale."""
    times = quant_format.block // smaller.block
    return tuple(
        array.reshape(*array.shape[:-2], -1, array.shape[-1] // times) if plane.grouped else np.repeat(array, times, axis=-1)
        for array, plane in zip(planes, quant_format.planes, strict=True)
    )


def bits_of(dtype: Any) -> int:
    """Bits per entry in memory; JAX stores two int4 per byte, in contrast to `nbytes`."""
    return 4 if np.dtype(dtype) == INT4 else 8 * np.dtype(dtype).itemsize


def pack_int4(x: Shaped[EitherArray, " ..."]) -> Shaped[EitherArray, " ..."]:
    """int4[..., n] as uint8[..., n / 2], two values per byte, the first in the low half; other dtypes unchanged."""
    return pack_nibbles(x.astype(np.int8).view(np.uint8) & 15) if x.dtype == INT4 else x


def pack_nibbles(x: UInt8[EitherArray, "*batch n"]) -> UInt8[EitherArray, "*batch n//2"]:
    """4-bit values, one per byte, as two per byte, the first in the low half."""
    pairs = split_groups(x, 2)
    return pairs[..., 0] | (pairs[..., 1] << 4)


def unpack_halves(
    x: UInt8[EitherArray, "*batch half"],
) -> tuple[Int8[EitherArray, "*batch half"], Int8[EitherArray, "*batch half"]]:
    """The values at even and at odd indices of an array packed by `pack_int4`."""
    return (x << 4).view(np.int8) >> 4, x.view(np.int8) >> 4


def unpack_int4(x: Shaped[EitherArray, " ..."]) -> Shaped[EitherArray, " ..."]:
    """Undo `pack_int4`: uint8[..., n / 2] as int8[..., n]; other dtypes unchanged."""
    return join_groups(joined([split_groups(half, 1) for half in unpack_halves(x)])) if x.dtype == np.uint8 else x


def split_groups(x: Shaped[EitherArray, "*batch D"], size: int) -> Shaped[EitherArray, "*batch groups {size}"]:
    """[..., D] as [..., D / size, size]."""
    return x.reshape(*x.shape[:-1], -1, size)


def join_groups(x: Shaped[EitherArray, "*batch groups size"]) -> Shaped[EitherArray, "*batch D"]:
    """[..., groups, size] as [..., D]."""
    return x.reshape(*x.shape[:-2], -1)


def to_float32(x: Shaped[EitherArray, "*shape"]) -> Float32[EitherArray, "*shape"]:
    return x.astype(np.float32)


def joined(arrays: list[Shaped[EitherArray, "*batch _"]]) -> Shaped[EitherArray, "*batch _"]:
    """Concatenate NumPy or JAX arrays along the last axis."""
    return np.concatenate(arrays, -1) if isinstance(arrays[0], np.ndarray) else jnp.concatenate(arrays, -1)


def shifted(
    x: Integer[EitherArray, "*batch n"], shifts: tuple[int, ...], mask: int
) -> Integer[EitherArray, "*batch {len(shifts)} n"]:
    """(x >> shift) & mask for each shift: the bit fields of integers, [..., n] as [..., len(shifts), n].

    Uses a broadcast, because a GPU would write a concatenation to memory. On a TPU it uses a concatenation, because the
    compiler would write the broadcast to memory and need 25% more cycles (`q4_0` and `q4_k`).
    """
    if isinstance(x, np.ndarray) or lowering_platform() == "gpu":
        return (x[..., None, :] >> np.asarray(shifts, x.dtype)[:, None]) & mask
    return joined([(x >> np.asarray(shift, x.dtype)) & mask for shift in shifts]).reshape(*x.shape[:-1], len(shifts), -1)


def nibbles(x: UInt8[EitherArray, "*batch half"], size: int) -> UInt8[EitherArray, "*batch groups 2 {size//2}"]:
    """uint8[..., D / 2] as [..., groups, 2, size / 2]: the low halves of each group's bytes, and then the high halves."""
    return shifted(split_groups(x, size // 2), (0, 4), 15)


def for_each(x: Shaped[EitherArray, "*shape"], size: int) -> Shaped[EitherArray, "*shape _"]:
    """Broadcast scales over groups of `size` values: [..., n] as [..., n, 1].

    On a GPU the broadcast is explicit, [..., n, size], so that XLA keeps the result in registers.
    """
    if isinstance(x, np.ndarray) or lowering_platform() != "gpu":
        return x[..., None]
    return jnp.broadcast_to(x[..., None], (*x.shape, size))


def looked_up(
    table: Float32[np.ndarray, " entries"], indices: Integer[EitherArray, "*shape"]
) -> Float32[EitherArray, "*shape"]:
    """Table lookup; for 16-entry tables on TPUs and CPUs by bitwise selects, because gathers are slow on TPUs."""
    if isinstance(indices, np.ndarray):
        return table[indices]
    if len(table) > 16 or lowering_platform() == "gpu":
        return jnp.asarray(table).at[indices.astype(np.int32)].get(mode="promise_in_bounds")
    candidates = [jnp.float32(number) for number in table]
    for bit in range(4):
        high = (indices >> np.uint8(bit)) & 1 == 1
        candidates = [jnp.where(high, candidates[i + 1], candidates[i]) for i in range(0, len(candidates), 2)]
    return candidates[0]


def planes_from_blocks(
    blocks: UInt8[np.ndarray, "*batch blocks block_bytes"], planes: tuple[QuantField, ...]
) -> tuple[np.ndarray, ...]:
    """The planes of the blocks of a GGUF file."""
    arrays, at = [], 0
    block = planes_block(planes)
    for plane in planes:
        size = block * plane.entries // plane.numbers * np.dtype(plane.dtype).itemsize
        part = np.ascontiguousarray(blocks[..., at : at + size]).view(plane.dtype)
        arrays.append(part.reshape(*blocks.shape[:-2], -1))
        at += size
    return tuple(arrays)


def fill_planes(
    out: Sequence[np.ndarray], blocks: UInt8[np.ndarray, "*batch blocks block_bytes"], planes: tuple[QuantField, ...]
) -> None:
    """Like `planes_from_blocks`, into existing arrays [*batch, ...], whose last axis must be contiguous.

    Copies bytes in units of up to 16, for which NumPy reaches the speed of memory; single bytes are slower.
    """
    at, block = 0, planes_block(planes)
    for memory, plane in zip(out, planes, strict=True):
        size = block * plane.entries // plane.numbers * np.dtype(plane.dtype).itemsize
        unit = np.dtype({1: "u1", 2: "u2", 4: "u4", 8: "u8"}.get(min(size & -size, 16), "V16"))
        source = blocks[..., at : at + size].view(unit)
        target = memory.view(unit)
        target = target.reshape(*target.shape[:-1], -1, source.shape[-1])  # splitting an axis never copies
        for i in range(source.shape[-1]):
            target[..., i] = source[..., i]
        at += size


def blocks_from_planes(
    planes: tuple[np.ndarray, ...], quant_format: QuantFormat
) -> UInt8[np.ndarray, "*batch blocks block_bytes"]:
    """Undo `planes_from_blocks`: the blocks of a GGUF file."""
    parts = []
    for array, plane in zip(planes, quant_format.planes, strict=True):
        entries = quant_format.block * plane.entries // plane.numbers
        parts.append(np.ascontiguousarray(split_groups(np.asarray(array), entries)).view(np.uint8))
    return np.concatenate(parts, -1)


def planes_block(planes: tuple[QuantField, ...]) -> int:
    """Values per block: the largest group of any plane."""
    return max(plane.numbers for plane in planes)
