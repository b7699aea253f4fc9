"""A whole generation as one compiled program."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Int32

from llama_jax.config import LlamaConfig
from llama_jax.inference.compiled_decode import MAX_PREFILL_CHUNK
from llama_jax.inference.decode import (
    STEPS_PER_CHUNK,
    DecodeSettings,
    TokenChunk,
    begin_decode,
    decode,
    init_prefill,
    planned_rope_length,
    prefill,
)
from llama_jax.model.forward_options import Positions
from llama_jax.model.params import LlamaParams
from llama_jax.ops.platform import AnyArray


def complete(
    config: LlamaConfig,
    capacity: int,
    params: LlamaParams,
    tokens: Int32[AnyArray, "B T"],
    lengths: Int32[AnyArray, " B"],
    settings: DecodeSettings,
) -> TokenChunk:
    """A whole generation as one pure function, for uses that need a single program, such as `pmap` and export.

    Args:
      capacity: capacity of a row in tokens: `compiled_decode.round_capacity(longest, new + STEPS_PER_CHUNK)`.
      tokens, lengths, settings: from `prepare_inputs`.

    Returns:
      [B, 1 + capacity].
    """
    batch, padded_length = tokens.shape
    rope_lengths = planned_rope_length(config, lengths, settings.limit)
    chunk_size = min(padded_length, MAX_PREFILL_CHUNK)
    prefilled = init_prefill(config, params, batch, capacity)
    for begin in range(0, padded_length, chunk_size):
        positions = Positions(jnp.clip(lengths - begin, 0, chunk_size), rope_lengths=rope_lengths)
        prefilled = prefill(config, params, prefilled, tokens[:, begin : begin + chunk_size], positions)
    state, first = begin_decode(config, params, prefilled, tokens, lengths, settings)
    _, _, rest = decode(config, params, state, (capacity - jnp.max(lengths)) // STEPS_PER_CHUNK, capacity // STEPS_PER_CHUNK)
    return TokenChunk(*(jnp.concatenate(parts, axis=1) for parts in zip(first, rest, strict=True)))
