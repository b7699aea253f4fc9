"""int8 arrays with one scale per row."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jaxtyping import Array, Float, Float32, Shaped

from llama_jax.ops.layers import project
from llama_jax.ops.platform import KernelOptions

INT8_MAX = 127  # symmetric: -128 is not used, so that a row and its negative have the same scale


class Quantized(struct.PyTreeNode):
    """Rows of H values, stored as int8 values and one scale per row.

    Attributes:
      values: int8[..., H].
      scales: float32[...].
    """

    values: Any
    scales: Any  # both: arrays, or in a tree of the same structure their shapes or partition specs

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the values."""
        return self.values.shape

    @property
    def dtype(self) -> Any:
        """The dtype of the stored values: int8."""
        return self.values.dtype


def quantize_rows(x: Float[Array, "*batch H"]) -> Quantized:
    """Symmetric per-row quantization to [-127, 127]. Rounding errors are at most 1/254 of the row's largest value."""
    scales = jnp.max(jnp.abs(x.astype(jnp.float32)), axis=-1) / INT8_MAX
    values = jnp.round(x.astype(jnp.float32) / jnp.where(scales == 0, 1, scales)[..., None])
    return Quantized(values.astype(jnp.int8), scales)


def dequantize_rows(x: Quantized, dtype: jax.typing.DTypeLike = jnp.float32) -> Float[Array, "*batch H"]:
    """The values times their scales, in `dtype`."""
    return (x.values * x.scales[..., None]).astype(dtype)


def map_planes(function: Callable[[jax.Array], jax.Array], x: Shaped[Array, "*batch H"] | Quantized) -> Any:
    """Apply a `function` that only moves rows to an array, or to the values and scales [..., 1] of a `Quantized`."""
    if not isinstance(x, Quantized):
        return function(x)
    return Quantized(function(x.values), function(x.scales[..., None])[..., 0])


def smooth_keys(
    keys: Float[Array, "B K T H"],
    *queries: Float[Array, "B K T G H"],
    bias: Float[Array, "K H"] | None = None,
    rotary_dim: int | None = None,
    kernels: KernelOptions = KernelOptions(),
) -> tuple[Float[Array, "B K T *G H"], ...]:
    """Transform queries and keys so that scores are unchanged and keys quantize better.

    The resolution of an int8 row depends on its largest value. In models whose keys have a bias (Qwen2.5), a few channels of
    the keys are 30 times as large as others. Keys are divided, and queries multiplied, by the square root of the ratio of a
    channel's bias to the mean bias, which needs no data (SmoothQuant: Xiao et al. 2022, equation 4, with the bias in place
    of the largest activation). Both channels of a RoPE pair have the same factor, because RoPE mixes them. A Hadamard matrix
    then spreads the remaining outliers, and those that come from the weights, over all channels (QuaRot: Ashkboos et al.
    2024, section 4.2).

    Args:
      keys: after RoPE.
      queries: after RoPE.
      bias: the bias of the keys, added before RoPE.
      rotary_dim: number of features that RoPE rotates, with pairs i and i + rotary_dim / 2; H by default.
      kernels: see `layers.project`.

    Returns:
      The keys, and the queries.
    """
    if bias is not None:
        factors = _outlier_factors(bias.astype(jnp.float32), rotary_dim or bias.shape[-1])
        keys = (keys.astype(factors.dtype) / factors[None, :, None]).astype(keys.dtype)
        factors = factors[None, :, None, None]
        queries = tuple((x.astype(factors.dtype) * factors).astype(x.dtype) for x in queries)
    heads = [keys[..., None, :], *queries]
    matrix = jnp.asarray(hadamard(keys.shape[-1]), keys.dtype)
    smooth = project(jnp.concatenate(heads, axis=-2), matrix, out_dtype=jnp.float32, kernels=kernels)
    ends = np.cumsum([x.shape[-2] for x in heads])[:-1].tolist()
    new_keys, *new_queries = jnp.split(smooth.astype(keys.dtype), ends, axis=-2)
    return new_keys[..., 0, :], *new_queries


def _outlier_factors(bias: jax.Array, rotary_dim: int) -> jax.Array:
    """sqrt(|bias| / mean |bias| of the head), at least 1, equal for both channels of a RoPE pair: [K, H]."""
    first, second, rest = jnp.split(bias, [rotary_dim // 2, rotary_dim], axis=-1)
    pair = jnp.hypot(first, second)
    magnitudes = jnp.concatenate([pair, pair, jnp.abs(rest)], axis=-1)
    mean = jnp.mean(magnitudes, axis=-1, keepdims=True)
    return jnp.sqrt(jnp.maximum(magnitudes / jnp.where(mean == 0, 1, mean), 1))


def hadamard(size: int) -> Float32[np.ndarray, "{size} {size}"]:
    """Sylvester's Hadamard matrix, symmetric and orthogonal; block-diagonal if the size is not a power of two."""
    block = np.ones((1, 1), np.float32)
    while size % (2 * len(block)) == 0:
        block = np.block([[block, block], [block, -block]])
    return np.kron(np.eye(size // len(block), dtype=np.float32), block / np.float32(np.sqrt(len(block))))
