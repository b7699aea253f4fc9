"""Log-probabilities of the tokens of a batch, for preference losses and policy gradients."""

from __future__ import annotations

from dataclasses import replace

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from llama_jax.config import LlamaConfig
from llama_jax.errors import ConfigError, MeshError
from llama_jax.model.forward import forward, lm_head_for_loss
from llama_jax.model.forward_options import ComputeOptions, Positions, Sharding
from llama_jax.model.logits import exact_logprobs
from llama_jax.model.params import LlamaParams
from llama_jax.ops.cross_entropy import chunked_logprobs
from llama_jax.training.batch import Batch, to_next_token_batch
from llama_jax.training.loss import LossOptions


def token_logprobs(
    config: LlamaConfig,
    params: LlamaParams,
    batch: Batch,
    options: LossOptions = LossOptions(),
    sharding: Sharding = Sharding(),
    temperature: float | Float[Array, ""] = 1.0,
) -> Float[Array, "B T"]:
    """The log-probability of every target token given the tokens before it in its segment, in nats.

    It is 0 for targets excluded by the batch's mask or segments, so that the sum over T is the log-probability of the answer
    that the mask selects. Weights in the mask only select: the log-probabilities are not multiplied by them. Differentiable
    in the parameters; `ops.cross_entropy` computes the logits in chunks.

    Args:
      params: the result of `sharding.prepare_params`, as for `total_loss`.
      options: `z_loss` must be 0, because this is not a loss. With an exact `compute`, the values come from a separate pass
        and equal those of `roll_out` bit for bit; the derivatives are those of the training pass. On a CPU, `generate` has
        the same bits only without native kernels (`LLAMA_JAX_NATIVE=off`).
      sharding: see `total_loss`; must not divide the tokens of each row over devices.
      temperature: above 0; divides the logits, as in sampling.

    Raises:
      GenerationError: tokens that are not int[B, T + 1] with T at least 1.
      ConfigError: a nonzero `z_loss`; an exact `compute` for packed rows.
      MeshError: a sharding that divides the tokens of each row.
    """
    if options.z_loss:
        raise ConfigError(f"z_loss={options.z_loss} has no meaning for log-probabilities; leave it at 0")
    if options.compute.exact:
        inexact = replace(options, compute=replace(options.compute, exact=False))
        logprobs = token_logprobs(config, params, batch, inexact, sharding, temperature)
        exact = _exact_logprobs(config, lax.stop_gradient(params), batch, options.compute, sharding, temperature)
        return exact + (logprobs - lax.stop_gradient(logprobs))  # value of the first, gradient of the second
    inputs = sharding.reorder_batch(to_next_token_batch(batch))
    if inputs.tokens.shape != batch.tokens[:, 1:].shape:
        raise MeshError("log-probabilities need whole rows, which context divides; use data, fsdp and tensor")
    positions = Positions(position_ids=inputs.position_ids, segment_ids=inputs.segment_ids, rope_lengths=inputs.rope_lengths)
    hidden, _ = forward(config, params, inputs.tokens, positions=positions, compute=options.compute, sharding=sharding)
    with sharding.context():
        hidden = sharding.constrain(hidden, "hidden")
        targets, head = jnp.where(inputs.target_mask, inputs.targets, -1), lm_head_for_loss(config, params)
        return chunked_logprobs(hidden, head, targets, options.logit_options(config, sharding), temperature)


def _exact_logprobs(
    config: LlamaConfig,
    params: LlamaParams,
    batch: Batch,
    compute: ComputeOptions,
    sharding: Sharding,
    temperature: float | Float[Array, ""],
) -> Float[Array, "B T"]:
    inputs = to_next_token_batch(batch)
    positions = Positions(position_ids=inputs.position_ids, segment_ids=inputs.segment_ids, rope_lengths=inputs.rope_lengths)
    hidden, _ = forward(config, params, inputs.tokens, positions=positions, compute=compute, sharding=sharding)
    return exact_logprobs(config, params, hidden, jnp.where(inputs.target_mask, inputs.targets, -1), temperature, compute)
