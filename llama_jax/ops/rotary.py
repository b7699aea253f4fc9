"""Rotary position embedding (RoFormer: Su et al. 2021, section 3.2)."""

from __future__ import annotations

from typing import Literal, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

Frequencies: TypeAlias = np.ndarray | jax.Array


def inverse_frequencies(head_dim: int, theta: float) -> np.ndarray:
    """theta ** (-2 i / H) in radians per position, for the H/2 pairs of features: float64[H/2] (RoFormer, equation 15)."""
    return theta ** (-np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)


def rotary_table(
    positions: jax.Array, frequencies: Frequencies, attention_factor: float = 1.0
) -> tuple[jax.Array, jax.Array]:
    """Cosine and sine of every position's angles, multiplied by `attention_factor`.

    Args:
      positions: int[...].
      frequencies: [H/2], radians per position; or [..., H/2], broadcast against the positions.

    Returns:
      cos, sin: float32[..., H/2]. Always float32: an angle at position 100,000 has no digits left in bfloat16.
    """
    angles = positions[..., None].astype(jnp.float32) * jnp.asarray(frequencies, jnp.float32)
    if attention_factor == 1.0:
        return jnp.cos(angles), jnp.sin(angles)
    return jnp.cos(angles) * attention_factor, jnp.sin(angles) * attention_factor


def apply_rotary(
    x: jax.Array, cos: jax.Array, sin: jax.Array, *, layout: Literal["half", "interleaved"] = "half"
) -> jax.Array:
    """Turn each pair of features by its position's angle.

    Args:
      x: [..., H].
      cos, sin: [..., H/2], broadcast against `x` on the leading axes.
      layout: which features form pair i: "half" takes (i, i + H/2), as Hugging Face stores its weights and as this
        library keeps them; "interleaved" takes (2i, 2i + 1), as Meta's and llama2.c's files do. The two give the same
        attention scores when the rows of the query and key projections are reordered by `half_from_interleaved`.

    Returns:
      [..., H] in the dtype of `x`.
    """
    wide = x.astype(jnp.promote_types(x.dtype, cos.dtype))
    if layout == "half":
        first, second = jnp.split(wide, 2, axis=-1)
    else:
        first, second = wide[..., 0::2], wide[..., 1::2]
    turned = first * cos - second * sin, second * cos + first * sin
    if layout == "half":
        return jnp.concatenate(turned, axis=-1).astype(x.dtype)
    return jnp.stack(turned, axis=-1).reshape(x.shape).astype(x.dtype)
