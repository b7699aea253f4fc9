"""Where the arrays of a generation lie when its parameters lie on several devices: the parameters themselves say it.

The axes of the mesh that cut the heads of the parameters cut the heads of the cache, those that cut the vocabulary cut the
logits, and all others cut the rows of the batch, but for `context`, which cuts rows by tokens where they are read whole (see
`parallel.prompts`) and has no part in generating one token after the other. So a model that `load` put on a mesh generates
there, and nothing else needs to be told.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import jax
from jax import lax
from jax.sharding import AbstractMesh, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from llama_jax.errors import MeshError
from llama_jax.model.options import Layout
from llama_jax.model.params import Block, Llama
from llama_jax.ops.attention import Division, Seen, View, attend

Axes = tuple[str, ...]  # of a mesh, that cut an axis of an array together


@dataclass(frozen=True)
class Placement:
    """The `constrain` of a generation over a mesh.

    Attributes:
      rows: the axes of the mesh that cut the batch.
      heads: those that cut the key/value heads.
      vocabulary: those that cut V.
      width: those that cut the columns of the embedding, D, between which a lookup would otherwise gather the table.
    """

    mesh: Mesh | AbstractMesh
    rows: Axes
    heads: Axes
    vocabulary: Axes
    width: Axes

    def __call__(self, x: jax.Array, where: str) -> jax.Array:
        match where:
            case "tokens":  # [B, T] as the rows that all devices with a part of the embedding's columns look up
                spec = P(self._lookup)
            case "embedded":  # [B, T, D] as it lies in the table
                spec = P(self._lookup, None, self.width)
            case "residual" | "normed" | "added" | "row":  # [B, ...]
                spec = P(self.rows)
            case "logits":  # [B, V], and what else there is one of for every token of the vocabulary
                spec = P(self.rows, self.vocabulary)
            case "cache":  # [B, K, S, H], or stacked [L, B, K, S, H]
                spec = P(*(None,) * (x.ndim - 4), self.rows, self.heads)
            case "everywhere":  # what the host reads
                spec = P()
            case _:
                raise ValueError(f"no point of a generation is called {where!r}")
        return lax.with_sharding_constraint(x, NamedSharding(self.mesh, spec))

    @property
    def _lookup(self) -> Axes:
        """The axes that cut the rows of a lookup in the embedding, whose columns may lie over others."""
        return tuple(axis for axis in self.rows if axis not in self.width)


@dataclass(frozen=True)
class _DividedAttention:
    """`ops.attend`, told how rows and heads are cut; equal where that is, so that `jax.jit` knows it again."""

    division: Division

    def __call__(self, queries: jax.Array, view: View, seen: Seen, **options: Any) -> jax.Array:
        return attend(queries, view, seen, division=self.division, **options)


def layout_of(params: Llama) -> Layout:
    """How a generation with these parameters is laid out; nothing is asked for where they lie on a single device."""
    sharding = getattr(params.embedding, "sharding", None)
    if not isinstance(sharding, NamedSharding):
        return Layout()
    if sharding.mesh.size == 1:
        return Layout(mesh=_abstract(sharding.mesh))
    stacked = isinstance(params.blocks, Block)
    block = params.blocks if isinstance(params.blocks, Block) else params.blocks[0]
    head = params.embedding if params.lm_head is None else params.lm_head
    heads, vocabulary = _axes(block.attention.qkv, int(stacked)), _axes(head, 0)
    rows = tuple(axis for axis in sharding.mesh.axis_names if axis not in (*heads, *vocabulary, "context"))
    placement = Placement(sharding.mesh, rows, heads, vocabulary, _axes(params.embedding, 1))
    return Layout(placement, _DividedAttention(Division(rows, heads)), mesh=_abstract(sharding.mesh))


def _abstract(mesh: Mesh | AbstractMesh) -> AbstractMesh:
    return mesh.abstract_mesh


def check_rows(layout: Layout, batch: int) -> None:
    """Raise MeshError for rows that cannot be divided over the mesh."""
    placement = layout.constrain
    if not isinstance(placement, Placement):
        return
    ways = math.prod(placement.mesh.shape[axis] for axis in placement.rows)
    if batch % ways:
        raise MeshError(
            f"batch={batch} cannot be split over {'*'.join(placement.rows)}={ways}; give a multiple of {ways} prompts,"
            " or lay the model out over tensor alone"
        )


def _axes(array: jax.Array, axis: int) -> Axes:
    """The axes of the mesh that cut an axis of an array."""
    assert isinstance(array.sharding, NamedSharding)
    spec = (*array.sharding.spec, *[None] * array.ndim)[axis]
    return () if spec is None else (spec,) if isinstance(spec, str) else tuple(spec)
