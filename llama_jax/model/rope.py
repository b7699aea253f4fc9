"""Rotary frequencies of a model, with its scaling for longer contexts."""

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
    """Inverse frequencies, and the attention factor that multiplies cos and sin.

    They follow from the configuration alone, so that training and inference cannot disagree; computed in float64 unless the
    length is a JAX array.

    Args:
      length: of the sequence, for the kinds of scaling that depend on it ("dynamic" and "longrope"; the others are the same
        at every length): a number, or int[...] with one for each row; None for the original context.
      layer: the layer kind, in a model whose layers differ; NoPE layers get zeros.

    Returns:
      Radians per position, [H/2], and the attention factor. For an array of lengths and a scaling that depends on them
      [..., H/2]. H is here the number of rotated features.
    """
    theta, scaling = config.rope_theta, config.rope_scaling
    if layer.rope != "model":
        theta, scaling = layer.rope_theta or theta, None
    plain = ops.inverse_frequencies(config.rope_dim, theta) * (layer.rope != "none")
    if scaling is None:
        return plain.astype(np.float32), 1.0
    from llama_jax.ops.rope_scaling import SCALINGS

    frequencies, attention_factor = SCALINGS[scaling.kind](plain, theta, length, scaling)
    return frequencies.astype(np.float32), attention_factor


def scaled_frequencies(
    config: LlamaConfig, slots: Int[Array, "B T"], positions: Positions, layer: LayerConfig = LayerConfig()
) -> tuple[Frequencies, float]:
    """`rotary_frequencies` for tokens at `slots` of their rows: [half], or [B, T|1, half]."""
    lengths = positions.rope_lengths
    if config.rope_scaling is not None and lengths is None:
        from llama_jax.ops.rope_scaling import BY_LENGTH, lengths_of

        if config.rope_scaling.kind in BY_LENGTH:
            lengths = lengths_of(slots, positions.lengths, positions.position_ids, positions.segment_ids)
    frequencies, attention_factor = rotary_frequencies(config, lengths, layer)
    if frequencies.ndim == 2:  # one per row, for all its positions
        frequencies = frequencies[:, None]
    return frequencies, attention_factor
