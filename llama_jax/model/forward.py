"""The forward pass: one function for training, prefill, chunked prefill and decoding."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Integer

from llama_jax import ops
from llama_jax.config import LlamaConfig
from llama_jax.errors import ConfigError
from llama_jax.model.attention_inputs import attention_to_new_tokens, attention_to_pages
from llama_jax.model.cache import KVCache, init_cache
from llama_jax.model.checks import check_arguments, check_exact, check_head, check_hooks, check_parts, check_parts_found
from llama_jax.model.forward_options import ComputeOptions, Positions, Sharding
from llama_jax.model.hooks import HookCaller
from llama_jax.model.layer import KeyValues, LayerContext, TokenTables, layer, scale
from llama_jax.model.operations import Ops, select_ops
from llama_jax.model.params import Block, LlamaParams, is_matrix_in_block
from llama_jax.model.remat import rematerialize
from llama_jax.model.rope import token_tables
from llama_jax.ops import exact
from llama_jax.ops.attention import PagedView
from llama_jax.ops.platform import AnyArray, lowering_platform
from llama_jax.ops.weights.layers import scan_reads_in_place, split_for_scan


def forward(
    config: LlamaConfig,
    params: LlamaParams,
    tokens: Integer[AnyArray, "B T"],
    cache: KVCache | None = None,
    *,
    positions: Positions = Positions(),
    compute: ComputeOptions = ComputeOptions(),
    sharding: Sharding = Sharding(),
) -> tuple[Float[Array, "B T D"], Any]:
    """Run the layers over `tokens` (Touvron et al. 2023, section 2.2) and return the normalized residual stream.

    Training, prefill, chunked prefill and decoding differ only in `cache` and T. Padding is on the right, after all tokens
    that valid ones attend to, so the causal mask excludes it.

    Args:
      tokens: ids in [0, V). Invalid ids (which `model.logits.logits` and `generate` reject) and positions beyond
        `config.max_seq_len` are not detected here. A ragged batch is int32[T, 1], all rows concatenated, with
        `positions.starts`.
      cache: the keys and values of earlier tokens, which is not changed: donate it to a jitted function to write in place.
        Padding is written too, but not counted. None starts at position 0 and keeps nothing. Passes with a cache are not
        differentiable.
      positions: the positions of the tokens; by default consecutive, after those in the cache.
      compute: dtype, rematerialization, attention.
      sharding: how the pass is sharded. `constrain` is called with "tokens" [B, T], before the embedding lookup, and with
        activations [B, T, D]: "embedded", after the lookup; "residual", between layers; "sublayer_input", the input of the
        first matmuls of attention and feed-forward; and "sublayer_output", the output of their last ones.

    Returns:
      The hidden states in the dtype of the computation, divided by `config.logits_scaling`, the input of `unembed`; and the
      cache with the new tokens, or None.

    Raises:
      ConfigError: the parameters do not match the configuration.
      GenerationError: the tokens are not int[B, T], or do not fit into the cache; positions have the wrong shape; packed
        rows with a cache. Under `jit`, only overflow of an empty cache is detected; callers must count tokens.
    """
    options = PassOptions(positions, compute, sharding)
    with sharding.context():
        if compute.exact:
            return _forward_exactly(config, params, jnp.asarray(tokens), cache, options)
        hidden, cache, _ = run_layers(config, params, tokens, cache, options)
    return hidden, cache


def _forward_exactly(
    config: LlamaConfig, params: LlamaParams, tokens: jax.Array, cache: KVCache | None, options: PassOptions
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
    compute: ComputeOptions
    sharding: Sharding


def run_layers(
    config: LlamaConfig,
    params: LlamaParams,
    tokens: Integer[AnyArray, "B T"],
    cache: KVCache | None,
    options: PassOptions,
) -> tuple[Float[Array, "B T D"], Any, dict[str, Any]]:
    """The result of `forward`, and the values that hooks keep, by point (`model.logits.logits_and_activations`)."""
    positions, compute, sharding = options
    tokens = jnp.asarray(tokens)
    check_arguments(config, params, tokens, cache, positions)
    check_parts_found(config)
    check_parts(config, compute)
    check_hooks(config, params, cache, compute, sharding)
    pass_ops = select_ops(config, params, compute, sharding, positions.starts)
    view = None if cache is None else cache.view(tokens.shape[1], positions.starts)
    positions, indices = _positions_of(tokens, view, positions)
    position_ids = indices if positions.position_ids is None else positions.position_ids
    kv: KeyValues
    if cache is None or view is None:
        kv = attention_to_new_tokens(config, tokens.shape[1], positions)
    else:
        sink_rotation = None
        if cache.sinks and cache.window is not None:
            offsets = jnp.minimum(indices, cache.sinks + cache.window - 1) - indices
            sink_rotation = _rope_tables(config, pass_ops, offsets, indices, positions, attention_factor=1.0)[:2]
        kv = attention_to_pages(config, cache, view, sink_rotation)
    tables = _rope_tables(config, pass_ops, position_ids, indices, positions)
    outer_hooks = HookCaller(params.hooks, position_ids)
    ctx = LayerContext(config, pass_ops, sharding.constrain, tables, kv, outer_hooks)

    x = pass_ops.embed(params.embedding, sharding.constrain(tokens, "tokens"))
    x = scale(x.astype(compute.dtype or params.embedding.dtype), config.embedding_multiplier)
    if compute.exact:
        x = jnp.where((jnp.arange(len(tokens)) < jnp.asarray(positions.starts)[-1])[:, None, None], x, 0)
    x = sharding.constrain(outer_hooks("embedded", sharding.constrain(x, "embedded")), "residual")
    x, pages, kept = _run_blocks(ctx, params, compute, x, None if cache is None else cache.pages)
    x = outer_hooks("final", final_norm(config, pass_ops, params, x))
    kept |= outer_hooks.kept
    if cache is None or view is None:
        return x, None, kept
    lengths = view.lengths if positions.lengths is None else cache.length + positions.lengths
    return x, cache.replace(pages=pages, length=lengths), kept


def _positions_of(tokens: jax.Array, view: PagedView | None, positions: Positions) -> tuple[Positions, jax.Array]:
    """The positions, with the RoPE lengths of a ragged batch; and the index of each token in its row, int32[B, T]."""
    if view is None:
        return positions, jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32), tokens.shape)
    indices = jnp.maximum(view.rows_and_positions(tokens.size)[1], 0).reshape(tokens.shape)
    if positions.starts is not None and positions.rope_lengths is None:
        positions = positions._replace(rope_lengths=indices + 1)
    return positions, indices


def _run_blocks(
    ctx: LayerContext, params: LlamaParams, compute: ComputeOptions, x: jax.Array, pages: Any
) -> tuple[jax.Array, Any, dict[str, Any]]:
    """The residual stream after the last layer, the pages, and the values that hooks keep, stacked."""
    has_cache = pages is not None
    is_unrolled = has_cache and lowering_platform() == "gpu"
    sliced, block_of_layer = split_for_scan(params.blocks, partial(_is_read_in_place, has_cache, is_unrolled))
    run_layer: Callable[..., Any] = partial(_run_layer, ctx)
    if compute.remat != "none":
        run_layer = rematerialize(compute.remat, run_layer, in_loop=not compute.unroll)
    if is_unrolled:
        # XLA for GPUs copies the slices of a scan (118 MB per layer of 8B), but reads static slices in place.
        kept_per_layer = []
        for i in range(ctx.config.n_layers):
            x, pages, kept = run_layer(block_of_layer([], i), x, pages, i)
            kept_per_layer.append(kept)
        return x, pages, jax.tree.map(lambda *arrays: jnp.stack(arrays), *kept_per_layer)

    def scan_layer(carry: Any, slices_and_layer: Any) -> tuple[Any, Any]:
        slices, i = slices_and_layer
        *carry, kept = run_layer(block_of_layer(slices, i), *carry, i)
        return tuple(carry), kept

    # The cache is in the carry: as input and output of the scan, it would be copied at every call.
    scanned = sliced, jnp.arange(ctx.config.n_layers)
    (x, pages), kept = lax.scan(scan_layer, (x, pages), scanned, unroll=compute.unroll)
    return x, pages, kept


def _run_layer(
    ctx: LayerContext, block: Block, x: jax.Array, pages: Any, index: int | jax.Array
) -> tuple[jax.Array, Any, dict[str, Any]]:
    """`layer`, and the values that its hooks keep."""
    types = ctx.config.layer_kinds
    type_of_layer = [types.index(ctx.config.layer(i)) for i in range(ctx.config.n_layers)]
    layer_type: Any = 0
    if len(types) > 1:
        layer_type = type_of_layer[index] if isinstance(index, int) else jnp.asarray(type_of_layer)[index]
    hooks = ctx.hooks.in_layer(jnp.asarray(index))
    x, pages = layer(replace(ctx, hooks=hooks, layer=index, layer_type=layer_type), block, x, pages)
    return x, pages, hooks.kept


def _is_read_in_place(has_cache: bool, is_unrolled: bool, path: tuple[Any, ...], leaf: Any) -> bool:
    """Whether a parameter of the layers is indexed in its stack instead of sliced by the scan."""
    return is_unrolled or scan_reads_in_place(leaf, is_constant=has_cache and is_matrix_in_block(path))


def _rope_tables(
    config: LlamaConfig,
    pass_ops: Ops,
    position_ids: jax.Array,
    indices: jax.Array,
    positions: Positions,
    attention_factor: float | None = None,
) -> TokenTables:
    """The tables of tokens at these positions.

    Args:
      indices: the index of each token in its row.
      attention_factor: by default the one of the model's RoPE scaling.
    """
    compute = partial(token_tables, config, attention_factor=attention_factor)
    # Without `starts`, which has no axis of tokens to map over.
    per_token = TokenTables(*pass_ops.map_tokens(compute, position_ids, indices, positions._replace(starts=None)))
    return jax.tree.map(lambda x: jnp.moveaxis(x, 1, 0)[:, :, None, :, None], per_token)


def final_norm(
    config: LlamaConfig, pass_ops: Ops, params: LlamaParams, x: Float[Array, "*batch D"]
) -> Float[Array, "*batch D"]:
    """The hidden states that `forward` returns, from the residual stream after the last layer."""
    # An overflow persists in the residual stream, so checking here covers the norms before sublayers; those after sublayers
    # check for themselves.
    x = pass_ops.norm(x, params.final_norm, config.norm_eps, config.norm_offset, nan_on_overflow=True)
    # Scaled here instead of at the logits, so that `unembed` and the losses need not scale.
    return scale(x, 1 / config.logits_scaling)


def unembed(
    config: LlamaConfig, params: LlamaParams, hidden: Float[Array, "*batch D"], compute: ComputeOptions = ComputeOptions()
) -> Float[Array, "*batch V"]:
    """Logits, in float32 at least, of the hidden states from `forward`, to which `compute` was passed.

    Separate from `forward`, so that a prefill computes the logits of only one position per row.

    If the output projection has padding rows for even sharding (`parallel.padding`), their logits are -inf.
    """
    return unembed_with_hooks(HookCaller(params.hooks), config, params, hidden, compute)


def unembed_with_hooks(
    call_hooks: HookCaller,
    config: LlamaConfig,
    params: LlamaParams,
    hidden: Float[Array, "*batch D"],
    compute: ComputeOptions,
) -> Float[Array, "*batch V"]:
    """`unembed` with hooks called by `call_hooks`, which collects the values that hooks keep."""
    wide = jnp.promote_types(hidden.dtype, jnp.float32)
    head = lm_head_of(config, params)
    logits = ops.project(hidden, head, out_dtype=wide, kernels=compute.kernels())
    padding = head.shape[0] - config.vocab_size
    if call_hooks.has("logits"):
        logits = call_hooks("logits", logits[..., : config.vocab_size])
        return jnp.pad(logits, [(0, 0)] * (logits.ndim - 1) + [(0, padding)], constant_values=-jnp.inf)
    if padding:
        logits = jnp.where(jnp.arange(head.shape[0]) < config.vocab_size, logits, -jnp.inf)
    return logits


def lm_head_of(config: LlamaConfig, params: LlamaParams) -> jax.Array:
    """The output projection [V, D], which is the embedding if the two are tied.

    Raises:
      ConfigError: `lm_head` is missing, or present although the embeddings are tied.
    """
    check_head(config, params)
    return params.embedding if params.lm_head is None else params.lm_head


def lm_head_for_loss(config: LlamaConfig, params: LlamaParams) -> jax.Array:
    """`lm_head_of`, for losses that compute logits in chunks.

    Raises:
      ConfigError: hooks at "logits", which would not be called.
    """
    if "logits" in (params.hooks or ()):
        raise ConfigError("this loss computes logits in chunks, without hooks at logits; compute it from llama_jax.logits")
    return lm_head_of(config, params)
