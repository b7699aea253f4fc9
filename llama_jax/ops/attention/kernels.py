"""Attention by the kernels of others: cuDNN's for NVIDIA GPUs and JAX's own "splash" kernel for TPUs."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from llama_jax.ops.attention.seen import OldSeen as Seen

LANES = 128  # a TPU kernel's blocks are multiples of it


def cudnn_refuses(queries: jax.Array, seen: Seen, ordered: bool, device: jax.Device) -> str | None:
    """Why `cudnn` cannot compute this, or None where it can."""
    head_dim = queries.shape[-1]
    if "NVIDIA" not in device.device_kind:
        return f"cudnn needs an NVIDIA GPU, this is {device.device_kind}"
    if float(getattr(device, "compute_capability", 0)) < 8:
        return f"cudnn's attention needs compute capability 8.0, {device.device_kind} has {device.compute_capability}"
    if queries.dtype not in (jnp.bfloat16, jnp.float16):
        return f"cudnn computes in bfloat16 or float16, not in {queries.dtype}"
    if queries.ndim != 5 or not ordered:
        return "cudnn has whole rows only: query t at slot t, with a batch axis"
    if seen.query_segments is not None:
        return "cudnn has no segments"
    if head_dim % 8 or head_dim > 128:
        return f"cudnn has heads of at most 128 features, a multiple of 8; these have {head_dim}"
    return None


def cudnn(queries: jax.Array, keys: jax.Array, values: jax.Array, *, scale: float, window: int | None = None) -> jax.Array:
    """Arguments and result as for `attention` with whole rows, by `jax.nn.dot_product_attention`."""
    batch, heads, new, groups, width = queries.shape
    mixed = jax.nn.dot_product_attention(
        queries.swapaxes(1, 2).reshape(batch, new, heads * groups, width),
        keys.swapaxes(1, 2),
        values.swapaxes(1, 2),
        scale=scale,
        is_causal=True,
        local_window_size=None if window is None else (window - 1, 0),
        implementation="cudnn",
    )
    return mixed.reshape(batch, new, heads, groups, width).swapaxes(1, 2)


def splash_refuses(queries: jax.Array, ordered: bool, device: jax.Device) -> str | None:
    """Why `splash` cannot compute this, or None where it can."""
    new, head_dim = queries.shape[-3], queries.shape[-1]
    if device.platform != "tpu":
        return f"splash needs a TPU, this is {device.device_kind}"
    if queries.ndim != 5 or not ordered:
        return "splash has whole rows only: query t at slot t, with a batch axis"
    if new % LANES or head_dim % 64:
        return f"splash has rows in multiples of {LANES} and heads in multiples of 64; these are {new} and {head_dim}"
    if jax.device_count() > 1 and not jax.sharding.get_abstract_mesh().manual_axes:
        return "splash is a kernel of one device: XLA cannot divide it over several outside shard_map"
    return None


def splash(
    queries: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    seen: Seen,
    *,
    scale: float,
    window: int | None = None,
    interpret: bool = False,
) -> jax.Array:
    """Arguments and result as for `attention` with whole rows; `interpret` runs the kernel without a TPU, slowly."""
    # Imported here: importing Pallas takes a second, which who has no TPU should not wait.
    from jax.experimental.pallas.ops.tpu import splash_attention as kernels

    batch, _, new, groups, _ = queries.shape
    square = new, new
    mask = kernels.CausalMask(square) if window is None else kernels.LocalMask(square, (window - 1, 0), 0)
    side = next(size for size in (512, 256, LANES) if new % size == 0)
    kernel = kernels.make_splash_mqa_single_device(
        kernels.MultiHeadMask([mask] * groups),
        block_sizes=kernels.BlockSizes(
            block_q=side,
            block_kv=side,
            block_kv_compute=side,
            block_q_dkv=side,
            block_kv_dkv=side,
            block_kv_dkv_compute=side,
            block_q_dq=side,
            block_kv_dq=side,
        ),
        interpret=interpret,
    )
    segments = None
    if seen.query_segments is not None and seen.key_segments is not None:
        rows = (jnp.broadcast_to(x.reshape(-1, new), (batch, new)) for x in (seen.query_segments, seen.key_segments))
        segments = kernels.SegmentIds(*rows)
    over_heads = jax.vmap(kernel, in_axes=(0, 0, 0, None))  # queries [G, T, H], keys and values [T, H]
    by_group = (queries * scale).astype(queries.dtype).swapaxes(2, 3)
    mixed = jax.vmap(over_heads)(by_group, keys, values, segments)
    return mixed.swapaxes(2, 3).astype(queries.dtype)
