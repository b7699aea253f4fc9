"""The memory of the library's programs on each device, from shapes and XLA's plan: nothing is allocated.

Any number of devices can be simulated (``jax_num_cpu_devices``).
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from llama_jax.analysis.collectives import ARRAY, Instruction, ProgramText, array_bytes
from llama_jax.config import LlamaConfig
from llama_jax.errors import MeshError
from llama_jax.inference.compiled_decode import MAX_PREFILL_CHUNK
from llama_jax.inference.decode import DecodeSettings, DecodeState, PrefillState, TokenChunk, decode, prefill
from llama_jax.inference.sampling import Sampling
from llama_jax.inference.sharding import sharding_of
from llama_jax.inference.xla_flags import compiler_options, decode_options_on_tpu
from llama_jax.model.cache import KVCache, init_cache
from llama_jax.model.forward_options import ComputeOptions, Positions, Remat
from llama_jax.model.lora import Lora, adapter_shapes, freeze_base
from llama_jax.model.params import LlamaParams
from llama_jax.model.trees import param_shapes, plan_formats, quantize, unstack_layers
from llama_jax.ops.attention import AttentionBackend
from llama_jax.ops.platform import target_platform
from llama_jax.ops.weights.format_spec import bits_of
from llama_jax.ops.weights.formats import FormatName, PureFormatName
from llama_jax.parallel.mesh import MeshSizes
from llama_jax.parallel.padding import padded_config, padded_shapes_config
from llama_jax.parallel.ring_attention import BATCH_AXES, check_length
from llama_jax.parallel.ring_prefill import prefill_over
from llama_jax.parallel.sharding import (
    batch_spec,
    cache_specs,
    param_specs,
    sharded_train_step,
    shardings,
    train_state_specs,
    training_sharding,
)
from llama_jax.training.batch import Batch
from llama_jax.training.loss import LossOptions
from llama_jax.training.optimizer import adamw, with_clipping
from llama_jax.training.step import StepOptions, TrainState, init_state, train_step


@dataclass(frozen=True)
class Memory:
    """Peak bytes on one device while a program runs.

    Attributes:
      parameters, optimizer, cache: the device's shares, from their shapes.
      gradients: the device's share, in the parameters' dtype; XLA counts them as temporaries.
      temporaries: the rest of the plan: activations saved for the backward pass, gathered parameters, the batch.
      scratch: memory of CPU kernels beyond the plan, see `kernel_scratch`; 0 on other devices.
    """

    parameters: int = 0
    gradients: int = 0
    optimizer: int = 0
    cache: int = 0
    temporaries: int = 0
    scratch: int = 0

    @property
    def total(self) -> int:
        """All live bytes: arguments, outputs and temporaries, with in-place updates counted once, and scratch."""
        return sum(asdict(self).values())


class DoesNotFitError(MeshError):
    """The device's compiler rejects a program that exceeds the device's memory; the message is the compiler's."""


