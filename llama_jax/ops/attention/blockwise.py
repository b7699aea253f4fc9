"""Attention by blocks of queries and keys: memory that grows with T + S and not with T * S, on any device.

The softmax is made as the blocks come (Rabe and Staats 2021, section 2; Milakov and Gimelshein 2018); the backward pass
computes the scores of each block again (Dao et al. 2022, algorithm 4). A block that no query of its rows can see is not
computed: of a causal square half, of a window or of packed documents what lies near the diagonal.
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

from llama_jax.ops import cpu
from llama_jax.ops.attention.dense import ATTENTION_OUTPUT, LOWEST, scores_of, weighted_values
from llama_jax.ops.attention.mask import NO_KEY, NO_QUERY, AttentionMask, visible
from llama_jax.ops.cpu import for_cpu, pack_bits, unpack_bits
from llama_jax.ops.layers import weight_gradient

SIDE = 1024  # scores along one side of a block: enough that it is worth starting its kernels
FEW_QUERY_ROWS, MORE_KEYS = 16, 2048
Carry = TypeVar("Carry")
Three = tuple[jax.Array, jax.Array, jax.Array]


class QueryGradientInputs(NamedTuple):
    """What the backward pass reads of queries; it is cut into blocks together.

    Attributes:
      queries: [B, K, T, G, H].
      normalizer: [B, K, T, G, 1], the log-sum-exp over all keys that a query saw.
      mean: [B, K, T, G, 1], of the gradients of each query's weights, under the weights.
      of_mixed: [B, K, T, G, H], the gradient of the whole mixture.
    """

    queries: jax.Array
    normalizer: jax.Array
    mean: jax.Array
    of_mixed: jax.Array

    @classmethod
    def of(cls, queries: jax.Array, normalizer: jax.Array, mixed: jax.Array, of_mixed: jax.Array) -> QueryGradientInputs:
        """From the mixture [B, K, T, G, H] and its gradient: sum_j w_j (dw_j) is the inner product of the two."""
        mean = jnp.sum(of_mixed.astype(normalizer.dtype) * mixed, axis=-1, keepdims=True)
        return cls(queries, normalizer, mean, of_mixed)


@partial(jax.custom_vjp, nondiff_argnums=(4, 5))
def blockwise(
    queries: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    seen: AttentionMask,
    scale: float,
    window: int | None = None,
) -> jax.Array:
    """Arguments and result as for `attend`. Differentiated by hand, in reverse mode only: JAX would save a loop's turns."""
    return forward_part(queries, keys, values, seen, scale=scale, window=window)[0].astype(queries.dtype)


def _forward_and_kept(queries, keys, values, seen, scale, window):
    found = forward_part(queries, keys, values, seen, scale=scale, window=window)
    # By a name, so that training can keep them: what comes out of a loop is otherwise made again by `jax.checkpoint`.
    mixed, normalizer = (checkpoint_name(x, ATTENTION_OUTPUT) for x in (found[0].astype(queries.dtype), found[1]))
    return mixed, (pack_bits((queries, keys, values, mixed)), normalizer, seen)


def _backward(scale: float, window: int | None, kept: Any, of_mixed: jax.Array) -> tuple[Any, ...]:
    arrays, normalizer, seen = kept
    queries, keys, values, mixed = unpack_bits(arrays)
    of_queries = QueryGradientInputs.of(queries, normalizer, mixed, of_mixed)
    found = backward_part(of_queries, keys, values, seen, scale=scale, window=window)
    return *(x.astype(like.dtype) for x, like in zip(found, (queries, keys, values), strict=True)), None


blockwise.defvjp(_forward_and_kept, _backward)


