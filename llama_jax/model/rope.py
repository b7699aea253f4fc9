"""The RoPE frequencies of a layer, with the model's scaling for longer contexts."""

from __future__ import annotations

import numpy as np
from jaxtyping import Array, Int

from llama_jax import ops
from llama_jax.config import LayerConfig, LlamaConfig
from llama_jax.model.forward_options import Positions
from llama_jax.ops.rotary import Frequencies, Length


def rotary_frequencies(
    config: LlamaConfig, length: Length = None, layer: LayerConfig = LayerConfig()
) -> tuple[Frequencies, float]:
    """The RoPE frequencies of a layer, and the attention factor that multiplies cosines and sines.

    They depend only on the configuration and the length, so that training and inference agree. Computed in float64 unless
    the length is a JAX array.

    Args:
      length: length of the sequence, for scaling that depends on it ("dynamic" and "longrope"): a number, or int[...], such
        as one per row; None: the original context length.
      layer: the layer, in a model whose layers differ; frequencies are zeros for layers without RoPE.

    Returns:
      Radians per position, [H/2], where H is the number of rotated features, or [..., H/2] for an array of lengths and a
      scaling that depends on them; and the attention factor.
    """
    theta, scaling = config.rope_theta, config.rope_scaling
    if layer.rope != "model":
        theta, scaling = layer.rope_theta or theta, None
    unscaled = ops.inverse_frequencies(config.rope_dim, theta) * (layer.rope != "none")
    if scaling is None:
        return unscaled.astype(np.float32), 1.0
    from llama_jax.ops.rope_scaling import SCALINGS

    frequencies, attention_factor = SCALINGS[scaling.kind](unscaled, theta, length, scaling)
    return frequencies.astype(np.float32), attention_factor


def token_frequencies(
    config: LlamaConfig, cache_positions: Int[Array, "B T"], positions: Positions, layer: LayerConfig = LayerConfig()
) -> tuple[Frequencies, float]:
    """`rotary_frequencies` for tokens at these indices of their rows: [H/2], or by length [B, 1, H/2] or [B, T, H/2]."""
    lengths = positions.rope_lengths
    if config.rope_scaling is not None and lengths is None:
        from llama_jax.ops.rope_scaling import LENGTH_DEPENDENT, lengths_of

        if config.rope_scaling.kind in LENGTH_DEPENDENT:
            lengths = lengths_of(cache_positions, positions.lengths, positions.position_ids, positions.segment_ids)
    frequencies, attention_factor = rotary_frequencies(config, lengths, layer)
    if frequencies.ndim == 2:  # one per row, for all its positions
        frequencies = frequencies[:, None]
    return frequencies, attention_factor