@dataclass(frozen=True)
class Program:
    """A jitted function with the shapes and shardings of its arguments, not compiled yet.

    Attributes:
      known: its memory as far as known without compiling, without temporaries.
      layers: number of layers of the model.
      per_token: for a decoding program, the bytes that a device must read for a token of each row: its weights, without the
        embedding if that is only looked up, and its cache; 0 for others.
    """

    name: str
    function: Any
    arguments: tuple[Any, ...]
    known: Memory
    layers: int = 0
    per_token: int = 0

    @property
    def mesh(self) -> Mesh:
        """The mesh of its arguments."""
        return jax.tree.leaves(self.arguments)[0].sharding.mesh

    @property
    def platform(self) -> str:
        """The platform of its mesh: "cpu", "gpu" or "tpu"; the devices need not exist, see `aot_compile`."""
        return self.mesh.devices.flat[0].platform

    def lower(self) -> jax.stages.Lowered:
        """Trace the program for the platform of its mesh."""
        with jax.sharding.use_abstract_mesh(self.mesh.abstract_mesh):
            return self.function.lower(*self.arguments)

    def compile(self, *, accelerator: bool = False, flags: bool = True) -> jax.stages.Compiled:
        """Compile the program for the devices of its arguments.

        Args:
          flags: use the platform's flags, as the commands do, see `llama_jax.inference.xla_flags`.
          accelerator: on simulated CPU devices, compile as nearly as possible what a GPU or TPU would run, for analysis on
            machines without its compiler: without the library's variants for CPUs, and with 16-bit floats throughout,
            including communication.

        Raises:
          DoesNotFitError: the program exceeds the device's memory, if its compiler plans for that, as a TPU's does.
        """
        if not accelerator or self.platform != "cpu":
            options = None
            if flags:
                device = self.mesh.devices.flat[0]
                options = compiler_options(self.platform, training=self.known.gradients > 0, device=device)
            try:
                return self.lower().compile(compiler_options=options)
            except jax.errors.JaxRuntimeError as error:
                if "RESOURCE_EXHAUSTED" not in str(error):
                    raise
                raise DoesNotFitError(
                    f"{self.name}: {str(error).splitlines()[0].removeprefix('RESOURCE_EXHAUSTED: ')}"
                ) from error
        # A GPU's random bits would be a call of its own library, which XLA for CPU lacks; a TPU's are ordinary code.
        with target_platform("accelerator"):
            lowered = self.function.trace(*self.arguments).lower(lowering_platforms=("tpu",))
        return lowered.compile(compiler_options={"xla_disable_hlo_passes": "float-normalization-bf16"})

    def memory(self, compiled: jax.stages.Compiled | None = None, *, accelerator: bool = False) -> Memory:
        """XLA's plan for the program, compiled now unless `compiled` is given; without CPU scratch for accelerators."""
        compiled = self.compile(accelerator=accelerator) if compiled is None else compiled
        plan: Any = compiled.memory_analysis()
        # The plan omits arguments that the program does not read, but they are still alive; a TPU pads others.
        arguments = max(bytes_per_device(self.arguments), plan.argument_size_in_bytes)
        alive = arguments + plan.output_size_in_bytes - plan.alias_size_in_bytes
        total = alive + plan.temp_size_in_bytes
        known = replace(self.known, gradients=min(self.known.gradients, plan.temp_size_in_bytes))
        scratch = 0 if accelerator or self.platform != "cpu" else kernel_scratch(compiled.as_text() or "")
        return replace(known, temporaries=total - known.total, scratch=scratch)


