"""The kinds of GGUF: the bytes of its blocks, sorted by what they mean (ggml-org/ggml, `ggml-common.h`).

They are dequantised as `gguf-py` does: nothing is lost between file and memory, in either direction.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from llama_jax.ops.weights.planes import (
    Array,
    Kind,
    Plane,
    groups_of,
    joined,
    looked_up,
    nibbles,
    rows_of,
    split,
    wide,
)

# The numbers that four bits select: of IQ4_NL and IQ4_XS, and of MXFP4 (floats e2m1, doubled).
IQ4 = np.asarray([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.float32)
E2M1 = np.asarray([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], np.float32)


def _encode_by(name: str, planes: tuple[Plane, ...], bytes_of_block: int) -> Callable[[np.ndarray], tuple[np.ndarray, ...]]:
    def encode(x: np.ndarray) -> tuple[np.ndarray, ...]:
        from gguf import GGMLQuantizationType, quants

        blocks = quants.quantize(np.ascontiguousarray(x, np.float32), GGMLQuantizationType[name])
        return split(blocks.reshape(*x.shape[:-1], -1, bytes_of_block), planes)

    return encode


def _scaled(factors: Array, numbers: Array, offsets: Array | None = None) -> Array:
    """[..., D] from factors and offsets, [..., groups], and the numbers in their order, however grouped."""
    found = factors[..., None] * wide(numbers.reshape(*factors.shape, -1))
    return rows_of(found if offsets is None else found + offsets[..., None])


# --- blocks of 32 ----------------------------------------------------------------------------------------------------------


def _decode_q8_0(d: Array, values: Array) -> Array:
    return _scaled(wide(d), groups_of(values, 32))


def _nibbles_of_32(values: Array) -> Array:
    """uint8[..., D / 2] as [..., blocks, 32]."""
    return rows_of(nibbles(values, 32))


def _five_bits(high: Array, values: Array) -> Array:
    """[..., blocks, 32], whose fifth bits are four bytes of each block."""
    fifth = (high[..., None] >> np.arange(8, dtype=np.uint8)) & 1
    return _nibbles_of_32(values) | (groups_of(rows_of(fifth), 32) << np.uint8(4))


def _centered(numbers: Array, zero: int) -> Array:
    """Integers of which `zero` stands for 0."""
    return numbers.astype(np.int8) - np.int8(zero)


def _decode_q4_0(d: Array, values: Array) -> Array:
    return _scaled(wide(d), _centered(_nibbles_of_32(values), 8))


def _decode_q4_1(d: Array, m: Array, values: Array) -> Array:
    return _scaled(wide(d), _nibbles_of_32(values), wide(m))


def _decode_q5_0(d: Array, high: Array, values: Array) -> Array:
    return _scaled(wide(d), _centered(_five_bits(high, values), 16))


def _decode_q5_1(d: Array, m: Array, high: Array, values: Array) -> Array:
    return _scaled(wide(d), _five_bits(high, values), wide(m))


def _decode_iq4_nl(d: Array, values: Array) -> Array:
    return _scaled(wide(d), looked_up(IQ4, _nibbles_of_32(values)))


def _decode_mxfp4(e: Array, values: Array) -> Array:
    return _scaled(_half_of_e8m0(e), looked_up(E2M1, _nibbles_of_32(values)))


def _half_of_e8m0(e: Array) -> Array:
    """2 ** (e - 128), half of what the byte stands for: the bits of a float32, which is denormal for 0 and 1."""
    exponent = e.astype(np.uint32)
    normal = (exponent > 1).astype(np.uint32)
    bits = ((exponent - normal) * normal << 23) | (1 - normal) << (21 + exponent * (1 - normal))
    return bits.view(np.float32)


# --- blocks of 256 ---------------------------------------------------------------------------------------------------------


def _scales_and_mins(packed: Array) -> tuple[Array, Array]:
    """Of a block of 256 in 4 or 5 bits: eight factors and eight minima of 6 bits in 12 bytes, [..., 8] each."""
    twelve = groups_of(packed, 12)
    first, second, third = twelve[..., :4], twelve[..., 4:8], twelve[..., 8:]
    scales = joined([first & 63, (third & 15) | ((first >> 2) & 48)])
    mins = joined([second & 63, (third >> 4) | ((second >> 2) & 48)])
    return scales, mins


def _times(d: Array, integers: Array) -> Array:
    """[..., blocks] by [..., blocks, groups]: the factors of all groups of a row."""
    return rows_of(wide(d)[..., None] * wide(integers))


def _nibbles_of_k(values: Array) -> Array:
    """uint8[..., D / 2] as [..., blocks, 8, 32]."""
    numbers = nibbles(values, 64)
    return numbers.reshape(*numbers.shape[:-3], -1, 8, 32)


def _pairs_of_k(values: Array) -> Array:
    """Numbers of 2 bits, uint8[..., D / 4], as [..., blocks, 16, 16]: every 32 bytes are 128 of them."""
    bytes_ = groups_of(values, 32)
    numbers = joined([(bytes_ >> np.uint8(2 * i)) & 3 for i in range(4)])
    return numbers.reshape(*numbers.shape[:-2], -1, 16, 16)


def _bits_of_k(high: Array) -> Array:
    """Bits, uint8[..., D / 8], as [..., blocks, 256]: every byte has one of each 32 numbers of the block."""
    return joined([(groups_of(high, 32) >> np.uint8(i)) & 1 for i in range(8)])


def _decode_q2_k(scales: Array, values: Array, d: Array, dmin: Array) -> Array:
    both = groups_of(scales, 16)
    return _scaled(_times(d, both & 15), _pairs_of_k(values), -_times(dmin, both >> 4))


def _decode_q3_k(high: Array, values: Array, scales: Array, d: Array) -> Array:
    numbers = _pairs_of_k(values)
    numbers = _centered(numbers | (_bits_of_k(high).reshape(numbers.shape) << np.uint8(2)), 4)
    twelve = groups_of(scales, 12)  # sixteen factors: their lower four bits, and the upper two
    low, above = twelve[..., :8], twelve[..., 8:]
    six = joined([low & 15, low >> 4]) | (joined([(above >> np.uint8(2 * i)) & 3 for i in range(4)]) << np.uint8(4))
    return _scaled(_times(d, _centered(six, 32)), numbers)


def _decode_q4_k(d: Array, dmin: Array, scales: Array, values: Array) -> Array:
    factors, mins = _scales_and_mins(scales)
    return _scaled(_times(d, factors), _nibbles_of_k(values), -_times(dmin, mins))


def _decode_q5_k(d: Array, dmin: Array, scales: Array, high: Array, values: Array) -> Array:
    numbers = _nibbles_of_k(values)
    numbers = numbers | (_bits_of_k(high).reshape(numbers.shape) << np.uint8(4))
    factors, mins = _scales_and_mins(scales)
    return _scaled(_times(d, factors), numbers, -_times(dmin, mins))


def _decode_q6_k(low: Array, high: Array, scales: Array, d: Array) -> Array:
    upper = _pairs_of_k(high)
    numbers = nibbles(low, 128).reshape(upper.shape) | (upper << np.uint8(4))  # of each 128 numbers 64 bytes
    return _scaled(_times(d, groups_of(scales, 16)), _centered(numbers, 32))


def _decode_iq4_xs(d: Array, high: Array, low: Array, values: Array) -> Array:
    """Eight factors of 6 bits in each block: two bits of one integer, and half a byte."""
    upper = (high[..., None] >> np.arange(0, 16, 2, dtype=np.uint16)) & 3
    six = _centered(nibbles(low, 2).reshape(upper.shape) | (upper.astype(np.uint8) << np.uint8(4)), 32)
    return _scaled(_times(d, six), looked_up(IQ4, _nibbles_of_32(values)))


_HALF, _BYTE, _SIGNED = np.float16, np.uint8, np.int8
_D32, _D256 = Plane("d", _HALF, 1, 32), Plane("d", _HALF, 1, 256)
_M32, _DMIN = Plane("m", _HALF, 1, 32), Plane("dmin", _HALF, 1, 256)
_NIBBLES, _NIBBLES_OF_K = Plane("values", _BYTE, 16, 32), Plane("values", _BYTE, 128, 256)
_FIFTH, _BITS_OF_K = Plane("high", _BYTE, 4, 32), Plane("high", _BYTE, 32, 256)
_PAIRS_OF_K = Plane("values", _BYTE, 64, 256)
_K = (_D256, _DMIN, Plane("scales", _BYTE, 12, 256))
_Q8_0 = (_D32, Plane("values", _SIGNED, 32, 32))
_Q4_0 = (_D32, _NIBBLES)
_Q3_K = (_BITS_OF_K, _PAIRS_OF_K, Plane("scales", _BYTE, 12, 256), _D256)
_Q6_K = (Plane("low", _BYTE, 128, 256), Plane("high", _BYTE, 64, 256), Plane("scales", _SIGNED, 16, 256), _D256)
_IQ4_XS = (_D256, Plane("high", np.uint16, 1, 256), Plane("low", _BYTE, 4, 256), _NIBBLES_OF_K)

BLOCKS = (
    Kind("q8_0", 32, _Q8_0, _decode_q8_0, _encode_by("Q8_0", _Q8_0, 34), of_gguf=True),
    Kind("q4_0", 32, _Q4_0, _decode_q4_0, _encode_by("Q4_0", _Q4_0, 18), of_gguf=True),
    Kind("q4_1", 32, (_D32, _M32, _NIBBLES), _decode_q4_1, of_gguf=True),
    Kind("q5_0", 32, (_D32, _FIFTH, _NIBBLES), _decode_q5_0, of_gguf=True),
    Kind("q5_1", 32, (_D32, _M32, _FIFTH, _NIBBLES), _decode_q5_1, of_gguf=True),
    Kind("iq4_nl", 32, (_D32, _NIBBLES), _decode_iq4_nl, of_gguf=True),
    Kind("mxfp4", 32, (Plane("e", _BYTE, 1, 32), _NIBBLES), _decode_mxfp4, of_gguf=True),
    Kind("q2_k", 256, (Plane("scales", _BYTE, 16, 256), _PAIRS_OF_K, _D256, _DMIN), _decode_q2_k, of_gguf=True),
    Kind("q3_k", 256, _Q3_K, _decode_q3_k, of_gguf=True),
    Kind("q4_k", 256, (*_K, _NIBBLES_OF_K), _decode_q4_k, of_gguf=True),
    Kind("q5_k", 256, (*_K, _BITS_OF_K, _NIBBLES_OF_K), _decode_q5_k, of_gguf=True),
    Kind("q6_k", 256, _Q6_K, _decode_q6_k, of_gguf=True),
    Kind("iq4_xs", 256, _IQ4_XS, _decode_iq4_xs, of_gguf=True),
)