def forward_part(
    queries: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    seen: AttentionMask,
    *,
    scale: float,
    window: int | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Attention to some of the keys, to be joined with that to others by `merge`.

    Args:
      queries: [B, K, T, G, H].
      keys, values: [B, K, S, H].
      seen: what stands where.

    Returns:
      The mixture [B, K, T, G, H] and the log-sum-exp of each query's scores [B, K, T, G, 1], both in float32 at least; 0 and
      -inf for a query that sees none of the keys.
    """
    precise, width = jnp.promote_types(queries.dtype, jnp.float32), values.shape[-1]
    query_blocks, key_blocks = _blocks_of(queries, keys)
    first, end = _reach(seen, window, query_blocks, key_blocks)
    arrays = pack_bits((queries, keys, values))  # each block is a slice of them

    def block_of_queries(i: jax.Array, found: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        own = unpack_bits(query_blocks.cut(arrays[0], i, -3))

        def block_of_keys(j: jax.Array, carry: Three) -> Three:
            largest, total, mixed = carry
            key, value = (unpack_bits(key_blocks.cut(x, j, -2)) for x in arrays[1:])
            scores = scores_of(own, key, visible(_cut(seen, query_blocks, i, key_blocks, j), window), scale)
            larger = jnp.maximum(largest, jnp.max(scores, axis=-1, keepdims=True))
            shrink, weights = jnp.exp(largest - larger), jnp.exp(scores - larger)
            total = total * shrink + jnp.sum(weights, axis=-1, keepdims=True)
            return larger, total, mixed * shrink + weighted_values(weights, value)

        # Like `own`, so that under a `jax.shard_map` that checks it they vary over the devices as what is added to them.
        total, mixed = (jnp.zeros_like(own, precise, (*own.shape[:-1], size)) for size in (1, width))
        start = jnp.full_like(total, LOWEST), total, mixed
        largest, total, mixed = lax.fori_loop(first[i], end[i], block_of_keys, start)
        mixed = mixed / jnp.where(total == 0, 1, total)
        normalizer = jnp.where(total == 0, -jnp.inf, largest + jnp.log(total))
        return query_blocks.put(found[0], mixed, i, -3), query_blocks.put(found[1], normalizer, i, -3)

    mixed, normalizer = (jnp.zeros_like(queries, precise, (*queries.shape[:-1], size)) for size in (width, 1))
    return _loop(query_blocks.count, block_of_queries, (mixed, normalizer))


def backward_part(
    of_queries: QueryGradientInputs,
    keys: jax.Array,
    values: jax.Array,
    seen: AttentionMask,
    *,
    scale: float,
    window: int | None = None,
) -> Three:
    """The gradients of queries, keys and values from these keys and values, in float32 at least.

    Args:
      of_queries: with the log-sum-exp over these keys and all others that a query saw.
      keys, values: [B, K, S, H].
      seen: what stands where.
    """
    query_blocks, key_blocks = _blocks_of(of_queries.queries, keys)
    first, end = _reach(seen, window, query_blocks, key_blocks)
    precise = of_queries.normalizer.dtype
    arrays = pack_bits(of_queries), pack_bits((keys, values))

    def block_of_queries(i: jax.Array, found: Three) -> Three:
        own = unpack_bits(query_blocks.cut(arrays[0], i, -3))

        def block_of_keys(j: jax.Array, carry: Three) -> Three:
            of_own, of_keys, of_values = carry
            key, value = unpack_bits(key_blocks.cut(arrays[1], j, -2))
            allowed = visible(_cut(seen, query_blocks, i, key_blocks, j, once=True), window)
            new = gradients_of_block(scale, own, key, value, allowed)
            return of_own + new[0], key_blocks.add(of_keys, new[1], j, -2), key_blocks.add(of_values, new[2], j, -2)

        start = jnp.zeros_like(own.queries, precise), *found[1:]
        of_own, of_keys, of_values = lax.fori_loop(first[i], end[i], block_of_keys, start)
        return query_blocks.add(found[0], of_own, i, -3), of_keys, of_values

    zeros = partial(jnp.zeros_like, of_queries.queries, precise)
    return _loop(query_blocks.count, block_of_queries, (zeros(), zeros(keys.shape), zeros(values.shape)))


def _loop(count: int, body: Callable[[jax.Array, Carry], Carry], start: Carry) -> Carry:
    """`body` of 0 to count - 1, by a loop that keeps nothing of its turns.

    Of a loop whose length is known at compile time JAX makes a scan, for which `jax.checkpoint` would keep what every turn
    read, all keys and values for each block of queries.
    """
    return lax.while_loop(lambda c: c[0] < count, lambda c: (c[0] + 1, body(*c)), (jnp.int32(0), start))[1]


def gradients_of_block(
    scale: float, of_queries: QueryGradientInputs, keys: jax.Array, values: jax.Array, allowed: jax.Array
) -> Three:
    """The gradients from all scores of some queries and keys.

    Scores are [B, K, S, T * G]: of the three matmuls that follow, only one then contracts the first axis of both.

    Args:
      allowed: bool[B|1, T, S].
    """
    queries, normalizer, mean, of_mixed = of_queries

    def flat(x: jax.Array) -> jax.Array:  # [B, K, T, G, ...] as [B, K, T * G, ...]
        return x.reshape(*x.shape[:2], -1, *x.shape[4:])

    def product(a: jax.Array, b: jax.Array, axis: int) -> jax.Array:
        return lax.dot_general(a, b, (((3,), (axis,)), ((0, 1), (0, 1))), preferred_element_type=normalizer.dtype)

    flat_queries, of_flat = flat(queries).astype(keys.dtype), flat(of_mixed).astype(values.dtype)
    allowed = jnp.repeat(allowed.swapaxes(-1, -2), queries.shape[-2], axis=-1)[:, None]  # [B|1, 1, S, T * G]
    logarithms = product(keys, flat_queries, 3) * scale - flat(normalizer).swapaxes(-1, -2)
    weights = jnp.where(allowed, jnp.exp(logarithms), 0)
    of_values = product(weights.astype(values.dtype), of_flat, 2)
    of_weights = product(values, of_flat, 3)
    of_scores = (weights * (of_weights - flat(mean).swapaxes(-1, -2))).astype(keys.dtype)
    # Scaled after the matmuls and not before: there are H numbers per query instead of S.
    of_keys = product(of_scores, flat_queries, 2) * scale
    of_own = (weight_gradient(of_scores, keys) * scale).reshape(queries.shape)
    return of_own, of_keys, of_values


def merge(first: tuple[jax.Array, jax.Array], second: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
    """Attention to two sets of keys from the attention to each: mixtures and log-sum-exps as `forward_part` gives them."""
    normalizer = jnp.logaddexp(first[1], second[1])
    known = jnp.where(normalizer == -jnp.inf, 0, normalizer)  # a query that sees nothing in either: exp(-inf - 0) = 0
    shares = (mixed * jnp.exp(own - known) for mixed, own in (first, second))
    return functools.reduce(jnp.add, shares), normalizer


@dataclass(frozen=True)
class _Blocks:
    """An axis of `total` entries in `count` blocks of `size`. The last one is moved to fit, so that nothing is padded."""

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
        """Block i of every array of a tree."""
        return jax.tree.map(lambda x: lax.dynamic_slice_in_dim(x, self.start(i), self.size, x.ndim + axis), tree)

    def put(self, x: jax.Array, block: jax.Array, i: jax.Array, axis: int) -> jax.Array:
        return lax.dynamic_update_slice_in_dim(x, block.astype(x.dtype), self.start(i), x.ndim + axis)

    def add(self, x: jax.Array, block: jax.Array, i: jax.Array, axis: int) -> jax.Array:
        return self.put(x, self.cut(x, i, axis) + block, i, axis)

    def own(self, x: jax.Array, i: jax.Array, other: int) -> jax.Array:
        """Block i of the last axis, with `other` in place of what the block before has too."""
        indices = self.start(i) + jnp.arange(self.size)
        return jnp.where(indices >= i * self.size, self.cut(x, i, -1), other)

    def ends(self, x: jax.Array, absent: int | None = None) -> tuple[jax.Array, jax.Array]:
        """The smallest and the largest of each block of the last axis, int32[count] each, `absent` left out."""

        blocks = self.start(jnp.arange(self.count))[:, None] + jnp.arange(self.size)[None]

        def reduced(fill: int, reduce: Callable[..., jax.Array]) -> jax.Array:
            known = (x if absent is None else jnp.where(x == absent, fill, x)).reshape(-1, self.total)
            return reduce(known[:, blocks], axis=(0, 2))

        return reduced(2**31 - 1, jnp.min), reduced(-(2**31), jnp.max)


def _blocks_of(queries: jax.Array, keys: jax.Array) -> tuple[_Blocks, _Blocks]:
    """Blocks of queries, all of a group together, and of keys: as many scores wide as high, but for few queries."""
    *batch, new, groups, _ = queries.shape
    side = _side(math.prod(batch))
    size = MORE_KEYS if new * groups <= FEW_QUERY_ROWS else side
    return _Blocks.of(new, max(side // groups, 1)), _Blocks.of(keys.shape[-2], size)


@for_cpu(cpu.side_of_blocks)
def _side(heads: int) -> int:
    """Scores along one side of a block, a power of two, for so many heads of all rows together."""
    return SIDE


def _cut(
    seen: AttentionMask, query_blocks: _Blocks, i: jax.Array, key_blocks: _Blocks, j: jax.Array, *, once: bool = False
) -> AttentionMask:
    """What stands where in a pair of blocks; a key is in one block only, and a query too where `once` asks for it."""
    queries = query_blocks.own(seen.query_positions, i, NO_QUERY) if once else query_blocks.cut(seen.query_positions, i, -1)
    keys = key_blocks.own(seen.key_positions, j, NO_KEY)
    return AttentionMask(
        queries, keys, query_blocks.cut(seen.query_segments, i, -1), key_blocks.cut(seen.key_segments, j, -1)
    )


def _reach(
    seen: AttentionMask, window: int | None, query_blocks: _Blocks, key_blocks: _Blocks
) -> tuple[jax.Array, jax.Array]:
    """The first block of keys that some query of each block may see, and the one after the last: int32[blocks] each."""
    earliest, latest = query_blocks.ends(seen.query_positions, NO_QUERY)
    nearest, farthest = key_blocks.ends(seen.key_positions, NO_KEY)
    last = latest[:, None]
    needed = nearest[None] <= last
    if window is not None:
        # As key > query - window: the positions of a block without any are the ends of int32, and a sum would overflow.
        oldest = jnp.maximum(earliest, 0)[:, None] - window
        needed &= (farthest[None] > oldest) & (latest[:, None] >= 0)
    if seen.query_segments is not None and seen.key_segments is not None:
        (low, high), (lowest, highest) = query_blocks.ends(seen.query_segments), key_blocks.ends(seen.key_segments)
        above = high[:, None]
        needed &= (lowest[None] <= above) & (low[:, None] <= highest[None])
    some = jnp.any(needed, axis=1)
    first, after = jnp.argmax(needed, axis=1), key_blocks.count - jnp.argmax(needed[:, ::-1], axis=1)
    return jnp.where(some, first, 0).astype(jnp.int32), jnp.where(some, after, 0).astype(jnp.int32)
