"""Paged attention: keys and values are in pages; a page table lists those of each row (Kwon et al. 2023, section 4)."""

from __future__ import annotations

import math
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int32

from llama_jax.errors import MeshError
from llama_jax.ops import exact
from llama_jax.ops.attention.mask import NO_QUERY, HeadSharding, PagedAttentionShape
from llama_jax.ops.attention.paged_blocks import attend_by_blocks, is_visible
from llama_jax.ops.int8 import Quantized, dequantize_rows, map_planes, quantize_rows
from llama_jax.ops.platform import KernelOptions, current_mesh_sizes, has_cpu_variant, log_backend, lowering_platform


class PagedView(struct.PyTreeNode):
    """Keys and values in pages, the page table, and which tokens of each row are new in this pass.

    Attributes:
      pages: [L, P, page, 2K, H], an array or `Quantized`. Each token has the key of head k at 2k and its value at 2k + 1.
      layer: int32[], the layer whose pages are read.
      table: int32[R, n], the pages of each row in order. Entries beyond the row's length, and pages to which no new token
        attends, are not used and may be any valid page number.
      lengths: int32[R], tokens of each row, including the new ones. Tokens beyond the n pages are neither written nor
        attended to.
      starts: int32[R + 1], `cu_q_lens` of JAX's TPU kernel. The new tokens at [starts[r], starts[r + 1]) are the last tokens
        of row r; the range may be empty. Tokens from starts[R] on are padding.
      tokens_per_row: the number of new tokens per row, if it is the same for all rows; `starts` are then its multiples. A
        static field.
    """

    pages: Any
    layer: Any
    table: Any
    lengths: Any
    starts: Any
    tokens_per_row: int | None = struct.field(pytree_node=False, default=None)

    def rows_and_positions(self, count: int) -> tuple[Int32[Array, " {count}"], Int32[Array, " {count}"]]:
        """The row of each of `count` new tokens, and its position in the row; padding has the last row and position -1."""
        rows = len(self.lengths)
        if self.tokens_per_row is not None:
            row = jnp.repeat(jnp.arange(rows, dtype=jnp.int32), self.tokens_per_row)
            position = self.lengths[:, None] + jnp.arange(-self.tokens_per_row, 0, dtype=jnp.int32)[None]
            padding = 0, count - rows * self.tokens_per_row
            return jnp.pad(row, padding, mode="edge"), jnp.pad(position.reshape(-1), padding, constant_values=NO_QUERY)
        token = jnp.arange(count, dtype=jnp.int32)
        row = jnp.searchsorted(self.starts[1:], token, side="right", method="compare_all").astype(jnp.int32)
        valid_row = jnp.minimum(row, rows - 1)
        return valid_row, jnp.where(row < rows, self.lengths[valid_row] - self.starts[valid_row + 1] + token, NO_QUERY)


def paged_reference(
    queries: Float[Array, "T K G H"],
    view: PagedView,
    *,
    scale: float,
    window: int | None = None,
    chunk: int | None = None,
    sinks: int = 0,
    sink_queries: Float[Array, "T K G H"] | None = None,
) -> Float[Array, "T K G H"]:
    """`attend_paged` by the textbook formula, for tests."""
    acc_dtype = jnp.promote_types(queries.dtype, jnp.float32)
    row, position = view.rows_and_positions(len(queries))
    gathered: Any = map_planes(lambda x: x[view.layer, view.table[row]], view.pages)  # [T, n, page, 2K, H]
    dense = dequantize_rows(gathered, acc_dtype) if isinstance(gathered, Quantized) else gathered.astype(acc_dtype)
    keys_values = dense.reshape(len(queries), -1, *dense.shape[3:])  # [T, S, 2K, H]
    query, key = position[:, None], jnp.arange(keys_values.shape[1])[None]
    is_sink = (key < sinks) & (key <= query)
    allowed = is_visible(query, key, window, chunk) | is_sink  # [T, S]
    keys, values = (jnp.where(allowed[..., None, None], keys_values[:, :, i::2], 0) for i in (0, 1))

    def scores_with(queries: jax.Array) -> jax.Array:
        return jnp.einsum("tkgh,tskh->tkgs", queries.astype(acc_dtype), keys) * scale

    scores = scores_with(queries)
    if sink_queries is not None:
        scores = jnp.where(is_sink[:, None, None], scores_with(sink_queries), scores)
    scores = jnp.where(allowed[:, None, None], scores, jnp.finfo(acc_dtype).min)
    weights = jnp.where(allowed[:, None, None], jax.nn.softmax(scores, axis=-1), 0)
    return jnp.einsum("tkgs,tskh->tkgh", weights, values).astype(queries.dtype)


