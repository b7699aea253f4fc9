"""How far a distribution over the vocabulary is from another one, without ever holding all logits of either."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from llama_jax.ops.cross_entropy import Constrain, LogitOptions
from llama_jax.ops.layers import Weight, project


class Logits(NamedTuple):
    """What logits are made of: hidden states [B, T, D], and a head [V, D] or what else `project` takes."""

    hidden: jax.Array
    head: jax.Array | Weight


class TokenDivergence(NamedTuple):
    """Of each position, float32[B, T] (float64 for states in float64).

    Attributes:
      divergence: KL(teacher || student) at the temperature, in nats.
      nll: negative log-likelihood of the target under the student at temperature 1, in nats.
    """

    divergence: jax.Array
    nll: jax.Array


@dataclass(frozen=True)
class DivergenceOptions:
    """What is compared.

    Attributes:
      temperature: above 0; divides the logits of both (Hinton et al. 2015, section 2).
      top_k: compare the teacher's k most probable tokens, including those as probable as the last of them, and all others
        together as one; 0 compares the whole distributions. This never makes the divergence larger (data-processing
        inequality), and it stays 0 for equal distributions.
    """

    temperature: float = 1.0
    top_k: int = 0


def token_divergence(
    student: Logits,
    teacher: Logits,
    targets: jax.Array,
    made: tuple[LogitOptions, LogitOptions],
    options: DivergenceOptions = DivergenceOptions(),
) -> TokenDivergence:
    """The divergence of the student's distribution from the teacher's at every position, made chunk by chunk.

    The logits of both, [B, chunk, V], are made again in the backward pass. The teacher gets no gradient.

    Args:
      targets: int[B, T]; of one below 0 both numbers are 0, without a gradient.
      made: how the logits of student and teacher are made; `z_loss` and `shares` have no meaning here. The chunk is the
        student's.
    """
    wide = jnp.promote_types(student.hidden.dtype, jnp.float32)
    own, other = made
    heads = _head(student, own.constrain), lax.stop_gradient(_head(teacher, other.constrain))

    def logits_of(hidden: jax.Array, head: Any, options: LogitOptions) -> jax.Array:
        found = options.constrain(project(hidden, head, out_dtype=wide), "logits")
        size = options.vocab_size or found.shape[-1]
        return found if size == found.shape[-1] else jnp.where(jnp.arange(found.shape[-1]) < size, found, -jnp.inf)

    @jax.checkpoint
    def of_chunk(hidden: jax.Array, theirs: jax.Array, targets: jax.Array) -> TokenDivergence:
        logits = logits_of(hidden, heads[0], own)
        wanted = lax.stop_gradient(logits_of(theirs, heads[1], other))
        chosen = jnp.take_along_axis(logits, jnp.maximum(targets, 0)[..., None], axis=-1)[..., 0]
        nll = jax.nn.logsumexp(logits, axis=-1) - chosen
        found = _divergence(logits / options.temperature, wanted / options.temperature, options.top_k)
        return TokenDivergence(*(jnp.where(targets >= 0, part, 0) for part in (found, nll)))

    batch, length = targets.shape
    chunk = min(own.chunk, length)
    padding = -length % chunk

    def parts(x: jax.Array, fill: int) -> jax.Array:
        x = jnp.pad(x, [(0, 0), (0, padding), *[(0, 0)] * (x.ndim - 2)], constant_values=fill)
        return x.reshape(batch, -1, chunk, *x.shape[2:]).swapaxes(0, 1)

    given = parts(student.hidden, 0), parts(lax.stop_gradient(teacher.hidden), 0), parts(targets, -1)
    found = lax.map(lambda part: of_chunk(*part), given)
    return jax.tree.map(lambda x: x.swapaxes(0, 1).reshape(batch, -1)[:, :length], found)


def _head(model: Logits, constrain: Constrain) -> Any:
    if hasattr(model.head, "project"):
        return model.head
    return constrain(constrain(model.head.astype(model.hidden.dtype), "head_shares"), "head")


def _divergence(logits: jax.Array, wanted: jax.Array, top_k: int) -> jax.Array:
    """KL(softmax(wanted) || softmax(logits)) over the last axis. What is -inf under both is no token."""
    logq, logp = jax.nn.log_softmax(logits, axis=-1), jax.nn.log_softmax(wanted, axis=-1)
    if not 0 < top_k < logp.shape[-1]:
        return _sum_of(logp, logq, logp > -jnp.inf)
    kept = (logp >= lax.top_k(logp, top_k)[0][..., -1:]) & (logp > -jnp.inf)  # of the same probability all
    others = ~kept & (logp > -jnp.inf)
    some = jnp.any(others, axis=-1, keepdims=True)

    def of_others(one: jax.Array) -> jax.Array:
        # Where there are none, numbers whose sum has a derivative.
        return jax.nn.logsumexp(jnp.where(some, jnp.where(others, one, -jnp.inf), 0), axis=-1, keepdims=True)

    return _sum_of(logp, logq, kept) + _sum_of(of_others(logp), of_others(logq), some)


def _sum_of(logp: jax.Array, logq: jax.Array, where: jax.Array) -> jax.Array:
    """Sum of p (log p - log q) over the last axis where that is asked for."""
    logp, logq = jnp.where(where, logp, 0), jnp.where(where, logq, 0)
    return jnp.sum(jnp.where(where, jnp.exp(logp) * (logp - logq), 0), axis=-1)
