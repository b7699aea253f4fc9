"""How a pass keeps keys and values, and what its queries attend to: the new tokens only, or the pages of a cache."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from llama_jax.config import LlamaConfig
from llama_jax.model.cache import KVCache, flatten_tokens, gather_pages, is_quantized, mask_of_pages, unflatten_tokens
from llama_jax.model.forward_options import Positions
from llama_jax.model.layer import LayerContext
from llama_jax.model.params import Attention
from llama_jax.ops.attention import AttentionMask, KVView, PagedView
from llama_jax.ops.attention.mask import visible

Variant = TypeVar("Variant")


@dataclass(frozen=True)
class NewTokens:
    """Without a cache, queries attend to the new tokens.

    Attributes:
      variants: for each layer type the window, or None, and the index of its mask.
      masks: one for each size of attention chunks.
    """

    variants: tuple[tuple[int | None, int], ...]
    masks: tuple[AttentionMask, ...]

    def attend(
        self,
        ctx: LayerContext,
        weights: Attention,
        queries: Float[Array, "B K T G H"],
        keys: Float[Array, "B K T H"],
        values: Float[Array, "B K T H"],
        pages: None,
    ) -> tuple[Float[Array, "B K T G H"], None]:
        """What the queries attend to."""
        view = KVView(keys, values)
        if ctx.hooks.has("scores", "pattern"):
            masks = [(self.masks[index], window) for window, index in self.variants]
            return attend_with_hooks(ctx, queries, view, masks), None
        return switch_layer_type(ctx, self.variants, partial(self._attend_variant, ctx, queries, view)), None

    def _attend_variant(
        self, ctx: LayerContext, queries: jax.Array, view: KVView, variant: tuple[int | None, int]
    ) -> jax.Array:
        window, index = variant
        return ctx.ops.attend(queries, view, self.masks[index], scale=ctx.config.score_scale, window=window)


@dataclass(frozen=True)
class Pages:
    """With a cache, new keys and values are written to their pages, and queries attend to all tokens of their rows.

    Attributes:
      variants: for each layer type the window and the size of attention chunks, or None.
      view: the page table and lengths, without `pages` and `layer`, which every layer sets.
      quantized: whether the pages are int8.
      sinks: see `CacheOptions`.
      sink_rotation: cosines and sines by which queries are rotated again for their scores with the sinks, or None. They are
        then rotated as if the sinks came directly before the window, so that no distance to a sink exceeds sinks + window
        (StreamingLLM: Xiao et al. 2023, section 3.2). For each layer type, float32[types, B, 1, T, 1, H/2].
    """

    variants: tuple[tuple[int | None, int | None], ...]
    view: PagedView
    quantized: bool
    sinks: int
    sink_rotation: tuple[jax.Array, jax.Array] | None

    def attend(
        self,
        ctx: LayerContext,
        weights: Attention,
        queries: Float[Array, "B K T G H"],
        keys: Float[Array, "B K T H"],
        values: Float[Array, "B K T H"],
        pages: Any,
    ) -> tuple[Float[Array, "B K T G H"], Any]:
        """What the queries attend to, and the pages with the new keys and values."""
        sink_queries = None
        if self.sink_rotation is not None:
            sink_queries = ctx.ops.rotary(queries, *(table[ctx.layer_type] for table in self.sink_rotation))
        if self.quantized:
            keys, queries, sink_queries = smooth_for_int8(ctx, weights, keys, queries, sink_queries)
        view = self.view.replace(layer=jnp.asarray(ctx.layer, jnp.int32))
        pages = ctx.ops.write_pages(pages, flatten_tokens(keys), flatten_tokens(values), view)
        view = view.replace(pages=pages)
        if ctx.hooks.has("scores", "pattern"):
            shape = len(queries), queries.shape[2]
            masks = [(mask_of_pages(view, shape, chunk), window) for window, chunk in self.variants]
            return attend_with_hooks(ctx, queries, gather_pages(view, math.prod(shape), queries.dtype), masks), pages
        flat = flatten_tokens(queries), None if sink_queries is None else flatten_tokens(sink_queries)
        heads = switch_layer_type(ctx, self.variants, partial(self._attend_variant, ctx, view, *flat))
        return unflatten_tokens(heads, len(queries)), pages

    def _attend_variant(
        self,
        ctx: LayerContext,
        view: PagedView,
        queries: jax.Array,
        sink_queries: jax.Array | None,
        variant: tuple[int | None, int | None],
    ) -> jax.Array:
        window, chunk = variant
        options = {"scale": ctx.config.score_scale, "window": window, "chunk": chunk}
        return ctx.ops.attend_paged(queries, view, sinks=self.sinks, sink_queries=sink_queries, **options)


def attention_to_new_tokens(config: LlamaConfig, length: int, positions: Positions) -> NewTokens:
    """Attention among the T tokens of each row."""
    # An upper bound of the positions is known where they are consecutive.
    sizes = chunk_sizes(config, length if positions.position_ids is None else None)
    distinct = list(dict.fromkeys(sizes))
    causal = AttentionMask.causal(length, positions.segment_ids)
    masks = tuple(mask_chunks(config, causal, size, positions.position_ids) for size in distinct)
    windows = [layer_type.window for layer_type in config.layer_kinds]
    return NewTokens(tuple(zip(windows, map(distinct.index, sizes), strict=True)), masks)


def attention_to_pages(
    config: LlamaConfig, cache: KVCache, view: PagedView, sink_rotation: tuple[jax.Array, jax.Array] | None
) -> Pages:
    """Attention to the tokens of a cache.

    Args:
      sink_rotation: see `Pages`.
    """
    windows = [
        min((w for w in (layer_type.window, cache.window) if w is not None), default=None)
        for layer_type in config.layer_kinds
    ]
    variants = tuple(zip(windows, chunk_sizes(config, cache.capacity), strict=True))
    return Pages(variants, view, is_quantized(cache), cache.sinks, sink_rotation)


def chunk_sizes(config: LlamaConfig, max_positions: int | None) -> list[int | None]:
    """The size of the attention chunks of each layer type; None if all of at most `max_positions` are in the first one."""
    sizes = [layer_type.chunk for layer_type in config.layer_kinds]
    return [None if size is None or (max_positions or size + 1) <= size else size for size in sizes]


def mask_chunks(config: LlamaConfig, mask: AttentionMask, size: int | None, position_ids: Any) -> AttentionMask:
    """The mask of layers with attention chunks: each chunk of each document becomes a segment."""
    if size is None:
        return mask
    positions = (position_ids,) * 2 if position_ids is not None else (mask.query_positions, mask.key_positions)
    queries, keys = (x // size for x in positions)
    if mask.query_segments is not None:
        # Unique ids, from an upper bound on the chunks per document.
        max_chunks = -(-max(config.max_seq_len, mask.query_positions.shape[-1]) // size)
        queries, keys = mask.query_segments * max_chunks + queries, mask.key_segments * max_chunks + keys
    return mask.replace(query_segments=queries, key_segments=keys)


def attend_with_hooks(
    ctx: LayerContext, queries: jax.Array, view: KVView, masks: Sequence[tuple[AttentionMask, int | None]]
) -> jax.Array:
    """Attention without kernels, with hooks at its scores and weights.

    Args:
      masks: mask and window of each layer type.
    """
    allowed = jnp.stack(jnp.broadcast_arrays(*(visible(mask, window) for mask, window in masks)))
    return ctx.hooks.attend(queries, view, allowed[ctx.layer_type], ctx.config.score_scale)


def switch_layer_type(ctx: LayerContext, variants: tuple[Variant, ...], attend: Callable[[Variant], jax.Array]) -> jax.Array:
    """`attend(variants[layer_type])`. In a scan over layers, only this is compiled once for each distinct variant: the
    program's size depends neither on the number of layers nor on the period of their types.
    """
    distinct = list(dict.fromkeys(variants))
    if len(distinct) == 1:
        return attend(distinct[0])
    if isinstance(ctx.layer_type, int):
        return attend(variants[ctx.layer_type])
    branch = jnp.asarray([distinct.index(variant) for variant in variants])[ctx.layer_type]
    return lax.switch(branch, [partial(attend, variant) for variant in distinct])


def smooth_for_int8(
    ctx: LayerContext, weights: Attention, keys: jax.Array, queries: jax.Array, sink_queries: jax.Array | None
) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    """Keys and queries for int8 pages, with the same scores, see `ops.int8.smooth_keys`."""
    # A norm after the bias would make it useless.
    bias = None if weights.qkv_bias is None or weights.key_norm is not None else weights.qkv_bias[:, -2]
    all_queries = (queries,) if sink_queries is None else (queries, sink_queries)
    keys, queries, *rest = ctx.ops.smooth_keys(keys, *all_queries, bias=bias, rotary_dim=ctx.config.rope_dim)
    return keys, queries, rest[0] if rest else None
