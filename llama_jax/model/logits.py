"""Logits and per-layer activations of whole sequences, without a cache."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Integer

from llama_jax.config import LlamaConfig
from llama_jax.model.checks import check_tokens
from llama_jax.model.forward import PassOptions, forward, run_layers, unembed
from llama_jax.model.forward_options import Compute, Positions, Sharding
from llama_jax.model.params import Llama
from llama_jax.ops.platform import AnyArray


class LayerActivations(NamedTuple):
    """The activations of one layer.

    Attributes:
      before, after: [B, T, D], the residual stream before and after the layer.
      keys, values: [B, K, T, H], of the new tokens, as they go into a cache.
    """

    before: jax.Array
    after: jax.Array
    keys: jax.Array
    values: jax.Array


Tap = Callable[[LayerActivations], Any]


def observe(
    config: LlamaConfig,
    params: Llama,
    tokens: Integer[AnyArray, "B T"],
    tap: Tap,
    *,
    positions: Positions = Positions(),
    compute: Compute = Compute(),
    sharding: Sharding = Sharding(),
) -> tuple[Float[Array, "B T D"], Any]:
    """`forward` without a cache, with the results of `tap` for every layer.

    Args:
      tap: maps a `LayerActivations` to a pytree of arrays; under `jit` unused activations are not computed.

    Returns:
      The hidden states, and the results of `tap`, stacked over the layers: each array has a leading axis L.
    """
    with sharding.context():
        options = PassOptions(positions, compute, sharding)
        hidden, _, taken = run_layers(config, params, tokens, None, options, lambda *seen: tap(LayerActivations(*seen)))
    return hidden, taken


def logits(
    config: LlamaConfig, params: Llama, tokens: Integer[AnyArray, "B T"], compute: Compute = Compute()
) -> Float[Array, "B T V"]:
    """Logits, in float32 at least, of whole sequences: `forward` and `unembed` without a cache.

    Args:
      tokens: ids in [0, V).

    Raises:
      GenerationError: an id outside the vocabulary (checked where the values are known, not under `jit`).
    """
    check_tokens(config, tokens)
    hidden, _ = forward(config, params, jnp.asarray(tokens), compute=compute)
    return unembed(config, params, hidden)
