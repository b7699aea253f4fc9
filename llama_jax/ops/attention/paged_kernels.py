"""Kernels for paged attention, and their limits: JAX's ragged kernel for TPUs, and a Pallas Triton kernel for GPUs."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from llama_jax.ops.attention.mask import PagedAttentionShape
from llama_jax.ops.attention.paged_blocks import QueryBlocks, first_visible, is_visible
from llama_jax.ops.int8 import Quantized

KEYS_PER_BLOCK_ON_TPU, QUERIES_PER_BLOCK_ON_TPU = 512, 32  # block sizes of the TPU kernel
MAX_TABLE_ENTRIES = 2**17  # half of a TPU's scalar memory


def why_not_ragged(platform: str, shapes: PagedAttentionShape) -> str | None:
    """Why JAX's ragged kernel cannot compute this, or None if it can."""
    _, heads, _, head_dim = shapes.queries
    if platform != "tpu":
        return f"ragged needs a TPU, this is a {platform}"
    if jnp.dtype(shapes.page_dtype) not in (jnp.bfloat16, jnp.float32) or shapes.dtype != shapes.page_dtype:
        return f"ragged needs bfloat16 or float32 for both, not {shapes.dtype} queries and {shapes.page_dtype} pages"
    if head_dim % 128:
        return f"ragged needs heads in multiples of 128; these are {head_dim}"
    words = 2 * heads * jnp.dtype(shapes.page_dtype).itemsize // 4
    if words not in (1, 2, 4) and words % 8:
        return f"ragged needs 1, 2, 4 or a multiple of 8 words of keys and values per token; {heads} heads have {words}"
    if math.prod(shapes.table) > MAX_TABLE_ENTRIES:
        return f"ragged keeps at most {MAX_TABLE_ENTRIES} entries of a table in scalar memory; {list(shapes.table)} are more"
    if shapes.chunk:
        return "ragged supports a window but no chunks"
    return _why_not_either("ragged", shapes)


def _why_not_either(kernel: str, shapes: PagedAttentionShape) -> str | None:
    if shapes.sinks:
        return f"{kernel} supports a window but no sinks"
    if shapes.devices > 1:
        return f"{kernel} runs on one device, and no sharding of rows and heads over {shapes.devices} devices is given"
    return None


