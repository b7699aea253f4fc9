"""The key/value cache: an immutable tree of arrays that the caller threads through `forward`.

Keys and values are kept in pages of one pool, and each row has a table of its pages (Kwon et al. 2023, section 4).
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
from llama_jax.errors import GenerationError
from llama_jax.ops.attention import HeadSharding, KVView, PagedView
from llama_jax.ops.int8 import Quantized, dequantize, map_rows
from llama_jax.ops.platform import AnyArray, mesh_in_force

PAGE = 16  # tokens of a page
LARGEST_CAPACITY = 2**24  # tokens of a row, whose table then takes 4 MB


@dataclass(frozen=True)
class CacheOptions:
    """How a generation remembers.

    Attributes:
      dtype: "int8" for a quarter of float32's bytes, each head and position with a factor of its own; None takes that of the
        parameters.
      window: tokens see only so many positions back, and keys and values need no more room however long the text becomes.
      sinks: first tokens that stay visible, without which the loss of a model that was trained to see all tokens rises
        sharply (Xiao et al. 2023, section 3.1); 4 are usual. With a window only.

    Raises:
      GenerationError: an invalid value.
    """

    dtype: Literal["int8"] | None = None
    window: int | None = None
    sinks: int = 0

    def __post_init__(self) -> None:
        if self.dtype not in (None, "int8"):
            raise GenerationError(f"dtype={self.dtype!r} of the cache must be 'int8', or None for that of the parameters")
        for name, value, least in (("window", self.window, 1), ("sinks", self.sinks, 0)):
            if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < least):
                raise GenerationError(f"{name}={value!r} must be an integer of at least {least}")
        if self.window is None and self.sinks:
            raise GenerationError(f"sinks={self.sinks} are for a cache with a window; without one every token is kept")


class KVCache(struct.PyTreeNode):
    """Keys and values of the tokens that the model has read.

    Rows of any lengths share the pages of one pool, and rows that begin alike may have the same pages: which pages a row
    may write to, the caller keeps in mind. `init_cache` gives every row its own.

    Attributes:
      pages: [L, P, page, 2K, H], of each token the key and the value of each head side by side; `Quantized` for int8.
      table: int32[R, n], the pages of each row in order. With a window those that have left it are used again, so that an
        entry may name a page that now holds later tokens. Over a mesh that divides the rows, P is divided with them, and a
        row's pages are on its device.
      length: int32[R], tokens that each row has read.
      window: how many positions back a token sees, or None for all.
      sinks: with a window, this many first tokens stay visible (Xiao et al. 2023, section 3.2, attention sinks).
    """

    pages: Any
    table: Any
    length: Any  # each an array, or what stands for one in a tree of the same form: a shape, a partition spec
    window: int | None = struct.field(pytree_node=False, default=None)
    sinks: int = struct.field(pytree_node=False, default=0)

    @property
    def capacity(self) -> int:
        """Tokens that a row can have."""
        return self.table.shape[-1] * self.pages.shape[2]

    def view(self, new: int, starts: Int32[AnyArray, " starts"] | None) -> PagedView:
        """What the layers read, without the pages and the layer.

        Args:
          new: tokens that each row reads; with `starts` there are others for every row, see `Positions.starts`.
        """
        if starts is not None:
            return PagedView(None, None, self.table, self.length + starts[1:] - starts[:-1], starts)
        starts = jnp.arange(len(self.length) + 1, dtype=jnp.int32) * new
        return PagedView(None, None, self.table, self.length + new, starts, new)


def init_cache(
    config: LlamaConfig,
    batch: int,
    capacity: int,
    dtype: jax.typing.DTypeLike = jnp.float32,
    *,
    window: int | None = None,
    sinks: int = 0,
    at_once: int = 1,
) -> KVCache:
    """An empty cache for `batch` rows of at most `capacity` tokens, each with pages of its own.

    Args:
      dtype: that of the parameters; or int8, with a factor for each head and position.
      window: positions that a token sees back. A row then takes pages for the window only, however large the capacity.
      sinks: first tokens of each row that are seen from everywhere.
      at_once: with a window, the most tokens of a row that are read at once.

    Raises:
      GenerationError: an invalid value.
    """
    CacheOptions(window=window, sinks=sinks)
    for name, value in (("batch", batch), ("capacity", capacity), ("at_once", at_once)):
        if not isinstance(value, int) or value < 1:
            raise GenerationError(f"{name}={value!r} must be a positive integer")
    if capacity > LARGEST_CAPACITY:
        raise GenerationError(f"capacity={capacity}: a row of a cache has at most {LARGEST_CAPACITY:,} tokens")
    if not jnp.issubdtype(dtype, jnp.floating) and dtype != jnp.int8:
        raise GenerationError(f"dtype={dtype!r} of the cache must be a floating-point type, that of the parameters, or int8")
    first, ring = pages_of(capacity, window, sinks, at_once)
    entry = np.arange(-(-capacity // PAGE))
    entry = np.where(entry < first, entry, first + (entry - first) % max(ring, 1))
    pages = init_pages(config, batch * (first + ring), dtype)
    return KVCache(pages, _own_pages(batch, first + ring, entry), jnp.zeros((batch,), jnp.int32), window, sinks)


def init_pages(config: LlamaConfig, count: int, dtype: jax.typing.DTypeLike = jnp.float32, page: int = PAGE) -> Any:
    """`count` empty pages [L, P, page, 2K, H]; of int8 `Quantized`, with a factor for each head and position."""
    shape = (config.n_layers, count, page, 2 * config.n_kv_heads, config.head_dim)
    if jnp.dtype(dtype) == jnp.int8:
        return Quantized(jnp.zeros(shape, jnp.int8), jnp.zeros(shape[:-1], jnp.float32))
    return jnp.zeros(shape, dtype)


def _own_pages(batch: int, count: int, entry: Int[np.ndarray, " n"]) -> Int32[Array, "{batch} n"]:
    """The table of rows with `count` pages each, from the number of an entry's page among its row's."""
    return jnp.asarray(np.arange(batch)[:, None] * count + entry, jnp.int32)


def pages_of(capacity: int, window: int | None, sinks: int, at_once: int, page: int = PAGE) -> tuple[int, int]:
    """Pages of a row that are kept for good, those of the sinks, and others, which with a window are a ring."""
    whole = -(-capacity // page)
    if window is None:
        return 0, whole
    first = min(-(-sinks // page), whole)
    # The most pages that the positions which `at_once` new tokens see can touch: what is overwritten is out of all windows.
    return first, min((window + at_once - 3) // page + 2, whole - first)


def cache_bytes(
    config: LlamaConfig,
    batch: int,
    length: int,
    dtype: jax.typing.DTypeLike,
    options: CacheOptions = CacheOptions(),
    at_once: int = 1,
) -> int:
    """Bytes of the keys and values of `batch` rows of `length` tokens: 2 L B K S times H of `dtype`.

    For int8 there are 4 more bytes for the factor of each head and position. With a window S is that of its pages.
    """
    if options.window is not None:
        length = min(length, PAGE * sum(pages_of(length, options.window, options.sinks, at_once)))
    rows = 2 * config.n_layers * batch * config.n_kv_heads * length
    dtype = jnp.dtype(dtype)
    return rows * (config.head_dim * dtype.itemsize + (4 if dtype == jnp.int8 else 0))


def cache_from(
    keys: Float[Array, "L B K T H"], values: Float[Array, "L B K T H"], length: Int[Array, " B"], capacity: int
) -> KVCache:
    """The cache of rows whose keys and values are known, with room for `capacity` tokens, T or more."""
    layers, batch, heads, new, width = keys.shape
    both = jnp.stack([keys, values], axis=3).transpose(0, 1, 4, 2, 3, 5)  # [L, B, T, K, 2, H]
    entries = -(-capacity // PAGE)
    both = jnp.pad(both, [(0, 0), (0, 0), (0, entries * PAGE - new)] + [(0, 0)] * 3)
    pages = both.reshape(layers, batch * entries, PAGE, 2 * heads, width)
    return KVCache(pages, _own_pages(batch, entries, np.arange(entries)), length)


def is_quantized(cache: KVCache) -> bool:
    """Whether it is a cache of int8, whose keys are kept as `ops.smooth_keys` has them."""
    return isinstance(cache.pages, Quantized)


def branch(cache: KVCache, group: int, room: int, head_sharding: HeadSharding | None = None) -> KVCache:
    """A cache with `group` rows for each row of `cache`, consecutive ones, and room in each for `room` more tokens.

    They share the whole pages of the row; of its last page, which they go on writing to, each has a copy.

    Args:
      cache: without a window.
      head_sharding: over which axes of the mesh rows and heads are divided.
    """

    def of_part(
        pages: Any, table: jax.Array, length: jax.Array, part: jax.Array | int = 0
    ) -> tuple[Any, jax.Array, jax.Array]:
        count, page = pages.shape[1:3]
        each = -(-room // page) + 1
        table, length = (jnp.repeat(x, group, axis=0) for x in (table - part * count, length))
        new_pages = count + jnp.arange(len(table) * each, dtype=jnp.int32).reshape(-1, each)
        table = jnp.pad(table, ((0, 0), (0, each)))
        whole, entry = length[:, None] // page, jnp.arange(table.shape[1], dtype=jnp.int32)[None]
        last = jnp.take_along_axis(table, whole, axis=1)[:, 0]
        after = jnp.take_along_axis(new_pages, jnp.clip(entry - whole, 0, each - 1), axis=1)
        table = jnp.where(entry < whole, table, after)

        def longer(pages: jax.Array) -> jax.Array:
            pages = jnp.pad(pages, [(0, 0), (0, new_pages.size)] + [(0, 0)] * (pages.ndim - 2))
            return pages.at[:, new_pages[:, 0]].set(pages[:, last])

        return jax.tree.map(longer, pages), table + part * (count + new_pages.size), length

    run: Callable[..., Any] = of_part
    if head_sharding is not None and math.prod(mesh_in_force().values()) > 1:
        rows, heads = head_sharding.mesh_axes_of_rows or None, head_sharding.mesh_axes_of_heads or None
        specs = P(None, rows, None, heads), P(rows), P(rows)

        def of_own(pages: Any, table: jax.Array, length: jax.Array) -> Any:
            return of_part(pages, table, length, lax.axis_index(rows) if rows else 0)

        run = jax.shard_map(of_own, in_specs=specs, out_specs=specs, check_vma=False)
    pages, table, length = run(cache.pages, cache.table, cache.length)
    return cache.replace(pages=pages, table=table, length=length)


def gather_pages(view: PagedView, count: int, dtype: jax.typing.DTypeLike) -> KVView:
    """Keys and values for an attention that knows no pages: of each row [R, K, S, H], or of each of `count` new tokens'
    rows [T, K, S, H] where rows read different numbers of tokens. Those of int8 in `dtype`."""
    table = view.table if view.tokens_per_row is not None else view.table[view.tokens(count)[0]]

    def of(first: int) -> Any:
        def take(pages: jax.Array) -> jax.Array:
            layer = lax.dynamic_index_in_dim(pages, view.layer, keepdims=False)
            rows = layer[table][..., first::2, :]  # [R, n, page, K, H]
            return rows.reshape(len(table), -1, *rows.shape[3:]).swapaxes(1, 2)

        numbers = map_rows(take, view.pages)
        return dequantize(numbers, dtype) if isinstance(numbers, Quantized) else numbers

    return KVView(of(0), of(1))


def bucket(length: int, smallest: int) -> int:
    """The next power of two: programs are compiled for a few sizes, not for every length."""
    return max(smallest, 1 << math.ceil(math.log2(max(length, 1))))
