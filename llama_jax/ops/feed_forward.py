"""The gated feed-forward layer."""

from __future__ import annotations

import jax

from llama_jax.ops.linear import linear


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
    return linear(jax.nn.silu(both[..., 0]) * both[..., 1], down)
