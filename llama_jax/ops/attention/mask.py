"""Arguments of attention: keys and values, which of them each query sees, and the shapes that a backend depends on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Int

from llama_jax.ops.platform import AnyArray

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
    def whole(cls, length: int, segments: Int[AnyArray, "B T"] | None = None) -> AttentionMask:
        """The causal mask of whole rows of T tokens, with the document of each in `segments`."""
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


@dataclass(frozen=True)
class HeadSharding:
    """Over which axes of the mesh in force the rows of a batch and the key/value heads are cut."""

    mesh_axes_of_rows: tuple[str, ...] = ()
    mesh_axes_of_heads: tuple[str, ...] = ()


@dataclass(frozen=True)
class AttentionShape:
    """The shapes of an attention call, as far as the choice of a backend depends on them.

    Attributes:
      queries, keys: their shapes, [B, K, T, G, H] and [B, K, S, H], over all devices.
      dtype: of the queries.
      ordered, segments: of `AttentionMask`.
      mesh: names and sizes of the mesh in force where XLA divides the program over it; empty for one device, and for what
        runs per device already.
      head_sharding: of rows and heads over it, or None where that is not known.
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
    """The shapes of an attention call over pages, as far as the choice of a kernel depends on them.

    Attributes:
      queries, pages, table: their shapes, [T, K, G, H], [L, P, page, 2K, H] and [R, n].
      dtype, page_dtype: of the queries and of the pages, int8 where they are quantized.
      sinks, chunk: as for `attend_paged`.
      devices: over which XLA divides the program; it divides no kernel. One where a `HeadSharding` says each device's part.
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
    """The key is not after the query, not `window` or more before it, and of its segment."""
    queries, keys = mask.query_positions[..., :, None], mask.key_positions[..., None, :]
    allowed = keys <= queries
    if window is not None:
        allowed &= queries - keys < window
    if mask.query_segments is not None and mask.key_segments is not None:
        allowed &= mask.query_segments[..., :, None] == mask.key_segments[..., None, :]
    return allowed
