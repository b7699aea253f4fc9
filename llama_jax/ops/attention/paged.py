"""Attention to keys and values in pages; a table has the pages of each row (Kwon et al. 2023, section 4)."""

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
from llama_jax.ops.attention.paged_blocks import attend_by_blocks, seen_by
from llama_jax.ops.int8 import Quantized, dequantize, over_rows, quantize
from llama_jax.ops.platform import for_cpu, log_backend, lowering_platform, mesh_in_force


class PagedView(struct.PyTreeNode):
    """Keys and values in pages, and a table of the pages of each row.

    Attributes:
      pages: [L, P, page, 2K, H], of each token the key and the value of each head side by side: the key of head k at 2k, its
        value at 2k + 1. An array or `Quantized`.
      layer: int32[], whose pages are read.
      table: int32[R, n], the pages of each row in order. Entries beyond its length, and those of which no new token sees a
        key any more, are not used; any valid number will do.
      lengths: int32[R], tokens of each row, the new ones included. Those beyond the n pages are nowhere: neither written nor
        read.
      starts: int32[R + 1]: row r's new tokens, its last ones, are [starts[r], starts[r + 1]) of all T. A row without new
        tokens has an empty range. Tokens from starts[R] on are padding.
      each: how many new tokens every row has, where that is known: starts are then its multiples. Static.
    """

    pages: Any
    layer: Any
    table: Any
    lengths: Any
    starts: Any
    each: int | None = struct.field(pytree_node=False, default=None)

    def tokens(self, count: int) -> tuple[Int32[Array, " {count}"], Int32[Array, " {count}"]]:
        """The row and the position in it of each of the new tokens; padding has the last row, and -1."""
        rows = len(self.lengths)
        if self.each is not None:
            row = jnp.repeat(jnp.arange(rows, dtype=jnp.int32), self.each)
            position = self.lengths[:, None] + jnp.arange(-self.each, 0, dtype=jnp.int32)[None]
            padding = 0, count - rows * self.each
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
    """`attend_paged` as it is defined, of every token with all slots of its row: the oracle of the other ways."""
    precise = jnp.promote_types(queries.dtype, jnp.float32)
    row, position = view.tokens(len(queries))
    gathered: Any = over_rows(lambda x: x[view.layer, view.table[row]], view.pages)  # [T, n, page, 2K, H]
    dense = dequantize(gathered, precise) if isinstance(gathered, Quantized) else gathered.astype(precise)
    slots = dense.reshape(len(queries), -1, *dense.shape[3:])
    query, key = position[:, None], jnp.arange(slots.shape[1])[None]
    sink = (key < sinks) & (key <= query)
    allowed = seen_by(query, key, window, chunk) | sink  # [T, S]
    keys, values = (jnp.where(allowed[..., None, None], slots[:, :, i::2], 0) for i in (0, 1))

    def scores_of(queries: jax.Array) -> jax.Array:
        return jnp.einsum("tkgh,tskh->tkgs", queries.astype(precise), keys) * scale

    scores = scores_of(queries)
    if sink_queries is not None:
        scores = jnp.where(sink[:, None, None], scores_of(sink_queries), scores)
    scores = jnp.where(allowed[:, None, None], scores, jnp.finfo(precise).min)
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
) -> Float[Array, "T K G H"]:
    """Attend from each new token to the keys of its row at its own and earlier positions.

    Args:
      view: which hold the new tokens' own keys and values already.
      scale: multiplies the scores.
      window: a query sees only keys less than this many positions before it. So the table may be a ring, in which pages
        that no new token sees are those of later tokens, too.
      chunk: a query sees only keys of its own chunk, so many positions each.
      sinks: keys of so many first positions are seen from everywhere (Xiao et al. 2023, section 3.2).
      sink_queries: the queries as the sinks are to see them, `queries` by default.
      head_sharding: the axes of the current mesh over which rows and heads are cut, each device computing its own part.
        With the rows are cut the table, the lengths, the tokens, of which each row must have as many (`view.each`), and the
        axis P of the pages: those of a row are on its device. Without it XLA divides the program, and no kernel is used on a
        mesh.

    Returns:
      In the dtype of `queries`; softmax in float32 at least. Padding has finite numbers.

    Raises:
      MeshError: rows, pages or heads cannot be cut evenly; rows are cut, but `view.each` does not say where.
    """
    attend = partial(_attend, scale=scale, window=window, chunk=chunk, sinks=sinks)
    cut = _Cut.of(head_sharding, view.pages, view, len(queries))
    if cut is None:
        return attend(queries, view, sink_queries=sink_queries)
    pages_spec, tokens_spec, view_spec = cut.specs(view.pages, view)
    run = jax.shard_map(
        lambda queries, sink_queries, view: attend(
            queries, _own(view, view.pages.shape[1], cut.rows), sink_queries=sink_queries
        ),
        in_specs=(tokens_spec, None if sink_queries is None else tokens_spec, view_spec.replace(pages=pages_spec)),
        out_specs=tokens_spec,
        check_vma=False,  # a kernel does not say over which axes its results differ
    )
    return run(queries, sink_queries, view)


