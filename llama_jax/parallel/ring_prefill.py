"""Prefill with a prompt's tokens divided over devices: long prompts in one pass, with ring attention."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from llama_jax.config import LlamaConfig
from llama_jax.model.cache import KVCache, cache_from
from llama_jax.model.forward_options import Positions, Sharding
from llama_jax.model.hooks import At
from llama_jax.model.logits import observe
from llama_jax.model.params import Llama
from llama_jax.parallel.mesh import MeshSizes
from llama_jax.parallel.ring_attention import (
    AXIS,
    BATCH,
    PARTS,
    join_sequence,
    positions_of,
    ring_attention,
    sequence_splitter,
)
from llama_jax.parallel.sharding import EXPERTS, batch_spec, cache_specs, constrain_over, shardings
from llama_jax.training.batch import NextTokenBatch

RingPrefill = Callable[[Llama, jax.Array, jax.Array], tuple[KVCache, jax.Array]]


def prefill_over(config: LlamaConfig, mesh: Mesh, capacity: int) -> RingPrefill:
    """A `prefill` for whole prompts with their tokens sharded over `context`; meant for `jax.jit`.

    Each device computes its share of every layer. The cache has the same content as on one device and is sharded by
    `cache_specs`: replicated along `context`, since decoding has no sequence to divide.

    Args:
      config: the configuration of the model on the mesh, see `padded_config`; `load` with a mesh returns it.
      capacity: capacity of a row of the cache in tokens.

    Returns:
      A function of parameters on the mesh; tokens int32[B, T], padded on the right; and the number of real tokens of each
      row, int32[B], at least 1. It returns the cache and the hidden state [B, D] of each row's last token, together a
      `PrefillState` for `inference.decode.begin_decode`.

    Raises:
      MeshError: rows or tokens cannot be divided over the mesh (from the returned function).
    """
    sizes, reorder = MeshSizes(**mesh.shape), sequence_splitter(mesh)
    gather = partial(join_sequence, mesh, axis=2, spec=P("tensor"))
    sharding = Sharding(constrain_over(mesh), ring_attention(mesh), experts=EXPERTS, mesh=mesh.abstract_mesh)

    def read(params: Llama, tokens: jax.Array, lengths: jax.Array) -> tuple[KVCache, jax.Array]:
        batch_spec(sizes, *tokens.shape)
        whole_row = jnp.broadcast_to(lengths[:, None], tokens.shape)
        rows = reorder(NextTokenBatch(tokens, tokens, jnp.ones(tokens.shape, bool), rope_lengths=whole_row))
        positions = Positions(position_ids=rows.position_ids, rope_lengths=rows.rope_lengths)

        def keep(value: jax.Array, at: At) -> tuple[jax.Array, jax.Array]:
            return value, gather(value.swapaxes(1, 2))

        hooks = {"keys": keep, "values": keep, "final": lambda hidden, at: (hidden, hidden)}
        _, _, kept = observe(config, params, rows.tokens, hooks, positions=positions, sharding=sharding)
        cache, hidden = cache_from(kept["keys"], kept["values"], lengths, capacity), kept["final"]
        cache = lax.with_sharding_constraint(cache, shardings(mesh, cache_specs(config, sizes, len(tokens))))
        return cache, _last_of_rows(mesh, hidden, lengths)

    return read


def _last_of_rows(mesh: Mesh, hidden: jax.Array, lengths: jax.Array) -> jax.Array:
    """The hidden state [B, D] of the last real token of split rows [n * B, T / n, D]; one device of each ring has it."""
    parts = mesh.shape[AXIS]

    def pick(hidden: jax.Array, lengths: jax.Array) -> jax.Array:
        positions = positions_of(lax.axis_index(AXIS), parts, parts * hidden.shape[1])
        is_last = positions == lengths[:, None] - 1
        last = jnp.take_along_axis(hidden, jnp.argmax(is_last, axis=1)[:, None, None], axis=1)[:, 0]
        return lax.psum(jnp.where(jnp.any(is_last, axis=1)[:, None], last, 0), AXIS)

    run = jax.shard_map(pick, mesh=mesh, in_specs=(P(PARTS), P(BATCH)), out_specs=P(BATCH), check_vma=False)
    return run(hidden, lengths)
