"""The operations of a forward pass, as one record that is selected when the pass is traced."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from llama_jax import ops
from llama_jax.config import LlamaConfig
from llama_jax.errors import ConfigError, MeshError
from llama_jax.model.cache import attend_gathered
from llama_jax.model.forward_options import ComputeOptions, Sharding
from llama_jax.model.params import LlamaParams
from llama_jax.ops import exact
from llama_jax.ops.int8 import smooth_keys
from llama_jax.ops.platform import KernelOptions, kernel_options


class Ops(NamedTuple):
    """The operations that a pass is made of. Kernels, exact forms and a model's own functions replace fields.

    Attributes:
      experts: `ops.moe.mixture_of_experts(x, router, gate, up, down)`.
      embed: `ops.embed(table, tokens)`.
      project: `ops.project(x, weight)`, a matmul with a parameter: an array, or an `ops.layers.Weight` (quantized, LoRA).
      norm: `ops.rms_norm(x, weight, eps, offset, nan_on_overflow=...)`.
      rotary: `ops.apply_rotary(x, cos, sin)`, of the first `rotary_dim` features.
      feed_forward: `ops.feed_forward(x, gate, up, down, activation, biases)`: gate, up, activation and down together, since
        rematerialization spans them.
      attend: `ops.attend(queries, view, mask, scale=..., window=...)`.
      attend_paged: `ops.attend_paged(queries, view, scale=..., window=..., chunk=..., sinks=..., sink_queries=...)`.
      write_pages: `ops.write_paged(pages, keys, values, view)`.
      smooth_keys: `ops.int8.smooth_keys(keys, *queries, bias=..., rotary_dim=...)`, for an int8 cache.
      map_tokens: calls a function of trees with a leading axis of rows: of all at once, or in blocks.
    """

    experts: Callable[..., jax.Array]
    embed: Callable[..., jax.Array] = ops.embed
    project: Callable[..., jax.Array] = ops.project
    norm: Callable[..., jax.Array] = ops.rms_norm
    rotary: Callable[..., jax.Array] = ops.apply_rotary
    feed_forward: Callable[..., jax.Array] = ops.feed_forward
    attend: Callable[..., jax.Array] = ops.attend
    attend_paged: Callable[..., jax.Array] = ops.attend_paged
    write_pages: Callable[..., Any] = ops.write_paged
    smooth_keys: Callable[..., tuple[jax.Array, ...]] = smooth_keys
    map_tokens: Callable[..., Any] = ops.map_all_tokens


def select_ops(
    config: LlamaConfig, params: LlamaParams, compute: ComputeOptions, sharding: Sharding, starts: jax.Array | None = None
) -> Ops:
    """The operations of a pass.

    Args:
      starts: see `Positions`; an exact pass needs them.

    Raises:
      ConfigError: custom functions or an attention backend with an option that would not use them.
      MeshError: likewise, on a mesh with ring attention; that mesh with `forward_mode`.
    """
    # Ragged rows share one page pool and are not sharded by rows; XLA shards the heads. For 8B on eight v5e, this has less
    # than 1.05 times the minimal HBM traffic; a kernel per device has 1.24 times.
    head_sharding = sharding.head_sharding if starts is None else None
    if compute.forward_mode and sharding.attend is not None:
        raise MeshError("forward_mode=True has no ring attention; use a mesh without context")
    options = compute.kernels()._replace(save_cast_weights=compute.remat != "none")
    kernels = kernel_options(params, options)
    pass_ops = Ops(
        experts=partial(_call_experts, config, sharding.experts, kernels),
        project=partial(ops.project, kernels=kernels),
        norm=partial(ops.rms_norm, round_before_weight=config.norm == "pre", kernels=kernels),
        feed_forward=partial(ops.feed_forward, kernels=kernels),
        attend=sharding.attend or partial(ops.attend, head_sharding=head_sharding, forward_mode=kernels.forward_mode),
        attend_paged=partial(ops.attend_paged, head_sharding=head_sharding, kernels=kernels),
        write_pages=partial(ops.write_paged, head_sharding=head_sharding, kernels=kernels),
        smooth_keys=partial(smooth_keys, kernels=kernels),
    )
    if compute.exact:
        count = jnp.asarray(starts)[-1]
        map_tokens = partial(exact.map_all, count)
        pass_ops = pass_ops._replace(
            norm=partial(exact.map_first, count, pass_ops.norm),
            rotary=partial(map_tokens, ops.apply_rotary),
            feed_forward=partial(ops.feed_forward, map_tokens=map_tokens, kernels=kernels),
            smooth_keys=partial(map_tokens, pass_ops.smooth_keys),
            map_tokens=map_tokens,
        )
    pass_ops = _with_parts(pass_ops, config, compute, sharding)
    if config.rotary_dim is not None:
        pass_ops = pass_ops._replace(rotary=partial(_rotate_first, config.rotary_dim, pass_ops.rotary))
    return pass_ops


def _with_parts(pass_ops: Ops, config: LlamaConfig, compute: ComputeOptions, sharding: Sharding) -> Ops:
    """The operations with the requested attention backend, and the model's own functions."""
    parts = config.parts
    if parts.attend is not None or compute.attention != "auto":
        if sharding.attend is not None:
            raise MeshError("a mesh with `context` uses ring attention only; do not set attend or attention")
        attend = partial(pass_ops.attend, backend=compute.attention)
        if parts.attend is not None:
            attend = partial(call_part, "attend", parts.attend)
        pass_ops = pass_ops._replace(attend=attend, attend_paged=partial(attend_gathered, attend))
    if parts.norm is not None:
        pass_ops = pass_ops._replace(norm=partial(_call_norm, parts.norm))
    if parts.rotary is not None:
        pass_ops = pass_ops._replace(rotary=partial(call_part, "rotary", parts.rotary))
    if parts.feed_forward is not None:
        pass_ops = pass_ops._replace(feed_forward=partial(_call_feed_forward, parts.feed_forward))
    return pass_ops


