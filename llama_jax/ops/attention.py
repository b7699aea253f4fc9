"""Causal grouped-query attention."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax


def attention(
    queries: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    query_positions: jax.Array,
    *,
    scale: float,
    segments: tuple[jax.Array, jax.Array] | None = None,
) -> jax.Array:
    """Attend from each query to the keys at its own and earlier positions (Vaswani et al. 2017, section 3.2.1).

    The G queries of a group share their key/value head (Ainslie et al. 2023, section 2.2): K = N is multi-head, K = 1
    multi-query attention. Keys and values are never repeated in memory; the group is an axis of the product.

    Args:
      queries: [*batch, T, G, H]. The batch axes are B and K, or K alone.
      keys, values: [*batch, S, H]; slot s holds the token at position s.
      query_positions: int[*batch, T], axes of size 1 broadcast. Slots after a query's own position are not read:
        that one comparison is the causal mask and hides the empty or padded end of a cache as well.
      scale: multiplies the scores; 1 / sqrt(H) in every Llama.
      segments: int[*batch, T] of the queries and int[*batch, S] of the keys, axes of size 1 broadcast: a query sees the
        keys of its own segment only. For several documents packed into a row.

    Returns:
      [*batch, T, G, H] in the dtype of `queries`; softmax in float32.
    """
    precise = jnp.promote_types(queries.dtype, jnp.float32)
    batch = tuple(range(keys.ndim - 2))
    last = keys.ndim - 1
    scores = lax.dot_general(
        queries.astype(keys.dtype), keys, (((queries.ndim - 1,), (last,)), (batch, batch)), preferred_element_type=precise
    )  # [*batch, T, G, S]
    slots = jnp.arange(keys.shape[-2], dtype=query_positions.dtype)
    visible = slots <= query_positions[..., None]
    if segments is not None:
        visible &= segments[0][..., :, None] == segments[1][..., None, :]
    scores = jnp.where(visible[..., None, :], scores * scale, -jnp.inf)
    # A query sees at least its own slot, so no row is empty and the maximum is finite.
    weights = jnp.exp(scores - jnp.max(scores, axis=-1, keepdims=True))
    total = jnp.sum(weights, axis=-1, keepdims=True)
    mixed = lax.dot_general(
        weights.astype(values.dtype),
        values,
        (((queries.ndim - 1,), (last - 1,)), (batch, batch)),
        preferred_element_type=precise,
    )  # [*batch, T, G, H]
    # Divided here and not before the product: H numbers per query instead of S.
    return (mixed / total).astype(queries.dtype)
