"""The forward pass: one function for training, prefill, chunked prefill and decoding."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Integer

from llama_jax import ops
from llama_jax.config import LlamaConfig
from llama_jax.errors import ConfigError, MeshError
from llama_jax.model.cache import KVCache, gather_pages, init_cache, is_quantized
from llama_jax.model.checks import (
    call_part,
    check_arguments,
    check_exact,
    check_head,
    check_hooks,
    check_parts,
    check_parts_found,
)
from llama_jax.model.forward_options import Compute, Positions, Sharding
from llama_jax.model.hooks import HookCaller
from llama_jax.model.params import Block, Llama, is_matrix_in_block
from llama_jax.model.remat import rematerialize
from llama_jax.model.rope import token_frequencies
from llama_jax.ops import exact
from llama_jax.ops.attention import AttentionMask, HeadSharding, KVView, PagedView
from llama_jax.ops.attention.mask import visible
from llama_jax.ops.int8 import smooth_keys
from llama_jax.ops.platform import AnyArray, lowering_platform, tracing_context
from llama_jax.ops.weights.layers import scan_reads_in_place, split_for_scan


def forward(
    config: LlamaConfig,
    params: Llama,
    tokens: Integer[AnyArray, "B T"],
    cache: KVCache | None = None,
    *,
    positions: Positions = Positions(),
    compute: Compute = Compute(),
    sharding: Sharding = Sharding(),
) -> tuple[Float[Array, "B T D"], Any]:
    """Run the layers over `tokens` (Touvron et al. 2023, section 2.2) and return the normalized residual stream.

    Training, prefill, chunked prefill and decoding differ only in `cache` and T. Padding is on the right, after all tokens
    that valid ones attend to, so the causal mask excludes it.

    Args:
      tokens: ids in [0, V). Invalid ids (which `model.logits.logits` and `generate` reject) and positions beyond
        `config.max_seq_len` are not detected here. A ragged batch is int32[T, 1], all rows concatenated, with
        `positions.starts`.
      cache: the keys and values of earlier tokens; None starts at position 0 and keeps nothing. Passes with a cache are not
        differentiable.
      positions: the positions of the tokens; by default consecutive, after those in the cache.
      compute: dtype, rematerialization, attention.
      sharding: how the pass is sharded. `constrain` is called with "tokens" [B, T], before the embedding lookup, and with
        activations [B, T, D]: "embedded", after the lookup; "residual", between layers; "sublayer_input", the input of the
        first matmuls of attention and feed-forward; and "sublayer_output", the output of their last ones.

    Returns:
      The hidden states in the dtype of the computation, the input of `unembed`; and the cache with the new tokens, or None.

    Raises:
      ConfigError: the parameters do not match the configuration.
      GenerationError: the tokens are not int[B, T], or do not fit into the cache; positions have the wrong shape; packed
        rows with a cache. Under `jit`, only overflow of an empty cache is detected; callers must count tokens.
    """
    options = PassOptions(positions, compute, sharding)
    with sharding.context(), exact.exact_mode(compute.exact), tracing_context(params):
        if compute.exact:
            return _forward_exactly(config, params, jnp.asarray(tokens), cache, options)
        hidden, cache, _ = run_layers(config, params, tokens, cache, options)
    return hidden, cache


def _forward_exactly(
    config: LlamaConfig, params: Llama, tokens: jax.Array, cache: KVCache | None, options: PassOptions
) -> tuple[jax.Array, Any]:
    """`forward` in exact mode: all rows as one ragged batch, padded to whole blocks, with a cache even if none is passed."""
    (batch, length), positions = tokens.shape, options.positions
    check_exact(params, cache, positions, options.sharding)
    check_arguments(config, params, tokens, cache, positions)
    if cache is None:
        temporary = init_cache(config, batch, length, options.compute.dtype or params.embedding.dtype)
        if positions.rope_lengths is None:
            options = options._replace(positions=positions._replace(rope_lengths=jnp.full(batch, length, jnp.int32)))
        return _forward_exactly(config, params, tokens, temporary, options)[0], None
    starts, rope_lengths = positions.starts, positions.rope_lengths
    if starts is None:
        starts = jnp.arange(batch + 1, dtype=jnp.int32) * length
        if rope_lengths is not None and jnp.ndim(rope_lengths) == 1:
            rope_lengths = jnp.repeat(jnp.asarray(rope_lengths), length)
    padding = -tokens.size % exact.block_size()
    if rope_lengths is not None:
        rope_lengths = _to_column(jnp.asarray(rope_lengths), padding)
    options = options._replace(positions=Positions(starts=starts, rope_lengths=rope_lengths))
    hidden, new_cache, _ = run_layers(config, params, _to_column(tokens, padding), cache, options)
    if positions.lengths is not None:
        new_cache = new_cache.replace(length=cache.length + positions.lengths)
    return hidden[: tokens.size].reshape(batch, length, -1), new_cache


def _to_column(x: jax.Array, padding: int) -> jax.Array:
    """Flatten to [T, 1], the shape of a ragged batch, and append `padding` zeros."""
    return jnp.pad(x.reshape(-1, 1), ((0, padding), (0, 0)))


class PassOptions(NamedTuple):
    """The arguments of `forward` besides config, params, tokens and cache."""

    positions: Positions
    compute: Compute
    sharding: Sharding


CosSin: TypeAlias = tuple[jax.Array, jax.Array]


class _SharedInputs(NamedTuple):
    """Inputs that all layers share. A layer kind is an index into `LlamaConfig.layer_kinds`.

    Attributes:
      rope: for each layer kind, the cosines and sines of the tokens' positions, float32[B, 1, T, 1, H/2].
      masks: which keys each query attends to, for each distinct size of attention chunks; not used by paged attention.
      sink_rope: like `rope`, for the scores between queries and sink keys; None without sinks.
      query_scale: factor for the queries, float32[B, 1, T, 1, 1], or None.
      paged: the page table and lengths, without `pages` and `layer`, which every layer sets; None without a cache.
      position_ids: int32[B, T], for hooks; None without hooks.
    """

    rope: tuple[CosSin, ...]
    masks: tuple[AttentionMask, ...]
    sink_rope: tuple[CosSin, ...] | None = None
    query_scale: jax.Array | None = None
    paged: PagedView | None = None
    position_ids: jax.Array | None = None


def run_layers(
    config: LlamaConfig,
    params: Llama,
    tokens: Integer[AnyArray, "B T"],
    cache: KVCache | None,
    options: PassOptions,
) -> tuple[Float[Array, "B T D"], Any, dict[str, Any]]:
    """The result of `forward`, and the values that hooks keep, by point (`model.logits.observe`)."""
    positions, compute, sharding = options
    tokens = jnp.asarray(tokens)
    check_arguments(config, params, tokens, cache, positions)
    check_parts_found(config)
    check_parts(config, compute)
    check_hooks(config, params, cache, compute, sharding)
    kinds = config.layer_kinds
    kind_of_layer = [kinds.index(config.layer(i)) for i in range(config.n_layers)]
    chunk_sizes = _chunk_sizes(config, tokens, cache, positions)
    # Ragged rows share one page pool and are not sharded by rows; XLA shards the heads. For 8B on eight v5e, this has less
    # than 1.05 times the minimal HBM traffic; a kernel per device has 1.24 times.
    head_sharding = sharding.head_sharding if positions.starts is None else None
    attend_layer = _make_attend_layer(config, compute, sharding, cache, chunk_sizes, head_sharding)
    map_tokens = ops.map_all_tokens  # applies per-token operations to all tokens at once, or in exact mode block by block
    if compute.exact:
        map_tokens = partial(_map_blocks, jnp.asarray(positions.starts)[-1])
    shared = _shared_inputs(config, tokens, cache, positions, chunk_sizes, map_tokens, params.hooks is not None)
    call_outer_hooks = HookCaller(params.hooks, shared.position_ids)
    embedded = ops.embed(params.embedding, sharding.constrain(tokens, "tokens"))
    embedded = _scaled(embedded.astype(compute.dtype or params.embedding.dtype), config.embedding_multiplier)
    if compute.exact:
        embedded = jnp.where((jnp.arange(len(tokens)) < jnp.asarray(positions.starts)[-1])[:, None, None], embedded, 0)
    hidden = sharding.constrain(call_outer_hooks("embedded", sharding.constrain(embedded, "embedded")), "residual")

    def norm(x: jax.Array, weight: jax.Array | None, nan_on_overflow: bool = False) -> jax.Array:
        return x if weight is None else _norm(config, x, weight, nan_on_overflow=nan_on_overflow)

    def sublayer_output(x: jax.Array, bias: jax.Array | None, norm_weight: jax.Array | None) -> jax.Array:
        """The output of attention or feed-forward that is added to the residual stream."""
        x = ops.add_bias(sharding.constrain(x, "sublayer_output"), bias)
        return _scaled(norm(x, norm_weight, nan_on_overflow=True), config.residual_multiplier)

    def run_layer(
        block: Block, hidden: jax.Array, pages: Any, shared: _SharedInputs, layer: jax.Array, unrolled_layer: int | None
    ) -> Any:
        # The kind is an int if all layers have the same one or the layers are unrolled; else it is traced.
        static_layer = unrolled_layer if len(kinds) > 1 else 0
        kind = jnp.asarray(kind_of_layer)[layer] if static_layer is None else kind_of_layer[static_layer]
        call_hooks = HookCaller(params.hooks, shared.position_ids, layer)

        def attention_input(hidden: jax.Array) -> jax.Array:
            return sharding.constrain(norm(hidden, block.attention_norm), "sublayer_input")

        def split_heads(qkv: jax.Array, shared: _SharedInputs) -> _Heads:
            """Queries, keys and values, as they are cached."""
            heads = _split_heads(config, block, qkv, shared, kind)
            queries = call_hooks.at_queries("queries", heads.queries)
            keys, values = call_hooks.at_keys("keys", heads.keys), call_hooks.at_keys("values", heads.values)
            heads = heads._replace(queries=queries, keys=keys, values=values)
            return _smooth_for_int8(config, block, heads) if cache is not None and is_quantized(cache) else heads

        def feed_forward_input(hidden: jax.Array, attended: jax.Array) -> tuple[jax.Array, jax.Array]:
            added = sublayer_output(attended, block.attention.out_bias, block.attention_post_norm)
            residual = hidden + call_hooks("attention", added)
            residual = call_hooks("residual_between", residual)
            return residual, sharding.constrain(norm(residual, block.ffn_norm), "sublayer_input")

        def layer_output(residual: jax.Array, x: jax.Array) -> jax.Array:
            added = sublayer_output(x, block.feed_forward.down_bias, block.ffn_post_norm)
            residual = residual + call_hooks("feed_forward", added)
            return sharding.constrain(call_hooks("residual_after", residual), "residual")

        hidden = call_hooks("residual_before", hidden)
        qkv = ops.project(map_tokens(attention_input, hidden), block.attention.qkv)
        heads = map_tokens(split_heads, qkv, shared._replace(masks=(), paged=None))
        pages, view = _write_cache(pages, heads, shared, layer, head_sharding)
        attended = call_hooks.at_queries("heads", attend_layer(kind, heads, view, shared.masks, call_hooks))
        attended = attended.swapaxes(1, 2).reshape(*tokens.shape, -1)  # [B, T, N * H]
        residual, normed = map_tokens(feed_forward_input, hidden, ops.project(attended, block.attention.out))
        outputs = _feed_forward(config, block, normed, sharding, map_tokens, call_hooks)
        return map_tokens(layer_output, residual, outputs), pages, call_hooks.kept

    def layer_fn(unrolled_layer: int | None) -> Callable[..., Any]:
        run = partial(run_layer, unrolled_layer=unrolled_layer)
        return run if compute.remat == "none" else rematerialize(compute.remat, run, in_loop=not compute.unroll)

    carry: Any = hidden, None if cache is None else cache.pages
    unrolled = cache is not None and lowering_platform() == "gpu"
    is_read_in_place = lambda path, leaf: (
        unrolled or scan_reads_in_place(leaf, is_constant=cache is not None and is_matrix_in_block(path))
    )
    sliced, layer_params = split_for_scan(params.blocks, is_read_in_place)
    if unrolled:
        # XLA for GPUs copies the slices of a scan (118 MB per layer of 8B), but reads static slices in place.
        kept_per_layer = []
        for i in range(config.n_layers):
            *carry, kept = layer_fn(i)(layer_params([], i), *carry, shared, jnp.int32(i))
            kept_per_layer.append(kept)
        kept = jax.tree.map(lambda *arrays: jnp.stack(arrays), *kept_per_layer)
    else:
        scanned_layer = layer_fn(None)

        def scan_layer(carry: Any, slices_and_layer: Any) -> tuple[Any, Any]:
            slices, layer = slices_and_layer
            *carry, kept = scanned_layer(layer_params(slices, layer), *carry, shared, layer)
            return tuple(carry), kept

        # The cache is in the carry: as input and output of the scan, it would be copied at every call.
        carry, kept = lax.scan(scan_layer, carry, (sliced, jnp.arange(config.n_layers)), unroll=compute.unroll)
    hidden, pages = carry
    hidden = call_outer_hooks("final", map_tokens(partial(apply_final_norm, config, params), hidden))
    kept |= call_outer_hooks.kept
    if cache is None:
        return hidden, None, kept
    assert shared.paged is not None
    lengths = shared.paged.lengths if positions.lengths is None else cache.length + positions.lengths
    return hidden, cache.replace(pages=pages, length=lengths), kept


def _map_blocks(count: jax.Array, function: Callable[..., Any], *trees: Any) -> Any:
    """`function` of the first `count` tokens, block by block."""
    return exact.map_blocks(function, exact.block_size(matmuls=False), count, *trees)


def apply_final_norm(config: LlamaConfig, params: Llama, hidden: Float[Array, "*batch D"]) -> Float[Array, "*batch D"]:
    """The hidden states that `forward` returns, from the residual stream after the last layer."""
    # An overflow persists in the residual stream, so checking here covers the norms before sublayers; those after sublayers
    # check for themselves.
    hidden = _norm(config, hidden, params.final_norm, nan_on_overflow=True)
    # Scaled here instead of at the logits, so that `unembed` and the losses need not scale.
    return _scaled(hidden, 1 / config.logits_scaling)


def _norm(config: LlamaConfig, x: jax.Array, weight: AnyArray, *, nan_on_overflow: bool = False) -> jax.Array:
    """RMSNorm, or the model's custom norm."""
    if config.parts.norm is None:
        return ops.rms_norm(x, weight, config.norm_eps, config.norm_offset, nan_on_overflow=nan_on_overflow)
    if config.norm_offset:
        weight = jnp.asarray(weight).astype(jnp.promote_types(weight.dtype, jnp.float32)) + config.norm_offset
    return call_part("norm", config.parts.norm, x, weight, config.norm_eps)


