"""Attention as it is written in the papers: the oracle of every other backend."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from llama_jax.ops.attention.mask import AttentionMask, visible


def reference(
    queries: jax.Array, keys: jax.Array, values: jax.Array, mask: AttentionMask, *, scale: float, window: int | None = None
) -> jax.Array:
    """Scores, softmax, mixture (Vaswani et al. 2017, section 3.2.1), all T x S of them, differentiated by JAX.

    Arguments and result as for `attend`. A query that sees nothing gives zeros.
    """
    precise = jnp.promote_types(queries.dtype, jnp.float32)
    allowed = visible(mask, window)[:, None, :, None, :]  # [B|1, 1, T, 1, S]
    scores = jnp.einsum("bktgh,bksh->bktgs", queries, keys, preferred_element_type=precise) * scale
    scores = jnp.where(allowed, scores, jnp.finfo(precise).min)
    weights = jnp.where(allowed, jax.nn.softmax(scores, axis=-1), 0)
    attended = jnp.einsum("bktgs,bksh->bktgh", weights.astype(values.dtype), values, preferred_element_type=precise)
    return attended.astype(queries.dtype)
