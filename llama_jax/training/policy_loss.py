"""The loss of sampled answers given their rewards, in the form that `train_step` accepts."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float32

from llama_jax.config import LlamaConfig
from llama_jax.model.forward_options import Sharding
from llama_jax.model.params import Llama
from llama_jax.training.batch import Batch, target_mask
from llama_jax.training.logprobs import token_logprobs
from llama_jax.training.loss import LossOptions, LossSumsAndMetrics
from llama_jax.training.policy_gradient import PolicyOptions, policy_loss
from llama_jax.training.step import microbatches


class ScoredAnswers(NamedTuple):
    """Answers with their advantages, one per row.

    Attributes:
      batch: prompts and answers; the mask selects the tokens to train on, including the stop token.
      advantages: float32[B].
      drawn: float32[B, T], the sampler's log-probabilities of the tokens at the temperature, for comparison with the
        trainer's.
      sampled: float32[B, T], the trainer's, when the answers were sampled; None if these are the current ones.
      reference: float32[B, T], the reference model's; None if the loss has no divergence from it.
    """

    batch: Batch
    advantages: Any
    drawn: Any
    sampled: Any = None
    reference: Any = None


@dataclass(frozen=True)
class AnswerLoss:
    """The loss, with the methods that `train_step` and a task's objective need.

    Attributes:
      policy: see `PolicyOptions`.
      temperature: the sampling temperature.
    """

    policy: PolicyOptions
    temperature: float

    def __call__(
        self, config: LlamaConfig, params: Llama, judged: ScoredAnswers, options: LossOptions, sharding: Sharding
    ) -> LossSumsAndMetrics:
        """Sums over rows, for a `train_step` that divides them by `count`.

        In `metrics`, "tokens" is the number of tokens of the answers; "clipped", "divergence" and "gap" (the absolute
        difference from `drawn`) are sums over them.
        """
        mask = target_mask(judged.batch)
        logprobs = token_logprobs(config, params, judged.batch, options, sharding, self.temperature)
        detached = lax.stop_gradient(logprobs)
        sampled = detached if judged.sampled is None else judged.sampled
        sums = policy_loss(logprobs, sampled, judged.advantages, mask, self.policy, judged.reference)
        gap = jnp.sum(jnp.abs(jnp.where(mask, judged.drawn - detached, 0)))
        metrics = {"tokens": sums.tokens, "clipped": sums.clipped, "divergence": sums.divergence, "gap": gap}
        return LossSumsAndMetrics(sums.loss, lax.stop_gradient(sums.loss), jax.tree.map(lax.stop_gradient, metrics))

    def count(self, judged: ScoredAnswers) -> Float32[Array, ""]:
        """The divisor of the sum of losses: the number of tokens, of answers, or of answers times `length`."""
        if self.policy.kind == "dapo":
            return jnp.sum(target_mask(judged.batch), dtype=jnp.float32)
        return jnp.float32(judged.advantages.shape[0] * (self.policy.length or 1))

    def with_reference(self, reference: Llama, parts: int) -> Any:
        """A function with the arguments of a loss that adds the reference model's log-probabilities to the answers.

        Args:
          parts: number of parts of the rows, computed one after the other to save memory.
        """

        def prepare(
            config: LlamaConfig, _: Llama, judged: ScoredAnswers, options: LossOptions, sharding: Sharding
        ) -> ScoredAnswers:
            measure = partial(token_logprobs, config, reference)
            logprobs = lax.map(
                lambda batch: measure(batch, options, sharding, self.temperature), microbatches(judged.batch, parts)
            )
            logprobs = logprobs.swapaxes(0, 1).reshape(-1, logprobs.shape[-1])  # undoes `microbatches`
            return judged._replace(reference=logprobs)

        return prepare
