"""The forward pass: one body for training, prefill, chunked prefill and decoding."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from llama_jax import ops
from llama_jax.config import LlamaConfig
from llama_jax.errors import GenerationError
from llama_jax.model.cache import KVCache, key_positions, read, slots_of, write
from llama_jax.model.params import Block, Llama, check_head, check_params
from llama_jax.ops.rotary import BY_LENGTH, SCALINGS, Frequencies, Length

Constrain = Callable[[jax.Array, str], jax.Array]
Attend = Callable[..., jax.Array]  # with the signature of `ops.attention`


def unconstrained(x: jax.Array, where: str) -> jax.Array:
    """Leave it to XLA where an activation lies."""
    return x


def rotary_frequencies(config: LlamaConfig, length: Length = None) -> tuple[Frequencies, float]:
    """How far each pair of features turns per position, and what cosine and sine are multiplied by.

    From the configuration alone, so that training and inference cannot disagree; computed in float64 where the length is
    not an array of JAX.

    Args:
      length: of the sequence, for the kinds of scaling that depend on it ("dynamic" and "longrope"; the others are the same
        at every length): a number, or int[...] with one for each row; None for the original context.

    Returns:
      Radians per position, float32[H/2], and the attention factor. For an array of lengths and a scaling that depends on
      them float32[..., H/2].
    """
    plain, scaling = ops.inverse_frequencies(config.head_dim, config.rope_theta), config.rope_scaling
    if scaling is None:
        return plain.astype(np.float32), 1.0
    scale = SCALINGS[scaling.kind]
    frequencies, attention_factor = scale(plain, theta=config.rope_theta, length=length, **scaling.settings)
    return frequencies.astype(np.float32), attention_factor


def forward(
    config: LlamaConfig,
    params: Llama,
    tokens: jax.Array,
    cache: KVCache | None = None,
    *,
    lengths: jax.Array | None = None,
    positions: jax.Array | None = None,
    segment_ids: jax.Array | None = None,
    rope_lengths: jax.Array | None = None,
    dtype: jax.typing.DTypeLike | None = None,
    constrain: Constrain = unconstrained,
    attend: Attend = ops.attention,
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
      lengths: int32[B], how many of the T tokens of each row are real; all when None. Only the cache's length uses it, and
        a rope scaling that depends on the length.
      positions: int32[B, T], each token's position in its document, for the rotary embedding; its place in the row and the
        cache when None. Without a cache only.
      segment_ids: int32[B, T], which of the documents packed into a row each token is of: attention does not cross them.
        Without a cache only.
      rope_lengths: int32[B], or int32[B, T] for each token, how long each row is when it has been read whole, for a rope
        scaling that depends on the length ("dynamic" or "longrope"; others are the same at every length). None takes what
        the row has so far, each document of a packed row for itself. What lies in the cache stays as it was turned when it
        was read: a prompt that is read in pieces needs its whole length from the first, and while a row grows in decoding,
        its older keys keep the frequencies of when it was shorter, as they do in transformers.
      dtype: of the computation, to which parameters are cast where they are used; None takes that of the embedding.
      constrain: told where in the model an activation is, lays it out over the devices: "tokens" [B, T], to be looked up;
        "embedded" and "residual", both [B, T, D], as they were looked up and the residual stream between layers. See
        `parallel.specs`.
      attend: mixes the values; `partial(ops.attention, backend=...)` chooses how, `parallel.ring` divides the sequence.
        A cache with sinks is read by `ops.attention_with_sinks` whatever this is.
      wrap_layer: changes the function of one layer, as `jax.checkpoint` does for training.

    Returns:
      hidden [B, T, D] in the dtype of the computation, to be given to `unembed` where logits are wanted; and the cache with
      the new tokens, or None.

    Raises:
      ConfigError: the parameters are not those of the configuration.
      GenerationError: the tokens are not int[B, T], or do not fit into the cache, or its form is not that of the blocks;
        positions, segments or lengths for rope of another shape, or packed rows together with a cache.
        Under `jit` the filled length is not known, and only tokens that an empty cache could not take are noticed: count
        as `generate` does.
    """
    tokens = jnp.asarray(tokens)
    _check_arguments(config, params, tokens)
    batch, new = tokens.shape
    _check_packing(tokens, cache, positions, segment_ids)
    if rope_lengths is not None and rope_lengths.shape not in ((batch,), tokens.shape):
        raise GenerationError(f"rope_lengths are {list(rope_lengths.shape)}; int[{batch}], one for each row, is needed")
    if cache is None:
        slots = jnp.broadcast_to(jnp.arange(new, dtype=jnp.int32), tokens.shape)
    else:
        _check_cache(config, params, cache, batch, new)
        slots = cache.length[:, None] + jnp.arange(new, dtype=jnp.int32)
    if config.rope_scaling is not None and config.rope_scaling.kind in BY_LENGTH and rope_lengths is None:
        rope_lengths = rope_lengths_of(slots, lengths, positions, segment_ids)
    frequencies, attention_factor = rotary_frequencies(config, rope_lengths)
    if frequencies.ndim == 2:  # of each row, for all of its positions
        frequencies = frequencies[:, None]
    turn = partial(ops.rotary_table, frequencies=frequencies, attention_factor=attention_factor)
    cos, sin = turn(slots if positions is None else positions)
    lookup = None if cache is None else _lookup(config, cache, new, turn)
    embedded = params.embedding[constrain(tokens, "tokens")].astype(dtype or params.embedding.dtype)
    hidden = constrain(constrain(embedded, "embedded"), "residual")
    block_step = wrap_layer(partial(_block, config, segment_ids=segment_ids, attend=attend, lookup=lookup))

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
    return hidden, cache.replace(k=k, v=v, length=cache.length + (new if lengths is None else lengths))


