"""Textbook attention, to test the other backends."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from llama_jax.ops.attention.mask import AttentionMask, visible


def reference(
    queries: Float[Array, "B K T G H"],
    keys: Float[Array, "B K S H"],
    values: Float[Array, "B K S W"],
    mask: AttentionMask,
    *,
    scale: float,
    window: int | None = None,
) -> Float[Array, "B K T G W"]:
    """Scores, softmax, weighted sum (Vaswani et al. 2017, section 3.2.1), all T x S at once, differentiated by JAX.

    Arguments and result as for `attend`. The output for a query that sees nothing is zero.
    """
    return attend_where(queries, keys, values, visible(mask, window), scale=scale)


def attend_where(
    queries: Float[Array, "B K T G H"],
    keys: Float[Array, "B K S H"],
    values: Float[Array, "B K S W"],
    allowed: Bool[Array, "#B T S"],
    *,
    scale: float,
    scores_hook: Callable[[jax.Array], jax.Array] = lambda x: x,
    pattern_hook: Callable[[jax.Array], jax.Array] = lambda x: x,
) -> Float[Array, "B K T G W"]:
    """Attention to the `allowed` keys. The hooks may replace the scores and the weights [B, K, T, G, S]."""
    precise = jnp.promote_types(queries.dtype, jnp.float32)
    allowed = allowed[:, None, :, None, :]  # [B|1, 1, T, 1, S]
    scores = jnp.einsum("bktgh,bksh->bktgs", queries, keys, preferred_element_type=precise) * scale
    least = jnp.finfo(precise).min  # finite: no NaN for a row that sees nothing or in derivatives of hooks
    scores = jnp.where(allowed, scores_hook(jnp.where(allowed, scores, least)), least)
    weights = pattern_hook(jnp.where(allowed, jax.nn.softmax(scores, axis=-1), 0))
    attended = jnp.einsum("bktgs,bksh->bktgh", weights.astype(values.dtype), values, preferred_element_type=precise)
    return attended.astype(queries.dtype)
