"""The kinds of quantised weights: which arrays each is kept as, and how its numbers come back from them.

A matrix [*out, D] is kept as planes: arrays whose axes are those of the matrix but for the last, along which a plane has an
entry for each number, for each group of them, or for two numbers in a byte. All functions here are of NumPy's arrays as well
as JAX's, so that files are read with what computes.

The kinds of GGUF are the bytes of its blocks, sorted by what they mean (ggml-org/ggml, `ggml-common.h`; dequantised as
`gguf-py` does): nothing is lost between file and memory, in either direction.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import jax.numpy as jnp
import ml_dtypes
import numpy as np

Name = Literal["int8", "int4", "q8_0", "q4_0", "q4_k", "q5_k", "q6_k"]
Array = Any  # numpy.ndarray or jax.Array

INT4 = np.dtype(ml_dtypes.int4)


@dataclass(frozen=True)
class Plane:
    """One of the arrays of a kind.

    Attributes:
      name: of what it holds.
      dtype: of its entries.
      entries, numbers: so many entries for so many numbers of a row; 0 entries where there is one for a whole row, and the
        plane lacks the last axis.
      grouped: its last two axes are groups, and the entries of a group.
    """

    name: str
    dtype: Any
    entries: int
    numbers: int
    grouped: bool = False

    def shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Of the plane of a matrix."""
        *out, columns = shape
        if not self.entries:
            return tuple(out)
        if self.grouped:
            return (*out, columns // self.numbers, self.entries)
        return (*out, columns * self.entries // self.numbers)


@dataclass(frozen=True)
class Kind:
    """How a weight is kept.

    Attributes:
      name: "int8".
      block: a row's length must be a multiple of it.
      planes: the arrays, in the order of the leaf, and, of GGUF's kinds, of the bytes of a block.
      decode: the planes as float32[*out, D].
      encode: a matrix float32[*out, D] of NumPy as planes; None for kinds that are only read from files.
      bits: for each number, on the average.
    """

    name: Name
    block: int
    planes: tuple[Plane, ...]
    decode: Callable[..., Array]
    encode: Callable[[np.ndarray], tuple[np.ndarray, ...]] | None = None

    @property
    def of_gguf(self) -> bool:
        """Whether a GGUF holds such blocks."""
        return self.name not in ("int8", "int4")

    @property
    def bits(self) -> float:
        """For each number of a long row."""
        return sum(bits_of(plane.dtype) * plane.entries / plane.numbers for plane in self.planes)


def bits_of(dtype: Any) -> int:
    """In memory: of the integers of 4 bits JAX's arrays hold two in a byte, whatever their `nbytes` says."""
    return 4 if np.dtype(dtype) == INT4 else 8 * np.dtype(dtype).itemsize


def _groups(x: Array, size: int) -> Array:
    """[..., D] as [..., D / size, size]."""
    return x.reshape(*x.shape[:-1], -1, size)


def _rows(x: Array) -> Array:
    """[..., groups, size] as [..., D]."""
    return x.reshape(*x.shape[:-2], -1)


def _wide(x: Array) -> Array:
    return x.astype(np.float32)


def _joined(arrays: list[Array]) -> Array:
    """Along the last axis, where they are."""
    return np.concatenate(arrays, -1) if isinstance(arrays[0], np.ndarray) else jnp.concatenate(arrays, -1)


def _nibbles(x: Array, size: int) -> Array:
    """uint8[..., D / 2] as [..., groups, 2, size / 2]: of each group's bytes the low halves, and then the high ones."""
    pairs = _groups(x, size // 2)
    return _joined([pairs & 15, pairs >> 4]).reshape(*pairs.shape[:-1], 2, size // 2)


# --- one factor for a row, or for a group -------------------------------------------------------------------------------


def _decode_int8(values: Array, scales: Array) -> Array:
    return _wide(values) * scales[..., None]


def _encode_int8(x: np.ndarray) -> tuple[np.ndarray, ...]:
    """The nearest integers, those of each row scaled so that its largest is 127."""
    scales = np.abs(x).max(-1).astype(np.float32) / np.float32(127)
    return np.round(x / np.where(scales == 0, 1, scales)[..., None]).astype(np.int8), scales


def _decode_int4(values: Array, scales: Array) -> Array:
    return _rows(_wide(values) * scales[..., None])


def _encode_int4(x: np.ndarray) -> tuple[np.ndarray, ...]:
    """As `_encode_q4_0`: the entry that is largest without its sign becomes -8."""
    groups = _groups(x, INT4_GROUP)
    scales = _signed_largest(groups) / np.float32(-8)
    inverse = np.where(scales == 0, 0, 1 / np.where(scales == 0, 1, scales))
    values = np.clip(np.trunc(groups * inverse[..., None] + np.float32(8.5)), 0, 15) - 8
    return values.astype(np.int8).astype(INT4), scales.astype(np.float32)


def _signed_largest(groups: np.ndarray) -> np.ndarray:
    """Of each group the entry that is largest without its sign."""
    where = np.abs(groups).argmax(-1, keepdims=True)
    return np.take_along_axis(groups, where, -1)[..., 0]


# --- the blocks of GGUF ---------------------------------------------------------------------------------------------------


def _decode_q8_0(d: Array, values: Array) -> Array:
    return _rows(_groups(_wide(values), 32) * _wide(d)[..., None])


def _decode_q4_0(d: Array, values: Array) -> Array:
    numbers = _nibbles(values, 32).astype(np.int8) - np.int8(8)
    return _rows(_rows(_wide(numbers) * _wide(d)[..., None, None]))


def _encode_by(name: str, planes: tuple[Plane, ...], bytes_of_block: int) -> Callable[[np.ndarray], tuple[np.ndarray, ...]]:
    def encode(x: np.ndarray) -> tuple[np.ndarray, ...]:
        from gguf import GGMLQuantizationType, quants

        blocks = quants.quantize(np.ascontiguousarray(x, np.float32), GGMLQuantizationType[name])
        return split(blocks.reshape(*x.shape[:-1], -1, bytes_of_block), planes)

    return encode


def _scales_and_mins(packed: Array) -> tuple[Array, Array]:
    """Of a block of 256 in 4 or 5 bits: eight factors and eight minima of 6 bits in 12 bytes, [..., 8] each."""
    twelve = _groups(packed, 12)
    first, second, third = twelve[..., :4], twelve[..., 4:8], twelve[..., 8:]
    scales = _joined([first & 63, (third & 15) | ((first >> 2) & 48)])
    mins = _joined([second & 63, (third >> 4) | ((second >> 2) & 48)])
    return scales, mins


def _by_scales_and_mins(d: Array, dmin: Array, packed: Array, numbers: Array) -> Array:
    """numbers: [..., blocks, 8, 32], integers of 4 or 5 bits."""
    scales, mins = _scales_and_mins(packed)
    factors = _wide(d)[..., None] * _wide(scales)
    offsets = _wide(dmin)[..., None] * _wide(mins)
    return _rows(_rows(factors[..., None] * _wide(numbers) - offsets[..., None]))


def _nibbles_of_k(values: Array) -> Array:
    """uint8[..., D / 2] as [..., blocks, 8, 32]."""
    numbers = _nibbles(values, 64)
    return numbers.reshape(*numbers.shape[:-3], -1, 8, 32)


def _decode_q4_k(d: Array, dmin: Array, scales: Array, values: Array) -> Array:
    return _by_scales_and_mins(d, dmin, scales, _nibbles_of_k(values))


def _decode_q5_k(d: Array, dmin: Array, scales: Array, high: Array, values: Array) -> Array:
    fifth = _joined([(_groups(high, 32) >> np.uint8(i)) & 1 for i in range(8)])  # [..., blocks, 8 * 32]
    return _by_scales_and_mins(d, dmin, scales, _nibbles_of_k(values) | (_groups(fifth, 32) << np.uint8(4)))


def _decode_q6_k(low: Array, high: Array, scales: Array, d: Array) -> Array:
    nibbles = _nibbles(low, 128)  # of each 128 numbers 64 bytes: [..., 2 blocks, 2, 64]
    nibbles = nibbles.reshape(*nibbles.shape[:-2], 4, 32)
    pairs = _groups(high, 32)  # [..., 2 blocks, 32]
    above = _joined([(pairs >> np.uint8(2 * i)) & 3 for i in range(4)])
    numbers = (nibbles | (_groups(above, 32) << np.uint8(4))).astype(np.int8) - np.int8(32)
    factors = _wide(d)[..., None] * _wide(_groups(scales, 16))  # [..., blocks, 16]
    sixteen = numbers.reshape(*factors.shape, 16)
    return _rows(_rows(factors[..., None] * _wide(sixteen)))


def split(blocks: np.ndarray, planes: tuple[Plane, ...]) -> tuple[np.ndarray, ...]:
    """The planes of blocks of a file, uint8[..., blocks, bytes]."""
    found, at = [], 0
    block = planes_block(planes)
    for plane in planes:
        size = block * plane.entries // plane.numbers * np.dtype(plane.dtype).itemsize
        part = np.ascontiguousarray(blocks[..., at : at + size]).view(plane.dtype)
        found.append(part.reshape(*blocks.shape[:-2], -1))
        at += size
    return tuple(found)


def join(planes: tuple[np.ndarray, ...], kind: Kind) -> np.ndarray:
    """The blocks of a file, uint8[..., blocks, bytes], of which `split` gave the planes."""
    parts = []
    for array, plane in zip(planes, kind.planes, strict=True):
        entries = kind.block * plane.entries // plane.numbers
        parts.append(np.ascontiguousarray(_groups(np.asarray(array), entries)).view(np.uint8))
    return np.concatenate(parts, -1)


def planes_block(planes: tuple[Plane, ...]) -> int:
    """Numbers in a block: those that the rarest entry stands for."""
    return max(plane.numbers for plane in planes)


_HALF, _BYTE, _SIGNED = np.float16, np.uint8, np.int8
_Q8_0 = (Plane("d", _HALF, 1, 32), Plane("values", _SIGNED, 32, 32))
_Q4_0 = (Plane("d", _HALF, 1, 32), Plane("values", _BYTE, 16, 32))
_K = (Plane("d", _HALF, 1, 256), Plane("dmin", _HALF, 1, 256), Plane("scales", _BYTE, 12, 256))
INT4_GROUP = 128

KINDS: dict[str, Kind] = {
    kind.name: kind
    for kind in (
        Kind("int8", 1, (Plane("values", _SIGNED, 1, 1), Plane("scales", np.float32, 0, 1)), _decode_int8, _encode_int8),
        Kind(
            "int4",
            INT4_GROUP,
            (Plane("values", INT4, INT4_GROUP, INT4_GROUP, grouped=True), Plane("scales", np.float32, 1, INT4_GROUP)),
            _decode_int4,
            _encode_int4,
        ),
        Kind("q8_0", 32, _Q8_0, _decode_q8_0, _encode_by("Q8_0", _Q8_0, 34)),
        Kind("q4_0", 32, _Q4_0, _decode_q4_0, _encode_by("Q4_0", _Q4_0, 18)),
        Kind("q4_k", 256, (*_K, Plane("values", _BYTE, 128, 256)), _decode_q4_k),
        Kind("q5_k", 256, (*_K, Plane("high", _BYTE, 32, 256), Plane("values", _BYTE, 128, 256)), _decode_q5_k),
        Kind(
            "q6_k",
            256,
            (
                Plane("low", _BYTE, 128, 256),
                Plane("high", _BYTE, 64, 256),
                Plane("scales", _SIGNED, 16, 256),
                Plane("d", _HALF, 1, 256),
            ),
            _decode_q6_k,
        ),
    )
}
