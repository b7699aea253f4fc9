"""Every program of the library compiled by the accelerators' own compilers, on a machine without accelerators.

    python experiments/compile_report.py --compiler tpu        # with the extra compile-tpu
    python experiments/compile_report.py --compiler gpu        # with the extra compile-gpu, in a separate environment
    python experiments/compile_report.py --compiler gpu --only 8b-decode,1b-train

For each program the report has
  - the compiler's plan for a device's memory, and whether it fits;
  - the attention backend, and the kernels that the program calls;
  - the communication between devices, and the shares of it that are asynchronous (collectives with separate start and end)
    and overlapped (during matmuls);
  - copies of at least a mebibyte;
  - for decoding, the bytes read per token relative to the minimum, and the number of kernels in a layer.
It has no times. Training uses packed rows, bfloat16 over float32 parameters, AdamW and full rematerialization unless stated
otherwise. Writes ``experiments/results/compile_report_tpu.json`` or ``compile_report_gpu.json`` after each program, with the
table next to it in ``.md``.
"""

from __future__ import annotations

import json
import time
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from measuring import RESULTS, markdown_table, write_rows, write_text

if TYPE_CHECKING:
    from jax.sharding import Mesh

    from llama_jax.analysis.memory import Program
    from llama_jax.config import LlamaConfig

Kind = Literal["train", "pmap", "decode", "prefill", "step", "burst", "drafted", "read-draft", "rollout"]


@dataclass(frozen=True)
class Case:
    """A program of the library.

    Attributes:
      hardware: the hardware to compile for, with the mesh of each.
      batch, length: rows over the mesh, and tokens in each (for a cache, its capacity).
      options: options of `train_programs` or `decode_programs`. For a server's step: tokens of a prompt that it prefills,
        number and rank of adapters in the table, drafts per row, the smaller model that drafts, and whether it is exact.
        For a rollout: rank of the trained adapters, and answers per prompt.
    """

    name: str
    kind: Kind
    model: str
    hardware: dict[str, str]
    batch: int
    length: int
    options: dict[str, Any] = field(default_factory=dict)


INT8 = {"quantized": True}
LORA: dict[str, Any] = {"rank": 16}
QLORA = LORA | {"weights": "nf4"}
TABLE = LORA | {"adapters": 4}
WIDE_TABLE = LORA | {"adapters": 16}
ROLLOUT = LORA | {"group": 8}
PIECE: dict[str, Any] = {"piece": 64}
READING: dict[str, Any] = {"piece": 496}
EXACT = {"exact": True}
LOOKUP = {"drafted": 8}
DRAFT: dict[str, Any] = {"drafted": 4, "draft": "llama-3.2-1b"}


def on(mesh: str, *names: str) -> dict[str, str]:
    return dict.fromkeys(names, mesh)


EIGHT = on("tensor=8", "tpu-v5e", "tpu-v6e")


