"""The quantization formats of GGUF: the bytes of their blocks, sorted into planes (ggml-org/ggml, `ggml-common.h`).

Dequantization is that of `gguf-py`. Conversion between file and memory is lossless in both directions.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from llama_jax.ops.weights.format_spec import (
    EitherArray,
    QuantField,
    QuantFormat,
    for_each,
    join_groups,
    looked_up,
    nibbles,
    planes_from_blocks,
    shifted,
    split_groups,
    to_float32,
)
from llama_jax.ops.weights.k_quants import encode_q4_k, encode_q5_k, encode_q6_k
from llama_jax.ops.weights.words import (
    BYTE_SHIFTS,
    NIBBLE_SHIFTS,
    WordDecoder,
    WordValues,
    divided,
    for_each_word,
    signed,
    unsigned,
)

# The values of the 4-bit indices of IQ4_NL and IQ4_XS, and of MXFP4 (floats e2m1, doubled).
IQ4 = np.asarray([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.float32)
FIFTH_BITS = (0, 16, 1, 17, 2, 18, 3, 19)  # shifts of the fifth bits of the values of a 32-bit word
E2M1 = np.asarray([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], np.float32)


def _encode_by(
    name: str, planes: tuple[QuantField, ...], bytes_of_block: int
) -> Callable[[np.ndarray], tuple[np.ndarray, ...]]:
    def encode(x: np.ndarray) -> tuple[np.ndarray, ...]:
        from gguf import GGMLQuantizationType, quants

        blocks = quants.quantize(np.ascontiguousarray(x, np.float32), GGMLQuantizationType[name])
        return planes_from_blocks(blocks.reshape(*x.shape[:-1], -1, bytes_of_block), planes)

    return encode


def _scale_and_add(factors: EitherArray, numbers: EitherArray, offsets: EitherArray | None = None) -> EitherArray:
    """[..., D] from scales and offsets [..., groups, 1 | size], and values in row order with any grouping."""
    scaled = factors * to_float32(numbers.reshape(*factors.shape[:-1], -1))
    return join_groups(scaled if offsets is None else scaled + offsets)


def _each(x: EitherArray) -> EitherArray:
    """Scales or offsets as [..., groups, 1]."""
    return to_float32(x)[..., None]


# --- blocks of 32 ----------------------------------------------------------------------------------------------------------


def _decode_q8_0(d: EitherArray, values: EitherArray) -> EitherArray:
    return _scale_and_add(_each(d), values)


def _nibbles_of_32(values: EitherArray) -> EitherArray:
    """uint8[..., D / 2] as [..., blocks, 32]."""
    return join_groups(nibbles(values, 32))


def _five_bits(high: EitherArray, values: EitherArray) -> EitherArray:
    """5-bit values [..., blocks, 32]; the fifth bits are four bytes of each block."""
    low, fifth = _nibbles_of_32(values), shifted(split_groups(high, 1), tuple(range(8)), 1)
    return low | (fifth.reshape(low.shape) << np.uint8(4))


def _centered(numbers: EitherArray, zero: int) -> EitherArray:
    """Integers minus their zero point, as int8."""
    return numbers.astype(np.int8) - np.int8(zero)


def _decode_q4_0(d: EitherArray, values: EitherArray) -> EitherArray:
    return _scale_and_add(_each(d), _centered(_nibbles_of_32(values), 8))


def _decode_q4_1(d: EitherArray, m: EitherArray, values: EitherArray) -> EitherArray:
    return _scale_and_add(_each(d), _nibbles_of_32(values), _each(m))


def _decode_q5_0(d: EitherArray, high: EitherArray, values: EitherArray) -> EitherArray:
    return _scale_and_add(_each(d), _centered(_five_bits(high, values), 16))


def _decode_q5_1(d: EitherArray, m: EitherArray, high: EitherArray, values: EitherArray) -> EitherArray:
    return _scale_and_add(_each(d), _five_bits(high, values), _each(m))


def _decode_iq4_nl(d: EitherArray, values: EitherArray) -> EitherArray:
    return _scale_and_add(_each(d), looked_up(IQ4, _nibbles_of_32(values)))


def _power_of_two_of_exponent(e: EitherArray) -> EitherArray:
    """2 ** (e - 128), half of the file's scale, because E2M1 is doubled; as float32 bits, denormal for e < 2."""
    exponent = e.astype(np.int32)
    return ((exponent - 1) << 23).clip(np.int32(1 << 21) << exponent.clip(0, 1)).view(np.float32)


