"""Gradients that are bit-identical on every mesh: `StepOptions.virtual_shards`.

The order of sums in a compiled program depends on the shapes of its arrays, and so on the number of devices. Here a batch is
divided into a fixed number of virtual shards. A device computes the gradients of its shards one after the other, in a loop
with the same body on arrays of the same shapes, whether it has one shard or all. All sums over shards use one binary tree:
neighbors first, then pairs of neighbors. The lower levels of the tree are summed on each device, the upper levels across
devices.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int, Shaped

from llama_jax.errors import ConfigError, MeshError, TrainingError
from llama_jax.model.forward_options import Sharding
from llama_jax.model.params import LlamaParams
from llama_jax.settings import PositiveInt, check_value

VIRTUAL_SHARDS = 8  # default of exact recipes
GradFn = Callable[[LlamaParams, Any, jax.Array], tuple[Any, LlamaParams]]  # (params, rows, divisor) -> (metrics, gradients)


def check_virtual_shards(shards: int) -> None:
    """Raise ConfigError for a number of virtual shards that is not a power of two."""
    check_value("virtual_shards", shards, PositiveInt, ConfigError)
    if shards & (shards - 1):
        raise ConfigError(f"virtual_shards={shards} must be a power of two, such as 8")


def check_exact_mesh(mesh: Mapping[str, int], shards: int) -> None:
    """Raise MeshError if the virtual shards cannot be divided evenly over the devices of a mesh (axis sizes by name)."""
    unsupported = ", ".join(f"{axis}={mesh[axis]}" for axis in ("context", "tensor") if mesh.get(axis, 1) > 1)
    if unsupported:
        raise MeshError(f"exact training divides rows, but {unsupported} divides sums within a row; use data and fsdp")
    devices = math.prod(mesh.values())
    if shards % devices:
        raise MeshError(
            f"virtual_shards={shards} cannot be divided over {devices} devices; use a power of two up to {shards}, or"
            " begin the run with more virtual shards"
        )


def exact_threads(shards: int) -> int:
    """Threads that XLA must have for exact training on CPUs: one per core, or one per virtual shard if that is more.

    Its matmuls divide their sums by the number of threads, which otherwise depends on the number of simulated devices.
    """
    return max(_cores(), shards)


def check_exact_threads(shards: int) -> None:
    """Raise TrainingError if, on CPUs, XLA's number of threads in this process is not `exact_threads`."""
    if jax.default_backend() != "cpu":
        return
    threads = _xla_threads()
    if threads != exact_threads(shards):
        raise TrainingError(
            f"XLA has {threads} threads here, but exact training on this CPU needs {exact_threads(shards)} on every mesh;"
            f" set PJRT_NPROC={exact_threads(shards)} before JAX starts, with at most virtual_shards={shards} devices"
        )


def _xla_threads() -> int:
    """Threads of XLA's matmuls on CPUs: those that run, since a variable may have been set after JAX started; without /proc,
    those that the environment asks for."""
    names = [task.read_text().strip() for task in Path("/proc/self/task").glob("*/comm")]
    if running := sum(name.startswith("tf_XLAEigen") for name in names):
        return running
    requested = os.environ.get("PJRT_NPROC") or os.environ.get("NPROC") or ""
    return max(int(requested) if requested.isdecimal() else _cores(), jax.local_device_count())


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def exact_gradients(
    grad_fn: GradFn,
    count: Callable[[Any], jax.Array],
    params: LlamaParams,
    batch: Any,
    shards: int,
    sharding: Sharding,
    step: Int[Array, ""],
) -> tuple[Any, LlamaParams, Float[Array, ""], Float[Array, ""]]:
    """The metrics, the gradients, the divisor, and the global norm of the gradients, over all devices.

    Each device gathers all parameters, and holds log2(n) + 2 copies of their gradients for its n virtual shards.

    Args:
      grad_fn: metrics and gradients, given the parameters, the rows of one virtual shard, and the divisor; on one device.
      count: maps rows to their part of the divisor.
      batch: B rows; under `jax.pmap`, those of this device.
      shards: number of virtual shards, a power of two.
      sharding: its mesh or `axis_name` determines the devices.
      step: `TrainState.step`, a number at least 0 that is unknown at compile time.

    Raises:
      ConfigError: rows that cannot be divided into `shards`.
      MeshError: as `check_exact_mesh`.
    """
    mesh, axis_name = sharding.mesh, sharding.axis_name
    is_mapped = axis_name is not None
    sizes = {axis_name: lax.axis_size(axis_name)} if axis_name is not None else {} if mesh is None else dict(mesh.shape)
    check_exact_mesh(sizes, shards)
    devices = math.prod(sizes.values())
    rows = jax.tree.leaves(batch)[0].shape[0] * (devices if is_mapped else 1)
    if rows % shards:
        raise ConfigError(f"a batch of {rows} rows cannot be divided into virtual_shards={shards}; pass a multiple of it")
    axes = tuple(sizes) if devices > 1 else ()
    per_device = partial(_per_device_gradients, grad_fn, count, shards, axes)
    if not is_mapped and devices > 1:
        # The parameters are gathered, P(): with a shard of a matrix, XLA would compute partial sums.
        per_device = jax.shard_map(per_device, mesh=mesh, in_specs=(P(), P(axes), P()), out_specs=P(), check_vma=False)
    return per_device(params, batch, step)