CASES = (
    # Training, as `train` runs it.
    Case("1b-train", "train", "tinyllama-1.1b", on("data=1", "h100", "h200", "tpu-v5p", "tpu-v6e"), 4, 2048),
    Case("1b-train-none", "train", "tinyllama-1.1b", on("data=1", "h100", "tpu-v5p"), 4, 2048, {"remat": "none"}),
    Case("1b-train-dots", "train", "tinyllama-1.1b", on("data=1", "h100", "tpu-v5p"), 4, 2048, {"remat": "dots"}),
    Case("1b-train-4096", "train", "tinyllama-1.1b", on("data=1", "h100", "tpu-v5p"), 2, 4096),
    Case("1b-train-32768", "train", "llama-3.2-1b", on("data=1", "h100", "tpu-v5p"), 1, 32768),
    Case("1b-train-accumulated", "train", "tinyllama-1.1b", on("data=1", "h100", "tpu-v5p"), 8, 2048, {"accumulate": 2}),
    Case("1b-train-whole", "train", "tinyllama-1.1b", on("data=1", "h100", "tpu-v5p"), 4, 2048, {"packed": False}),
    Case("1b-train-8", "train", "tinyllama-1.1b", on("fsdp=8", "h100", "tpu-v5e", "tpu-v6e"), 8, 2048),
    Case("1b-train-8-none", "train", "tinyllama-1.1b", on("fsdp=8", "tpu-v5e"), 8, 2048, {"remat": "none"}),
    Case("1b-train-8-tensor", "train", "tinyllama-1.1b", on("fsdp=2,tensor=4", "h100", "tpu-v5e"), 8, 2048),
    Case("1b-pmap", "pmap", "tinyllama-1.1b", on("data=8", "h100") | on("data=4", "tpu-v5p"), 8, 2048),
    Case("8b-train", "train", "llama-3.1-8b", on("fsdp=8", "h100", "h200", "tpu-v5p", "tpu-v6e"), 8, 8192),
    Case("8b-ring", "train", "llama-3.1-8b", on("context=8", "h100", "tpu-v5p"), 1, 131072),
    Case("70b-train", "train", "llama-3.1-70b", on("fsdp=64", "h100", "h200", "tpu-v5p"), 64, 8192),
    Case("405b-train", "train", "llama-3.1-405b", on("fsdp=64,tensor=8", "h100", "h200", "tpu-v5p"), 64, 8192),
    # Adapters of all matrices and a frozen model, in bfloat16 and in 4 bits.
    Case("1b-lora", "train", "tinyllama-1.1b", on("data=1", "h100", "tpu-v5e"), 4, 2048, LORA),
    Case("8b-lora", "train", "llama-3.1-8b", on("data=1", "h100") | on("fsdp=8", "tpu-v5e"), 8, 2048, LORA),
    Case("8b-qlora", "train", "llama-3.1-8b", on("data=1", "rtx-4090", "h100"), 1, 2048, QLORA),
    # Prefill: a chunk of 512 tokens, or a whole long prompt over several devices.
    Case("1b-prefill", "prefill", "tinyllama-1.1b", on("data=1", "h100", "tpu-v5e"), 1, 2048),
    Case("8b-prefill", "prefill", "llama-3.1-8b", on("data=1", "h100") | on("tensor=8", "tpu-v5e"), 1, 2048),
    Case("8b-prefill-long", "prefill", "llama-3.1-8b", on("data=1", "h100") | on("tensor=8", "tpu-v5e"), 1, 131072),
    Case("8b-prefill-ring", "prefill", "llama-3.1-8b", on("context=8", "h100", "tpu-v5p"), 1, 131072),
    # Decoding.
    Case("1b-decode", "decode", "tinyllama-1.1b", on("data=1", "h100", "tpu-v5e", "tpu-v6e"), 1, 2048),
    Case("8b-decode", "decode", "llama-3.1-8b", on("data=1", "h100", "h200", "tpu-v5p") | EIGHT, 1, 2048),
    Case("8b-decode-8", "decode", "llama-3.1-8b", on("data=1", "h100") | on("tensor=8", "tpu-v5e"), 8, 2048),
    Case("8b-decode-64", "decode", "llama-3.1-8b", on("data=1", "h100", "h200") | on("tensor=8", "tpu-v5e"), 64, 2048),
    Case("8b-decode-int8", "decode", "llama-3.1-8b", on("data=1", "h100") | on("tensor=8", "tpu-v5e"), 8, 2048, INT8),
    Case("8b-decode-long", "decode", "llama-3.1-8b", on("data=1", "h100") | on("tensor=8", "tpu-v5e"), 1, 131072),
    Case("70b-decode", "decode", "llama-3.1-70b", on("tensor=8", "h100", "tpu-v5p", "tpu-v6e"), 8, 2048),
    Case("405b-decode", "decode", "llama-3.1-405b", on("tensor=8", "h200"), 8, 2048),
    # A server's step: one token for every row, also while it prefills a chunk of a prompt; or several tokens for a single
    # row.
    Case("8b-step", "step", "llama-3.1-8b", on("data=1", "h100") | on("tensor=8", "tpu-v5e"), 16, 2048),
    Case("8b-step-64", "step", "llama-3.1-8b", on("data=1", "h100") | on("tensor=8", "tpu-v5e"), 64, 2048),
    Case("8b-step-reading", "step", "llama-3.1-8b", on("data=1", "h100") | on("tensor=8", "tpu-v5e"), 16, 2048, PIECE),
    # Exact: results that do not depend on the other rows, on one device; without and with it.
    Case("1b-step", "step", "tinyllama-1.1b", on("data=1", "h100", "tpu-v5e"), 16, 2048),
    Case("1b-step-exact", "step", "tinyllama-1.1b", on("data=1", "h100", "tpu-v5e"), 16, 2048, EXACT),
    Case("1b-step-reading", "step", "tinyllama-1.1b", on("data=1", "h100", "tpu-v5e"), 16, 2048, READING),
    Case("1b-step-reading-exact", "step", "tinyllama-1.1b", on("data=1", "h100", "tpu-v5e"), 16, 2048, READING | EXACT),
    Case("1b-burst", "burst", "tinyllama-1.1b", on("data=1", "h100", "tpu-v5e"), 1, 2048),
    # With a table of adapters: a small one, which is multiplied as a whole, and a large one, from which each row gathers its
    # adapter.
    Case("8b-step-adapters", "step", "llama-3.1-8b", on("data=1", "h100") | on("tensor=8", "tpu-v5e"), 16, 2048, TABLE),
    Case("8b-step-own", "step", "llama-3.1-8b", on("data=1", "h100") | on("tensor=8", "tpu-v5e"), 4, 2048, WIDE_TABLE),
    # With drafts: found by the host, and made by a smaller model, which also prefills prompts.
    Case("8b-step-lookup", "drafted", "llama-3.1-8b", on("data=1", "h100") | on("tensor=8", "tpu-v5e"), 16, 2048, LOOKUP),
    Case("8b-step-draft", "drafted", "llama-3.1-8b", on("data=1", "h100") | on("tensor=8", "tpu-v5e"), 16, 2048, DRAFT),
    Case("1b-read-draft", "read-draft", "llama-3.2-1b", on("data=1", "h100") | on("tensor=8", "tpu-v5e"), 16, 2048, PIECE),
    # Rollouts of GRPO, in bfloat16 with adapters: half of a row is the prompt, half the answer.
    Case("1b-rollout", "rollout", "tinyllama-1.1b", on("data=1", "h100", "tpu-v5e"), 64, 512, ROLLOUT),
    Case("8b-rollout", "rollout", "llama-3.1-8b", on("data=1", "h100") | on("tensor=8", "tpu-v5e"), 64, 512, ROLLOUT),
    Case("8b-rollout-fsdp", "rollout", "llama-3.1-8b", on("fsdp=8", "tpu-v5e"), 64, 512, ROLLOUT),
)  # fmt: skip


