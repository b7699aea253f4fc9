"""The two products of attention: queries with keys, weights with values."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

from llama_jax.ops.quantized import Quantized, quantize

Product = Callable[[jax.Array, jax.Array], jax.Array]


def scores_of(queries: jax.Array, keys: jax.Array | Quantized, allowed: jax.Array, scale: float) -> jax.Array:
    """[*batch, T, G, S], -inf where the query does not see the key, in float32 at least.

    Args:
      queries: [*batch, T, G, H].
      keys: [*batch, S, H].
      allowed: bool[*batch, T, S].
    """
    wide = jnp.promote_types(queries.dtype, jnp.float32)
    if isinstance(keys, Quantized):
        whole = partial(_converted, product=_with_keys, wide=wide)
        scores = lax.platform_dependent(queries, keys.values, cpu=partial(_whole_numbers, wide=wide), default=whole)
        scores = scores * keys.scales[..., None, None, :]
    else:
        scores = _product(queries.astype(keys.dtype), keys, _with_keys, wide)
    return jnp.where(allowed[..., None, :], scores * scale, -jnp.inf)


def mix(weights: jax.Array, values: jax.Array | Quantized, dtype: jax.typing.DTypeLike) -> jax.Array:
    """[*batch, T, G, S] times [*batch, S, H]: [*batch, T, G, H] in the dtype of the weights.

    Args:
      dtype: of the factors of the product where the values are `Quantized`.
    """
    if isinstance(values, Quantized):
        weights = weights * values.scales[..., None, None, :].astype(weights.dtype)
        return mix(weights, values.values.astype(dtype), dtype)
    return _product(weights.astype(values.dtype), values, _with_values, weights.dtype)


def _with_keys(a: jax.Array, b: jax.Array, wide: jax.typing.DTypeLike) -> jax.Array:
    """[*batch, rows, H] times [*batch, S, H]."""
    batch = tuple(range(b.ndim - 2))
    return lax.dot_general(a, b, (((a.ndim - 1,), (b.ndim - 1,)), (batch, batch)), preferred_element_type=wide)


def _with_values(a: jax.Array, b: jax.Array, wide: jax.typing.DTypeLike) -> jax.Array:
    """[*batch, rows, S] times [*batch, S, H]."""
    batch = tuple(range(b.ndim - 2))
    return lax.dot_general(a, b, (((a.ndim - 1,), (b.ndim - 2,)), (batch, batch)), preferred_element_type=wide)


def _product(a: jax.Array, b: jax.Array, product: Callable[..., jax.Array], wide: jax.typing.DTypeLike) -> jax.Array:
    """A product of [*batch, T, G, ...]; on a CPU with a second row where there is one of short numbers.

    XLA for CPU has kernels for 16-bit and 8-bit products from two rows on; for one row it converts the whole cache.
    """
    *_, new, groups, _ = a.shape
    plain = partial(product, wide=wide)
    if new * groups > 1 or a.dtype.itemsize > 2:
        return plain(a, b)

    def padded(a: jax.Array, b: jax.Array) -> jax.Array:
        rows = a.reshape(*a.shape[:-3], 1, a.shape[-1])
        found = plain(jnp.pad(rows, [(0, 0)] * (rows.ndim - 2) + [(0, 1), (0, 0)]), b)
        return found[..., :1, :].reshape(*a.shape[:-1], found.shape[-1])

    return lax.platform_dependent(a, b, cpu=padded, default=plain)


def _converted(
    queries: jax.Array, values: jax.Array, *, product: Callable[..., jax.Array], wide: jax.typing.DTypeLike
) -> jax.Array:
    return product(queries, values.astype(queries.dtype), wide)


def _whole_numbers(queries: jax.Array, values: jax.Array, *, wide: jax.typing.DTypeLike) -> jax.Array:
    """On a CPU the queries become whole numbers too: keys converted to float32 would be written before they are read."""
    short = quantize(queries)
    return _product(short.values, values, _with_keys, jnp.int32).astype(wide) * short.scales[..., None].astype(wide)
