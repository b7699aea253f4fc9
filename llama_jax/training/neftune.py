"""NEFTune: noise on the embeddings, only in training (Jain et al. 2023)."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jaxtyping import Array, Float, Int

from llama_jax import ops
from llama_jax.errors import ConfigError
from llama_jax.model.params import LlamaParams
from llama_jax.ops.layers import Weight
from llama_jax.ops.rope_scaling import lengths_of
from llama_jax.training.batch import NextTokenBatch


class NoisyEmbedding(Weight):
    """An embedding whose lookup adds noise.

    Attributes:
      table: [V, D], the embedding: an array or a `Weight`.
      bits: uint32[B, T], the seed of each token's noise, the same on any device.
      lengths: int32[B, T], number of tokens of each token's document.
      alpha: the noise is uniform in [-a, a], with a = alpha / sqrt(length D).
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
        dim, key = embedded.shape[-1], jax.random.key(0)
        sample = lambda bits: jax.random.uniform(jax.random.fold_in(key, bits), (dim,), jnp.float32, -1, 1)
        magnitude = self.alpha / jnp.sqrt(self.lengths.astype(jnp.float32) * dim)
        noise = magnitude[..., None] * jax.vmap(jax.vmap(sample))(self.bits)
        return (embedded.astype(jnp.promote_types(embedded.dtype, jnp.float32)) + noise).astype(embedded.dtype)


def with_noise(params: LlamaParams, batch: NextTokenBatch, alpha: float) -> LlamaParams:
    """The parameters with a noisy embedding, for a forward pass over this batch.

    A tied output projection also reads `LlamaParams.embedding`: compute logits with the original parameters.

    Raises:
      ConfigError: the batch has no random numbers.
    """
    if batch.noise is None:
        raise ConfigError(f"neftune={alpha} needs random numbers; set the batch's noise, uint32[B, T + 1]")
    lengths = batch.rope_lengths
    if lengths is None:
        slots = jnp.broadcast_to(jnp.arange(batch.tokens.shape[1], dtype=jnp.int32), batch.tokens.shape)
        lengths = lengths_of(slots, positions=batch.position_ids, segment_ids=batch.segment_ids)
        lengths = jnp.broadcast_to(lengths if lengths.ndim == 2 else lengths[:, None], batch.tokens.shape)
    return params.replace(embedding=NoisyEmbedding(params.embedding, batch.noise, lengths, alpha))