@dataclass(frozen=True)
class Arguments:
    """Compile every program of the library with an accelerator's own compiler, and write a report."""

    compiler: Literal["tpu", "gpu"]
    only: str = ""
    """Comma-separated names of programs; entries of other programs in the file are kept."""
    flags: Literal["on", "off"] = "on"
    """Whether to use the commands' flags (`llama_jax/xla_flags.py`); "off" adds separate rows with XLA's defaults."""
    output: Path | None = None


def look(case: Case, name: str, flags: str = "on") -> dict[str, Any]:
    """Compile a program for this hardware; its row."""
    import jax
    from program_report import examine

    from llama_jax.analysis.aot_compile import mesh_for
    from llama_jax.analysis.hardware import hardware_by_name
    from llama_jax.analysis.memory import DoesNotFitError
    from llama_jax.parallel.mesh import parse_mesh

    row = {"program": case.name, "hardware": name, "model": case.model, "mesh": case.hardware[name]}
    row |= {"kind": case.kind, "length": case.length, "options": case.options, "flags": flags, "batch": case.batch}
    program = program_of(case, mesh_for(name, parse_mesh(case.hardware[name])))
    jax.clear_caches()
    began = time.perf_counter()
    try:
        report = examine(program, flags=flags == "on")
    except DoesNotFitError as error:
        row |= {"fits": False, "refused": str(error)[:300]}
    except Exception as error:  # an error of the compiler is a result, too
        row |= {"error": f"{type(error).__name__}: {error}"[:600]}
    else:
        return row | {"fits": hardware_by_name(name).holds(report.memory.total)} | report.as_dict()
    return row | {"compile_seconds": round(time.perf_counter() - began, 1)}


