"""Rotary position embedding (RoFormer: Su et al. 2021, section 3.2), and the two orders of rows in stored projections."""

from __future__ import annotations

from typing import TypeAlias, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Float32, Float64, Int

from llama_jax.ops.platform import AnyArray, has_cpu_variant

ArrayLike = TypeVar("ArrayLike", np.ndarray, jax.Array)
Frequencies: TypeAlias = Float[AnyArray, "... half"]  # radians per position
Length: TypeAlias = int | Int[AnyArray, " ..."] | None  # the length of a sequence, or of each of several


def inverse_frequencies(head_dim: int, theta: float) -> Float64[np.ndarray, " half"]:
    """theta ** (-2 i / H) in radians per position, for the H/2 pairs of features (RoFormer, equation 15)."""
    return theta ** (-np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)


@has_cpu_variant
def rotary_table(
    positions: Int[AnyArray, "*batch"], frequencies: Frequencies, attention_factor: float = 1.0
) -> tuple[Float32[Array, "*batch half"], Float32[Array, "*batch half"]]:
    """Cosine and sine of the angles at every position, multiplied by `attention_factor`.

    Always float32: bfloat16 cannot represent an angle at position 100,000.

    Args:
      frequencies: radians per position, broadcast against `positions[..., None]`.
    """
    positions, frequencies = positions[..., None].astype(jnp.float32), jnp.asarray(frequencies, jnp.float32)
    angles = positions * lax.broadcast_to_rank(frequencies, positions.ndim)
    if attention_factor == 1.0:
        return jnp.cos(angles), jnp.sin(angles)
    return jnp.cos(angles) * attention_factor, jnp.sin(angles) * attention_factor


def apply_rotary(
    x: Float[Array, "*batch H"], cos: Float[Array, "... half"], sin: Float[Array, "... half"]
) -> Float[Array, "*batch H"]:
    """Rotate each pair of features by its angle at the token's position (half-split layout, `rotate_half` in transformers).

    Args:
      x: features i and i + H/2 are a pair, as in Hugging Face's weights. In Meta's and llama2.c's weights 2i and 2i + 1 are
        a pair; `half_from_interleaved` reorders the rows of projections, which leaves the scores unchanged.
      cos, sin: from `rotary_table`, broadcast against `x`.

    Returns:
      In the dtype of `x`.
    """
    first, second = jnp.split(x.astype(jnp.promote_types(x.dtype, cos.dtype)), 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)


def half_from_interleaved(weight: ArrayLike) -> ArrayLike:
    """Reorder the rows of a query or key projection from the interleaved to the half layout.

    Args:
      weight: [..., H, D], rows of one head on the axis before the last.

    Returns:
      The same shape: rows (0, 2, 4, ..., 1, 3, 5, ...).
    """
    *heads, head_dim, features = weight.shape
    return weight.reshape(*heads, head_dim // 2, 2, features).swapaxes(-3, -2).reshape(weight.shape)


def interleaved_from_half(weight: ArrayLike) -> ArrayLike:
    """Undo `half_from_interleaved`."""
    *heads, head_dim, features = weight.shape
    return weight.reshape(*heads, 2, head_dim // 2, features).swapaxes(-3, -2).reshape(weight.shape)
