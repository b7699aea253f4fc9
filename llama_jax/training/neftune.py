"""Noise on embeddings, only in training (NEFTune: Jain et al. 2023)."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jaxtyping import Array, Float, Int

from llama_jax import ops
from llama_jax.errors import ConfigError
from llama_jax.model.params import Llama
from llama_jax.ops.rope_scaling import lengths_of
from llama_jax.training.batch import NextTokenBatch


class NoisyTable(struct.PyTreeNode):
    """An embedding that adds noise to the rows looked up.

    Attributes:
      table: [V, D], the embedding in any form.
      bits: uint32[B, T], the random bits for the noise of each token, the same on any device.
      lengths: int32[B, T], number of tokens of each token's document.
      alpha: noise is uniform within alpha / sqrt(length D).
    """

    table: Any
    bits: jax.Array
    lengths: jax.Array
    alpha: float = struct.field(pytree_node=False)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the table."""
        return self.table.shape

    @property
    def dtype(self) -> np.dtype:
        """The dtype of the table."""
        return self.table.dtype

    def embed(self, rows: Int[Array, "B T"]) -> Float[Array, "B T D"]:
        """Look up rows of the table, with noise."""
        embedded = ops.embed(self.table, rows)
        columns, root = embedded.shape[-1], jax.random.key(0)
        draw = lambda bits: jax.random.uniform(jax.random.fold_in(root, bits), (columns,), jnp.float32, -1, 1)
        within = self.alpha / jnp.sqrt(self.lengths.astype(jnp.float32) * columns)
        noise = within[..., None] * jax.vmap(jax.vmap(draw))(self.bits)
        return (embedded.astype(jnp.promote_types(embedded.dtype, jnp.float32)) + noise).astype(embedded.dtype)


def noisy(params: Llama, rows: NextTokenBatch, alpha: float) -> Llama:
    """The parameters with noise on the embeddings of these rows, but not on the output projection, even if it is tied.

    Raises:
      ConfigError: the rows have no random numbers.
    """
    if rows.noise is None:
        raise ConfigError(f"neftune={alpha} needs random numbers; set the batch's noise, uint32[B, T + 1]")
    lengths = rows.rope_lengths
    if lengths is None:
        places = jnp.broadcast_to(jnp.arange(rows.tokens.shape[1], dtype=jnp.int32), rows.tokens.shape)
        lengths = lengths_of(places, positions=rows.position_ids, segment_ids=rows.segment_ids)
        lengths = jnp.broadcast_to(lengths if lengths.ndim == 2 else lengths[:, None], rows.tokens.shape)
    return params.replace(embedding=NoisyTable(params.embedding, rows.noise, lengths, alpha))
