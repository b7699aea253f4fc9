"""The gated feed-forward layer."""

from __future__ import annotations

from typing import Any

import jax

from llama_jax.ops.keeping import keep, restore
from llama_jax.ops.linear import linear


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


def _halves(x: jax.Array, gate_up: jax.Array) -> tuple[jax.Array, jax.Array]:
    return linear(x, gate_up[:, 0]), linear(x, gate_up[:, 1])


def _down(gate: jax.Array, up: jax.Array, down: jax.Array) -> jax.Array:
    return linear(jax.nn.silu(gate) * up, down)


def _forward(x: jax.Array, gate_up: jax.Array, down: jax.Array) -> tuple[jax.Array, Any]:
    gate, up = _halves(x, gate_up)
    return _down(gate, up, down), (keep((x, gate, up)), gate_up, down)


def _backward(kept: Any, of_result: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """By two products: of one, numbers of gate and up alternate, and to take them apart and join them is slow on a CPU.

    Only the two are kept. Their product, the largest array of a layer but them, is made again.
    """
    activations, gate_up, down = kept
    x, gate, up = restore(activations)
    of_gate, of_up, of_down = jax.vjp(_down, gate, up, down)[1](of_result)
    of_x, of_gate_up = jax.vjp(_halves, x, gate_up)[1]((of_gate, of_up))
    return of_x, of_gate_up, of_down


feed_forward.defvjp(_forward, _backward)
