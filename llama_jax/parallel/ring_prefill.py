"""Context-parallel prefill: the tokens of long prompts are sharded over devices, with ring attention."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from llama_jax.config import LlamaConfig
from llama_jax.inference.decode import planned_rope_length
from llama_jax.model.cache import KVCache, cache_from
from llama_jax.model.forward_options import Positions, Sharding
from llama_jax.model.hooks import At
from llama_jax.model.logits import logits_and_activations
from llama_jax.model.params import LlamaParams
from llama_jax.parallel.mesh import MeshSizes
from llama_jax.parallel.ring_attention import (
    BATCH_AND_CONTEXT_AXES,
    BATCH_AXES,
    CONTEXT_AXIS,
    join_sequence,
    ring_attention,
    sequence_splitter,
    zigzag_positions,
)
from llama_jax.parallel.sharding import EXPERT_SHARDING, batch_spec, cache_specs, make_constrain, shardings
from llama_jax.training.batch import NextTokenBatch

RingPrefill = Callable[[LlamaParams, jax.Array, jax.Array], tuple[KVCache, jax.Array]]


def prefill_over(config: LlamaConfig, mesh: Mesh, capacity: int, limit: int = 0) -> RingPrefill:
    """A `prefill` for whole prompts with their tokens sharded over `context`; meant for `jax.jit`.

    Each device computes its share of every layer. The cache has the same content as on one device and is sharded by
    `cache_specs`: replicated along `context`, since decoding has no sequence to divide.

    Args:
      config: the configuration of the model on the mesh, see `padded_config`; `load` with a mesh returns it.
      capacity: capacity of a row of the cache in tokens.
      limit: maximum number of tokens after each prompt, see `inference.decode.planned_rope_length`.

    Returns:
      A function of parameters on the mesh; tokens int32[B, T], padded on the right; and the number of real tokens of each
      row, int32[B], at least 1. It returns the cache and the hidden state [B, D] of each row's last token, together a
      `PrefillState` for `inference.decode.begin_decode`.

    Raises:
      MeshError: rows or tokens cannot be divided over the mesh (from the returned function).
    """
    sizes, reorder = MeshSizes(**mesh.shape), sequence_splitter(mesh)
    gather = partial(join_sequence, mesh, axis=2, spec=P("tensor"))
    sharding = Sharding(make_constrain(mesh), ring_attention(mesh), experts=EXPERT_SHARDING, mesh=mesh.abstract_mesh)

    def prefill(params: LlamaParams, tokens: jax.Array, lengths: jax.Array) -> tuple[KVCache, jax.Array]:
        batch_spec(sizes, *tokens.shape)  # raises MeshError
        rope_lengths = jnp.broadcast_to(planned_rope_length(config, lengths, limit)[:, None], tokens.shape)
        # Only the tokens and positions are used; there are no targets.
        rows = reorder(NextTokenBatch(tokens, tokens, jnp.ones(tokens.shape, bool), rope_lengths=rope_lengths))
        positions = Positions(position_ids=rows.position_ids, rope_lengths=rows.rope_lengths)

        def keep(value: jax.Array, at: At) -> tuple[jax.Array, jax.Array]:
            return value, gather(value.swapaxes(1, 2))

        hooks = {"keys": keep, "values": keep, "final": lambda hidden, at: (hidden, hidden)}
        _, _, kept = logits_and_activations(config, params, rows.tokens, hooks, positions=positions, sharding=sharding)
        cache, hidden = cache_from(kept["keys"], kept["values"], lengths, capacity), kept["final"]
        cache = lax.with_sharding_constraint(cache, shardings(mesh, cache_specs(config, sizes, len(tokens))))
        return cache, _last_of_rows(mesh, hidden, lengths)

    return prefill


def _last_of_rows(mesh: Mesh, hidden: jax.Array, lengths: jax.Array) -> jax.Array:
    """The hidden state [B, D] of the last real token of split rows [n * B, T / n, D]; one device of each ring has it."""
    parts = mesh.shape[CONTEXT_AXIS]

    def pick(hidden: jax.Array, lengths: jax.Array) -> jax.Array:
        positions = zigzag_positions(lax.axis_index(CONTEXT_AXIS), parts, parts * hidden.shape[1])
        is_last = positions == lengths[:, None] - 1
        last = jnp.take_along_axis(hidden, jnp.argmax(is_last, axis=1)[:, None, None], axis=1)[:, 0]
        return lax.psum(jnp.where(jnp.any(is_last, axis=1)[:, None], last, 0), CONTEXT_AXIS)

    run = jax.shard_map(
        pick, mesh=mesh, in_specs=(P(BATCH_AND_CONTEXT_AXES), P(BATCH_AXES)), out_specs=P(BATCH_AXES), check_vma=False
    )
    return run(hidden, lengths)