def attend_paged(
    queries: Float[Array, "T K G H"],
    view: PagedView,
    *,
    scale: float,
    window: int | None = None,
    chunk: int | None = None,
    sinks: int = 0,
    sink_queries: Float[Array, "T K G H"] | None = None,
    head_sharding: HeadSharding | None = None,
    kernels: KernelOptions = KernelOptions(),
) -> Float[Array, "T K G H"]:
    """Attend from each new token to the keys of its row at its own and earlier positions.

    Args:
      view: already contains the new tokens' keys and values.
      scale: multiplies the scores.
      window: a query attends only to keys less than this many positions before it. The table may then be a ring that reuses
        pages outside every window.
      chunk: a query attends only to keys in its own chunk of this many positions.
      sinks: all later queries also attend to the keys at the first `sinks` positions (Xiao et al. 2023, section 3.2).
      sink_queries: the queries for the scores with the sinks; `queries` by default.
      head_sharding: the axes of the current mesh over which rows and heads are sharded. Sharding rows also shards the table,
        lengths, tokens (the same number per row, `view.tokens_per_row`) and the axis P of the pages: a row's pages are on
        its device. Without `head_sharding`, XLA partitions the program, and no kernel is used on a mesh.
      kernels: see `platform.kernel_options`.

    Returns:
      In the dtype of `queries`; softmax in float32 at least. Values at padding are finite.

    Raises:
      MeshError: rows, pages or heads do not divide evenly; or rows are sharded, and `view.tokens_per_row` is None or there
        is padding.
    """
    attend = partial(attend_on_device, scale=scale, window=window, chunk=chunk, sinks=sinks, kernels=kernels)
    shard_axes = _ShardAxes.of(head_sharding, view.pages, view, len(queries))
    if shard_axes is None:
        return attend(queries, view, sink_queries=sink_queries)
    pages_spec, tokens_spec, view_spec = shard_axes.specs(view.pages, view)
    run = jax.shard_map(
        lambda queries, sink_queries, view: attend(
            queries, _local_view(view, view.pages.shape[1], shard_axes.rows), sink_queries=sink_queries
        ),
        in_specs=(tokens_spec, None if sink_queries is None else tokens_spec, view_spec.replace(pages=pages_spec)),
        out_specs=tokens_spec,
        check_vma=False,  # a kernel does not declare the varying axes of its results
    )
    return run(queries, sink_queries, view)


def write_paged(
    pages: Any,
    keys: Float[Array, "T K H"],
    values: Float[Array, "T K H"],
    view: PagedView,
    head_sharding: HeadSharding | None = None,
    kernels: KernelOptions = KernelOptions(),
) -> Any:
    """Write the new tokens' keys and values to their pages; in place if `pages` are donated or carried by a loop.

    Args:
      pages: [L, P, page, 2K, H], an array or `Quantized`.
      keys, values: padding is dropped.
      view: its page table and positions; its own pages are not used.
      head_sharding, kernels: as for `attend_paged`.

    Returns:
      The updated pages.

    Raises:
      MeshError: as `attend_paged`.
    """
    shard_axes = _ShardAxes.of(head_sharding, pages, view, len(keys))
    if shard_axes is None:
        return _write_on_device(kernels, pages, keys, values, view)
    pages_spec, tokens_spec, view_spec = shard_axes.specs(pages, view)
    run = jax.shard_map(
        lambda pages, keys, values, view: _write_on_device(
            kernels, pages, keys, values, _local_view(view, pages.shape[1], shard_axes.rows)
        ),
        in_specs=(pages_spec, tokens_spec, tokens_spec, view_spec),
        out_specs=pages_spec,
        check_vma=False,
    )
    return run(pages, keys, values, view.replace(pages=None))


