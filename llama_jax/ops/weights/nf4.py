"""bitsandbytes' 4-bit formats: one of sixteen values, times a scale per 64 weights (Dettmers et al. 2023, QLoRA).

With double quantization, the scales themselves have 8 bits: one of 256 values, times a second scale, plus an offset.
bitsandbytes shares a second scale among 256 consecutive blocks of the flattened tensor. Here it is stored with the blocks,
so that rows and columns can be permuted and sharded. The weights are the same.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from jaxtyping import Float32

from llama_jax.ops.weights.format_spec import (
    EitherArray,
    QuantField,
    QuantFormat,
    join_groups,
    looked_up,
    shifted,
    split_groups,
    to_float32,
)
from llama_jax.ops.weights.words import WordDecoder, WordValues, divided, unsigned

BLOCK = 64
HIGH_FIRST = (4, 0, 12, 8, 20, 16, 28, 24)  # shifts of the values of a 32-bit word
# The sixteen values: quantiles of a normal distribution, with zero and both ends (QLoRA, appendix E).
NF4 = np.asarray(
    [
        -1.0,
        -0.6961928009986877,
        -0.5250730514526367,
        -0.39491748809814453,
        -0.28444138169288635,
        -0.18477343022823334,
        -0.09105003625154495,
        0.0,
        0.07958029955625534,
        0.16093020141124725,
        0.24611230194568634,
        0.33791524171829224,
        0.44070982933044434,
        0.5626170039176941,
        0.7229568362236023,
        1.0,
    ],
    np.float32,
)


def dynamic_map() -> Float32[np.ndarray, 256]:
    """The 256 values of 8-bit scales: seven exponents, each with fractions in the remaining bits (Dettmers 2015, 8-bit
    approximations for parallelism in deep learning, section 2)."""
    numbers = [np.float32(0), np.float32(1)]
    tenth = float(np.float32(0.1))
    for i in range(7):
        count = 2**i
        step, places = float(np.float32(1 - tenth) / np.float32(count)), np.arange(count + 1)
        # From both ends and rounded once, as in `torch.linspace`, so that the values are equal bit for bit.
        ends = np.where(places < (count + 1) // 2, tenth + step * places, 1 - step * (count - places)).astype(np.float32)
        means = np.float32(10.0 ** (i - 6)) * ((ends[:-1] + ends[1:]) / np.float32(2))
        numbers += [*means, *-means]
    return np.sort(np.asarray(numbers, np.float32))


DYNAMIC = dynamic_map()


def _nf4_values(values: EitherArray) -> EitherArray:
    """uint8[..., D / 2] as float32[..., D / 64, 64]; the high half of a byte comes first."""
    pairs = shifted(split_groups(values, 1), (4, 0), 15)
    return split_groups(looked_up(NF4, pairs.reshape(*values.shape[:-1], -1)), BLOCK)


def _decode(values: EitherArray, factors: EitherArray) -> EitherArray:
    return join_groups(_nf4_values(values) * factors[..., None])


def _words(parts: int, words: EitherArray, factors: EitherArray) -> WordValues:
    return WordValues([looked_up(NF4, index) for index in unsigned(divided(words, parts), HIGH_FIRST, 4)], factors)


def _factors(absmax: EitherArray, nested: EitherArray, offset: EitherArray) -> EitherArray:
    return looked_up(DYNAMIC, absmax) * nested[..., None] + offset[..., None]


def _factors_of_256(absmax: EitherArray, nested: EitherArray, offset: EitherArray) -> EitherArray:
    """With a second scale for every 256 weights."""
    factors = join_groups(split_groups(looked_up(DYNAMIC, absmax), 256 // BLOCK) * to_float32(nested)[..., None])
    return factors + offset[..., None]


def _words_with(factors: Callable[..., EitherArray]) -> WordDecoder:
    """`_words` with factors that are computed from the other planes."""
    return WordDecoder(lambda parts, words, *planes: _words(parts, words, factors(*planes)), 8, (0,))


def _decode_with(factors: Callable[..., EitherArray]) -> Callable[..., EitherArray]:
    return lambda values, *planes: _decode(values, factors(*planes))


def _nearest(table: np.ndarray, x: np.ndarray) -> np.ndarray:
    """uint8: the index of the nearest entry of a sorted table; the lower index for ties."""
    return np.searchsorted((table[:-1] + table[1:]) / np.float32(2), x, side="left").astype(np.uint8)


def _encode_values(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    groups = split_groups(x, BLOCK)
    absmax = np.abs(groups).max(-1)
    scaled = groups / np.where(absmax == 0, 1, absmax)[..., None]
    pairs = split_groups(join_groups(_nearest(NF4, scaled)), 2)
    return (pairs[..., 0] << 4) | pairs[..., 1], absmax


def _encode_nf4(x: np.ndarray) -> tuple[np.ndarray, ...]:
    """As in bitsandbytes, except that offset and second scale are per row, and so do not depend on other rows."""
    values, absmax = _encode_values(x)
    offset = absmax.mean(-1, dtype=np.float32)
    rest = absmax - offset[..., None]
    nested = np.abs(rest).max(-1)
    return values, _nearest(DYNAMIC, rest / np.where(nested == 0, 1, nested)[..., None]), nested, offset


_VALUES = QuantField("values", np.uint8, 1, 2)
_DOUBLE = (_VALUES, QuantField("absmax", np.uint8, 1, BLOCK))
_OFFSET = QuantField("offset", np.float32, 0, 1)
DOUBLE = QuantFormat(
    "nf4",
    BLOCK,
    (*_DOUBLE, QuantField("nested", np.float32, 0, 1), _OFFSET),
    _decode_with(_factors),
    _encode_nf4,
    _words_with(_factors),
)
DOUBLE_256 = QuantFormat(
    "nf4_256",
    256,
    (*_DOUBLE, QuantField("nested", np.float32, 1, 256), _OFFSET),
    _decode_with(_factors_of_256),
    words=_words_with(_factors_of_256),
)
SINGLE = QuantFormat(
    "nf4_single", BLOCK, (_VALUES, QuantField("absmax", np.float32, 1, BLOCK)), _decode, words=WordDecoder(_words, 8, (0,))
)
NF4_FORMATS = (DOUBLE, DOUBLE_256, SINGLE)
