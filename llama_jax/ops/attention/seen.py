"""What each query sees: one comparison of positions, and of segments, never an array [T, S] for whole rows."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from llama_jax.ops.quantized import Quantized

# The position of a key that no query sees, and of a query that sees nothing.
NO_KEY, NO_QUERY = 2**31 - 1, -1


class OldSeen(NamedTuple):
    """Where queries and keys stand. Axes of size 1 broadcast against the batch axes of both.

    Attributes:
      query_positions: int32[*batch, T]; -1 for a query that sees nothing.
      key_positions: int32[*batch, S]; 2**31 - 1 for a slot that holds no key.
      query_segments, key_segments: int32[*batch, T] and int32[*batch, S], or None: a query sees its own segment only.
    """

    query_positions: jax.Array
    key_positions: jax.Array
    query_segments: jax.Array | None = None
    key_segments: jax.Array | None = None

    def part(self, queries: slice, keys: slice) -> OldSeen:
        """The same of some queries and some keys."""
        return OldSeen(
            self.query_positions[..., queries],
            self.key_positions[..., keys],
            None if self.query_segments is None else self.query_segments[..., queries],
            None if self.key_segments is None else self.key_segments[..., keys],
        )


from typing import Any

from flax import struct


class Seen(struct.PyTreeNode):
    query_positions: Any
    key_positions: Any
    query_segments: Any = None
    key_segments: Any = None
    ordered: bool = struct.field(pytree_node=False, default=False)


def visible(seen: OldSeen, window: int | None) -> jax.Array:
    """bool[*batch, T, S]: the key is not after the query, not `window` or more before it, and of its segment."""
    queries, keys = seen.query_positions[..., :, None], seen.key_positions[..., None, :]
    found = keys <= queries
    if window is not None:
        found &= queries - keys < window
    if seen.query_segments is not None and seen.key_segments is not None:
        found &= seen.query_segments[..., :, None] == seen.key_segments[..., None, :]
    return found


def places(
    queries: jax.Array,
    keys: jax.Array | Quantized,
    query_positions: jax.Array | None,
    key_positions: jax.Array | None,
    segments: tuple[jax.Array, jax.Array] | None,
    lengths: jax.Array | None,
) -> OldSeen:
    """What `attention` was told, with nothing left open: slot s is position s, query t at slot t, all rows whole."""
    new, slots, ones = queries.shape[-3], keys.shape[-2], (1,) * (keys.ndim - 2)
    if key_positions is None:
        key_positions = jnp.arange(slots, dtype=jnp.int32).reshape(*ones, slots)
    if query_positions is None:
        query_positions = jnp.arange(new, dtype=jnp.int32).reshape(*ones, new)
    if lengths is not None:
        query_positions = jnp.where(jnp.arange(new) < lengths[..., None], query_positions, NO_QUERY)
    return OldSeen(query_positions, key_positions, *(segments or (None, None)))
