"""A recipe as compiled functions over devices: the only place where a run knows how it is sharded."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from llama_jax.errors import MeshError, TrainingError
from llama_jax.model.forward_options import Sharding, identity
from llama_jax.model.lora import adapted, init_adapters, precompute_dora_scale, with_base
from llama_jax.model.params import Llama
from llama_jax.model.trees import init
from llama_jax.ops.attention import record_backends
from llama_jax.parallel.mesh import MeshSizes, make_mesh
from llama_jax.parallel.padding import padded_shapes_config
from llama_jax.parallel.pmap import pmap_step, replicate
from llama_jax.parallel.sharding import (
    batch_spec,
    evaluation_sharding,
    param_specs,
    shardings,
    train_state_specs,
    training_sharding,
)
from llama_jax.runs.recipe import Recipe
from llama_jax.runs.tasks.interface import Backend, FrozenModels, Objective, StepMetrics, TrainingProgram, compute_of
from llama_jax.training.exact_gradients import check_exact_mesh, check_exact_threads
from llama_jax.training.loss import LossOptions
from llama_jax.training.optimizer import make_optimizer
from llama_jax.training.step import StepOptions, TrainState, init_state, train_step


def make_program(
    recipe: Recipe, objective: Objective, sizes: MeshSizes, backend: Backend, base: Llama | None = None
) -> TrainingProgram:
    """Compile the step of a recipe: by `jax.jit` over a mesh, or by `jax.pmap` over `sizes.data` devices.

    Args:
      objective: the loss, and the models that it reads; pmap supports only one without `prepare` and `frozen`.
      base: the frozen model of a recipe that trains adapters, sharded by `param_specs`.

    Raises:
      MeshError: devices, a model or a batch that do not fit together, or a process without devices in the mesh.
      TrainingError: a mesh that pmap does not support.
    """
    check_mesh(recipe, sizes, backend)
    if backend == "pmap":
        return _pmap_program(recipe, objective, sizes)
    return _jit_program(recipe, objective, sizes, base)


def _step(
    recipe: Recipe, objective: Objective, frozen: FrozenModels, step: Callable[..., tuple[TrainState, StepMetrics]]
) -> Callable[..., tuple[TrainState, StepMetrics]]:
    """`train_step` with the recipe's configuration and options bound."""
    return partial(
        step,
        make_optimizer(recipe.optimizer, recipe.steps),
        loss=objective.loss(frozen),
        options=StepOptions(
            loss_options(recipe),
            accumulate=recipe.accumulate,
            ema_decay=recipe.ema_decay,
            count=objective.count,
            virtual_shards=recipe.exact_shards,
        ),
    )


def loss_options(recipe: Recipe) -> LossOptions:
    """The loss options of a recipe."""
    return LossOptions(compute_of(recipe), recipe.chunk, recipe.z_loss, recipe.neftune)


def _start(recipe: Recipe, params: Llama) -> TrainState:
    return init_state(make_optimizer(recipe.optimizer, recipe.steps), params, ema=recipe.ema_decay > 0)


def _random(recipe: Recipe, base: Llama | None = None) -> TrainState:
    key = jax.random.key(recipe.seed)
    if recipe.lora is None:
        return _start(recipe, init(recipe.model, key))
    return _start(recipe, init_adapters(recipe.model, recipe.lora, key, base=base))


