"""Causal grouped-query attention."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from llama_jax.ops.linear import sum_of_outer

Segments = tuple[jax.Array, jax.Array] | None


def attention(
    queries: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    query_positions: jax.Array,
    *,
    scale: float,
    segments: tuple[jax.Array, jax.Array] | None = None,
) -> jax.Array:
    """Attend from each query to the keys at its own and earlier positions (Vaswani et al. 2017, section 3.2.1).

    The G queries of a group share their key/value head (Ainslie et al. 2023, section 2.2): K = N is multi-head, K = 1
    multi-query attention. Keys and values are never repeated in memory; the group is an axis of the product.

    Args:
      queries: [*batch, T, G, H]. The batch axes are B and K, or K alone.
      keys, values: [*batch, S, H]; slot s holds the token at position s.
      query_positions: int[*batch, T], axes of size 1 broadcast. Slots after a query's own position are not read:
        that one comparison is the causal mask and hides the empty or padded end of a cache as well.
      scale: multiplies the scores; 1 / sqrt(H) in every Llama.
      segments: int[*batch, T] of the queries and int[*batch, S] of the keys, axes of size 1 broadcast: a query sees the
        keys of its own segment only. For several documents packed into a row.

    Returns:
      [*batch, T, G, H] in the dtype of `queries`; softmax in float32.
    """
    return _attend(scale, queries, keys, values, query_positions, segments)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(
    scale: float, queries: jax.Array, keys: jax.Array, values: jax.Array, query_positions: jax.Array, segments: Segments
) -> jax.Array:
    return _forward(scale, queries, keys, values, query_positions, segments)[0]


def _forward(
    scale: float, queries: jax.Array, keys: jax.Array, values: jax.Array, query_positions: jax.Array, segments: Segments
) -> tuple[jax.Array, jax.Array]:
    """What `attention` returns, and the logarithm of each softmax's denominator [*batch, T, G, 1]."""
    precise = jnp.promote_types(queries.dtype, jnp.float32)
    batch = tuple(range(keys.ndim - 2))
    last = keys.ndim - 1
    scores = lax.dot_general(
        queries.astype(keys.dtype), keys, (((queries.ndim - 1,), (last,)), (batch, batch)), preferred_element_type=precise
    )  # [*batch, T, G, S]
    visible = _visible(keys.shape[-2], query_positions, segments)
    scores = jnp.where(visible[..., None, :], scores * scale, -jnp.inf)
    # A query sees at least its own slot, so no row is empty and the maximum is finite.
    largest = jnp.max(scores, axis=-1, keepdims=True)
    weights = jnp.exp(scores - largest)
    total = jnp.sum(weights, axis=-1, keepdims=True)
    mixed = lax.dot_general(
        weights.astype(values.dtype),
        values,
        (((queries.ndim - 1,), (last - 1,)), (batch, batch)),
        preferred_element_type=precise,
    )  # [*batch, T, G, H]
    # Divided here and not before the product: H numbers per query instead of S.
    return (mixed / total).astype(queries.dtype), largest + jnp.log(total)


def _visible(slots: int, query_positions: jax.Array, segments: Segments) -> jax.Array:
    """Which slots each query sees: bool[*batch, T, S]."""
    visible = jnp.arange(slots, dtype=query_positions.dtype) <= query_positions[..., None]
    if segments is not None:
        visible &= segments[0][..., :, None] == segments[1][..., None, :]
    return visible


def _forward_and_kept(scale, queries, keys, values, query_positions, segments):
    mixed, normalizer = _forward(scale, queries, keys, values, query_positions, segments)
    return mixed, (queries, keys, values, query_positions, segments, mixed, normalizer)


def _backward(scale: float, kept: tuple[Any, ...], of_mixed: jax.Array) -> tuple[jax.Array | None, ...]:
    """The gradients from scores that are computed again, so that none are kept (Dao et al. 2022, algorithm 4).

    All of [*batch, S, T * G]: of the three products that follow, only one then contracts the first axis of both.
    """
    queries, keys, values, query_positions, segments, mixed, normalizer = kept
    precise = normalizer.dtype
    batch = tuple(range(keys.ndim - 2))
    last = keys.ndim - 1

    def flat(x: jax.Array) -> jax.Array:  # [*batch, T, G, ...] as [*batch, T * G, ...]
        return x.reshape(*x.shape[: last - 1], -1, *x.shape[last + 1 :])

    def product(a: jax.Array, b: jax.Array, axis: int) -> jax.Array:
        return lax.dot_general(a, b, (((last,), (axis,)), (batch, batch)), preferred_element_type=precise)

    rows, of_rows = flat(queries).astype(keys.dtype), flat(of_mixed).astype(values.dtype)
    visible = _visible(keys.shape[-2], query_positions, segments).swapaxes(-1, -2)
    visible = jnp.repeat(visible, queries.shape[-2], axis=-1)
    logarithms = product(keys, rows, last) * scale - flat(normalizer).swapaxes(-1, -2)
    weights = jnp.where(visible, jnp.exp(logarithms), 0)
    of_values = product(weights.astype(values.dtype), of_rows, last - 1)
    of_weights = product(values, of_rows, last)
    mean = flat(jnp.sum(of_mixed.astype(precise) * mixed, axis=-1))[..., None, :]
    of_scores = (weights * (of_weights - mean) * scale).astype(keys.dtype)
    of_keys = product(of_scores, rows, last - 1)
    of_queries = sum_of_outer(of_scores, keys).reshape(queries.shape)
    gradients = of_queries.astype(queries.dtype), of_keys.astype(keys.dtype), of_values.astype(values.dtype)
    return *gradients, None, None


_attend.defvjp(_forward_and_kept, _backward)
