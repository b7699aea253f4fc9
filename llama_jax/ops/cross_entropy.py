"""Cross-entropy over the vocabulary, without ever holding all logits."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from llama_jax.ops.linear import linear, sum_of_outer

Lay = Callable[[jax.Array], jax.Array]


class Surprise(NamedTuple):
    """Sums over the weighted tokens, float32[] or float64[].

    Attributes:
      loss: what is to be made small: `nll`, and `z_loss` times the squared logarithm of the softmax's denominator.
      nll: negative log-likelihood in nats; without a gradient, see `loss`.
    """

    loss: jax.Array
    nll: jax.Array


def cross_entropy(
    hidden: jax.Array,
    head: jax.Array,
    targets: jax.Array,
    weights: jax.Array,
    *,
    chunk: int,
    z_loss: float = 0.0,
    constrain: Lay = lambda logits: logits,
) -> Surprise:
    """How surprising `targets` are under the logits ``hidden @ head.T``, which exist for `chunk` positions at a time.

    The result is a sum whose derivative is known as soon as the logits are, so the gradient is computed together with the
    value and the backward pass only scales it. To make the logits there once more would cost a third on top.

    Args:
      hidden: [B, T, D], in the dtype of the products. Logarithm and sums are float32 at least.
      head: [V, D]. The chunks' gradients are summed in its dtype.
      targets: int[B, T].
      weights: [B, T], how much each token counts; 0 leaves it out. It gets no gradient.
      z_loss: keeps the softmax's denominator near 1 (Chowdhery et al. 2022, section 5).
      constrain: lays out the logits [B, chunk, V] over devices.
    """
    found = _sums(chunk, z_loss, constrain, hidden, head, targets, weights)
    return Surprise(found.loss, lax.stop_gradient(found.nll))


@partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _sums(
    chunk: int,
    z_loss: float,
    constrain: Lay,
    hidden: jax.Array,
    head: jax.Array,
    targets: jax.Array,
    weights: jax.Array,
) -> Surprise:
    cast = head.astype(hidden.dtype)

    def add(total: Surprise, part: tuple[jax.Array, ...]) -> tuple[Surprise, None]:
        sums, _ = _chunk_sums(z_loss, constrain, cast, *part)
        return Surprise(*map(jnp.add, total, sums)), None

    return lax.scan(add, _zero(hidden), _chunks(chunk, hidden, targets, weights))[0]


def _sums_and_gradients(chunk, z_loss, constrain, hidden, head, targets, weights):
    cast = head.astype(hidden.dtype)

    def add(carry: tuple[Surprise, jax.Array], part: tuple[jax.Array, ...]):
        total, of_head = carry
        sums, of_logits = _chunk_sums(z_loss, constrain, cast, *part)
        of_logits = of_logits.astype(cast.dtype)
        rows = part[0].reshape(-1, cast.shape[1]), of_logits.reshape(-1, cast.shape[0])
        of_head += sum_of_outer(*rows, of_head.dtype)  # [D, V], which is how a CPU's product gives it: turned at the end
        of_hidden = lax.dot_general(of_logits, cast, (((2,), (0,)), ((), ())), preferred_element_type=of_head.dtype)
        return (Surprise(*map(jnp.add, total, sums)), of_head), of_hidden.astype(hidden.dtype)

    start = _zero(hidden), jnp.zeros(head.shape[::-1], head.dtype)
    (total, of_head), of_hidden = lax.scan(add, start, _chunks(chunk, hidden, targets, weights))
    batch, length = targets.shape
    of_hidden = of_hidden.swapaxes(0, 1).reshape(batch, -1, hidden.shape[-1])[:, :length]
    return total, (of_hidden, of_head.T)


def _scaled(chunk, z_loss, constrain, gradients, cotangents):
    of_hidden, of_head = gradients
    scale = cotangents.loss  # the likelihood's is always 0: `cross_entropy` stops it
    return (of_hidden * scale).astype(of_hidden.dtype), (of_head * scale).astype(of_head.dtype), None, None


_sums.defvjp(_sums_and_gradients, _scaled)


def _chunk_sums(
    z_loss: float, constrain: Lay, head: jax.Array, hidden: jax.Array, targets: jax.Array, weights: jax.Array
) -> tuple[Surprise, jax.Array]:
    """The sums of one chunk, and the gradient of its loss with respect to its logits [B, chunk, V]."""
    wide = jnp.promote_types(hidden.dtype, jnp.float32)
    logits = constrain(linear(hidden, head, out_dtype=wide))
    chosen = jnp.arange(head.shape[0], dtype=targets.dtype) == targets[..., None]
    normalizer = jax.nn.logsumexp(logits, axis=-1)
    # Of logits whose vocabulary lies on several devices XLA gathers where they are. A masked sum would read them all again.
    nll = weights * (normalizer - jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0])
    sums = Surprise(jnp.sum(nll + z_loss * weights * normalizer**2), jnp.sum(nll))
    probabilities = jnp.exp(logits - normalizer[..., None])
    slope = (1 + 2 * z_loss * normalizer)[..., None] * probabilities - chosen
    return sums, weights[..., None] * slope


def _zero(hidden: jax.Array) -> Surprise:
    zero = jnp.zeros((), jnp.promote_types(hidden.dtype, jnp.float32))
    return Surprise(zero, zero)


def _chunks(chunk: int, *arrays: jax.Array) -> tuple[jax.Array, ...]:
    """[B, T, ...] as [chunks, B, chunk, ...] each, filled up with zeros; devices may share B, so it stays an axis."""
    length = arrays[0].shape[1]
    chunk = min(chunk, length)

    def cut(x: jax.Array) -> jax.Array:
        x = jnp.pad(x, [(0, 0), (0, -length % chunk), *[(0, 0)] * (x.ndim - 2)])
        return x.reshape(x.shape[0], -1, chunk, *x.shape[2:]).swapaxes(0, 1)

    return tuple(map(cut, arrays))
