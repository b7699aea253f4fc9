"""Attention in blocks of queries and keys, on any device: memory grows with T + S instead of T * S.

Online softmax (Milakov and Gimelshein 2018; Rabe and Staats 2021, section 2). The backward pass recomputes the scores of
each block (Dao et al. 2022, algorithm 4). A block of keys that no query of the block can see is skipped: half of a causal
square, and most of it with a window or packed documents.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Bool, Float

from llama_jax.ops.attention.dense import ATTENTION_OUTPUT, LOWEST, masked_scores, weighted_values
from llama_jax.ops.attention.mask import NO_KEY, NO_QUERY, AttentionMask, visible
from llama_jax.ops.gradients import with_gradient
from llama_jax.ops.layers import weight_gradient
from llama_jax.ops.platform import has_cpu_variant, pack_bits, unpack_bits

BLOCK_SIDE = 1024  # scores along one side of a block: large enough to amortize the launch of its kernels
FEW_QUERY_ROWS, KEYS_FOR_FEW_QUERIES = 16, 2048  # up to this many query rows (T * G) use larger key blocks
Carry = TypeVar("Carry")
Three = tuple[jax.Array, jax.Array, jax.Array]
PartialAttention = tuple[Float[Array, "*queries W"], Float[Array, "*queries 1"]]  # outputs and log-sum-exps
Gradients = tuple[Float[Array, "B K T G H"], Float[Array, "B K S H"], Float[Array, "B K S W"]]  # queries, keys, values


def blockwise(
    queries: Float[Array, "B K T G H"],
    keys: Float[Array, "B K S H"],
    values: Float[Array, "B K S W"],
    mask: AttentionMask,
    scale: float,
    window: int | None = None,
    *,
    forward_mode: bool = False,
) -> Float[Array, "B K T G W"]:
    """Arguments and result as for `attend`.

    The gradient is a separate loop: the one that JAX derives would save every iteration's inputs.

    Args:
      forward_mode: differentiable in every mode of JAX; in float32 at least.
    """
    if forward_mode:
        q, k, v = (x.astype(jnp.promote_types(x.dtype, jnp.float32)) for x in (queries, keys, values))
        return forward_part(q, k, v, mask, scale=scale, window=window, forward_mode=True)[0].astype(queries.dtype)
    return _blockwise((scale, window), queries, keys, values, mask)


def _blockwise_forward(
    settings: tuple[float, int | None], needed: Any, queries: Any, keys: Any, values: Any, mask: AttentionMask
) -> tuple[jax.Array, Any]:
    scale, window = settings
    out, lse = forward_part(queries, keys, values, mask, scale=scale, window=window)
    # Named, so that remat policies can save it instead of re-running the loop.
    out, lse = (checkpoint_name(x, ATTENTION_OUTPUT) for x in (out.astype(queries.dtype), lse))
    return out, (pack_bits((queries, keys, values, out)), lse, mask)


def _blockwise_backward(
    settings: tuple[float, int | None], needed: Any, residuals: Any, d_out: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array, None]:
    scale, window = settings
    arrays, lse, mask = residuals
    queries, keys, values, out = unpack_bits(arrays)
    inputs = QueryGradientInputs.of(queries, lse, out, d_out)
    dq, dk, dv = backward_part(inputs, keys, values, mask, scale=scale, window=window)
    return dq.astype(queries.dtype), dk.astype(keys.dtype), dv.astype(values.dtype), None


@with_gradient(_blockwise_forward, _blockwise_backward)
def _blockwise(
    settings: tuple[float, int | None], queries: jax.Array, keys: jax.Array, values: jax.Array, mask: AttentionMask
) -> jax.Array:
    scale, window = settings
    return forward_part(queries, keys, values, mask, scale=scale, window=window)[0].astype(queries.dtype)


def forward_part(
    queries: Float[Array, "B K T G H"],
    keys: Float[Array, "B K S H"],
    values: Float[Array, "B K S W"],
    mask: AttentionMask,
    *,
    scale: float,
    window: int | None = None,
    forward_mode: bool = False,
) -> tuple[Float[Array, "B K T G W"], Float[Array, "B K T G 1"]]:
    """Attention to some of the keys; `combine` joins it with attention to the others.

    Args:
      mask: the mask of these queries and keys.
      forward_mode: see `blockwise`.

    Returns:
      The output and the log-sum-exp of each query's scores, both in float32 at least; 0 and -inf for a query that sees none
      of the keys.
    """
    precise, width = jnp.promote_types(queries.dtype, jnp.float32), values.shape[-1]
    query_blocks, key_blocks = _blocks_of(queries, keys)
    first, end = _visible_key_blocks(mask, window, query_blocks, key_blocks)
    arrays = pack_bits((queries, keys, values))  # sliced block by block
    loop_over_keys = partial(_loop_of_static_length, key_blocks.count) if forward_mode else lax.fori_loop

    def block_of_queries(i: jax.Array, results: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        query = unpack_bits(query_blocks.cut(arrays[0], i, -3))

        def block_of_keys(j: jax.Array, carry: Three) -> Three:
            row_max, total, out = carry
            key, value = (unpack_bits(key_blocks.cut(x, j, -2)) for x in arrays[1:])
            scores = masked_scores(query, key, visible(_cut_mask(mask, query_blocks, i, key_blocks, j), window), scale)
            new_max = lax.stop_gradient(jnp.maximum(row_max, jnp.max(scores, axis=-1, keepdims=True)))
            correction, weights = jnp.exp(row_max - new_max), jnp.exp(scores - new_max)
            total = total * correction + jnp.sum(weights, axis=-1, keepdims=True)
            return new_max, total, out * correction + weighted_values(weights, value)

        # `zeros_like`, so that `shard_map`'s varying-axes check passes.
        total, out = (jnp.zeros_like(query, precise, (*query.shape[:-1], size)) for size in (1, width))
        start = jnp.full_like(total, LOWEST), total, out
        row_max, total, out = loop_over_keys(first[i], end[i], block_of_keys, start)
        positive = jnp.where(total == 0, 1, total)
        out = out / positive
        lse = jnp.where(total == 0, -jnp.inf, row_max + jnp.log(positive))
        return query_blocks.put(results[0], out, i, -3), query_blocks.put(results[1], lse, i, -3)

    out, lse = (jnp.zeros_like(queries, precise, (*queries.shape[:-1], size)) for size in (width, 1))
    if forward_mode:
        return lax.fori_loop(0, query_blocks.count, block_of_queries, (out, lse))
    return _loop(query_blocks.count, block_of_queries, (out, lse))


class QueryGradientInputs(NamedTuple):
    """Inputs of the backward pass for each query, sliced into blocks as one tree.

    Attributes:
      queries: [B, K, T, G, H].
      lse: [B, K, T, G, 1], the log-sum-exp of the scores over all keys visible to a query.
      delta: [B, K, T, G, 1], the inner product of the output and its gradient (Dao et al. 2022, algorithm 4).
      d_out: [B, K, T, G, H], the gradient of the attention output.
    """

    queries: jax.Array
    lse: jax.Array
    delta: jax.Array
    d_out: jax.Array

    @classmethod
    def of(
        cls,
        queries: Float[Array, "B K T G H"],
        lse: Float[Array, "B K T G 1"],
        out: Float[Array, "B K T G W"],
        d_out: Float[Array, "B K T G W"],
    ) -> QueryGradientInputs:
        """With `delta` computed from the attention output and its gradient: sum_j w_j dw_j is their inner product."""
        delta = jnp.sum(d_out.astype(lse.dtype) * out, axis=-1, keepdims=True)
        return cls(queries, lse, delta, d_out)


def backward_part(
    inputs: QueryGradientInputs,
    keys: Float[Array, "B K S H"],
    values: Float[Array, "B K S W"],
    mask: AttentionMask,
    *,
    scale: float,
    window: int | None = None,
) -> Gradients:
    """Contributions of these keys and values to the gradients of queries, keys and values, in float32 at least.

    Args:
      inputs: their log-sum-exp covers all keys visible to a query, not only `keys`.
      mask: the mask of these queries and keys.
    """
    query_blocks, key_blocks = _blocks_of(inputs.queries, keys)
    first, end = _visible_key_blocks(mask, window, query_blocks, key_blocks)
    precise = inputs.lse.dtype
    arrays = pack_bits(inputs), pack_bits((keys, values))

    def block_of_queries(i: jax.Array, gradients: Three) -> Three:
        query = unpack_bits(query_blocks.cut(arrays[0], i, -3))

        def block_of_keys(j: jax.Array, carry: Three) -> Three:
            dq, dk, dv = carry
            key, value = unpack_bits(key_blocks.cut(arrays[1], j, -2))
            allowed = visible(_cut_mask(mask, query_blocks, i, key_blocks, j, once=True), window)
            new = block_gradients(scale, query, key, value, allowed)
            return dq + new[0], key_blocks.add(dk, new[1], j, -2), key_blocks.add(dv, new[2], j, -2)

        start = jnp.zeros_like(query.queries, precise), *gradients[1:]
        dq, dk, dv = lax.fori_loop(first[i], end[i], block_of_keys, start)
        return query_blocks.add(gradients[0], dq, i, -3), dk, dv

    zeros = partial(jnp.zeros_like, inputs.queries, precise)
    return _loop(query_blocks.count, block_of_queries, (zeros(), zeros(keys.shape), zeros(values.shape)))


def _loop(count: int, body: Callable[[jax.Array, Carry], Carry], start: Carry) -> Carry:
    """Run `body(i, carry)` for i < count as a while_loop.

    JAX turns a fori_loop of static length into a scan, for which remat would save every iteration's inputs: all keys and
    values for each block of queries.
    """
    return lax.while_loop(lambda c: c[0] < count, lambda c: (c[0] + 1, body(*c)), (jnp.int32(0), start))[1]


def _loop_of_static_length(count: int, first: Any, end: Any, body: Callable[[Any, Carry], Carry], start: Carry) -> Carry:
    """`lax.fori_loop(first, end, body, start)` with end <= count, as a scan, which JAX differentiates in every mode."""

    @jax.checkpoint  # saves the carry of each iteration, but not its scores
    def step(i: jax.Array, carry: Carry) -> Carry:
        return lax.cond((first <= i) & (i < end), partial(body, i), lambda carry: carry, carry)

    return lax.fori_loop(0, count, step, start)


def block_gradients(
    scale: float,
    inputs: QueryGradientInputs,
    keys: Float[Array, "B K S H"],
    values: Float[Array, "B K S W"],
    allowed: Bool[Array, "#B T S"],
) -> Gradients:
    """Gradients of one block, from the full scores of its queries and keys.

    Scores are [B, K, S, T * G], so that only one of the following three matmuls contracts the first axis of both operands.
    """
    queries, lse, delta, d_out = inputs

    def flat(x: jax.Array) -> jax.Array:  # [B, K, T, G, ...] as [B, K, T * G, ...]
        return x.reshape(*x.shape[:2], -1, *x.shape[4:])

    def product(a: jax.Array, b: jax.Array, axis: int) -> jax.Array:
        return lax.dot_general(a, b, (((3,), (axis,)), ((0, 1), (0, 1))), preferred_element_type=lse.dtype)

    flat_queries, flat_d_out = flat(queries).astype(keys.dtype), flat(d_out).astype(values.dtype)
    allowed = jnp.repeat(allowed.swapaxes(-1, -2), queries.shape[-2], axis=-1)[:, None]  # [B|1, 1, S, T * G]
    logarithms = product(keys, flat_queries, 3) * scale - flat(lse).swapaxes(-1, -2)
    weights = jnp.where(allowed, jnp.exp(logarithms), 0)
    dv = product(weights.astype(values.dtype), flat_d_out, 2)
    d_weights = product(values, flat_d_out, 3)
    d_scores = (weights * (d_weights - flat(delta).swapaxes(-1, -2))).astype(keys.dtype)
    # Scaled after the matmuls: H values per query instead of S.
    dk = product(d_scores, flat_queries, 2) * scale
    dq = (weight_gradient(d_scores, keys) * scale).reshape(queries.shape)
    return dq, dk, dv


def combine(first: PartialAttention, second: PartialAttention) -> PartialAttention:
    """Combine attention to two disjoint sets of keys: outputs and log-sum-exps as `forward_part` returns them."""
    lse = jnp.logaddexp(first[1], second[1])
    known = jnp.where(lse == -jnp.inf, 0, lse)  # for a query that sees no key in either set: exp(-inf - 0) = 0
    shares = (out * jnp.exp(part - known) for out, part in (first, second))
    return functools.reduce(jnp.add, shares), lse


@dataclass(frozen=True)
class _Blocks:
    """An axis of `total` entries in `count` blocks of `size`. The last may overlap the previous one, instead of padding."""

    size: int
    count: int
    total: int

    @classmethod
    def of(cls, total: int, size: int) -> _Blocks:
        size = min(total, size)
        return cls(size, -(-total // size), total)

    def start(self, i: jax.Array) -> jax.Array:
        return jnp.minimum(i * self.size, self.total - self.size)

    def cut(self, tree: Any, i: jax.Array, axis: int) -> Any:
        """Block i of every array of a tree, along an axis counted from the end."""
        return jax.tree.map(lambda x: lax.dynamic_slice_in_dim(x, self.start(i), self.size, x.ndim + axis), tree)

    def put(self, x: jax.Array, block: jax.Array, i: jax.Array, axis: int) -> jax.Array:
        return lax.dynamic_update_slice_in_dim(x, block.astype(x.dtype), self.start(i), x.ndim + axis)

    def add(self, x: jax.Array, block: jax.Array, i: jax.Array, axis: int) -> jax.Array:
        return self.put(x, self.cut(x, i, axis) + block, i, axis)

    def without_overlap(self, x: jax.Array, i: jax.Array, other: int) -> jax.Array:
        """Block i of the last axis; entries that overlap the previous block become `other`."""
        indices = self.start(i) + jnp.arange(self.size)
        return jnp.where(indices >= i * self.size, self.cut(x, i, -1), other)

    def ends(self, x: jax.Array, absent: int | None = None) -> tuple[jax.Array, jax.Array]:
        """The minimum and the maximum of each block of the last axis, int32[count] each; `absent` entries are ignored."""
        blocks = self.start(jnp.arange(self.count))[:, None] + jnp.arange(self.size)[None]

        def reduced(fill: int, reduce: Callable[..., jax.Array]) -> jax.Array:
            known = jnp.asarray(x if absent is None else jnp.where(x == absent, fill, x)).reshape(-1, self.total)
            return reduce(known[:, blocks], axis=(0, 2))

        return reduced(2**31 - 1, jnp.min), reduced(-(2**31), jnp.max)


def _blocks_of(queries: jax.Array, keys: jax.Array) -> tuple[_Blocks, _Blocks]:
    """Blocks of queries (with all G of a group) and of keys. Their scores are square, unless there are few queries."""
    *batch, new, groups, _ = queries.shape
    side = block_side(math.prod(batch))
    size = KEYS_FOR_FEW_QUERIES if new * groups <= FEW_QUERY_ROWS else side
    return _Blocks.of(new, max(side // groups, 1)), _Blocks.of(keys.shape[-2], size)


@has_cpu_variant
def block_side(heads: int) -> int:
    """Scores along one side of a block, a power of two; `heads` is the number of heads in all rows."""
    return BLOCK_SIDE


def _cut_mask(
    mask: AttentionMask, query_blocks: _Blocks, i: jax.Array, key_blocks: _Blocks, j: jax.Array, *, once: bool = False
) -> AttentionMask:
    """The mask of a pair of blocks. Each key counts in one block only, and with `once` so does each query."""
    queries = (
        query_blocks.without_overlap(mask.query_positions, i, NO_QUERY)
        if once
        else query_blocks.cut(mask.query_positions, i, -1)
    )
    keys = key_blocks.without_overlap(mask.key_positions, j, NO_KEY)
    return AttentionMask(
        queries, keys, query_blocks.cut(mask.query_segments, i, -1), key_blocks.cut(mask.key_segments, j, -1)
    )


def _visible_key_blocks(
    mask: AttentionMask, window: int | None, query_blocks: _Blocks, key_blocks: _Blocks
) -> tuple[jax.Array, jax.Array]:
    """For each block of queries, the first visible block of keys and the end (exclusive): int32[blocks] each."""
    earliest, latest = query_blocks.ends(mask.query_positions, NO_QUERY)
    nearest, farthest = key_blocks.ends(mask.key_positions, NO_KEY)
    last = latest[:, None]
    needed = nearest[None] <= last
    if window is not None:
        # Written as key > query - window: in an empty block the positions are the limits of int32, so a sum would overflow.
        oldest = jnp.maximum(earliest, 0)[:, None] - window
        needed &= (farthest[None] > oldest) & (latest[:, None] >= 0)
    if mask.query_segments is not None and mask.key_segments is not None:
        (low, high), (lowest, highest) = query_blocks.ends(mask.query_segments), key_blocks.ends(mask.key_segments)
        above = high[:, None]
        needed &= (lowest[None] <= above) & (low[:, None] <= highest[None])
    some = jnp.any(needed, axis=1)
    first, after = jnp.argmax(needed, axis=1), key_blocks.count - jnp.argmax(needed[:, ::-1], axis=1)
    return jnp.where(some, first, 0).astype(jnp.int32), jnp.where(some, after, 0).astype(jnp.int32)
