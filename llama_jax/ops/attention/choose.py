"""Which way of computing attention is taken, and why: a pure function of what is asked for."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np

from llama_jax.errors import ConfigError

Backend = Literal["auto", "reference", "rows", "blockwise", "cudnn", "splash"]
# From so many scores per head on, blocks are faster than whole rows, and from so many queries on
# (experiments/bench_long_context.py); memory is a reason of its own.
MANY_SCORES, MANY_QUERIES = 2**20, 64
MANY_QUANTIZED = 4096  # slots from which on values are better converted block by block
SHORT_ROWS_OF_16_BITS = 128  # tokens from which on XLA for CPU computes gradients faster by blocks, 24 ms where rows take 39
LANES, KERNEL_WIDTH = 128, 128
NO_CUDNN = ("P100", "V100", "T4", "GTX", "Quadro RTX", "TITAN")  # older than compute capability 8.0


@dataclass(frozen=True)
class Division:
    """Over which axes of the mesh in force the rows of a batch and the key/value heads are cut."""

    mesh_axes_of_rows: tuple[str, ...] = ()
    mesh_axes_of_heads: tuple[str, ...] = ()


@dataclass(frozen=True)
class Problem:
    """What attention is asked for, as far as the choice depends on it.

    Attributes:
      queries, keys: their shapes, [B, K, T, G, H] and [B, K, S, H], over all devices.
      dtype: of the queries.
      ordered, segments: of `Seen`.
      quantized: keys or values are.
      mesh: names and sizes of the mesh in force where XLA divides the program over it; empty for one device, and for what
        runs per device already.
      division: of rows and heads over it, or None where that is not known.
    """

    queries: tuple[int, ...]
    keys: tuple[int, ...]
    dtype: Any
    ordered: bool = True
    segments: bool = False
    quantized: bool = False
    mesh: Mapping[str, int] | None = None
    division: Division | None = None


def choose(platform: str, device_kind: str, problem: Problem, backend: str = "auto") -> tuple[Backend, str]:
    """The backend to take, never "auto", and the reason.

    Args:
      platform: "cpu", "gpu" or "tpu", of the devices that the program is made for.
      device_kind: their name, as JAX has it.
      backend: "auto", or a wish.

    Raises:
      ConfigError: a wish that does not exist, or cannot be fulfilled.
    """
    if backend not in get_args(Backend):
        raise ConfigError(f"attention backend={backend!r} must be one of {', '.join(get_args(Backend))}")
    if problem.quantized and backend not in ("auto", "rows", "blockwise"):
        raise ConfigError(f"attention backend={backend!r} reads no quantized keys and values; rows and blockwise do")
    if backend in ("reference", "rows", "blockwise"):
        return backend, "as asked for"  # type: ignore[return-value]
    refusals = {"cudnn": refusal_of_cudnn, "splash": refusal_of_splash}
    if backend in refusals:
        if refusal := refusals[backend](platform, device_kind, problem):
            raise ConfigError(f"attention backend={backend!r}: {refusal}")
        return backend, "as asked for"  # type: ignore[return-value]
    plain, why = _without_kernel(platform, problem)
    kernel: Backend | None = {"gpu": "cudnn", "tpu": "splash"}.get(platform)  # type: ignore[assignment]
    if kernel is None:
        return plain, why
    if problem.queries[2] == 1:
        return plain, f"a single query on {platform}: {why}"
    refusal = refusals[kernel](platform, device_kind, problem)
    return (plain, f"{refusal}; {why}") if refusal else (kernel, f"on {device_kind}")


def _without_kernel(platform: str, problem: Problem) -> tuple[Backend, str]:
    new, slots = problem.queries[2], problem.keys[2]
    if problem.quantized and slots >= MANY_QUANTIZED:
        return "blockwise", f"{slots} quantized slots"
    if new >= MANY_QUERIES and new * slots >= MANY_SCORES:
        return "blockwise", f"{new} x {slots} scores"
    if platform == "cpu" and np.dtype(problem.dtype).itemsize == 2 and problem.ordered and new >= SHORT_ROWS_OF_16_BITS:
        return "blockwise", f"rows of {new} tokens in 16 bits on a CPU"
    return "rows", f"{new} x {slots} scores"


def refusal_of_cudnn(platform: str, device_kind: str, problem: Problem) -> str | None:
    """Why cuDNN cannot compute this, or None where it can."""
    (*_, new, _, width), slots = problem.queries, problem.keys[2]
    if platform != "gpu" or not device_kind.startswith(("NVIDIA", "Tesla")):
        return f"cudnn needs an NVIDIA GPU, this is {device_kind}"
    if any(name in device_kind for name in NO_CUDNN):
        return f"cudnn's attention needs compute capability 8.0, which {device_kind} has not"
    if problem.dtype not in (jnp.bfloat16, jnp.float16):
        return f"cudnn computes in bfloat16 or float16, not in {np.dtype(problem.dtype)}"
    if problem.quantized:
        return "cudnn reads no quantized keys and values"
    if width % 8 or width > KERNEL_WIDTH:
        return f"cudnn has heads of at most {KERNEL_WIDTH} features, a multiple of 8; these have {width}"
    masked = problem.segments or not problem.ordered
    if masked and (new % 2 or slots % 2):
        return f"cudnn has a mask for even numbers of queries and keys only, not for {new} x {slots}"
    return _refusal_of_division("cudnn", problem)


def refusal_of_splash(platform: str, device_kind: str, problem: Problem) -> str | None:
    """Why splash cannot compute this, or None where it can."""
    *_, new, _, width = problem.queries
    if platform != "tpu":
        return f"splash needs a TPU, this is {device_kind}"
    if not problem.ordered or problem.quantized:
        return "splash has whole rows only: query t at slot t, keys that are not quantized"
    if new % LANES or width % 64:
        return f"splash has rows in multiples of {LANES} and heads in multiples of 64; these are {new} and {width}"
    return _refusal_of_division("splash", problem)


def _refusal_of_division(kernel: str, problem: Problem) -> str | None:
    """XLA divides no kernel: each device must have whole rows and heads of its own."""
    mesh, division = problem.mesh or {}, problem.division
    if math.prod(mesh.values()) == 1:
        return None
    if division is None:
        return f"{kernel} is a kernel of one device, and how rows and heads are cut over the mesh is not said"
    for what, size, axes in (
        ("rows", problem.queries[0], division.mesh_axes_of_rows),
        ("key/value heads", problem.queries[1], division.mesh_axes_of_heads),
    ):
        parts = math.prod(mesh[axis] for axis in axes)
        if size % parts:
            return f"{kernel} is a kernel of one device, and {size} {what} cannot be cut over {'*'.join(axes)}={parts}"
    return None


def mesh_in_force() -> dict[str, int]:
    """Names and sizes of the mesh over which XLA divides what is traced now; empty within `shard_map`, for one device."""
    mesh = jax.sharding.get_abstract_mesh()
    return {} if mesh.empty or mesh.manual_axes else dict(mesh.shape)
