"""Attention by kernels of other libraries, and their limits: cuDNN's for NVIDIA GPUs and JAX's own "splash" for TPUs.

Both are called by interfaces that JAX documents and keeps. Compared for packed rows on a GPU, by the CUDA compiler for an
H100 with jax 0.10.2, bfloat16, value and gradients, MiB of temporaries:

    rows x tokens, heads of width                 4 x 2,048, 32/4 of 64    1 x 8,192, 32/8 of 128    1 x 32,768, 32/8 of 128
    cuDNN, whole rows (no segments: the floor)                       73                       161                        644
    cuDNN, segments as a mask                                       137                       417                      4,740
    the same in 4 blocks of queries (8 from 16,384)                  86                       208                      1,104
    `pallas.ops.gpu.attention.mha` (Triton)                         192                       384                          -
    XLA, by blocks                                                  130                       259                      1,028

Pallas' Triton backend is deprecated since jax 0.11, and `mha` wants keys and values repeated for every query of a group.
cuDNN's packed layout is private in JAX and asks the process for a Hopper device while it is traced. tokamax (0.0.12) is a
dependency with six of its own. A kernel for Mosaic GPU runs on Hopper and later only; none was there to test it.
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

WIDEST = 128  # features of a head that cuDNN has
NO_CUDNN = ("P100", "V100", "T4", "GTX", "Quadro RTX", "TITAN")  # older than compute capability 8.0
# Blocks of queries for which cuDNN is given a mask: the least queries of one, and how many of rows and of long rows.
LEAST_MASKED_QUERIES, MASKED_BLOCKS = 512, 4
LONG_ROWS, MASKED_BLOCKS_OF_LONG_ROWS = 16_384, 8
Kernel = Callable[[jax.Array, jax.Array, jax.Array, AttentionMask], jax.Array]


def refusal_of_cudnn(platform: str, device_kind: str, problem: AttentionShape) -> str | None:
    """Why cuDNN cannot compute this, or None where it can."""
    (*_, new, _, width), slots = problem.queries, problem.keys[2]
    if platform != "gpu" or not device_kind.startswith(("NVIDIA", "Tesla")):
        return f"cudnn needs an NVIDIA GPU, this is {device_kind}"
    if any(name in device_kind for name in NO_CUDNN):
        return f"cudnn's attention needs compute capability 8.0, which {device_kind} does not have"
    if problem.dtype not in (jnp.bfloat16, jnp.float16):
        return f"cudnn computes in bfloat16 or float16, not in {np.dtype(problem.dtype)}"
    if width % 8 or width > WIDEST:
        return f"cudnn has heads of at most {WIDEST} features, a multiple of 8; these have {width}"
    masked = problem.segments or not problem.ordered
    if masked and (new % 2 or slots % 2):
        return f"cudnn has a mask for even numbers of queries and keys only, not for {new} x {slots}"
    return _refusal_of_division("cudnn", problem)


def refusal_of_splash(platform: str, device_kind: str, problem: AttentionShape) -> str | None:
    """Why splash cannot compute this, or None where it can."""
    *_, new, _, width = problem.queries
    if platform != "tpu":
        return f"splash needs a TPU, this is {device_kind}"
    if not problem.ordered:
        return "splash has whole rows only: query t at slot t"
    if new % TPU_LANES or width % 64:
        return f"splash has rows in multiples of {TPU_LANES} and heads in multiples of 64; these are {new} and {width}"
    return _refusal_of_division("splash", problem)


def _refusal_of_division(kernel: str, problem: AttentionShape) -> str | None:
    """XLA divides no kernel: each device must have whole rows and heads of its own."""
    mesh, head_sharding = problem.mesh or {}, problem.head_sharding
    if math.prod(mesh.values()) == 1:
        return None
    if head_sharding is None:
        return f"{kernel} is a kernel of one device, and no division of rows and heads over the mesh is given"
    for what, size, axes in (
        ("rows", problem.queries[0], head_sharding.mesh_axes_of_rows),
        ("key/value heads", problem.queries[1], head_sharding.mesh_axes_of_heads),
    ):
        parts = math.prod(mesh[axis] for axis in axes)
        if size % parts:
            return f"{kernel} is a kernel of one device, and {size} {what} cannot be cut over {'*'.join(axes)}={parts}"
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
    """Arguments and result as for `attend`, by `jax.nn.dot_product_attention`.

    Segments, and positions other than those of whole rows, are passed to cuDNN as a mask. Whole rows are then computed in
    blocks of queries, which avoids most of the mask, and the scores after a block.
    """
    if mask.ordered and mask.query_segments is None:
        local = None if window is None else (window - 1, 0)
        return _dot_product_attention(queries, keys, values, scale, is_causal=True, local_window_size=local)
    new, slots = queries.shape[2], keys.shape[2]
    count = (
        min(MASKED_BLOCKS_OF_LONG_ROWS if new >= LONG_ROWS else MASKED_BLOCKS, max(new // LEAST_MASKED_QUERIES, 1))
        if mask.ordered
        else 1
    )
    blocks = []
    for begin, end in itertools.pairwise(2 * (new * i // (2 * count)) for i in range(count + 1)):
        first = max(begin - window + 1, 0) // 2 * 2 if mask.ordered and window is not None else 0
        last = end if mask.ordered else slots
        allowed = visible(mask.part(slice(begin, end), slice(first, last)), window)
        attended = _dot_product_attention(
            queries[:, :, begin:end], keys[:, :, first:last], values[:, :, first:last], scale, mask=allowed[:, None]
        )
        if not mask.ordered:  # of a query that sees nothing cuDNN gives the mean of all values
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
    """Arguments and result as for `attend` with whole rows; `interpret` runs the kernel without a TPU, slowly."""
    # Imported here: importing Pallas takes a second, which is only for those with a TPU.
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
    """The same kernel, each device computing its own rows and heads, if the current mesh cuts them.

    XLA cannot divide a kernel, so it runs in a `jax.shard_map` over the current mesh, without communication.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if head_sharding is None or mesh.empty or mesh.size == 1 or mesh.manual_axes:
        return kernel

    def run(queries: jax.Array, keys: jax.Array, values: jax.Array, mask: AttentionMask) -> jax.Array:
        rows = head_sharding.mesh_axes_of_rows or None
        heads = P(rows, head_sharding.mesh_axes_of_heads or None)
        mask_spec = jax.tree.map(lambda x: P(rows if len(x) == len(queries) > 1 else None), mask)
        # Not checked: a kernel does not say over which axes its results differ.
        mapped = jax.shard_map(kernel, in_specs=(heads, heads, heads, mask_spec), out_specs=heads, check_vma=False)
        return mapped(queries, keys, values, mask)

    return run
