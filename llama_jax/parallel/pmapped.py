"""Data parallelism by `jax.pmap`: every device has the whole state and its share of the rows.

It runs the same `train_step` that `jax.jit` runs, told by `axis_name` to sum over the devices. JAX keeps `pmap` but develops
it no further; `parallel.specs` does the same with data=N, and more.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from llama_jax.errors import MeshError
from llama_jax.training.batch import Batch
from llama_jax.training.step import TrainState

AXIS = "data"
Tree = TypeVar("Tree")
Metrics = dict[str, jax.Array]


def replicate(tree: Tree, devices: Sequence[jax.Device]) -> Tree:
    """A copy of every array on every device, each array as one with the sharding P() over `devices`.

    The originals stay: a plain `jax.device_put` would share the first device's memory with them, and donating its result
    would delete them too.
    """
    everywhere = NamedSharding(_mesh(devices), P())
    copy = jax.jit(jnp.copy)
    # One array after the other, so that there is one array twice at a time and not all of them.
    return jax.tree.map(lambda array: jax.block_until_ready(copy(jax.device_put(array, everywhere))), tree)


def pmap_step(
    step: Callable[..., tuple[TrainState, Metrics]], devices: Sequence[jax.Device]
) -> Callable[[TrainState, Batch], tuple[TrainState, Metrics]]:
    """`train_step` on all devices at once, each with its share of the rows; the state is donated.

    Must not be called inside `jax.set_mesh` of another mesh, which JAX refuses.

    Args:
      step: `train_step` with all arguments bound but the state, the batch and `axis_name`, which is given here: what a
        step forgets to sum would otherwise differ from device to device, and nothing would notice.
      devices: of this process.

    Returns:
      A function of a state that `replicate` made, or that the function itself returned, and a batch of B rows in all.
      It gives the next state and the metrics of all rows, both as ordinary arrays with the sharding P().

    Raises:
      MeshError: several processes; rows that cannot be divided by the number of devices, or a state that does not lie on
        these devices (from the returned function).
    """
    if jax.process_count() > 1:
        raise MeshError(f"pmap runs in one process, this is one of {jax.process_count()}; use the backend jit")
    everywhere, shares = (NamedSharding(_mesh(devices), spec) for spec in (P(), P(AXIS)))
    mapped = jax.pmap(
        partial(step, axis_name=AXIS),
        axis_name=AXIS,
        in_axes=(None, 0),
        out_axes=None,
        devices=devices,
        donate_argnums=0,
    )

    def run(state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        for leaf in jax.tree.leaves(state):
            if not everywhere.is_equivalent_to(leaf.sharding, leaf.ndim):
                raise MeshError(f"a state on {leaf.sharding} is not on all {len(devices)} devices; replicate it first")
        return mapped(state, jax.device_put(_split(batch, len(devices)), shares))

    return run


def _mesh(devices: Sequence[jax.Device]) -> Mesh:
    return Mesh(np.array(devices), (AXIS,), axis_types=(AxisType.Auto,))


def _split(batch: Batch, devices: int) -> Batch:
    """[B, ...] as [devices, B / devices, ...], neighbouring rows on one device."""
    rows = len(batch.tokens)
    if rows % devices:
        raise MeshError(f"batch={rows} rows cannot be divided over {devices} devices; use a multiple of {devices}")
    return jax.tree.map(lambda part: part.reshape(devices, rows // devices, *part.shape[1:]), batch)
