"""Logits and per-layer activations of whole sequences, without a cache."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Integer

from llama_jax.config import LlamaConfig
from llama_jax.errors import ConfigError
from llama_jax.model.checks import check_tokens
from llama_jax.model.forward import PassOptions, forward, run_layers, unembed
from llama_jax.model.forward_options import Compute, Positions, Sharding
from llama_jax.model.params import Llama
from llama_jax.ops import exact
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
    if compute.exact:
        raise ConfigError("exact=True has no activations to observe; leave it out")
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
    with exact.exactly(compute.exact):
        return unembed(config, params, hidden)


def exact_logprobs(
    config: LlamaConfig,
    params: Llama,
    hidden: Float[Array, "B T D"],
    targets: Integer[Array, "B T"],
    temperature: float | Float[Array, ""] = 1.0,
) -> Float[Array, "B T"]:
    """The log-probability of each target after the hidden states of an exact pass, by the operations of exact sampling.

    Args:
      targets: -1 where nothing is predicted, which gives 0.
    """

    def of_block(hidden: jax.Array, targets: jax.Array) -> jax.Array:
        logits = unembed(config, params, hidden).astype(jnp.float32)
        of_rows = lambda logits, targets: exact.logprob_of(logits / temperature, targets)
        found = exact.by_rows(of_rows, exact.rows_in_use(targets < 0), logits, jnp.maximum(targets, 0))
        return jnp.where(targets >= 0, found, 0)

    flat = hidden.reshape(-1, hidden.shape[-1]), targets.reshape(-1)
    with exact.exactly(True):
        found = exact.by_blocks(of_block, exact.block_size(), exact.rows_in_use(flat[1] < 0), *flat)
    return found.reshape(targets.shape)
