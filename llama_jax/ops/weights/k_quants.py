"""Quantization to Q4_K, Q5_K and Q6_K: the same bytes as llama.cpp's quantizer without an importance matrix.

A few candidate scales are tried for each group, and the one with the smallest weighted error is kept (ggml-org/ggml,
`ggml-quants.c`, `make_qkx2_quants` and `make_qx_quants`). All groups of a matrix are searched at once. Arrays are [size,
groups], so that sums over the first axis add one value after the other in float32, bit for bit as in llama.cpp.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from jaxtyping import Float

SUPERBLOCK = 256  # values whose scales share a scale
NEGLIGIBLE = np.float32(1e-15)  # groups whose largest value is smaller count as zero
_ONE = np.float32(1)


class _Trials(NamedTuple):
    """The candidate inverse scales: (`levels` + `first` + i * `step`) / range of the group, for i < `tries`."""

    levels: int
    first: float
    step: float
    tries: int


Q4_TRIALS = _Trials(15, -1.0, 0.1, 21)
Q5_TRIALS = _Trials(31, -0.5, 0.1, 16)
Q6_TRIALS = tuple(np.float32(32) + np.float32(0.1) * np.float32(i) for i in range(-9, 10) if i)


def encode_q4_k(x: Float[np.ndarray, "*out D"]) -> tuple[np.ndarray, ...]:
    """float32[*out, D] as the planes of `q4_k`."""
    d, dmin, scales, integers = _with_minima(x, Q4_TRIALS)
    return _shaped(x, d, dmin, scales, _low_halves(integers))


def encode_q5_k(x: Float[np.ndarray, "*out D"]) -> tuple[np.ndarray, ...]:
    """float32[*out, D] as the planes of `q5_k`."""
    d, dmin, scales, integers = _with_minima(x, Q5_TRIALS)
    bits = np.bitwise_or.reduce(integers >> 4 << np.arange(8, dtype=np.uint8)[:, None], axis=1)
    return _shaped(x, d, dmin, scales, bits, _low_halves(integers & 15))


def encode_q6_k(x: Float[np.ndarray, "*out D"]) -> tuple[np.ndarray, ...]:
    """float32[*out, D] as the planes of `q6_k`: a block has 16 8-bit scales for 16 values each, and no minima."""
    groups = np.ascontiguousarray(x, np.float32).reshape(-1, 16).T
    factors, integers = _search_symmetric(groups)
    factors = factors.reshape(-1, 16)
    largest = _at_largest(factors.T)
    is_zero = np.abs(largest) < NEGLIGIBLE
    inverse = np.float32(-128) / np.where(is_zero, _ONE, largest)
    d = np.where(is_zero, np.float32(0), _ONE / inverse).astype(np.float16)
    scales = np.minimum(np.rint(inverse[:, None] * factors), 127).astype(np.int8)
    scales[is_zero] = 0
    value_scales = (d.astype(np.float32)[:, None] * scales).reshape(-1)
    is_scaled = value_scales != 0
    nearest = np.clip(np.rint(groups / np.where(is_scaled, value_scales, _ONE)), -32, 31) + 32
    integers = np.where(is_scaled, nearest, integers).T.astype(np.uint8).reshape(-1, SUPERBLOCK)
    integers[is_zero] = 0
    quarters = integers.reshape(-1, 2, 4, 32)  # four per 128 values
    low = quarters[:, :, :2] & 15 | (quarters[:, :, 2:] & 15) << 4
    high = np.bitwise_or.reduce(quarters >> 4 << np.arange(0, 8, 2, dtype=np.uint8)[:, None], axis=2)
    return _shaped(x, low, high, scales, d)


def _with_minima(x: np.ndarray, trials: _Trials) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """For each block of 256: two float16 scales, the eight 6-bit scales and minima in 12 bytes, and the integers
    uint8[blocks, 8, 32]."""
    groups = np.ascontiguousarray(x, np.float32).reshape(-1, 32).T
    factors, minima, integers = _search(groups, trials)
    d, six = _in_six_bits(factors.reshape(-1, 8))
    dmin, six_of_minima = _in_six_bits(minima.reshape(-1, 8))
    value_scales = (d.astype(np.float32)[:, None] * six).reshape(-1)
    offset = (dmin.astype(np.float32)[:, None] * six_of_minima).reshape(-1)
    is_scaled = value_scales != 0
    nearest = np.clip(np.rint((groups + offset) / np.where(is_scaled, value_scales, _ONE)), 0, trials.levels)
    integers = np.where(is_scaled, nearest, integers).T.astype(np.uint8).reshape(-1, 8, 32)
    first, last = np.split(six, 2, axis=1)
    first_of_minima, last_of_minima = np.split(six_of_minima, 2, axis=1)
    packed = [first | last >> 4 << 6, first_of_minima | last_of_minima >> 4 << 6, last & 15 | (last_of_minima & 15) << 4]
    return d, dmin, np.concatenate(packed, axis=1), integers


def _in_six_bits(factors: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """float32[blocks, 8] as float16[blocks] times uint8[blocks, 8] below 64."""
    largest = np.maximum(factors.max(1), 0)
    inverse = np.where(largest > 0, np.float32(63) / np.where(largest > 0, largest, _ONE), np.float32(0))
    six = np.minimum(np.rint(inverse[:, None] * factors).astype(np.int32) & 255, 63)
    return (largest / np.float32(63)).astype(np.float16), six.astype(np.uint8)


def _search(x: np.ndarray, trials: _Trials) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Scales and negated minima of groups [32, groups], and the integers used to find them."""
    weights = np.sqrt(np.add.reduce(x * x) / np.float32(len(x))) + np.abs(x)
    sum_w, sum_x = np.add.reduce(weights), np.add.reduce(weights * x)
    levels = np.float32(trials.levels)
    minimum, maximum = np.minimum(x.min(0), 0), x.max(0)
    is_flat = maximum == minimum

    def integers_of(inverse: np.ndarray, minimum: np.ndarray) -> np.ndarray:
        scaled = x - minimum
        scaled *= inverse
        np.rint(scaled, out=scaled)
        return np.clip(scaled, 0, levels, out=scaled)

    def error_of(integers: np.ndarray, factor: np.ndarray, minimum: np.ndarray) -> np.ndarray:
        difference = integers * factor
        difference += minimum
        difference -= x
        difference *= difference
        difference *= weights
        return np.add.reduce(difference)

    width = np.where(is_flat, _ONE, maximum - minimum)
    inverse = levels / width
    factor = _ONE / inverse
    error = error_of(integers_of(inverse, minimum), factor, minimum)
    best = inverse, minimum  # the integers are computed with these
    for i in range(trials.tries):
        # The range starts at the best minimum so far, as in llama.cpp.
        width = np.where(is_flat, _ONE, maximum - minimum)
        inverse = (np.float32(trials.first) + np.float32(trials.step) * np.float32(i) + levels) / width
        integers = integers_of(inverse, minimum)
        weighted = weights * integers
        sum_l = np.add.reduce(weighted)
        sum_l2, sum_xl = np.add.reduce(weighted * integers), np.add.reduce(np.multiply(weighted, x, out=weighted))
        determinant = sum_w * sum_l2 - sum_l * sum_l
        usable = determinant > 0
        divisor = np.where(usable, determinant, _ONE)
        new_factor, new_minimum = (sum_w * sum_xl - sum_x * sum_l) / divisor, (sum_l2 * sum_x - sum_l * sum_xl) / divisor
        above = new_minimum > 0
        new_factor = np.where(above, sum_xl / np.where(sum_l2 > 0, sum_l2, _ONE), new_factor)
        new_minimum = np.where(above, np.float32(0), new_minimum)
        new_error = error_of(integers, new_factor, new_minimum)
        better = usable & (new_error < error)
        best = np.where(better, inverse, best[0]), np.where(better, minimum, best[1])
        error, factor = np.where(better, new_error, error), np.where(better, new_factor, factor)
        minimum = np.where(better, new_minimum, minimum)
    factor = np.where(is_flat, np.float32(0), factor)
    return factor, -minimum, np.where(is_flat, np.float32(0), integers_of(*best))


