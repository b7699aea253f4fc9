"""Policy gradients for groups of answers: advantages and losses, as functions of arrays."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Float

from llama_jax.errors import ConfigError
from llama_jax.ops.platform import AnyArray
from llama_jax.settings import BelowOne, NonNegativeFloat, PositiveInt, check_fields
from llama_jax.training.batch import replace_zero

PolicyKind = Literal["grpo", "dr_grpo", "dapo"]
SMALLEST_STD = 1e-4
LARGEST_REWARD = 1e38  # the difference of two is within the range of float32


class Advantages(NamedTuple):
    """Advantages from the rewards of groups of answers.

    Attributes:
      values: float64[B], how much better each answer is than its group; in the dtype of the rewards under `jax.jit`.
      flat: int32[], number of groups whose answers all have the same reward, from which nothing can be learned.
    """

    values: AnyArray
    flat: AnyArray


def group_advantages(rewards: Float[AnyArray, " B"], group: int, *, scale: bool = True) -> Advantages:
    """How much better each answer is than its group (Shao et al. 2024, section 4.1.2).

    Computed on the host in float64, so that no difference between rewards is rounded away; under `jax.jit`, in the dtype of
    the rewards. The advantages of equal rewards are exactly 0.

    Args:
      rewards: the answers to one prompt are consecutive.
      group: answers per prompt, at least 2; must divide B.
      scale: whether to divide the difference from the mean by the group's standard deviation (of a sample, plus 1e-4); Dr.
        GRPO does not (Liu et al. 2025).

    Raises:
      ConfigError: a group size that does not divide B, or is 1; a reward that is not finite, or above 1e38.
    """
    is_traced = isinstance(rewards, jax.core.Tracer)
    xp: Any = jnp if is_traced else np
    rewards = rewards if is_traced else np.asarray(rewards, np.float64)
    if group < 2 or rewards.shape[0] % group:
        raise ConfigError(f"group={group} must be at least 2 and divide the {rewards.shape[0]} answers")
    if not is_traced and not (is_valid := np.abs(rewards) <= LARGEST_REWARD).all():
        wrong = int(np.argmin(is_valid))
        raise ConfigError(f"rewards[{wrong}]={rewards[wrong]} must be finite and within {LARGEST_REWARD:g} of 0; scale it")
    groups = rewards.reshape(-1, group)
    # Differences from a member of the group are 0 for equal rewards, and not rounded for rewards that are near each other.
    # Differences from the mean of the rewards would be its rounding error, which AdamW scales up to full steps.
    differences = groups - groups[:, :1]
    values = differences - xp.mean(differences, axis=1, keepdims=True)
    if scale:
        values = values / (xp.std(differences, axis=1, keepdims=True, ddof=1) + SMALLEST_STD)
    flat = xp.sum(xp.all(differences == 0, axis=1), dtype=np.int32)
    return Advantages(values.reshape(-1), flat)


@dataclass(frozen=True)
class PolicyOptions:
    """Options of the policy loss.

    Attributes:
      kind: how the losses of tokens are averaged: "grpo" over the tokens of each answer and then over answers (Shao et al.
        2024), "dapo" over all tokens (Yu et al. 2025), "dr_grpo" over the number of answers times `length`, regardless of
        their lengths (Liu et al. 2025).
      clip: the probability ratio is clipped at 1 - `clip`.
      clip_high: the probability ratio is clipped at 1 + `clip_high`; None uses `clip`, a larger value is "clip-higher" (Yu
        et al. 2025: 0.28).
      beta: weight of the KL divergence from the reference, by the estimator k3 (Schulman 2020).
      length: for "dr_grpo", the maximum number of tokens of an answer.

    Raises:
      ConfigError: an invalid value, or one that the kind does not use.
    """

    kind: PolicyKind = "dapo"
    clip: BelowOne = 0.2
    clip_high: NonNegativeFloat | None = None
    beta: NonNegativeFloat = 0.0
    length: PositiveInt | None = None

    def __post_init__(self) -> None:
        check_fields(self, ConfigError)
        if (self.length is None) == (self.kind == "dr_grpo"):
            need = "needs the length of the longest answer" if self.kind == "dr_grpo" else "does not use length"
            raise ConfigError(f"the policy loss {self.kind} {need}, but length={self.length}")


class PolicyLoss(NamedTuple):
    """Sums over the tokens of the answers, float[]; over a whole batch, the loss is sum(`loss`) / sum(`divisor`).

    Attributes:
      loss: the quantity to minimize.
      divisor: the number of answers for "grpo", of tokens for "dapo", of answers times `length` for "dr_grpo".
      clipped: number of tokens whose ratio is clipped: beyond the limit in the direction of the advantage.
      divergence: sum over the tokens of the KL divergence from the reference, by the estimator k3; 0 without one.
      tokens: number of tokens of the answers.
    """

    loss: jax.Array
    divisor: jax.Array
    clipped: jax.Array
    divergence: jax.Array
    tokens: jax.Array


def policy_loss(
    logprobs: Float[AnyArray, "B T"],
    old_logprobs: Float[AnyArray, "B T"],
    advantages: Float[AnyArray, " B"],
    mask: Bool[AnyArray, "B T"] | Float[AnyArray, "B T"],
    options: PolicyOptions = PolicyOptions(),
    reference: Float[AnyArray, "B T"] | None = None,
) -> PolicyLoss:
    """The clipped policy gradient of answers; every token has the advantage of its answer.

    Args:
      logprobs: log-probabilities of the tokens under the trained model, at the sampling temperature.
      old_logprobs: the same under the model that sampled the tokens; not differentiated. In the first step on a batch they
        equal `logprobs`, the ratio is 1, and the gradient is the policy gradient.
      advantages: not differentiated.
      mask: which tokens belong to the answer, including its stop token; or their weights, by which all sums are weighted.
      reference: the same under the reference model, for `beta`; not differentiated.

    Raises:
      ConfigError: `beta` without a reference, or a reference without `beta`.
    """
    if (reference is None) != (options.beta == 0):
        need = "needs the reference's log-probabilities" if reference is None else "does not use a reference; pass None"
        raise ConfigError(f"a policy loss with beta={options.beta} {need}")
    mask = mask.astype(logprobs.dtype)
    advantages = jax.lax.stop_gradient(advantages)[:, None]
    ratio = jnp.exp(jnp.where(mask > 0, logprobs - jax.lax.stop_gradient(old_logprobs), 0))
    high = options.clip if options.clip_high is None else options.clip_high
    clipped_ratio = jnp.clip(ratio, 1 - options.clip, 1 + high)
    losses = -jnp.minimum(ratio * advantages, clipped_ratio * advantages)
    is_clipped = ((ratio < 1 - options.clip) & (advantages < 0)) | ((ratio > 1 + high) & (advantages > 0))
    divergence = jnp.zeros_like(losses)
    if reference is not None:
        difference = jnp.where(mask > 0, jax.lax.stop_gradient(reference) - logprobs, 0)
        divergence = jnp.exp(difference) - difference - 1
        losses = losses + options.beta * divergence
    lengths = jnp.sum(mask, axis=1)
    loss, divisor = jnp.sum(losses * mask), jnp.sum(lengths)
    if options.kind == "grpo":
        loss = jnp.sum(jnp.sum(losses * mask, axis=1) / replace_zero(lengths))
        divisor = jnp.asarray(mask.shape[0], logprobs.dtype)
    elif options.kind == "dr_grpo":
        divisor = jnp.asarray(mask.shape[0] * (options.length or 1), logprobs.dtype)
    return PolicyLoss(loss, divisor, jnp.sum(is_clipped * mask), jnp.sum(divergence * mask), jnp.sum(lengths))
