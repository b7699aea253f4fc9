"""The key/value cache: an immutable tree of arrays that the caller threads through `forward`."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax

from llama_jax.config import LlamaConfig
from llama_jax.errors import GenerationError
from llama_jax.model.window import check_window, ring_positions, ring_slots
from llama_jax.ops import cpu
from llama_jax.ops.cpu import for_cpu
from llama_jax.ops.platform import mesh_in_force
from llama_jax.ops.quantized import Quantized, over_rows, quantize

Buffer = jax.Array | Quantized
MOST_SCATTERED = 16  # tokens of a row that are written by one scatter


class KVCache(struct.PyTreeNode):
    """Keys and values of the tokens that the model has read.

    Attributes:
      k, v: [L, B, K, S, H]; `Quantized` for a cache of int8. Head-major, so that the product with a query reads contiguous
        memory.
      length: int32[B], tokens that each row has read. Rows may have different lengths.
      window: how many positions back a token sees, or None for all. With it the slots are a ring: see `ring_slots`.
      sinks: with a window, this many first tokens stay visible (Xiao et al. 2023, section 3.2, attention sinks).
      fresh: nothing has been read, and this is known when the program is traced: the first tokens then attend to their own
        keys and values as whole rows, and the slots are not read. `forward` returns a cache that is not fresh. It is part of
        the tree's structure, so that programs for the two differ; a loop must carry a cache that is not fresh.

    Without a window slots [0, length) of each row are valid, slot s holding the token at position s; later slots have weight
    zero in attention. A step reads all S slots of the capacity, filled or not. The capacity is therefore kept close to the
    filled length and enlarged with `grow`: a slice of a larger cache would be copied before every product.
    """

    k: Any
    v: Any
    length: Any  # each an array, or what stands for one in a tree of the same form: a shape, a partition spec
    window: int | None = struct.field(pytree_node=False, default=None)
    sinks: int = struct.field(pytree_node=False, default=0)
    fresh: bool = struct.field(pytree_node=False, default=False)

    @property
    def capacity(self) -> int:
        """S, the slots of each row."""
        return self.k.shape[-2]


def init_cache(
    config: LlamaConfig,
    batch: int,
    capacity: int,
    dtype: jnp.dtype = jnp.float32,
    *,
    window: int | None = None,
    sinks: int = 0,
    fresh: bool = False,
) -> KVCache:
    """An empty cache for `batch` rows of at most `capacity` tokens.

    Args:
      dtype: that of the parameters; or int8, with a factor for each head and position.
      window: positions that a token sees back; rows may then have any length. `sinks` and `window` slots of the capacity are
        taken, and the rest, plus one, is the most tokens that can be read at once.
      sinks: first tokens of each row that are seen from everywhere.
      fresh: see `KVCache`.
    """
    for name, value in (("batch", batch), ("capacity", capacity)):
        if not isinstance(value, int) or value < 1:
            raise GenerationError(f"{name}={value!r} must be a positive integer")
    if not jnp.issubdtype(dtype, jnp.floating) and dtype != jnp.int8:
        raise GenerationError(f"dtype={dtype!r} of the cache must be a floating-point type, that of the parameters, or int8")
    if window is not None or sinks:
        check_window(window, sinks, capacity)
    shape = (config.n_layers, batch, config.n_kv_heads, capacity, config.head_dim)

    def zeros() -> Buffer:
        if dtype == jnp.int8:
            return Quantized(jnp.zeros(shape, jnp.int8), jnp.zeros(shape[:-1], jnp.float32))
        return jnp.zeros(shape, dtype)

    return KVCache(zeros(), zeros(), jnp.zeros((batch,), jnp.int32), window, sinks, fresh)


def cache_bytes(config: LlamaConfig, batch: int, length: int, dtype: jax.typing.DTypeLike) -> int:
    """Bytes of the keys and values of `batch` rows of `length` tokens: 2 L B K S times H of `dtype`.

    For int8 there are 4 more bytes for the factor of each head and position.
    """
    rows = 2 * config.n_layers * batch * config.n_kv_heads * length
    dtype = jnp.dtype(dtype)
    return rows * (config.head_dim * dtype.itemsize + (4 if dtype == jnp.int8 else 0))


def grow(cache: KVCache, capacity: int) -> KVCache:
    """The same cache with room for `capacity` tokens in each row.

    Raises:
      GenerationError: `capacity` is below the present one, so that tokens could be lost; or the cache has a window, which
        needs no more room and is a ring that cannot be enlarged.
    """
    missing = capacity - cache.capacity
    if missing < 0:
        raise GenerationError(f"a cache of {cache.capacity} slots cannot shrink to capacity={capacity}")
    if cache.window is not None:
        raise GenerationError(f"a cache with window={cache.window} never needs to grow: its slots are reused")

    def extend(buffer: jax.Array) -> jax.Array:
        return jnp.pad(buffer, [(0, 0)] * (buffer.ndim - 2) + [(0, missing), (0, 0)])

    return over_buffers(extend, cache)


def is_quantized(cache: KVCache) -> bool:
    """Whether it is a cache of int8, whose keys are kept as `ops.smooth_keys` has them."""
    return isinstance(cache.k, Quantized)


def over_buffers(change: Callable[[jax.Array], jax.Array], cache: KVCache) -> KVCache:
    """The same cache with `change` of every buffer; for int8 also of the factors, as [..., S, 1]."""

    def of(buffer: Buffer) -> Buffer:
        return over_rows(change, buffer) if isinstance(buffer, Quantized) else change(buffer)

    k, v = jax.tree.map(of, (cache.k, cache.v), is_leaf=lambda x: isinstance(x, Quantized))
    return cache.replace(k=k, v=v)


def slots_of(cache: KVCache, new: int) -> jax.Array:
    """Where the next `new` tokens of each row are written: the slot of the first one, int32[B], or of each, int32[B, T]."""
    if cache.window is None:
        return cache.length
    slots = ring_slots(cache.length, new, cache.capacity, cache.sinks)
    return slots[:, 0] if new == 1 else slots


def key_positions(cache: KVCache, new: int) -> jax.Array | None:
    """int32[B, S], which position each slot holds once `new` tokens are written; None where slot s holds position s."""
    return None if cache.window is None else ring_positions(cache.length, new, cache.capacity, cache.sinks)


def write(buffer: Buffer, new: jax.Array, slots: jax.Array, layer: jax.Array) -> Buffer:
    """Put T new tokens of each row into a buffer of keys or values, in place where XLA owns the buffer.

    No gradient flows into the cache. Positions are not checked here (`forward` does if it can): XLA drops a single token
    without a slot, and shifts several that do not fit, or drops them.

    Args:
      buffer: [L, B, K, S, H].
      new: [B, K, T, H].
      slots: int32[B], the slot of each row's first new token; or int32[B, T], of each token.
      layer: int32[].
    """
    new = lax.stop_gradient(new)
    if isinstance(buffer, Quantized):
        short = quantize(new)
        return Quantized(_put(buffer.values, short.values, slots, layer), _put(buffer.scales, short.scales, slots, layer))
    return _put(buffer, new.astype(buffer.dtype), slots, layer)


@for_cpu(cpu.put)
def _put(buffer: jax.Array, new: jax.Array, slots: jax.Array, layer: jax.Array) -> jax.Array:
    """`write` of [B, K, T, ...] into [L, B, K, S, ...]."""
    layer = layer.astype(slots.dtype)
    zero, rest = jnp.zeros((), slots.dtype), (0,) * (new.ndim - 3)
    if slots.ndim == 1 and new.shape[0] == 1:  # one row needs no scatter
        return lax.dynamic_update_slice(buffer, new[None], (layer, zero, zero, slots[0], *(zero for _ in rest)))
    mesh, count = mesh_in_force(), new.shape[2]
    if count <= MOST_SCATTERED:
        # One scatter, of each row, head and token: of updates by whole rows a TPU makes a loop over the rows.
        slots = slots[:, None] + jnp.arange(count, dtype=slots.dtype)[None] if slots.ndim == 1 else slots
        plainly: Any = dict(unique_indices=True, indices_are_sorted=count == 1, mode="promise_in_bounds")
        if math.prod(mesh.values()) == 1:
            rows, heads = jnp.arange(new.shape[0])[:, None, None], jnp.arange(new.shape[1])[:, None]
            return buffer.at[layer, rows, heads, slots[:, None]].set(new, **plainly)

        # Over devices both axes are the scatter's own and no indices, so that devices with parts of them exchange nothing.
        # Of more than one head on a device a TPU would then want the heads first and copy the cache.
        def put_head(head: jax.Array, new: jax.Array, slots: jax.Array) -> jax.Array:  # [L, S, ...], [T, ...], [T]
            return head.at[layer, slots].set(new, **plainly)

        if new.shape[1] <= mesh.get("tensor", 1):
            if math.prod(mesh.values()) == mesh.get("tensor", 1):
                # Rows that are not divided are indices, in the order of the cache: a TPU wants it as it lies, and copies no
                # cache at the ends of a loop over tokens (8B over 8 chips, 8 rows: 134 MB for each run of the program).
                rows = jnp.arange(new.shape[0])[:, None]
                put_heads = lambda heads, new: heads.at[layer, rows, slots].set(new, **plainly)
                return jax.vmap(put_heads, (2, 1), 2)(buffer, new)
            return jax.vmap(jax.vmap(put_head, (1, 0, None), 1), (1, 0, 0), 1)(buffer, new, slots)

    def put_row(row: jax.Array, new: jax.Array, slots: jax.Array) -> jax.Array:  # [L, K, S, ...], [K, T, ...], [] or [T]
        if slots.ndim == 0:
            return lax.dynamic_update_slice(row, new[None], (layer, zero, slots, *(zero for _ in rest)))
        one_head = lambda row, new: row.at[layer, slots].set(new, unique_indices=True, mode="promise_in_bounds")
        return jax.vmap(one_head, in_axes=(1, 0), out_axes=1)(row, new)

    return jax.vmap(put_row, in_axes=(1, 0, 0), out_axes=1)(buffer, new, slots)


def bucket(length: int, smallest: int) -> int:
    """The next power of two: programs are compiled for a few sizes, not for every length."""
    return max(smallest, 1 << math.ceil(math.log2(max(length, 1))))