def _scaled(x: jax.Array, factor: float) -> jax.Array:
    return x if factor == 1 else x * jnp.asarray(factor, x.dtype)


def _make_attend_layer(
    config: LlamaConfig,
    compute: Compute,
    sharding: Sharding,
    cache: KVCache | None,
    chunk_sizes: list[int | None],
    head_sharding: HeadSharding | None,
) -> Callable[[int | jax.Array, _Heads, KVView | PagedView, tuple[AttentionMask, ...], HookCaller], jax.Array]:
    """A function that computes the attention of a layer of a given kind: [B, K, T, G, H]."""
    custom_attention = config.parts.attend is not None or compute.attention != "auto"
    if sharding.attend is not None and custom_attention:
        raise MeshError("a mesh with `context` uses ring attention only; do not set attend or attention")
    attend = sharding.attend or partial(ops.attend, head_sharding=head_sharding)
    if config.parts.attend is not None:
        attend = partial(call_part, "attend", config.parts.attend)
    if custom_attention and cache is not None and cache.sinks:
        raise ConfigError("a cache with sinks supports only the built-in paged attention; do not set attend or attention")
    options: dict[str, Any] = {"scale": config.score_scale}
    if compute.attention != "auto":
        options["backend"] = compute.attention
    cache_window = None if cache is None else cache.window
    distinct_chunk_sizes = list(dict.fromkeys(chunk_sizes))
    # The window of each layer kind, and the index of its mask; there is one mask per size of attention chunks.
    variants = [
        (min((w for w in (layer.window, cache_window) if w is not None), default=None), distinct_chunk_sizes.index(chunk))
        for layer, chunk in zip(config.layer_kinds, chunk_sizes, strict=True)
    ]
    distinct_variants = list(dict.fromkeys(variants))

    def attend_variant(
        variant: tuple[int | None, int], heads: _Heads, view: KVView | PagedView, masks: tuple[AttentionMask, ...]
    ) -> jax.Array:
        window, mask = variant[0], masks[variant[1]]
        if not isinstance(view, PagedView) or cache is None:
            return attend(heads.queries, view, mask, window=window, **options)
        if custom_attention:
            dense = gather_pages(view, mask.query_positions.size, heads.queries.dtype)
            return attend(heads.queries, dense, mask, window=window, **options)
        sink_queries = None if heads.sink_queries is None else _flatten_tokens(heads.sink_queries)
        attended = ops.attend_paged(
            _flatten_tokens(heads.queries),
            view,
            scale=config.score_scale,
            window=window,
            chunk=distinct_chunk_sizes[variant[1]],
            sinks=cache.sinks,
            sink_queries=sink_queries,
            head_sharding=head_sharding,
        )
        return _unflatten_tokens(attended, len(heads.queries))

    def attend_layer(
        kind: int | jax.Array,
        heads: _Heads,
        view: KVView | PagedView,
        masks: tuple[AttentionMask, ...],
        call_hooks: HookCaller,
    ) -> jax.Array:
        if call_hooks.has("scores", "pattern"):
            if isinstance(view, PagedView):
                view = gather_pages(view, masks[0].query_positions.size, heads.queries.dtype)
            allowed = jnp.stack(jnp.broadcast_arrays(*(visible(masks[mask], window) for window, mask in variants)))
            return call_hooks.attend(heads.queries, view, allowed[kind], config.score_scale)
        if isinstance(kind, int):
            return attend_variant(variants[kind], heads, view, masks)
        # `lax.switch` inside the scan, so that only attention is compiled once per variant: the program's size depends on
        # neither the depth nor the period, and no remainder layers are unrolled.
        index = jnp.asarray([distinct_variants.index(variant) for variant in variants])[kind]
        return lax.switch(index, [partial(attend_variant, variant) for variant in distinct_variants], heads, view, masks)

    return attend_layer


