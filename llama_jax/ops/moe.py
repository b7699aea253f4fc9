"""Mixture of experts: a router selects some feed-forward layers for each token."""

from __future__ import annotations

import math
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int, Int32

from llama_jax.ops.grouped import Gather, grouped_matmul
from llama_jax.ops.layers import Weight, feed_forward, gated_activation, project, remat
from llama_jax.ops.platform import KernelOptions, current_mesh_sizes


class ExpertSharding(NamedTuple):
    """The mesh axes that shard the rows of a batch, and the axes F and D of the experts' matrices."""

    batch: tuple[str, ...] = ()
    hidden: tuple[str, ...] = ()
    dim: tuple[str, ...] = ()


class Routing(NamedTuple):
    """How experts are chosen for a token.

    Attributes:
      per_token: the number of experts chosen, of E.
      normalized: the weights of the chosen experts are the softmax over only their scores, and sum to one. Otherwise they
        come from the softmax over the scores of all E experts.
      scale_inputs: the weights are instead the sigmoids of the scores, and multiply the experts' inputs, not outputs.
    """

    per_token: int
    normalized: bool = True
    scale_inputs: bool = False


def mixture_of_experts(
    x: Float[Array, "*batch D"],
    router: Float[Array, "E D"],
    gate: Any,
    up: Any,
    down: Any,
    *,
    routing: Routing,
    sharding: ExpertSharding | None = None,
    kernels: KernelOptions = KernelOptions(),
) -> Float[Array, "*batch D"]:
    """The weighted sum of the chosen experts, each a gated feed-forward (Jiang et al. 2024, section 2.1).

    Only the chosen experts are computed: the tokens are sorted by expert and multiplied in groups, see `ops.grouped`.

    Args:
      x: [B, T, D] if `sharding` is used.
      gate, up: [E, F, D], arrays or quantized weights.
      down: [E, D, F].
      sharding: how the operands are sharded over the current mesh; each device then sorts its own tokens. On a mesh, all
        experts are computed if it is None or the weights are quantized.
      kernels: see `layers.project`.
    """
    weights, chosen = route(x, router, routing, kernels)
    mesh = {axis: size for axis, size in current_mesh_sizes().items() if size > 1}
    if mesh and (sharding is None or isinstance(gate, Weight)):
        return all_experts(x, weights, chosen, gate, up, down, scale_inputs=routing.scale_inputs, kernels=kernels)
    if routing.scale_inputs:
        x, weights = x[..., None, :] * weights.astype(x.dtype)[..., None], jnp.ones_like(weights)
    if sharding is None or not mesh:
        return _chosen_experts((), kernels, x, weights, chosen, gate, up, down)
    batch, hidden, dim = (tuple(axis for axis in axes if axis in mesh) for axes in sharding)
    if x.shape[0] % math.prod(mesh[axis] for axis in batch):
        batch = ()  # the same rows on all devices
    rows, wide, narrow = P(batch), P(None, hidden, dim), P(None, dim, hidden)

    def share(*arrays: Any) -> jax.Array:
        return _chosen_experts(dim, kernels, *arrays)[None]

    # check_vma=False: `grouped_matmul` does not declare its varying axes. Devices with shards of F return partial sums over
    # F.
    of_devices = (rows, rows, rows, wide, wide, narrow), P(hidden, *rows)
    terms = jax.shard_map(share, in_specs=of_devices[0], out_specs=of_devices[1], check_vma=False)
    return jnp.sum(terms(x, weights, chosen, gate, up, down), axis=0)


def route(
    x: Float[Array, "*batch D"],
    router: Float[Array, "E D"],
    routing: Routing,
    kernels: KernelOptions = KernelOptions(),
) -> tuple[Float[Array, "*batch per_token"], Int32[Array, "*batch per_token"]]:
    """The weights of the experts with the highest scores, in float32 at least, and the indices of these experts."""
    scores = project(x, router, out_dtype=jnp.promote_types(x.dtype, jnp.float32), kernels=kernels)  # [..., E]
    highest, chosen = lax.top_k(scores, routing.per_token)
    if routing.scale_inputs:
        return jax.nn.sigmoid(highest), chosen
    if routing.normalized:
        return jax.nn.softmax(highest, axis=-1), chosen
    return jnp.exp(highest - jax.nn.logsumexp(scores, axis=-1, keepdims=True)), chosen


def _chosen_experts(
    gather: tuple[str, ...],
    kernels: KernelOptions,
    x: jax.Array,
    weights: jax.Array,
    chosen: jax.Array,
    gate: Any,
    up: Any,
    down: Any,
) -> jax.Array:
    """The weighted sum of the experts chosen by `route`; `gather` are the mesh axes that shard the axis D of the matrices.

    Args:
      x: [..., D], or [..., per_token, D] if the inputs of a token's experts differ.
    """
    per_token, dim = chosen.shape[-1], x.shape[-1]
    by_expert = jnp.argsort(chosen.reshape(-1), stable=True)  # [R], R = tokens * per_token
    sizes = jnp.sum(chosen.reshape(-1, 1) == jnp.arange(gate.shape[0]), axis=0, dtype=jnp.int32)
    # Repeated and then permuted, so that gradients are permuted back and summed in order.
    rows = x.reshape(-1, dim)
    rows = jnp.repeat(rows, per_token, axis=0) if x.ndim == chosen.ndim else rows
    rows = rows.at[by_expert].get(unique_indices=True)
    on_last, on_first = (Gather(gather, axis) if gather else None for axis in (2, 1))
    multiply = partial(grouped_matmul, sizes=sizes, kernels=kernels)
    gates, values = (multiply(rows, matrices, gather=on_last) for matrices in (gate, up))  # [R, F]

    def project_gated(gates: jax.Array, values: jax.Array, down: Any, sizes: jax.Array) -> jax.Array:
        return grouped_matmul(gated_activation(gates, values, "silu"), down, sizes, gather=on_first, kernels=kernels)

    results = remat(project_gated, kernels)(gates, values, down, sizes)
    by_token = results.at[jnp.argsort(by_expert)].get(unique_indices=True).reshape(*chosen.shape, dim)
    return jnp.einsum("...e,...ed->...d", weights, by_token.astype(weights.dtype)).astype(x.dtype)


def all_experts(
    x: Float[Array, "*batch D"],
    weights: Float[Array, "*batch per_token"],
    chosen: Int[Array, "*batch per_token"],
    gate: Any,
    up: Any,
    down: Any,
    *,
    scale_inputs: bool = False,
    kernels: KernelOptions = KernelOptions(),
) -> Float[Array, "*batch D"]:
    """The same sum, computing all experts for all tokens, one after the other; unchosen experts have weight zero."""
    chosen_of = jax.nn.one_hot(chosen, gate.shape[0], dtype=x.dtype)  # [..., per_token, E]
    spread = jnp.sum(weights.astype(x.dtype)[..., None] * chosen_of, axis=-2)  # [..., E]

    def add(total: jax.Array, expert: tuple[Any, ...]) -> tuple[jax.Array, None]:
        weight, gate, up, down = expert
        if scale_inputs:  # an input of zeros has an output of zeros
            return total + feed_forward(weight[..., None] * x, gate, up, down, kernels=kernels), None
        return total + weight[..., None] * feed_forward(x, gate, up, down, kernels=kernels), None

    total, _ = lax.scan(add, jnp.zeros_like(x), (jnp.moveaxis(spread, -1, 0), gate, up, down))
    return total
