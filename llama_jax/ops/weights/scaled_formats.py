"""The formats with one scale per row or per group of a row: int8, int4 and fp8."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from llama_jax.ops.weights.format_spec import (
    FP8,
    INT4,
    EitherArray,
    QuantField,
    QuantFormat,
    join_groups,
    pack_nibbles,
    split_groups,
    to_float32,
    unpack_int4,
)
from llama_jax.ops.weights.words import BYTE_SHIFTS, NIBBLE_SHIFTS, WordDecoder, WordValues, divided, signed

GROUPS = (128, 64, 32)  # values that share a scale, the largest group first
LARGEST_FP8 = np.float32(448)


def _decode_rows(values: EitherArray, scales: EitherArray) -> EitherArray:
    return to_float32(values) * scales[..., None]


def _decode_groups(values: EitherArray, scales: EitherArray) -> EitherArray:
    return join_groups(to_float32(unpack_int4(values)) * scales[..., None])


def _decode_with_zeros(values: EitherArray, scales: EitherArray, zeros: EitherArray) -> EitherArray:
    return join_groups((to_float32(unpack_int4(values)) - to_float32(zeros)[..., None]) * scales[..., None])


def _int8_words(parts: int, words: EitherArray, scales: EitherArray) -> WordValues:
    return WordValues(signed(divided(words, parts), BYTE_SHIFTS, 8), scales)


def _int4_words(parts: int, words: EitherArray, scales: EitherArray, zeros: EitherArray | None = None) -> WordValues:
    offsets = None if zeros is None else zeros * -scales  # -(-128) is not an int8
    return WordValues(signed(divided(join_groups(words), parts), NIBBLE_SHIFTS, 4), scales, offsets)


INT4_WORDS = WordDecoder(_int4_words, 8, (0,))


def _encode_int8(x: np.ndarray) -> tuple[np.ndarray, ...]:
    """Nearest integers; each row is scaled so that its largest absolute value is 127."""
    scales = np.abs(x).max(-1).astype(np.float32) / np.float32(127)
    return np.round(x / np.where(scales == 0, 1, scales)[..., None]).astype(np.int8), scales


def _encode_fp8(x: np.ndarray) -> tuple[np.ndarray, ...]:
    """Nearest floats; each row is scaled so that its largest absolute value is 448, the maximum of the dtype."""
    scales = np.abs(x).max(-1).astype(np.float32) / LARGEST_FP8
    return (x / np.where(scales == 0, 1, scales)[..., None]).astype(FP8), scales


def _encode_int4(group: int) -> Callable[[np.ndarray], tuple[np.ndarray, ...]]:
    def encode(x: np.ndarray) -> tuple[np.ndarray, ...]:
        """As in GGUF's Q4_0, the value with the largest absolute value becomes -8."""
        groups = split_groups(x, group)
        scales = _signed_largest(groups) / np.float32(-8)
        inverse = np.where(scales == 0, 0, 1 / np.where(scales == 0, 1, scales))
        values = np.clip(np.trunc(groups * inverse[..., None] + np.float32(8.5)), 0, 15)
        return pack_nibbles(values.astype(np.uint8) ^ 8), scales.astype(np.float32)  # ^ 8 subtracts 8 from a 4-bit integer

    return encode


def _signed_largest(groups: np.ndarray) -> np.ndarray:
    """The value with the largest absolute value in each group."""
    where = np.abs(groups).argmax(-1, keepdims=True)
    return np.take_along_axis(groups, where, -1)[..., 0]


def _named(name: str, group: int) -> str:
    return name if group == GROUPS[0] else f"{name}_{group}"


def _int4(group: int) -> QuantFormat:
    return QuantFormat(
        _named("int4", group), group, _in_groups(INT4, group), _decode_groups, _encode_int4(group), INT4_WORDS
    )


def _int4_asym(group: int) -> QuantFormat:
    """With a zero point per group, as in GPTQ and AWQ files; values and zero points are stored without their offset of 8."""
    planes = (*_in_groups(INT4, group), QuantField("zeros", np.int8, 1, group))
    return QuantFormat(_named("int4_asym", group), group, planes, _decode_with_zeros, words=INT4_WORDS)


def _fp8(group: int) -> QuantFormat:
    return QuantFormat(f"fp8_{group}", group, _in_groups(FP8, group), _decode_groups)


def _in_groups(dtype: np.dtype, group: int) -> tuple[QuantField, ...]:
    return QuantField("values", dtype, group, group, grouped=True), QuantField("scales", np.float32, 1, group)


def _in_rows(dtype: np.dtype) -> tuple[QuantField, ...]:
    return QuantField("values", dtype, 1, 1), QuantField("scales", np.float32, 0, 1)


INT8 = QuantFormat("int8", 1, _in_rows(np.dtype(np.int8)), _decode_rows, _encode_int8, WordDecoder(_int8_words, 4, (0,)))
FP8_ROWS = QuantFormat("fp8", 1, _in_rows(FP8), _decode_rows, _encode_fp8)
SCALED_FORMATS = (INT8, FP8_ROWS, *map(_int4, GROUPS), *map(_int4_asym, GROUPS), *map(_fp8, GROUPS))
