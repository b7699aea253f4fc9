"""The matmul with a weight that is kept in more bits than the computation has, as in mixed-precision training."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def multiply_cast(settings: tuple[bool, Any], x: jax.Array, weight: jax.Array) -> jax.Array:
    """`layers.multiply` in the dtype of `x`, [..., D] by [*out, D].

    The only reason for a derivative of its own: the weight's gradient is a sum over all tokens, and over devices, in the
    weight's dtype. JAX's own would be rounded to that of `x` before it is added up.

    Args:
      settings: whether the cast weight is saved for the backward pass, see `platform.recomputing`; the weight's dtype.
    """
    return _forward(settings, x, weight)[0]


def _forward(settings: tuple[bool, Any], x: jax.Array, weight: jax.Array) -> tuple[jax.Array, Any]:
    matrix = weight.astype(x.dtype)
    product = jnp.tensordot(x, matrix, axes=((-1,), (-1,)), preferred_element_type=x.dtype)
    return product, (x, matrix if settings[0] else weight)


def _backward(settings: tuple[bool, Any], residuals: Any, gradient: jax.Array) -> tuple[jax.Array, jax.Array]:
    x, matrix = residuals[0], residuals[1].astype(residuals[0].dtype)
    outputs = tuple(range(matrix.ndim - 1))
    of_x = jnp.tensordot(gradient, matrix, axes=(tuple(range(x.ndim - 1, gradient.ndim)), outputs))
    rows = tuple(range(x.ndim - 1))
    of_weight = jnp.tensordot(gradient, x, axes=(rows, rows), preferred_element_type=settings[1])
    return of_x, of_weight


multiply_cast.defvjp(_forward, _backward)
