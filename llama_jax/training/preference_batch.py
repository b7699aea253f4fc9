"""Batches of preference pairs, and their losses: `preference_loss` applied to tokens."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Float32

from llama_jax.config import LlamaConfig
from llama_jax.model.forward_options import Sharding
from llama_jax.model.params import LlamaParams
from llama_jax.ops.cross_entropy import LossSums
from llama_jax.training.batch import Batch, apply_weights, target_mask
from llama_jax.training.logprobs import token_logprobs
from llama_jax.training.loss import LossOptions
from llama_jax.training.preference_loss import FREE, Pair, PreferenceOptions, Preferred, kto_loss, preference_loss
from llama_jax.training.step import microbatches


class PairBatch(NamedTuple):
    """B rows of at most P pairs. A row has two sides: chosen and rejected answers; for KTO, answers, and the same prompts
    with answers to other prompts. Each answer with its prompt is a segment; a pair has the same segment on both sides.

    Attributes:
      tokens, segment_ids, position_ids, loss_mask: [B, 2, T + 1], as in a `Batch`; the mask selects the answers, or has the
        weights of their tokens.
      there: bool[B, P], which segments are pairs; the others are empty.
      desirable: bool[B, P], for KTO, which answers are good; otherwise None.
      reference: float32[B, 2, P], the reference model's log-probabilities of the answers; None without a reference, or
        before `preparing`.
      divergence: float32[B], for KTO, the estimated divergence from the reference, the same in all rows; None before
        `preparing`.
    """

    tokens: Any
    segment_ids: Any
    position_ids: Any
    loss_mask: Any
    there: Any
    desirable: Any = None
    reference: Any = None
    divergence: Any = None


class AnswerSums(NamedTuple):
    """The summed log-probability of each answer's tokens, and their number, float32[B, S, P] for S sides; 0 if none. Both
    are weighted if the mask has weights."""

    logprobs: jax.Array
    lengths: jax.Array


def pair_count(batch: PairBatch) -> Float32[Array, ""]:
    """The number of pairs in a batch, or, for KTO, of answers."""
    return jnp.sum(batch.there, dtype=jnp.float32)


def answer_logprobs(
    config: LlamaConfig,
    params: LlamaParams,
    batch: PairBatch,
    options: LossOptions = LossOptions(),
    sharding: Sharding = Sharding(),
) -> AnswerSums:
    """Log-probabilities of all answers in a batch, with both sides in one forward pass; see `token_logprobs`."""
    parts = batch.tokens, batch.segment_ids, batch.position_ids, batch.loss_mask
    rows = Batch(*(part.reshape(-1, part.shape[-1]) for part in parts))
    mask = target_mask(rows)
    logprobs = apply_weights(token_logprobs(config, params, rows, options, sharding), mask)
    numbers = 1 + jnp.arange(batch.there.shape[1])
    of = (rows.segment_ids[:, 1:, None] == numbers) & mask.astype(bool)[..., None]  # [B * S, T, P]
    sums = jnp.sum(jnp.where(of, logprobs[..., None], 0), axis=1)
    lengths = jnp.sum(apply_weights(of.astype(sums.dtype), mask[..., None]), axis=1)
    shape = *batch.tokens.shape[:2], batch.there.shape[1]
    return AnswerSums(sums.reshape(shape), lengths.reshape(shape))


def map_microbatches(function: Callable[[Any], Any], batch: Any, parts: int) -> Any:
    """Apply a function to B rows, B / parts at a time; the result is a pytree of [B, ...].

    Raises:
      ConfigError: rows that cannot be divided into `parts`.
    """
    if parts == 1:
        return function(batch)
    results = lax.map(function, microbatches(batch, parts))
    return jax.tree.map(lambda x: x.swapaxes(0, 1).reshape(-1, *x.shape[2:]), results)


def side(batch: PairBatch, number: int) -> PairBatch:
    """Only one of the two sides: [B, 1, ...]."""
    cut = lambda part: None if part is None else part[:, number : number + 1]
    rows = (cut(part) for part in (batch.tokens, batch.segment_ids, batch.position_ids, batch.loss_mask))
    return batch._replace(**dict(zip(PairBatch._fields, rows, strict=False)), reference=cut(batch.reference))


def preparing(kto: bool, reference: LlamaParams | None, parts: int) -> Callable[..., PairBatch]:
    """A function with the arguments of `pair_loss` except the first. It adds `reference` and `divergence` to a batch, which
    need all rows at once and have no gradients.

    Args:
      kto: whether to compute the divergence; the batch then keeps only its first side.
      reference: the reference model; None if batches already contain its log-probabilities, or none are needed.
      parts: number of parts of the rows, computed one after the other.
    """

    def prepare(
        config: LlamaConfig, params: LlamaParams, batch: PairBatch, options: LossOptions, sharding: Sharding
    ) -> PairBatch:
        def read(model: LlamaParams, rows: PairBatch) -> jax.Array:
            return map_microbatches(
                lambda part: answer_logprobs(config, model, part, options, sharding).logprobs, rows, parts
            )

        if reference is not None:
            batch = batch._replace(reference=read(reference, batch))
        if kto:
            other = side(batch, 1)
            ratios = jnp.where(batch.there, (read(params, other) - other.reference)[:, 0], 0)
            divergence = jnp.sum(ratios) / jnp.maximum(pair_count(batch), 1)
            batch = side(batch, 0)._replace(divergence=jnp.broadcast_to(divergence, batch.there.shape[:1]))
        return jax.tree.map(lax.stop_gradient, batch)

    return prepare


def preferred(answers: AnswerSums, batch: PairBatch, options: PreferenceOptions) -> Preferred:
    """The loss and the rewards of every pair, float32[B, P] each; 0 for empty segments. For KTO, the chosen reward is the
    answer's, and the other one is 0."""
    there = batch.there
    # Log-probabilities of empty segments are set so that every loss and its derivative are finite.
    logprobs = jnp.where(there[:, None], answers.logprobs, -1.0)
    if options.kind == "kto":
        ratios = logprobs[:, 0] - jnp.where(there, batch.reference[:, 0], -1.0)
        pair_losses = kto_loss(ratios, batch.desirable, batch.divergence, options)
        rewards = Pair(lax.stop_gradient(options.beta * ratios), jnp.zeros_like(ratios))
    else:
        reference = None
        if options.kind not in FREE:
            given = jnp.where(there[:, None], batch.reference, -1.0)
            reference = Pair(given[:, 0], given[:, 1])
        lengths = Pair(answers.lengths[:, 0], answers.lengths[:, 1])
        pair_losses, rewards = preference_loss(Pair(logprobs[:, 0], logprobs[:, 1]), reference, lengths, options)
    losses, *rewarded = (jnp.where(there, part, 0) for part in (pair_losses, *rewards))
    return Preferred(losses, Pair(*rewarded))