def ragged(
    queries: Float[Array, "T K G H"], view: Any, *, scale: float, window: int | None = None
) -> Float[Array, "T K G H"]:
    """Arguments and result as for `attend_paged`; calls `jax.experimental.pallas.ops.tpu.ragged_paged_attention`.

    The kernel has no axis of layers: the pages of all layers are passed as one pool, with page numbers offset by the layer.
    It accepts only rows with new tokens. It reads every page of a row, so it is passed only the pages of the window.
    """
    # Imported here: importing Pallas takes a second.
    from jax.experimental.pallas.ops.tpu.ragged_paged_attention import ragged_paged_attention

    layers, n_pages, page_size, heads_x2, head_dim = view.pages.shape
    tokens, heads, groups, _ = queries.shape
    table, new = view.table, view.starts[1:] - view.starts[:-1]
    # Clipped: tokens beyond the table are not stored.
    lengths = jnp.minimum(view.lengths, table.shape[1] * page_size + new)
    if window is not None:
        first = jnp.maximum(lengths - new - window + 1, 0) // page_size
        # At most this many pages contain keys to which a row's new tokens attend.
        window_pages = (window + (view.tokens_per_row or tokens) - 2) // page_size + 2
        entries = first[:, None] + jnp.arange(min(window_pages, table.shape[1]), dtype=jnp.int32)
        table = jnp.take_along_axis(table, jnp.minimum(entries, table.shape[1] - 1), axis=1)
        lengths -= first * page_size
    order = jnp.argsort(new == 0, stable=True)
    acc = ragged_paged_attention(
        queries.reshape(tokens, heads * groups, head_dim),
        view.pages.reshape(layers * n_pages, page_size, heads_x2, head_dim),
        lengths[order],
        table[order] + view.layer * n_pages,
        jnp.concatenate([view.starts[:1], view.starts[1:][order]]),
        jnp.sum(new > 0, dtype=jnp.int32)[None],
        sm_scale=scale,
        sliding_window=window,
        num_kv_pages_per_block=min(max(1, KEYS_PER_BLOCK_ON_TPU // page_size), table.shape[1]),
        num_queries_per_block=min(QUERIES_PER_BLOCK_ON_TPU, tokens),
    )
    padding = jnp.arange(tokens) >= view.starts[-1]  # not written by the kernel
    return jnp.where(padding[:, None, None], 0, acc).reshape(queries.shape)


MAX_QUERY_ROWS, MIN_QUERY_ROWS, KEYS_PER_BLOCK_ON_GPU = 64, 16, 64  # matmul sizes of the GPU kernel
TARGET_PROGRAMS, MIN_KEYS_PER_PROGRAM = (
    264,
    256,
)  # programs that fill a GPU (two per SM of an H100); minimum keys per program


def why_not_triton(platform: str, shapes: PagedAttentionShape) -> str | None:
    """Why the kernel for GPUs cannot compute this, or None if it can."""
    head_dim = shapes.queries[-1]
    if platform != "gpu":
        return f"triton needs a GPU, this is a {platform}"
    dtypes = jnp.bfloat16, jnp.float16, jnp.float32
    if shapes.dtype not in dtypes or shapes.page_dtype not in (*dtypes, jnp.int8):
        return f"triton computes in 16 or 32 bits, not {shapes.dtype} queries and {shapes.page_dtype} pages"
    numbers = math.prod(shapes.pages)
    if numbers // head_dim >= 2**31 or (shapes.page_dtype == jnp.int8 and 2**31 <= numbers <= 2**32):
        return f"triton indexes in 32 bits, which is too few for {list(shapes.pages)} pages in {shapes.page_dtype}"
    if head_dim & (head_dim - 1) or not 16 <= head_dim <= 256:
        return f"triton needs heads of 16, 32, 64, 128 or 256 features; these have {head_dim}"
    return _why_not_either("triton", shapes)


def triton(
    queries: Float[Array, "T K G H"],
    view: Any,
    *,
    scale: float,
    window: int | None = None,
    chunk: int | None = None,
    interpret: bool = False,
) -> Float[Array, "T K G H"]:
    """Arguments and result as for `attend_paged`; `interpret` runs the kernel without a GPU, slowly.

    A program computes one block of a row's queries for one key/value head, over all or some of their keys. The parts are
    combined afterwards (Flash-Decoding).
    """
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import triton as plgpu

    tokens, heads, groups, head_dim = queries.shape
    _, n_pages, page_size, heads_x2, _ = view.pages.shape
    rows, entries = view.table.shape
    at_most = max(1, MAX_QUERY_ROWS // groups)
    blocks = QueryBlocks.of(view, tokens, 1 << (min(max(1, tokens // rows), at_most).bit_length() - 1))
    query_rows = max(MIN_QUERY_ROWS, pl.next_power_of_2(blocks.size * groups))
    programs = len(blocks.rows) * heads
    parts = min(max(1, TARGET_PROGRAMS // programs), max(1, entries * page_size // MIN_KEYS_PER_PROGRAM))
    quantized = isinstance(view.pages, Quantized)
    values = view.pages.values if quantized else view.pages
    factors = (view.pages.scales.reshape(-1),) if quantized else ()
    precision = jax.lax.Precision.HIGHEST if queries.dtype == jnp.float32 else None
    dtype, flat = queries.dtype, tokens * heads * groups
    unused = int(interpret)  # a last row, because the interpreter also writes masked entries

    def kernel(*refs: Any) -> None:
        layer, table, row_of, start_of, position_of, lengths, q, pages, *more = refs
        factor, (out, max_out, sum_out) = more[: len(factors)], more[len(factors) :]
        block, head, part = (pl.program_id(axis) for axis in range(3))
        row, start, first = row_of[block], start_of[block], position_of[block]
        length = lengths[row]
        stored = jnp.minimum(length, entries * page_size)

        @pl.when(start < tokens)
        def _() -> None:
            index = jnp.arange(query_rows)
            token = index // groups
            is_query = (token < blocks.size) & (first + token < length)
            query_row = jnp.where(is_query, ((start + token) * heads + head) * groups + index % groups, 0)
            columns = jnp.arange(head_dim)[None]
            query = plgpu.load(q.at[query_row[:, None], columns], mask=is_query[:, None], other=0)
            position = (first + token)[:, None]
            begin = first_visible(first, window, chunk) // KEYS_PER_BLOCK_ON_GPU
            end = pl.cdiv(jnp.minimum(first + blocks.size, stored), KEYS_PER_BLOCK_ON_GPU)
            blocks_per_part = pl.cdiv(end - begin, parts)

            def add_keys(j: jax.Array, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
                running_max, running_sum, acc = carry
                key = j * KEYS_PER_BLOCK_ON_GPU + jnp.arange(KEYS_PER_BLOCK_ON_GPU)
                is_stored = key < stored
                page = plgpu.load(table.at[jnp.where(is_stored, row * entries + key // page_size, 0)])
                slot = jnp.where(
                    is_stored, ((layer[0] * n_pages + page) * page_size + key % page_size) * heads_x2 + 2 * head, 0
                )
                read = lambda slot: plgpu.load(pages.at[slot[:, None], columns], mask=is_stored[:, None], other=0).astype(
                    dtype
                )
                scores = jax.lax.dot_general(
                    query, read(slot), (((1,), (1,)), ((), ())), precision=precision, preferred_element_type=jnp.float32
                )
                if factor:
                    scores *= plgpu.load(factor[0].at[slot])[None]
                scores = jnp.where(
                    is_visible(position, key[None], window, chunk) & is_stored[None], scores * scale, -jnp.inf
                )
                new_max = jnp.maximum(running_max, jnp.max(scores, axis=1))
                correction, weights = jnp.exp(running_max - new_max), jnp.exp(scores - new_max[:, None])
                running_sum = running_sum * correction + jnp.sum(weights, axis=1)
                if factor:
                    weights *= plgpu.load(factor[0].at[slot + 1])[None]
                new = jax.lax.dot_general(
                    weights.astype(dtype),
                    read(slot + 1),
                    (((1,), (0,)), ((), ())),
                    precision=precision,
                    preferred_element_type=jnp.float32,
                )
                return new_max, running_sum, acc * correction[:, None] + new

            zeros = jnp.zeros(query_rows, jnp.float32)
            carry = zeros - 1e30, zeros, jnp.zeros((query_rows, head_dim), jnp.float32)
            bounds = begin + part * blocks_per_part, jnp.minimum(begin + (part + 1) * blocks_per_part, end)
            running_max, running_sum, acc = jax.lax.fori_loop(*bounds, add_keys, carry)
            if parts == 1:
                acc = acc / jnp.where(running_sum == 0, 1, running_sum)[:, None]
            query_row = jnp.where(is_query, part * flat + query_row, parts * flat if interpret else 0)
            plgpu.store(out.at[query_row[:, None], columns], acc.astype(out.dtype), mask=is_query[:, None])
            plgpu.store(max_out.at[query_row], running_max, mask=is_query)
            plgpu.store(sum_out.at[query_row], running_sum, mask=is_query)

    shapes = (
        jax.ShapeDtypeStruct((parts * flat + unused, head_dim), dtype if parts == 1 else jnp.float32),
        *[jax.ShapeDtypeStruct((parts * flat + unused,), jnp.float32)] * 2,
    )
    results = pl.pallas_call(
        kernel,
        grid=(len(blocks.rows), heads, parts),
        out_shape=shapes,
        interpret=interpret,
        compiler_params=None if interpret else plgpu.CompilerParams(num_warps=4, num_stages=2),
        name="attend_paged",
    )(
        view.layer[None],
        view.table.reshape(-1),
        blocks.rows,
        blocks.starts,
        blocks.positions,
        view.lengths,
        queries.reshape(flat, head_dim),
        values.reshape(-1, head_dim),
        *factors,
    )
    acc, maxima, sums = (x[: parts * flat].reshape(parts, flat, *x.shape[1:]) for x in results)
    if parts == 1:
        combined = acc[0]
    else:
        weights = jnp.exp(maxima - jnp.max(maxima, axis=0))
        total = jnp.sum(sums * weights, axis=0)
        combined = jnp.sum(acc * weights[..., None], axis=0) / jnp.where(total == 0, 1, total)[:, None]
    combined = combined.reshape(queries.shape)
    if tokens != rows * (view.tokens_per_row or 0):  # there may be padding, which the kernel does not write
        combined = jnp.where((jnp.arange(tokens) >= view.starts[-1])[:, None, None, None], 0, combined)
    return combined.astype(dtype)
