"""The key/value cache: an immutable pytree that is passed to `forward` and returned by it.

Keys and values are stored in the pages of one pool, and each row has a page table (Kwon et al. 2023, section 4).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import lax
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int, Int32

from llama_jax.config import LlamaConfig
from llama_jax.errors import ConfigError, GenerationError
from llama_jax.ops.attention import AttentionMask, HeadSharding, KVView, PagedView
from llama_jax.ops.int8 import Quantized, dequantize_rows, map_planes
from llama_jax.ops.platform import AnyArray, current_mesh_sizes
from llama_jax.settings import Bounds, NonNegativeInt, PositiveInt, at_least, check_fields

PAGE_SIZE = 16  # tokens per page
MAX_CACHE_CAPACITY = 2**24  # tokens per row; the page table of a row then takes 4 MB


@dataclass(frozen=True)
class CacheOptions:
    """Options of the KV cache.

    Attributes:
      dtype: "int8": a quarter of float32's bytes, with one scale per head and position. None: the dtype of the parameters.
      window: sliding window: each token attends to this many positions, so that memory does not grow with the text.
      sinks: with a window, number of first tokens that later tokens always attend to (attention sinks). Without them, the
        loss of a model trained with full attention rises sharply (Xiao et al. 2023, section 3.1); 4 is usual.

    Raises:
      GenerationError: an invalid value.
    """

    dtype: Literal["int8"] | None = None
    window: PositiveInt | None = None
    sinks: NonNegativeInt = 0

    def __post_init__(self) -> None:
        check_fields(self, GenerationError)
        if self.window is None and self.sinks:
            raise GenerationError(f"sinks={self.sinks} are for a cache with a window; without one every token is kept")


class KVCache(struct.PyTreeNode):
    """Keys and values of the tokens processed so far.

    All rows use pages of one pool. Rows with a common prefix may share pages; the caller must ensure that shared pages are
    not written. `init_cache` gives every row its own pages.

    Attributes:
      pages: [L, P, page, 2K, H], for each token the key of head k at 2k and its value at 2k + 1; `Quantized` for int8.
      table: int32[R, n], the page table: the pages of each row in order. With a window, the pages of tokens outside it are
        reused: an entry may refer to a page that now holds later tokens. If a mesh shards the rows, it also shards P, and a
        row's pages are on its device.
      length: int32[R], the number of tokens of each row in the cache.
      window: number of positions that a token attends to; None: all.
      sinks: as in `CacheOptions`.
    """

    pages: Any
    table: Any
    length: Any  # all three: arrays, or in a tree of the same structure their shapes or partition specs
    window: int | None = struct.field(pytree_node=False, default=None)
    sinks: int = struct.field(pytree_node=False, default=0)

    @property
    def capacity(self) -> int:
        """Maximum number of tokens per row."""
        return self.table.shape[-1] * self.pages.shape[2]

    def view(self, new_tokens: int, starts: Int32[AnyArray, " starts"] | None) -> PagedView:
        """The `PagedView` of a pass, without the pages and the layer, which every layer sets.

        Args:
          new_tokens: tokens per row in this pass; ignored in a ragged batch (with `starts`, see `Positions.starts`).
        """
        if starts is not None:
            return PagedView(None, None, self.table, self.length + starts[1:] - starts[:-1], starts)
        starts = jnp.arange(len(self.length) + 1, dtype=jnp.int32) * new_tokens
        return PagedView(None, None, self.table, self.length + new_tokens, starts, new_tokens)


def init_cache(
    config: LlamaConfig,
    batch: int,
    capacity: int,
    dtype: jax.typing.DTypeLike = jnp.float32,
    *,
    window: int | None = None,
    sinks: int = 0,
    max_tokens_per_pass: int = 1,
) -> KVCache:
    """An empty cache for `batch` rows of at most `capacity` tokens, each with its own pages.

    Args:
      dtype: the dtype of the parameters; or int8, with one scale per head and position.
      window: number of positions that a token attends to. A row has pages only for these, regardless of the capacity.
      sinks: as in `CacheOptions`.
      max_tokens_per_pass: with a window, the maximum number of tokens per row in one pass.

    Raises:
      GenerationError: an invalid value.
    """
    CacheOptions(window=window, sinks=sinks)
    at_least(1).check("batch", batch, GenerationError)
    at_least(1).check("max_tokens_per_pass", max_tokens_per_pass, GenerationError)
    Bounds(1, MAX_CACHE_CAPACITY).check("capacity", capacity, GenerationError)
    if not jnp.issubdtype(dtype, jnp.floating) and dtype != jnp.int8:
        raise GenerationError(f"dtype={dtype!r} of the cache must be a floating-point type, that of the parameters, or int8")
    sink_pages, ring_pages = pages_per_row(capacity, window, sinks, max_tokens_per_pass)
    entry = np.arange(-(-capacity // PAGE_SIZE))
    page_in_row = np.where(entry < sink_pages, entry, sink_pages + (entry - sink_pages) % max(ring_pages, 1))
    row_pages = sink_pages + ring_pages
    pages = init_pages(config, batch * row_pages, dtype)
    return KVCache(pages, _own_pages(batch, row_pages, page_in_row), jnp.zeros((batch,), jnp.int32), window, sinks)


def init_pages(
    config: LlamaConfig, count: int, dtype: jax.typing.DTypeLike = jnp.float32, page_size: int = PAGE_SIZE
) -> Any:
    """`count` (P) empty pages [L, P, page, 2K, H]; for int8 `Quantized`, with one scale per head and position."""
    shape = (config.n_layers, count, page_size, 2 * config.n_kv_heads, config.head_dim)
    if jnp.dtype(dtype) == jnp.int8:
        return Quantized(jnp.zeros(shape, jnp.int8), jnp.zeros(shape[:-1], jnp.float32))
    return jnp.zeros(shape, dtype)


def _own_pages(batch: int, row_pages: int, page_in_row: Int[np.ndarray, " n"]) -> Int32[Array, "{batch} n"]:
    """The page table of rows with `row_pages` pages each; `page_in_row` has each entry's page number within its row."""
    return jnp.asarray(np.arange(batch)[:, None] * row_pages + page_in_row, jnp.int32)


