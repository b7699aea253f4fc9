"""The sharding of a generation, derived from the sharding of its parameters.

The mesh axes that shard the heads of the parameters also shard the heads of the cache, those that shard the vocabulary shard
the logits, and all others shard the rows of the batch. The exception is `context`, which shards the tokens of rows when
prompts are prefilled whole (see `parallel.ring_prefill`) and is not used in decoding. So a model that `load` sharded over a
mesh generates on that mesh without further arguments.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import jax
from jax import lax
from jax.sharding import AbstractMesh, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from llama_jax.errors import MeshError
from llama_jax.model.forward_options import Sharding
from llama_jax.model.params import LlamaParams
from llama_jax.ops.attention import HeadSharding
from llama_jax.ops.platform import nondefault_device

Axes = tuple[str, ...]  # mesh axes that together shard one axis of an array


@dataclass(frozen=True)
class GenerationConstraints:
    """`Sharding.constrain` for generation over a mesh.

    Attributes:
      rows: the axes of the mesh that shard the batch.
      heads: those that shard the key/value heads.
      vocabulary: those that shard V.
      columns: those that shard the columns of the embedding, D. Without them a lookup would gather the table.
    """

    mesh: Mesh | AbstractMesh
    rows: Axes
    heads: Axes
    vocabulary: Axes
    columns: Axes

    def __call__(self, x: jax.Array, where: str) -> jax.Array:
        match where:
            case "tokens":  # [B, T], the same on all devices with columns of the embedding
                spec = P(self._lookup)
            case "embedded":  # [B, T, D], sharded like the table
                spec = P(self._lookup, None, self.columns)
            case "residual" | "sublayer_input" | "sublayer_output" | "row":  # [B, ...]
                spec = P(self.rows)
            case "logits":  # [B, V], and other arrays with one entry per token of the vocabulary
                spec = P(self.rows, self.vocabulary)
            case "cache":  # [L, P, page, 2K, H], or [L, P, page, 2K]: key and value of a head are adjacent
                spec = P(None, self.rows, None, self.heads)
            case "pages":  # the same in a server, whose rows share all pages
                spec = P(None, None, None, self.heads)
            case "replicated":  # read by the host
                spec = P()
            case _:
                raise ValueError(f"no activation of a generation is called {where!r}")
        return lax.with_sharding_constraint(x, NamedSharding(self.mesh, spec))

    @property
    def _lookup(self) -> Axes:
        """The axes that shard the rows of an embedding lookup; the columns may be sharded over others."""
        return tuple(axis for axis in self.rows if axis not in self.columns)


def sharding_of(params: LlamaParams) -> Sharding:
    """The sharding of a generation with these parameters; without constraints if they are on a single device.

    If the parameters are on a device of a non-default platform, such as a CPU next to a GPU, programs are traced under its
    mesh.
    """
    sharding = getattr(params.embedding, "sharding", None)
    if not isinstance(sharding, NamedSharding):
        device = nondefault_device(params.embedding)
        return Sharding(mesh=None if device is None else _abstract(Mesh([device], ("device",))))
    if sharding.mesh.size == 1:
        return Sharding(mesh=_abstract(sharding.mesh))
    head = params.embedding if params.lm_head is None else params.lm_head
    heads, vocabulary = _axes(params.blocks.attention.qkv, 1), _axes(head, 0)
    rows = tuple(axis for axis in sharding.mesh.axis_names if axis not in (*heads, *vocabulary, "context"))
    constraints = GenerationConstraints(sharding.mesh, rows, heads, vocabulary, _axes(params.embedding, 1))
    gate, experts = params.blocks.feed_forward.gate, None
    if params.blocks.feed_forward.router is not None:  # [L, E, F, D]
        from llama_jax.ops.moe import ExpertSharding

        experts = ExpertSharding(rows, _axes(gate, 2), _axes(gate, 3))
    head_sharding = HeadSharding(rows, heads)
    return Sharding(constraints, head_sharding=head_sharding, experts=experts, mesh=_abstract(sharding.mesh))


def _abstract(mesh: Mesh | AbstractMesh) -> AbstractMesh:
    return mesh.abstract_mesh


def check_row_shards(sharding: Sharding, batch: int) -> None:
    """Raise MeshError for rows that cannot be divided over the mesh."""
    constraints = sharding.constrain
    if not isinstance(constraints, GenerationConstraints):
        return
    shards = math.prod(constraints.mesh.shape[axis] for axis in constraints.rows)
    if batch % shards:
        raise MeshError(
            f"batch={batch} cannot be split over {'*'.join(constraints.rows)}={shards}; pass a multiple of {shards} prompts,"
            " or use a mesh with tensor parallelism only"
        )


def _axes(array: jax.Array, axis: int) -> Axes:
    """The mesh axes that shard an axis of an array."""
    assert isinstance(array.sharding, NamedSharding)
    spec = (*array.sharding.spec, *[None] * array.ndim)[axis]
    return () if spec is None else (spec,) if isinstance(spec, str) else tuple(spec)
