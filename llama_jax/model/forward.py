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
from llama_jax.model.checks import check_arguments, check_attend, check_exact, check_head, checked_attention
from llama_jax.model.forward_options import Compute, Positions, Sharding, identity
from llama_jax.model.hooks import HookCaller
from llama_jax.model.params import Block, Llama, is_matrix_in_block
from llama_jax.model.remat import rematerialize
from llama_jax.model.rope import scaled_frequencies
from llama_jax.ops import exact
from llama_jax.ops.attention import AttentionMask, HeadSharding, KVView, PagedView
from llama_jax.ops.attention.mask import visible
from llama_jax.ops.int8 import smooth_keys
from llama_jax.ops.platform import AnyArray, lowering_platform, tracing_context
from llama_jax.ops.weights.layers import split_stacked, stays_stacked


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

    Training, prefill, chunked prefill and decoding differ only in `cache` and T. Padding is on the right: a
    padding token comes after every token that a real one attends to, so no mask is needed.

    Args:
      tokens: ids in [0, V). Ids outside are not checked here (`model.logits.logits` and `generate` do), nor are positions
        beyond `config.max_seq_len`. For ragged batches int32[T, 1], all rows concatenated; `positions.starts` gives each
        row's range.
      cache: the keys and values of earlier tokens; None starts at position 0 and keeps nothing. Passes with a cache are not
        differentiable.
      positions: the positions of the tokens, unless they are consecutive, after those in the cache.
      compute: dtype, rematerialization, attention.
      sharding: over which devices. `constrain` is called with "tokens" [B, T], before the lookup; and with activations
        [B, T, D]: "embedded", after the lookup, "residual", the stream between layers, "sublayer_input", the
        input of the first matmuls of attention and feed-forward, and "sublayer_output", the output of their last ones.

    Returns:
      The hidden states in the dtype of the computation, the input of `unembed`; and the cache with the new tokens, or None.

    Raises:
      ConfigError: the parameters do not match the configuration.
      GenerationError: the tokens are not int[B, T], or do not fit into the cache; positions of another shape, or packed rows
        together with a cache. Under `jit` only overflow of an empty cache is detected; callers must count tokens.
    """
    options = PassOptions(positions, compute, sharding)
    with sharding.context(), exact.exactly(compute.exact), tracing_context(params):
        if compute.exact:
            return _forward_exactly(config, params, jnp.asarray(tokens), cache, options)
        hidden, cache, _ = run_layers(config, params, tokens, cache, options)
    return hidden, cache


def _forward_exactly(
    config: LlamaConfig, params: Llama, tokens: jax.Array, cache: KVCache | None, options: PassOptions
) -> tuple[jax.Array, Any]:
    """`forward` with the tokens of all rows one after the other, as a ragged batch, in whole blocks; without a cache in one
    that is forgotten."""
    (rows, each), positions = tokens.shape, options.positions
    check_exact(params, cache, positions, options.sharding)
    check_arguments(config, params, tokens, cache, positions)
    if cache is None:
        kept = init_cache(config, rows, each, options.compute.dtype or params.embedding.dtype)
        if positions.rope_lengths is None:
            options = options._replace(positions=positions._replace(rope_lengths=jnp.full(rows, each, jnp.int32)))
        return _forward_exactly(config, params, tokens, kept, options)[0], None
    starts, lengths = positions.starts, positions.rope_lengths
    if starts is None:
        starts = jnp.arange(rows + 1, dtype=jnp.int32) * each
        if lengths is not None and jnp.ndim(lengths) == 1:
            lengths = jnp.repeat(jnp.asarray(lengths), each)
    missing = -tokens.size % exact.block_size()
    flat = Positions(starts=starts, rope_lengths=None if lengths is None else _in_column(jnp.asarray(lengths), missing))
    hidden, filled, _ = run_layers(config, params, _in_column(tokens, missing), cache, options._replace(positions=flat))
    if positions.lengths is not None:
        filled = filled.replace(length=cache.length + positions.lengths)
    return hidden[: tokens.size].reshape(rows, each, -1), filled


def _in_column(x: jax.Array, missing: int) -> jax.Array:
    """All entries as [T, 1], and so many zeros."""
    return jnp.pad(x.reshape(-1, 1), ((0, missing), (0, 0)))


class PassOptions(NamedTuple):
    """The arguments of `forward` besides config, params, tokens and cache."""

    positions: Positions
    compute: Compute
    sharding: Sharding


CosSin: TypeAlias = tuple[jax.Array, jax.Array]


class _SharedInputs(NamedTuple):
    """Inputs of a pass that all layers share.

    Attributes:
      rope: cosine and sine of the new tokens' positions, float32[B, 1, T, 1, H/2], for each layer kind.
      masks: which keys each query attends to, for each distinct one of `_chunks`.
      sink_rope: as `rope`, rotations used for scores between queries and sink keys; None without sinks.
      query_scale: the factor of queries, float32[B, 1, T, 1, 1], or None.
      paged: the page view; `pages` and `layer` are filled in per layer; None without a cache.
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
    """Hidden states, the cache, and what hooks kept, see `model.logits.observe`."""
    positions, compute, sharding = options
    tokens = jnp.asarray(tokens)
    check_arguments(config, params, tokens, cache, positions)
    kinds = config.layer_kinds
    kind_of = [kinds.index(config.layer(i)) for i in range(config.n_layers)]
    chunks = _chunks(config, tokens, cache, positions)
    # Ragged rows share one page pool and are not sharded by rows; XLA shards the heads. 8B on eight v5e: less than 1.05
    # times the minimal HBM traffic, 1.24 with a kernel per device.
    head_sharding = sharding.head_sharding if positions.starts is None else None
    attend_layer = _layer_attention(config, compute, sharding, cache, chunks, head_sharding)
    by_token = ops.call  # what is computed for each token by itself; exact passes do so by blocks
    if compute.exact:
        by_token = partial(_by_blocks, jnp.asarray(positions.starts)[-1])
    shared = _shared_inputs(config, tokens, cache, positions, chunks, by_token, params.hooks is not None)
    call_hooks = HookCaller(params.hooks, shared.position_ids)
    embedded = ops.embed(params.embedding, sharding.constrain(tokens, "tokens"))
    embedded = _times(embedded.astype(compute.dtype or params.embedding.dtype), config.embedding_multiplier)
    if compute.exact:
        embedded = jnp.where((jnp.arange(len(tokens)) < jnp.asarray(positions.starts)[-1])[:, None, None], embedded, 0)
    hidden = sharding.constrain(call_hooks("embedded", sharding.constrain(embedded, "embedded")), "residual")

    def norm(x: jax.Array, weight: jax.Array | None, checked: bool = False) -> jax.Array:
        return x if weight is None else ops.rms_norm(x, weight, config.norm_eps, config.norm_offset, checked=checked)

    def sublayer_output(x: jax.Array, weight: jax.Array | None) -> jax.Array:
        """The output of attention or feed-forward, as it is added to the residual stream."""
        return _times(norm(sharding.constrain(x, "sublayer_output"), weight, checked=True), config.residual_multiplier)

    def run_layer(
        block: Block, hidden: jax.Array, pages: Any, shared: _SharedInputs, index: jax.Array, layer: int | None = None
    ) -> Any:
        # In a scan over differing layers the kind is a traced index.
        static_index = layer if len(kinds) > 1 else 0
        kind = jnp.asarray(kind_of)[index] if static_index is None else kind_of[static_index]
        call_hooks = HookCaller(params.hooks, shared.position_ids, index)

        def attention_input(hidden: jax.Array) -> jax.Array:
            return sharding.constrain(norm(hidden, block.attention_norm), "sublayer_input")

        def heads_of(qkv: jax.Array, shared: _SharedInputs) -> _Heads:
            """The heads of each token as they are cached."""
            heads = _call_hooks_of_heads(config, call_hooks, _heads_of(config, block, qkv, shared, kind))
            return _smooth_for_int8(config, block, heads) if cache is not None and is_quantized(cache) else heads

        def feed_forward_input(hidden: jax.Array, attended: jax.Array) -> tuple[jax.Array, jax.Array]:
            residual = hidden + call_hooks("attention", sublayer_output(attended, block.attention_post_norm))
            residual = call_hooks("residual_between", residual)
            return residual, sharding.constrain(norm(residual, block.ffn_norm), "sublayer_input")

        def layer_output(residual: jax.Array, x: jax.Array) -> jax.Array:
            added = call_hooks("feed_forward", sublayer_output(x, block.ffn_post_norm))
            return sharding.constrain(call_hooks("residual_after", residual + added), "residual")

        hidden = call_hooks("residual_before", hidden)
        qkv = ops.project(by_token(attention_input, hidden), block.attention.qkv)
        heads = by_token(heads_of, qkv, shared._replace(masks=(), paged=None))
        pages, view = _write_cache(pages, heads, shared, index, head_sharding)
        attended = attend_layer(kind, heads, view, shared.masks, call_hooks)
        attended = call_hooks("heads", attended, _flat_heads, partial(_grouped_heads, config))
        attended = attended.swapaxes(1, 2).reshape(*tokens.shape, -1)  # [B, T, N * H]
        residual, normed = by_token(feed_forward_input, hidden, ops.project(attended, block.attention.out))
        residual = by_token(layer_output, residual, _feed_forward(config, block, normed, sharding, by_token, call_hooks))
        return residual, pages, call_hooks.kept

    def layer_fn(layer: int | None) -> Callable[..., Any]:
        run = partial(run_layer, layer=layer)
        return run if compute.remat == "none" else rematerialize(compute.remat, run)

    carry: Any = hidden, None if cache is None else cache.pages
    unrolled = cache is not None and lowering_platform() == "gpu"
    reads_in_place = lambda path, leaf: (
        unrolled or stays_stacked(leaf, is_constant=cache is not None and is_matrix_in_block(path))
    )
    sliced, layer_of = split_stacked(params.blocks, reads_in_place)
    if unrolled:
        # XLA for GPUs copies the slices of a scan (118 MB per layer of 8B), but reads static slices in place.
        each = []
        for i in range(config.n_layers):
            *carry, kept = layer_fn(i)(layer_of([], i), *carry, shared, jnp.int32(i))
            each.append(kept)
        kept = jax.tree.map(lambda *arrays: jnp.stack(arrays), *each)
    else:
        scanned_layer = layer_fn(None)

        def scan_layer(carry: Any, layer: Any) -> tuple[Any, Any]:
            *carry, kept = scanned_layer(layer_of(*layer), *carry, shared, layer[1])
            return tuple(carry), kept

        # The cache is in the carry: as input and output of the scan it would be copied whole at every call.
        carry, kept = lax.scan(scan_layer, carry, (sliced, jnp.arange(config.n_layers)))
    hidden, pages = carry
    hidden = call_hooks("final", by_token(partial(apply_final_norm, config, params), hidden))
    kept |= call_hooks.kept
    if cache is None:
        return hidden, None, kept
    assert shared.paged is not None
    lengths = shared.paged.lengths if positions.lengths is None else cache.length + positions.lengths
    return hidden, cache.replace(pages=pages, length=lengths), kept


