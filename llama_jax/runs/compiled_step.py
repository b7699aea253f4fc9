"""Compiles the training step of a recipe, over a mesh with `jax.jit` or with `jax.pmap`.

Only this module of `runs` deals with shardings; the loop calls the functions of a `TrainingProgram`.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from llama_jax.analysis.hardware import find_hardware
from llama_jax.config import LlamaConfig
from llama_jax.errors import MeshError, TrainingError
from llama_jax.inference.xla_flags import return_large_blocks
from llama_jax.model.forward_options import Sharding, identity
from llama_jax.model.lora import apply_adapters, freeze_base, init_adapters, precompute_dora_scale
from llama_jax.model.params import LlamaParams
from llama_jax.model.trees import init
from llama_jax.ops.attention import record_backends
from llama_jax.ops.cross_entropy import LossSums
from llama_jax.parallel.mesh import MeshSizes, make_mesh
from llama_jax.parallel.padding import padded_shapes_config
from llama_jax.parallel.pmap import pmap_replicate, pmap_step
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
from llama_jax.training.flops import step_flops
from llama_jax.training.loss import LossOptions
from llama_jax.training.optimizer import make_optimizer
from llama_jax.training.step import StepOptions, TrainState, init_state, train_step

MAX_UNROLLED_LAYERS = 32
MIN_UNROLLED_SECONDS = 600.0  # estimated time of a run
UTILIZATION = 0.5  # usual MFU of a step: share of the FLOP/s of a datasheet, or of a large matmul


def make_program(
    recipe: Recipe, objective: Objective, sizes: MeshSizes, backend: Backend, base: LlamaParams | None = None
) -> TrainingProgram:
    """Compile the step of a recipe: by `jax.jit` over a mesh, or by `jax.pmap` over `sizes.data` devices.

    Args:
      objective: the loss, and the models that it reads; pmap supports only one without `prepare` and `frozen`.
      base: the frozen base model of a recipe that trains adapters, sharded by `param_specs`.

    Raises:
      MeshError: too few devices, a model or a batch that the mesh cannot shard, or a process without devices in the mesh.
      TrainingError: a mesh that pmap does not support.
    """
    check_mesh(recipe, sizes, backend)
    if backend == "pmap":
        return _pmap_program(recipe, objective, sizes)
    return _jit_program(recipe, objective, sizes, base)


def _bind_recipe(
    recipe: Recipe,
    objective: Objective,
    frozen: FrozenModels,
    step: Callable[..., tuple[TrainState, StepMetrics]],
    *,
    unroll: bool = False,
) -> Callable[..., tuple[TrainState, StepMetrics]]:
    """`step`, a `train_step` with its configuration bound, with the recipe's optimizer, loss and options bound too.

    Its metrics also have "tokens_read", the number of tokens that are not padding.
    """
    task_loss = objective.make_loss(frozen)

    def loss(config: LlamaConfig, params: LlamaParams, batch: Any, options: LossOptions, sharding: Sharding) -> LossSums:
        sums = task_loss(config, params, batch, options, sharding)
        return sums._replace(metrics=sums.metrics | {"tokens_read": objective.count_tokens(batch)})

    return partial(
        step,
        make_optimizer(recipe.optimizer, recipe.steps),
        loss=loss,
        options=StepOptions(
            loss_options(recipe, unroll=unroll),
            accumulate=recipe.accumulate,
            ema_decay=recipe.ema_decay,
            count=objective.count,
            virtual_shards=recipe.exact_shards,
        ),
    )


def loss_options(recipe: Recipe, *, unroll: bool = False) -> LossOptions:
    """The loss options of a recipe; `unroll` as in `ComputeOptions`."""
    compute = replace(compute_of(recipe), unroll=unroll)
    return LossOptions(compute=compute, chunk=recipe.chunk, z_loss=recipe.z_loss, neftune=recipe.neftune)


def repays_unrolling(recipe: Recipe, device: jax.Device, devices: int) -> bool:
    """Whether faster steps repay a longer compilation with unrolled layers: on one GPU, in a run of some minutes.

    A tenth of MIN_UNROLLED_SECONDS is about the additional time to compile MAX_UNROLLED_LAYERS layers. Never in exact runs,
    whose bits do not depend on the number of devices.
    """
    hardware = find_hardware(device.device_kind)
    if device.platform != "gpu" or devices > 1 or hardware is None:
        return False
    if recipe.exact_shards or recipe.model.n_layers > MAX_UNROLLED_LAYERS:
        return False
    flops = step_flops(recipe.model, recipe.batch, recipe.length)
    return recipe.steps * flops / (UTILIZATION * hardware.flops) >= MIN_UNROLLED_SECONDS


def fits(compiled: Any, device: jax.Device) -> bool:
    """Whether a compiled program fits, by XLA's plan, into the memory of a device; True if its type is unknown."""
    plan, hardware = compiled.memory_analysis(), find_hardware(device.device_kind)
    resident = plan.argument_size_in_bytes + plan.output_size_in_bytes - plan.alias_size_in_bytes
    return hardware is None or hardware.holds(resident + plan.temp_size_in_bytes)


