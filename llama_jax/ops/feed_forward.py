"""The gated feed-forward layer."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from llama_jax.ops.keeping import keep, restore
from llama_jax.ops.linear import Like, flat, linear, matrix_of, rows_back, rows_by, sum_of_outer


@jax.custom_vjp
def feed_forward(x: jax.Array, gate: jax.Array, up: jax.Array, down: jax.Array) -> jax.Array:
    """down(silu(gate(x)) * up(x)), called SwiGLU (Shazeer 2020, equation 6).

    Args:
      x: [..., D].
      gate, up: [F, D].
      down: [D, F].

    Returns:
      [..., D].
    """
    return _down(linear(x, gate), linear(x, up), down)


def _down(gate: jax.Array, up: jax.Array, down: jax.Array) -> jax.Array:
    return linear(jax.nn.silu(gate) * up, down)


def _forward(x: jax.Array, gate: jax.Array, up: jax.Array, down: jax.Array) -> tuple[jax.Array, Any]:
    """Only the two products are kept. What is made of them, the largest array of a layer but them, is made again."""
    matrices = tuple(matrix_of(weight, x.dtype) for weight in (gate, up))
    gated, upped = (rows_by(x, matrix).reshape(*x.shape[:-1], -1).astype(x.dtype) for matrix in matrices)
    return _down(gated, upped, down), (keep((x, gated, upped)), matrices, Like(gate.shape, gate.dtype), down)


def _backward(kept: Any, of_result: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    activations, matrices, weight, down = kept
    x, gated, upped = restore(activations)
    *of_both, of_down = jax.vjp(_down, gated, upped, down)[1](of_result)
    of_x = jnp.add(*(rows_back(flat(of_one), matrix) for of_one, matrix in zip(of_both, matrices, strict=True)))
    of_gate, of_up = (weight.filled(sum_of_outer(flat(of_one), flat(x))) for of_one in of_both)
    return of_x.reshape(x.shape).astype(x.dtype), of_gate, of_up, of_down


feed_forward.defvjp(_forward, _backward)
