"""Normalisation of the residual stream."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from llama_jax.ops.residuals import recomputed


def rms_norm(x: jax.Array, weight: jax.Array, eps: float) -> jax.Array:
    """Divide by the root of the mean square and scale (Zhang & Sennrich 2019, equation 4).

    Computed in float32 whatever the dtype of `x`: in bfloat16 a sum over D loses the small terms.

    Args:
      x: [..., D].
      weight: [D].
      eps: added to the mean square.

    Returns:
      [..., D] in the dtype of `x`.
    """

    @recomputed
    def normalise(x: jax.Array, weight: jax.Array) -> jax.Array:
        wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
        scale = lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + eps)  # [..., 1]
        # Rounded before it is scaled, as transformers does; multiplied wide, so that the weight's gradient is summed so.
        return ((wide * scale).astype(x.dtype).astype(wide.dtype) * weight.astype(wide.dtype)).astype(x.dtype)

    return normalise(x, weight)
