"""Attention by whole rows of scores: the fastest for short rows and for single queries, quadratic in memory."""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from llama_jax.ops.attention.blockwise import LOWEST, MIXED
from llama_jax.ops.attention.products import mix, scores_of
from llama_jax.ops.attention.view import Seen, visible
from llama_jax.ops.quantized import Quantized, over_rows

# Of n blocks of queries only (n + 1) / 2n of all scores are computed; each block is more code to compile.
SHORTEST_BLOCK, MOST_BLOCKS = 64, 8
TOTAL = "total"  # the name of the softmaxes' denominators


def rows(
    queries: jax.Array,
    keys: jax.Array | Quantized,
    values: jax.Array | Quantized,
    seen: Seen,
    scale: float,
    window: int | None = None,
) -> jax.Array:
    """Arguments and result as for `attend`. Plain mathematics, which JAX differentiates in every way it knows.

    For the backward pass the mixture and the softmaxes' denominators are saved, and the scores computed again (Dao et al.
    2022, algorithm 4). By JAX's own derivative: for 8 rows of 256 tokens, 6 heads of 48, float32 on a CPU, forward and
    backward take 33 ms where a derivative by hand took 42 (with 3 queries per head 29 and 26).
    """

    def run(queries: jax.Array, keys: jax.Array | Quantized, values: jax.Array | Quantized, seen: Seen) -> jax.Array:
        found = []
        for own, slots in _blocks(queries.shape[2], keys.shape[2], seen.ordered, window):
            allowed = visible(seen.part(own, slots), window)
            found.append(_of_block(queries[:, :, own], _cut(keys, slots), _cut(values, slots), allowed, scale))
        return jnp.concatenate(found, axis=2)

    saved = jax.checkpoint_policies.save_only_these_names(MIXED, TOTAL)
    return jax.checkpoint(run, policy=saved)(queries, keys, values, seen)


def _blocks(new: int, slots: int, ordered: bool, window: int | None) -> list[tuple[slice, slice]]:
    """The queries of each block, and the slots that they see at most."""
    if not ordered:
        return [(slice(new), slice(slots))]
    blocks = min(max(new // SHORTEST_BLOCK, 1), MOST_BLOCKS)
    ends = itertools.pairwise(new * i // blocks for i in range(blocks + 1))
    return [(slice(begin, end), slice(0 if window is None else max(begin - window + 1, 0), end)) for begin, end in ends]


def _cut(x: jax.Array | Quantized, slots: slice) -> jax.Array | Quantized:
    return over_rows(lambda x: x[:, :, slots], x)


def _of_block(
    queries: jax.Array, keys: jax.Array | Quantized, values: jax.Array | Quantized, allowed: jax.Array, scale: float
) -> jax.Array:
    scores = scores_of(queries, keys, allowed, scale)  # [B, K, T, G, S]
    # Of a query that sees nothing all scores are -inf: weights of zero and not NaN.
    largest = lax.stop_gradient(jnp.maximum(jnp.max(scores, axis=-1, keepdims=True), LOWEST))
    weights = jnp.exp(scores - largest)
    total = checkpoint_name(jnp.sum(weights, axis=-1, keepdims=True), TOTAL)
    total = jnp.where(total == 0, 1, total)
    if queries.shape[2] == 1:  # one kernel less on a GPU
        return mix(weights / total, values, queries.dtype).astype(queries.dtype)
    # Divided here and not before the matmul: H numbers per query instead of S.
    mixed = checkpoint_name(mix(weights, values, queries.dtype), MIXED)  # [B, K, T, G, H]
    return (mixed / total).astype(queries.dtype)
