"""Quantized matrices decoded by 32-bit words of their integers, for GPUs.

XLA decodes every weight by itself: a load of one to four bytes, a shift that it loads too, and a scale. A product of one row
with an 8B model is then limited by instructions, 14 to 18 per weight on an H200, and not by memory. Read as words, integers
are loaded 16 bytes at a time, shifts are constants, and a word has one scale. The words are a bitcast inside the program, so
that stored arrays, files and shardings are the same. docs/notes/quantization.md has the counts.

The values of a word are decoded as separate arrays. So the columns of the other factor are permuted instead.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Float32, Int32, Shaped, UInt32

BITS = 32
BYTE_SHIFTS = (0, 8, 16, 24)  # shifts of the values of a word
NIBBLE_SHIFTS = (0, 4, 8, 12, 16, 20, 24, 28)
Words: TypeAlias = UInt32[Array, "*batch W"]


class WordValues(NamedTuple):
    """A matrix [*batch, D] decoded by words: value j of a word, times its scale, plus its offset.

    Attributes:
      values: J arrays float32[*batch, W], W = D / J.
      scales: [*batch, G], one per group of W / G words, or [*batch], one per row.
      offsets: [*batch, G] or None.
    """

    values: list[Float32[Array, "*batch W"]]
    scales: Float[Array, " ..."]
    offsets: Float[Array, "*batch G"] | None = None


class WordDecoder(NamedTuple):
    """Decodes a format by words.

    The words hold the values of a row in word order: J consecutive ones each. That is the order of the columns, unless a
    block of the format has two `halves`: then the values of a word alternate between the halves of its block, of `words`
    words.

    Attributes:
      decode: ``decode(parts, *planes)`` is the `WordValues` of a matrix, given its planes from `read`. Each word is divided
        into `parts` consecutive words; of their J values, only the first J / parts are used.
      numbers: J, the number of values per word.
      integers: indices of the planes that are read as words.
    """

    decode: Callable[..., WordValues]
    numbers: int
    integers: tuple[int, ...]
    halves: int = 1
    words: int = 1

    def read(self, planes: Sequence[jax.Array]) -> tuple[jax.Array, ...]:
        """The planes of a matrix, with the integers as words. XLA reads the same memory."""
        return tuple(as_words(plane) if i in self.integers else plane for i, plane in enumerate(planes))

    def in_word_order(self, x: Shaped[Array, "T D"]) -> Shaped[Array, "T D"]:
        """The same columns in word order."""
        if self.halves == 1:
            return x
        return x.reshape(len(x), -1, self.halves, self._half).swapaxes(-1, -2).reshape(x.shape)

    def in_order(self, x: Shaped[Array, "T D"]) -> Shaped[Array, "T D"]:
        """Undo `in_word_order`."""
        if self.halves == 1:
            return x
        return x.reshape(len(x), -1, self._half, self.halves).swapaxes(-1, -2).reshape(x.shape)

    @property
    def _half(self) -> int:
        """Values of half a block."""
        return self.words * self.numbers // self.halves

    def dequantize(self, planes: Sequence[jax.Array], dtype: Any) -> Shaped[Array, "N D"]:
        """The matrix, given its planes from `read`, with columns in word order.

        A GPU computes two values per thread and word, so that 16-bit values are written as words.
        """
        values, scales, offsets = self.decode(self.numbers // 2, *planes)
        two = [value * for_each_word(scales, value) for value in values[:2]]
        if offsets is not None:
            two = [value + for_each_word(offsets, value) for value in two]
        if jnp.dtype(dtype).itemsize != 2:
            return jnp.stack(two, axis=-1).astype(dtype).reshape(len(two[0]), -1)
        low, high = (lax.bitcast_convert_type(value.astype(dtype), np.uint16).astype(np.uint32) for value in two)
        return lax.bitcast_convert_type(low | (high << np.uint32(16)), dtype).reshape(len(low), -1)

    def multiply(self, x: Float[Array, "T D"], planes: Sequence[jax.Array]) -> Float32[Array, "T N"]:
        """[T, D] times the transpose of a matrix [N, D], without a matmul: one kernel decodes and adds the products."""
        values, scales, offsets = self.decode(1, *self.read(planes))
        words = self.in_word_order(x.astype(np.float32)).reshape(len(x), -1, self.numbers)

        def multiply_row(row: Float32[Array, "J W"]) -> Float32[Array, " N"]:
            total = _sum([value * columns for value, columns in zip(values, row, strict=True)])
            if scales.ndim < total.ndim:
                return jnp.sum(total, axis=-1) * scales
            total *= for_each_word(scales, total)
            if offsets is not None:
                total += for_each_word(offsets, total) * jnp.sum(row, axis=0)
            return jnp.sum(total, axis=-1)

        # The barrier keeps XLA from slicing `x` in a kernel for each row and value.
        rows = lax.optimization_barrier(words.swapaxes(1, 2))  # [T, J, W]
        return jnp.stack([multiply_row(row) for row in rows])


def as_words(plane: Shaped[Array, "*batch n"]) -> Words:
    """Integers of 4 or 8 bits as words, the first in the lowest bits."""
    values_per_word = BITS // jax.dtypes.itemsize_bits(plane.dtype)
    return lax.bitcast_convert_type(plane.reshape(*plane.shape[:-1], -1, values_per_word), np.uint32)


def divided(words: Words, parts: int) -> UInt32[Array, "*batch _"]:
    """Each word as `parts` words, each with its part in its lowest bits, and other parts above."""
    if parts == 1:
        return words
    shifted = words[..., None] >> (BITS // parts * jnp.arange(parts, dtype=np.uint32))
    return shifted.reshape(*words.shape[:-1], -1)


def signed(words: Words, shifts: tuple[int, ...], bits: int) -> list[Float32[Array, "*batch W"]]:
    """The two's complement integers of `bits` bits at each shift."""
    unused = BITS - bits
    integers = (lax.bitcast_convert_type(words << np.uint32(unused - shift), np.int32) >> unused for shift in shifts)
    return [integer.astype(np.float32) for integer in integers]


def unsigned(words: Words, shifts: tuple[int, ...], bits: int) -> list[Int32[Array, "*batch W"]]:
    """The integers of `bits` bits at each shift."""
    return [((words >> np.uint32(shift)) & np.uint32((1 << bits) - 1)).astype(np.int32) for shift in shifts]


def for_each_word(groups: Shaped[Array, " ..."], like: Shaped[Array, "*batch W"]) -> Shaped[Array, "*batch W"]:
    """An entry per group of words, or per row, as one per word; floats as float32."""
    wide = groups.astype(np.float32) if jnp.issubdtype(groups.dtype, jnp.floating) else groups
    grouped = wide.reshape(*like.shape[:-1], -1, 1)
    return jnp.broadcast_to(grouped, (*grouped.shape[:-1], like.shape[-1] // grouped.shape[-2])).reshape(like.shape)


def _sum(terms: list[jax.Array]) -> jax.Array:
    """The sum of the arrays in pairs, so that few additions wait for one another."""
    while len(terms) > 1:
        terms = [sum(terms[i + 1 : i + 2], terms[i]) for i in range(0, len(terms), 2)]
    return terms[0]
