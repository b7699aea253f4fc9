"""Logits of whole sequences, and passes with hooks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Integer

from llama_jax.config import LlamaConfig
from llama_jax.errors import ConfigError
from llama_jax.model.cache import KVCache
from llama_jax.model.checks import check_tokens
from llama_jax.model.forward import PassOptions, forward, run_layers, unembed, unembed_with_hooks
from llama_jax.model.forward_options import ComputeOptions, Positions, Sharding
from llama_jax.model.hooks import Hook, HookCaller, with_hooks
from llama_jax.model.params import LlamaParams
from llama_jax.ops import exact
from llama_jax.ops.platform import AnyArray


def logits_and_activations(
    config: LlamaConfig,
    params: LlamaParams,
    tokens: Integer[AnyArray, "B T"],
    hooks: Mapping[str, Hook],
    cache: KVCache | None = None,
    *,
    positions: Positions = Positions(),
    compute: ComputeOptions = ComputeOptions(),
    sharding: Sharding = Sharding(),
) -> tuple[Float[Array, "B T V"], Any, dict[str, Any]]:
    """Run a pass with hooks, and return what they keep; see `with_hooks`. Under `jit`, unused results are not computed.

    Args:
      hooks: called after those of the parameters, which may also keep values.
      cache, positions, compute, sharding: as for `forward`.

    Returns:
      The logits, in float32 at least; the cache with the new tokens, or None; and the kept values by point. Arrays kept in
      the layers have a leading axis L.
    """
    hooked = with_hooks(params, hooks)
    if compute.exact:
        raise ConfigError("exact=True does not support hooks; omit one of the two")
    with sharding.context():
        hidden, cache, kept = run_layers(config, hooked, tokens, cache, PassOptions(positions, compute, sharding))
        call_hooks = HookCaller(hooked.hooks)
        return unembed_with_hooks(call_hooks, config, hooked, hidden, compute), cache, kept | call_hooks.kept


def logits(
    config: LlamaConfig, params: LlamaParams, tokens: Integer[AnyArray, "B T"], compute: ComputeOptions = ComputeOptions()
) -> Float[Array, "B T V"]:
    """Logits, in float32 at least, of whole sequences: `forward` and `unembed` without a cache.

    Args:
      tokens: ids in [0, V).

    Raises:
      GenerationError: an id outside the vocabulary (checked where the values are known, not under `jit`).
    """
    check_tokens(config, tokens)
    hidden, _ = forward(config, params, jnp.asarray(tokens), compute=compute)
    return unembed(config, params, hidden, compute)


def exact_logprobs(
    config: LlamaConfig,
    params: LlamaParams,
    hidden: Float[Array, "B T D"],
    targets: Integer[Array, "B T"],
    temperature: float | Float[Array, ""] = 1.0,
    compute: ComputeOptions = ComputeOptions(exact=True),
) -> Float[Array, "B T"]:
    """The log-probability of each target, given an exact pass's hidden states, by the same operations as exact sampling.

    Args:
      targets: -1 for positions without a target, for which the result is 0.
      compute: that of the pass.
    """

    def of_block(hidden: jax.Array, targets: jax.Array) -> jax.Array:
        logits = unembed(config, params, hidden, compute).astype(jnp.float32)
        of_rows = lambda logits, targets: exact.logprob_of(logits / temperature, targets)
        in_use = exact.rows_in_use(targets < 0)
        row_logprobs = exact.map_blocks(of_rows, exact.row_block_size(), in_use, logits, jnp.maximum(targets, 0))
        return jnp.where(targets >= 0, row_logprobs, 0)

    flat = hidden.reshape(-1, hidden.shape[-1]), targets.reshape(-1)
    logprobs = exact.map_blocks(of_block, exact.block_size(), exact.rows_in_use(flat[1] < 0), *flat)
    return logprobs.reshape(targets.shape)
