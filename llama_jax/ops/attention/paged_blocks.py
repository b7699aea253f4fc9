"""Attention over pages by blocks, in plain JAX: only the pages that some query of a block can see are read."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from llama_jax.ops.int8 import Quantized, dequantize, over_rows

MOST_QUERIES, KEYS_AT_ONCE = 64, 512  # of a block
FEW_QUERIES = 16  # of a row, so many at most, of which all rows are computed at once


class QueryBlocks(NamedTuple):
    """The new tokens of rows in blocks, each of one row and in the order of the tokens.

    Attributes:
      rows: int32[blocks].
      starts: int32[blocks], the first token of each among all T; T for blocks that are not needed.
      positions: int32[blocks], of that token in its row.
      needed: int32[], how many blocks are.
      size: tokens of a block at most; what is beyond those of the row belongs to a later block, or is padding.
    """

    rows: jax.Array
    starts: jax.Array
    positions: jax.Array
    needed: jax.Array
    size: int

    @classmethod
    def of(cls, view: Any, tokens: int, size: int) -> QueryBlocks:
        """The blocks of all T tokens: at most one that is not full for each row."""
        new = view.starts[1:] - view.starts[:-1]
        ends = jnp.cumsum(-(-new // size))
        block = jnp.arange(min(tokens, tokens // size + len(new)), dtype=jnp.int32)
        row = jnp.minimum(jnp.searchsorted(ends, block, side="right", method="compare_all"), len(new) - 1).astype(jnp.int32)
        before = (block - (ends - -(-new // size))[row]) * size
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
) -> Float[Array, "T K G H"]:
    """Arguments and result as for `attend_paged`. The softmax is made as the blocks of keys come, as in `blockwise`.

    Of keys that are seen from everywhere, the sinks, the pages are a block of their own: what lies between them and a
    window is not read.
    """
    tokens, heads, groups, width = queries.shape
    rows, entries = view.table.shape
    page = view.pages.shape[2]
    pages_at_once = min(max(1, KEYS_AT_ONCE // page), entries)
    table = jnp.pad(view.table, ((0, 0), (0, -entries % pages_at_once)))
    precise = jnp.promote_types(queries.dtype, jnp.float32)
    sink_queries = queries if sink_queries is None else sink_queries

    def attend_row(row: jax.Array, begin: jax.Array, queries: jax.Array, sink_queries: jax.Array) -> jax.Array:
        """Attention of queries [q, K, G, H] of a row, from a position on."""
        position = (begin + jnp.arange(len(queries), dtype=jnp.int32))[:, None]
        held = jnp.minimum(view.lengths[row], entries * page)

        def add_keys(
            carry: tuple[jax.Array, ...], queries: jax.Array, entry: jax.Array, count: int, seen: Any
        ) -> tuple[jax.Array, ...]:
            """With those of `count` pages from an entry of the table on, which `seen` tells from their positions."""
            largest, total, acc = carry
            chosen = lax.dynamic_slice(table, (row, entry), (1, count))[0]
            read: Any = over_rows(lambda x: x[view.layer, chosen], view.pages)
            both = dequantize(read, queries.dtype) if isinstance(read, Quantized) else read
            both = both.reshape(-1, heads, 2, width)
            key = entry * page + jnp.arange(len(both), dtype=jnp.int32)
            both = jnp.where((key < held)[:, None, None, None], both, 0)
            scores = jnp.einsum("qkgh,skh->kqgs", queries.astype(both.dtype), both[:, :, 0], preferred_element_type=precise)
            allowed = seen(key[None]) & (key < held)[None]
            scores = jnp.where(allowed[None, :, None], scores * scale, -jnp.inf)
            larger = jnp.maximum(largest, jnp.max(scores, axis=-1))
            shrink, weights = jnp.exp(largest - larger), jnp.exp(scores - larger[..., None])
            new = jnp.einsum("kqgs,skh->kqgh", weights.astype(both.dtype), both[:, :, 1], preferred_element_type=precise)
            return larger, total * shrink + jnp.sum(weights, axis=-1), acc * shrink[..., None] + new

        shape = heads, len(queries), groups
        carry: tuple[jax.Array, ...] = (
            jnp.full(shape, -1e30, precise),
            jnp.zeros(shape, precise),
            jnp.zeros((*shape, width), precise),
        )
        if sinks:
            sink_pages = min(-(-sinks // page), entries)
            carry = add_keys(carry, sink_queries, jnp.int32(0), sink_pages, lambda key: (key <= position) & (key < sinks))
        others = lambda key: seen_by(position, key, window, chunk) & (key >= sinks)
        keys = pages_at_once * page
        last = jnp.minimum(begin + len(queries), held)
        first = first_seen(begin, window, chunk) // keys
        step = lambda j, carry: add_keys(carry, queries, j * pages_at_once, pages_at_once, others)
        _, total, acc = lax.fori_loop(first, -(-last // keys), step, carry)
        return (acc / jnp.where(total == 0, 1, total)[..., None]).astype(queries.dtype).swapaxes(0, 1)

    if view.each is not None and view.each <= FEW_QUERIES and tokens == rows * view.each:
        # All rows at once, as they are decoded: a matmul for all of them instead of one for each.
        by_row = (x.reshape(rows, view.each, *x.shape[1:]) for x in (queries, sink_queries))
        out = jax.vmap(attend_row)(jnp.arange(rows, dtype=jnp.int32), view.lengths - view.each, *by_row)
        return out.reshape(queries.shape)

    blocks = QueryBlocks.of(view, tokens, min(max(1, tokens // rows), MOST_QUERIES))
    padded = [jnp.pad(x, ((0, blocks.size), (0, 0), (0, 0), (0, 0))) for x in (queries, sink_queries)]

    def attend_block(i: jax.Array, out: jax.Array) -> jax.Array:
        # Of the row's last block, tokens of the next row are computed too and then written over.
        queries_of_block = (lax.dynamic_slice_in_dim(x, blocks.starts[i], blocks.size) for x in padded)
        acc = attend_row(blocks.rows[i], blocks.positions[i], *queries_of_block)
        return lax.dynamic_update_slice_in_dim(out, acc, blocks.starts[i], 0)

    out = lax.fori_loop(0, blocks.needed, attend_block, jnp.zeros_like(padded[0]))[:tokens]
    return jnp.where((jnp.arange(tokens) < view.starts[-1])[:, None, None, None], out, 0)


def seen_by(
    query: Int[Array, " ..."], key: Int[Array, " ..."], window: int | None, chunk: int | None
) -> Bool[Array, " ..."]:
    """Whether the query at a position sees the key at another of its row; the two are broadcast."""
    allowed = key <= query
    if window is not None:
        allowed &= query - key < window
    if chunk is not None:
        allowed &= query // chunk == key // chunk
    return allowed


def first_seen(query: Int[Array, "*shape"], window: int | None, chunk: int | None) -> Int[Array, "*shape"]:
    """The first position that a query at a position sees, and at most that of any after it."""
    begin = query // chunk * chunk if chunk is not None else jnp.zeros_like(query)
    return begin if window is None else jnp.maximum(begin, query - window + 1)