def train_programs(
    config: LlamaConfig,
    mesh: Mesh,
    batch: int,
    length: int,
    *,
    dtype: jax.typing.DTypeLike = jnp.float32,
    remat: Remat = "full",
    packed: bool = False,
    accumulate: int = 1,
    attention: AttentionBackend = "auto",
    lora: Lora | None = None,
    weights: FormatName | PureFormatName | LlamaParams | None = None,
    unroll: bool = False,
) -> list[Program]:
    """One training step with AdamW: float32 parameters, computation in `dtype`.

    Args:
      batch, length: B rows over the whole mesh, of T tokens to predict each.
      packed: rows have segments and positions, as when `train` packs documents.
      accumulate: number of microbatches, see `train_step`.
      attention: the attention backend, see `ComputeOptions`; over `context` it is ring attention.
      lora: train adapters with these settings on a frozen model of `dtype`.
      weights: quantization format of that model's matrices; None for floats.
      unroll: unroll the layers, see `ComputeOptions`.

    Raises:
      ConfigError: matrices that cannot be quantized in that format.
      MeshError: the model or the batch cannot be split over the mesh.
    """
    sizes = MeshSizes(**mesh.shape)
    optimizer = with_clipping(adamw(1e-4), 1.0)
    placement = shardings(mesh, train_state_specs(config, sizes, optimizer, lora=lora))
    shapes = param_shapes(config) if lora is None else adapter_shapes(config, lora)
    state = _with_shardings(jax.eval_shape(partial(init_state, optimizer), shapes), placement)
    rows = jax.ShapeDtypeStruct((batch, length + 1), jnp.int32)
    row = _with_shardings(rows, shardings(mesh, batch_spec(sizes, batch // accumulate, length)))
    tokens = Batch(row, row, row) if packed else Batch(row)
    options = StepOptions(LossOptions(ComputeOptions(dtype, remat, attention, unroll=unroll)), accumulate)
    out = placement, shardings(mesh, P())
    share = bytes_per_device(state.params)
    known = Memory(parameters=share, gradients=share, optimizer=bytes_per_device(state.opt_state))
    if lora is None:
        step = partial(sharded_train_step(config, mesh), optimizer, options=options)
        jitted = jax.jit(step, donate_argnums=0, out_shardings=out)
        return [Program("train step", jitted, (state, tokens), known, layers=config.n_layers)]
    base = _with_shardings(param_shapes(config, dtype), shardings(mesh, param_specs(config, sizes)))
    base = _quantize_shapes(base, weights)
    sharded_config, sharding = training_sharding(config, mesh)

    def adapter_step(base: LlamaParams, state: TrainState, batch: Batch) -> Any:
        return train_step(sharded_config, optimizer, state, batch, options, freeze_base(sharding, base, lora))

    jitted = jax.jit(adapter_step, donate_argnums=1, out_shardings=out)
    known = replace(known, parameters=share + bytes_per_device(base))
    return [Program("train step", jitted, (base, state, tokens), known, layers=config.n_layers)]


def _quantize_shapes(params: LlamaParams, weights: FormatName | PureFormatName | LlamaParams | None) -> LlamaParams:
    """Shapes of parameters after quantizing their matrices."""
    if weights is None:
        return params
    return plan_formats(params, weights) if isinstance(weights, LlamaParams) else quantize(params, weights)


def decode_programs(
    config: LlamaConfig,
    mesh: Mesh,
    batch: int,
    capacity: int,
    *,
    dtype: jax.typing.DTypeLike = jnp.float32,
    quantized: bool = False,
    weights: FormatName | PureFormatName | LlamaParams | None = None,
    attention: AttentionBackend = "auto",
) -> list[Program]:
    """The programs of `generate` for a cache of `capacity` slots: prefill, enlarging the cache, decoding.

    Over `context`, prompts are prefilled by `prefill_over`, in one pass instead of chunks.

    Args:
      batch: B rows over the whole mesh.
      dtype: dtype of parameters, computation and cache.
      quantized: whether the cache is int8.
      weights: quantization format of the matrices, see `ops.weights`, or the formats of a file, see
        `trees.plan_formats`; None is none.
      attention: the attention backend, see `ComputeOptions`.

    Raises:
      ConfigError: matrices that cannot be quantized in that format.
      MeshError: the model or the batch cannot be split over the mesh, or an int8 cache over `context`.
    """
    sizes = MeshSizes(**mesh.shape)
    if quantized and sizes.context > 1:
        raise MeshError(f"mesh {sizes}: prefill over context fills a cache of the parameters' dtype, not int8")
    # As `load` shards a model: heads copied and the vocabulary padded if the mesh needs it.
    padded_shape_config, config = padded_shapes_config(config, sizes), padded_config(config, sizes)
    rows, replicated, by_vocabulary = shardings(mesh, (batch_spec(sizes, batch), P(), P(BATCH_AXES, "tensor")))
    placement = shardings(mesh, cache_specs(config, sizes, batch, quantized=quantized))
    specs = param_specs(config, sizes, padded=True)
    params = _with_shardings(param_shapes(padded_shape_config, dtype), shardings(mesh, specs))
    params = _quantize_shapes(params, weights)
    if mesh.devices.flat[0].platform == "gpu":
        params = unstack_layers(params)  # as `load` returns them there
    sharding, compute = sharding_of(params), ComputeOptions(attention=attention)

    def cache_of() -> KVCache:
        cache_dtype = jnp.dtype(jnp.int8 if quantized else dtype)
        made = lambda: init_cache(config, batch, capacity, cache_dtype)
        return _with_shardings(jax.eval_shape(made), placement)

    def per_row(dtype: jax.typing.DTypeLike, *rest: int, sharding: Any = rows) -> Any:
        return jax.ShapeDtypeStruct((batch, *rest), dtype, sharding=sharding)

    cache = cache_of()
    share = bytes_per_device(params)
    known = Memory(parameters=share, cache=bytes_per_device(cache))
    looked_up = 0 if params.lm_head is None else bytes_per_device(params.embedding)
    per_token = (share - looked_up) * sizes.columns + known.cache

    tokens = per_row(jnp.int32, min(capacity, MAX_PREFILL_CHUNK))
    positions = Positions(per_row(jnp.int32), rope_lengths=per_row(jnp.int32))
    reads = jax.jit(
        partial(prefill, config, compute=compute, sharding=sharding),
        donate_argnums=1,
        out_shardings=PrefillState(placement, rows),
    )
    read_before = PrefillState(cache, per_row(dtype, config.dim))

    reading = Program("prefill", reads, (params, read_before, tokens, positions), known, layers=config.n_layers)
    if sizes.context > 1:
        check_length(sizes, capacity)
        over = jax.jit(prefill_over(config, mesh, capacity), out_shardings=(placement, rows))
        reading = Program(
            "prefill", over, (params, per_row(jnp.int32, capacity), per_row(jnp.int32)), known, layers=config.n_layers
        )

    sampling = jax.tree.map(lambda a: per_row(a.dtype, sharding=replicated), Sampling().per_row(1))
    limit, stop = per_row(jnp.int32, sharding=replicated), per_row(jnp.int32, 4, sharding=replicated)
    state = DecodeState(
        cache,
        DecodeSettings(sampling, limit, stop),
        token=per_row(jnp.int32, sharding=replicated),
        seen=per_row(bool, padded_shape_config.vocab_size, sharding=by_vocabulary),
        count=per_row(jnp.int32),
        done=per_row(bool, sharding=replicated),
    )
    out = jax.tree.map(lambda a: a.sharding, state), replicated, TokenChunk(replicated, replicated, replicated)
    options = decode_options_on_tpu() if mesh.devices.flat[0].platform == "tpu" else None  # as `generate` does
    turn = partial(decode, config, max_chunks=1, compute=compute, sharding=sharding)
    run = jax.jit(turn, donate_argnums=1, out_shardings=out, compiler_options=options)
    turns = jax.ShapeDtypeStruct((), jnp.int32, sharding=replicated)
    return [
        reading,
        Program("decode", run, (params, state, turns), known, layers=config.n_layers, per_token=per_token),
    ]


def bytes_per_device(tree: Any) -> int:
    """Bytes of a tree of arrays, or of shapes with shardings, on each of its devices."""
    return sum(math.prod(a.sharding.shard_shape(a.shape)) * bits_of(a.dtype) // 8 for a in jax.tree.leaves(tree))


def _with_shardings(shapes: Any, placement: Any) -> Any:
    """Shapes with their shardings."""
    return jax.tree.map(lambda a, sharding: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=sharding), shapes, placement)


def kernel_scratch(program: str) -> int:
    """Bytes of the largest array within a group that a kernel library runs, from a compiled program's text; 0 off CPU.

    XLA for CPU passes groups of operations with a matrix product or a sum to YNNPACK, which keeps intermediate arrays (the
    softmax's exponentials before the product with the values, or before their sum over the vocabulary in the loss) in its
    own memory, outside the plan.

    One such array at a time is what the library's programs use beyond the plan, apart from packed operands, which are
    relatively small (measured by `tests/process_memory.py`).
    """
    text = ProgramText(program)
    groups = {
        instruction.calls("calls")
        for lines in text.computations.values()
        for instruction in lines
        if "__ynn_fusion" in instruction.rest
    }
    return max((_largest_inside(text.computations.get(name, [])) for name in groups), default=0)


def _largest_inside(group: list[Instruction]) -> int:
    """The largest array; parameters and the result are in the plan, possibly under another shape."""
    outside = {root.operands[0] for root in group if root.is_root and root.opcode == "bitcast"}
    # A sum of products (the norm of the gradients) is one kernel; a sum of exponentials materializes them first.
    multiplies = any(instruction.opcode == "dot" for instruction in group)
    inside = [
        instruction
        for instruction in group
        if (instruction.opcode not in ("parameter", "constant") if multiplies else instruction.opcode == "exponential")
        and not (instruction.is_root or instruction.name in outside or instruction.type.startswith("("))
    ]
    return max(
        (sum(array_bytes(*array) for *array, _ in ARRAY.findall(instruction.type)) for instruction in inside), default=0
    )
