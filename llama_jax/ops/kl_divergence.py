"""KL divergence between two distributions over the vocabulary.

It is computed in chunks of positions, so that the full logits are never in memory.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int

from llama_jax.ops.cross_entropy import LogitOptions, gathered_head, join_chunks, split_chunks
from llama_jax.ops.layers import Weight, project


class Logits(NamedTuple):
    """Logits before the last matmul: hidden states [B, T, D], and a head [V, D], an array or a `Weight`."""

    hidden: jax.Array
    head: jax.Array | Weight


class TokenDivergence(NamedTuple):
    """The results for each position, float32[B, T] (float64 for hidden states in float64).

    Attributes:
      divergence: KL(teacher || student) at the temperature, in nats.
      nll: negative log-likelihood of the target under the student at temperature 1, in nats.
    """

    divergence: jax.Array
    nll: jax.Array


@dataclass(frozen=True)
class DivergenceOptions:
    """How the distributions are compared.

    Attributes:
      temperature: above 0; divides the logits of both (Hinton et al. 2015, section 2).
      top_k: compare the teacher's k most probable tokens (with ties of the last) separately, and all other tokens together
        as one; 0 compares the whole distributions. This never makes the divergence larger (data-processing inequality),
        and it stays 0 for equal distributions.
    """

    temperature: float = 1.0
    top_k: int = 0


def token_divergence(
    student: Logits,
    teacher: Logits,
    targets: Int[Array, "B T"],
    logit_options: tuple[LogitOptions, LogitOptions],
    options: DivergenceOptions = DivergenceOptions(),
) -> TokenDivergence:
    """The divergence of the student's distribution from the teacher's at every position, computed chunk by chunk.

    The logits of both, [B, chunk, V], are recomputed in the backward pass. The teacher has no gradient.

    Args:
      targets: for a negative target both results are 0, without a gradient.
      logit_options: how the logits of student and teacher are computed; `z_loss` and `batch_shards` are ignored. The chunk
        is the student's.
    """
    wide = jnp.promote_types(student.hidden.dtype, jnp.float32)
    student_options, teacher_options = logit_options
    heads = tuple(
        gathered_head(model.head, model.hidden.dtype, options.constrain)
        for model, options in ((student, student_options), (teacher, teacher_options))
    )
    heads = heads[0], lax.stop_gradient(heads[1])

    def logits_of(hidden: jax.Array, head: Any, options: LogitOptions) -> jax.Array:
        logits = options.constrain(project(hidden, head, out_dtype=wide, kernels=options.kernels), "logits")
        size = options.vocab_size or logits.shape[-1]
        return logits if size == logits.shape[-1] else jnp.where(jnp.arange(logits.shape[-1]) < size, logits, -jnp.inf)

    @jax.checkpoint
    def of_chunk(hidden: jax.Array, teacher_hidden: jax.Array, targets: jax.Array) -> TokenDivergence:
        logits = logits_of(hidden, heads[0], student_options)
        teacher_logits = lax.stop_gradient(logits_of(teacher_hidden, heads[1], teacher_options))
        chosen = jnp.take_along_axis(logits, jnp.maximum(targets, 0)[..., None], axis=-1)[..., 0]
        nll = jax.nn.logsumexp(logits, axis=-1) - chosen
        divergence = _divergence(logits / options.temperature, teacher_logits / options.temperature, options.top_k)
        return TokenDivergence(*(jnp.where(targets >= 0, part, 0) for part in (divergence, nll)))

    chunks = (
        split_chunks(student.hidden, student_options.chunk),
        split_chunks(lax.stop_gradient(teacher.hidden), student_options.chunk),
        split_chunks(targets, student_options.chunk, fill=-1),
    )
    return jax.tree.map(lambda x: join_chunks(x, targets.shape[1]), lax.map(lambda chunk: of_chunk(*chunk), chunks))


def _divergence(logits: jax.Array, teacher_logits: jax.Array, top_k: int) -> jax.Array:
    """KL(softmax(wanted) || softmax(logits)) over the last axis. Entries that are -inf in both are not tokens."""
    logq, logp = jax.nn.log_softmax(logits, axis=-1), jax.nn.log_softmax(teacher_logits, axis=-1)
    if not 0 < top_k < logp.shape[-1]:
        return _sum_where(logp, logq, logp > -jnp.inf)
    in_top_k = (logp >= lax.top_k(logp, top_k)[0][..., -1:]) & (logp > -jnp.inf)  # with all ties
    others = ~in_top_k & (logp > -jnp.inf)
    some = jnp.any(others, axis=-1, keepdims=True)

    def of_others(logprobs: jax.Array) -> jax.Array:
        # Without others, zeros, so that the logsumexp has a derivative.
        return jax.nn.logsumexp(jnp.where(some, jnp.where(others, logprobs, -jnp.inf), 0), axis=-1, keepdims=True)

    return _sum_where(logp, logq, in_top_k) + _sum_where(of_others(logp), of_others(logq), some)


def _sum_where(logp: jax.Array, logq: jax.Array, where: jax.Array) -> jax.Array:
    """Sum of p (log p - log q) over the entries of the last axis that `where` selects."""
    logp, logq = jnp.where(where, logp, 0), jnp.where(where, logq, 0)
    return jnp.sum(jnp.where(where, jnp.exp(logp) * (logp - logq), 0), axis=-1)
