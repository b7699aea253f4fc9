"""Normalisation of the residual stream."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax


def rms_norm(x: jax.Array, weight: jax.Array, eps: float) -> jax.Array:
    """Divide by the root of the mean square and scale (Zhang & Sennrich 2019, equation 4).

    The mean is taken in float32 whatever the dtype of `x`: in bfloat16 a sum over D loses the small terms.

    Args:
      x: [..., D].
      weight: [D].
      eps: added to the mean square.

    Returns:
      [..., D] in the dtype of `x`.
    """
    wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    mean_square = jnp.mean(jnp.square(wide), axis=-1, keepdims=True)
    return (wide * lax.rsqrt(mean_square + eps)).astype(x.dtype) * weight.astype(x.dtype)
