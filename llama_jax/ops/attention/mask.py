"""The keys and values that one layer's queries may read, as they are in memory, and which of them each query sees."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import struct

# Positions of a key that no query sees, and of a query that sees nothing.
NO_KEY, NO_QUERY = 2**31 - 1, -1


class KVView(NamedTuple):
    """Keys and values [B, K, S, H]: those of the tokens themselves or, for an attention of one's own, of a cache."""

    keys: jax.Array
    values: jax.Array


class AttentionMask(struct.PyTreeNode):
    """Where queries and keys stand. The same for all heads; a first axis of size 1 is the same for all rows.

    Attributes:
      query_positions: int32[B|1, T]; -1 for a query that sees nothing.
      key_positions: int32[B|1, S]; 2**31 - 1 for a slot that holds no key.
      query_segments, key_segments: int32[B|1, T] and int32[B|1, S], or None: a query sees the keys of its own segment only,
        as do the documents packed into a row.
      ordered: query t and key t both stand at slot t, T = S, and the positions say no more than that. What comes after a
        block of queries is then not even computed, and a kernel needs no mask. Never of a program's inputs: static.
    """

    query_positions: Any
    key_positions: Any
    query_segments: Any = None
    key_segments: Any = None
    ordered: bool = struct.field(pytree_node=False, default=False)

    @classmethod
    def whole(cls, length: int, segments: jax.Array | None = None) -> AttentionMask:
        """The causal mask of whole rows of T tokens, with the document of each: `segments` int32[B, T] or None."""
        slots = jnp.arange(length, dtype=jnp.int32)[None]
        return cls(slots, slots, segments, segments, ordered=True)

    def part(self, queries: slice, keys: slice) -> AttentionMask:
        """The same of some queries and some keys."""
        return AttentionMask(
            self.query_positions[..., queries],
            self.key_positions[..., keys],
            None if self.query_segments is None else self.query_segments[..., queries],
            None if self.key_segments is None else self.key_segments[..., keys],
        )


def visible(mask: AttentionMask, window: int | None = None) -> jax.Array:
    """bool[B|1, T, S]: the key is not after the query, not `window` or more before it, and of its segment."""
    queries, keys = mask.query_positions[..., :, None], mask.key_positions[..., None, :]
    allowed = keys <= queries
    if window is not None:
        allowed &= queries - keys < window
    if mask.query_segments is not None and mask.key_segments is not None:
        allowed &= mask.query_segments[..., :, None] == mask.key_segments[..., None, :]
    return allowed