def _by_blocks(count: jax.Array, function: Callable[..., Any], *trees: Any) -> Any:
    return exact.by_blocks(function, exact.block_size(matmuls=False), count, *trees)


def apply_final_norm(config: LlamaConfig, params: Llama, hidden: Float[Array, "*batch D"]) -> Float[Array, "*batch D"]:
    """The result of `forward`, from the residual stream after the last layer."""
    # An overflow persists in the residual stream, so checking here suffices for pre-norm inputs; norms of sublayer outputs
    # check themselves.
    hidden = ops.rms_norm(hidden, params.final_norm, config.norm_eps, config.norm_offset, checked=True)
    # Scaled here, not on the logits, so that neither `unembed` nor the loss needs to know of it.
    return _times(hidden, 1 / config.logits_scaling)


def _times(x: jax.Array, factor: float) -> jax.Array:
    return x if factor == 1 else x * jnp.asarray(factor, x.dtype)


def _layer_attention(
    config: LlamaConfig,
    compute: Compute,
    sharding: Sharding,
    cache: KVCache | None,
    chunks: list[int | None],
    head_sharding: HeadSharding | None,
) -> Callable[[int | jax.Array, _Heads, KVView | PagedView, tuple[AttentionMask, ...], HookCaller], jax.Array]:
    """The attention function of a layer, given its kind; its result is [B, K, T, G, H]."""
    own_attention = compute.attend is not None or compute.attention != "auto"
    if sharding.reorder_batch is not identity and own_attention:
        raise MeshError("a mesh with `context` uses ring attention only; do not set attend or attention")
    check_attend(config, compute)
    attend = sharding.attend or partial(ops.attend, head_sharding=head_sharding)
    if compute.attend is not None:
        attend = checked_attention(compute.attend)
    if own_attention and cache is not None and cache.sinks:
        raise ConfigError("a cache with sinks supports only the built-in paged attention; do not set attend or attention")
    options: dict[str, Any] = {"scale": config.score_scale}
    if compute.attention != "auto":
        options["backend"] = compute.attention
    cache_window = None if cache is None else cache.window
    distinct_chunks = list(dict.fromkeys(chunks))
    # Per layer kind: (window, index into distinct_chunks).
    limits = [
        (min((w for w in (layer.window, cache_window) if w is not None), default=None), distinct_chunks.index(chunk))
        for layer, chunk in zip(config.layer_kinds, chunks, strict=True)
    ]
    distinct_limits = list(dict.fromkeys(limits))

    def attend_within(
        limit: tuple[int | None, int], heads: _Heads, view: KVView | PagedView, masks: tuple[AttentionMask, ...]
    ) -> jax.Array:
        window, mask = limit[0], masks[limit[1]]
        if not isinstance(view, PagedView) or cache is None:
            return attend(heads.queries, view, mask, window=window, **options)
        if own_attention:
            dense = gather_pages(view, mask.query_positions.size, heads.queries.dtype)
            return attend(heads.queries, dense, mask, window=window, **options)
        sink_queries = None if heads.sink_queries is None else _by_token(heads.sink_queries)
        attended = ops.attend_paged(
            _by_token(heads.queries),
            view,
            scale=config.score_scale,
            window=window,
            chunk=distinct_chunks[limit[1]],
            sinks=cache.sinks,
            sink_queries=sink_queries,
            head_sharding=head_sharding,
        )
        return _by_row(attended, len(heads.queries))

    def attend_layer(
        kind: int | jax.Array,
        heads: _Heads,
        view: KVView | PagedView,
        masks: tuple[AttentionMask, ...],
        call_hooks: HookCaller,
    ) -> jax.Array:
        if call_hooks.has("scores", "pattern"):
            if own_attention or sharding.attend is not None or (cache is not None and cache.sinks):
                raise ConfigError("hooks at scores and pattern have plain attention; set no attention, no context, no sinks")
            if isinstance(view, PagedView):
                view = gather_pages(view, masks[0].query_positions.size, heads.queries.dtype)
            allowed = jnp.stack(jnp.broadcast_arrays(*(visible(masks[mask], window) for window, mask in limits)))
            return call_hooks.attend(heads.queries, view, allowed[kind], config.score_scale)
        if isinstance(kind, int):
            return attend_within(limits[kind], heads, view, masks)
        # Only attention is compiled once per distinct mask (`lax.switch` inside the scan): program size depends neither on
        # depth nor on the period, and no remainder layers are unrolled.
        which = jnp.asarray([distinct_limits.index(limit) for limit in limits])[kind]
        return lax.switch(which, [partial(attend_within, limit) for limit in distinct_limits], heads, view, masks)

    return attend_layer