class _Lookup(NamedTuple):
    """How every layer writes the new tokens into the cache and reads what is there.

    Attributes:
      slots: see `slots_of`.
      key_positions: see `key_positions`; with an axis for the heads.
      window: of the cache or of the model, the smaller.
      sinks: of the cache.
      sink_turn: cosine and sine of the queries as the sinks see them.
    """

    slots: jax.Array
    key_positions: jax.Array | None
    window: int | None
    sinks: int
    sink_turn: tuple[jax.Array, jax.Array] | None

    def turned_for_sinks(self, queries: jax.Array) -> jax.Array | None:
        """Queries [B, K, T, G, H] that are not turned yet, as the sinks see them; None without sinks."""
        if self.sink_turn is None:
            return None
        cos, sin = self.sink_turn
        return ops.apply_rotary(queries, cos[:, None, :, None], sin[:, None, :, None])


def _lookup(
    config: LlamaConfig, cache: KVCache, new: int, turn: Callable[[jax.Array], tuple[jax.Array, jax.Array]]
) -> _Lookup:
    windows = [window for window in (config.window, cache.window) if window is not None]
    held = key_positions(cache, new)
    if cache.window is None or not cache.sinks:
        sink_turn = None
    else:
        # A sink stays as near as the start of the window is: positions within the cache, and not within the text
        # (Xiao et al. 2023, section 3.2). So no distance is ever longer than sinks and window together.
        positions = cache.length[:, None] + jnp.arange(new, dtype=jnp.int32)
        sink_turn = turn(jnp.minimum(positions, cache.sinks + cache.window - 1))
    held = None if held is None else held[:, None]
    return _Lookup(slots_of(cache, new), held, min(windows, default=None), cache.sinks, sink_turn)


def rope_lengths_of(
    slots: jax.Array, lengths: jax.Array | None, positions: jax.Array | None, segment_ids: jax.Array | None
) -> jax.Array:
    """How long each row is so far, int32[B]; or the document that each token of a packed row is of, int32[B, T]."""
    batch, new = slots.shape
    if positions is None and segment_ids is None:
        return slots[:, 0] + (jnp.full(batch, new, jnp.int32) if lengths is None else lengths)
    places = slots if positions is None else positions
    if segment_ids is None:
        return jnp.max(places, axis=1) + 1

    def of_row(places: jax.Array, segments: jax.Array) -> jax.Array:
        numbers = jnp.searchsorted(jnp.sort(segments), segments)  # below T, and different where the segments are
        return jax.ops.segment_max(places, numbers, num_segments=new)[numbers] + 1

    return jax.vmap(of_row)(places, segment_ids)


