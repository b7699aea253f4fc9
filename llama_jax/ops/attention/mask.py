"""Arguments of attention: keys and values, the mask, and the properties that determine the backend."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Int

from llama_jax.ops.platform import AnyArray

# Position of a key that no query attends to, and of a query that attends to no key.
NO_KEY, NO_QUERY = 2**31 - 1, -1


class KVView(NamedTuple):
    """Keys and values [B, K, S, H] of the new tokens, or gathered from a cache for a custom attention."""

    keys: jax.Array
    values: jax.Array


class AttentionMask(struct.PyTreeNode):
    """Positions and segments, which determine the keys that a query attends to, for all heads.

    Attributes:
      query_positions: int32[B|1, T]; -1 for a query that attends to no key. An axis of size 1 is broadcast over the rows.
      key_positions: int32[B|1, S]; 2**31 - 1 for a slot without a key.
      query_segments, key_segments: int32[B|1, T] and int32[B|1, S], or None: a query attends only to keys of its own
        segment, such as a document packed into a row.
      ordered: query t and key t have position t, and T = S: the plain causal mask. Later keys are then skipped, and kernels
        need no mask array. A static field.
    """

    query_positions: Any
    key_positions: Any
    query_segments: Any = None
    key_segments: Any = None
    ordered: bool = struct.field(pytree_node=False, default=False)

    @classmethod
    def causal(cls, length: int, segments: Int[AnyArray, "B T"] | None = None) -> AttentionMask:
        """The causal mask of rows of T tokens; `segments` holds the document of each token."""
        slots = jnp.arange(length, dtype=jnp.int32)[None]
        return cls(slots, slots, segments, segments, ordered=True)

    def sliced(self, queries: slice, keys: slice) -> AttentionMask:
        """The mask of some of the queries and some of the keys."""
        return AttentionMask(
            self.query_positions[..., queries],
            self.key_positions[..., keys],
            None if self.query_segments is None else self.query_segments[..., queries],
            None if self.key_segments is None else self.key_segments[..., keys],
        )


@dataclass(frozen=True)
class HeadSharding:
    """The axes of the current mesh over which the rows of a batch and the key/value heads are sharded."""

    mesh_axes_of_rows: tuple[str, ...] = ()
    mesh_axes_of_heads: tuple[str, ...] = ()


@dataclass(frozen=True)
class AttentionShape:
    """The properties of an `attend` call that determine its backend.

    Attributes:
      queries, keys: shapes of the global arrays, [B, K, T, G, H] and [B, K, S, H].
      dtype: dtype of the queries.
      ordered, segments: `AttentionMask.ordered`, and whether the mask has segments.
      mesh: names and sizes of the axes of the current mesh if XLA partitions the program over it; empty on one device, and
        inside `jax.shard_map`.
      head_sharding: how rows and heads are sharded over the mesh, or None if unknown.
    """

    queries: tuple[int, ...]
    keys: tuple[int, ...]
    dtype: Any
    ordered: bool = True
    segments: bool = False
    mesh: Mapping[str, int] | None = None
    head_sharding: HeadSharding | None = None


@dataclass(frozen=True)
class PagedAttentionShape:
    """The properties of an `attend_paged` call that determine its backend.

    Attributes:
      queries, pages, table: shapes, [T, K, G, H], [L, P, page, 2K, H] and [R, n].
      dtype, page_dtype: dtypes of the queries and of the pages (int8 if quantized).
      sinks, chunk: as for `attend_paged`.
      devices: number of devices over which XLA partitions the program; 1 inside `jax.shard_map`. XLA cannot partition a
        kernel.
    """

    queries: tuple[int, ...]
    pages: tuple[int, ...]
    table: tuple[int, ...]
    dtype: Any
    page_dtype: Any
    sinks: int = 0
    chunk: int | None = None
    devices: int = 1


def visible(mask: AttentionMask, window: int | None = None) -> Bool[Array, "#B T S"]:
    """True where the key is not after the query, is within the window, and is in the same segment."""
    queries, keys = mask.query_positions[..., :, None], mask.key_positions[..., None, :]
    allowed = keys <= queries
    if window is not None:
        allowed &= queries - keys < window
    if mask.query_segments is not None and mask.key_segments is not None:
        allowed &= mask.query_segments[..., :, None] == mask.key_segments[..., None, :]
    return allowed
