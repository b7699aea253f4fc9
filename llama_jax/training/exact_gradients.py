"""Gradients that do not depend on the mesh, bit for bit: `StepOptions.virtual_shards`.

The order of sums in a compiled program depends on the shapes of its arrays, and so on the number of devices. Here a batch is
divided into a fixed number of virtual shards. A device computes the gradients of its shards one after the other, in a loop
with the same body on arrays of the same shapes, whether it has one shard or all. All sums over shards use one binary tree:
neighbors first, then pairs of neighbors. The lower part of the tree is summed on each device, the upper part across devices.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int, Shaped

from llama_jax.config.validation import require_positive_int
from llama_jax.errors import ConfigError, MeshError, TrainingError
from llama_jax.model.forward_options import Sharding
from llama_jax.model.params import Llama

VIRTUAL_SHARDS = 8  # default of exact recipes
Differentiate = Callable[
    [Llama, Any, jax.Array], tuple[Any, Llama]
]  # (params, rows, divisor) -> (sums to report, gradients)


def check_virtual_shards(shards: int) -> None:
    """Raise ConfigError for a number of virtual shards that is not a power of two."""
    require_positive_int("virtual_shards", shards)
    if shards & (shards - 1):
        raise ConfigError(f"virtual_shards={shards} must be a power of two, such as 8")


def check_exact_mesh(mesh: Mapping[str, int], shards: int) -> None:
    """Raise MeshError if the virtual shards cannot be divided evenly over the devices of a mesh (axis sizes by name)."""
    within = ", ".join(f"{axis}={mesh[axis]}" for axis in ("context", "tensor") if mesh.get(axis, 1) > 1)
    if within:
        raise MeshError(f"exact training divides rows, but {within} divides sums within a row; use data and fsdp")
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
    wanted = os.environ.get("PJRT_NPROC") or os.environ.get("NPROC") or str(_cores())
    threads = max(int(wanted), jax.local_device_count())
    if threads != exact_threads(shards):
        raise TrainingError(
            f"XLA has {threads} threads here, but exact training on this CPU needs {exact_threads(shards)} on every mesh;"
            f" set PJRT_NPROC={exact_threads(shards)} before JAX starts, with at most virtual_shards={shards} devices"
        )


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def exact_gradients(
    differentiate: Differentiate,
    count: Callable[[Any], jax.Array],
    params: Llama,
    batch: Any,
    shards: int,
    sharding: Sharding,
    step: Int[Array, ""],
) -> tuple[Any, Llama, Float[Array, ""], Float[Array, ""]]:
    """The sums to report, the gradients, the divisor, and the Euclidean norm of the gradients, over all devices.

    Meanwhile every device holds all parameters, and log2(n) + 2 copies of their gradients for n virtual shards per device.

    Args:
      differentiate: a function of the parameters, the rows of a virtual shard, and the divisor of its sums, on one device.
      count: maps rows to their part of the divisor.
      batch: B rows; under `jax.pmap`, those of this device.
      shards: number of virtual shards, a power of two.
      sharding: its mesh or `axis_name` determines the devices.
      step: at least 0.

    Raises:
      ConfigError: rows that cannot be divided into `shards`.
      MeshError: as `check_exact_mesh`.
    """
    mesh, axis_name = sharding.mesh, sharding.axis_name
    sizes = {axis_name: lax.axis_size(axis_name)} if axis_name is not None else {} if mesh is None else dict(mesh.shape)
    check_exact_mesh(sizes, shards)
    devices = math.prod(sizes.values())
    is_mapped = axis_name is not None
    rows = jax.tree.leaves(batch)[0].shape[0] * (devices if is_mapped else 1)
    if rows % shards:
        raise ConfigError(f"a batch of {rows} rows cannot be divided into virtual_shards={shards}; pass a multiple of it")
    axes = tuple(sizes) if devices > 1 else ()
    on_device = partial(_on_device, differentiate, count, shards, axes)
    if not is_mapped and devices > 1:
        # Devices have whole parameters: with a part of a matrix, XLA would compute partial sums.
        on_device = jax.shard_map(on_device, mesh=mesh, in_specs=(P(), P(axes), P()), out_specs=P(), check_vma=False)
    return on_device(params, batch, step)


def _on_device(
    differentiate: Differentiate,
    count: Callable[[Any], jax.Array],
    shards: int,
    axes: tuple[str, ...],
    params: Llama,
    batch: Any,
    step: jax.Array,
) -> tuple[Any, Llama, jax.Array, jax.Array]:
    """The computation of `exact_gradients` on each device along the axes, given its rows."""
    own = shards // math.prod(map(lax.axis_size, axes))
    parts = jax.tree.map(lambda x: x.reshape(own, x.shape[0] // own, *x.shape[1:]), batch)
    # The compiler would specialize a loop with one iteration. It does not know that no step is negative.
    unknown_zero = jnp.minimum(step, 0)

    def total(function: Callable[[Any], Any]) -> Any:
        """The sum of a function of rows over all virtual shards."""
        here = _tree_sum(lambda i: function(_at(parts, i)), own, own + unknown_zero)
        return jax.tree.map(partial(_sum_over_devices, axes), here) if axes else here

    divisor = total(count)
    reported, gradients = total(lambda rows: differentiate(params, rows, divisor))
    slices = jax.tree.map(lambda x: _equal_parts(x, shards), gradients)
    squares = _tree_sum(lambda i: _sum_of_squares(_at(slices, i)), shards, shards + unknown_zero)
    return reported, gradients, divisor, jnp.sqrt(squares)


def _tree_sum(compute: Callable[[jax.Array], Any], count: int, turns: jax.Array) -> Any:
    """compute(0) + compute(1) + ... of 2**n trees of arrays, in a binary tree: neighbors first; n + 1 sums are kept.

    Args:
      turns: int32[], equal to `count`, but unknown at compile time.
    """
    levels = count.bit_length() - 1
    empty = jax.tree.map(lambda x: jnp.zeros((levels + 1, *x.shape), x.dtype), jax.eval_shape(compute, jnp.int32(0)))

    def add(i: jax.Array, sums: Any) -> Any:
        # A binary counter: the number of trailing ones of i is the number of sums to combine with this one. They are added
        # in a loop, because a sum compiled together with the preceding product would be rounded once instead of twice.
        level = lax.population_count(i & ~(i + 1))
        part = lax.fori_loop(0, level, lambda k, part: jax.tree.map(jnp.add, _at(sums, k), part), compute(i))
        return jax.tree.map(lambda kept, x: lax.dynamic_update_index_in_dim(kept, x, level, 0), sums, part)

    return jax.tree.map(lambda kept: kept[levels], lax.fori_loop(0, turns, add, empty))


def _at(tree: Any, i: jax.Array) -> Any:
    return jax.tree.map(lambda x: lax.dynamic_index_in_dim(x, i, keepdims=False), tree)


def _equal_parts(x: Shaped[Array, " ..."], count: int) -> Shaped[Array, "{count} size"]:
    """The values of an array in equal parts; the last may be padded with zeros."""
    return jnp.pad(x.reshape(-1), (0, -x.size % count)).reshape(count, -1)


def _sum_over_devices(axes: tuple[str, ...], x: jax.Array) -> jax.Array:
    """The sum of an array over devices, on all devices: the upper part of the tree. Each device sums an equal part."""
    parts = lax.all_to_all(_equal_parts(x, math.prod(map(lax.axis_size, axes))), axes, 0, 0)
    while len(parts) > 1:
        parts = parts[::2] + parts[1::2]
    return lax.all_gather(parts[0], axes, tiled=True)[: x.size].reshape(x.shape)


def _sum_of_squares(tree: Any) -> jax.Array:
    """The sum of squares, in float32 at least: 16-bit squares would overflow or underflow."""
    wide = [leaf.astype(jnp.promote_types(leaf.dtype, jnp.float32)) for leaf in jax.tree.leaves(tree)]
    return sum(jnp.sum(jnp.square(leaf)) for leaf in wide)  # type: ignore[return-value]  # a sum of arrays
