"""The forward pass: one body for training, prefill, chunked prefill and decoding."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from llama_jax import ops
from llama_jax.config import LlamaConfig
from llama_jax.errors import ConfigError, GenerationError
from llama_jax.model.cache import KVCache, read, write
from llama_jax.model.params import Block, Llama
from llama_jax.ops.rotary import scale_llama3

Constrain = Callable[[jax.Array, str], jax.Array]


def unconstrained(x: jax.Array, where: str) -> jax.Array:
    """Leave it to XLA where an activation lies."""
    return x


def rotary_frequencies(config: LlamaConfig) -> np.ndarray:
    """Radians per position of each pair of features, scaled as the configuration says: float32[H/2]."""
    frequencies = ops.inverse_frequencies(config.head_dim, config.rope_theta)
    scaling = config.rope_scaling
    if scaling is not None and scaling.kind == "linear":
        frequencies = frequencies / scaling.factor
    elif scaling is not None and scaling.kind == "llama3":
        frequencies = scale_llama3(
            frequencies,
            factor=scaling.factor,
            low_freq_factor=scaling.low_freq_factor,
            high_freq_factor=scaling.high_freq_factor,
            original_max_seq_len=scaling.original_max_seq_len,
        )
    return frequencies.astype(np.float32)


def forward(
    config: LlamaConfig,
    params: Llama,
    tokens: jax.Array,
    cache: KVCache | None = None,
    *,
    lengths: jax.Array | None = None,
    positions: jax.Array | None = None,
    segment_ids: jax.Array | None = None,
    dtype: jax.typing.DTypeLike | None = None,
    constrain: Constrain = unconstrained,
    wrap_layer: Callable[[Callable], Callable] = lambda layer: layer,
) -> tuple[jax.Array, Any]:
    """Run the layers over `tokens` (Touvron et al. 2023, section 2.2) and return the normalised residual stream.

    Training, prefill, chunked prefill and decoding differ only in `cache` and T. Padding is on the right: a padded token
    comes after all that a real one may see, so it needs no mask, only a length.

    Args:
      tokens: int32[B, T], ids in [0, V). An id outside is not noticed here; `logits` and `generate` check. Nor is a
        position beyond `config.max_seq_len`, which `generate` refuses.
      cache: what the rows have read before; None starts at position 0 and keeps nothing. Its form follows that of
        `params.blocks`: a tuple for a tuple, stacked for stacked.
      lengths: int32[B], how many of the T tokens of each row are real; all when None. Only the cache's length uses it.
      positions: int32[B, T], each token's position in its document, for the rotary embedding; its place in the row and the
        cache when None. Without a cache only.
      segment_ids: int32[B, T], which of the documents packed into a row each token is of: attention does not cross them.
        Without a cache only.
      dtype: of the computation, to which parameters are cast where they are used; None takes that of the embedding.
      constrain: told where in the model an activation is, lays it out over the devices: "tokens" [B, T], to be looked up;
        "embedded" and "residual", both [B, T, D], as they were looked up and the residual stream between layers. See
        `parallel.specs`.
      wrap_layer: changes the function of one layer, as `jax.checkpoint` does for training.

    Returns:
      hidden [B, T, D] in the dtype of the computation, to be given to `unembed` where logits are wanted; and the cache with
      the new tokens, or None.

    Raises:
      ConfigError: the parameters are not those of the configuration.
      GenerationError: the tokens are not int[B, T], or do not fit into the cache, or its form is not that of the blocks;
        positions or segments of another shape, or together with a cache.
        Under `jit` the filled length is not known, and only tokens that an empty cache could not take are noticed: count
        as `generate` does.
    """
    tokens = jnp.asarray(tokens)
    _check_arguments(config, params, tokens)
    batch, new = tokens.shape
    _check_packing(tokens, cache, positions, segment_ids)
    if cache is None:
        slots = jnp.broadcast_to(jnp.arange(new, dtype=jnp.int32), tokens.shape)
    else:
        _check_cache(config, params, cache, batch, new)
        slots = cache.length[:, None] + jnp.arange(new, dtype=jnp.int32)
    cos, sin = ops.rotary_table(slots if positions is None else positions, rotary_frequencies(config))
    embedded = params.embedding[constrain(tokens, "tokens")].astype(dtype or params.embedding.dtype)
    hidden = constrain(constrain(embedded, "embedded"), "residual")
    block_step = wrap_layer(partial(_block, config, segment_ids=segment_ids))

    if isinstance(params.blocks, tuple):
        layers: list[Any] = [None] * config.n_layers if cache is None else list(zip(cache.k, cache.v, strict=True))
        for i, block in enumerate(params.blocks):
            hidden, layers[i] = block_step(block, hidden, layers[i], slots, cos, sin)
            hidden = constrain(hidden, "residual")
        buffers: Any = None if cache is None else tuple(zip(*layers, strict=True))
    else:

        def layer_step(carry, layer):
            hidden, buffers = carry
            block, index = layer
            hidden, buffers = block_step(block, hidden, buffers, slots, cos, sin, index)
            return (constrain(hidden, "residual"), buffers), None

        # The cache rides in the carry: as input and output of the scan it would be copied whole at every call.
        buffers = None if cache is None else (cache.k, cache.v)
        (hidden, buffers), _ = lax.scan(layer_step, (hidden, buffers), (params.blocks, jnp.arange(config.n_layers)))

    hidden = ops.rms_norm(hidden, params.final_norm, config.norm_eps)
    if cache is None:
        return hidden, None
    k, v = buffers
    return hidden, KVCache(k=k, v=v, length=cache.length + (new if lengths is None else lengths))


def _block(
    config: LlamaConfig,
    block: Block,
    hidden: jax.Array,
    kv: tuple[jax.Array, jax.Array] | None,
    slots: jax.Array,
    cos: jax.Array,
    sin: jax.Array,
    layer: jax.Array | None = None,
    *,
    segment_ids: jax.Array | None = None,
) -> tuple[jax.Array, tuple[jax.Array, jax.Array] | None]:
    """One layer: hidden [B, T, D] in and out, and this layer's keys and values with the new tokens written."""
    batch, new, _ = hidden.shape
    normed = ops.rms_norm(hidden, block.attention_norm, config.norm_eps)
    qkv = ops.linear(normed, block.attention.qkv).swapaxes(1, 2)  # [B, K, T, G + 2, H]
    # Split and not indexed: the gradients of the parts are then joined, where those of slices are filled up and added.
    groups = config.queries_per_kv_head
    unturned, values = jnp.split(qkv, [groups + 1], axis=-2)
    turned = ops.apply_rotary(unturned, cos[:, None, :, None], sin[:, None, :, None])
    queries, keys = jnp.split(turned, [groups], axis=-2)
    keys, values = keys.squeeze(-2), values.squeeze(-2)

    query_positions = None  # every query at its own slot
    if kv is not None:
        query_positions = slots[:, None]
        start = slots[:, 0]
        kv = write(kv[0], keys, start, layer), write(kv[1], values, start, layer)
        keys, values = read(kv[0], layer), read(kv[1], layer)
        if keys.ndim == 3:  # a single row whose batch axis was dropped
            queries, query_positions = queries[0], query_positions[0]
    segments = None if segment_ids is None else (segment_ids[:, None], segment_ids[:, None])
    mixed = ops.attention(queries, keys, values, query_positions, scale=config.head_dim**-0.5, segments=segments)
    mixed = mixed.reshape(batch, config.n_kv_heads, new, -1).swapaxes(1, 2).reshape(batch, new, -1)
    hidden = hidden + ops.linear(mixed, block.attention.out)

    normed = ops.rms_norm(hidden, block.ffn_norm, config.norm_eps)
    return hidden + ops.feed_forward(normed, block.feed_forward.gate_up, block.feed_forward.down), kv


