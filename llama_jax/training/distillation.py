"""Distillation: the loss of a student that learns a teacher's predictions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from llama_jax.config import LlamaConfig
from llama_jax.errors import ConfigError
from llama_jax.model.forward import forward, lm_head_for_loss
from llama_jax.model.forward_options import Positions, Sharding
from llama_jax.model.params import LlamaParams
from llama_jax.ops.cross_entropy import LossSums
from llama_jax.ops.kl_divergence import DivergenceOptions, Logits, token_divergence
from llama_jax.ops.weights.formats import FrozenFormatName
from llama_jax.settings import Bounds, NonNegativeInt, PositiveFloat, check_fields
from llama_jax.training.batch import Batch, apply_weights, to_next_token_batch
from llama_jax.training.loss import LossOptions


@dataclass(frozen=True)
class DistillOptions:
    """How a student learns from a teacher (Hinton et al. 2015).

    Attributes:
      teacher: path of a model with the same vocabulary, in any format.
      weight: weight of the divergence KL(teacher || student); the negative log-likelihood of the text has 1 - `weight`.
      temperature: divides the logits of both in the divergence, which is then multiplied by temperature², so that its
        gradients keep their size.
      top_k: number of the teacher's most probable tokens to compare, see `ops.kl_divergence.DivergenceOptions`; 0 compares
        the whole distributions.
      quantize: the format of the teacher's matrices in memory, see `model.trees.quantize`; "none" keeps the format of the
        files, with floats in the dtype of the computation.

    Raises:
      ConfigError: an invalid value.
    """

    teacher: str = ""
    weight: Annotated[float, Bounds(0, 1, open_minimum=True)] = 1.0
    temperature: PositiveFloat = 1.0
    top_k: NonNegativeInt = 0
    quantize: FrozenFormatName = "none"

    def __post_init__(self) -> None:
        check_fields(self, ConfigError)


class Teacher(NamedTuple):
    """A frozen teacher: its configuration and sharding on the student's devices, and its parameters."""

    config: LlamaConfig
    params: LlamaParams
    sharding: Sharding = Sharding()


def distillation_loss(distill: DistillOptions, teacher: Teacher) -> Callable[..., LossSums]:
    """A loss with the arguments of `total_loss`: sums over the target tokens, weighted as there, to be divided by
    `target_count`.

    The hidden states [B, T, D] of both models are in memory, and one chunk of their logits. `metrics` has the sums "kl", of
    the divergence at the temperature, and "cross_entropy", of the negative log-likelihood.
    """

    def loss(
        config: LlamaConfig,
        params: LlamaParams,
        batch: Batch,
        options: LossOptions = LossOptions(),
        sharding: Sharding = Sharding(),
    ) -> LossSums:
        rows = sharding.reorder_batch(to_next_token_batch(batch))
        positions = Positions(position_ids=rows.position_ids, segment_ids=rows.segment_ids, rope_lengths=rows.rope_lengths)

        def read(model: tuple[LlamaConfig, LlamaParams], sharding: Sharding) -> tuple[Logits, Any]:
            hidden, _ = forward(*model, rows.tokens, positions=positions, compute=options.compute, sharding=sharding)
            logits = Logits(sharding.constrain(hidden, "hidden"), lm_head_for_loss(*model))
            return logits, options.logit_options(model[0], sharding)

        with sharding.context():
            student, logit_options = read((config, params), sharding)
            teacher_logits, teacher_options = read(
                (teacher.config, lax.stop_gradient(teacher.sharding.prepare_params(teacher.params))), teacher.sharding
            )
            targets = jnp.where(rows.target_mask, rows.targets, -1)
            divergence_options = DivergenceOptions(distill.temperature, distill.top_k)
            per_token = token_divergence(
                student, teacher_logits, targets, (logit_options, teacher_options), divergence_options
            )
        kl, nll = (jnp.sum(apply_weights(part, rows.target_mask)) for part in per_token)
        total = distill.weight * distill.temperature**2 * kl + (1 - distill.weight) * nll
        metrics = {"kl": kl, "cross_entropy": nll}
        return LossSums(total, lax.stop_gradient(total), jax.tree.map(lax.stop_gradient, metrics))

    return loss
