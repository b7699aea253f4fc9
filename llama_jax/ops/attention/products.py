"""The two matmuls of attention: queries with keys, weights with values."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from llama_jax.ops import cpu
from llama_jax.ops.cpu import for_cpu
from llama_jax.ops.quantized import Quantized


def scores_of(queries: jax.Array, keys: jax.Array | Quantized, allowed: jax.Array, scale: float) -> jax.Array:
    """[B, K, T, G, S], -inf where the query does not see the key, in float32 at least.

    Args:
      queries: [B, K, T, G, H].
      keys: [B, K, S, H].
      allowed: bool[B|1, T, S].
    """
    if isinstance(keys, Quantized):
        scores = with_integers(queries, keys.values) * keys.scales[:, :, None, None, :]
    else:
        scores = with_keys(queries.astype(keys.dtype), keys)
    return jnp.where(allowed[:, None, :, None, :], scores * scale, -jnp.inf)


def mix(weights: jax.Array, values: jax.Array | Quantized, dtype: jax.typing.DTypeLike) -> jax.Array:
    """[B, K, T, G, S] times [B, K, S, H]: [B, K, T, G, H] in the dtype of the weights.

    Args:
      dtype: of the factors of the matmul where the values are `Quantized`.
    """
    if isinstance(values, Quantized):
        weights = weights * values.scales[:, :, None, None, :].astype(weights.dtype)
        return mix(weights, values.values.astype(dtype), dtype)
    return with_values(weights.astype(values.dtype), values).astype(weights.dtype)


@for_cpu(cpu.multiply_heads)
def with_keys(queries: jax.Array, keys: jax.Array) -> jax.Array:
    """[*batch, T, G, H] times [*batch, S, H]: [*batch, T, G, S], in float32 at least."""
    if _is_one_row(keys):
        return with_keys(queries[0], keys[0])[None]
    batch = tuple(range(keys.ndim - 2))
    dimensions = ((queries.ndim - 1,), (keys.ndim - 1,)), (batch, batch)
    return lax.dot_general(queries, keys, dimensions, preferred_element_type=wide(keys))


@for_cpu(cpu.multiply_heads)
def with_values(weights: jax.Array, values: jax.Array) -> jax.Array:
    """[*batch, T, G, S] times [*batch, S, H]: [*batch, T, G, H], in float32 at least."""
    if _is_one_row(values):
        return with_values(weights[0], values[0])[None]
    batch = tuple(range(values.ndim - 2))
    dimensions = ((weights.ndim - 1,), (values.ndim - 2,)), (batch, batch)
    return lax.dot_general(weights, values, dimensions, preferred_element_type=wide(values))


@for_cpu(cpu.multiply_by_integers)
def with_integers(queries: jax.Array, keys: jax.Array) -> jax.Array:
    """`with_keys` of int8 keys, without their factors; an accelerator converts them as it reads them."""
    return with_keys(queries, keys.astype(queries.dtype))


def _is_one_row(x: jax.Array) -> bool:
    """Whether there is an axis of one row, to be left out: with it XLA for CPU and GPU copies the cache that is decoded."""
    return x.ndim == 4 and x.shape[0] == 1


def wide(x: jax.Array) -> jax.typing.DTypeLike:
    """The dtype of sums: int32 of int8, else float32 at least."""
    return jnp.int32 if x.dtype == jnp.int8 else jnp.promote_types(x.dtype, jnp.float32)
