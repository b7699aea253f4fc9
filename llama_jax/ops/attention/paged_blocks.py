"""Paged attention in blocks of queries and keys, in plain JAX. It reads only pages that queries of the block attend to."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from llama_jax.ops.int8 import Quantized, dequantize_rows, map_planes

MAX_QUERIES_PER_BLOCK, KEYS_PER_BLOCK = 64, 512
EXACT_KEYS_PER_BLOCK = 128  # in exact programs, whatever the number of keys
MAX_VMAP_QUERIES = 16  # with at most this many queries per row, all rows are computed in one vmap


class QueryBlocks(NamedTuple):
    """The new tokens in blocks of consecutive tokens of one row.

    Attributes:
      rows: int32[blocks], the row of each block.
      starts: int32[blocks], the index of each block's first token among all T; T for unused blocks.
      positions: int32[blocks], the position of that token in its row.
      used: int32[], the number of blocks that contain tokens.
      size: tokens per block. The last block of a row is followed by tokens of a later block, or by padding.
    """

    rows: jax.Array
    starts: jax.Array
    positions: jax.Array
    used: jax.Array
    size: int

    @classmethod
    def of(cls, view: Any, tokens: int, size: int) -> QueryBlocks:
        """The blocks of all T tokens; only the last block of a row may be partly filled."""
        new = view.starts[1:] - view.starts[:-1]  # int32[R], new tokens of each row
        row_blocks = -(-new // size)
        ends = jnp.cumsum(row_blocks)
        block = jnp.arange(min(tokens, tokens // size + len(new)), dtype=jnp.int32)
        row = jnp.minimum(jnp.searchsorted(ends, block, side="right", method="compare_all"), len(new) - 1).astype(jnp.int32)
        before = (block - (ends - row_blocks)[row]) * size  # new tokens of the row before the block
        starts = jnp.where(block < ends[-1], view.starts[row] + before, tokens).astype(jnp.int32)
        return cls(row, starts, view.lengths[row] - new[row] + before, ends[-1], size)


def attend_by_blocks(
    queries: Float[Array, "T K G H"],
    view: Any,
    *,
    scale: float,
    window: int | None = None,
    chunk: int | None = None,
    sinks: int = 0,
    sink_queries: Float[Array, "T K G H"] | None = None,
    is_exact: bool = False,
) -> Float[Array, "T K G H"]:
    """`attend_paged`, with an online softmax over blocks of keys, as in `blockwise` (FlashAttention).

    The pages of the sinks are one block, so that pages between the sinks and the window are not read.
    """
    tokens, heads, groups, head_dim = queries.shape
    rows, entries = view.table.shape
    page_size = view.pages.shape[2]
    # Exact sums do not depend on the capacity of the cache.
    pages_per_block = (
        max(1, EXACT_KEYS_PER_BLOCK // page_size) if is_exact else min(max(1, KEYS_PER_BLOCK // page_size), entries)
    )
    sink_pages = -(-sinks // page_size) if is_exact else min(-(-sinks // page_size), entries)
    table = jnp.pad(view.table, ((0, 0), (0, max(-entries % pages_per_block, sink_pages - entries))))
    acc_dtype = jnp.promote_types(queries.dtype, jnp.float32)
    sink_queries = queries if sink_queries is None else sink_queries

    def attend_row(row: jax.Array, begin: jax.Array, queries: jax.Array, sink_queries: jax.Array) -> jax.Array:
        """Attention from queries [q, K, G, H] of a row at consecutive positions, starting at `begin`."""
        position = (begin + jnp.arange(len(queries), dtype=jnp.int32))[:, None]
        stored = jnp.minimum(view.lengths[row], entries * page_size)  # tokens of the row in the pages

        def add_keys(
            carry: tuple[jax.Array, ...], queries: jax.Array, entry: jax.Array, count: int, is_allowed: Any
        ) -> tuple[jax.Array, ...]:
            """Accumulate `count` pages starting at table entry `entry`; `is_allowed(key positions)` is the mask."""
            running_max, running_sum, acc = carry  # [K, q, G], [K, q, G], [K, q, G, H]
            pages = lax.dynamic_slice(table, (row, entry), (1, count))[0]
            gathered: Any = map_planes(lambda x: x[view.layer, pages], view.pages)
            keys_values = dequantize_rows(gathered, queries.dtype) if isinstance(gathered, Quantized) else gathered
            keys_values = keys_values.reshape(-1, heads, 2, head_dim)
            key = entry * page_size + jnp.arange(len(keys_values), dtype=jnp.int32)
            keys_values = jnp.where((key < stored)[:, None, None, None], keys_values, 0)
            keys, values = keys_values[:, :, 0], keys_values[:, :, 1]
            scores = jnp.einsum("qkgh,skh->kqgs", queries.astype(keys.dtype), keys, preferred_element_type=acc_dtype)
            allowed = is_allowed(key[None]) & (key < stored)[None]
            scores = jnp.where(allowed[None, :, None], scores * scale, -jnp.inf)
            new_max = jnp.maximum(running_max, jnp.max(scores, axis=-1))
            correction, weights = jnp.exp(running_max - new_max), jnp.exp(scores - new_max[..., None])
            weighted = jnp.einsum("kqgs,skh->kqgh", weights.astype(values.dtype), values, preferred_element_type=acc_dtype)
            return new_max, running_sum * correction + jnp.sum(weights, axis=-1), acc * correction[..., None] + weighted

        shape = heads, len(queries), groups
        carry: tuple[jax.Array, ...] = (
            jnp.full(shape, -1e30, acc_dtype),
            jnp.zeros(shape, acc_dtype),
            jnp.zeros((*shape, head_dim), acc_dtype),
        )
        if sinks:
            carry = add_keys(carry, sink_queries, jnp.int32(0), sink_pages, lambda key: (key <= position) & (key < sinks))
        is_allowed = lambda key: is_visible(position, key, window, chunk) & (key >= sinks)
        block_size = pages_per_block * page_size
        end = jnp.minimum(begin + len(queries), stored)
        first_block = first_visible(begin, window, chunk) // block_size
        add_block = lambda j, carry: add_keys(carry, queries, j * pages_per_block, pages_per_block, is_allowed)
        _, running_sum, acc = lax.fori_loop(first_block, -(-end // block_size), add_block, carry)
        return (acc / jnp.where(running_sum == 0, 1, running_sum)[..., None]).astype(queries.dtype).swapaxes(0, 1)

    if view.tokens_per_row is not None and view.tokens_per_row <= MAX_VMAP_QUERIES and tokens == rows * view.tokens_per_row:
        # All rows at once, for example in decoding: one batched matmul instead of one matmul per row.
        by_row = (x.reshape(rows, view.tokens_per_row, *x.shape[1:]) for x in (queries, sink_queries))
        out = jax.vmap(attend_row)(jnp.arange(rows, dtype=jnp.int32), view.lengths - view.tokens_per_row, *by_row)
        return out.reshape(queries.shape)

    blocks = QueryBlocks.of(view, tokens, min(max(1, tokens // rows), MAX_QUERIES_PER_BLOCK))
    padded = [jnp.pad(x, ((0, blocks.size), (0, 0), (0, 0), (0, 0))) for x in (queries, sink_queries)]

    def attend_block(i: jax.Array, out: jax.Array) -> jax.Array:
        # The last block of a row may contain queries of the next row too; the next block overwrites their results.
        block_queries = (lax.dynamic_slice_in_dim(x, blocks.starts[i], blocks.size) for x in padded)
        acc = attend_row(blocks.rows[i], blocks.positions[i], *block_queries)
        return lax.dynamic_update_slice_in_dim(out, acc, blocks.starts[i], 0)

    out = lax.fori_loop(0, blocks.used, attend_block, jnp.zeros_like(padded[0]))[:tokens]
    return jnp.where((jnp.arange(tokens) < view.starts[-1])[:, None, None, None], out, 0)


def is_visible(
    query: Int[Array, " ..."], key: Int[Array, " ..."], window: int | None, chunk: int | None
) -> Bool[Array, " ..."]:
    """Whether a query position attends to a key position in the same row; the two are broadcast."""
    allowed = key <= query
    if window is not None:
        allowed &= query - key < window
    if chunk is not None:
        allowed &= query // chunk == key // chunk
    return allowed


def first_visible(query: Int[Array, "*shape"], window: int | None, chunk: int | None) -> Int[Array, "*shape"]:
    """The first key position that a query position attends to; monotone in the query."""
    begin = query // chunk * chunk if chunk is not None else jnp.zeros_like(query)
    return begin if window is None else jnp.maximum(begin, query - window + 1)
