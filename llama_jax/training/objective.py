"""The loss: how surprised the model is by each next token."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Literal, get_args

import jax
import jax.numpy as jnp
from jax import lax

from llama_jax.config import LlamaConfig
from llama_jax.errors import ConfigError
from llama_jax.model.forward import Constrain, forward, unconstrained, unembed
from llama_jax.model.params import Llama

Remat = Literal["none", "full"]
CHUNK = 128


def next_token_loss(
    config: LlamaConfig,
    params: Llama,
    tokens: jax.Array,
    *,
    dtype: jax.typing.DTypeLike | None = None,
    remat: Remat = "none",
    chunk: int = CHUNK,
    constrain: Constrain = unconstrained,
) -> jax.Array:
    """Mean negative log-likelihood of every token given those before it, in nats: float32[].

    The logits [B, T, V] are the largest array of a training step: they are made, and made again in the backward pass, for
    `chunk` positions at a time.

    Args:
      tokens: int32[B, T + 1]; the first T are read, the last T are predicted.
      dtype: of the computation; None takes that of the parameters. The sum over the vocabulary is float32 at least, and
        gradients have the dtype of `params`.
      remat: what the backward pass computes a second time instead of keeping it: "none", or "full", everything inside a
        layer, so that only the residual stream between layers is kept (Chen et al. 2016, section 3).
      chunk: positions of each row whose logits are held at a time.
      constrain: see `forward`; here it is told of "hidden", what `forward` gave, and of "logits", [B, chunk, V].

    Raises:
      ConfigError: another `remat`.
      GenerationError: `tokens` is not int[B, T + 1] with T of at least 1.
    """
    if remat not in get_args(Remat):
        raise ConfigError(f"remat={remat!r} must be one of {', '.join(get_args(Remat))}")
    inputs, targets = tokens[:, :-1], tokens[:, 1:]

    def wrap_layer(layer: Callable) -> Callable:
        # Of a scan nothing can be merged with the forward pass: the barrier that prevents it would only cost.
        return jax.checkpoint(layer, prevent_cse=isinstance(params.blocks, tuple)) if remat == "full" else layer

    hidden, _ = forward(config, _cast(params, dtype), inputs, constrain=constrain, wrap_layer=wrap_layer)
    hidden = constrain(hidden, "hidden")

    # Cast in every chunk, which XLA does once: so the gradients of all chunks are summed in the parameters' dtype.
    head = params.replace(blocks=())

    @partial(jax.checkpoint, prevent_cse=False)
    def add_chunk(total: jax.Array, part: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, None]:
        hidden, targets = part
        logits = constrain(unembed(config, _cast(head, dtype), hidden), "logits")
        # Compared and not gathered, for the vocabulary may lie on several devices.
        chosen = jnp.sum(jnp.where(jnp.arange(config.vocab_size) == targets[..., None], logits, 0), axis=-1)
        losses = jnp.where(targets >= 0, jax.nn.logsumexp(logits, axis=-1) - chosen, 0)
        return total + jnp.sum(losses), None

    parts = _chunks(hidden, chunk, 0), _chunks(targets, chunk, -1)
    zero = jnp.zeros((), jnp.promote_types(hidden.dtype, jnp.float32))
    total, _ = lax.scan(add_chunk, zero, parts)
    return total / float(targets.size)


def _cast(params: Llama, dtype: jax.typing.DTypeLike | None) -> Llama:
    return params if dtype is None else jax.tree.map(lambda a: a.astype(dtype), params)


def _chunks(x: jax.Array, chunk: int, padding: int) -> jax.Array:
    """[B, T, ...] as [chunks, B, chunk, ...], filled up behind the end."""
    batch, length, *rest = x.shape
    chunk = min(chunk, length)
    missing = -length % chunk
    x = jnp.pad(x, [(0, 0), (0, missing), *[(0, 0)] * len(rest)], constant_values=padding)
    return x.reshape(batch, -1, chunk, *rest).swapaxes(0, 1)
