"""Attention to a window and to the first tokens of the text, its sinks."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from llama_jax.ops.attention.attend import announce
from llama_jax.ops.attention.blockwise import forward_part, merge
from llama_jax.ops.attention.checks import check_shapes
from llama_jax.ops.attention.view import NO_KEY, Seen, View


def attend_with_sinks(
    queries: jax.Array,
    sink_queries: jax.Array,
    view: View,
    seen: Seen,
    *,
    sinks: int,
    scale: float,
    window: int | None = None,
) -> jax.Array:
    """Attention to a window and to the first tokens of the text (Xiao et al. 2023, section 3.2). Not for training.

    By blocks, on every platform. Arguments and result as for `attend`, and

    Args:
      sink_queries: [B, K, T, G, H], the queries as the sinks are to see them: turned for a position within the cache.
      sinks: slots at the front, which hold the positions before `sinks`.
    """
    keys, values = view.read()
    check_shapes(queries, keys, seen, window)
    announce("blockwise", "with sinks")
    first = seen.key_positions < sinks  # also of a cache that is not a ring

    def of(
        seen: Seen, queries: jax.Array, chosen: jax.Array, last: int | None, window: int | None
    ) -> tuple[jax.Array, jax.Array]:
        part = seen.replace(key_positions=jnp.where(chosen, seen.key_positions, NO_KEY)).part(slice(None), slice(last))
        return forward_part(queries, keys[:, :, :last], values[:, :, :last], part, scale=scale, window=window)

    from_everywhere = seen.replace(query_segments=None, key_segments=None)
    mixed, _ = merge(of(from_everywhere, sink_queries, first, sinks, None), of(seen, queries, ~first, None, window))
    return mixed.astype(queries.dtype)
