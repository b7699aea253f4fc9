"""Arrays of 8-bit integers with a factor for each row."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jaxtyping import Array, Float, Float32, Shaped

from llama_jax.ops.layers import project

LARGEST_INTEGER = 127  # -128 is left out, so that a row and its negative have the same factor


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
        """The shape of the numbers."""
        return self.values.shape

    @property
    def dtype(self) -> Any:
        """The dtype in which the numbers are kept: int8."""
        return self.values.dtype


def quantize(x: Float[Array, "*batch H"]) -> Quantized:
    """The nearest integers, those of each row scaled so that its largest is 127: at most 1/254 of that one wrong."""
    scales = jnp.max(jnp.abs(x.astype(jnp.float32)), axis=-1) / LARGEST_INTEGER
    values = jnp.round(x.astype(jnp.float32) / jnp.where(scales == 0, 1, scales)[..., None])
    return Quantized(values.astype(jnp.int8), scales)


def dequantize(x: Quantized, dtype: jax.typing.DTypeLike = jnp.float32) -> Float[Array, "*batch H"]:
    """The numbers themselves."""
    return (x.values * x.scales[..., None]).astype(dtype)


def over_rows(change: Callable[[jax.Array], jax.Array], x: Shaped[Array, "*batch H"] | Quantized) -> Any:
    """`change` of an array that moves whole rows; of a `Quantized` one the factors, as [..., 1], move alike."""
    if not isinstance(x, Quantized):
        return change(x)
    return Quantized(change(x.values), change(x.scales[..., None])[..., 0])


def smooth_keys(
    keys: Float[Array, "B K T H"],
    *queries: Float[Array, "B K T G H"],
    bias: Float[Array, "K H"] | None = None,
    rotated: int | None = None,
) -> tuple[Float[Array, "B K T *G H"], ...]:
    """Keys and queries whose products are the same, and whose keys `quantize` rounds better.

    A row of 8 bits is as coarse as its largest number. In models with a bias of keys (Qwen2.5) a few channels have keys that
    are 30 times as large as the others'. They are divided by the square root of how far their bias stands out, which is
    known without any data (SmoothQuant: Xiao et al. 2022, equation 4, with the bias for the largest activation); a pair of
    rotated channels alike, so that it does not matter that RoPE mixes them. A Hadamard matrix then spreads over all channels
    what is left, and outliers that come from the weights (QuaRot: Ashkboos et al. 2024, section 4.2). Nothing is kept beside
    the cache, and keys are read as before.

    Args:
      keys: after RoPE.
      bias: that of the keys before RoPE.
      rotated: features that RoPE turns, of which i and i + rotated / 2 are a pair; H by default.

    Returns:
      The keys, and the queries.
    """
    if bias is not None:
        factors = _outliers_of(bias.astype(jnp.float32), rotated or bias.shape[-1])
        keys = (keys.astype(factors.dtype) / factors[None, :, None]).astype(keys.dtype)
        factors = factors[None, :, None, None]
        queries = tuple((x.astype(factors.dtype) * factors).astype(x.dtype) for x in queries)
    every = [keys[..., None, :], *queries]
    rotated_rows = project(
        jnp.concatenate(every, axis=-2), jnp.asarray(hadamard(keys.shape[-1]), keys.dtype), out_dtype=jnp.float32
    )
    ends = np.cumsum([x.shape[-2] for x in every])[:-1].tolist()
    first, *rest = jnp.split(rotated_rows.astype(keys.dtype), ends, axis=-2)
    return first[..., 0, :], *rest


def _outliers_of(bias: jax.Array, rotated: int) -> jax.Array:
    """The square root of how many times the mean of its head a channel's bias is, at least 1: [K, H]."""
    first, second, rest = jnp.split(bias, [rotated // 2, rotated], axis=-1)
    pair = jnp.hypot(first, second)
    sizes = jnp.concatenate([pair, pair, jnp.abs(rest)], axis=-1)
    mean = jnp.mean(sizes, axis=-1, keepdims=True)
    return jnp.sqrt(jnp.maximum(sizes / jnp.where(mean == 0, 1, mean), 1))


def hadamard(size: int) -> Float32[np.ndarray, "{size} {size}"]:
    """A symmetric orthogonal matrix, whose entries are as even as can be: Sylvester's matrix, for a size
    that is no power of two along the diagonal."""
    block = np.ones((1, 1), np.float32)
    while size % (2 * len(block)) == 0:
        block = np.block([[block, block], [block, -block]])
    return np.kron(np.eye(size // len(block), dtype=np.float32), block / np.float32(np.sqrt(len(block))))