def pair_loss(
    preference: PreferenceOptions,
    config: LlamaConfig,
    params: LlamaParams,
    batch: PairBatch,
    options: LossOptions = LossOptions(),
    sharding: Sharding = Sharding(),
) -> LossSums:
    """The sum of the losses of a batch, to be divided by `pair_count`; see `preference_loss` and `kto_loss`.

    `metrics` has sums: "tokens" of the answers; over pairs, "chosen_reward", "rejected_reward", "chosen_logprob",
    "rejected_logprob", and "right", the number of pairs whose chosen answer has the larger reward; "chosen" and "rejected",
    the numbers of summed answers. For KTO, chosen answers are the good ones, and there is no "right".
    """
    answers = answer_logprobs(config, params, batch, options, sharding)
    result = preferred(answers, batch, preference)
    loss = jnp.sum(result.losses)
    metrics = jax.tree.map(lax.stop_gradient, sums_of(answers, result, batch))
    return LossSums(loss, lax.stop_gradient(loss), metrics)


def sums_of(answers: AnswerSums, result: Preferred, batch: PairBatch) -> dict[str, Float[Array, ""]]:
    """The `metrics` of `pair_loss`."""
    if batch.desirable is None:
        good, bad = answers.logprobs[:, 0], answers.logprobs[:, 1]
        chosen = rejected = batch.there
        of_bad = result.rewards.rejected
        metrics = {"right": jnp.sum(batch.there & (result.rewards.chosen > of_bad), dtype=jnp.float32)}
    else:
        good = bad = answers.logprobs[:, 0]
        chosen, rejected = batch.there & batch.desirable, batch.there & ~batch.desirable
        of_bad, metrics = result.rewards.chosen, {}
    over = lambda where, values: jnp.sum(jnp.where(where, values, 0))
    return {
        **metrics,
        "tokens": jnp.sum(answers.lengths),
        "chosen": jnp.sum(chosen, dtype=jnp.float32),
        "rejected": jnp.sum(rejected, dtype=jnp.float32),
        "chosen_reward": over(chosen, result.rewards.chosen),
        "rejected_reward": over(rejected, of_bad),
        "chosen_logprob": over(chosen, good),
        "rejected_logprob": over(rejected, bad),
    }
