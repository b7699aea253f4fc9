"""Numbers of a token that no other token changes: `Compute(exact=True)`.

The order in which a compiled program sums depends on the shapes of its arrays, and so a token's numbers depend on how many
others are computed with it. Exact programs compute everything about a token, or a row, in a loop over blocks of one size,
whatever their number: the same operations on the same shapes, in which each token is a row of its own. Attention, which is
not of one token, has kernels whose order of summation depends on the position alone; or each query is a row of its own.
Native matmuls have such an order too, so that they take all tokens at once, and blocks are of what is between them.

A block that is not full ends with tokens of zeros. They stay zeros from layer to layer, and kernels need not compute them.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Float, Int32

from llama_jax.ops.platform import lowering_platform

# Tokens with which a matmul computes about as long as it reads its weights: on a CPU few, see `experiments/exactness.py`.
TOKENS_PER_BLOCK_ON_CPU, TOKENS_PER_BLOCK = 8, 256
WITHOUT_MATMULS_ON_CPU = 4  # a single row wastes three of them, and many rows take more turns
ROWS_ON_CPU, ROWS = 1, 32  # whose logits are sampled together

_exact = jax.make_user_context(False)


def exactly(wanted: bool) -> AbstractContextManager[Any]:
    """The context to trace in, so that `is_exact` answers `wanted`."""
    return _exact(wanted)


def is_exact() -> bool:
    """Whether what is traced now is to be exact."""
    return bool(_exact.value)


def block_size(matmuls: bool = True) -> int:
    """Tokens of a block, with matmuls or of what is between them, on the platform that is traced for."""
    if lowering_platform() != "cpu":
        return TOKENS_PER_BLOCK
    return TOKENS_PER_BLOCK_ON_CPU if matmuls else WITHOUT_MATMULS_ON_CPU


def row_block_size() -> int:
    """Rows of a block of logits."""
    return ROWS_ON_CPU if lowering_platform() == "cpu" else ROWS


def logprob_of(logits: Float[jax.Array, "B V"], tokens: Int32[jax.Array, " B"]) -> Float[jax.Array, " B"]:
    """The log-probability of a token of each row, as a sampler computes it."""
    # vmap over rows instead of indexing by pairs, so that each device only reads its own rows.
    return jax.vmap(lambda logits, token: logits[token])(logits, tokens) - jax.nn.logsumexp(logits, axis=-1)


def by_rows(function: Callable[..., Any], count: jax.Array, *trees: Any) -> Any:
    """`function(*trees)`, of rows of logits; in exact programs by blocks, of which those with the first `count` rows."""
    return by_blocks(function, row_block_size(), count, *trees) if is_exact() else function(*trees)


def rows_in_use(unused: jax.Array) -> jax.Array:
    """int32[]: how many rows there are to the last one that is not `unused`, bool[B]."""
    return jnp.max(jnp.where(unused, 0, jnp.arange(1, len(unused) + 1, dtype=jnp.int32)))


def by_blocks(function: Callable[..., Any], size: int, count: jax.Array, *trees: Any) -> Any:
    """A function of tokens, or rows, for `size` of them at a time.

    Args:
      function: from trees like `trees`, with `size` along the first axis, to a tree with `size` along the first axis.
      count: int32[], how many of the N are needed; the results of blocks after them are zeros.
      trees: of arrays [N, ...].

    Returns:
      A tree of arrays [N, ...].
    """
    total = len(jax.tree.leaves(trees)[0])
    missing = -total % size
    padded = jax.tree.map(lambda x: jnp.pad(x, [(0, missing)] + [(0, 0)] * (x.ndim - 1)) if missing else x, trees)

    def cut(i: jax.Array | int) -> Any:
        return jax.tree.map(lambda x: lax.dynamic_slice_in_dim(x, i * size, size), padded)

    def compute(i: jax.Array, found: Any) -> Any:
        put = lambda whole, part: lax.dynamic_update_slice_in_dim(whole, part, i * size, 0)
        return jax.tree.map(put, found, function(*cut(i)))

    shapes = jax.eval_shape(lambda: function(*cut(0)))
    empty = jax.tree.map(lambda x: jnp.zeros((total + missing, *x.shape[1:]), x.dtype), shapes)
    # Hidden from the compiler, so that a loop of one block stays a loop, with the code of any other.
    blocks = lax.optimization_barrier((count + size - 1) // size)
    found = lax.fori_loop(0, blocks, compute, empty)
    return jax.tree.map(lambda x: x[:total], found) if missing else found