def _write_on_device(kernels: KernelOptions, pages: Any, keys: jax.Array, values: jax.Array, view: PagedView) -> Any:
    layers, n_pages, page_size, *_ = pages.shape
    row, position = view.rows_and_positions(len(keys))
    slot = (view.layer * n_pages + view.table[row, position // page_size]) * page_size + position % page_size
    valid = (position != NO_QUERY) & (position < view.table.shape[1] * page_size)
    slot = jnp.where(valid, slot, layers * n_pages * page_size)  # out of range: dropped
    keys_values = jnp.stack([keys, values], axis=2).reshape(len(keys), -1, keys.shape[-1])  # [T, 2K, H]
    rows = quantize_rows(keys_values) if isinstance(pages, Quantized) else keys_values.astype(pages.dtype)
    return jax.tree.map(lambda pages, rows: scatter_rows(pages, rows, slot, kernels), pages, rows)


@has_cpu_variant
def scatter_rows(pages: jax.Array, rows: jax.Array, indices: jax.Array, kernels: KernelOptions) -> jax.Array:
    """Write rows [T, ...] at indices int32[T] of the flat slots [L * P * page, ...]; indices out of range are dropped."""
    return pages.reshape(-1, *pages.shape[3:]).at[indices].set(rows, mode="drop").reshape(pages.shape)


class _ShardAxes(NamedTuple):
    """Axes of the current mesh with more than one device over which rows and heads are sharded."""

    rows: tuple[str, ...]
    heads: tuple[str, ...]

    @classmethod
    def of(cls, head_sharding: HeadSharding | None, pages: Any, view: PagedView, count: int) -> _ShardAxes | None:
        """The axes, or None on one device or if XLA partitions the program."""
        mesh = current_mesh_sizes()
        if head_sharding is None or math.prod(mesh.values()) == 1:
            return None
        rows, heads = (
            tuple(axis for axis in axes if mesh[axis] > 1)
            for axes in (head_sharding.mesh_axes_of_rows, head_sharding.mesh_axes_of_heads)
        )
        if rows and (view.tokens_per_row is None or count != len(view.lengths) * view.tokens_per_row):
            raise MeshError(f"different numbers of new tokens per row, or padding, cannot be sharded over {'*'.join(rows)}")
        for name, size, axes in (
            ("rows", len(view.lengths), rows),
            ("pages", pages.shape[1], rows),
            ("key/value heads", pages.shape[3] // 2, heads),
        ):
            shards = math.prod(mesh[axis] for axis in axes)
            if size % shards:
                raise MeshError(f"{size} {name} cannot be sharded over {'*'.join(axes)}={shards}")
        return cls(rows, heads)

    def specs(self, pages: Any, view: PagedView) -> tuple[Any, P, PagedView]:
        """Partition specs of the pages, of arrays [T, K, ...], and of a view without its pages."""
        rows, heads = self.rows or None, self.heads or None
        view_spec = view.replace(pages=None, layer=P(), table=P(rows), lengths=P(rows), starts=P())
        return jax.tree.map(lambda _: P(None, rows, None, heads), pages), P(rows, heads), view_spec


def _local_view(view: PagedView, n_pages: int, row_axes: tuple[str, ...]) -> PagedView:
    """The view of one device inside `jax.shard_map`: its tokens and its `n_pages` pages are numbered from 0."""
    if view.tokens_per_row is None:
        return view
    first = lax.axis_index(row_axes) * n_pages if row_axes else 0
    table = jnp.clip(view.table - first, 0, n_pages - 1)  # unused entries may be any page number
    return view.replace(table=table, starts=jnp.arange(len(view.lengths) + 1, dtype=jnp.int32) * view.tokens_per_row)


@has_cpu_variant
def attend_on_device(
    queries: Float[Array, "T K G H"],
    view: PagedView,
    *,
    scale: float,
    window: int | None,
    chunk: int | None,
    sinks: int,
    sink_queries: jax.Array | None,
    kernels: KernelOptions,
) -> jax.Array:
    """`attend_paged` of the tokens and pages of one device, or of all where XLA partitions the program."""
    options: dict[str, Any] = {"scale": scale, "window": window, "chunk": chunk, "sinks": sinks}
    if kernels.exact:
        return _attend_exactly(queries, view, sink_queries, **options)
    shapes = PagedAttentionShape(
        queries.shape,
        view.pages.shape,
        view.table.shape,
        queries.dtype,
        view.pages.dtype,
        sinks,
        chunk,
        math.prod(current_mesh_sizes().values()),
    )
    name, why = choose_paged_backend("" if kernels.forward_mode else lowering_platform(), shapes)
    log_backend(name, why)
    if name == "paged blocks":
        return attend_by_blocks(queries, view, sink_queries=sink_queries, **options)
    from llama_jax.ops.attention.paged_kernels import ragged, triton

    if name == "ragged":
        return ragged(queries, view, scale=scale, window=window)
    return triton(queries, view, scale=scale, window=window, chunk=chunk)


def _attend_exactly(queries: jax.Array, view: PagedView, sink_queries: jax.Array | None, **options: Any) -> jax.Array:
    """`attend_on_device` with each query as a separate row, one block of queries at a time."""
    row, position = view.rows_and_positions(len(queries))
    size = exact.block_size()

    def attend(queries: jax.Array, sink_queries: jax.Array | None, row: jax.Array, position: jax.Array) -> jax.Array:
        starts = jnp.arange(size + 1, dtype=jnp.int32)
        query_rows = view.replace(table=view.table[row], lengths=position + 1, starts=starts, tokens_per_row=1)
        return attend_by_blocks(queries, query_rows, sink_queries=sink_queries, **options, is_exact=True)

    return exact.map_blocks(attend, size, view.starts[-1], queries, sink_queries, row, position)


def choose_paged_backend(platform: str, shapes: PagedAttentionShape) -> tuple[str, str]:
    """The backend of paged attention, "ragged", "triton" or "paged blocks", and the reason for it."""
    if platform not in ("gpu", "tpu"):
        return "paged blocks", f"no kernel for {platform or 'forward mode'}"
    from llama_jax.ops.attention.paged_kernels import why_not_ragged, why_not_triton

    kernel, why_not = ("triton", why_not_triton) if platform == "gpu" else ("ragged", why_not_ragged)
    reason = why_not(platform, shapes)
    return (kernel, f"on {platform}") if reason is None else ("paged blocks", reason)
