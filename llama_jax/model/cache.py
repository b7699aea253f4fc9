"""The key/value cache: an immutable tree of arrays that the caller threads through `forward`."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax

from llama_jax.config import LlamaConfig
from llama_jax.errors import GenerationError


class KVCache(struct.PyTreeNode):
    """Keys and values of the tokens that the model has read.

    Attributes:
      k, v: a tuple of L arrays [B, K, S, H] (for a tuple of blocks) or one array [L, B, K, S, H] (for stacked blocks).
        Head-major, so that the product with a query reads it as it lies.
      length: int32[B]. Slots [0, length) of each row are valid, slot s holding the token at position s; what lies behind
        has weight zero in every product. Rows may have different lengths.

    The capacity S is also what a step reads and pays for. It is therefore kept close to the filled length and enlarged
    with `grow`: a window cut out of a larger cache would be copied before every product.
    """

    k: Any
    v: Any
    length: Any  # each an array, or what stands for one in a tree of the same form: a shape, a partition spec

    @property
    def capacity(self) -> int:
        """S, the slots of each row."""
        return (self.k[0] if isinstance(self.k, tuple) else self.k).shape[-2]


def init_cache(
    config: LlamaConfig, batch: int, capacity: int, dtype: jnp.dtype = jnp.float32, *, stacked: bool = False
) -> KVCache:
    """An empty cache for `batch` rows of at most `capacity` tokens; `stacked` to match stacked blocks."""
    for name, value in (("batch", batch), ("capacity", capacity)):
        if not isinstance(value, int) or value < 1:
            raise GenerationError(f"{name}={value!r} must be a positive whole number")
    if not jnp.issubdtype(dtype, jnp.floating):
        raise GenerationError(f"dtype={dtype!r} of the cache must be a floating-point type, that of the parameters")
    shape = (batch, config.n_kv_heads, capacity, config.head_dim)

    def buffers() -> jax.Array | tuple[jax.Array, ...]:
        if stacked:
            return jnp.zeros((config.n_layers, *shape), dtype)
        return tuple(jnp.zeros(shape, dtype) for _ in range(config.n_layers))

    return KVCache(k=buffers(), v=buffers(), length=jnp.zeros((batch,), jnp.int32))


def cache_bytes(config: LlamaConfig, batch: int, length: int, dtype: jnp.dtype) -> int:
    """Bytes of the keys and values of `batch` rows of `length` tokens: 2 L B K S H times the size of `dtype`."""
    return 2 * config.n_layers * batch * config.n_kv_heads * length * config.head_dim * jnp.dtype(dtype).itemsize


def grow(cache: KVCache, capacity: int) -> KVCache:
    """The same cache with room for `capacity` tokens in each row.

    Raises:
      GenerationError: `capacity` is below the present one, so that tokens could be lost.
    """
    missing = capacity - cache.capacity
    if missing < 0:
        raise GenerationError(f"a cache of {cache.capacity} slots cannot shrink to capacity={capacity}")

    def extend(buffer: jax.Array) -> jax.Array:
        return jnp.pad(buffer, [(0, 0)] * (buffer.ndim - 2) + [(0, missing), (0, 0)])

    return cache.replace(k=jax.tree.map(extend, cache.k), v=jax.tree.map(extend, cache.v))


def write(buffer: jax.Array, rows: jax.Array, start: jax.Array, layer: jax.Array | None = None) -> jax.Array:
    """Put T new tokens of each row into a buffer of keys or values, in place where XLA owns the buffer.

    No gradient flows into the cache. Positions are not checked here (`forward` does where it can): of an update that does
    not fit nothing good can come, XLA moves it to fit or drops it.

    Args:
      buffer: [B, K, S, H]; or [K, S, H] for a single row, see `drop_batch`; or [L, B, K, S, H] with `layer`.
      rows: [B, K, T, H].
      start: int32[B], the slot of each row's first new token.
      layer: int32[], which layer of a stacked buffer.
    """
    rows = lax.stop_gradient(rows.astype(buffer.dtype))
    batch = rows.shape[0]
    zero = jnp.zeros((), start.dtype)
    if buffer.ndim == 3:
        return lax.dynamic_update_slice(buffer, rows[0], (zero, start[0], zero))
    layers = [] if layer is None else [layer.astype(start.dtype)]
    if batch == 1:
        return lax.dynamic_update_slice(
            buffer, rows.reshape(*[1] * len(layers), *rows.shape), (*layers, zero, zero, start[0], zero)
        )
    # XLA for CPU scatters 16-bit floats by way of float32, the whole buffer there and back; bits as they are.
    bits = {2: jnp.uint16}.get(buffer.dtype.itemsize, buffer.dtype)
    row_axis = len(layers)
    written = lax.scatter(
        lax.bitcast_convert_type(buffer, bits),
        jnp.stack([*(jnp.broadcast_to(layer, batch) for layer in layers), start], axis=-1),
        lax.bitcast_convert_type(rows, bits),
        # Rows are said to be a batch: of numbers, XLA would not know that each device has those of its own rows.
        lax.ScatterDimensionNumbers(
            update_window_dims=(1, 2, 3),
            inserted_window_dims=(0,) * row_axis,
            scatter_dims_to_operand_dims=(*range(row_axis), row_axis + 2),
            operand_batching_dims=(row_axis,),
            scatter_indices_batching_dims=(0,),
        ),
        indices_are_sorted=True,
        unique_indices=True,
        mode=lax.GatherScatterMode.FILL_OR_DROP,
    )
    return lax.bitcast_convert_type(written, buffer.dtype)


def read(buffer: jax.Array, layer: jax.Array | None = None) -> jax.Array:
    """One layer of a buffer of keys or values: [B, K, S, H], or [K, S, H] where the batch axis was dropped."""
    return buffer if layer is None else lax.dynamic_index_in_dim(buffer, layer, keepdims=False)


def drop_batch(cache: KVCache) -> KVCache:
    """A cache of one row without its batch axis; every other cache as it is.

    XLA for CPU merges the batch and head axes for the product with a query. Given [1, K, S, H] it fuses that reshape with
    the write of the new token, needs the written buffer twice, and copies the whole layer at every step; given [K, S, H]
    it writes in place and copies nothing.
    """
    if isinstance(cache.k, tuple) and cache.k[0].ndim == 4 and cache.length.shape[0] == 1:
        return jax.tree.map(lambda buffer: buffer[0] if buffer.ndim == 4 else buffer, cache)
    return cache


def restore_batch(cache: KVCache) -> KVCache:
    """Undo `drop_batch`."""
    if isinstance(cache.k, tuple) and cache.k[0].ndim == 3:
        return jax.tree.map(lambda buffer: buffer[None] if buffer.ndim == 3 else buffer, cache)
    return cache


def bucket(length: int, smallest: int) -> int:
    """The next power of two: programs are compiled for a few sizes, not for every length."""
    return max(smallest, 1 << math.ceil(math.log2(max(length, 1))))
