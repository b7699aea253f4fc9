"""The loss of a batch: the forward pass, then the cross-entropy of the next tokens."""

from __future__ import annotations

from dataclasses import dataclass

import jax.numpy as jnp
from jaxtyping import Array, Float

from llama_jax.config import LlamaConfig
from llama_jax.errors import ConfigError
from llama_jax.model.forward import forward, lm_head_for_loss
from llama_jax.model.forward_options import ComputeOptions, Positions, Sharding
from llama_jax.model.params import LlamaParams
from llama_jax.ops.cross_entropy import LogitOptions, LossSums, cross_entropy
from llama_jax.ops.platform import KernelOptions
from llama_jax.settings import NonNegativeFloat, PositiveInt, check_fields
from llama_jax.training.batch import Batch, replace_zero, target_mask, to_next_token_batch
from llama_jax.training.neftune import with_noise


@dataclass(frozen=True)
class LossOptions:
    """How the loss is computed.

    Attributes:
      compute: options of the forward pass: dtype, rematerialization, attention.
      chunk: positions per row whose logits are in memory at a time (chunked cross-entropy); None: 64 on a CPU, else 256.
      z_loss: weight of the z-loss, see `ops.cross_entropy.LogitOptions`; 1e-4 is usual.
      neftune: NEFTune's alpha: uniform noise within alpha / sqrt(L D), from `Batch.noise`, is added to the embeddings of a
        document of L tokens (Jain et al. 2023, algorithm 1); 5 to 15 are usual for fine-tuning on few conversations.

    Raises:
      ConfigError: an invalid value.
    """

    compute: ComputeOptions = ComputeOptions()
    chunk: PositiveInt | None = None
    z_loss: NonNegativeFloat = 0.0
    neftune: NonNegativeFloat = 0.0

    def __post_init__(self) -> None:
        check_fields(self, ConfigError)

    def logit_options(self, config: LlamaConfig, sharding: Sharding) -> LogitOptions:
        """How the logits of a model are computed."""
        kernels = KernelOptions(forward_mode=self.compute.forward_mode)
        return LogitOptions(self.chunk, self.z_loss, config.vocab_size, sharding.batch_shards, sharding.constrain, kernels)


def next_token_loss(
    config: LlamaConfig,
    params: LlamaParams,
    batch: Batch,
    options: LossOptions = LossOptions(),
    sharding: Sharding = Sharding(),
) -> Float[Array, ""]:
    """Mean loss per target token, in nats: its negative log-likelihood given the tokens before it in its segment.

    With `z_loss`, this includes the z-loss. If `Batch.loss_mask` has weights, the mean is weighted. 0 if no target counts.
    For the arguments and errors see `total_loss`.
    """
    sums = total_loss(config, params, batch, options, sharding)
    return sums.loss / replace_zero(jnp.sum(target_mask(batch))).astype(sums.loss.dtype)


def total_loss(
    config: LlamaConfig,
    params: LlamaParams,
    batch: Batch,
    options: LossOptions = LossOptions(),
    sharding: Sharding = Sharding(),
) -> LossSums:
    """Sums of the loss over target tokens, each times its weight if `Batch.loss_mask` has weights; `train_step` divides them
    by the number of targets, or the sum of their weights, on all devices.

    The logits [B, T, V] would be the largest array of a training step, so `ops.cross_entropy` computes them in chunks.
    Gradients have the dtype of `params`; logarithm and sums are float32 at least.

    Args:
      sharding: its `constrain` is called here with "hidden" [B, T, D], from `forward`, and by `ops.cross_entropy`.

    Raises:
      GenerationError: tokens are not int[B, T + 1] with T at least 1; invalid weights, see `batch.checked_batch`.
      ConfigError: `neftune` with a batch without `noise`.
    """
    inputs = sharding.reorder_batch(to_next_token_batch(batch))
    positions = Positions(position_ids=inputs.position_ids, segment_ids=inputs.segment_ids, rope_lengths=inputs.rope_lengths)
    noisy_params = with_noise(params, inputs, options.neftune) if options.neftune else params
    hidden, _ = forward(config, noisy_params, inputs.tokens, positions=positions, compute=options.compute, sharding=sharding)
    with sharding.context():
        hidden = sharding.constrain(hidden, "hidden")
        weights = inputs.target_mask.astype(jnp.promote_types(hidden.dtype, jnp.float32))
        head = lm_head_for_loss(config, params)
        return cross_entropy(hidden, head, inputs.targets, weights, options.logit_options(config, sharding))