def _decode_mxfp4(e: EitherArray, values: EitherArray) -> EitherArray:
    return _scale_and_add(_each(_power_of_two_of_exponent(e)), looked_up(E2M1, _nibbles_of_32(values)))


# --- blocks of 32 by words -------------------------------------------------------------------------------------------------


def _q8_0_words(parts: int, d: EitherArray, words: EitherArray) -> WordValues:
    return WordValues(signed(divided(words, parts), BYTE_SHIFTS, 8), d)


def _of_32(decode: Callable[..., WordValues], *integers: int) -> WordDecoder:
    """For blocks of 16 bytes, the low halves of which are the first values."""
    return WordDecoder(decode, 8, integers, halves=2, words=4)


def _q4_0_words(parts: int, d: EitherArray, words: EitherArray) -> WordValues:
    centered = words ^ np.uint32(0x88888888)  # subtracts 8 from each
    return WordValues(signed(divided(centered, parts), NIBBLE_SHIFTS, 4), d)


def _floats(integers: list[EitherArray]) -> list[EitherArray]:
    return [to_float32(integer) for integer in integers]


def _nibbles_of_words(parts: int, words: EitherArray) -> list[EitherArray]:
    return unsigned(divided(words, parts), NIBBLE_SHIFTS, 4)


def _q4_1_words(parts: int, d: EitherArray, m: EitherArray, words: EitherArray) -> WordValues:
    return WordValues(_floats(_nibbles_of_words(parts, words)), d, m)


