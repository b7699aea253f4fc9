"""The keys and values that one layer's queries may read, as they are in memory, and which of them each query sees."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax

from llama_jax.ops.quantized import Quantized, over_rows

# Positions of a key that no query sees, and of a query that sees nothing.
NO_KEY, NO_QUERY = 2**31 - 1, -1


class View(struct.PyTreeNode):
    """Keys and values where they are kept, so that a kernel can read them there.

    Attributes:
      keys, values: [L, B, K, S, H] of all layers, arrays or `Quantized`; or fresh ones [B, K, S, H], without `layer`.
      layer: int32[], which of the layers.
      lengths: int32[B]: slots [0, lengths) of each row hold its keys in order of position. None where that is not so, in a
        ring, or where all do, in fresh rows.
    """

    keys: Any
    values: Any
    layer: Any = None
    lengths: Any = None

    @classmethod
    def of(cls, keys: jax.Array | Quantized, values: jax.Array | Quantized) -> View:
        """Of fresh keys and values [B, K, T, H], which no cache holds."""
        return cls(keys, values)

    def read(self) -> tuple[Any, Any]:
        """Keys and values [B, K, S, H] of the layer, in the form in which they are kept."""
        if self.layer is None:
            return self.keys, self.values

        def of_layer(x: jax.Array) -> jax.Array:
            return lax.dynamic_index_in_dim(x, self.layer, keepdims=False)

        return over_rows(of_layer, self.keys), over_rows(of_layer, self.values)


class Seen(struct.PyTreeNode):
    """Where queries and keys stand. The same for all heads; a first axis of size 1 is the same for all rows.

    Attributes:
      query_positions: int32[B|1, T]; -1 for a query that sees nothing.
      key_positions: int32[B|1, S]; 2**31 - 1 for a slot that holds no key.
      query_segments, key_segments: int32[B|1, T] and int32[B|1, S], or None: a query sees the keys of its own segment only,
        as do the documents packed into a row.
      by_slot: slot s holds the key at position s, or none yet. Static too.
      ordered: query t and key t both stand at slot t, T = S, and the positions say no more than that. What comes after a
        block of queries is then not even computed, and a kernel needs no mask. Never of a program's inputs: static.
    """

    query_positions: Any
    key_positions: Any
    query_segments: Any = None
    key_segments: Any = None
    ordered: bool = struct.field(pytree_node=False, default=False)
    by_slot: bool = struct.field(pytree_node=False, default=False)

    @classmethod
    def whole(cls, length: int, segments: jax.Array | None = None) -> Seen:
        """Of whole rows of T tokens, each of which sees itself and those before it: `segments` int32[B, T] or None."""
        slots = jnp.arange(length, dtype=jnp.int32)[None]
        return cls(slots, slots, segments, segments, ordered=True)

    def part(self, queries: slice, keys: slice) -> Seen:
        """The same of some queries and some keys."""
        return Seen(
            self.query_positions[..., queries],
            self.key_positions[..., keys],
            None if self.query_segments is None else self.query_segments[..., queries],
            None if self.key_segments is None else self.key_segments[..., keys],
        )


def visible(seen: Seen, window: int | None = None) -> jax.Array:
    """bool[B|1, T, S]: the key is not after the query, not `window` or more before it, and of its segment."""
    queries, keys = seen.query_positions[..., :, None], seen.key_positions[..., None, :]
    found = keys <= queries
    if window is not None:
        found &= queries - keys < window
    if seen.query_segments is not None and seen.key_segments is not None:
        found &= seen.query_segments[..., :, None] == seen.key_segments[..., None, :]
    return found
