"""Sampling the next token. Every setting is an array with one value per row, so rows of a batch may differ.

Repetition penalty, temperature, top-k, top-p and min-p are applied in this order, and keep the same tokens as Hugging Face
transformers' logits processors, except for ties. Each of the last three keeps the tokens at or above some score, so together
they are one threshold per row. It is found by bisection over the bits of the scores; the vocabulary is never sorted.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float32, Int32

from llama_jax.inference.sampling_settings import Sampling
from llama_jax.ops.platform import AnyArray
from llama_jax.ops.sampling import argmax, random_key

jax.tree_util.register_dataclass(Sampling, data_fields=[field.name for field in fields(Sampling)], meta_fields=[])


class LogitMask(NamedTuple):
    """Tokens that are not allowed in some rows.

    Attributes:
      needed: bool[], whether there are any such tokens.
      apply: sets the logits, float32[B, V], of these tokens to -inf.
    """

    needed: jax.Array
    apply: Callable[[jax.Array], jax.Array]


def sample(
    logits: Float32[AnyArray, "B V"],
    sampling: Sampling | None,
    seen: Bool[AnyArray, " B #V"],
    count: Int32[AnyArray, " B"],
    logit_mask: LogitMask | None = None,
) -> Int32[Array, " B"]:
    """Sample one token per row. If all rows are greedy without a penalty, no other [B, V] array is computed.

    Args:
      sampling: arrays [B], from `Sampling.per_row`. None: greedy without a penalty, without the branch at which a GPU waits.
      seen: tokens that occur in the row (prompt and continuation).
      count: number of tokens generated in the row, which is folded into its random key.
    """
    if sampling is None and logit_mask is None:
        return argmax(logits)
    sampling = sampling or Sampling().per_row(len(logits))
    is_sampled, penalty = sampling.temperature > 0, sampling.repetition_penalty

    def penalize_and_sample(logits: jax.Array) -> jax.Array:
        if logit_mask is not None:
            logits = lax.cond(logit_mask.needed, logit_mask.apply, lambda logits: logits, logits)
        scores = penalize(logits, penalty, seen)
        return jnp.where(is_sampled, _sample_gumbel(scores, sampling, count), argmax(scores))

    needs_sampling = jnp.any(is_sampled | (penalty != 1))
    if logit_mask is not None:
        needs_sampling |= logit_mask.needed
    return lax.cond(needs_sampling, penalize_and_sample, argmax, logits)


def penalize(
    logits: Float32[AnyArray, "B V"],
    penalty: Float32[AnyArray, " B"],
    seen: Bool[AnyArray, " B #V"],
) -> Float32[Array, "B V"]:
    """The repetition penalty on tokens that are `seen` (Keskar et al. 2019, section 4.1)."""
    penalty = penalty[:, None]
    return jnp.where(seen, jnp.where(logits < 0, logits * penalty, logits / penalty), logits)


def has_filter(sampling: Sampling) -> jax.Array:
    """bool[B]: the rows for which `score_threshold` may drop a token."""
    return (sampling.top_k > 0) | (sampling.top_p < 1) | (sampling.min_p > 0)


def score_threshold(scores: Float32[AnyArray, "B V"], sampling: Sampling) -> Float32[Array, " B"]:
    """The score below which top-k, top-p or min-p drops a token.

    Args:
      scores: logits after penalty and temperature.
    """
    vocab = scores.shape[-1]
    bits = _ordered_bits(scores)
    best = jnp.max(scores, axis=-1)

    uses_top_k = (sampling.top_k > 0) & (sampling.top_k < vocab)
    uses_top_p = sampling.top_p < 1
    top_k_bits = lax.cond(
        jnp.any(uses_top_k),
        lambda: _largest_threshold(bits, jnp.ones_like(scores), sampling.top_k.astype(jnp.float32)),
        lambda: jnp.zeros(best.shape, jnp.uint32),
    )
    top_k_bits = jnp.where(uses_top_k, top_k_bits, 0)

    def nucleus() -> jax.Array:
        mass = jnp.where(bits >= top_k_bits[:, None], jnp.exp(scores - best[:, None]), 0.0)  # unnormalized probabilities
        return _largest_threshold(bits, mass, sampling.top_p * jnp.sum(mass, axis=-1))

    top_p_bits = lax.cond(jnp.any(uses_top_p), nucleus, lambda: jnp.zeros(best.shape, jnp.uint32))
    top_p_bits = jnp.where(uses_top_p, top_p_bits, 0)
    min_p_threshold = jnp.where(sampling.min_p > 0, best + jnp.log(sampling.min_p), -jnp.inf)
    return jnp.maximum(_from_ordered_bits(jnp.maximum(top_k_bits, top_p_bits)), min_p_threshold)


def _sample_gumbel(scores: jax.Array, sampling: Sampling, count: AnyArray) -> jax.Array:
    """A token from the softmax over the kept scores, by the Gumbel-max trick (Maddison et al. 2014)."""
    vocab = scores.shape[-1]
    scores = scores / jnp.where(sampling.temperature > 0, sampling.temperature, 1.0)[:, None]
    keep_all = lambda scores, _: jnp.full(scores.shape[0], -jnp.inf, scores.dtype)
    threshold = lax.cond(jnp.any(has_filter(sampling)), score_threshold, keep_all, scores, sampling)

    def noise(seed: jax.Array, count: AnyArray) -> jax.Array:
        return jax.random.gumbel(random_key(seed, count), (vocab,), scores.dtype)

    noisy = scores + jax.vmap(noise)(sampling.seed, count)
    return argmax(jnp.where(scores >= threshold[:, None], noisy, -jnp.inf))


def _ordered_bits(x: AnyArray) -> jax.Array:
    """uint32 with the same order as the float32 `x`: the sign bit set for positives, all bits flipped for negatives."""
    bits = lax.bitcast_convert_type(x + 0.0, jnp.uint32)  # + 0.0 turns -0 into 0
    return jnp.where(bits >> 31 == 1, ~bits, bits | jnp.uint32(1 << 31))


def _from_ordered_bits(bits: jax.Array) -> jax.Array:
    """Undo `_ordered_bits`; 0, which is below the bits of every float, becomes -inf."""
    x = lax.bitcast_convert_type(jnp.where(bits >> 31 == 1, bits ^ jnp.uint32(1 << 31), ~bits), jnp.float32)
    return jnp.where(bits == 0, -jnp.inf, x)


def _largest_threshold(bits: jax.Array, weight: jax.Array, target: jax.Array) -> jax.Array:
    """The largest t for which the weights of the entries at or above t sum to `target` or more: uint32[B].

    With weights of 1 and a target k, it is the k-th largest entry. With probabilities and a target p, it is the smallest
    entry of the nucleus, because the entries strictly above it sum to less than p.

    Args:
      bits: uint32[B, V]; weight: float32[B, V]; target: float32[B].
    """

    def try_bit(i: jax.Array, threshold: jax.Array) -> jax.Array:
        candidate = threshold | (jnp.uint32(1 << 31) >> lax.convert_element_type(i, jnp.uint32))
        total = jnp.sum(jnp.where(bits >= candidate[:, None], weight, 0.0), axis=-1)
        return jnp.where(total >= target, candidate, threshold)

    return lax.fori_loop(0, 32, try_bit, jnp.zeros(bits.shape[0], jnp.uint32))
