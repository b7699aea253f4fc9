"""The gated feed-forward layer."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from llama_jax.ops.keeping import keep, restore
from llama_jax.ops.linear import Like, flat, linear, matrix_of, rows_back, rows_by, sum_of_outer


@jax.custom_vjp
def feed_forward(x: jax.Array, gate_up: jax.Array, down: jax.Array) -> jax.Array:
    """down(silu(gate(x)) * up(x)), called SwiGLU (Shazeer 2020, equation 6).

    Args:
      x: [..., D].
      gate_up: [F, 2, D], the gate's and the up projection's row of each feature side by side: one product instead of
        two, and the axis that a tensor-parallel split cuts comes first.
      down: [D, F].

    Returns:
      [..., D].
    """
    both = linear(x, gate_up)
    return _down(both[..., 0], both[..., 1], down)


def _down(gate: jax.Array, up: jax.Array, down: jax.Array) -> jax.Array:
    return linear(jax.nn.silu(gate) * up, down)


def _forward(x: jax.Array, gate_up: jax.Array, down: jax.Array) -> tuple[jax.Array, Any]:
    """By two products: of one, numbers of gate and up alternate, and to take them apart and join them is slow on a CPU.

    Only the two are kept. Their product, the largest array of a layer but them, is made again.
    """
    matrices = tuple(matrix_of(gate_up[:, i], x.dtype) for i in range(2))
    gate, up = (rows_by(x, matrix).reshape(*x.shape[:-1], -1).astype(x.dtype) for matrix in matrices)
    return _down(gate, up, down), (keep((x, gate, up)), matrices, Like(gate_up.shape, gate_up.dtype), down)


def _backward(kept: Any, of_result: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    activations, matrices, gate_up, down = kept
    x, gate, up = restore(activations)
    *of_both, of_down = jax.vjp(_down, gate, up, down)[1](of_result)
    of_x = jnp.add(*(rows_back(flat(of_one), matrix) for of_one, matrix in zip(of_both, matrices, strict=True)))
    of_gate_up = jnp.stack([sum_of_outer(flat(of_one), flat(x)) for of_one in of_both], axis=1)
    return of_x.reshape(x.shape).astype(x.dtype), gate_up.filled(of_gate_up), of_down


feed_forward.defvjp(_forward, _backward)