def pages_per_row(
    capacity: int, window: int | None, sinks: int, max_tokens_per_pass: int, page_size: int = PAGE_SIZE
) -> tuple[int, int]:
    """The number of pages of a row for sinks, and of its other pages, which are a ring buffer if there is a window."""
    total = -(-capacity // page_size)
    if window is None:
        return 0, total
    sink_pages = min(-(-sinks // page_size), total)
    # Enough for any window + max_tokens_per_pass - 1 consecutive positions, so that no token in a window is overwritten.
    return sink_pages, min((window + max_tokens_per_pass - 3) // page_size + 2, total - sink_pages)


def cache_bytes(
    config: LlamaConfig,
    batch: int,
    length: int,
    dtype: jax.typing.DTypeLike,
    options: CacheOptions = CacheOptions(),
    max_tokens_per_pass: int = 1,
) -> int:
    """Bytes of the keys and values of `batch` rows of `length` tokens: 2 * L * B * K * S * H * itemsize.

    int8 takes 4 more bytes per head and position, for the scale. With a window, S is the number of tokens in its pages.
    """
    if options.window is not None:
        length = min(length, PAGE_SIZE * sum(pages_per_row(length, options.window, options.sinks, max_tokens_per_pass)))
    rows = 2 * config.n_layers * batch * config.n_kv_heads * length
    dtype = jnp.dtype(dtype)
    return rows * (config.head_dim * dtype.itemsize + (4 if dtype == jnp.int8 else 0))


def cache_from(
    keys: Float[Array, "L B K T H"], values: Float[Array, "L B K T H"], length: Int[Array, " B"], capacity: int
) -> KVCache:
    """A cache that contains these keys and values, with a capacity of T or more tokens."""
    layers, batch, heads, tokens, head_dim = keys.shape
    keys_values = jnp.stack([keys, values], axis=3).transpose(0, 1, 4, 2, 3, 5)  # [L, B, T, K, 2, H]
    entries = -(-capacity // PAGE_SIZE)
    keys_values = jnp.pad(keys_values, [(0, 0), (0, 0), (0, entries * PAGE_SIZE - tokens)] + [(0, 0)] * 3)
    pages = keys_values.reshape(layers, batch * entries, PAGE_SIZE, 2 * heads, head_dim)
    return KVCache(pages, _own_pages(batch, entries, np.arange(entries)), length)


def is_quantized(cache: KVCache) -> bool:
    """Whether this is an int8 cache, whose keys are transformed by `ops.int8.smooth_keys`."""
    return isinstance(cache.pages, Quantized)


def repeat_rows(cache: KVCache, copies: int, extra_tokens: int, head_sharding: HeadSharding | None = None) -> KVCache:
    """A cache with `copies` consecutive rows for each row of `cache`, each with room for `extra_tokens` more.

    The copies share the full pages of the row. Each has its own copy of the last page, for its next tokens.

    Args:
      cache: without a window.
      head_sharding: the mesh axes that shard rows and heads.
    """

    def repeat_local(
        pages: Any, table: jax.Array, length: jax.Array, shard: jax.Array | int = 0
    ) -> tuple[Any, jax.Array, jax.Array]:
        n_pages, page_size = pages.shape[1:3]
        new_per_row = -(-extra_tokens // page_size) + 1
        table, length = (jnp.repeat(x, copies, axis=0) for x in (table - shard * n_pages, length))
        new_pages = n_pages + jnp.arange(len(table) * new_per_row, dtype=jnp.int32).reshape(-1, new_per_row)
        table = jnp.pad(table, ((0, 0), (0, new_per_row)))
        full_pages, entry = length[:, None] // page_size, jnp.arange(table.shape[1], dtype=jnp.int32)[None]
        last = jnp.take_along_axis(table, full_pages, axis=1)[:, 0]
        new_entries = jnp.take_along_axis(new_pages, jnp.clip(entry - full_pages, 0, new_per_row - 1), axis=1)
        table = jnp.where(entry < full_pages, table, new_entries)

        def append_pages(pages: jax.Array) -> jax.Array:
            pages = jnp.pad(pages, [(0, 0), (0, new_pages.size)] + [(0, 0)] * (pages.ndim - 2))
            return pages.at[:, new_pages[:, 0]].set(pages[:, last])

        return jax.tree.map(append_pages, pages), table + shard * (n_pages + new_pages.size), length

    run: Callable[..., Any] = repeat_local
    if head_sharding is not None and math.prod(current_mesh_sizes().values()) > 1:
        rows, heads = head_sharding.mesh_axes_of_rows or None, head_sharding.mesh_axes_of_heads or None
        specs = P(None, rows, None, heads), P(rows), P(rows)

        def repeat_shard(pages: Any, table: jax.Array, length: jax.Array) -> Any:
            return repeat_local(pages, table, length, lax.axis_index(rows) if rows else 0)

        run = jax.shard_map(repeat_shard, in_specs=specs, out_specs=specs, check_vma=False)
    pages, table, length = run(cache.pages, cache.table, cache.length)
    return cache.replace(pages=pages, table=table, length=length)


def gather_pages(view: PagedView, count: int, dtype: jax.typing.DTypeLike) -> KVView:
    """Gather the pages of each row for attention without pages; int8 is dequantized to `dtype`.

    Returns:
      Keys and values [R, K, S, H]; for a ragged batch of `count` = T tokens, those of each token's row, [T, K, S, H].
    """
    table = view.table if view.tokens_per_row is not None else view.table[view.rows_and_positions(count)[0]]

    def gather(first: int) -> Any:
        def take(pages: jax.Array) -> jax.Array:
            layer_pages = lax.dynamic_index_in_dim(pages, view.layer, keepdims=False)
            rows = layer_pages[table][..., first::2, :]  # [R, n, page, K, H]: keys or values, which alternate
            return rows.reshape(len(table), -1, *rows.shape[3:]).swapaxes(1, 2)

        gathered = map_planes(take, view.pages)
        return dequantize_rows(gathered, dtype) if isinstance(gathered, Quantized) else gathered

    return KVView(gather(0), gather(1))


def mask_of_pages(view: PagedView, shape: tuple[int, int], chunk: int | None) -> AttentionMask:
    """The mask of new tokens [B, T] over all slots of their rows, for attention without pages."""
    positions = jnp.maximum(view.rows_and_positions(math.prod(shape))[1], 0).reshape(shape)
    slots = jnp.arange(view.table.shape[-1] * view.pages.shape[2], dtype=jnp.int32)[None]
    if chunk is None:
        return AttentionMask(positions, slots)
    return AttentionMask(positions, slots, positions // chunk, slots // chunk)


def attend_gathered(
    attend: Callable[..., jax.Array],
    queries: Float[Array, "T K G H"],
    view: PagedView,
    *,
    scale: float,
    window: int | None,
    chunk: int | None,
    sinks: int = 0,
    sink_queries: jax.Array | None = None,
) -> Float[Array, "T K G H"]:
    """`ops.attend_paged` by a function like `ops.attend`: the pages of each row are gathered.

    Raises:
      ConfigError: a cache with sinks.
    """
    if sinks:
        raise ConfigError("a cache with sinks supports only the built-in paged attention; do not set attend or attention")
    batch = len(queries) if view.tokens_per_row is None else len(view.lengths)
    mask = mask_of_pages(view, (batch, len(queries) // batch), chunk)
    keys_values = gather_pages(view, len(queries), queries.dtype)
    return flatten_tokens(attend(unflatten_tokens(queries, batch), keys_values, mask, scale=scale, window=window))


def flatten_tokens(x: jax.Array) -> jax.Array:
    """Reshape [B, K, T, ...] to [B * T, K, ...]."""
    return x.swapaxes(1, 2).reshape(-1, x.shape[1], *x.shape[3:])


def unflatten_tokens(x: jax.Array, batch: int) -> jax.Array:
    """Reshape [B * T, K, ...] to [B, K, T, ...]."""
    return x.reshape(batch, -1, *x.shape[1:]).swapaxes(1, 2)


def bucket(length: int, smallest: int) -> int:
    """`length` rounded up to a power of two, so that programs are compiled for a few sizes instead of every length."""
    return max(smallest, 1 << math.ceil(math.log2(max(length, 1))))
