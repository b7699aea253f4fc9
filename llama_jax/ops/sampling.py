"""The operations of sampling whose fast form depends on the platform; the rest is `inference.sampling`."""

from __future__ import annotations

from collections.abc import Hashable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from llama_jax.ops.platform import AnyArray, has_cpu_variant


@has_cpu_variant
def random_key(seed: jax.Array, count: AnyArray, impl: Hashable = None) -> jax.Array:
    """The key of `jax.random` for the `count`-th token of a row with this seed."""
    return jax.random.fold_in(jax.random.key(seed, impl=impl), count)


@has_cpu_variant
def argmax(scores: Float[AnyArray, "B V"]) -> Int32[Array, " B"]:
    """The first index of the largest score. XLA for CPU vectorizes a max and a min reduction, but not argmax."""
    indices = jnp.arange(scores.shape[-1], dtype=jnp.int32)
    best = jnp.max(scores, axis=-1, keepdims=True)
    return jnp.min(jnp.where(scores == best, indices, scores.shape[-1] - 1), axis=-1)
