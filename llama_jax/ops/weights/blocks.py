"""The kinds of GGUF: the bytes of its blocks, sorted by what they mean (ggml-org/ggml, `ggml-common.h`).

They are dequantised as `gguf-py` does: nothing is lost between file and memory, in either direction.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from llama_jax.ops.weights.planes import Array, Kind, Plane, groups_of, joined, nibbles, rows_of, split, wide


def _decode_q8_0(d: Array, values: Array) -> Array:
    return rows_of(groups_of(wide(values), 32) * wide(d)[..., None])


def _decode_q4_0(d: Array, values: Array) -> Array:
    numbers = nibbles(values, 32).astype(np.int8) - np.int8(8)
    return rows_of(rows_of(wide(numbers) * wide(d)[..., None, None]))


def _encode_by(name: str, planes: tuple[Plane, ...], bytes_of_block: int) -> Callable[[np.ndarray], tuple[np.ndarray, ...]]:
    def encode(x: np.ndarray) -> tuple[np.ndarray, ...]:
        from gguf import GGMLQuantizationType, quants

        blocks = quants.quantize(np.ascontiguousarray(x, np.float32), GGMLQuantizationType[name])
        return split(blocks.reshape(*x.shape[:-1], -1, bytes_of_block), planes)

    return encode


def _scales_and_mins(packed: Array) -> tuple[Array, Array]:
    """Of a block of 256 in 4 or 5 bits: eight factors and eight minima of 6 bits in 12 bytes, [..., 8] each."""
    twelve = groups_of(packed, 12)
    first, second, third = twelve[..., :4], twelve[..., 4:8], twelve[..., 8:]
    scales = joined([first & 63, (third & 15) | ((first >> 2) & 48)])
    mins = joined([second & 63, (third >> 4) | ((second >> 2) & 48)])
    return scales, mins


def _by_scales_and_mins(d: Array, dmin: Array, packed: Array, numbers: Array) -> Array:
    """numbers: [..., blocks, 8, 32], integers of 4 or 5 bits."""
    scales, mins = _scales_and_mins(packed)
    factors = wide(d)[..., None] * wide(scales)
    offsets = wide(dmin)[..., None] * wide(mins)
    return rows_of(rows_of(factors[..., None] * wide(numbers) - offsets[..., None]))


def _nibbles_of_k(values: Array) -> Array:
    """uint8[..., D / 2] as [..., blocks, 8, 32]."""
    numbers = nibbles(values, 64)
    return numbers.reshape(*numbers.shape[:-3], -1, 8, 32)


def _decode_q4_k(d: Array, dmin: Array, scales: Array, values: Array) -> Array:
    return _by_scales_and_mins(d, dmin, scales, _nibbles_of_k(values))


def _decode_q5_k(d: Array, dmin: Array, scales: Array, high: Array, values: Array) -> Array:
    fifth = joined([(groups_of(high, 32) >> np.uint8(i)) & 1 for i in range(8)])  # [..., blocks, 8 * 32]
    return _by_scales_and_mins(d, dmin, scales, _nibbles_of_k(values) | (groups_of(fifth, 32) << np.uint8(4)))


def _decode_q6_k(low: Array, high: Array, scales: Array, d: Array) -> Array:
    low_bits = nibbles(low, 128)  # of each 128 numbers 64 bytes: [..., 2 blocks, 2, 64]
    low_bits = low_bits.reshape(*low_bits.shape[:-2], 4, 32)
    pairs = groups_of(high, 32)  # [..., 2 blocks, 32]
    above = joined([(pairs >> np.uint8(2 * i)) & 3 for i in range(4)])
    numbers = (low_bits | (groups_of(above, 32) << np.uint8(4))).astype(np.int8) - np.int8(32)
    factors = wide(d)[..., None] * wide(groups_of(scales, 16))  # [..., blocks, 16]
    sixteen = numbers.reshape(*factors.shape, 16)
    return rows_of(rows_of(factors[..., None] * wide(sixteen)))


_HALF, _BYTE, _SIGNED = np.float16, np.uint8, np.int8
_Q8_0 = (Plane("d", _HALF, 1, 32), Plane("values", _SIGNED, 32, 32))
_Q4_0 = (Plane("d", _HALF, 1, 32), Plane("values", _BYTE, 16, 32))
_K = (Plane("d", _HALF, 1, 256), Plane("dmin", _HALF, 1, 256), Plane("scales", _BYTE, 12, 256))
_Q4_K = (*_K, Plane("values", _BYTE, 128, 256))
_Q5_K = (*_K, Plane("high", _BYTE, 32, 256), Plane("values", _BYTE, 128, 256))
_Q6_K = (
    Plane("low", _BYTE, 128, 256),
    Plane("high", _BYTE, 64, 256),
    Plane("scales", _SIGNED, 16, 256),
    Plane("d", _HALF, 1, 256),
)

BLOCKS = (
    Kind("q8_0", 32, _Q8_0, _decode_q8_0, _encode_by("Q8_0", _Q8_0, 34), of_gguf=True),
    Kind("q4_0", 32, _Q4_0, _decode_q4_0, _encode_by("Q4_0", _Q4_0, 18), of_gguf=True),
    Kind("q4_k", 256, _Q4_K, _decode_q4_k, of_gguf=True),
    Kind("q5_k", 256, _Q5_K, _decode_q5_k, of_gguf=True),
    Kind("q6_k", 256, _Q6_K, _decode_q6_k, of_gguf=True),
)
