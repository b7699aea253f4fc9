"""Kernels for attention over pages, and their limits: JAX's ragged kernel for TPUs, and one for GPUs by Pallas and Triton."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

KEYS_AT_ONCE, QUERIES_AT_ONCE = 512, 32  # of a block of the TPU's kernel


@dataclass(frozen=True)
class PagedProblem:
    """What attention over pages is asked for, as far as the choice depends on it.

    Attributes:
      queries, pages: their shapes, [T, K, G, H] and [L, P, page, 2K, H].
      dtype, page_dtype: of the queries and of the pages, int8 where they are quantized.
      sinks, chunk: as for `attend_paged`.
      devices: over which XLA divides the program; it divides no kernel.
    """

    queries: tuple[int, ...]
    pages: tuple[int, ...]
    dtype: Any
    page_dtype: Any
    sinks: int = 0
    chunk: int | None = None
    devices: int = 1


def refusal_of_ragged(platform: str, problem: PagedProblem) -> str | None:
    """Why JAX's ragged kernel cannot compute this, or None where it can."""
    _, heads, _, width = problem.queries
    if platform != "tpu":
        return f"ragged needs a TPU, this is a {platform}"
    if jnp.dtype(problem.page_dtype) not in (jnp.bfloat16, jnp.float32) or problem.dtype != problem.page_dtype:
        return f"ragged reads bfloat16 or float32 for both, not {problem.dtype} queries and {problem.page_dtype} pages"
    if width % 128:
        return f"ragged has heads in multiples of 128; these are {width}"
    words = 2 * heads * jnp.dtype(problem.page_dtype).itemsize // 4
    if words not in (1, 2, 4) and words % 8:
        return f"ragged tiles 1, 2, 4 or multiples of 8 words of keys and values of a token; {heads} heads have {words}"
    return _refusal_for_all("ragged", problem)


def _refusal_for_all(kernel: str, problem: PagedProblem) -> str | None:
    if problem.sinks or problem.chunk:
        return f"{kernel} has a window but no {'sinks' if problem.sinks else 'chunks'}"
    if problem.devices > 1:
        return f"{kernel} is a kernel of one device"
    return None


def ragged(queries: jax.Array, view: Any, *, scale: float, window: int | None = None) -> jax.Array:
    """Arguments and result as for `attend_paged`, by `jax.experimental.pallas.ops.tpu.ragged_paged_attention`.

    Its pages are those of one layer: the stack of all layers is one pool for it, in which a layer's pages have numbers of
    their own. It takes rows with new tokens only.
    """
    # Imported here: importing Pallas takes a second, which is only for those with a TPU.
    from jax.experimental.pallas.ops.tpu.ragged_paged_attention import ragged_paged_attention

    layers, count, page, both, width = view.pages.shape
    tokens, heads, groups, _ = queries.shape
    new = view.starts[1:] > view.starts[:-1]
    order = jnp.argsort(~new, stable=True)
    mixed = ragged_paged_attention(
        queries.reshape(tokens, heads * groups, width),
        view.pages.reshape(layers * count, page, both, width),
        view.lengths[order],
        view.table[order] + view.layer * count,
        jnp.concatenate([view.starts[:1], view.starts[1:][order]]),
        jnp.sum(new, dtype=jnp.int32)[None],
        sm_scale=scale,
        sliding_window=window,
        num_kv_pages_per_block=min(max(1, KEYS_AT_ONCE // page), view.table.shape[1]),
        num_queries_per_block=min(QUERIES_AT_ONCE, tokens),
    )
    padding = jnp.arange(tokens) >= view.starts[-1]  # of which it writes nothing
    return jnp.where(padding[:, None, None], 0, mixed).reshape(queries.shape)
