"""Attention to keys and values in pages, of which a table says which belong to a row (Kwon et al. 2023, section 4)."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from llama_jax.ops import cpu
from llama_jax.ops.attention.attend import announce
from llama_jax.ops.attention.paged_blocks import attend_by_blocks, seen_by
from llama_jax.ops.attention.paged_kernels import PagedProblem, ragged, refusal_of_ragged, refusal_of_triton, triton
from llama_jax.ops.attention.view import NO_QUERY
from llama_jax.ops.cpu import for_cpu
from llama_jax.ops.platform import lowering_platform, mesh_in_force
from llama_jax.ops.quantized import Quantized, dequantize, over_rows, quantize


class PagedView(struct.PyTreeNode):
    """Keys and values in pages, of which a table says which belong to a row.

    Attributes:
      pages: [L, P, page, 2K, H], of each token the key and the value of each head side by side: the key of head k at 2k, its
        value at 2k + 1. An array or `Quantized`.
      layer: int32[], whose pages are read.
      table: int32[R, n], the pages of each row in order. Entries beyond its length are not used; any valid number will do.
      lengths: int32[R], tokens of each row, the new ones included.
      starts: int32[R + 1]: row r's new tokens, its last ones, are [starts[r], starts[r + 1]) of all T. A row without new
        tokens has an empty range. Tokens from starts[R] on are padding.
    """

    pages: Any
    layer: Any
    table: Any
    lengths: Any
    starts: Any

    def tokens(self, count: int) -> tuple[jax.Array, jax.Array]:
        """The row and the position in it of each of the T new tokens, int32[T] each; padding has the last row, and -1."""
        rows, token = len(self.lengths), jnp.arange(count, dtype=jnp.int32)
        row = jnp.searchsorted(self.starts[1:], token, side="right", method="compare_all").astype(jnp.int32)
        own = jnp.minimum(row, rows - 1)
        return own, jnp.where(row < rows, self.lengths[own] - self.starts[own + 1] + token, NO_QUERY)


def write_paged(pages: Any, keys: jax.Array, values: jax.Array, view: PagedView) -> Any:
    """Put the new tokens' keys and values into their slots; in place where `pages` are donated or a loop carries them.

    Args:
      pages: [L, P, page, 2K, H], an array or `Quantized`.
      keys, values: [T, K, H]. Padding is dropped.
      view: where they belong; its own pages are not read.

    Returns:
      The pages with them.
    """
    layers, count, page, *_ = pages.shape
    row, position = view.tokens(len(keys))
    place = (view.layer * count + view.table[row, position // page]) * page + position % page
    place = jnp.where(position == NO_QUERY, layers * count * page, place)  # beyond the end
    both = jnp.stack([keys, values], axis=2).reshape(len(keys), -1, keys.shape[-1])
    new = quantize(both) if isinstance(pages, Quantized) else both.astype(pages.dtype)
    return jax.tree.map(lambda pages, new: _put_rows(pages, new, place), pages, new)


@for_cpu(cpu.put_rows)
def _put_rows(pages: jax.Array, rows: jax.Array, places: jax.Array) -> jax.Array:
    """[L, P, page, ...] with rows [T, ...] at int32[T] places; those beyond the end are dropped."""
    return pages.reshape(-1, *pages.shape[3:]).at[places].set(rows, mode="drop").reshape(pages.shape)


@for_cpu(cpu.attend_paged)
def attend_paged(
    queries: jax.Array,
    view: PagedView,
    *,
    scale: float,
    window: int | None = None,
    sinks: int = 0,
    chunk: int | None = None,
) -> jax.Array:
    """Attend from each new token to the keys of its row at its own and earlier positions.

    Args:
      queries: [T, K, G, H].
      view: which hold the new tokens' own keys and values already.
      scale: multiplies the scores.
      window: a query sees only keys less than this many positions before it, and those of the first `sinks` positions.
      chunk: a query sees only keys of its own chunk, so many positions each.

    Returns:
      [T, K, G, H] in the dtype of `queries`; softmax in float32 at least. Padding has finite numbers.
    """
    problem = PagedProblem(
        queries.shape,
        view.pages.shape,
        view.table.shape,
        queries.dtype,
        view.pages.dtype,
        sinks,
        chunk,
        math.prod((mesh_in_force() or {}).values()),
    )
    name, why = choose_paged(lowering_platform(), problem)
    announce(name, why)
    if name == "ragged":
        return ragged(queries, view, scale=scale, window=window)
    if name == "triton":
        return triton(queries, view, scale=scale, window=window, sinks=sinks, chunk=chunk)
    return attend_by_blocks(queries, view, scale=scale, window=window, sinks=sinks, chunk=chunk)


def choose_paged(platform: str, problem: PagedProblem) -> tuple[str, str]:
    """The way to compute attention over pages on a platform, "ragged", "triton" or "paged blocks", and the reason."""
    name, refuse = ("triton", refusal_of_triton) if platform == "gpu" else ("ragged", refusal_of_ragged)
    refusal = refuse(platform, problem)
    return (name, f"on {platform}") if refusal is None else ("paged blocks", refusal)


def paged_reference(
    queries: jax.Array,
    view: PagedView,
    *,
    scale: float,
    window: int | None = None,
    sinks: int = 0,
    chunk: int | None = None,
) -> jax.Array:
    """`attend_paged` as it is defined, of every token with all slots of its row: the oracle of the other ways."""
    precise = jnp.promote_types(queries.dtype, jnp.float32)
    row, position = view.tokens(len(queries))
    gathered: Any = over_rows(lambda x: x[view.layer, view.table[row]], view.pages)  # [T, n, page, 2K, H]
    dense = dequantize(gathered, precise) if isinstance(gathered, Quantized) else gathered.astype(precise)
    slots = dense.reshape(len(queries), -1, *dense.shape[3:])
    allowed = seen_by(position[:, None], jnp.arange(slots.shape[1])[None], window, sinks, chunk)  # [T, S]
    keys, values = (jnp.where(allowed[..., None, None], slots[:, :, i::2], 0) for i in (0, 1))
    scores = jnp.einsum("tkgh,tskh->tkgs", queries.astype(precise), keys) * scale
    scores = jnp.where(allowed[:, None, None], scores, jnp.finfo(precise).min)
    weights = jnp.where(allowed[:, None, None], jax.nn.softmax(scores, axis=-1), 0)
    return jnp.einsum("tkgs,tskh->tkgh", weights, values).astype(queries.dtype)
