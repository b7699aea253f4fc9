"""A recipe as compiled functions over devices: the only place where a run knows how it is spread."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from llama_jax.model.forward import unconstrained
from llama_jax.model.params import Llama, init, stack
from llama_jax.parallel.mesh import MeshSizes, make_mesh
from llama_jax.parallel.pmapped import pmap_step, replicate
from llama_jax.parallel.specs import batch_spec, constrain_over, shardings, train_state_specs
from llama_jax.runs.errors import TrainingError
from llama_jax.runs.evaluate import Measure, token_nats
from llama_jax.runs.recipe import Recipe
from llama_jax.training.batch import Batch
from llama_jax.training.optimizer import make_optimizer
from llama_jax.training.step import TrainState, init_state, train_step

Backend = Literal["jit", "pmap"]
Metrics = dict[str, jax.Array]


@dataclass(frozen=True)
class Program:
    """What the loop calls.

    Attributes:
      step: a state, which is donated, and a placed batch to the next state and the step's metrics.
      place: this host's rows onto its devices.
      start: the state before the first step, from random parameters or from given ones.
      shapes: of the state, with shardings, for `Snapshots.restore`.
      adopt: makes a restored state one that `step` takes.
      measure: for `evaluate`.
      devices: how many.
      description: of the devices, in words.
      compile_seconds: of `step`.
    """

    step: Callable[[TrainState, Batch], tuple[TrainState, Metrics]]
    place: Callable[[Batch], Batch]
    start: Callable[[Llama | None], TrainState]
    shapes: TrainState
    adopt: Callable[[TrainState], TrainState]
    measure: Measure
    devices: int
    description: str
    compile_seconds: float


def make_program(recipe: Recipe, sizes: MeshSizes, backend: Backend) -> Program:
    """Compile the step of a recipe: by `jax.jit` over a mesh, or by `jax.pmap` over `sizes.data` devices.

    Raises:
      MeshError: devices, a model or a batch that do not fit together.
      TrainingError: a mesh that pmap cannot have.
    """
    return _pmap_program(recipe, sizes) if backend == "pmap" else _jit_program(recipe, sizes)


def _step(recipe: Recipe, **more: Any) -> Callable[..., tuple[TrainState, Metrics]]:
    return partial(
        train_step,
        recipe.model,
        make_optimizer(recipe.optimizer, recipe.steps),
        dtype=recipe.dtype,
        remat=recipe.remat,
        chunk=recipe.chunk,
        accumulate=recipe.accumulate,
        z_loss=recipe.z_loss,
        clip_norm=recipe.optimizer.clip_norm,
        ema_decay=recipe.ema_decay,
        **more,
    )


def _start(recipe: Recipe, params: Llama) -> TrainState:
    return init_state(make_optimizer(recipe.optimizer, recipe.steps), params, ema=recipe.ema_decay > 0)


def _random(recipe: Recipe) -> TrainState:
    return _start(recipe, init(recipe.model, jax.random.key(recipe.seed)))


def _batch_shapes(recipe: Recipe, sharding: NamedSharding) -> Batch:
    rows = jax.ShapeDtypeStruct((recipe.batch, recipe.length + 1), jnp.int32, sharding=sharding)
    return Batch(rows, rows, rows)


def _jit_program(recipe: Recipe, sizes: MeshSizes) -> Program:
    mesh = make_mesh(sizes)
    optimizer = make_optimizer(recipe.optimizer, recipe.steps)
    placement = shardings(mesh, train_state_specs(recipe.model, sizes, optimizer, ema=recipe.ema_decay > 0))
    rows = NamedSharding(mesh, batch_spec(sizes, recipe.batch // recipe.accumulate))
    whole = NamedSharding(mesh, P())
    constrain = constrain_over(mesh) if sizes.devices > 1 else unconstrained
    # Nothing is ever whole on one device: the state is born where it stays.
    shapes = jax.tree.map(
        lambda leaf, place: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place),
        jax.eval_shape(partial(_random, recipe)),
        placement,
    )
    jitted = jax.jit(_step(recipe, constrain=constrain), donate_argnums=0, out_shardings=(placement, whole))
    began = time.perf_counter()
    compiled = jitted.lower(shapes, _batch_shapes(recipe, rows)).compile()

    def start(params: Llama | None) -> TrainState:
        if params is None:
            return jax.jit(partial(_random, recipe), out_shardings=placement)()
        return jax.jit(lambda params: _start(recipe, stack(params)), out_shardings=placement)(params)

    return Program(
        step=compiled,
        place=lambda batch: jax.tree.map(partial(jax.make_array_from_process_local_data, rows), batch),
        start=start,
        shapes=shapes,
        adopt=lambda state: state,
        measure=_measure(recipe),
        devices=sizes.devices,
        description=f"mesh {sizes}" if sizes.devices > 1 else "one device",
        compile_seconds=time.perf_counter() - began,
    )


def _pmap_program(recipe: Recipe, sizes: MeshSizes) -> Program:
    if sizes.devices != sizes.data:
        raise TrainingError(f"pmap copies the whole model to every device and cannot have mesh {sizes}; use the backend jit")
    make_mesh(sizes)  # says where there are too few devices
    devices = jax.devices()[: sizes.devices]
    share = recipe.batch // sizes.data
    if recipe.batch % sizes.data or share % recipe.accumulate:
        raise TrainingError(
            f"batch={recipe.batch} must be a multiple of data={sizes.data} times accumulate={recipe.accumulate}"
        )
    everywhere = replicate(jnp.zeros(()), devices).sharding
    shapes = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=everywhere),
        jax.eval_shape(partial(_random, recipe)),
    )
    began = time.perf_counter()

    def start(params: Llama | None) -> TrainState:
        make = partial(_random, recipe) if params is None else lambda: _start(recipe, stack(params))
        return replicate(jax.jit(make)(), devices)

    return Program(
        step=pmap_step(_step(recipe), devices),
        place=lambda batch: batch,  # `pmap_step` divides it
        start=start,
        shapes=shapes,
        adopt=lambda state: replicate(state, devices),
        measure=_measure(recipe),
        devices=len(devices),
        description=f"pmap over {len(devices)} devices",
        compile_seconds=time.perf_counter() - began,
    )


def _measure(recipe: Recipe) -> Measure:
    return jax.jit(partial(token_nats, recipe.model, dtype=recipe.dtype))


def host_rows(recipe: Recipe) -> tuple[int, int]:
    """This host's number and how many there are: which rows of a batch it reads."""
    hosts = jax.process_count()
    if recipe.batch % hosts:
        raise TrainingError(f"batch={recipe.batch} must be a multiple of the {hosts} processes")
    return jax.process_index(), hosts


def on_one_device(params: Llama) -> Llama:
    """The parameters together on this process's first device, for generating samples."""
    device = jax.local_devices()[0]
    return jax.tree.map(lambda a: jax.device_put(np.asarray(a) if len(a.devices()) > 1 else a, device), params)