def unembed(config: LlamaConfig, params: Llama, hidden: jax.Array) -> jax.Array:
    """Logits float32[..., V] of the hidden states [..., D] that `forward` gave.

    Apart from `forward`, so that a prefill projects one position per row onto the vocabulary and not all of them.

    The output projection may have more rows than the vocabulary, to be divided over devices (`parallel.fit`). They are
    padding: there are as many logits as rows, and those of the padding are -inf, so that nothing ever chooses or counts one.
    """
    wide = jnp.promote_types(hidden.dtype, jnp.float32)
    head = head_of(config, params)
    logits = ops.linear(hidden, head, out_dtype=wide)
    if head.shape[0] == config.vocab_size:
        return logits
    return jnp.where(jnp.arange(head.shape[0]) < config.vocab_size, logits, -jnp.inf)


def head_of(config: LlamaConfig, params: Llama) -> jax.Array:
    """The output projection [V, D]: the embedding where the two are tied.

    Raises:
      ConfigError: the parameters have one where they are tied, or none where they are not.
    """
    head = params.lm_head
    if (head is None) != config.tie_embeddings:
        raise ConfigError(
            f"tie_embeddings={config.tie_embeddings} but the parameters have {'no' if head is None else 'an'} lm_head"
        )
    return params.embedding if head is None else head


