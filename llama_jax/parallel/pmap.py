"""Data parallelism with `jax.pmap`: every device has a replica of the state, and an equal share of the rows.

It runs the same `train_step` as `jax.jit`, with an `axis_name` to sum over the devices, and the same prefill and decode
loop. JAX keeps `pmap` but no longer develops it; `parallel.sharding` does the same with data=N, and more.

Limitations: a model must fit into a single device's memory (unlike with `fsdp` and `tensor` of a mesh); all devices have the
same number of rows, at least one; only one process is supported; and calls inside `jax.set_mesh` of another mesh fail. A
generation is one program per prompt shape and length: its tokens arrive together at the end and cannot be streamed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from llama_jax.config import LlamaConfig
from llama_jax.errors import MeshError
from llama_jax.inference.compiled_decode import checked_chunk, round_capacity
from llama_jax.inference.decode import STEPS_PER_CHUNK
from llama_jax.inference.generate import Generation, to_generations
from llama_jax.inference.prepare_inputs import prepare_inputs
from llama_jax.inference.sampling import Sampling
from llama_jax.inference.single_program import complete
from llama_jax.model.forward_options import Sharding
from llama_jax.model.params import LlamaParams
from llama_jax.parallel.mesh import check_divisible
from llama_jax.training.batch import Batch
from llama_jax.training.step import TrainState

PMAP_AXIS = "data"
Tree = TypeVar("Tree")


def pmap_replicate(tree: Tree, devices: Sequence[jax.Device]) -> Tree:
    """A copy of every array on every device: a tree of arrays of the same shapes, with the sharding P() over `devices`.

    The originals stay valid. With plain `jax.device_put`, the result would share the first device's memory with them, and
    donating it would delete them.
    """
    replicated = NamedSharding(_mesh(devices), P())
    copy = jax.jit(jnp.copy)
    # One array at a time, so that only one array is in memory twice.
    return jax.tree.map(lambda array: jax.block_until_ready(copy(jax.device_put(array, replicated))), tree)


def pmap_step(
    step: Callable[..., tuple[TrainState, dict[str, jax.Array]]], devices: Sequence[jax.Device]
) -> Callable[[TrainState, Batch], tuple[TrainState, dict[str, jax.Array]]]:
    """`train_step` on all devices at once, each with its share of the rows; the state is donated.

    Must not be called inside `jax.set_mesh` of another mesh, which JAX rejects.

    Args:
      step: `train_step` with all arguments bound except the state, the batch and the sharding. The sharding is set here:
        without its `axis_name`, gradients would not be summed, and the replicas would silently differ.
      devices: devices of this process.

    Returns:
      A function of a state from `pmap_replicate` or from the function itself, and a `Batch` of B rows in total, int32[B, T +
      1]: each device computes B / len(devices) of them. It returns the next state, with arrays of the usual shapes, and the
      metrics of all rows, float32[] each, both with the sharding P().

    Raises:
      MeshError: several processes; rows that cannot be divided by the number of devices, or a state that is not on these
        devices (from the returned function).
    """
    replicated, split = _replicated_and_split(devices)
    mapped = pmap_over(step, devices)

    def run(state: TrainState, batch: Batch) -> tuple[TrainState, dict[str, jax.Array]]:
        _check_replicated("a state", state, replicated)
        return mapped(state, jax.device_put(_split_rows(batch, len(batch.tokens), len(devices)), split))

    return run


def pmap_over(step: Callable[..., tuple[TrainState, dict[str, jax.Array]]], devices: Sequence[jax.Device]) -> Any:
    """The `jax.pmap` of a step over devices, a function of the state and of rows [devices, B / devices, ...]."""
    return jax.pmap(
        partial(step, sharding=Sharding(axis_name=PMAP_AXIS)),
        axis_name=PMAP_AXIS,
        in_axes=(None, 0),
        out_axes=None,
        devices=devices,
        donate_argnums=0,
    )


def pmap_generate(config: LlamaConfig, devices: Sequence[jax.Device]) -> Callable[..., list[Generation]]:
    """`generate` on all devices at once, each with its share of the prompts; ends when the last device does.

    Args:
      devices: devices of this process.

    Returns:
      A function of parameters from `pmap_replicate`, and of prompts, `max_new_tokens`, `sampling` and `stop_tokens` as in
      `generate`. The number of prompts must be a multiple of the number of devices; the cache keeps all tokens, in the
      parameters' dtype. It returns a `Generation` for each prompt, with the same tokens as `generate`.

    Raises:
      MeshError: several processes; prompts that cannot be divided by the number of devices, or parameters that are not on
        these devices (from the returned function).
      GenerationError: as for `generate` (from the returned function).
    """
    replicated, split = _replicated_and_split(devices)
    mapped = jax.pmap(
        complete,
        axis_name=PMAP_AXIS,
        in_axes=(None, None, None, 0, 0, 0),
        static_broadcasted_argnums=(0, 1),
        devices=devices,
    )

    def run(
        params: LlamaParams,
        prompts: Sequence[Sequence[int]],
        *,
        max_new_tokens: int | Sequence[int],
        sampling: Sampling = Sampling(),
        stop_tokens: Sequence[int] = (),
    ) -> list[Generation]:
        _check_replicated("parameters", params, replicated)
        tokens, lengths, request = prepare_inputs(config, prompts, max_new_tokens, sampling, stop_tokens)
        capacity = round_capacity(int(lengths.max()), int(request.limit.max()) + STEPS_PER_CHUNK)
        rows = _split_rows((tokens, lengths, request), len(tokens), len(devices))
        parts = mapped(config, capacity, params, *jax.device_put(rows, split))
        chunk = checked_chunk(*(np.asarray(part).reshape(len(prompts), -1) for part in parts))
        return to_generations([chunk], stop_tokens)

    return run


def _mesh(devices: Sequence[jax.Device]) -> Mesh:
    return Mesh(np.array(devices), (PMAP_AXIS,), axis_types=(AxisType.Auto,))


def _replicated_and_split(devices: Sequence[jax.Device]) -> tuple[NamedSharding, NamedSharding]:
    """The shardings of arrays with a copy on every device, and of arrays whose leading axis is split over the devices."""
    if jax.process_count() > 1:
        raise MeshError(f"pmap needs a single process, but this is one of {jax.process_count()}; use the backend jit")
    mesh = _mesh(devices)
    return NamedSharding(mesh, P()), NamedSharding(mesh, P(PMAP_AXIS))


def _check_replicated(what: str, tree: Any, replicated: NamedSharding) -> None:
    for leaf in jax.tree.leaves(tree):
        if not replicated.is_equivalent_to(leaf.sharding, leaf.ndim):
            count = replicated.num_devices
            raise MeshError(f"{what} on {leaf.sharding} is not on all {count} devices; replicate it first")


def _split_rows(batch: Tree, rows: int, devices: int) -> Tree:
    """[B, ...] as [devices, B / devices, ...], with neighboring rows on one device."""
    check_divisible("batch", rows, "devices", devices)
    return jax.tree.map(lambda part: part.reshape(devices, rows // devices, *part.shape[1:]), batch)
