"""The gated feed-forward layer."""

from __future__ import annotations

from typing import Any

import jax

from llama_jax.ops.linear import project
from llama_jax.ops.residuals import recomputed


def feed_forward(x: jax.Array, gate: Any, up: Any, down: Any) -> jax.Array:
    """down(silu(gate(x)) * up(x)), called SwiGLU (Shazeer 2020, equation 6).

    Args:
      x: [..., D].
      gate, up: [F, D], arrays or what else `project` takes.
      down: [D, F].

    Returns:
      [..., D].
    """
    gates, values = project(x, gate), project(x, up)  # [..., F]
    return _project_gated(gates, values, down)


@recomputed
def _project_gated(gates: jax.Array, values: jax.Array, down: Any) -> jax.Array:
    """silu(gates) * values is as large as either: its projection is computed with it, so that it need not be saved."""
    return project(jax.nn.silu(gates) * values, down)
