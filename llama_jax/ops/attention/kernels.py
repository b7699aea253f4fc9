"""Attention kernels of other libraries, and their limits: cuDNN's for NVIDIA GPUs and JAX's "splash" for TPUs.

Both are called through public JAX APIs. The alternatives for GPUs, and their memory, are in docs/notes/long_context.md.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float

from llama_jax.ops.attention.dense import ATTENTION_OUTPUT
from llama_jax.ops.attention.mask import AttentionMask, AttentionShape, HeadSharding, visible
from llama_jax.ops.platform import TPU_LANES

MAX_CUDNN_HEAD_DIM = 128
NO_CUDNN = ("P100", "V100", "T4", "GTX", "Quadro RTX", "TITAN")  # older than compute capability 8.0
# With a mask, cuDNN is called for blocks of queries: minimum queries per block, maximum blocks per row and per long row.
MIN_MASKED_QUERIES, MASKED_BLOCKS = 512, 4
LONG_ROWS, MASKED_BLOCKS_OF_LONG_ROWS = 16_384, 8
Kernel = Callable[[jax.Array, jax.Array, jax.Array, AttentionMask], jax.Array]


def why_not_cudnn(platform: str, device_kind: str, shapes: AttentionShape) -> str | None:
    """Why cuDNN cannot compute this, or None if it can."""
    (*_, new, _, width), slots = shapes.queries, shapes.keys[2]
    if platform != "gpu" or not device_kind.startswith(("NVIDIA", "Tesla")):
        return f"cudnn needs an NVIDIA GPU, this is {device_kind}"
    if any(name in device_kind for name in NO_CUDNN):
        return f"cudnn's attention needs compute capability 8.0, which {device_kind} does not have"
    if shapes.dtype not in (jnp.bfloat16, jnp.float16):
        return f"cudnn computes in bfloat16 or float16, not in {np.dtype(shapes.dtype)}"
    if width % 8 or width > MAX_CUDNN_HEAD_DIM:
        return f"cudnn needs heads of at most {MAX_CUDNN_HEAD_DIM} features, a multiple of 8; these have {width}"
    masked = shapes.segments or not shapes.ordered
    if masked and (new % 2 or slots % 2):
        return f"cudnn's mask needs even numbers of queries and keys, not {new} x {slots}"
    return _why_not_sharded("cudnn", shapes)


def why_not_splash(platform: str, device_kind: str, shapes: AttentionShape) -> str | None:
    """Why splash cannot compute this, or None if it can."""
    *_, new, _, width = shapes.queries
    if platform != "tpu":
        return f"splash needs a TPU, this is {device_kind}"
    if not shapes.ordered:
        return "splash supports whole rows only, with query t at slot t"
    if new % TPU_LANES or width % 64:
        return f"splash needs rows in multiples of {TPU_LANES} and heads in multiples of 64; these are {new} and {width}"
    return _why_not_sharded("splash", shapes)


def _why_not_sharded(kernel: str, shapes: AttentionShape) -> str | None:
    """Why a kernel cannot be sharded, or None: XLA does not partition kernels, so each device needs whole rows and heads."""
    mesh, head_sharding = shapes.mesh or {}, shapes.head_sharding
    if math.prod(mesh.values()) == 1:
        return None
    if head_sharding is None:
        return f"{kernel} runs on one device, and no sharding of rows and heads over the mesh is given"
    for what, size, axes in (
        ("rows", shapes.queries[0], head_sharding.mesh_axes_of_rows),
        ("key/value heads", shapes.queries[1], head_sharding.mesh_axes_of_heads),
    ):
        parts = math.prod(mesh[axis] for axis in axes)
        if size % parts:
            return f"{kernel} runs on one device, and {size} {what} cannot be sharded over {'*'.join(axes)}={parts}"
    return None


def cudnn(
    queries: Float[Array, "B K T G H"],
    keys: Float[Array, "B K S H"],
    values: Float[Array, "B K S W"],
    mask: AttentionMask,
    *,
    scale: float,
    window: int | None = None,
) -> Float[Array, "B K T G W"]:
    """Arguments and result as for `attend`, computed by `jax.nn.dot_product_attention`.

    Segments, and positions other than those of causal rows, are passed to cuDNN as a mask. Causal rows with segments are
    computed in blocks of queries, so that only the mask of visible keys is materialized and later keys are skipped.
    """
    if mask.ordered and mask.query_segments is None:
        local = None if window is None else (window - 1, 0)
        return _dot_product_attention(queries, keys, values, scale, is_causal=True, local_window_size=local)
    new, slots = queries.shape[2], keys.shape[2]
    count = (
        min(MASKED_BLOCKS_OF_LONG_ROWS if new >= LONG_ROWS else MASKED_BLOCKS, max(new // MIN_MASKED_QUERIES, 1))
        if mask.ordered
        else 1
    )
    blocks = []
    for begin, end in itertools.pairwise(2 * (new * i // (2 * count)) for i in range(count + 1)):
        first = max(begin - window + 1, 0) // 2 * 2 if mask.ordered and window is not None else 0
        last = end if mask.ordered else slots
        allowed = visible(mask.sliced(slice(begin, end), slice(first, last)), window)
        attended = _dot_product_attention(
            queries[:, :, begin:end], keys[:, :, first:last], values[:, :, first:last], scale, mask=allowed[:, None]
        )
        if not mask.ordered:  # for a query that sees nothing cuDNN returns the mean of all values
            attended = jnp.where(jnp.any(allowed, axis=-1)[:, None, :, None, None], attended, 0)
        blocks.append(attended)
    return jnp.concatenate(blocks, axis=2)


def _dot_product_attention(
    queries: jax.Array, keys: jax.Array, values: jax.Array, scale: float, **options: Any
) -> jax.Array:
    batch, heads, new, groups, width = queries.shape
    attended = jax.nn.dot_product_attention(
        queries.swapaxes(1, 2).reshape(batch, new, heads * groups, width),
        keys.swapaxes(1, 2),
        values.swapaxes(1, 2),
        scale=scale,
        implementation="cudnn",
        **options,
    )
    return attended.reshape(batch, new, heads, groups, width).swapaxes(1, 2)


def splash(
    queries: Float[Array, "B K T G H"],
    keys: Float[Array, "B K S H"],
    values: Float[Array, "B K S W"],
    mask: AttentionMask,
    *,
    scale: float,
    window: int | None = None,
    interpret: bool = False,
) -> Float[Array, "B K T G W"]:
    """Arguments and result as for `attend` with causal rows; `interpret` runs the kernel without a TPU, slowly."""
    # Imported here: importing Pallas takes a second.
    from jax.experimental.pallas.ops.tpu import splash_attention as kernels

    batch, _, new, groups, _ = queries.shape
    square = new, new
    causal = kernels.CausalMask(square) if window is None else kernels.LocalMask(square, (window - 1, 0), 0)
    side = next(size for size in (512, 256, TPU_LANES) if new % size == 0)
    kernel = kernels.make_splash_mqa_single_device(
        kernels.MultiHeadMask([causal] * groups),
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
        residual_checkpoint_name=ATTENTION_OUTPUT,
        interpret=interpret,
    )
    segments = None
    if mask.query_segments is not None and mask.key_segments is not None:
        segments = kernels.SegmentIds(*(jnp.broadcast_to(x, (batch, new)) for x in (mask.query_segments, mask.key_segments)))
    over_heads = jax.vmap(kernel, in_axes=(0, 0, 0, None))  # queries [G, T, H], keys and values [T, H]
    by_group = (queries * scale).astype(queries.dtype).swapaxes(2, 3)
    attended = jax.vmap(over_heads)(by_group, keys, values, segments)
    return attended.swapaxes(2, 3).astype(queries.dtype)


def over_devices(kernel: Kernel, head_sharding: HeadSharding | None) -> Kernel:
    """The same kernel on a mesh: each device computes its own rows and heads.

    XLA cannot partition a kernel, so it runs in a `jax.shard_map` over the current mesh, without communication.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if head_sharding is None or mesh.empty or mesh.size == 1 or mesh.manual_axes:
        return kernel

    def run(queries: jax.Array, keys: jax.Array, values: jax.Array, mask: AttentionMask) -> jax.Array:
        rows = head_sharding.mesh_axes_of_rows or None
        heads = P(rows, head_sharding.mesh_axes_of_heads or None)
        mask_spec = jax.tree.map(lambda x: P(rows if len(x) == len(queries) > 1 else None), mask)
        # check_vma=False: a kernel does not declare the varying axes of its results.
        mapped = jax.shard_map(kernel, in_specs=(heads, heads, heads, mask_spec), out_specs=heads, check_vma=False)
        return mapped(queries, keys, values, mask)

    return run
