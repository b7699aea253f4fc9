"""Normalisation of the residual stream."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from llama_jax.ops.keeping import keep, restore


@partial(jax.custom_vjp, nondiff_argnums=(2,))
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
    normed, _ = _normed(x, eps)
    return normed.astype(x.dtype) * weight.astype(x.dtype)


def _normed(x: jax.Array, eps: float) -> tuple[jax.Array, jax.Array]:
    """`x` over its root mean square, and one over that root, in float32."""
    wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    scale = lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + eps)
    return wide * scale, scale


def _backward(eps: float, kept: Any, of_result: jax.Array) -> tuple[jax.Array, jax.Array]:
    """From `x` alone: to keep what was made of it, in float32, costs more than to make it again. Sums are in float32."""
    x, weight = restore(kept[0]), kept[1]
    normed, scale = _normed(x, eps)
    of_result = of_result.astype(normed.dtype)
    of_weight = jnp.sum(of_result * normed, axis=tuple(range(x.ndim - 1)))
    of_normed = of_result * weight.astype(normed.dtype)
    of_x = scale * (of_normed - normed * jnp.mean(of_normed * normed, axis=-1, keepdims=True))
    return of_x.astype(x.dtype), of_weight.astype(weight.dtype)


rms_norm.defvjp(lambda x, weight, eps: (rms_norm(x, weight, eps), (keep(x), weight)), _backward)