def program_of(case: Case, mesh: Mesh) -> Program:
    """The program of a case, not compiled yet."""
    from llama_jax import preset
    from llama_jax.analysis.memory import decode_programs, train_programs
    from llama_jax.model.lora import Lora

    config = preset(case.model)
    if case.length > config.max_seq_len:
        config = replace(config, max_seq_len=case.length)
    shape = (config, mesh, case.batch, case.length)
    if case.kind == "train":
        options = {"dtype": "bfloat16", "packed": True} | case.options
        rank = options.pop("rank", None)
        programs = train_programs(*shape, **options, lora=None if rank is None else Lora(rank=rank))
    elif case.kind == "pmap":
        programs = [pmap_program(*shape)]
    elif case.kind == "rollout":
        programs = [rollout(config, case, mesh, **case.options)]
    elif case.kind in ("step", "burst", "drafted", "read-draft"):
        programs = [served(config, case, mesh)]
    else:
        every = decode_programs(*shape, dtype="bfloat16", **case.options)
        programs = [program for program in every if program.name == case.kind]
    (program,) = programs
    return program


def pmap_program(config: LlamaConfig, mesh: Mesh, batch: int, length: int) -> Program:
    """The step that `train --backend pmap` runs: packed rows, and the whole state on every device."""
    import jax
    from jax.sharding import PartitionSpec as P

    from llama_jax.analysis.memory import Memory, Program, bytes_per_device
    from llama_jax.model.forward_options import ComputeOptions
    from llama_jax.model.trees import param_shapes
    from llama_jax.parallel.pmap import pmap_over
    from llama_jax.parallel.sharding import shardings
    from llama_jax.training.batch import Batch
    from llama_jax.training.loss import LossOptions
    from llama_jax.training.optimizer import adamw, with_clipping
    from llama_jax.training.step import StepOptions, init_state, train_step

    class PmapProgram(Program):
        def lower(self) -> jax.stages.Lowered:
            return self.function.lower(*self.arguments)  # pmap has its own devices

    optimizer, devices = with_clipping(adamw(1e-4), 1.0), list(mesh.devices.flat)
    everywhere, shares = shardings(mesh, (P(), P("data")))
    shapes = jax.eval_shape(partial(init_state, optimizer), param_shapes(config))
    state = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=everywhere), shapes)
    row = jax.ShapeDtypeStruct((len(devices), batch // len(devices), length + 1), "int32", sharding=shares)
    options = StepOptions(LossOptions(ComputeOptions("bfloat16", "full")))
    mapped = pmap_over(partial(train_step, config, optimizer, options=options), devices)
    share = bytes_per_device(state.params)
    known = Memory(parameters=share, gradients=share, optimizer=bytes_per_device(state.opt_state))
    return PmapProgram("train step", mapped, (state, Batch(row, row, row)), known, layers=config.n_layers)


def served(config: LlamaConfig, case: Case, mesh: Mesh) -> Program:
    """A program of the engine, see `llama_jax.serving.programs`, whose rows have pages for all their tokens.

    The minimum of bytes read is weights and pages, plus those of the smaller model for each draft. Over several devices it
    is only the weights, because attention loops over the pages in use.
    """
    import jax

    from llama_jax import preset
    from llama_jax.inference.sharding import sharding_of
    from llama_jax.inference.xla_flags import decode_options_on_tpu
    from llama_jax.model.cache import PAGE_SIZE
    from llama_jax.model.forward_options import ComputeOptions
    from llama_jax.serving import programs
    from llama_jax.serving.rows import batch_of, settings_of_rows

    rows, options = case.batch, dict(case.options)
    piece, number, draft = options.pop("piece", 0), options.pop("drafted", 0), options.pop("draft", None)
    compute = ComputeOptions(exact=options.pop("exact", False))
    decode = in_pages(config, case, mesh)
    params, state, *_ = decode.arguments
    model = programs.StaticModel(config, compute, sharding_of(params))
    if options:
        decode, params = with_table(config, decode, mesh, **options)
    batch, settings = jax.tree.map(
        lambda a: everywhere(mesh, a.dtype, *a.shape),
        (batch_of([], (rows, rows + piece), case.length // PAGE_SIZE, rows), settings_of_rows([], rows, config.vocab_size)),
    )
    arguments: tuple[Any, ...] = (params, state, batch, settings)
    run: Any
    if case.kind == "burst":
        arguments += (everywhere(mesh, "int32"),)
        run = lambda *args: programs.burst(model, *args)
    elif case.kind == "drafted" and draft is None:
        arguments += (everywhere(mesh, "int32", rows, number),)
        run = lambda *args: programs.verify_drafts(model, *args)
    elif case.kind == "drafted":
        small = preset(draft)
        beside = in_pages(small, case, mesh)
        small_params, small_state, *_ = beside.arguments
        arguments = params, state.replace(draft_pages=small_state.pages), batch, settings, small_params
        arguments += (everywhere(mesh, "int32", rows, 2),)
        small_model = programs.StaticModel(small, ComputeOptions(), sharding_of(beside.arguments[0]))
        run = lambda params, state, batch, settings, small_params, last_two: programs.verify_own_drafts(
            model, params, small_model, small_params, state, batch, settings, last_two, number
        )
        known = replace(
            decode.known,
            parameters=decode.known.parameters + beside.known.parameters,
            cache=decode.known.cache + beside.known.cache,
        )
        decode = replace(decode, known=known, per_token=decode.per_token + number * beside.per_token)
    elif case.kind == "read-draft":
        arguments = params, state.pages, batch
        run = lambda *args: programs.read_draft(model, *args)
        decode = replace(decode, per_token=0)
    else:
        run = lambda *args: programs.step(model, *args)
    told = decode_options_on_tpu() if mesh.devices.flat[0].platform == "tpu" and case.kind != "read-draft" else None
    return replace(
        decode,
        name=case.kind,
        function=jax.jit(run, donate_argnums=1, compiler_options=told),
        arguments=arguments,
    )


def in_pages(config: LlamaConfig, case: Case, mesh: Mesh) -> Program:
    """A program that decodes these rows with the engine's paged state, but not with the engine's function."""
    import jax
    from jax.sharding import NamedSharding, PartitionSpec

    from llama_jax.analysis.memory import bytes_per_device
    from llama_jax.model.cache import PAGE_SIZE, init_pages
    from llama_jax.serving.programs import ServingState

    decode = decoding(config, case, mesh)
    params, state, _ = decode.arguments
    shape = jax.eval_shape(lambda: init_pages(config, case.batch * case.length // PAGE_SIZE, "bfloat16"))
    sharding = NamedSharding(mesh, PartitionSpec(None, None, None, "tensor"))
    pages = jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=sharding)
    serving = ServingState(pages, None, everywhere(mesh, "int32", case.batch), state.seen)
    known = replace(decode.known, cache=bytes_per_device(pages))
    weights = decode.per_token - decode.known.cache
    per_token = weights + (known.cache if mesh.size == 1 else 0)
    return replace(decode, arguments=(params, serving), known=known, per_token=per_token)


def decoding(config: LlamaConfig, case: Case, mesh: Mesh) -> Program:
    """A program that decodes these rows; its arguments are parameters, a state and a number of steps."""
    from llama_jax.analysis.memory import decode_programs

    programs = decode_programs(config, mesh, case.batch, case.length, dtype="bfloat16")
    return next(program for program in programs if program.name == "decode")


def everywhere(mesh: Mesh, dtype: str, *shape: int) -> Any:
    """An array replicated on each device of the mesh."""
    import jax
    from jax.sharding import NamedSharding, PartitionSpec

    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, PartitionSpec()))


def rollout(config: LlamaConfig, case: Case, mesh: Mesh, rank: int, group: int) -> Program:
    """A program that samples answers from a model with trained adapters, see `llama_jax.runs.tasks.grpo`."""
    import jax

    from llama_jax.analysis.memory import bytes_per_device, decode_programs
    from llama_jax.inference.rollouts import RolloutOptions, RolloutPrompts
    from llama_jax.model.forward_options import ComputeOptions
    from llama_jax.model.lora import Lora, adapter_shapes, apply_adapters
    from llama_jax.model.trees import param_shapes
    from llama_jax.parallel.mesh import MeshSizes
    from llama_jax.parallel.sharding import adapter_specs, param_specs, shardings
    from llama_jax.runs.tasks.grpo import make_sampler

    def placed(shapes: Any, specs: Any) -> Any:
        return jax.tree.map(
            lambda a, sharding: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=sharding), shapes, shardings(mesh, specs)
        )

    sizes, lora, half = MeshSizes(**mesh.shape), Lora(rank=rank), case.length // 2
    base = placed(param_shapes(config, "bfloat16"), param_specs(config, sizes))
    adapters = placed(adapter_shapes(config, lora), adapter_specs(config, sizes, lora))
    options, prompts = RolloutOptions(group, half, stop=(2,)), case.batch // group
    arguments = (
        apply_adapters(base, adapters, lora),
        RolloutPrompts(
            everywhere(mesh, "int32", prompts, half),
            everywhere(mesh, "int32", prompts),
            everywhere(mesh, "uint32", case.batch),
        ),
    )
    decode = decode_programs(config, mesh, case.batch, case.length, dtype="bfloat16")[-1]
    share = bytes_per_device(arguments[0])
    embedding = bytes_per_device(base.embedding) * (not config.tie_embeddings)
    return replace(
        decode,
        name="rollout",
        function=jax.jit(make_sampler(config, mesh, options, ComputeOptions("bfloat16"))),
        arguments=arguments,
        known=replace(decode.known, parameters=share),
        per_token=share - embedding + decode.known.cache,
    )


def with_table(config: LlamaConfig, decode: Program, mesh: Mesh, adapters: int, rank: int) -> tuple[Program, Any]:
    """Return a decoding program whose parameters include a table of adapters, and these parameters."""
    import jax

    from llama_jax.analysis.memory import bytes_per_device
    from llama_jax.model.lora import Lora, adapter_shapes, replace_adapted
    from llama_jax.ops.weights.multi_lora import MultiLoraWeight
    from llama_jax.parallel.mesh import MeshSizes
    from llama_jax.parallel.sharding import adapter_specs, shardings

    sizes, lora = MeshSizes(**mesh.shape), Lora(rank=adapters * rank)
    pairs = jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
        adapter_shapes(config, lora, "bfloat16"),
        shardings(mesh, adapter_specs(config, sizes, lora, padded=True)),
    )
    more, scales = bytes_per_device(pairs), (2.0,) * adapters
    known = replace(decode.known, parameters=decode.known.parameters + more)
    params = replace_adapted(
        decode.arguments[0], pairs, lora.rank, lambda leaf, pair: MultiLoraWeight(leaf, pair, scales=scales)
    )
    return replace(decode, known=known, per_token=decode.per_token + more), params


def as_table(rows: list[dict[str, Any]]) -> str:
    """A line for each program and hardware."""
    heads = ["program", "hardware", "mesh", "batch x length", "arguments GB", "temporaries GB", "fits", "attention"]
    heads += ["kernels called", "GB sent", "asynchronous", "overlapped", "copies GB", "read / least", "kernels a layer"]
    heads += ["compiled in"]
    lines = []
    for row in rows:
        program = row["program"] + (", XLA's defaults" if row.get("flags") == "off" else "")
        cells = [program, row["hardware"], row["mesh"], f"{row['batch']} x {row['length']:,}"]
        if "bytes_per_device" not in row:
            cells += ["", "", "no" if row.get("fits") is False else "error", row.get("refused", row.get("error", ""))[:120]]
            lines.append([*cells, *[""] * (len(heads) - len(cells) - 1), f"{row['compile_seconds']} s"])
            continue
        memory = row["bytes_per_device"]
        kept = memory["parameters"] + memory["optimizer"] + memory["cache"]
        fits = "yes" if row["fits"] else "no"
        calls = ", ".join(f"{count} {name.removeprefix('__cudnn$')}" for name, count in row["calls"].items())
        sent = sum(collective["sent"] for collective in row["collectives"].values())
        shares = [row["asynchronous_share"], row.get("overlapped_share")]
        token = row["token"]
        cells += [f"{kept / 1e9:,.2f}", f"{(memory['total'] - kept) / 1e9:,.2f}", fits]
        cells += ["; ".join(row["attention"]), calls, f"{sent / 1e9:,.2f}" if sent else ""]
        cells += ["" if share is None else f"{share:.0%}" for share in shares] + [f"{row['copies']['bytes'] / 1e9:,.2f}"]
        cells += [f"{token['read_ratio']:.3f}", f"{token['kernels_per_layer']:.1f}"] if token else ["", ""]
        lines.append([*cells, f"{row['compile_seconds']} s"])
    return markdown_table(heads, lines)


def main(arguments: Arguments) -> None:
    import jax

    from llama_jax.analysis.aot_compile import GPUS, TPUS, compiler_version, missing_compiler

    jax.config.update("jax_platforms", "cpu")
    names = tuple(TPUS if arguments.compiler == "tpu" else GPUS)
    missing = missing_compiler(names[0])
    if missing:
        raise SystemExit(missing)
    output = arguments.output or RESULTS / f"compile_report_{arguments.compiler}.json"
    only = set(filter(None, arguments.only.split(",")))
    if unknown := only - {case.name for case in CASES}:
        known = ", ".join(case.name for case in CASES)
        raise SystemExit(f"unknown program {', '.join(sorted(unknown))}; the programs are {known}")
    pairs = [(case, name) for case in CASES for name in case.hardware if name in names]
    order = [(case.name, name, flags) for case, name in pairs for flags in ("on", "off")]
    recorded = json.loads(output.read_text())["programs"] if output.exists() else []
    rows = {(row["program"], row["hardware"], row.get("flags", "on")): row for row in recorded}
    about = {"compiler": compiler_version(names[0]), "jax": jax.__version__}
    for case, name in pairs:
        if only and case.name not in only:
            continue
        key = (case.name, name, arguments.flags)
        rows[key] = look(case, name, arguments.flags)
        in_order = [rows[key] for key in order if key in rows]
        write_rows(output, about, "programs", in_order)
        write_text(output.with_suffix(".md"), as_table(in_order) + "\n")
        print(as_table([rows[key]]).splitlines()[-1], flush=True)


if __name__ == "__main__":
    import tyro

    main(tyro.cli(Arguments))