def _per_device_gradients(
    grad_fn: GradFn,
    count: Callable[[Any], jax.Array],
    shards: int,
    axes: tuple[str, ...],
    params: LlamaParams,
    batch: Any,
    step: jax.Array,
) -> tuple[Any, LlamaParams, jax.Array, jax.Array]:
    """The results of `exact_gradients`, computed on each device along the axes from its rows."""
    shards_per_device = shards // math.prod(map(lax.axis_size, axes))
    sharded = jax.tree.map(lambda x: x.reshape(shards_per_device, x.shape[0] // shards_per_device, *x.shape[1:]), batch)
    # The compiler would specialize a loop with one iteration. It does not know that no step is negative.
    unknown_zero = jnp.minimum(step, 0)

    def sum_over_shards(function: Callable[[Any], Any]) -> Any:
        """The sum of a function of rows over all virtual shards of all devices."""
        local_sum = _tree_sum(
            lambda i: function(_index_leading(sharded, i)), shards_per_device, shards_per_device + unknown_zero
        )
        return jax.tree.map(partial(_sum_over_devices, axes), local_sum) if axes else local_sum

    divisor = sum_over_shards(count)
    metrics, gradients = sum_over_shards(lambda rows: grad_fn(params, rows, divisor))
    slices = jax.tree.map(lambda x: _equal_parts(x, shards), gradients)
    sum_of_squares = _tree_sum(lambda i: _sum_of_squares(_index_leading(slices, i)), shards, shards + unknown_zero)
    return metrics, gradients, divisor, jnp.sqrt(sum_of_squares)


def _tree_sum(compute: Callable[[jax.Array], Any], count: int, iterations: jax.Array) -> Any:
    """compute(0) + ... + compute(count - 1), pytrees of arrays, summed in a binary tree: neighbors first.

    Partial sums of at most n + 1 levels are in memory, for a `count` of 2**n.

    Args:
      iterations: int32[], equal to `count`, but unknown at compile time.
    """
    levels = count.bit_length() - 1
    zeros = jax.tree.map(lambda x: jnp.zeros((levels + 1, *x.shape), x.dtype), jax.eval_shape(compute, jnp.int32(0)))

    def add(i: jax.Array, sums: Any) -> Any:
        # A binary counter: the number of trailing ones of i is the number of sums to combine with this one. They are added
        # in a loop, because a sum compiled together with the preceding product would be rounded once instead of twice.
        level = lax.population_count(i & ~(i + 1))
        add_level = lambda k, subtree: jax.tree.map(jnp.add, _index_leading(sums, k), subtree)
        subtree = lax.fori_loop(0, level, add_level, compute(i))
        return jax.tree.map(lambda stored, x: lax.dynamic_update_index_in_dim(stored, x, level, 0), sums, subtree)

    return jax.tree.map(lambda sums: sums[levels], lax.fori_loop(0, iterations, add, zeros))


def _index_leading(tree: Any, i: jax.Array) -> Any:
    """Entry i of the leading axis of every array."""
    return jax.tree.map(lambda x: lax.dynamic_index_in_dim(x, i, keepdims=False), tree)


def _equal_parts(x: Shaped[Array, " ..."], count: int) -> Shaped[Array, "{count} size"]:
    """The values of an array in `count` equal parts, zero-padded at the end."""
    return jnp.pad(x.reshape(-1), (0, -x.size % count)).reshape(count, -1)


def _sum_over_devices(axes: tuple[str, ...], x: jax.Array) -> jax.Array:
    """The sum of an array over devices, on all devices: the upper levels of the tree.

    A reduce-scatter in tree order (`all_to_all`, then sums on each device), followed by an all-gather.
    """
    parts = lax.all_to_all(_equal_parts(x, math.prod(map(lax.axis_size, axes))), axes, 0, 0)
    while len(parts) > 1:
        parts = parts[::2] + parts[1::2]
    return lax.all_gather(parts[0], axes, tiled=True)[: x.size].reshape(x.shape)


def _sum_of_squares(tree: Any) -> jax.Array:
    """The sum of squares, in float32 at least: 16-bit squares would overflow or underflow."""
    in_float32 = [leaf.astype(jnp.promote_types(leaf.dtype, jnp.float32)) for leaf in jax.tree.leaves(tree)]
    return sum(jnp.sum(jnp.square(leaf)) for leaf in in_float32)  # type: ignore[return-value]  # a sum of arrays
