"""Arrays of 8-bit integers with a factor for each row."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

MOST = 127  # -128 is left out, so that a row and its negative have the same factor


class Quantized(struct.PyTreeNode):
    """Rows of H numbers, each row integers times one factor.

    Attributes:
      values: int8[..., H].
      scales: float32[...].
    """

    values: Any
    scales: Any  # each an array, or what stands for one in a tree of the same form

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the numbers."""
        return self.values.shape

    @property
    def ndim(self) -> int:
        """Of the numbers."""
        return self.values.ndim

    @property
    def dtype(self) -> Any:
        """Of the numbers as they are kept: int8."""
        return self.values.dtype

    def __getitem__(self, rows: Any) -> Quantized:
        """Some of the rows: an index of the axes before the last."""
        return Quantized(self.values[rows], self.scales[rows])


def quantize(x: jax.Array) -> Quantized:
    """The nearest integers, those of each row scaled so that its largest is 127: at most 1/254 of that one wrong."""
    scales = jnp.max(jnp.abs(x.astype(jnp.float32)), axis=-1) / MOST
    values = jnp.round(x.astype(jnp.float32) / jnp.where(scales == 0, 1, scales)[..., None])
    return Quantized(values.astype(jnp.int8), scales)


def dequantize(x: Quantized, dtype: jax.typing.DTypeLike = jnp.float32) -> jax.Array:
    """The numbers themselves."""
    return (x.values * x.scales[..., None]).astype(dtype)


def over_rows(change: Callable[..., jax.Array], *arrays: jax.Array | Quantized) -> Any:
    """`change` of arrays [..., H] that moves whole rows; for `Quantized` ones their factors, as [..., 1], move alike."""
    quantized = [x for x in arrays if isinstance(x, Quantized)]
    if not quantized:
        return change(*arrays)
    values, scales = change(*(x.values for x in quantized)), change(*(x.scales[..., None] for x in quantized))
    return Quantized(values, scales[..., 0])