def _init_state(recipe: Recipe, params: LlamaParams) -> TrainState:
    """The state before the first step, from given parameters."""
    return init_state(make_optimizer(recipe.optimizer, recipe.steps), params, ema=recipe.ema_decay > 0)


def _init_random_state(recipe: Recipe, dora_base: LlamaParams | None = None) -> TrainState:
    """The state before the first step, from random parameters or adapters; the magnitudes of DoRA follow from its base."""
    key = jax.random.key(recipe.seed)
    if recipe.lora is None:
        return _init_state(recipe, init(recipe.model, key))
    return _init_state(recipe, init_adapters(recipe.model, recipe.lora, key, base=dora_base))


def check_mesh(recipe: Recipe, sizes: MeshSizes, backend: Backend) -> None:
    """Raise the errors of `make_program` about a mesh without compiling: too few devices, or sizes that do not divide."""
    if backend == "pmap" and (recipe.lora is not None or sizes.devices != sizes.data):
        raise TrainingError(
            f"pmap copies the whole model to every device: it trains no adapters, and cannot have mesh {sizes}; use the"
            " backend jit"
        )
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


def _jit_program(recipe: Recipe, objective: Objective, sizes: MeshSizes, base: LlamaParams | None) -> TrainingProgram:
    mesh, lora = make_mesh(sizes), recipe.lora
    optimizer = make_optimizer(recipe.optimizer, recipe.steps)
    specs = train_state_specs(recipe.model, sizes, optimizer, ema=recipe.ema_decay > 0, lora=lora)
    state_shardings = shardings(mesh, specs)
    batch_sharding = NamedSharding(mesh, batch_spec(sizes, recipe.batch // recipe.accumulate, recipe.length))
    replicated = NamedSharding(mesh, P())
    dora_base = base if lora is not None and lora.dora else None
    state_shapes = jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
        jax.eval_shape(partial(_init_random_state, recipe), dora_base),
        state_shardings,
    )
    config, sharding = training_sharding(recipe.model, mesh)

    def step(
        unroll: bool, models: tuple[LlamaParams | None, Any], state: TrainState, batch: Any
    ) -> tuple[TrainState, StepMetrics]:
        base, other = models
        step_sharding, frozen = sharding, FrozenModels(None, other)
        if base is not None and lora is not None:
            # The parameters of the state are the adapters: `prepare_params` adds them to the frozen base.
            step_sharding, frozen = freeze_base(sharding, base, lora), FrozenModels(sharding.prepare_params(base), other)
        if objective.make_prepare_batch is not None:
            with sharding.context():
                prepare_batch = objective.make_prepare_batch(frozen)
                params = step_sharding.prepare_params(state.params)
                batch = prepare_batch(config, params, batch, loss_options(recipe), step_sharding)
        bound_step = partial(train_step, config, sharding=step_sharding)
        return _bind_recipe(recipe, objective, frozen, bound_step, unroll=unroll)(state, batch)

    def model_params(params: LlamaParams) -> LlamaParams:
        return params if base is None or lora is None else precompute_dora_scale(apply_adapters(base, params, lora))

    _, eval_sharding = evaluation_sharding(recipe.model, mesh)
    # If no shape differs on the mesh, `prepare_params` returns its argument: `jit` would copy it.
    is_unpadded = padded_shapes_config(recipe.model, sizes) == recipe.model
    models = base, objective.frozen
    batch_shapes = jax.tree.map(
        lambda part: jax.ShapeDtypeStruct(part.shape, part.dtype, sharding=batch_sharding), objective.batch_shapes
    )

    def compile_step(*, unroll: bool) -> Any:
        jitted = jax.jit(partial(step, unroll), donate_argnums=1, out_shardings=(state_shardings, replicated))
        return jitted.lower(models, state_shapes, batch_shapes).compile()

    compile_start, device = time.perf_counter(), mesh.devices.flat[0]
    with record_backends() as attention:
        unroll = repays_unrolling(recipe, device, sizes.devices)
        compiled = compile_step(unroll=unroll)
        if unroll and not fits(compiled, device):
            compiled = compile_step(unroll=False)
    plan: Any = compiled.memory_analysis()
    return_large_blocks(0 if plan is None else plan.temp_size_in_bytes)

    def init_sharded_state(params: LlamaParams | None) -> TrainState:
        """The state, created sharded: no device ever holds more than its shards."""
        if params is None:
            return jax.jit(partial(_init_random_state, recipe), out_shardings=state_shardings)(dora_base)
        return jax.jit(partial(_init_state, recipe), donate_argnums=0, out_shardings=state_shardings)(params)

    def shard_batch(batch: Any) -> Any:
        return jax.tree.map(
            lambda part: jax.make_array_from_process_local_data(batch_sharding, part, (recipe.batch, *part.shape[1:])), batch
        )

    return TrainingProgram(
        step=partial(compiled, models),
        shard_batch=shard_batch,
        data_shard=_data_shard(batch_sharding, recipe.batch),
        init_state=init_sharded_state,
        state_shapes=state_shapes,
        place_restored=identity,
        model_params=model_params,
        # With several processes, results are replicated, so that each process can read them.
        jit=jax.jit if jax.process_count() == 1 else partial(jax.jit, out_shardings=replicated),
        prepare_params=identity if is_unpadded else jax.jit(sharding.prepare_params),
        config=config,
        eval_sharding=eval_sharding,
        devices=sizes.devices,
        description=f"mesh {sizes}" if sizes.devices > 1 else f"one device ({jax.default_backend()})",
        compile_seconds=time.perf_counter() - compile_start,
        attention=" and ".join(attention),
    )


def _pmap_program(recipe: Recipe, objective: Objective, sizes: MeshSizes) -> TrainingProgram:
    devices = jax.devices()[: sizes.devices]
    replicated = pmap_replicate(jnp.zeros(()), devices).sharding
    state_shapes = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=replicated),
        jax.eval_shape(partial(_init_random_state, recipe)),
    )
    start_time = time.perf_counter()

    def init_replicated_state(params: LlamaParams | None) -> TrainState:
        if params is None:
            state = jax.jit(partial(_init_random_state, recipe))()
        else:
            state = jax.jit(partial(_init_state, recipe))(params)
        return pmap_replicate(state, devices)

    step = _bind_recipe(recipe, objective, FrozenModels(None, None), partial(train_step, recipe.model))
    return TrainingProgram(
        step=pmap_step(step, devices),
        shard_batch=identity,  # `pmap_step` splits it
        data_shard=(0, 1),
        init_state=init_replicated_state,
        state_shapes=state_shapes,
        place_restored=lambda state: pmap_replicate(state, devices),
        model_params=identity,
        jit=jax.jit,
        prepare_params=partial(jax.tree.map, lambda array: array.addressable_data(0)),  # the copy on the first device
        config=recipe.model,
        eval_sharding=Sharding(),
        devices=len(devices),
        description=f"pmap over {len(devices)} devices",
        compile_seconds=time.perf_counter() - start_time,
    )


def _data_shard(batch_sharding: NamedSharding, batch: int) -> tuple[int, int]:
    """(Index, number) of the equal shards of a batch's rows that processes read; (0, 1), the whole batch, if not equal."""
    parts = batch_sharding.addressable_devices_indices_map((batch,)).values()
    bounds = {part[0].indices(batch)[:2] for part in parts if part is not None}
    begin, end = min(bounds)[0], max(bounds)[1]
    size = end - begin
    if sum(stop - start for start, stop in bounds) != size or batch % size or begin % size:
        return 0, 1
    return begin // size, batch // size