def _chunk_sizes(config: LlamaConfig, tokens: jax.Array, cache: KVCache | None, positions: Positions) -> list[int | None]:
    """The size of the attention chunks of each layer kind; None if all positions are in the first chunk."""
    max_positions: int | None = tokens.shape[1]  # an upper bound, or None if unknown
    if cache is not None:
        max_positions = cache.capacity
    if positions.position_ids is not None:
        max_positions = None
    return [
        None if max_positions is not None and layer.chunk is not None and max_positions <= layer.chunk else layer.chunk
        for layer in config.layer_kinds
    ]


def _chunk_mask(config: LlamaConfig, mask: AttentionMask, chunk: int | None, positions: Positions) -> AttentionMask:
    """The mask of layers with attention chunks: each chunk of each document becomes a segment."""
    if chunk is None:
        return mask
    position_ids = mask.query_positions, mask.key_positions
    if positions.position_ids is not None:
        position_ids = positions.position_ids, positions.position_ids
    queries, keys = (x // chunk for x in position_ids)
    if mask.query_segments is not None:
        # Unique ids, from an upper bound on the chunks per document.
        max_chunks = -(-max(config.max_seq_len, mask.query_positions.shape[-1]) // chunk)
        queries, keys = mask.query_segments * max_chunks + queries, mask.key_segments * max_chunks + keys
    return mask.replace(query_segments=queries, key_segments=keys)


def _shared_inputs(
    config: LlamaConfig,
    tokens: jax.Array,
    cache: KVCache | None,
    positions: Positions,
    chunk_sizes: list[int | None],
    map_tokens: Callable[..., Any],
    has_hooks: bool,
) -> _SharedInputs:
    length = tokens.shape[1]
    # int32[B, T]: the index of each token in its row, counting the tokens in the cache.
    paged, cache_positions = None, jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32), tokens.shape)
    if cache is not None:
        paged = cache.view(length, positions.starts)
        cache_positions = jnp.maximum(paged.rows_and_positions(tokens.size)[1], 0).reshape(tokens.shape)
        if positions.starts is not None and positions.rope_lengths is None:
            positions = positions._replace(rope_lengths=cache_positions + 1)
    kinds = config.layer_kinds

    def rope(position_ids: jax.Array) -> tuple[CosSin, ...]:
        # Without `starts`, which has no axis of tokens to map over.
        return map_tokens(compute_rope, position_ids, cache_positions, positions._replace(starts=None))

    def compute_rope(position_ids: jax.Array, cache_positions: jax.Array, positions: Positions) -> tuple[CosSin, ...]:
        tables: dict[Any, CosSin] = {}
        for layer in kinds:
            key = layer.rope, layer.rope_theta
            if key not in tables:
                cos, sin = ops.rotary_table(
                    position_ids, *token_frequencies(config, cache_positions, positions, layer)
                )  # [B, T, H/2]
                tables[key] = cos[:, None, :, None], sin[:, None, :, None]
        return tuple(tables[layer.rope, layer.rope_theta] for layer in kinds)

    position_ids = cache_positions if positions.position_ids is None else positions.position_ids
    token_rope, scale = rope(position_ids), None
    if config.query_scaling is not None:
        scaling = config.query_scaling
        shifted = position_ids + scaling.offset if scaling.offset else position_ids
        scale = map_tokens(
            lambda shifted: 1 + scaling.beta * jnp.log1p((shifted // scaling.context).astype(jnp.float32)), shifted
        )
        scale = scale[:, None, :, None, None]

    def mask_per_chunk_size(mask: AttentionMask) -> tuple[AttentionMask, ...]:
        return tuple(_chunk_mask(config, mask, chunk, positions) for chunk in dict.fromkeys(chunk_sizes))

    hook_positions = position_ids if has_hooks else None
    if cache is None:
        masks = mask_per_chunk_size(AttentionMask.causal(length, positions.segment_ids))
        return _SharedInputs(token_rope, masks, query_scale=scale, position_ids=hook_positions)
    sink_rope = None
    if cache.sinks and cache.window is not None:
        # StreamingLLM rotates queries as if the sinks came directly before the window, so that no distance to a sink exceeds
        # sinks + window (Xiao et al. 2023, section 3.2).
        sink_rope = rope(jnp.minimum(cache_positions, cache.sinks + cache.window - 1))
    masks = mask_per_chunk_size(AttentionMask(cache_positions, jnp.arange(cache.capacity, dtype=jnp.int32)[None]))
    return _SharedInputs(token_rope, masks, sink_rope, scale, paged, hook_positions)


class _Heads(NamedTuple):
    """Queries, keys and values of the new tokens.

    Attributes:
      queries: [B, K, T, G, H].
      sink_queries: [B, K, T, G, H], queries rotated for the scores with the sinks, or None.
      keys, values: [B, K, T, H].
    """

    queries: jax.Array
    sink_queries: jax.Array | None
    keys: jax.Array
    values: jax.Array


def _split_heads(config: LlamaConfig, block: Block, qkv: jax.Array, shared: _SharedInputs, kind: int | jax.Array) -> _Heads:
    """Queries, keys and values from the projection [B, T, K, G + 2, H], with bias, norm and RoPE."""
    weights = block.attention
    qkv = ops.add_bias(qkv, weights.qkv_bias).swapaxes(1, 2)  # [B, K, T, G + 2, H]
    # `split`, not indexing: its gradient is one concatenation; gradients of slices would be zero-padded and added.
    groups = config.queries_per_kv_head
    pre_rope, values = jnp.split(qkv, [groups + 1], axis=-2)
    if weights.query_norm is not None and weights.key_norm is not None:
        queries, keys = jnp.split(pre_rope, [groups], axis=-2)
        queries, keys = (_norm_heads(config, x, w) for x, w in ((queries, weights.query_norm), (keys, weights.key_norm)))
        pre_rope = jnp.concatenate([queries, keys], axis=-2)
    queries, keys = jnp.split(_rotate(config, pre_rope, shared.rope, kind), [groups], axis=-2)
    sink_queries = None
    if shared.sink_rope is not None:
        sink_queries = _rotate(config, pre_rope[..., :groups, :], shared.sink_rope, kind)
    if (scale := _query_scale(config, shared, kind)) is not None:
        queries = (queries * scale).astype(queries.dtype)
        sink_queries = None if sink_queries is None else (sink_queries * scale).astype(queries.dtype)
    return _Heads(queries, sink_queries, keys.squeeze(-2), values.squeeze(-2))


def _norm_heads(config: LlamaConfig, x: jax.Array, weight: jax.Array) -> jax.Array:
    """RMSNorm of [B, K, T, G, H]: over each head for a weight [H], over all heads of a token for a weight [K, G, H]."""
    if weight.ndim == 1:
        return _norm(config, x, weight, nan_on_overflow=True)
    tokens = x.swapaxes(1, 2)  # [B, T, K, G, H]
    flat = tokens.reshape(*tokens.shape[:2], -1)
    return _norm(config, flat, weight.reshape(-1), nan_on_overflow=True).reshape(tokens.shape).swapaxes(1, 2)


def _rotate(config: LlamaConfig, x: jax.Array, rope: tuple[CosSin, ...], kind: int | jax.Array) -> jax.Array:
    """Apply the RoPE of a layer kind to [..., H]. If the kind is traced, layers without RoPE rotate by angles of zero."""
    if isinstance(kind, int):
        if config.layer_kinds[kind].rope == "none":
            return x
        cos, sin = rope[kind]
    else:
        cos, sin = (jnp.stack(tables)[kind] for tables in zip(*rope, strict=True))
    pairs, rest = (x, None) if config.rotary_dim is None else jnp.split(x, [config.rotary_dim], axis=-1)
    if config.parts.rotary is None:
        rotated = ops.apply_rotary(pairs, cos, sin)
    else:
        rotated = call_part("rotary", config.parts.rotary, pairs, cos, sin)
        if not isinstance(kind, int) and any(layer.rope == "none" for layer in config.layer_kinds):
            rotated = jnp.where(_has_rope(config)[kind], rotated, pairs)
    rotated = rotated if rest is None else jnp.concatenate([rotated, rest], axis=-1)
    if config.qk_norm != "l2":
        return rotated
    normed = ops.rms_norm(rotated, jnp.ones(config.head_dim), config.norm_eps)
    return normed if isinstance(kind, int) else jnp.where(_has_rope(config)[kind], normed, rotated)


def _smooth_for_int8(config: LlamaConfig, block: Block, heads: _Heads) -> _Heads:
    """Queries and keys for an int8 cache, with the same scores, see `ops.int8.smooth_keys`."""
    bias, sink_queries = None, () if heads.sink_queries is None else (heads.sink_queries,)
    if block.attention.qkv_bias is not None and block.attention.key_norm is None:
        bias = block.attention.qkv_bias[:, -2]
    keys, *queries = smooth_keys(heads.keys, heads.queries, *sink_queries, bias=bias, rotary_dim=config.rope_dim)
    return _Heads(queries[0], queries[1] if sink_queries else None, keys, heads.values)


def _query_scale(config: LlamaConfig, shared: _SharedInputs, kind: int | jax.Array) -> jax.Array | None:
    """The query scale of a layer kind, or None."""
    if config.query_scaling is None or shared.query_scale is None or config.query_scaling.rotated:
        return shared.query_scale
    if isinstance(kind, int):
        return shared.query_scale if config.layer_kinds[kind].rope == "none" else None
    return jnp.where(_has_rope(config)[kind], 1, shared.query_scale)


def _has_rope(config: LlamaConfig) -> jax.Array:
    """bool[number of layer kinds]: whether layers of a kind have RoPE."""
    return jnp.asarray([layer.rope != "none" for layer in config.layer_kinds])


def _write_cache(
    pages: Any, heads: _Heads, shared: _SharedInputs, layer: jax.Array, head_sharding: HeadSharding | None
) -> tuple[Any, KVView | PagedView]:
    """Write the new keys and values. Returns the pages, and all keys and values to which the layer's queries may attend."""
    if shared.paged is None:
        return None, KVView(heads.keys, heads.values)
    view = shared.paged.replace(layer=layer.astype(jnp.int32))
    pages = ops.write_paged(pages, _flatten_tokens(heads.keys), _flatten_tokens(heads.values), view, head_sharding)
    return pages, view.replace(pages=pages)


def _flatten_tokens(x: jax.Array) -> jax.Array:
    """Reshape [B, K, T, ...] to [B * T, K, ...]."""
    return x.swapaxes(1, 2).reshape(-1, x.shape[1], *x.shape[3:])


def _unflatten_tokens(x: jax.Array, batch: int) -> jax.Array:
    """Reshape [B * T, K, ...] to [B, K, T, ...]."""
    return x.reshape(batch, -1, *x.shape[1:]).swapaxes(1, 2)


def _feed_forward(
    config: LlamaConfig,
    block: Block,
    normed: jax.Array,
    sharding: Sharding,
    map_tokens: Callable[..., Any],
    call_hooks: HookCaller,
) -> jax.Array:
    """Dense or mixture-of-experts feed-forward, without the bias of its last matmul."""
    weights = block.feed_forward
    matrices, biases = (weights.gate, weights.up, weights.down), (weights.gate_bias, weights.up_bias)
    if config.parts.feed_forward is not None:
        return call_part("feed_forward", config.parts.feed_forward, normed, *matrices)
    if call_hooks.has("neurons"):
        gate, up = (ops.add_bias(ops.project(normed, matrix), bias) for matrix, bias in zip(matrices, biases, strict=False))
        neurons = call_hooks("neurons", ops.gated_activation(gate, up, config.activation))
        return ops.project(neurons, weights.down)
    if weights.router is None:
        return ops.feed_forward(normed, *matrices, config.activation, map_tokens, biases)
    from llama_jax.ops.moe import Routing, mixture_of_experts

    routing = Routing(config.experts_per_token, config.normalize_expert_weights, config.expert_scores == "sigmoid")
    routed = mixture_of_experts(normed, weights.router, *matrices, routing=routing, sharding=sharding.experts)
    if weights.shared_gate is None:
        return routed
    return routed + ops.feed_forward(normed, weights.shared_gate, weights.shared_up, weights.shared_down)


def unembed(config: LlamaConfig, params: Llama, hidden: Float[Array, "*batch D"]) -> Float[Array, "*batch V"]:
    """Logits, in float32 at least, of the hidden states from `forward`.

    Separate from `forward`, so that a prefill computes the logits of only one position per row.

    If the output projection has padding rows for even sharding (`parallel.padding`), their logits are -inf.
    """
    return unembed_with_hooks(HookCaller(params.hooks), config, params, hidden)


def unembed_with_hooks(
    call_hooks: HookCaller, config: LlamaConfig, params: Llama, hidden: Float[Array, "*batch D"]
) -> Float[Array, "*batch V"]:
    """`unembed` with hooks called by `call_hooks`, which collects the values that hooks keep."""
    wide = jnp.promote_types(hidden.dtype, jnp.float32)
    head = lm_head_of(config, params)
    logits = ops.project(hidden, head, out_dtype=wide)
    padding = head.shape[0] - config.vocab_size
    if call_hooks.has("logits"):
        logits = call_hooks("logits", logits[..., : config.vocab_size])
        return jnp.pad(logits, [(0, 0)] * (logits.ndim - 1) + [(0, padding)], constant_values=-jnp.inf)
    if padding:
        logits = jnp.where(jnp.arange(head.shape[0]) < config.vocab_size, logits, -jnp.inf)
    return logits


def lm_head_of(config: LlamaConfig, params: Llama) -> jax.Array:
    """The output projection [V, D], which is the embedding if the two are tied.

    Raises:
      ConfigError: `lm_head` is missing, or present although the embeddings are tied.
    """
    check_head(config, params)
    return params.embedding if params.lm_head is None else params.lm_head


def lm_head_for_loss(config: LlamaConfig, params: Llama) -> jax.Array:
    """`lm_head_of`, for losses that compute logits in chunks.

    Raises:
      ConfigError: hooks at "logits", which would not be called.
    """
    if "logits" in (params.hooks or ()):
        raise ConfigError("this loss computes logits in chunks, without hooks at logits; compute it from llama_jax.logits")
    return lm_head_of(config, params)
