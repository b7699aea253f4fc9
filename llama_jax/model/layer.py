"""One layer: norm, grouped-query attention, norm, gated feed-forward (Touvron et al. 2023, section 2.2).

The functions here are the formulas. What they are made of is in `LayerContext`: the operations (`operations.Ops`), how keys
and values are kept (`KeyValues`), and the hooks. For the letters of shapes see `llama_jax.ops`; G counts the query heads of
a key/value head. docs/how_it_works.md lists the files on the way of a token, docs/extending.md where to add what.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from llama_jax.config import LlamaConfig
from llama_jax.model.hooks import HookCaller
from llama_jax.model.operations import Ops
from llama_jax.model.params import Attention, Block, FeedForward
from llama_jax.ops.layers import add_bias, gated_activation


class TokenTables(NamedTuple):
    """What depends on the positions of the tokens, for each layer type, along the first axis.

    Attributes:
      cos, sin: float32[types, B, 1, T, 1, H/2]; of angles of zero for layers without RoPE.
      query_scale: factors of the queries, float32[types, B, 1, T, 1, 1], or None.
    """

    cos: jax.Array
    sin: jax.Array
    query_scale: jax.Array | None = None


class KeyValues(Protocol):
    """How a pass keeps keys and values, and what its queries attend to; see `attention_inputs`."""

    def attend(
        self,
        ctx: LayerContext,
        weights: Attention,
        queries: Float[Array, "B K T G H"],
        keys: Float[Array, "B K T H"],
        values: Float[Array, "B K T H"],
        pages: Any,
    ) -> tuple[Float[Array, "B K T G H"], Any]:
        """What the queries attend to, and the pages of a cache with the new keys and values."""


@dataclass(frozen=True)
class LayerContext:
    """What a layer is given besides its weights and its input.

    Attributes:
      config: the model.
      ops: the operations of this pass.
      constrain: constrains the sharding of an activation at a named point, see `forward`.
      tables: see `TokenTables`.
      kv: how keys and values are kept, and what the queries attend to.
      hooks: calls the hooks at a named point, if any, and collects what they keep in its `kept` while the layer is traced.
      layer: index of the layer: an int, or int32[] in a scan.
      layer_type: index into `config.layer_kinds`: an int, or traced in a scan over layers of several types.
    """

    config: LlamaConfig
    ops: Ops
    constrain: Callable[[jax.Array, str], jax.Array]
    tables: TokenTables
    kv: KeyValues
    hooks: HookCaller
    layer: Any = None
    layer_type: Any = 0


def layer(ctx: LayerContext, block: Block, x: Float[Array, "B T D"], pages: Any) -> tuple[Float[Array, "B T D"], Any]:
    """h = x + attention(norm(x)), then h + feed_forward(norm(h)); and the pages of the cache with the new tokens.

    Args:
      block: the parameters of this layer.
      pages: of all layers, [L, P, page, 2K, H], written at `ctx.layer`; None without a cache.
    """
    x = ctx.hooks("residual_before", x)
    attended, pages = attention(ctx, block.attention, sublayer_input(ctx, x, block.attention_norm), pages)
    h = x + ctx.hooks("attention", residual_update(ctx, attended, block.attention_post_norm))
    h = ctx.hooks("residual_between", h)
    fed = feed_forward(ctx, block.feed_forward, sublayer_input(ctx, h, block.ffn_norm))
    h = h + ctx.hooks("feed_forward", residual_update(ctx, fed, block.ffn_post_norm))
    return ctx.constrain(ctx.hooks("residual_after", h), "residual"), pages


def attention(
    ctx: LayerContext, weights: Attention, x: Float[Array, "B T D"], pages: Any
) -> tuple[Float[Array, "B T D"], Any]:
    """Grouped-query attention (Ainslie et al. 2023, section 2.2), and the pages with the new keys and values.

    softmax(scale * queries @ keys.T, where visible) @ values is in `ops.attend`, or `ops.attend_paged` with a cache, which
    `ctx.kv` calls through `ctx.ops` with the window, or attention chunk, of the layer's type.
    """
    queries, keys, values = split_heads(ctx, weights, ctx.ops.project(x, weights.qkv))
    queries, keys = ctx.hooks.at_queries("queries", queries), ctx.hooks.at_keys("keys", keys)
    values = ctx.hooks.at_keys("values", values)
    heads, pages = ctx.kv.attend(ctx, weights, queries, keys, values, pages)
    heads = ctx.hooks.at_queries("heads", heads).swapaxes(1, 2)  # [B, T, K, G, H]
    out = ctx.ops.project(heads.reshape(*x.shape[:-1], -1), weights.out)
    return add_bias(ctx.constrain(out, "sublayer_output"), weights.out_bias), pages


def split_heads(
    ctx: LayerContext, weights: Attention, qkv: Float[Array, "B T K G_and_2 H"]
) -> tuple[Float[Array, "B K T G H"], Float[Array, "B K T H"], Float[Array, "B K T H"]]:
    """Queries, keys and values from their projection, with bias, norms and RoPE."""
    groups = ctx.config.queries_per_kv_head
    qkv = add_bias(qkv, weights.qkv_bias).swapaxes(1, 2)  # [B, K, T, G + 2, H]
    # `split`, not indexing: its gradient is one concatenation; gradients of slices would be zero-padded and added.
    queries_and_keys, values = jnp.split(qkv, [groups + 1], axis=-2)
    if weights.query_norm is not None:
        queries, keys = jnp.split(queries_and_keys, [groups], axis=-2)
        normed = norm_heads(ctx, queries, weights.query_norm), norm_heads(ctx, keys, weights.key_norm)
        queries_and_keys = jnp.concatenate(normed, axis=-2)
    queries, keys = jnp.split(rotate(ctx, queries_and_keys), [groups], axis=-2)
    if ctx.tables.query_scale is not None:
        queries = (queries * ctx.tables.query_scale[ctx.layer_type]).astype(queries.dtype)
    return queries, keys.squeeze(-2), values.squeeze(-2)


def norm_heads(ctx: LayerContext, x: Float[Array, "B K T heads H"], weight: Any) -> Float[Array, "B K T heads H"]:
    """RMSNorm of each head for a weight [H], of all heads of a token together for a weight [K, G, H]."""
    if weight.ndim == 1:
        return norm(ctx, x, weight, nan_on_overflow=True)
    tokens = x.swapaxes(1, 2)  # [B, T, K, G, H]
    normed = norm(ctx, tokens.reshape(*tokens.shape[:2], -1), weight.reshape(-1), nan_on_overflow=True)
    return normed.reshape(tokens.shape).swapaxes(1, 2)


def rotate(ctx: LayerContext, x: Float[Array, "B K T heads H"]) -> Float[Array, "B K T heads H"]:
    """RoPE of the layer's type (Su et al. 2021, section 3.4.2), and the norm after it in models that have one (Llama 4)."""
    config = ctx.config
    rotated = ctx.ops.rotary(x, ctx.tables.cos[ctx.layer_type], ctx.tables.sin[ctx.layer_type])
    if config.qk_norm == "l2":
        rotated = ctx.ops.norm(rotated, jnp.ones(config.head_dim), config.norm_eps, 0.0, nan_on_overflow=False)
    # Layers without RoPE have angles of zero, with which the built-in rotation changes nothing.
    has_rope = [layer_type.rope != "none" for layer_type in config.layer_kinds]
    if all(has_rope) or (config.qk_norm != "l2" and config.parts.rotary is None):
        return rotated
    return jnp.where(jnp.asarray(has_rope)[ctx.layer_type], rotated, x)


