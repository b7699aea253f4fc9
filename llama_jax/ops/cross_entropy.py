"""Chunked cross-entropy, and chunked log-probabilities of tokens.

Logits are computed for one chunk of positions at a time, so that the full logits [B, T, V] are never in memory.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int, Shaped

from llama_jax.ops.gradients import with_gradient
from llama_jax.ops.layers import Weight, project, weight_gradient
from llama_jax.ops.platform import KernelOptions, lowering_platform

Constrain = Callable[[jax.Array, str], jax.Array]  # (array, its name) -> the array with a sharding constraint


class LossSums(NamedTuple):
    """Weighted sums over tokens, float32[] or float64[].

    Attributes:
      loss: the quantity to minimize; of `cross_entropy`, `nll` plus `z_loss` times the squared log-sum-exp of the logits.
      nll: negative log-likelihood in nats, or what else a loss reports as the metric "loss"; not differentiated.
      metrics: more metrics of a custom loss, sums by name; not differentiated. If there is "tokens", it replaces the metric
        "tokens", which is the divisor of the loss otherwise.
    """

    loss: jax.Array
    nll: jax.Array
    metrics: dict[str, jax.Array] = {}  # noqa: RUF012  # a pytree; nothing changes it


@dataclass(frozen=True)
class LogitOptions:
    """How logits and the loss are computed.

    Attributes:
      chunk: positions of each row per chunk; None: 64 on a CPU and 256 elsewhere, where large matmuls are faster.
      z_loss: weight of the z-loss, which keeps the softmax's denominator near 1 (Chowdhery et al. 2022, section 5).
      vocab_size: the number of tokens, if the head has more rows: the other rows are padding, with probability 0.
      batch_shards: number of devices over which B is sharded. The gradient of the head is accumulated per shard, and summed
        over the shards once after the last chunk.
      constrain: constrains the sharding of an array, given its name: "lm_head_sharded" [V, D], as stored;
        "lm_head_gathered" [V, D]; "logits" [B, chunk, V]; "lm_head_gradient" [batch_shards, D, V].
      kernels: see `ops.layers.project`.
    """

    chunk: int | None = None
    z_loss: float = 0.0
    vocab_size: int | None = None
    batch_shards: int = 1
    constrain: Constrain = lambda x, name: x
    kernels: KernelOptions = KernelOptions()


def cross_entropy(
    hidden: Float[Array, "B T D"],
    head: jax.Array | Weight,
    targets: Int[Array, "B T"],
    weights: Bool[Array, "B T"] | Float[Array, "B T"],
    options: LogitOptions,
) -> LossSums:
    """The negative log-likelihood of `targets` under the logits ``hidden @ head.T``, computed chunk by chunk.

    The forward pass also computes the gradients, chunk by chunk, and the backward pass only scales them: recomputing the
    logits in the backward pass would take a third more FLOPs.

    Args:
      hidden: in the dtype of the matmuls. Logarithm and sums are float32 at least.
      head: [V, D]. Its gradient is summed over the chunks in its dtype, and only computed if needed. For a quantized or
        LoRA head, the backward pass is derived by autodiff and recomputes the logits.
      weights: the weight of each token in the sums, such as the loss mask; 0 ignores the token. Not differentiated.
    """
    if isinstance(head, Weight) or options.kernels.forward_mode:
        sums = _loss_sums_by_autodiff(options, hidden, head, targets, weights)
    else:
        sums = _loss_sums(options, hidden, head, targets, weights)
    return LossSums(sums.loss, lax.stop_gradient(sums.nll))


def chunked_logprobs(
    hidden: Float[Array, "B T D"],
    head: jax.Array | Weight,
    targets: Int[Array, "B T"],
    options: LogitOptions,
    temperature: float | Float[Array, ""] = 1.0,
) -> Float[Array, "B T"]:
    """The log-probability of each target under ``softmax(hidden @ head.T / temperature)``, in nats.

    The logits are computed chunk by chunk, and recomputed in the backward pass, so that only one chunk is in memory.

    Args:
      hidden: in the dtype of the matmuls.
      head: [V, D], an array or a `Weight`.
      targets: token ids; if negative, the result is 0, without a gradient.
      options: `z_loss` is ignored.
      temperature: above 0, the temperature with which the tokens were sampled.

    Returns:
      float32, or float64 if `hidden` is.
    """
    logits_dtype = jnp.promote_types(hidden.dtype, jnp.float32)
    weight: Any = gathered_head(head, hidden.dtype, options.constrain)
    vocab_ids = jnp.arange(weight.shape[0], dtype=targets.dtype)

    @jax.checkpoint
    def chunk_logprobs(hidden: jax.Array, targets: jax.Array) -> jax.Array:
        logits = project(hidden, weight, out_dtype=logits_dtype, kernels=options.kernels)
        logits = options.constrain(logits, "logits") / temperature
        if options.vocab_size is not None and options.vocab_size < weight.shape[0]:
            logits = jnp.where(vocab_ids < options.vocab_size, logits, -jnp.inf)
        target_logits = jnp.take_along_axis(logits, jnp.maximum(targets, 0)[..., None], axis=-1)[..., 0]
        return jnp.where(targets >= 0, target_logits - jax.nn.logsumexp(logits, axis=-1), 0)

    chunks = split_chunks(hidden, options.chunk), split_chunks(targets, options.chunk, fill=-1)
    return join_chunks(lax.map(lambda chunk: chunk_logprobs(*chunk), chunks), targets.shape[1])


def _loss_sums_by_autodiff(
    options: LogitOptions, hidden: jax.Array, head: Any, targets: jax.Array, weights: jax.Array
) -> LossSums:
    """`_loss_sums` for a head that is not an array, with a backward pass by autodiff, which saves only hidden states."""

    @jax.checkpoint
    def add_chunk(sums: LossSums, chunk: tuple[jax.Array, ...]) -> tuple[LossSums, None]:
        chunk_sums, _ = _chunk_sums_and_d_logits(options, head, *chunk)
        return jax.tree.map(jnp.add, sums, chunk_sums), None

    row_sums, _ = lax.scan(add_chunk, _zero_row_sums(hidden), _chunks(options.chunk, hidden, targets, weights))
    return jax.tree.map(jnp.sum, row_sums)


def _loss_sums_forward(
    options: LogitOptions, needed: Any, hidden: jax.Array, head: jax.Array, targets: jax.Array, weights: jax.Array
) -> tuple[LossSums, Any]:
    """The sums, and their gradients as residuals. That of the head, [V, D], is computed only if it is needed."""
    return _loss_sums_and_gradients(options, needed[1], hidden, head, targets, weights)


def _loss_sums_backward(options: LogitOptions, needed: Any, gradients: list[Any], cotangents: LossSums) -> tuple[Any, ...]:
    d_hidden, d_head = (None if x is None else x * cotangents.loss.astype(x.dtype) for x in gradients)
    return d_hidden, d_head, None, None


@with_gradient(_loss_sums_forward, _loss_sums_backward)
def _loss_sums(
    options: LogitOptions, hidden: jax.Array, head: jax.Array, targets: jax.Array, weights: jax.Array
) -> LossSums:
    """`cross_entropy` for a head that is an array, without gradients."""
    head_cast = gathered_head(head, hidden.dtype, options.constrain)

    def add_chunk(sums: LossSums, chunk: tuple[jax.Array, ...]) -> tuple[LossSums, None]:
        chunk_sums, _ = _chunk_sums_and_d_logits(options, head_cast, *chunk)
        return jax.tree.map(jnp.add, sums, chunk_sums), None

    row_sums, _ = lax.scan(add_chunk, _zero_row_sums(hidden), _chunks(options.chunk, hidden, targets, weights))
    return jax.tree.map(jnp.sum, row_sums)


def _loss_sums_and_gradients(
    options: LogitOptions, needs_d_head: bool, hidden: jax.Array, head: jax.Array, targets: jax.Array, weights: jax.Array
) -> tuple[LossSums, list[Any]]:
    """The sums, and the gradients of the loss: d_hidden [B, T, D], and d_head [V, D] or, without `needs_d_head`, None."""
    batch_shards, constrain = options.batch_shards, options.constrain
    head_cast = gathered_head(head, hidden.dtype, constrain)
    transposed_head = head_cast.T  # outside the loop: XLA for CPU would convert the whole head to float32 instead

    def add_chunk(carry: tuple[LossSums, jax.Array | None], chunk: tuple[jax.Array, ...]) -> tuple[Any, jax.Array]:
        sums, d_head = carry
        chunk_sums, d_logits = _chunk_sums_and_d_logits(options, head_cast, *chunk)
        d_logits = d_logits.astype(head_cast.dtype)
        if d_head is not None:
            hidden_rows, d_logits_rows = (x.reshape(batch_shards, -1, x.shape[-1]) for x in (chunk[0], d_logits))
            d_head = constrain(d_head + weight_gradient(hidden_rows, d_logits_rows, d_head.dtype), "lm_head_gradient")
        d_hidden = project(d_logits, transposed_head)
        return (jax.tree.map(jnp.add, sums, chunk_sums), d_head), d_hidden

    d_head = None
    if needs_d_head:  # accumulated as [D, V], the layout of the CPU matmul, and transposed once at the end
        d_head = constrain(jnp.zeros_like(head, shape=(batch_shards, *head.shape[::-1])), "lm_head_gradient")
    chunks = _chunks(options.chunk, hidden, targets, weights)
    (row_sums, d_head), d_hidden = lax.scan(add_chunk, (_zero_row_sums(hidden), d_head), chunks)
    batch, length = targets.shape
    d_hidden = d_hidden.swapaxes(0, 1).reshape(batch, -1, hidden.shape[-1])[:, :length]
    return jax.tree.map(jnp.sum, row_sums), [d_hidden, None if d_head is None else jnp.sum(d_head, axis=0).T]


def gathered_head(head: Any, dtype: jax.typing.DTypeLike, constrain: Constrain) -> Any:
    """The head [V, D], cast on its shards and then gathered once for all chunks; a `Weight` is returned unchanged."""
    if isinstance(head, Weight):
        return head
    return constrain(constrain(head.astype(dtype), "lm_head_sharded"), "lm_head_gathered")


def _chunk_sums_and_d_logits(
    options: LogitOptions, head: Any, hidden: jax.Array, targets: jax.Array, weights: jax.Array
) -> tuple[LossSums, jax.Array]:
    """For one chunk of positions: the sums of each row, [B], and the gradient of the loss by the logits, [B, chunk, V]."""
    z_loss, vocab_size = options.z_loss, options.vocab_size
    logits_dtype = jnp.promote_types(hidden.dtype, jnp.float32)
    logits = options.constrain(project(hidden, head, out_dtype=logits_dtype, kernels=options.kernels), "logits")
    vocab_ids = jnp.arange(head.shape[0], dtype=targets.dtype)
    targets = jnp.where(weights != 0, targets, 0)  # ignored targets may be any value, such as -100
    targets = jnp.where(targets < 0, head.shape[0], targets)  # out of range, which gives NaN; negative indices would wrap
    if vocab_size is not None and vocab_size < head.shape[0]:
        logits = jnp.where(lax.broadcast_to_rank(vocab_ids < vocab_size, logits.ndim), logits, -jnp.inf)
    is_target = lax.broadcast_to_rank(vocab_ids, logits.ndim) == targets[..., None]
    lse = jax.nn.logsumexp(logits, axis=-1)
    # With a sharded vocabulary XLA gathers locally; a masked sum would read all logits again.
    nll = weights * (lse - jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0])
    sums = LossSums(jnp.sum(nll + z_loss * weights * lse**2, axis=-1), jnp.sum(nll, axis=-1))
    probabilities = jnp.exp(logits - lse[..., None])
    d_logits = (1 + 2 * z_loss * lse)[..., None] * probabilities - is_target.astype(probabilities.dtype)
    return sums, weights[..., None] * d_logits


def _zero_row_sums(hidden: jax.Array) -> LossSums:
    """Zeros for the sums of each row, [B]."""
    # `zeros_like`, so that `shard_map`'s varying-axes check passes.
    zeros = jnp.zeros_like(hidden, jnp.promote_types(hidden.dtype, jnp.float32), shape=hidden.shape[:1])
    return LossSums(zeros, zeros)


def split_chunks(x: Shaped[Array, "B T *rest"], chunk: int | None, fill: int = 0) -> Shaped[Array, "chunks B chunk *rest"]:
    """Split the axis T into chunks, padded with `fill`. B stays an axis, because it may be sharded."""
    chunk = min(chunk or (64 if lowering_platform() == "cpu" else 256), x.shape[1])
    x = jnp.pad(x, [(0, 0), (0, -x.shape[1] % chunk), *[(0, 0)] * (x.ndim - 2)], constant_values=fill)
    return x.reshape(x.shape[0], -1, chunk, *x.shape[2:]).swapaxes(0, 1)


def join_chunks(chunks: Shaped[Array, "chunks B chunk"], length: int) -> Shaped[Array, "B {length}"]:
    """Undo `split_chunks` of an array [B, T]."""
    return chunks.swapaxes(0, 1).reshape(chunks.shape[1], -1)[:, :length]


def _chunks(chunk: int | None, *arrays: jax.Array) -> tuple[jax.Array, ...]:
    return tuple(split_chunks(x, chunk) for x in arrays)
