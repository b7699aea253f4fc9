"""Causal grouped-query attention."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from llama_jax.ops.keeping import keep, restore
from llama_jax.ops.linear import sum_of_outer

# Of n blocks of queries only (n + 1) / 2n of all scores are computed; each block is more code to compile.
SHORTEST_BLOCK, MOST_BLOCKS = 64, 8
Segments = tuple[jax.Array, jax.Array] | None


def attention(
    queries: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    query_positions: jax.Array | None = None,
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
        that one comparison is the causal mask and hides the empty or padded end of a cache as well. None where query t
        is the one of slot t, T = S: what is after a block of queries is then not even computed.
      scale: multiplies the scores; 1 / sqrt(H) in every Llama.
      segments: int[*batch, T] of the queries and int[*batch, S] of the keys, axes of size 1 broadcast: a query sees the
        keys of its own segment only. For several documents packed into a row.

    Returns:
      [*batch, T, G, H] in the dtype of `queries`; softmax in float32.
    """
    return _attend(scale, queries, keys, values, query_positions, segments)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(
    scale: float,
    queries: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    query_positions: jax.Array | None,
    segments: Segments,
) -> jax.Array:
    return _forward(scale, queries, keys, values, query_positions, segments)[0]


def _forward(
    scale: float,
    queries: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    query_positions: jax.Array | None,
    segments: Segments,
) -> tuple[jax.Array, jax.Array]:
    """What `attention` returns, and the logarithm of each softmax's denominator [*batch, T, G, 1]."""
    found = [
        _forward_block(scale, queries[..., begin:end, :, :], keys[..., :seen, :], values[..., :seen, :], visible)
        for begin, end, seen, visible in _blocks(queries.shape[-3], keys, query_positions, segments)
    ]
    mixed, normalizer = (jnp.concatenate(parts, axis=-3) for parts in zip(*found, strict=True))
    return mixed, normalizer


def _blocks(
    new: int, keys: jax.Array, query_positions: jax.Array | None, segments: Segments
) -> Iterator[tuple[int, int, int, jax.Array]]:
    """Begin and end of each block of queries, how many slots they see at most, and which: bool[*batch, T, S]."""
    slots = keys.shape[-2]
    if query_positions is None:
        blocks = min(max(new // SHORTEST_BLOCK, 1), MOST_BLOCKS)
        query_positions = jnp.arange(new, dtype=jnp.int32).reshape((1,) * (keys.ndim - 2) + (new,))
    else:
        blocks = 1
    for begin, end in itertools.pairwise(new * i // blocks for i in range(blocks + 1)):
        seen = end if blocks > 1 else slots
        visible = jnp.arange(seen, dtype=query_positions.dtype) <= query_positions[..., begin:end, None]
        if segments is not None:
            visible &= segments[0][..., begin:end, None] == segments[1][..., None, :seen]
        yield begin, end, seen, visible


def _forward_block(
    scale: float, queries: jax.Array, keys: jax.Array, values: jax.Array, visible: jax.Array
) -> tuple[jax.Array, jax.Array]:
    precise = jnp.promote_types(queries.dtype, jnp.float32)
    batch = tuple(range(keys.ndim - 2))
    last = keys.ndim - 1
    scores = lax.dot_general(
        queries.astype(keys.dtype), keys, (((queries.ndim - 1,), (last,)), (batch, batch)), preferred_element_type=precise
    )  # [*batch, T, G, S]
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


def _forward_and_kept(scale, queries, keys, values, query_positions, segments):
    mixed, normalizer = _forward(scale, queries, keys, values, query_positions, segments)
    return mixed, (keep((queries, keys, values, mixed)), normalizer, query_positions, segments)


def _backward(scale: float, kept: Any, of_mixed: jax.Array) -> tuple[jax.Array | None, ...]:
    """The gradients from scores that are computed again, so that none are kept (Dao et al. 2022, algorithm 4)."""
    arrays, normalizer, query_positions, segments = kept
    queries, keys, values, mixed = restore(arrays)
    mean = jnp.sum(of_mixed.astype(normalizer.dtype) * mixed, axis=-1, keepdims=True)
    of_queries, of_keys, of_values = [], jnp.zeros((), normalizer.dtype), jnp.zeros((), normalizer.dtype)
    for begin, end, seen, visible in _blocks(queries.shape[-3], keys, query_positions, segments):
        rows = tuple(x[..., begin:end, :, :] for x in (queries, normalizer, mean, of_mixed))
        found = _backward_block(scale, rows, keys[..., :seen, :], values[..., :seen, :], visible)
        of_queries.append(found[0].astype(queries.dtype))
        rest = [(0, 0)] * (keys.ndim - 2) + [(0, keys.shape[-2] - seen), (0, 0)]
        of_keys, of_values = of_keys + jnp.pad(found[1], rest), of_values + jnp.pad(found[2], rest)
    return jnp.concatenate(of_queries, axis=-3), of_keys.astype(keys.dtype), of_values.astype(values.dtype), None, None


def _backward_block(
    scale: float, of_queries: tuple[jax.Array, ...], keys: jax.Array, values: jax.Array, visible: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """All of [*batch, S, T * G]: of the three products behind, only one then contracts the first axis of both.

    Args:
      of_queries: the queries, the logarithms of their softmax's denominators, the means of their weights' gradients, and
        the gradient of what was returned for them.
    """
    queries, normalizer, mean, of_mixed = of_queries
    batch = tuple(range(keys.ndim - 2))
    last = keys.ndim - 1

    def flat(x: jax.Array) -> jax.Array:  # [*batch, T, G, ...] as [*batch, T * G, ...]
        return x.reshape(*x.shape[: last - 1], -1, *x.shape[last + 1 :])

    def product(a: jax.Array, b: jax.Array, axis: int) -> jax.Array:
        return lax.dot_general(a, b, (((last,), (axis,)), (batch, batch)), preferred_element_type=normalizer.dtype)

    rows, of_rows = flat(queries).astype(keys.dtype), flat(of_mixed).astype(values.dtype)
    visible = jnp.repeat(visible.swapaxes(-1, -2), queries.shape[-2], axis=-1)
    logarithms = product(keys, rows, last) * scale - flat(normalizer).swapaxes(-1, -2)
    weights = jnp.where(visible, jnp.exp(logarithms), 0)
    of_values = product(weights.astype(values.dtype), of_rows, last - 1)
    of_weights = product(values, of_rows, last)
    of_scores = (weights * (of_weights - flat(mean).swapaxes(-1, -2))).astype(keys.dtype)
    # Scaled behind the products and not before: there are H numbers per query instead of S.
    of_keys = product(of_scores, rows, last - 1) * scale
    of_rows = (sum_of_outer(of_scores, keys) * scale).reshape(queries.shape)
    return of_rows, of_keys, of_values


_attend.defvjp(_forward_and_kept, _backward)