def feed_forward(ctx: LayerContext, weights: FeedForward, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
    """down(activation(gate(x)) * up(x)) (Shazeer 2020, equation 6), or a mixture of experts that each compute this."""
    config, biases = ctx.config, (weights.gate_bias, weights.up_bias)
    if weights.router is not None:
        out = experts(ctx, weights, x)
    elif ctx.hooks.has("neurons"):  # the formula of `ops.feed_forward`, whose neurons no hook could reach
        gate, up = ctx.ops.project(x, weights.gate), ctx.ops.project(x, weights.up)
        neurons = gated_activation(add_bias(gate, biases[0]), add_bias(up, biases[1]), config.activation)
        out = ctx.ops.project(ctx.hooks("neurons", neurons), weights.down)
    else:
        out = ctx.ops.feed_forward(x, weights.gate, weights.up, weights.down, config.activation, biases=biases)
    return add_bias(ctx.constrain(out, "sublayer_output"), weights.down_bias)


def experts(ctx: LayerContext, weights: FeedForward, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
    """The sum of the experts chosen for each token, and of the shared expert."""
    routed = ctx.ops.experts(x, weights.router, weights.gate, weights.up, weights.down)
    if weights.shared_gate is None:
        return routed
    shared = weights.shared_gate, weights.shared_up, weights.shared_down
    return routed + ctx.ops.feed_forward(x, *shared, ctx.config.activation, biases=(None, None))


def sublayer_input(ctx: LayerContext, x: Float[Array, "B T D"], weight: Any) -> Float[Array, "B T D"]:
    """The norm before attention or feed-forward, or `x` in a model without it."""
    return ctx.constrain(x if weight is None else norm(ctx, x, weight), "sublayer_input")


def residual_update(ctx: LayerContext, x: Float[Array, "B T D"], weight: Any) -> Float[Array, "B T D"]:
    """What is added to the residual stream: the norm after attention or feed-forward, in a model that has it, scaled."""
    return scale(x if weight is None else norm(ctx, x, weight, nan_on_overflow=True), ctx.config.residual_multiplier)


def norm(ctx: LayerContext, x: jax.Array, weight: Any, *, nan_on_overflow: bool = False) -> jax.Array:
    """RMSNorm (Zhang & Sennrich 2019, equation 4) over the last axis.

    An overflow before a sublayer persists in the residual stream, where `forward.final_norm` sees it; the other norms check.
    """
    return ctx.ops.norm(x, weight, ctx.config.norm_eps, ctx.config.norm_offset, nan_on_overflow=nan_on_overflow)


def scale(x: jax.Array, factor: float) -> jax.Array:
    """`x` times a number, in the dtype of `x`."""
    return x if factor == 1 else x * jnp.asarray(factor, x.dtype)
