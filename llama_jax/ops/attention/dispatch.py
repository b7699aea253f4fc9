"""Causal grouped-query attention: `attend`, which calls one of several backends, and `choose_backend`."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Literal, get_args

import jax
import numpy as np
from jaxtyping import Array, Float

from llama_jax.errors import ConfigError
from llama_jax.ops.attention.dense import dense_attention
from llama_jax.ops.attention.mask import AttentionMask, AttentionShape, HeadSharding, KVView
from llama_jax.ops.platform import (
    current_mesh_sizes,
    log_backend,
    lowering_device_kind,
    lowering_platform,
)

AttentionBackend = Literal["auto", "reference", "dense", "blockwise", "cudnn", "splash"]
KERNELS: Mapping[str, AttentionBackend] = {"gpu": "cudnn", "tpu": "splash"}  # by platform
# From this many queries and scores per head, "blockwise" is faster than "dense" and needs less memory
# (experiments/bench_long_context.py).
BLOCKWISE_MIN_QUERIES, BLOCKWISE_MIN_SCORES = 64, 2**20
BLOCKWISE_MIN_QUERIES_16_BIT = 128  # on a CPU, where gradients take 24 ms instead of 39 with "dense"
CUDNN_MIN_CACHE_QUERIES = 17  # cuDNN copies the cache, which takes too long for fewer queries


def attend(
    queries: Float[Array, "B K T G H"],
    view: KVView,
    mask: AttentionMask,
    *,
    scale: float,
    window: int | None = None,
    backend: AttentionBackend = "auto",
    head_sharding: HeadSharding | None = None,
    forward_mode: bool = False,
) -> Float[Array, "B K T G W"]:
    """Attend from each query to the keys at its own and earlier positions (Vaswani et al. 2017, section 3.2.1).

    The G queries of a group share their key/value head (Ainslie et al. 2023, section 2.2): K = N is multi-head, K = 1
    multi-query attention. Keys and values are never repeated in memory; the group is an axis of the matmul.

    Args:
      view: keys and values [B, K, S, H].
      mask: the positions of queries and keys. A query attends only to keys at its own and earlier positions. This comparison
        is the causal mask; it also excludes the empty or padded end of a cache.
      scale: multiplies the scores; `LlamaConfig.score_scale`, usually 1 / sqrt(H).
      window: a query attends only to keys less than this many positions before it (Beltagy et al. 2020, section 3.1).
      backend: "reference" is the textbook formula, for tests; "dense" has all scores in memory, is the fastest for short
        rows and supports every mode of differentiation; "blockwise" uses memory that grows with T + S instead of T * S;
        "cudnn" and "splash" are kernels for GPUs and TPUs. "auto" uses `choose_backend`.
      head_sharding: the axes of the current mesh over which rows and heads are sharded. Without it, no kernel is used on a
        mesh.
      forward_mode: use no kernel, and functions that JAX differentiates in every mode.

    Returns:
      In the dtype of `queries`; softmax in float32 at least. Zeros for a query that attends to no key.

    Raises:
      ConfigError: an unknown backend, or one that does not support these arguments; an empty window; shapes that do not
        match.
    """
    keys, values = view
    _check_shapes(queries, keys, mask, window)
    shapes = AttentionShape(
        queries.shape,
        keys.shape,
        queries.dtype,
        mask.ordered,
        mask.query_segments is not None,
        current_mesh_sizes(),
        head_sharding,
    )
    if forward_mode and backend == "auto":
        name, why = _without_kernel(lowering_platform(), shapes)
    else:
        name, why = choose_backend(lowering_platform(), lowering_device_kind(), shapes, backend)
    log_backend(name, why)
    if name == "dense":
        return dense_attention(queries, keys, values, mask, scale, window)
    if name == "blockwise":
        from llama_jax.ops.attention.blockwise import blockwise

        return blockwise(queries, keys, values, mask, scale, window, forward_mode=forward_mode)
    if name == "reference":
        from llama_jax.ops.attention.reference import reference

        return reference(queries, keys, values, mask, scale=scale, window=window)
    from llama_jax.ops.attention import kernels

    kernel = {"cudnn": kernels.cudnn, "splash": kernels.splash}[name]
    return kernels.over_devices(partial(kernel, scale=scale, window=window), head_sharding)(queries, keys, values, mask)


def choose_backend(
    platform: str, device_kind: str, shapes: AttentionShape, backend: AttentionBackend = "auto"
) -> tuple[AttentionBackend, str]:
    """The backend to use, never "auto", and the reason.

    Args:
      platform: "cpu", "gpu" or "tpu", the platform that the program is traced for.
      device_kind: JAX's name of its devices.
      backend: "auto", or a requested backend.

    Raises:
      ConfigError: an unknown backend, or one that does not support these arguments.
    """
    if backend not in get_args(AttentionBackend):
        raise ConfigError(f"attention backend={backend!r} must be one of {', '.join(get_args(AttentionBackend))}")
    if backend != "auto":
        if backend in KERNELS.values() and (problem := _why_not(backend, platform, device_kind, shapes)):
            raise ConfigError(f"attention backend={backend!r}: {problem}")
        return backend, "as requested"
    fallback, why = _without_kernel(platform, shapes)
    kernel = KERNELS.get(platform)
    if kernel is None:
        return fallback, why
    if shapes.queries[2] < (CUDNN_MIN_CACHE_QUERIES if kernel == "cudnn" and not shapes.ordered else 2):
        return fallback, f"{'a single query' if shapes.queries[2] == 1 else 'few queries'} on {platform}: {why}"
    problem = _why_not(kernel, platform, device_kind, shapes)
    return (fallback, f"{problem}; {why}") if problem else (kernel, f"on {device_kind}")


def _why_not(kernel: AttentionBackend, platform: str, device_kind: str, shapes: AttentionShape) -> str | None:
    """Why a kernel does not support these arguments, or None if it does."""
    from llama_jax.ops.attention import kernels

    why_not = kernels.why_not_cudnn if kernel == "cudnn" else kernels.why_not_splash
    return why_not(platform, device_kind, shapes)


def _without_kernel(platform: str, shapes: AttentionShape) -> tuple[AttentionBackend, str]:
    """The backend to use if there is no kernel, and the reason."""
    num_queries, num_keys = shapes.queries[2], shapes.keys[2]
    if num_queries >= BLOCKWISE_MIN_QUERIES and num_queries * num_keys >= BLOCKWISE_MIN_SCORES:
        return "blockwise", f"{num_queries} x {num_keys} scores"
    is_16_bit = np.dtype(shapes.dtype).itemsize == 2
    if platform == "cpu" and is_16_bit and shapes.ordered and num_queries >= BLOCKWISE_MIN_QUERIES_16_BIT:
        return "blockwise", f"rows of {num_queries} tokens in 16 bits on a CPU"
    return "dense", f"{num_queries} x {num_keys} scores"


def _check_shapes(queries: jax.Array, keys: jax.Array, mask: AttentionMask, window: int | None) -> None:
    """Raise ConfigError for arguments that no backend can compute, or that backends would misinterpret."""
    if window is not None and (not isinstance(window, int) or not 1 <= window < 2**31):
        raise ConfigError(f"window={window!r} must be an integer from 1 (a token sees itself) to 2**31 - 1")
    if queries.ndim != 5 or len(keys.shape) != 4 or queries.shape[:2] != keys.shape[:2]:
        raise ConfigError(
            f"queries {list(queries.shape)} and keys {list(keys.shape)} must be [B, K, T, G, H] and [B, K, S, H]"
        )
    if not queries.size or 0 in keys.shape:
        raise ConfigError(f"queries {list(queries.shape)} and keys {list(keys.shape)} must not be empty")
    if (mask.query_segments is None) != (mask.key_segments is None):
        raise ConfigError("segments must be set for both queries and keys, or for neither")
    batch, new, slots = queries.shape[0], queries.shape[2], keys.shape[2]
    for what, x, length in (
        ("query_positions", mask.query_positions, new),
        ("key_positions", mask.key_positions, slots),
        ("query_segments", mask.query_segments, new),
        ("key_segments", mask.key_segments, slots),
    ):
        if x is not None and tuple(x.shape) not in ((batch, length), (1, length)):
            raise ConfigError(f"{what} are {list(x.shape)}; [{batch}, {length}] or [1, {length}] is needed")
    if mask.ordered and new != slots:
        raise ConfigError(f"ordered rows must have as many queries as keys, not {new} and {slots}")
