"""Batch-invariant programs, `ComputeOptions(exact=True)`: a token's results do not depend on the tokens computed with it.

The order of sums in a compiled program depends on the shapes of its arrays, so a token's results usually depend on how many
others are computed with it. Exact programs loop over blocks with a fixed number of tokens (or rows of logits), so that every
token is computed by the same operations on the same shapes. Attention treats each query as a separate row, or uses a kernel
whose order of summation depends only on the position. Native matmuls are batch-invariant by themselves: they take all tokens
at once, and only the operations between them run in blocks.

The last block may be padded with tokens that are all zeros. They stay zeros from layer to layer, and kernels skip them.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Float, Int32

from llama_jax.ops.platform import lowering_platform

# With this many tokens, computing a matmul takes about as long as reading its weights, see `experiments/exactness.py`.
TOKENS_PER_BLOCK_ON_CPU, TOKENS_PER_BLOCK = 8, 256
TOKENS_BETWEEN_MATMULS_ON_CPU = 4  # larger blocks waste more padding on a single row, smaller ones need more iterations
ROWS_PER_BLOCK_ON_CPU, ROWS_PER_BLOCK = 1, 32  # rows whose logits are sampled together


def block_size(matmuls: bool = True) -> int:
    """Tokens per block on the traced platform, for blocks with `matmuls` or with only the operations between them."""
    if lowering_platform() != "cpu":
        return TOKENS_PER_BLOCK
    return TOKENS_PER_BLOCK_ON_CPU if matmuls else TOKENS_BETWEEN_MATMULS_ON_CPU


def row_block_size() -> int:
    """Rows per block of logits."""
    return ROWS_PER_BLOCK_ON_CPU if lowering_platform() == "cpu" else ROWS_PER_BLOCK


def logprob_of(logits: Float[jax.Array, "B V"], tokens: Int32[jax.Array, " B"]) -> Float[jax.Array, " B"]:
    """The log-probability of one token per row."""
    # vmap over rows instead of indexing by pairs, so that each device reads only its own rows.
    return jax.vmap(lambda logits, token: logits[token])(logits, tokens) - jax.nn.logsumexp(logits, axis=-1)


def map_row_blocks(is_exact: bool, function: Callable[..., Any], count: jax.Array, *trees: Any) -> Any:
    """`function(*trees)` for trees of arrays [B, ...]; in exact programs `map_blocks` over the first `count` rows."""
    return map_blocks(function, row_block_size(), count, *trees) if is_exact else function(*trees)


def rows_in_use(unused: jax.Array) -> jax.Array:
    """int32[]: the number of rows up to and including the last one that is not `unused`, bool[B]."""
    return jnp.max(jnp.where(unused, 0, jnp.arange(1, len(unused) + 1, dtype=jnp.int32)))


def map_all(count: jax.Array, function: Callable[..., Any], *trees: Any, **options: Any) -> Any:
    """`function(*trees, **options)`, without matmuls, of the first `count` entries of arrays [N, ...], in blocks."""
    return map_blocks(partial(function, **options), block_size(matmuls=False), count, *trees)


def map_first(count: jax.Array, function: Callable[..., Any], x: jax.Array, *args: Any, **options: Any) -> Any:
    """`map_all` of a function's first argument only."""
    return map_all(count, lambda x: function(x, *args, **options), x)


def map_blocks(function: Callable[..., Any], size: int, count: jax.Array, *trees: Any) -> Any:
    """Apply a function of tokens, or rows, to `size` of them at a time.

    Args:
      function: maps trees like `trees`, with `size` entries along the first axis, to a tree with as many entries.
      count: int32[], how many of the N entries are needed; the results of later blocks are zeros.
      trees: trees of arrays [N, ...].

    Returns:
      A tree of arrays [N, ...].
    """
    total = len(jax.tree.leaves(trees)[0])
    padding = -total % size
    padded = jax.tree.map(lambda x: jnp.pad(x, [(0, padding)] + [(0, 0)] * (x.ndim - 1)) if padding else x, trees)

    def block(i: jax.Array | int) -> Any:
        return jax.tree.map(lambda x: lax.dynamic_slice_in_dim(x, i * size, size), padded)

    def compute_block(i: jax.Array, out: Any) -> Any:
        write = lambda whole, part: lax.dynamic_update_slice_in_dim(whole, part, i * size, 0)
        return jax.tree.map(write, out, function(*block(i)))

    shapes = jax.eval_shape(lambda: function(*block(0)))
    empty = jax.tree.map(lambda x: jnp.zeros((total + padding, *x.shape[1:]), x.dtype), shapes)
    # Hidden from the compiler, so that a loop with one block stays a loop, with the same code as longer ones.
    blocks = lax.optimization_barrier((count + size - 1) // size)
    out = lax.fori_loop(0, blocks, compute_block, empty)
    return jax.tree.map(lambda x: x[:total], out) if padding else out