def _chunks(config: LlamaConfig, tokens: jax.Array, cache: KVCache | None, positions: Positions) -> list[int | None]:
    """The attention chunk of each layer kind; None if the sequence fits into one chunk."""
    end: int | None = tokens.shape[1]  # all positions are below it
    if cache is not None:
        end = cache.capacity
    end = end if positions.position_ids is None else None
    return [
        None if end is not None and layer.chunk is not None and end <= layer.chunk else layer.chunk
        for layer in config.layer_kinds
    ]


def _in_chunks(config: LlamaConfig, mask: AttentionMask, chunk: int | None, positions: Positions) -> AttentionMask:
    """The mask of chunked layers: each chunk of each document becomes a segment."""
    if chunk is None:
        return mask
    position_ids = mask.query_positions, mask.key_positions
    if positions.position_ids is not None:
        position_ids = positions.position_ids, positions.position_ids
    queries, keys = (x // chunk for x in position_ids)
    if mask.query_segments is not None:
        # An upper bound on chunks per document makes the ids unique.
        chunks = -(-max(config.max_seq_len, mask.query_positions.shape[-1]) // chunk)
        queries, keys = mask.query_segments * chunks + queries, mask.key_segments * chunks + keys
    return mask.replace(query_segments=queries, key_segments=keys)


def _shared_inputs(
    config: LlamaConfig,
    tokens: jax.Array,
    cache: KVCache | None,
    positions: Positions,
    chunks: list[int | None],
    by_token: Callable[..., Any],
    hooked: bool,
) -> _SharedInputs:
    length = tokens.shape[1]
    paged, slots = None, jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32), tokens.shape)
    if cache is not None:
        paged = cache.view(length, positions.starts)
        slots = jnp.maximum(paged.tokens(tokens.size)[1], 0).reshape(tokens.shape)
        if positions.starts is not None and positions.rope_lengths is None:
            positions = positions._replace(rope_lengths=slots + 1)
    kinds = config.layer_kinds

    def rope(position_ids: jax.Array) -> tuple[CosSin, ...]:
        return by_token(rope_of, position_ids, slots, positions._replace(starts=None))

    def rope_of(position_ids: jax.Array, slots: jax.Array, positions: Positions) -> tuple[CosSin, ...]:
        tables: dict[Any, CosSin] = {}
        for layer in kinds:
            key = layer.rope, layer.rope_theta
            if key not in tables:
                cos, sin = ops.rotary_table(
                    position_ids, *scaled_frequencies(config, slots, positions, layer)
                )  # [B, T, H/2]
                tables[key] = cos[:, None, :, None], sin[:, None, :, None]
        return tuple(tables[layer.rope, layer.rope_theta] for layer in kinds)

    position_ids = slots if positions.position_ids is None else positions.position_ids
    token_rope, scale = rope(position_ids), None
    if config.query_scaling is not None:
        scaling = config.query_scaling
        counted = position_ids + scaling.offset if scaling.offset else position_ids
        scale = by_token(
            lambda counted: 1 + scaling.beta * jnp.log1p((counted // scaling.context).astype(jnp.float32)), counted
        )
        scale = scale[:, None, :, None, None]

    def by_chunk(mask: AttentionMask) -> tuple[AttentionMask, ...]:
        return tuple(_in_chunks(config, mask, chunk, positions) for chunk in dict.fromkeys(chunks))

    hook_positions = position_ids if hooked else None
    if cache is None:
        masks = by_chunk(AttentionMask.causal(length, positions.segment_ids))
        return _SharedInputs(token_rope, masks, query_scale=scale, position_ids=hook_positions)
    sink_rope = None
    if cache.sinks and cache.window is not None:
        # StreamingLLM: sinks are placed directly before the window, by cache position, so no distance exceeds sinks + window
        # (Xiao et al. 2023, section 3.2).
        sink_rope = rope(jnp.minimum(slots, cache.sinks + cache.window - 1))
    masks = by_chunk(AttentionMask(slots, jnp.arange(cache.capacity, dtype=jnp.int32)[None]))
    return _SharedInputs(token_rope, masks, sink_rope, scale, paged, hook_positions)


class _Heads(NamedTuple):
    """Heads of the new tokens.

    Attributes:
      queries: [B, K, T, G, H].
      sink_queries: queries rotated for scores with the sinks, or None.
      keys, values: [B, K, T, H].
    """

    queries: jax.Array
    sink_queries: jax.Array | None
    keys: jax.Array
    values: jax.Array


def _heads_of(config: LlamaConfig, block: Block, qkv: jax.Array, shared: _SharedInputs, kind: int | jax.Array) -> _Heads:
    """The heads of the projection [B, T, K, G + 2, H]."""
    weights = block.attention
    if weights.qkv_bias is not None:
        qkv = qkv + weights.qkv_bias.astype(qkv.dtype)
    qkv = qkv.swapaxes(1, 2)  # [B, K, T, G + 2, H]
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


def _call_hooks_of_heads(config: LlamaConfig, call_hooks: HookCaller, heads: _Heads) -> _Heads:
    """The heads after the hooks at "queries", "keys" and "values"."""
    if heads.sink_queries is not None and call_hooks.has("queries"):
        raise ConfigError("hooks at queries are not for a cache with sinks, for which queries are rotated twice")
    by_token = partial(jnp.swapaxes, axis1=1, axis2=2)
    queries = call_hooks("queries", heads.queries, _flat_heads, partial(_grouped_heads, config))
    keys, values = (call_hooks(name, getattr(heads, name), by_token, by_token) for name in ("keys", "values"))
    return heads._replace(queries=queries, keys=keys, values=values)


def _flat_heads(x: jax.Array) -> jax.Array:
    """[B, K, T, G, H] as [B, T, N, H]."""
    return x.swapaxes(1, 2).reshape(x.shape[0], x.shape[2], -1, x.shape[-1])


def _grouped_heads(config: LlamaConfig, x: jax.Array) -> jax.Array:
    """[B, T, N, H] as [B, K, T, G, H]."""
    return x.reshape(*x.shape[:2], config.n_kv_heads, config.queries_per_kv_head, -1).swapaxes(1, 2)


def _norm_heads(config: LlamaConfig, x: jax.Array, weight: jax.Array) -> jax.Array:
    """[B, K, T, G, H], each head normalized by itself or, with a weight [K, G, H], all heads of a token together."""
    if weight.ndim == 1:
        return ops.rms_norm(x, weight, config.norm_eps, config.norm_offset, checked=True)
    tokens = x.swapaxes(1, 2)  # [B, T, K, G, H]
    flat = tokens.reshape(*tokens.shape[:2], -1)
    return (
        ops.rms_norm(flat, weight.reshape(-1), config.norm_eps, config.norm_offset, checked=True)
        .reshape(tokens.shape)
        .swapaxes(1, 2)
    )


def _rotate(config: LlamaConfig, x: jax.Array, rope: tuple[CosSin, ...], kind: int | jax.Array) -> jax.Array:
    """Apply the RoPE of a layer kind to [..., H]; NoPE layers rotate by zero."""
    if isinstance(kind, int):
        if config.layer_kinds[kind].rope == "none":
            return x
        cos, sin = rope[kind]
    else:
        cos, sin = (jnp.stack(tables)[kind] for tables in zip(*rope, strict=True))
    rotated, rest = (x, None) if config.rotary_dim is None else jnp.split(x, [config.rotary_dim], axis=-1)
    rotated = ops.apply_rotary(rotated, cos, sin)
    rotated = rotated if rest is None else jnp.concatenate([rotated, rest], axis=-1)
    if config.qk_norm != "l2":
        return rotated
    normed = ops.rms_norm(rotated, jnp.ones(config.head_dim), config.norm_eps)
    return normed if isinstance(kind, int) else jnp.where(_rotates(config)[kind], normed, rotated)


def _smooth_for_int8(config: LlamaConfig, block: Block, heads: _Heads) -> _Heads:
    """Queries and keys for an int8 cache, see `ops.int8.smooth_keys`: their products are the same."""
    bias, rest = None, () if heads.sink_queries is None else (heads.sink_queries,)
    if block.attention.qkv_bias is not None and block.attention.key_norm is None:
        bias = block.attention.qkv_bias[:, -2]
    keys, *queries = smooth_keys(heads.keys, heads.queries, *rest, bias=bias, rotated=config.rope_dim)
    return _Heads(queries[0], queries[1] if rest else None, keys, heads.values)


def _query_scale(config: LlamaConfig, shared: _SharedInputs, kind: int | jax.Array) -> jax.Array | None:
    """The query scale of a layer kind, or None."""
    if config.query_scaling is None or shared.query_scale is None or config.query_scaling.rotated:
        return shared.query_scale
    if isinstance(kind, int):
        return shared.query_scale if config.layer_kinds[kind].rope == "none" else None
    return jnp.where(_rotates(config)[kind], 1, shared.query_scale)


def _rotates(config: LlamaConfig) -> jax.Array:
    """Whether layers of each kind have RoPE: bool[kinds]."""
    return jnp.asarray([layer.rope != "none" for layer in config.layer_kinds])


def _write_cache(
    pages: Any, heads: _Heads, shared: _SharedInputs, layer: jax.Array, head_sharding: HeadSharding | None
) -> tuple[Any, KVView | PagedView]:
    """The pages with the new tokens, and the view of them that a layer attends to."""
    if shared.paged is None:
        return None, KVView(heads.keys, heads.values)
    view = shared.paged.replace(layer=layer.astype(jnp.int32))
    pages = ops.write_paged(pages, _by_token(heads.keys), _by_token(heads.values), view, head_sharding)
    return pages, view.replace(pages=pages)


def _by_token(x: jax.Array) -> jax.Array:
    """[B, K, T, ...] as [B * T, K, ...]."""
    return x.swapaxes(1, 2).reshape(-1, x.shape[1], *x.shape[3:])


def _by_row(x: jax.Array, batch: int) -> jax.Array:
    """[B * T, K, ...] as [B, K, T, ...]."""
    return x.reshape(batch, -1, *x.shape[1:]).swapaxes(1, 2)


def _feed_forward(
    config: LlamaConfig,
    block: Block,
    normed: jax.Array,
    sharding: Sharding,
    between: Callable[..., Any],
    call_hooks: HookCaller,
) -> jax.Array:
    """Dense or mixture-of-experts feed-forward."""
    weights = block.feed_forward
    matrices = weights.gate, weights.up, weights.down
    if call_hooks.has("neurons"):
        if weights.router is not None:
            raise ConfigError("hooks at neurons are not for mixtures of experts, whose tokens have different ones")
        gates, values = ops.project(normed, weights.gate), ops.project(normed, weights.up)
        neurons = call_hooks("neurons", ops.gated_activation(gates, values, config.activation))
        return ops.project(neurons, weights.down)
    if weights.router is None:
        return ops.feed_forward(normed, *matrices, config.activation, between)
    from llama_jax.ops.moe import Routing, mixture_of_experts

    routing = Routing(config.experts_per_token, config.normalize_expert_weights, config.expert_scores == "sigmoid")
    chosen = mixture_of_experts(normed, weights.router, *matrices, routing=routing, sharding=sharding.experts)
    if weights.shared_gate is None:
        return chosen
    return chosen + ops.feed_forward(normed, weights.shared_gate, weights.shared_up, weights.shared_down)


def unembed(config: LlamaConfig, params: Llama, hidden: Float[Array, "*batch D"]) -> Float[Array, "*batch V"]:
    """Logits, in float32 at least, of the hidden states from `forward`.

    Separate from `forward`, so that a prefill projects one position per row onto the vocabulary instead of all of them.

    Rows beyond the vocabulary are padding, to divide the output projection over devices (`parallel.padding`); their logits
    are -inf.
    """
    return unembed_with(HookCaller(params.hooks), config, params, hidden)


def unembed_with(
    call_hooks: HookCaller, config: LlamaConfig, params: Llama, hidden: Float[Array, "*batch D"]
) -> Float[Array, "*batch V"]:
    """`unembed`, where what hooks keep is wanted."""
    wide = jnp.promote_types(hidden.dtype, jnp.float32)
    head = lm_head_of(config, params)
    logits = ops.project(hidden, head, out_dtype=wide)
    if head.shape[0] != config.vocab_size:
        logits = jnp.where(jnp.arange(head.shape[0]) < config.vocab_size, logits, -jnp.inf)
    return call_hooks("logits", logits)


def lm_head_of(config: LlamaConfig, params: Llama) -> jax.Array:
    """The output projection [V, D]; the embedding if the two are tied.

    Raises:
      ConfigError: there is one in a tied model, or none in an untied model.
    """
    check_head(config, params)
    return params.embedding if params.lm_head is None else params.lm_head


def lm_head_for_loss(config: LlamaConfig, params: Llama) -> jax.Array:
    """`lm_head_of`, for losses that compute logits a part at a time.

    Raises:
      ConfigError: there are hooks at "logits", which would not be called.
    """
    if "logits" in (params.hooks or ()):
        raise ConfigError("this loss never holds whole logits, for hooks at logits; compute it from llama_jax.logits")
    return lm_head_of(config, params)
