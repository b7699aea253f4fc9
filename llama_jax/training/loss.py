"""The loss: the negative log-likelihood of each next token."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from llama_jax.config import LlamaConfig
from llama_jax.config.validation import require_positive_int
from llama_jax.errors import ConfigError
from llama_jax.model.forward import forward, lm_head_for_loss
from llama_jax.model.forward_options import Compute, Positions, Sharding
from llama_jax.model.params import Llama
from llama_jax.ops.cross_entropy import LogitOptions, LossSums, cross_entropy
from llama_jax.training.batch import Batch, predicted, to_next_token_batch
from llama_jax.training.neftune import noisy

LOSS_CHUNK = 64  # positions per row whose logits are in memory at a time


@dataclass(frozen=True)
class LossOptions:
    """How the loss is computed.

    Attributes:
      compute: of the forward pass: dtype, rematerialization, attention.
      chunk: positions per row whose logits are in memory at a time.
      z_loss: see `ops.cross_entropy.LogitOptions`; 1e-4 is usual.
      neftune: NEFTune's alpha: embeddings of a document of L tokens get uniform noise within alpha / sqrt(L D) (Jain et al.
        2023, algorithm 1), made from `Batch.noise`; 5 to 15 are usual for fine-tuning on few conversations. 0 adds none.

    Raises:
      ConfigError: an invalid value.
    """

    compute: Compute = Compute()
    chunk: int = LOSS_CHUNK
    z_loss: float = 0.0
    neftune: float = 0.0

    def __post_init__(self) -> None:
        require_positive_int("chunk", self.chunk)
        if not 0 <= self.z_loss < float("inf"):
            raise ConfigError(f"z_loss={self.z_loss} must be at least 0")
        if not 0 <= self.neftune < float("inf"):
            raise ConfigError(f"neftune={self.neftune} must be at least 0")


class TaskSums(NamedTuple):
    """The result that a loss other than `total_loss` may return: sums over the rows of a batch.

    Attributes:
      loss: float[], to be minimized.
      nll: float[], reported as the loss; it gets no gradient.
      metrics: float[] each, further sums by name, for the metrics of a step, without gradients. "tokens", if given, is the
        number of tokens that is reported, instead of the loss's divisor.
    """

    loss: jax.Array
    nll: jax.Array
    metrics: dict[str, jax.Array]


def next_token_loss(
    config: LlamaConfig,
    params: Llama,
    batch: Batch,
    options: LossOptions = LossOptions(),
    sharding: Sharding = Sharding(),
) -> Float[Array, ""]:
    """Mean negative log-likelihood of every predicted token given those before it in its segment, in nats.

    It is 0 where nothing is to be predicted. For the arguments and errors see `total_loss`.
    """
    total = total_loss(config, params, batch, options, sharding)
    return total.loss / jnp.maximum(jnp.sum(predicted(batch)), 1).astype(total.loss.dtype)


def total_loss(
    config: LlamaConfig,
    params: Llama,
    batch: Batch,
    options: LossOptions = LossOptions(),
    sharding: Sharding = Sharding(),
) -> LossSums:
    """Sums over predicted tokens, not yet divided by their global count.

    The logits [B, T, V] would be the largest array of a training step: `ops.cross_entropy` computes them in chunks.
    Gradients have the dtype of `params`, the logarithm and the sums are float32 at least.

    Args:
      sharding: its `constrain` is called here with "hidden" [B, T, D], from `forward`, and by `ops.cross_entropy`.

    Raises:
      GenerationError: tokens that are not int[B, T + 1] with T of at least 1.
      ConfigError: `neftune` without random numbers for its noise in the batch.
    """
    rows = sharding.reorder_batch(to_next_token_batch(batch))
    positions = Positions(position_ids=rows.position_ids, segment_ids=rows.segment_ids, rope_lengths=rows.rope_lengths)
    noisy_params = noisy(params, rows, options.neftune) if options.neftune else params
    hidden, _ = forward(config, noisy_params, rows.tokens, positions=positions, compute=options.compute, sharding=sharding)
    with sharding.context():
        hidden = sharding.constrain(hidden, "hidden")
        weights = rows.target_mask.astype(jnp.promote_types(hidden.dtype, jnp.float32))
        logit_options = LogitOptions(
            options.chunk, options.z_loss, config.vocab_size, sharding.batch_shards, sharding.constrain
        )
        return cross_entropy(hidden, lm_head_for_loss(config, params), rows.targets, weights, logit_options)