def _five_bits_by_word(parts: int, high: EitherArray, words: EitherArray) -> list[EitherArray]:
    """Bit n of a block's `high` belongs to value n of the block."""
    low = _nibbles_of_words(parts, words)
    first = np.arange(0, 16, 4 // parts, dtype=np.uint32)  # the bit of the first value of each word of a block
    fifth = for_each_word(high, low[0]) >> np.resize(first, low[0].shape[-1])
    return [nibble | (bit << 4) for nibble, bit in zip(low, unsigned(fifth, FIFTH_BITS, 1), strict=True)]


def _q5_0_words(parts: int, d: EitherArray, high: EitherArray, words: EitherArray) -> WordValues:
    return WordValues(_floats([five - 16 for five in _five_bits_by_word(parts, high, words)]), d)


def _q5_1_words(parts: int, d: EitherArray, m: EitherArray, high: EitherArray, words: EitherArray) -> WordValues:
    return WordValues(_floats(_five_bits_by_word(parts, high, words)), d, m)


def _iq4_nl_words(parts: int, d: EitherArray, words: EitherArray) -> WordValues:
    return WordValues([looked_up(IQ4, index) for index in _nibbles_of_words(parts, words)], d)


def _mxfp4_words(parts: int, e: EitherArray, words: EitherArray) -> WordValues:
    return WordValues([looked_up(E2M1, index) for index in _nibbles_of_words(parts, words)], _power_of_two_of_exponent(e))


# --- blocks of 256 ---------------------------------------------------------------------------------------------------------


def _scales_and_mins(packed: EitherArray) -> tuple[EitherArray, EitherArray]:
    """The eight 6-bit scales and minima in 12 bytes of a Q4_K or Q5_K block: [..., blocks, 2, 4, 1 | 32] each."""
    four = for_each(packed.reshape(*packed.shape[:-1], -1, 3, 4), 32)
    first, second, third = (four[..., i : i + 1, :, :] for i in range(3))
    # The first four are six bits of a byte; the last four are the other two bits of that byte, and half of another byte.
    shift, mask, half = (np.asarray(x, np.uint8).reshape(2, 1, 1) for x in ((0, 2), (63, 48), (0, 15)))
    return ((first >> shift) & mask) | (third & half), ((second >> shift) & mask) | ((third >> 4) & half)


def _times(d: EitherArray, integers: EitherArray) -> EitherArray:
    """[..., blocks] times integers [..., blocks, *groups, 1 | size]: the scales of all groups of a row."""
    scales = d.reshape(*d.shape, *[1] * (integers.ndim - d.ndim)).astype(np.float32) * to_float32(integers)
    return scales.reshape(*d.shape[:-1], -1, integers.shape[-1])


def _nibbles_of_k(values: EitherArray) -> EitherArray:
    """uint8[..., D / 2] as [..., blocks, 8, 32]."""
    return nibbles(values, 64).reshape(*values.shape[:-1], -1, 8, 32)


def _pairs_of_k(values: EitherArray) -> EitherArray:
    """2-bit values, uint8[..., D / 4], as [..., blocks, 16, 16]: 32 bytes hold 128 of them."""
    numbers = shifted(split_groups(values, 32), (0, 2, 4, 6), 3)
    return numbers.reshape(*values.shape[:-1], -1, 16, 16)


def _bits_of_k(high: EitherArray) -> EitherArray:
    """Bits, uint8[..., D / 8], as [..., blocks, 8, 32]: byte i of a block holds bit i of each of its eight groups of 32."""
    return shifted(split_groups(high, 32), tuple(range(8)), 1)


def _decode_q2_k(scales: EitherArray, values: EitherArray, d: EitherArray, dmin: EitherArray) -> EitherArray:
    both = split_groups(scales, 16)[..., None]
    return _scale_and_add(_times(d, both & 15), _pairs_of_k(values), -_times(dmin, both >> 4))


def _decode_q3_k(high: EitherArray, values: EitherArray, scales: EitherArray, d: EitherArray) -> EitherArray:
    low = _pairs_of_k(values)
    numbers = _centered(low | (_bits_of_k(high).reshape(low.shape) << np.uint8(2)), 4)
    four = for_each(scales.reshape(*scales.shape[:-1], -1, 3, 4), 16)[..., None, :, :, :]
    lower = four[..., :2, :, :] >> np.asarray([0, 4], np.uint8).reshape(2, 1, 1, 1)  # the low four bits of the 16 scales
    upper = four[..., 2:, :, :] >> np.asarray([0, 2, 4, 6], np.uint8).reshape(2, 2, 1, 1)  # the high two bits
    six = (lower & 15) | ((upper & 3) << np.uint8(4))
    return _scale_and_add(_times(d, _centered(six, 32)), numbers)


def _decode_q4_k(d: EitherArray, dmin: EitherArray, scales: EitherArray, values: EitherArray) -> EitherArray:
    factors, mins = _scales_and_mins(scales)
    return _scale_and_add(_times(d, factors), _nibbles_of_k(values), -_times(dmin, mins))


def _decode_q5_k(
    d: EitherArray, dmin: EitherArray, scales: EitherArray, high: EitherArray, values: EitherArray
) -> EitherArray:
    numbers = _nibbles_of_k(values) | (_bits_of_k(high) << np.uint8(4))
    factors, mins = _scales_and_mins(scales)
    return _scale_and_add(_times(d, factors), numbers, -_times(dmin, mins))


def _decode_q6_k(low: EitherArray, high: EitherArray, scales: EitherArray, d: EitherArray) -> EitherArray:
    upper = _pairs_of_k(high)
    lower = nibbles(low, 128)  # 64 bytes for 128 values
    numbers = _centered(lower.reshape(upper.shape) | (upper << np.uint8(4)), 32)
    return _scale_and_add(_times(d, split_groups(scales, 16)[..., None]), numbers)


def _decode_iq4_xs(d: EitherArray, high: EitherArray, low: EitherArray, values: EitherArray) -> EitherArray:
    """Eight 6-bit scales in each block: two bits of a 16-bit integer, and half a byte."""
    upper = for_each(high, 32)[..., None, None, :] >> np.arange(0, 16, 2, dtype=np.uint16).reshape(4, 2, 1)
    lower = for_each(split_groups(low, 4), 32)[..., None, :] >> np.asarray([[0], [4]], np.uint8)
    six = (lower & 15) | ((upper & 3).astype(np.uint8) << np.uint8(4))
    return _scale_and_add(_times(d, _centered(six, 32)), looked_up(IQ4, _nibbles_of_32(values)))


_HALF, _BYTE, _SIGNED = np.float16, np.uint8, np.int8
_D32, _D256 = QuantField("d", _HALF, 1, 32), QuantField("d", _HALF, 1, 256)
_M32, _DMIN = QuantField("m", _HALF, 1, 32), QuantField("dmin", _HALF, 1, 256)
_NIBBLES, _NIBBLES_OF_K = QuantField("values", _BYTE, 16, 32), QuantField("values", _BYTE, 128, 256)
_FIFTH, _BITS_OF_K = QuantField("high", _BYTE, 4, 32), QuantField("high", _BYTE, 32, 256)
_PAIRS_OF_K = QuantField("values", _BYTE, 64, 256)
_K = (_D256, _DMIN, QuantField("scales", _BYTE, 12, 256))
_Q8_0 = (_D32, QuantField("values", _SIGNED, 32, 32))
_Q4_0, _Q4_1 = (_D32, _NIBBLES), (_D32, _M32, _NIBBLES)
_Q5_0, _Q5_1 = (_D32, _FIFTH, _NIBBLES), (_D32, _M32, _FIFTH, _NIBBLES)
_Q3_K = (_BITS_OF_K, _PAIRS_OF_K, QuantField("scales", _BYTE, 12, 256), _D256)
_Q6_K = (
    QuantField("low", _BYTE, 128, 256),
    QuantField("high", _BYTE, 64, 256),
    QuantField("scales", _SIGNED, 16, 256),
    _D256,
)
_IQ4_XS = (_D256, QuantField("high", np.uint16, 1, 256), QuantField("low", _BYTE, 4, 256), _NIBBLES_OF_K)

GGUF_FORMATS = (
    QuantFormat(
        "q8_0", 32, _Q8_0, _decode_q8_0, _encode_by("Q8_0", _Q8_0, 34), WordDecoder(_q8_0_words, 4, (1,)), is_gguf=True
    ),
    QuantFormat("q4_0", 32, _Q4_0, _decode_q4_0, _encode_by("Q4_0", _Q4_0, 18), _of_32(_q4_0_words, 1), is_gguf=True),
    QuantFormat("q4_1", 32, _Q4_1, _decode_q4_1, _encode_by("Q4_1", _Q4_1, 20), _of_32(_q4_1_words, 2), is_gguf=True),
    QuantFormat("q5_0", 32, _Q5_0, _decode_q5_0, _encode_by("Q5_0", _Q5_0, 22), _of_32(_q5_0_words, 1, 2), is_gguf=True),
    QuantFormat("q5_1", 32, _Q5_1, _decode_q5_1, _encode_by("Q5_1", _Q5_1, 24), _of_32(_q5_1_words, 2, 3), is_gguf=True),
    QuantFormat("iq4_nl", 32, (_D32, _NIBBLES), _decode_iq4_nl, words=_of_32(_iq4_nl_words, 1), is_gguf=True),
    QuantFormat(
        "mxfp4", 32, (QuantField("e", _BYTE, 1, 32), _NIBBLES), _decode_mxfp4, words=_of_32(_mxfp4_words, 1), is_gguf=True
    ),
    QuantFormat("q2_k", 256, (QuantField("scales", _BYTE, 16, 256), _PAIRS_OF_K, _D256, _DMIN), _decode_q2_k, is_gguf=True),
    QuantFormat("q3_k", 256, _Q3_K, _decode_q3_k, is_gguf=True),
    QuantFormat("q4_k", 256, (*_K, _NIBBLES_OF_K), _decode_q4_k, encode_q4_k, is_gguf=True),
    QuantFormat("q5_k", 256, (*_K, _BITS_OF_K, _NIBBLES_OF_K), _decode_q5_k, encode_q5_k, is_gguf=True),
    QuantFormat("q6_k", 256, _Q6_K, _decode_q6_k, encode_q6_k, is_gguf=True),
    QuantFormat("iq4_xs", 256, _IQ4_XS, _decode_iq4_xs, is_gguf=True),
)