def _search_symmetric(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Scales of groups [16, groups], and the integers from 0 to 63; 32 stands for zero."""
    weights = x * x
    weighted = weights * x
    largest = _at_largest(x)
    is_zero = np.abs(largest) < NEGLIGIBLE
    divisor = np.where(is_zero, _ONE, largest)

    def integers_of(inverse: np.ndarray) -> np.ndarray:
        return np.clip(np.rint(inverse * x), -32, 31)

    def sums_of(inverse: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        integers = integers_of(inverse)
        return np.add.reduce(weighted * integers), np.add.reduce(weights * integers * integers)

    best = np.float32(-32) / divisor
    sum_xl, sum_l2 = sums_of(best)
    factor = np.where(sum_l2 > 0, sum_xl / np.where(sum_l2 > 0, sum_l2, _ONE), np.float32(0))
    reached = factor * sum_xl
    for levels in Q6_TRIALS:
        inverse = -levels / divisor
        sum_xl, sum_l2 = sums_of(inverse)
        better = (sum_l2 > 0) & (sum_xl * sum_xl > reached * sum_l2)
        new = sum_xl / np.where(sum_l2 > 0, sum_l2, _ONE)
        factor, reached = np.where(better, new, factor), np.where(better, new * sum_xl, reached)
        best = np.where(better, inverse, best)
    return np.where(is_zero, np.float32(0), factor), np.where(is_zero, np.float32(0), integers_of(best) + 32)


def _at_largest(x: np.ndarray) -> np.ndarray:
    """The entry of each column with the largest absolute value, the first if there are several."""
    return np.take_along_axis(x, np.abs(x).argmax(0)[None], 0)[0]


def _low_halves(integers: np.ndarray) -> np.ndarray:
    """uint8[blocks, 8, 32] below 16 as uint8[blocks, 4, 32]: groups 2i in the low halves, groups 2i + 1 in the high ones."""
    return integers[:, ::2] | integers[:, 1::2] << 4


def _shaped(x: np.ndarray, *planes: np.ndarray) -> tuple[np.ndarray, ...]:
    """Planes [blocks, ...] as [*out, ...], with the leading axes of the matrix `x`."""
    return tuple(np.ascontiguousarray(plane).reshape(*x.shape[:-1], -1) for plane in planes)