def write_paged(
    pages: Any,
    keys: Float[Array, "T K H"],
    values: Float[Array, "T K H"],
    view: PagedView,
    head_sharding: HeadSharding | None = None,
) -> Any:
    """Put the new tokens' keys and values into their slots; in place where `pages` are donated or a loop carries them.

    Args:
      pages: [L, P, page, 2K, H], an array or `Quantized`.
      keys, values: padding is dropped.
      view: where they belong; its own pages are not read.
      head_sharding: as for `attend_paged`.

    Returns:
      The pages with them.

    Raises:
      MeshError: as `attend_paged`.
    """
    cut = _Cut.of(head_sharding, pages, view, len(keys))
    if cut is None:
        return _write(pages, keys, values, view)
    pages_spec, tokens_spec, view_spec = cut.specs(pages, view)
    run = jax.shard_map(
        lambda pages, keys, values, view: _write(pages, keys, values, _own(view, pages.shape[1], cut.rows)),
        in_specs=(pages_spec, tokens_spec, tokens_spec, view_spec),
        out_specs=pages_spec,
        check_vma=False,
    )
    return run(pages, keys, values, view.replace(pages=None))


def _write(pages: Any, keys: jax.Array, values: jax.Array, view: PagedView) -> Any:
    layers, count, page, *_ = pages.shape
    row, position = view.tokens(len(keys))
    place = (view.layer * count + view.table[row, position // page]) * page + position % page
    there = (position != NO_QUERY) & (position < view.table.shape[1] * page)
    place = jnp.where(there, place, layers * count * page)  # beyond the end
    both = jnp.stack([keys, values], axis=2).reshape(len(keys), -1, keys.shape[-1])
    new = quantize(both) if isinstance(pages, Quantized) else both.astype(pages.dtype)
    return jax.tree.map(lambda pages, new: _put_rows(pages, new, place), pages, new)


@for_cpu("put_rows")
def _put_rows(pages: jax.Array, rows: jax.Array, places: jax.Array) -> jax.Array:
    """[L, P, page, ...] with rows [T, ...] at int32[T] places; those beyond the end are dropped."""
    return pages.reshape(-1, *pages.shape[3:]).at[places].set(rows, mode="drop").reshape(pages.shape)


class _Cut(NamedTuple):
    """Axes of the current mesh, each of several devices, over which rows and heads are cut."""

    rows: tuple[str, ...]
    heads: tuple[str, ...]

    @classmethod
    def of(cls, head_sharding: HeadSharding | None, pages: Any, view: PagedView, count: int) -> _Cut | None:
        """None where there is one device, or XLA divides the program."""
        mesh = mesh_in_force()
        if head_sharding is None or math.prod(mesh.values()) == 1:
            return None
        rows, heads = (
            tuple(axis for axis in axes if mesh[axis] > 1)
            for axes in (head_sharding.mesh_axes_of_rows, head_sharding.mesh_axes_of_heads)
        )
        if rows and (view.each is None or count != len(view.lengths) * view.each):
            raise MeshError(f"rows with different numbers of new tokens, or padding, cannot be cut over {'*'.join(rows)}")
        for what, size, axes in (
            ("rows", len(view.lengths), rows),
            ("pages", pages.shape[1], rows),
            ("key/value heads", pages.shape[3] // 2, heads),
        ):
            ways = math.prod(mesh[axis] for axis in axes)
            if size % ways:
                raise MeshError(f"{size} {what} cannot be cut over {'*'.join(axes)}={ways}")
        return cls(rows, heads)

    def specs(self, pages: Any, view: PagedView) -> tuple[Any, P, PagedView]:
        """Partition specs of pages, of anything [T, K, ...], and of a view without pages."""
        rows, heads = self.rows or None, self.heads or None
        view_spec = view.replace(pages=None, layer=P(), table=P(rows), lengths=P(rows), starts=P())
        return jax.tree.map(lambda _: P(None, rows, None, heads), pages), P(rows, heads), view_spec


def _own(view: PagedView, count: int, rows: tuple[str, ...]) -> PagedView:
    """A device's part of the view: its rows begin with the first of its tokens, and its `count` pages with the first."""
    if view.each is None:
        return view
    first = lax.axis_index(rows) * count if rows else 0
    table = jnp.clip(view.table - first, 0, count - 1)  # entries beyond a row's length may be any
    return view.replace(table=table, starts=jnp.arange(len(view.lengths) + 1, dtype=jnp.int32) * view.each)


@for_cpu("attend_paged")
def _attend(
    queries: Float[Array, "T K G H"],
    view: PagedView,
    *,
    scale: float,
    window: int | None,
    chunk: int | None,
    sinks: int,
    sink_queries: jax.Array | None,
) -> jax.Array:
    options = {"scale": scale, "window": window, "chunk": chunk, "sinks": sinks}
    if exact.is_exact():
        return _attend_exactly(queries, view, sink_queries, **options)
    problem = PagedAttentionShape(
        queries.shape,
        view.pages.shape,
        view.table.shape,
        queries.dtype,
        view.pages.dtype,
        sinks,
        chunk,
        math.prod(mesh_in_force().values()),
    )
    name, why = choose_paged(lowering_platform(), problem)
    log_backend(name, why)
    if name == "paged blocks":
        return attend_by_blocks(queries, view, sink_queries=sink_queries, **options)
    from llama_jax.ops.attention.paged_kernels import ragged, triton

    if name == "ragged":
        return ragged(queries, view, scale=scale, window=window)
    return triton(queries, view, scale=scale, window=window, chunk=chunk)


def _attend_exactly(
    queries: jax.Array, view: PagedView, sink_queries: jax.Array | None, **options: Any
) -> jax.Array:
    """Each query as a row of its own, a block of them at a time."""
    row, position = view.tokens(len(queries))
    size = exact.block_size()

    def attend(queries: jax.Array, sink_queries: jax.Array | None, row: jax.Array, position: jax.Array) -> jax.Array:
        starts = jnp.arange(size + 1, dtype=jnp.int32)
        own = view.replace(table=view.table[row], lengths=position + 1, starts=starts, each=1)
        return attend_by_blocks(queries, own, sink_queries=sink_queries, **options)

    return exact.by_blocks(attend, size, view.starts[-1], queries, sink_queries, row, position)


def choose_paged(platform: str, problem: PagedAttentionShape) -> tuple[str, str]:
    """The way to compute attention over pages on a platform, "ragged", "triton" or "paged blocks", and the reason."""
    if platform not in ("gpu", "tpu"):
        return "paged blocks", f"no kernel for {platform}"
    from llama_jax.ops.attention.paged_kernels import refusal_of_ragged, refusal_of_triton

    name, refuse = ("triton", refusal_of_triton) if platform == "gpu" else ("ragged", refusal_of_ragged)
    refusal = refuse(platform, problem)
    return (name, f"on {platform}") if refusal is None else ("paged blocks", refusal)
