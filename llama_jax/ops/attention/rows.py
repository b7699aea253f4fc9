"""Attention by whole rows of scores: the fastest for short rows and for single queries, quadratic in memory."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from llama_jax.ops.attention.products import mix, scores_of
from llama_jax.ops.attention.seen import OldSeen as Seen
from llama_jax.ops.attention.seen import visible
from llama_jax.ops.cpu import keep, restore
from llama_jax.ops.linear import sum_of_outer
from llama_jax.ops.quantized import Quantized, over_rows

# Of n blocks of queries only (n + 1) / 2n of all scores are computed; each block is more code to compile.
SHORTEST_BLOCK, MOST_BLOCKS = 64, 8


@partial(jax.custom_vjp, nondiff_argnums=(4, 5, 6))
def rows(
    queries: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    seen: Seen,
    scale: float,
    window: int | None = None,
    ordered: bool = False,
) -> jax.Array:
    """Arguments and result as for `attention`; `ordered` says that query t and key t stand at position t, T = S.

    What comes after a block of queries is then not even computed.
    """
    return _forward(queries, keys, values, seen, scale, window, ordered)[0]


def _forward(
    queries: jax.Array, keys: jax.Array, values: jax.Array, seen: Seen, scale: float, window: int | None, ordered: bool
) -> tuple[jax.Array, jax.Array]:
    """What `rows` returns, and the logarithm of each softmax's denominator [*batch, T, G, 1]."""
    found = [
        _forward_block(scale, queries[..., begin:end, :, :], _first(keys, last), _first(values, last), allowed)
        for begin, end, last, allowed in _blocks(queries, keys, seen, window, ordered)
    ]
    mixed, normalizer = (jnp.concatenate(parts, axis=-3) for parts in zip(*found, strict=True))
    return mixed, normalizer


def _blocks(
    queries: jax.Array, keys: jax.Array, seen: Seen, window: int | None, ordered: bool
) -> Iterator[tuple[int, int, int, jax.Array]]:
    """Begin and end of each block of queries, how many slots they see at most, and which: bool[*batch, T, S]."""
    new, slots = queries.shape[-3], keys.shape[-2]
    blocks = min(max(new // SHORTEST_BLOCK, 1), MOST_BLOCKS) if ordered else 1
    for begin, end in itertools.pairwise(new * i // blocks for i in range(blocks + 1)):
        last = end if ordered else slots
        yield begin, end, last, visible(seen.part(slice(begin, end), slice(last)), window)


def _first(x: jax.Array | Quantized, last: int) -> jax.Array | Quantized:
    """The first slots of keys or values."""
    return over_rows(lambda x: x[..., :last, :], x)


def _forward_block(
    scale: float,
    queries: jax.Array,
    keys: jax.Array | Quantized,
    values: jax.Array | Quantized,
    allowed: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    scores = scores_of(queries, keys, allowed, scale)
    largest = jnp.max(scores, axis=-1, keepdims=True)
    largest = jnp.where(largest == -jnp.inf, 0, largest)  # a query that sees nothing: zeros and not NaN
    weights = jnp.exp(scores - largest)
    total = jnp.sum(weights, axis=-1, keepdims=True)
    # Divided here and not before the product: H numbers per query instead of S.
    mixed = mix(weights, values, queries.dtype) / jnp.where(total == 0, 1, total)
    return mixed.astype(queries.dtype), largest + jnp.log(total)


def _forward_and_kept(queries, keys, values, seen, scale, window, ordered):
    mixed, normalizer = _forward(queries, keys, values, seen, scale, window, ordered)
    return mixed, (keep((queries, keys, values, mixed)), normalizer, seen)


def _backward(scale: float, window: int | None, ordered: bool, kept: Any, of_mixed: jax.Array) -> tuple[Any, ...]:
    """The gradients from scores that are computed again, so that none are kept (Dao et al. 2022, algorithm 4)."""
    arrays, normalizer, seen = kept
    queries, keys, values, mixed = restore(arrays)
    mean = mean_of(of_mixed, mixed, normalizer.dtype)
    of_queries, of_keys, of_values = [], jnp.zeros((), normalizer.dtype), jnp.zeros((), normalizer.dtype)
    for begin, end, last, allowed in _blocks(queries, keys, seen, window, ordered):
        parts = tuple(x[..., begin:end, :, :] for x in (queries, normalizer, mean, of_mixed))
        found = gradients_of_block(scale, parts, keys[..., :last, :], values[..., :last, :], allowed)
        of_queries.append(found[0].astype(queries.dtype))
        rest = [(0, 0)] * (keys.ndim - 2) + [(0, keys.shape[-2] - last), (0, 0)]
        of_keys, of_values = of_keys + jnp.pad(found[1], rest), of_values + jnp.pad(found[2], rest)
    return jnp.concatenate(of_queries, axis=-3), of_keys.astype(keys.dtype), of_values.astype(values.dtype), None


def mean_of(of_mixed: jax.Array, mixed: jax.Array, dtype: jax.typing.DTypeLike) -> jax.Array:
    """The mean of the gradients of each query's weights, under the weights: [*batch, T, G, 1]."""
    return jnp.sum(of_mixed.astype(dtype) * mixed, axis=-1, keepdims=True)


def gradients_of_block(
    scale: float, of_queries: tuple[jax.Array, ...], keys: jax.Array, values: jax.Array, allowed: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """All of [*batch, S, T * G]: of the three products behind, only one then contracts the first axis of both.

    Args:
      of_queries: the queries, the logarithms of their softmax's denominators, the means of their weights' gradients, and
        the gradient of what was returned for them.
      allowed: bool[*batch, T, S].
    """
    queries, normalizer, mean, of_mixed = of_queries
    batch = tuple(range(keys.ndim - 2))
    last = keys.ndim - 1

    def flat(x: jax.Array) -> jax.Array:  # [*batch, T, G, ...] as [*batch, T * G, ...]
        return x.reshape(*x.shape[: last - 1], -1, *x.shape[last + 1 :])

    def product(a: jax.Array, b: jax.Array, axis: int) -> jax.Array:
        return lax.dot_general(a, b, (((last,), (axis,)), (batch, batch)), preferred_element_type=normalizer.dtype)

    rows, of_rows = flat(queries).astype(keys.dtype), flat(of_mixed).astype(values.dtype)
    allowed = jnp.repeat(allowed.swapaxes(-1, -2), queries.shape[-2], axis=-1)
    logarithms = product(keys, rows, last) * scale - flat(normalizer).swapaxes(-1, -2)
    weights = jnp.where(allowed, jnp.exp(logarithms), 0)
    of_values = product(weights.astype(values.dtype), of_rows, last - 1)
    of_weights = product(values, of_rows, last)
    of_scores = (weights * (of_weights - flat(mean).swapaxes(-1, -2))).astype(keys.dtype)
    # Scaled behind the products and not before: there are H numbers per query instead of S.
    of_keys = product(of_scores, rows, last - 1) * scale
    of_rows = (sum_of_outer(of_scores, keys) * scale).reshape(queries.shape)
    return of_rows, of_keys, of_values


rows.defvjp(_forward_and_kept, _backward)