def logits(config: LlamaConfig, params: Llama, tokens: jax.Array) -> jax.Array:
    """Logits float32[B, T, V] of whole sequences, without a cache: the plain case of `forward` and `unembed`.

    Args:
      tokens: int[B, T], ids in [0, V).

    Raises:
      GenerationError: an id outside the vocabulary (checked where the values are known, not under `jit`).
    """
    check_tokens(config, tokens)
    hidden, _ = forward(config, params, jnp.asarray(tokens))
    return unembed(config, params, hidden)


def check_tokens(config: LlamaConfig, tokens: jax.Array | np.ndarray, what: str = "token id") -> None:
    """Raise GenerationError for an id outside [0, V), which an embedding lookup would silently replace."""
    if isinstance(tokens, jax.core.Tracer):
        return
    ids = np.asarray(tokens)
    outside = ids[(ids < 0) | (ids >= config.vocab_size)]
    if outside.size:
        raise GenerationError(
            f"{what} {outside[0]} is outside the vocabulary of {config.vocab_size}; is this the model's own tokenizer?"
        )


def _check_arguments(config: LlamaConfig, params: Llama, tokens: jax.Array) -> None:
    if tokens.ndim != 2 or not tokens.size or not jnp.issubdtype(tokens.dtype, jnp.integer):
        raise GenerationError(
            f"tokens are {tokens.dtype}{list(tokens.shape)}; int[B, T] is needed, a row per sequence, B and T at least 1"
        )
    stacked = not isinstance(params.blocks, tuple)
    layers = params.blocks.attention_norm.shape[0] if isinstance(params.blocks, Block) else len(params.blocks)
    first = params.blocks if isinstance(params.blocks, Block) else params.blocks[0]
    c = config
    found = first.attention.qkv.shape[stacked:], first.feed_forward.down.shape[stacked:], layers
    needed = (c.n_kv_heads, c.queries_per_kv_head + 2, c.head_dim, c.dim), (c.dim, c.hidden_dim), c.n_layers
    if found != needed:
        raise ConfigError(f"parameters with qkv, down and layers {found} are not those of the configuration: {needed}")


def _check_packing(
    tokens: jax.Array, cache: KVCache | None, positions: jax.Array | None, segment_ids: jax.Array | None
) -> None:
    for name, value in (("positions", positions), ("segment_ids", segment_ids)):
        if value is None:
            continue
        if cache is not None:
            raise GenerationError(f"{name} are for packed rows, which have no cache; leave one of the two out")
        if value.shape != tokens.shape or not jnp.issubdtype(value.dtype, jnp.integer):
            kind = f"{value.dtype}{list(value.shape)}"
            raise GenerationError(f"{name} are {kind}; int{list(tokens.shape)}, as the tokens, is needed")


def _check_cache(config: LlamaConfig, params: Llama, cache: KVCache, batch: int, new: int) -> None:
    """Raise where `new` tokens do not fit: XLA would move the write to fit and overwrite what is there."""
    if isinstance(params.blocks, tuple) != isinstance(cache.k, tuple):
        forms = ("a tuple", "stacked") if isinstance(params.blocks, tuple) else ("stacked", "a tuple")
        raise GenerationError(
            f"the blocks are {forms[0]}, the cache is {forms[1]}; give init_cache stacked=True for stacked blocks only"
        )
    if cache.length.shape[0] != batch:
        raise GenerationError(f"tokens have batch={batch} but the cache has {cache.length.shape[0]} rows")
    layers = len(cache.k) if isinstance(cache.k, tuple) else cache.k.shape[0]
    heads, width = (cache.k[0] if isinstance(cache.k, tuple) else cache.k).shape[-3::2]
    if (layers, heads, width) != (config.n_layers, config.n_kv_heads, config.head_dim):
        raise GenerationError(
            f"a cache of {layers} layers, {heads} heads of {width} is not one of this configuration; make it with init_cache"
        )
    filled = 0 if isinstance(cache.length, jax.core.Tracer) else int(cache.length.max())
    if filled + new > cache.capacity:
        raise GenerationError(
            f"{new} tokens after {filled} do not fit into a cache of capacity={cache.capacity}; use grow() first"
        )
