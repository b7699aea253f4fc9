"""What a format of quantized weights is: the arrays that a matrix is kept as, and how to decode them.

A matrix [*out, D] is kept as planes: arrays whose axes are those of the matrix but for the last, along which a plane has an
entry for each number, for each group of them, or for two numbers in a byte. All functions here are of NumPy's arrays as well
as JAX's, so that files are read with what computes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import ml_dtypes
import numpy as np

from llama_jax.ops.platform import lowering_platform

Array = Any  # numpy.ndarray or jax.Array

# Integers of 4 bits: two in a byte in a GPU's and a TPU's memory. Files, NumPy and CPUs have them `packed`, see `order`.
INT4 = np.dtype(ml_dtypes.int4)
FP8 = np.dtype(ml_dtypes.float8_e4m3fn)


@dataclass(frozen=True)
class QuantField:
    """One of the arrays of a kind.

    Attributes:
      name: what it holds.
      dtype: dtype of its entries.
      entries, numbers: `numbers` numbers of a row share `entries` entries; 0 entries means one entry per row, and the plane
        lacks the last axis.
      grouped: its last two axes are groups, and the entries of a group.
    """

    name: str
    dtype: Any
    entries: int
    numbers: int
    grouped: bool = False

    def shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of the plane of a matrix of a shape."""
        *out, columns = shape
        return (*out, *self.end(columns))

    def end(self, columns: int) -> tuple[int, ...]:
        """Its axes for the columns of a matrix."""
        if not self.entries:
            return ()
        if self.grouped:
            return (columns // self.numbers, self.entries)
        return (columns * self.entries // self.numbers,)

    def packed(self, shape: tuple[int, ...]) -> tuple[tuple[int, ...], np.dtype]:
        """Shape and dtype of the plane of a matrix where integers of 4 bits are `packed`; of others as they are."""
        *out, entries = whole = self.shape(shape)
        return ((*out, entries // 2), np.dtype(np.uint8)) if self.dtype == INT4 else (whole, np.dtype(self.dtype))


@dataclass(frozen=True)
class QuantFormat:
    """How a weight is kept.

    Attributes:
      name: "int8".
      block: a row's length must be a multiple of it.
      planes: the arrays, in the order of the leaf, and, of GGUF's kinds, of the bytes of a block.
      decode: the planes as float32[*out, D].
      encode: a matrix float32[*out, D] of NumPy as planes, of which those of 4 bits are `packed`; None for kinds that are
        only read from files.
      of_gguf: whether a GGUF holds such blocks.
    """

    name: str
    block: int
    planes: tuple[QuantField, ...]
    decode: Callable[..., Array]
    encode: Callable[[np.ndarray], tuple[np.ndarray, ...]] | None = None
    of_gguf: bool = False

    @property
    def bits(self) -> float:
        """For each number of a long row."""
        return sum(bits_of(plane.dtype) * plane.entries / plane.numbers for plane in self.planes)

    @property
    def has_row_factors(self) -> bool:
        """Whether the only factor of a number is that of its row."""
        return len(self.planes) == 2 and not self.planes[1].entries

    def bytes_of_row(self, columns: int) -> int:
        """Bytes of a row as `from_rows` reads them."""
        return sum(math.prod(plane.end(columns)) * bits_of(plane.dtype) // 8 for plane in self.planes)

    def to_rows(self, planes: tuple[np.ndarray, ...]) -> np.ndarray:
        """Planes of a matrix [rows, D] as the bytes of each row: uint8[rows, bytes]."""
        rows = [np.ascontiguousarray(plane).reshape(len(plane), -1) for plane in planes]
        return np.concatenate([each.view(np.uint8) for each in rows], axis=1)

    def from_rows(self, raw: np.ndarray, columns: int) -> tuple[np.ndarray, ...]:
        """The planes of rows in bytes, uint8[..., bytes]: a GGUF's blocks, or what `to_rows` gives."""
        if self.of_gguf:
            return split(raw.reshape(*raw.shape[:-1], columns // self.block, -1), self.planes)
        planes, at = [], 0
        for plane in self.planes:
            shape, dtype = plane.packed((*raw.shape[:-1], columns))
            size = math.prod(shape[raw.ndim - 1 :]) * dtype.itemsize
            planes.append(np.ascontiguousarray(raw[..., at : at + size]).view(dtype).reshape(shape))
            at += size
        return tuple(planes)


def in_smaller_groups(planes: tuple[np.ndarray, ...], kind: QuantFormat, smaller: QuantFormat) -> tuple[np.ndarray, ...]:
    """Planes of a kind as those of one that differs in its groups alone: what a group shares is repeated."""
    times = kind.block // smaller.block
    return tuple(
        array.reshape(*array.shape[:-2], -1, array.shape[-1] // times) if plane.grouped else np.repeat(array, times, axis=-1)
        for array, plane in zip(planes, kind.planes, strict=True)
    )


def bits_of(dtype: Any) -> int:
    """In memory: of the integers of 4 bits JAX's arrays hold two in a byte, whatever their `nbytes` says."""
    return 4 if np.dtype(dtype) == INT4 else 8 * np.dtype(dtype).itemsize


def packed(x: Array) -> Array:
    """Integers of 4 bits, INT4[..., n], `in_bytes`: uint8[..., n / 2]; others as they are."""
    return in_bytes(x.astype(np.int8).view(np.uint8) & 15) if x.dtype == INT4 else x


def in_bytes(x: Array) -> Array:
    """Numbers of 4 bits, uint8[..., n], two in a byte, the first in the low half: uint8[..., n / 2]."""
    pairs = groups_of(x, 2)
    return pairs[..., 0] | (pairs[..., 1] << 4)


def halves(x: Array) -> tuple[Array, Array]:
    """The numbers at even and at odd indices of what `packed` returned, uint8[..., n / 2]: int8[..., n / 2] each."""
    return (x << 4).view(np.int8) >> 4, x.view(np.int8) >> 4


def unpacked(x: Array) -> Array:
    """What `packed` gave, uint8[..., n / 2], as int8[..., n]; others as they are."""
    return rows_of(joined([groups_of(half, 1) for half in halves(x)])) if x.dtype == np.uint8 else x


def groups_of(x: Array, size: int) -> Array:
    """[..., D] as [..., D / size, size]."""
    return x.reshape(*x.shape[:-1], -1, size)


def rows_of(x: Array) -> Array:
    """[..., groups, size] as [..., D]."""
    return x.reshape(*x.shape[:-2], -1)


def wide(x: Array) -> Array:
    return x.astype(np.float32)


def joined(arrays: list[Array]) -> Array:
    """Along the last axis, where they are."""
    return np.concatenate(arrays, -1) if isinstance(arrays[0], np.ndarray) else jnp.concatenate(arrays, -1)


def shifted(x: Array, shifts: tuple[int, ...], mask: int) -> Array:
    """Parts of integers, [..., n] as [..., len(shifts), n].

    A concatenation would be written on a GPU before it is read. A TPU's compiler writes the broadcast instead, with a
    quarter more of its cycles (`q4_0` and `q4_k`).
    """
    if isinstance(x, np.ndarray) or lowering_platform() == "gpu":
        return (x[..., None, :] >> np.asarray(shifts, x.dtype)[:, None]) & mask
    return joined([(x >> np.asarray(shift, x.dtype)) & mask for shift in shifts]).reshape(*x.shape[:-1], len(shifts), -1)


def nibbles(x: Array, size: int) -> Array:
    """uint8[..., D / 2] as [..., groups, 2, size / 2]: of each group's bytes the low halves, and then the high ones."""
    return shifted(groups_of(x, size // 2), (0, 4), 15)


def for_each(x: Array, size: int) -> Array:
    """What `size` numbers share, [..., n] as [..., n, 1]; on a GPU [..., n, size].

    XLA would write factors that several operations make, and read them again; made for each number they stay in registers.
    """
    if isinstance(x, np.ndarray) or lowering_platform() != "gpu":
        return x[..., None]
    return jnp.broadcast_to(x[..., None], (*x.shape, size))


def looked_up(table: np.ndarray, indices: Array) -> Array:
    """Entries of a table. Of sixteen, a TPU selects by the bits of the index: it gathers slowly."""
    if isinstance(indices, np.ndarray):
        return table[indices]
    if len(table) > 16 or lowering_platform() == "gpu":
        return jnp.asarray(table).at[indices.astype(np.int32)].get(mode="promise_in_bounds")
    candidates = [jnp.float32(number) for number in table]
    for bit in range(4):
        high = (indices >> np.uint8(bit)) & 1 == 1
        candidates = [jnp.where(high, candidates[i + 1], candidates[i]) for i in range(0, len(candidates), 2)]
    return candidates[0]


def split(blocks: np.ndarray, planes: tuple[QuantField, ...]) -> tuple[np.ndarray, ...]:
    """The planes of blocks of a file, uint8[..., blocks, bytes]."""
    arrays, at = [], 0
    block = planes_block(planes)
    for plane in planes:
        size = block * plane.entries // plane.numbers * np.dtype(plane.dtype).itemsize
        part = np.ascontiguousarray(blocks[..., at : at + size]).view(plane.dtype)
        arrays.append(part.reshape(*blocks.shape[:-2], -1))
        at += size
    return tuple(arrays)


def split_into(out: Sequence[np.ndarray], blocks: np.ndarray, planes: tuple[QuantField, ...]) -> None:
    """As `split`, into memory for each plane, which has the axes of the blocks before theirs, and whose last is contiguous.

    Bytes are moved by units of up to 16, which NumPy copies as fast as memory is read; runs of single bytes it does not.
    """
    at, block = 0, planes_block(planes)
    for memory, plane in zip(out, planes, strict=True):
        size = block * plane.entries // plane.numbers * np.dtype(plane.dtype).itemsize
        unit = np.dtype({1: "u1", 2: "u2", 4: "u4", 8: "u8"}.get(min(size & -size, 16), "V16"))
        source = blocks[..., at : at + size].view(unit)
        target = memory.view(unit)
        target = target.reshape(*target.shape[:-1], -1, source.shape[-1])  # one axis as two, which is never a copy
        for i in range(source.shape[-1]):
            target[..., i] = source[..., i]
        at += size


def join(planes: tuple[np.ndarray, ...], kind: QuantFormat) -> np.ndarray:
    """Undo `split`: the blocks of a file, uint8[..., blocks, bytes]."""
    parts = []
    for array, plane in zip(planes, kind.planes, strict=True):
        entries = kind.block * plane.entries // plane.numbers
        parts.append(np.ascontiguousarray(groups_of(np.asarray(array), entries)).view(np.uint8))
    return np.concatenate(parts, -1)


def planes_block(planes: tuple[QuantField, ...]) -> int:
    """Numbers in a block: those that the rarest entry stands for."""
    return max(plane.numbers for plane in planes)