def check_mesh(recipe: Recipe, sizes: MeshSizes, backend: Backend) -> None:
    """Raise the errors of `make_program` about a mesh that does not exist or cannot divide the recipe, without compiling."""
    if backend == "pmap" and recipe.lora is not None:
        raise TrainingError("pmap trains whole models; train adapters with the backend jit")
    if backend == "pmap" and sizes.devices != sizes.data:
        raise TrainingError(f"pmap copies the whole model to every device and cannot have mesh {sizes}; use the backend jit")
    make_mesh(sizes)  # raises if there are too few devices
    if recipe.exact_shards:
        check_exact_mesh(dict(sizes.items()), recipe.exact_shards)
        check_exact_threads(recipe.exact_shards)
    if backend == "pmap":
        if recipe.batch % sizes.data or recipe.batch // sizes.data % recipe.accumulate:
            raise TrainingError(
                f"batch={recipe.batch} must be a multiple of data={sizes.data} times accumulate={recipe.accumulate}"
            )
        return
    if jax.process_count() > 1 and sizes.devices < jax.device_count():
        raise MeshError(
            f"mesh {sizes} has {sizes.devices} devices, but the {jax.process_count()} processes have {jax.device_count()};"
            " use them all"
        )
    batch_spec(sizes, recipe.batch // recipe.accumulate, recipe.length)
    param_specs(recipe.model, sizes)


def _jit_program(recipe: Recipe, objective: Objective, sizes: MeshSizes, base: Llama | None) -> TrainingProgram:
    mesh, lora = make_mesh(sizes), recipe.lora
    optimizer = make_optimizer(recipe.optimizer, recipe.steps)
    specs = train_state_specs(recipe.model, sizes, optimizer, ema=recipe.ema_decay > 0, lora=lora)
    placement = shardings(mesh, specs)
    rows = NamedSharding(mesh, batch_spec(sizes, recipe.batch // recipe.accumulate, recipe.length))
    whole = NamedSharding(mesh, P())
    begins_as = base if lora is not None and lora.dora else None
    # The state is created sharded: nothing is ever whole on one device.
    shapes = jax.tree.map(
        lambda leaf, place: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place),
        jax.eval_shape(partial(_random, recipe), begins_as),
        placement,
    )
    config, sharding = training_sharding(recipe.model, mesh)

    def step(models: tuple[Llama | None, Any], state: TrainState, batch: Any) -> tuple[TrainState, StepMetrics]:
        base, other = models
        over, frozen = sharding, FrozenModels(None, other)
        if base is not None and lora is not None:
            over, frozen = with_base(sharding, base, lora), FrozenModels(sharding.prepare_params(base), other)
        if objective.prepare is not None:
            with sharding.context():
                prepare = objective.prepare(frozen)
                batch = prepare(config, over.prepare_params(state.params), batch, loss_options(recipe), over)
        return _step(recipe, objective, frozen, partial(train_step, config, sharding=over))(state, batch)

    def model(params: Llama) -> Llama:
        return params if base is None or lora is None else precompute_dora_scale(adapted(base, params, lora))

    _, reading = evaluation_sharding(recipe.model, mesh)
    # If nothing is padded or copied, the model is returned unchanged: `jit` would copy it.
    as_it_is = padded_shapes_config(recipe.model, sizes) == recipe.model
    models = base, objective.frozen
    batches = jax.tree.map(lambda part: jax.ShapeDtypeStruct(part.shape, part.dtype, sharding=rows), objective.shapes)
    jitted = jax.jit(step, donate_argnums=1, out_shardings=(placement, whole))
    began = time.perf_counter()
    with record_backends() as attention:
        compiled = jitted.lower(models, shapes, batches).compile()

    def start(params: Llama | None) -> TrainState:
        if params is None:
            return jax.jit(partial(_random, recipe), out_shardings=placement)(begins_as)
        return jax.jit(partial(_start, recipe), donate_argnums=0, out_shardings=placement)(params)

    def place(batch: Any) -> Any:
        return jax.tree.map(
            lambda part: jax.make_array_from_process_local_data(rows, part, (recipe.batch, *part.shape[1:])), batch
        )

    return TrainingProgram(
        step=partial(compiled, models),
        place=place,
        share=_share(rows, recipe.batch),
        start=start,
        shapes=shapes,
        adopt=identity,
        model=model,
        # All processes read the same rows, and each the whole result.
        jit=jax.jit if jax.process_count() == 1 else partial(jax.jit, out_shardings=whole),
        fit=identity if as_it_is else jax.jit(sharding.prepare_params),
        config=config,
        sharding=reading,
        devices=sizes.devices,
        description=f"mesh {sizes}" if sizes.devices > 1 else f"one device ({jax.default_backend()})",
        compile_seconds=time.perf_counter() - began,
        attention=" and ".join(attention),
    )


def _pmap_program(recipe: Recipe, objective: Objective, sizes: MeshSizes) -> TrainingProgram:
    devices = jax.devices()[: sizes.devices]
    everywhere = replicate(jnp.zeros(()), devices).sharding
    shapes = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=everywhere),
        jax.eval_shape(partial(_random, recipe)),
    )
    began = time.perf_counter()

    def start(params: Llama | None) -> TrainState:
        state = jax.jit(partial(_random, recipe))() if params is None else jax.jit(partial(_start, recipe))(params)
        return replicate(state, devices)

    return TrainingProgram(
        step=pmap_step(_step(recipe, objective, FrozenModels(None, None), partial(train_step, recipe.model)), devices),
        place=lambda batch: batch,  # `pmap_step` divides it
        share=(0, 1),
        start=start,
        shapes=shapes,
        adopt=lambda state: replicate(state, devices),
        model=identity,
        jit=jax.jit,
        fit=partial(jax.tree.map, lambda array: array.addressable_data(0)),
        config=recipe.model,
        sharding=Sharding(),
        devices=len(devices),
        description=f"pmap over {len(devices)} devices",
        compile_seconds=time.perf_counter() - began,
    )


def _share(rows: NamedSharding, batch: int) -> tuple[int, int]:
    """Index and number of this process's equal share of a batch's rows; the whole batch if shares are not equal."""
    parts = rows.addressable_devices_indices_map((batch,)).values()
    bounds = {part[0].indices(batch)[:2] for part in parts if part is not None}
    begin, end = min(bounds)[0], max(bounds)[1]
    size = end - begin
    if sum(stop - start for start, stop in bounds) != size or batch % size or begin % size:
        return 0, 1
    return begin // size, batch // size