def _rotate_first(rotary_dim: int, rotary: Callable[..., jax.Array], x: jax.Array, *tables: jax.Array) -> jax.Array:
    pairs, rest = jnp.split(x, [rotary_dim], axis=-1)
    return jnp.concatenate([rotary(pairs, *tables), rest], axis=-1)


def call_part(name: str, function: Any, x: jax.Array, *args: Any, **options: Any) -> jax.Array:
    """Call a custom function and check the shape of its result, because swapped axes might go unnoticed."""
    result = function(x, *args, **options)
    returned, expected = (f"{getattr(y, 'dtype', type(y))}{list(getattr(y, 'shape', ()))}" for y in (result, x))
    if returned != expected:
        raise ConfigError(f"{name} gave {returned}; {expected} is needed, the shape and dtype of its first argument")
    return result


def _call_experts(config: LlamaConfig, sharding: Any, kernels: KernelOptions, x: jax.Array, *matrices: Any) -> jax.Array:
    """Call the mixture of experts, which only models with experts import."""
    from llama_jax.ops.moe import Routing, mixture_of_experts

    routing = Routing(config.experts_per_token, config.normalize_expert_weights, config.expert_scores == "sigmoid")
    return mixture_of_experts(x, *matrices, routing=routing, sharding=sharding, kernels=kernels)


def _call_norm(function: Any, x: jax.Array, weight: Any, eps: float, offset: float, *, nan_on_overflow: bool) -> jax.Array:
    """Call a custom norm, which does not know offsets."""
    if offset:
        weight = jnp.asarray(weight).astype(jnp.promote_types(weight.dtype, jnp.float32)) + offset
    return call_part("norm", function, x, weight, eps)


def _call_feed_forward(
    function: Any, x: jax.Array, gate: Any, up: Any, down: Any, activation: str, biases: tuple[Any, Any]
) -> jax.Array:
    """Call a custom feed-forward, which has its own activation and no biases."""
    return call_part("feed_forward", function, x, gate, up, down)
