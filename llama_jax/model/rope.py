"""The RoPE frequencies of a layer, with the model's scaling for longer contexts, and what follows from positions."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float32, Int

from llama_jax import ops
from llama_jax.config import LayerConfig, LlamaConfig
from llama_jax.model.forward_options import Positions
from llama_jax.ops.platform import AnyArray
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


def token_tables(
    config: LlamaConfig,
    position_ids: Int[AnyArray, "B T"],
    indices: Int[Array, "B T"],
    positions: Positions,
    attention_factor: float | None = None,
) -> tuple[Float32[Array, "B types T half"], Float32[Array, "B types T half"], Float32[Array, "B types T 1"] | None]:
    """What tokens at these positions need in each layer type: cosines, sines, and the factors of queries, or None.

    Args:
      indices: the index of each token in its row.
      attention_factor: replaces that of the model's RoPE scaling.
    """
    rotations: dict[Any, tuple[jax.Array, jax.Array]] = {}
    for layer in config.layer_kinds:
        if (layer.rope, layer.rope_theta) not in rotations:
            frequencies, factor = token_frequencies(config, indices, positions, layer)
            factor = factor if attention_factor is None else attention_factor
            rotations[layer.rope, layer.rope_theta] = ops.rotary_table(position_ids, frequencies, factor)
    tables = [rotations[layer.rope, layer.rope_theta] for layer in config.layer_kinds]
    cos, sin = (jnp.stack(arrays, axis=1) for arrays in zip(*tables, strict=True))
    if (scaling := config.query_scaling) is None:
        return cos, sin, None
    shifted = position_ids + scaling.offset if scaling.offset else position_ids
    scale = 1 + scaling.beta * jnp.log1p((shifted // scaling.context).astype(jnp.float32))
    # Without `rotated`, only the queries of layers without RoPE are scaled.
    is_scaled = jnp.asarray([scaling.rotated or layer.rope == "none" for layer in config.layer_kinds])
    return cos, sin, jnp.where(is_scaled[:, None, None], scale[:, None, :, None], 1)
