"""Log-probabilities of given tokens, without ever holding all logits."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from llama_jax.ops.cross_entropy import LogitOptions
from llama_jax.ops.layers import Weight, project


def token_logprobs(
    hidden: jax.Array,
    head: jax.Array | Weight,
    targets: jax.Array,
    options: LogitOptions,
    temperature: float | jax.Array = 1.0,
) -> jax.Array:
    """The logarithm of the probability of each target under ``softmax(hidden @ head.T / temperature)``, in nats.

    The logits are made chunk by chunk, and a second time in the backward pass, so that those of one chunk exist at a time.

    Args:
      hidden: [B, T, D], in the dtype of the products.
      head: [V, D], or what else `project` takes.
      targets: int[B, T]; one below 0 gives 0, without a gradient.
      options: `z_loss` has no meaning here.
      temperature: above 0; of the distribution that the tokens were sampled from.

    Returns:
      float32[B, T], float64 for `hidden` in float64.
    """
    wide = jnp.promote_types(hidden.dtype, jnp.float32)
    weight: Any = head
    if not hasattr(head, "project"):
        weight = options.constrain(options.constrain(weight.astype(hidden.dtype), "head_shares"), "head")
    columns = jnp.arange(weight.shape[0], dtype=targets.dtype)

    @jax.checkpoint
    def of_chunk(hidden: jax.Array, targets: jax.Array) -> jax.Array:
        logits = options.constrain(project(hidden, weight, out_dtype=wide), "logits") / temperature
        if options.vocab_size is not None and options.vocab_size < weight.shape[0]:
            logits = jnp.where(columns < options.vocab_size, logits, -jnp.inf)
        chosen = jnp.take_along_axis(logits, jnp.maximum(targets, 0)[..., None], axis=-1)[..., 0]
        return jnp.where(targets >= 0, chosen - jax.nn.logsumexp(logits, axis=-1), 0)

    batch, length = targets.shape
    chunk = min(options.chunk, length)
    padding = -length % chunk
    hidden = jnp.pad(hidden, [(0, 0), (0, padding), (0, 0)]).reshape(batch, -1, chunk, hidden.shape[-1])
    targets = jnp.pad(targets, [(0, 0), (0, padding)], constant_values=-1).reshape(batch, -1, chunk)
    found = lax.map(lambda part: of_chunk(*part), (hidden.swapaxes(0, 1), targets.swapaxes(0, 1)))
    return found.swapaxes(0, 1).reshape(batch, -1)[:, :length]
