"""The forward pass: one body for training, prefill, chunked prefill and decoding."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from llama_jax import ops
from llama_jax.config import LlamaConfig
from llama_jax.errors import ConfigError, MeshError
from llama_jax.model.cache import KVCache, key_positions, slots_of, write
from llama_jax.model.checks import check_arguments, check_head, checked_attention
from llama_jax.model.options import Compute, Layout, Places, identity
from llama_jax.model.params import Block, Llama
from llama_jax.model.remat import rematerialise
from llama_jax.model.rope import scaled_frequencies
from llama_jax.ops.attention import Seen, View
from llama_jax.ops.rotary import Frequencies


def forward(
    config: LlamaConfig,
    params: Llama,
    tokens: jax.Array,
    cache: KVCache | None = None,
    *,
    places: Places = Places(),
    compute: Compute = Compute(),
    layout: Layout = Layout(),
) -> tuple[jax.Array, Any]:
    """Run the layers over `tokens` (Touvron et al. 2023, section 2.2) and return the normalised residual stream.

    Training, prefill, chunked prefill and decoding differ only in `cache` and T. Padding is on the right: a padded token
    comes after all that a real one may see, so it needs no mask, only a length.

    Args:
      tokens: int32[B, T], ids in [0, V). An id outside is not noticed here, unlike in `whole.logits` and `generate`. Nor is
        a position beyond `config.max_seq_len`, which `generate` refuses.
      cache: the keys and values of earlier tokens; None starts at position 0 and keeps nothing. Its form follows that of
        `params.blocks`: a tuple for a tuple, stacked for stacked. No gradient flows through it, not even through the new
        tokens' own keys and values unless it is fresh: leave it out to differentiate.
      places: the positions of the tokens, if they do not just follow those in the cache.
      compute: dtype, rematerialisation, attention.
      layout: over which devices. `constrain` is called with "tokens" [B, T], before the lookup; and with activations
        [B, T, D]: "embedded", after the lookup, "residual", the stream between layers, "normed", the input of the first
        matmuls of attention and feed-forward, and "added", the output of their last ones.

    Returns:
      hidden [B, T, D] in the dtype of the computation, for `unembed` to make logits of; and the cache with the new tokens,
      or None.

    Raises:
      ConfigError: the parameters are not those of the configuration.
      GenerationError: the tokens are not int[B, T], or do not fit into the cache, or its form is not that of the blocks;
        places of another shape, or packed rows together with a cache. Under `jit` the filled length is not known, and only
        tokens that an empty cache could not take are noticed: count as `generate` does.
    """
    with layout.context(), ops.native_beside(params):
        hidden, cache, _ = run(config, params, tokens, cache, Options(places, compute, layout))
    return hidden, cache


class Options(NamedTuple):
    """The arguments of `forward` besides model and tokens."""

    places: Places
    compute: Compute
    layout: Layout


class _Step(NamedTuple):
    """The values that all layers of a pass share.

    Attributes:
      turn: cosine and sine of the new tokens' positions, float32[B, 1, T, 1, H/2].
      seen: which keys each query sees.
      slots: where the new tokens are written, see `slots_of`; None without a cache.
      lengths: int32[B], slots of a row that then hold keys; None without a cache or where slots are a ring.
      sink_turn: as `turn`, of the queries as the sinks see them; None without sinks.
    """

    turn: tuple[jax.Array, jax.Array]
    seen: Seen
    slots: jax.Array | None = None
    lengths: jax.Array | None = None
    sink_turn: tuple[jax.Array, jax.Array] | None = None


def run(
    config: LlamaConfig,
    params: Llama,
    tokens: jax.Array,
    cache: KVCache | None,
    options: Options,
    tap: Callable[..., Any] | None = None,
) -> tuple[jax.Array, Any, Any]:
    """Hidden states, the cache, and what `tap` took from every layer, see `whole.observe`."""
    places, compute, layout = options
    tokens = jnp.asarray(tokens)
    check_arguments(config, params, tokens, cache, places)
    mix = _mixing_of(config, compute, layout, cache)
    step = _step_of(config, tokens, cache, places)
    embedded = ops.look_up(params.embedding, layout.constrain(tokens, "tokens"))
    embedded = embedded.astype(compute.dtype or params.embedding.dtype)
    hidden = layout.constrain(layout.constrain(embedded, "embedded"), "residual")

    def run_layer(block: Block, hidden: jax.Array, buffers: Any, step: _Step, index: jax.Array | None = None) -> Any:
        normed = layout.constrain(ops.rms_norm(hidden, block.attention_norm, config.norm_eps), "normed")
        heads = _project_heads(config, block, normed, step)
        buffers, view = _view_of(cache, buffers, heads, step, index)
        mixed = mix(heads, view, step.seen).swapaxes(1, 2).reshape(*tokens.shape, -1)  # [B, T, N * H]
        after = hidden + layout.constrain(ops.project(mixed, block.attention.out), "added")
        normed = layout.constrain(ops.rms_norm(after, block.ffn_norm, config.norm_eps), "normed")
        after = after + layout.constrain(_feed_forward(config, block, normed), "added")
        after = layout.constrain(after, "residual")
        return after, buffers, None if tap is None else tap(hidden, after, heads.keys, heads.values)

    layer_step: Callable[..., Any] = run_layer
    if compute.remat != "none":
        layer_step = rematerialise(compute.remat, run_layer, stacked=isinstance(params.blocks, Block))
    buffers: Any = None if cache is None else (cache.k, cache.v)
    if isinstance(params.blocks, Block):

        def scan_layer(carry: Any, layer: Any) -> tuple[Any, Any]:
            hidden, buffers, taken = layer_step(layer[0], *carry, step, layer[1])
            return (hidden, buffers), taken

        # The cache is in the carry: as input and output of the scan it would be copied whole at every call.
        (hidden, buffers), taken = lax.scan(scan_layer, (hidden, buffers), (params.blocks, jnp.arange(config.n_layers)))
    else:
        layers: list[Any] = [None] * config.n_layers if cache is None else list(zip(cache.k, cache.v, strict=True))
        each = []
        for i, block in enumerate(params.blocks):
            hidden, layers[i], found = layer_step(block, hidden, layers[i], step)
            each.append(found)
        buffers = None if cache is None else tuple(zip(*layers, strict=True))
        taken = tuple(each)

    hidden = ops.rms_norm(hidden, params.final_norm, config.norm_eps)
    if cache is None:
        return hidden, None, taken
    k, v = buffers
    new = tokens.shape[1] if places.lengths is None else places.lengths
    return hidden, cache.replace(k=k, v=v, length=cache.length + new, fresh=False), taken


def _mixing_of(
    config: LlamaConfig, compute: Compute, layout: Layout, cache: KVCache | None
) -> Callable[[_Heads, View, Seen], jax.Array]:
    """Attention of one layer, [B, K, T, G, H], with all that is the same in every layer bound."""
    if layout.arrange is not identity and (compute.attend is not None or compute.attention != "auto"):
        raise MeshError("over context attention is a ring, and no other; leave attend and attention out")
    attend = layout.attend or ops.attend if compute.attend is None else checked_attention(compute.attend)
    windows = [window for window in (config.window, None if cache is None else cache.window) if window is not None]
    options: dict[str, Any] = {"scale": config.head_dim**-0.5, "window": min(windows, default=None)}

    if compute.attention != "auto":
        if cache is not None and cache.sinks:
            raise ConfigError(f"attention={compute.attention!r}: a cache with sinks is read by blocks, in one way only")
        options["backend"] = compute.attention

    def mix(heads: _Heads, view: View, seen: Seen) -> jax.Array:
        if heads.sink_queries is None or cache is None:
            return attend(heads.queries, view, seen, **options)
        return ops.attend_with_sinks(heads.queries, heads.sink_queries, view, seen, sinks=cache.sinks, **options)

    return mix


def _step_of(config: LlamaConfig, tokens: jax.Array, cache: KVCache | None, places: Places) -> _Step:
    new = tokens.shape[1]
    order = jnp.arange(new, dtype=jnp.int32)
    slots = jnp.broadcast_to(order, tokens.shape) if cache is None else cache.length[:, None] + order
    frequencies: Frequencies = ops.inverse_frequencies(config.head_dim, config.rope_theta)
    attention_factor = 1.0
    if config.rope_scaling is not None:
        frequencies, attention_factor = scaled_frequencies(config, slots, places)

    def turn(positions: jax.Array) -> tuple[jax.Array, jax.Array]:
        cos, sin = ops.rotary_table(positions, frequencies, attention_factor)  # [B, T, H/2]
        return cos[:, None, :, None], sin[:, None, :, None]

    own = turn(slots if places.positions is None else places.positions)
    if cache is None or cache.fresh:
        seen = Seen.whole(new, places.segment_ids)
        return _Step(own, seen) if cache is None else _Step(own, seen, slots_of(cache, new))
    held = key_positions(cache, new)
    sink_turn = None
    if cache.sinks and cache.window is not None:
        # A sink stays as near as the start of the window is: positions within the cache, and not within the text
        # (Xiao et al. 2023, section 3.2). So no distance is ever longer than sinks and window together.
        sink_turn = turn(jnp.minimum(slots, cache.sinks + cache.window - 1))
    if held is None:
        seen = Seen(slots, jnp.arange(cache.capacity, dtype=jnp.int32)[None], by_slot=True)
        return _Step(own, seen, slots_of(cache, new), cache.length + new)
    return _Step(own, Seen(slots, held), slots_of(cache, new), sink_turn=sink_turn)


class _Heads(NamedTuple):
    """Of the new tokens: queries [B, K, T, G, H], also as the sinks see them, keys and values [B, K, T, H]."""

    queries: jax.Array
    sink_queries: jax.Array | None
    keys: jax.Array
    values: jax.Array


def _project_heads(config: LlamaConfig, block: Block, normed: jax.Array, step: _Step) -> _Heads:
    weights = block.attention
    qkv = ops.project(normed, weights.qkv)
    if weights.qkv_bias is not None:
        qkv = qkv + weights.qkv_bias.astype(qkv.dtype)
    qkv = qkv.swapaxes(1, 2)  # [B, K, T, G + 2, H]
    # Split and not indexed: the gradients of the parts are then joined, where those of slices are filled up and added.
    groups = config.queries_per_kv_head
    unturned, values = jnp.split(qkv, [groups + 1], axis=-2)
    if weights.query_norm is not None and weights.key_norm is not None:
        queries, keys = jnp.split(unturned, [groups], axis=-2)
        queries = ops.rms_norm(queries, weights.query_norm, config.norm_eps)
        unturned = jnp.concatenate([queries, ops.rms_norm(keys, weights.key_norm, config.norm_eps)], axis=-2)
    queries, keys = jnp.split(ops.apply_rotary(unturned, *step.turn), [groups], axis=-2)
    sink_queries = None
    if step.sink_turn is not None:
        sink_queries = ops.apply_rotary(unturned[..., :groups, :], *step.sink_turn)
    return _Heads(queries, sink_queries, keys.squeeze(-2), values.squeeze(-2))


def _view_of(
    cache: KVCache | None, buffers: tuple[Any, Any] | None, heads: _Heads, step: _Step, layer: jax.Array | None
) -> tuple[tuple[Any, Any] | None, View]:
    """The buffers of a layer with the new tokens, and what its queries may read."""
    fresh = View.of(heads.keys, heads.values)
    if cache is None or buffers is None or step.slots is None:
        return None, fresh
    buffers = write(buffers[0], heads.keys, step.slots, layer), write(buffers[1], heads.values, step.slots, layer)
    return buffers, fresh if cache.fresh else View(*buffers, layer, step.lengths)


def _feed_forward(config: LlamaConfig, block: Block, normed: jax.Array) -> jax.Array:
    """The feed-forward layer that the block has."""
    weights = block.feed_forward
    matrices = weights.gate, weights.up, weights.down
    if weights.router is None:
        return ops.feed_forward(normed, *matrices)
    return ops.experts(normed, weights.router, *matrices, per_token=config.experts_per_token)


def unembed(config: LlamaConfig, params: Llama, hidden: jax.Array) -> jax.Array:
    """Logits float32[..., V] of the hidden states [..., D] from `forward`.

    Separate from `forward`, so that a prefill projects one position per row onto the vocabulary instead of all of them.

    The output projection may have more rows than the vocabulary, to be divided over devices (`parallel.fit`). They are
    padding: there are as many logits as rows, and those of the padding are -inf, so that nothing ever chooses or counts one.
    """
    wide = jnp.promote_types(hidden.dtype, jnp.float32)
    head = head_of(config, params)
    logits = ops.project(hidden, head, out_dtype=wide)
    if head.shape[0] == config.vocab_size:
        return logits
    return jnp.where(jnp.arange(head.shape[0]) < config.vocab_size, logits, -jnp.inf)


def head_of(config: LlamaConfig, params: Llama) -> jax.Array:
    """The output projection [V, D]: the embedding where the two are tied.

    Raises:
      ConfigError: the parameters have one although they are tied, or none although they are not.
    """
    check_head(config, params)
    return params.embedding if params.lm_head is None else params.lm_head
