"""Several feed-forward layers, of which a router chooses some for each token."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from llama_jax.ops.layers import feed_forward, project


def experts(
    x: jax.Array, router: jax.Array, gate: jax.Array, up: jax.Array, down: jax.Array, *, per_token: int
) -> jax.Array:
    """The sum of the chosen experts, each a gated feed-forward (Jiang et al. 2024, section 2.1).

    Weighted by a softmax over the scores of those that are chosen. All experts are computed for all tokens, one after the
    other, and what was not chosen counts nothing: E / per_token times the products that are needed.

    Args:
      x: [..., D].
      router: [E, D].
      gate, up: [E, F, D].
      down: [E, D, F].
      per_token: how many of the E are chosen.

    Returns:
      [..., D].
    """
    scores = project(x, router, out_dtype=jnp.promote_types(x.dtype, jnp.float32))  # [..., E]
    highest, chosen = lax.top_k(scores, per_token)  # [..., per_token]
    shares = jax.nn.softmax(highest, axis=-1).astype(x.dtype)
    spread = jnp.sum(shares[..., None] * jax.nn.one_hot(chosen, len(router), dtype=x.dtype), axis=-2)  # [..., E]

    def add(total: jax.Array, expert: tuple[jax.Array, ...]) -> tuple[jax.Array, None]:
        share, gate, up, down = expert
        return total + share[..., None] * feed_forward(x, gate, up, down), None

    total, _ = lax.scan(add, jnp.zeros_like(x), (jnp.moveaxis(spread, -1, 0), gate, up, down))
    return total