def _block(
    config: LlamaConfig,
    block: Block,
    hidden: jax.Array,
    kv: tuple[Any, Any] | None,
    slots: jax.Array,
    cos: jax.Array,
    sin: jax.Array,
    layer: jax.Array | None = None,
    *,
    segment_ids: jax.Array | None = None,
    attend: Attend = ops.attention,
    lookup: _Lookup | None = None,
) -> tuple[jax.Array, tuple[Any, Any] | None]:
    """One layer: hidden [B, T, D] in and out, and this layer's keys and values with the new tokens written."""
    batch, new, _ = hidden.shape
    normed = ops.rms_norm(hidden, block.attention_norm, config.norm_eps)
    qkv = ops.linear(normed, block.attention.qkv)
    if block.attention.qkv_bias is not None:
        qkv = qkv + block.attention.qkv_bias.astype(qkv.dtype)
    qkv = qkv.swapaxes(1, 2)  # [B, K, T, G + 2, H]
    # Split and not indexed: the gradients of the parts are then joined, where those of slices are filled up and added.
    groups = config.queries_per_kv_head
    unturned, values = jnp.split(qkv, [groups + 1], axis=-2)
    if block.attention.query_norm is not None:
        asking, asked = jnp.split(unturned, [groups], axis=-2)
        asking = ops.rms_norm(asking, block.attention.query_norm, config.norm_eps)
        unturned = jnp.concatenate([asking, ops.rms_norm(asked, block.attention.key_norm, config.norm_eps)], axis=-2)
    turned = ops.apply_rotary(unturned, cos[:, None, :, None], sin[:, None, :, None])
    queries, keys = jnp.split(turned, [groups], axis=-2)
    keys, values = keys.squeeze(-2), values.squeeze(-2)

    scale = config.head_dim**-0.5
    if lookup is None or kv is None:
        segments = None if segment_ids is None else (segment_ids[:, None], segment_ids[:, None])
        window = {} if config.window is None else {"window": config.window}
        mixed = attend(queries, keys, values, scale=scale, segments=segments, **window)
    else:
        kv = write(kv[0], keys, lookup.slots, layer), write(kv[1], values, lookup.slots, layer)
        held = read(kv[0], layer), read(kv[1], layer)
        sink_queries = lookup.turned_for_sinks(unturned[..., :groups, :])
        mixed = _attend_to_cache(queries, sink_queries, held, slots, lookup, attend=attend, scale=scale)
    mixed = mixed.reshape(batch, config.n_kv_heads, new, -1).swapaxes(1, 2).reshape(batch, new, -1)
    hidden = hidden + ops.linear(mixed, block.attention.out)

    normed = ops.rms_norm(hidden, block.ffn_norm, config.norm_eps)
    weights = block.feed_forward
    matrices = weights.gate, weights.up, weights.down
    if weights.router is None:
        return hidden + ops.feed_forward(normed, *matrices), kv
    return hidden + ops.experts(normed, weights.router, *matrices, per_token=config.experts_per_token), kv


def _attend_to_cache(
    queries: jax.Array,
    sink_queries: jax.Array | None,
    held: tuple[Any, Any],
    positions: jax.Array,
    lookup: _Lookup,
    *,
    attend: Attend,
    scale: float,
) -> jax.Array:
    """Attention of the new tokens to all that one layer of the cache holds, themselves among it."""
    told = queries, sink_queries, positions[:, None], lookup.key_positions
    if held[0].ndim == 3:  # a single row whose batch axis was dropped
        told = jax.tree.map(lambda x: x[0], told)
    queries, sink_queries, positions, key_positions = told
    options: dict[str, Any] = {"scale": scale, "key_positions": key_positions, "window": lookup.window}
    if sink_queries is None:
        return attend(queries, *held, positions, **options)
    return ops.attention_with_sinks(queries, sink_queries, *held, positions, sinks=lookup.sinks, **options)


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
    check_head(config, params)
    return params.embedding if params.lm_head is None else params.lm_head


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
    check_params(config, params)


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
    if cache.window is not None:
        if cache.sinks + cache.window + new - 1 > cache.capacity:
            raise GenerationError(
                f"{new} tokens at once do not fit into a cache of capacity={cache.capacity} with window={cache.window} and"
                f" sinks={cache.sinks}: at most {cache.capacity - cache.sinks - cache.window + 1} do"
            )
        return
    filled = 0 if isinstance(cache.length, jax.core.Tracer) else int(cache.length.max())
    if filled + new > cache.capacity:
        raise GenerationError(
            f"{new} tokens after {filled} do not fit into a cache of capacity={cache.capacity}; use grow() first"
        )
