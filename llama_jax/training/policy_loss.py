"""The loss of sampled answers given their rewards, in the form that `train_step` accepts."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from llama_jax.config import LlamaConfig
from llama_jax.model.forward_options import Sharding
from llama_jax.model.params import LlamaParams
from llama_jax.ops.cross_entropy import LossSums
from llama_jax.training.batch import Batch, apply_weights, target_count, target_mask
from llama_jax.training.logprobs import token_logprobs
from llama_jax.training.loss import LossOptions
from llama_jax.training.policy_gradient import PolicyOptions, policy_loss
from llama_jax.training.step import microbatches


class ScoredAnswers(NamedTuple):
    """Answers with their advantages, one per row.

    Attributes:
      batch: prompts and answers; the mask selects the tokens to train on, including the stop token, or has their weights.
      advantages: float32[B].
      sampler_logprobs: float32[B, T], log-probabilities of the tokens at the sampling temperature, computed by the sampler;
        only compared with the trainer's.
      old_logprobs: float32[B, T], the same, computed by the training step's forward pass with the parameters that sampled
        the answers; None in the first step on the answers, where they equal the current ones.
      reference: float32[B, T], the same under the reference model; None if the loss has no KL term.
      lengths: int32[B], tokens of the prompt and the answer; the rest of a row is padding. Not used by the loss.
    """

    batch: Batch
    advantages: Any
    sampler_logprobs: Any
    old_logprobs: Any = None
    reference: Any = None
    lengths: Any = None


@dataclass(frozen=True)
class AnswerLoss:
    """The loss of sampled answers, a `LossFn`, and other functions that the training step needs with it.

    Attributes:
      policy: see `PolicyOptions`.
      temperature: the sampling temperature.
    """

    policy: PolicyOptions
    temperature: float

    def __call__(
        self, config: LlamaConfig, params: LlamaParams, scored: ScoredAnswers, options: LossOptions, sharding: Sharding
    ) -> LossSums:
        """Sums over rows; `train_step` divides the loss by `count`.

        In `metrics`, "tokens" is the number of tokens of the answers; "clipped", "divergence" and "gap" (the absolute
        difference from `sampler_logprobs`) are sums over them.
        """
        mask = target_mask(scored.batch)
        logprobs = token_logprobs(config, params, scored.batch, options, sharding, self.temperature)
        detached = lax.stop_gradient(logprobs)
        old_logprobs = detached if scored.old_logprobs is None else scored.old_logprobs
        sums = policy_loss(logprobs, old_logprobs, scored.advantages, mask, self.policy, scored.reference)
        gap = jnp.sum(apply_weights(jnp.abs(jnp.where(mask, scored.sampler_logprobs - detached, 0)), mask))
        metrics = {"tokens": sums.tokens, "clipped": sums.clipped, "divergence": sums.divergence, "gap": gap}
        return LossSums(sums.loss, lax.stop_gradient(sums.loss), jax.tree.map(lax.stop_gradient, metrics))

    def count(self, scored: ScoredAnswers) -> Float[Array, ""]:
        """The divisor of the sum of losses: the number of tokens, of answers, or of answers times `length`."""
        if self.policy.kind == "dapo":
            return target_count(scored.batch)
        return jnp.float32(scored.advantages.shape[0] * (self.policy.length or 1))

    def with_reference(self, reference: LlamaParams, accumulate: int) -> Any:
        """A function with the arguments of a loss that adds the reference model's log-probabilities to the answers.

        Args:
          accumulate: number of microbatches, which are computed one after the other.
        """

        def prepare(
            config: LlamaConfig, _: LlamaParams, scored: ScoredAnswers, options: LossOptions, sharding: Sharding
        ) -> ScoredAnswers:
            measure = partial(token_logprobs, config, reference)
            logprobs = lax.map(
                lambda batch: measure(batch, options, sharding, self.temperature), microbatches(scored.batch, accumulate)
            )
            logprobs = logprobs.swapaxes(0, 1).reshape(-1, logprobs.shape[-1])  # undoes `microbatches`
            return scored._replace(reference=logprobs)

        return prepare
