"""``llama-jax estimate``: memory, communication and least time of training or generating, without the devices."""

from __future__ import annotations

import json
import sys
import time
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple

import tyro

from llama_jax.cli.options import ATTENTION, QUANTIZE, CompileOptions
from llama_jax.config.validation import require_positive_int
from llama_jax.errors import ConfigError, MeshError

if TYPE_CHECKING:
    from jax.sharding import Mesh

    from llama_jax.analysis.collectives import Collective
    from llama_jax.analysis.hardware import Hardware
    from llama_jax.analysis.memory import Memory, Program
    from llama_jax.analysis.roofline import DeviceExchange, Roofline
    from llama_jax.config import LlamaConfig
    from llama_jax.model.params import Llama
    from llama_jax.ops.weights import FormatName, PureFormatName
    from llama_jax.parallel.mesh import MeshSizes


LABELS = {
    "parameters": "parameters",
    "gradients": "gradients",
    "optimizer": "optimizer state (AdamW)",
    "cache": "cache",
    "temporaries": "activations and temporaries",
    "scratch": "scratch of CPU kernels",
}


class CompiledProgram(NamedTuple):
    """Facts about a program, per device.

    Attributes:
      memory: as its compiler plans it.
      collectives: in the order of the program.
      seconds: of tracing and compiling.
      attention: the backends that were used, and why: "cudnn (on NVIDIA H200)".
    """

    memory: Memory
    collectives: list[Collective]
    seconds: float
    attention: list[str]


def compiled(program: Program, *, accelerator: bool) -> CompiledProgram:
    """Compile a program for its mesh and look at it; see `Program.compile`."""
    from llama_jax.analysis.collectives import find_collectives
    from llama_jax.ops.attention import record_backends

    started = time.perf_counter()
    with record_backends() as attention:
        executable = program.compile(accelerator=accelerator)
    seconds = time.perf_counter() - started
    memory = program.memory(executable, accelerator=accelerator)
    collectives = find_collectives(executable.as_text() or "", program.mesh)
    return CompiledProgram(memory, collectives, seconds, [f"{name} ({why})" for name, why in attention.items()])


@dataclass(frozen=True)
class Estimate(CompileOptions):
    """Print the memory that training or generating takes on each device, what devices exchange, and how fast it could be.

    Nothing is allocated and no weights are read: the program is compiled for devices that need not exist, and analysed. For
    --hardware its own compiler is used if it is installed (the extras compile-tpu and compile-gpu).
    """

    model: tyro.conf.Positional[Annotated[str, tyro.conf.arg(metavar="PRESET|PATH")]]
    """A preset such as llama-3.1-8b, or a model's folder or file, or its config.json; only the settings are read."""
    batch: int
    """Rows over the whole mesh."""
    length: int
    """Tokens per row: to predict when training, to keep in the cache when decoding."""
    mesh: Annotated[str, tyro.conf.arg(metavar="AXIS=N,...")] = "data=1"
    """Ways to split, as data=2,fsdp=4,context=2,tensor=8: the batch; the batch and the parameters; each row's tokens, where
    rows are read whole, and the parameters; heads and features."""
    mode: Literal["train", "decode"] = "decode"
    """train: one step of AdamW; decode: reading prompts, enlarging the cache, generating."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Type of computation, parameters and cache; training keeps parameters and optimizer state in float32 regardless. auto
    is float32, with the quantized matrices of the files as they are, but for a model that is trained itself."""
    cache: Literal["auto", "int8"] = "auto"
    """When decoding, the type of the key/value cache: auto is --dtype, int8 has a scale for each head and position."""
    quantize: QUANTIZE = "auto"
    """When decoding, and with --lora: quantize the matrices. keep plans for those of the files, also beside --dtype."""
    lora: int = 0
    """When training, the rank of LoRA adapters of all matrices; the model itself is frozen, in --dtype. No lower
    bounds are computed with LoRA."""
    remat: Literal["auto", "none", "dots", "full"] = "auto"
    """What training recomputes in the backward pass to save memory: nothing, all but matrix products (dots), or whole layers
    (full, auto)."""
    packed: Annotated[bool, tyro.conf.arg(help_behavior_hint="")] = True
    """When training, put a single document into each row. By default several are packed into a row, as `train` does."""
    accumulate: int = 1
    """When training, parts of the batch whose gradients are accumulated one after the other."""
    attention: ATTENTION = "auto"
    """The implementation of attention; auto takes the device's kernel where it can, and the output names it."""
    hardware: Annotated[str | None, tyro.conf.arg(metavar="NAME")] = None
    """Plan for this hardware, such as h200 or tpu-v5p, instead of CPUs: does it fit, and how fast could it be?"""
    json: bool = False
    """Print one JSON object, sizes in bytes."""

    def run(self) -> None:
        from llama_jax.analysis.hardware import named_hardware
        from llama_jax.analysis.memory import DoesNotFitError
        from llama_jax.analysis.roofline import exchange_seconds
        from llama_jax.cli.runtime import use_compilation_cache
        from llama_jax.model.cache import cache_bytes
        from llama_jax.model.trees import parameter_count
        from llama_jax.parallel.mesh import parse_mesh

        started = time.perf_counter()
        hardware = None if self.hardware is None else named_hardware(self.hardware)
        sizes = parse_mesh(self.mesh)
        mesh, compiler, note = devices_to_plan_for(self.hardware, sizes)  # before a run's folder is opened: it starts JAX
        config = read_config(self.model)
        self._check(config)
        kinds, weights = self._weights()
        use_compilation_cache(self.no_cache)
        least = self._least(config, sizes)
        if hardware is not None:
            exchange_seconds(least, sizes, hardware)  # raises before a compilation where its links do not reach

        found: dict[str, CompiledProgram] = {}
        refused: dict[str, str] = {}
        for program in self._programs(config, mesh, weights):
            count = f"{sizes.devices} {'simulated ' if compiler is None else ''}device{'s' * (sizes.devices > 1)}"
            by = f" by {compiler}" if compiler else ""
            print(f"compiling {program.name} for {count}{by}...", file=sys.stderr, flush=True)
            try:
                found[program.name] = compiled(program, accelerator=hardware is not None)
            except DoesNotFitError as error:
                refused[program.name] = str(error)
        about = {
            "model": self.model,
            "mode": self.mode,
            "batch": self.batch,
            "length": self.length,
            "dtype": self._dtype,
            "quantize": kinds,
            "lora": self.lora or None,
            "remat": self._remat,
            "packed": self.packed if self.mode == "train" else None,
            "accumulate": self.accumulate if self.mode == "train" else None,
            "attention": self.attention,
            "mesh": dict(sizes.items()),
            "devices": sizes.devices,
            "parameter_count": parameter_count(config),
            "cache_bytes_per_token": cache_bytes(config, 1, 1, self._dtype if self.cache == "auto" else self.cache),
            "compiler": compiler or "XLA for CPU",
            "note": note,
            "refused": refused,
            "seconds": round(time.perf_counter() - started, 1),
        }
        bounds = {} if hardware is None or refused or self.lora else self._bounds(config, sizes, hardware, found, least)
        if self.json:
            print(as_json(about, found, least, hardware, bounds))
            return
        print(as_table(about, found, for_cpu=hardware is None, own=compiler is not None))
        if sizes.devices > 1:
            print(exchange_table(config.n_layers, found, least, own=compiler is not None))
        print(programs_table(found))
        if hardware is not None and found and not refused:
            print(bound_table(hardware, max(one.memory.total for one in found.values()), bounds))

    @property
    def _remat(self) -> Literal["none", "dots", "full"] | None:
        """The work of the program; None if there is no backward pass."""
        if self.mode == "decode":
            return None
        return "full" if self.remat == "auto" else self.remat

    @property
    def _dtype(self) -> Literal["float32", "bfloat16"]:
        return "float32" if self.dtype == "auto" else self.dtype

    def _weights(self) -> tuple[str, FormatName | PureFormatName | Llama | None]:
        """In what the matrices are planned, in words and as `decode_programs` takes it."""
        if self.quantize != "auto" and self.quantize != "keep":
            return self.quantize, self.quantize
        trained = self.mode == "train" and not self.lora
        if trained or (self.quantize == "auto" and self.dtype != "auto"):
            return "none", None
        words, kinds = kinds_in_files(self.model)
        if self.quantize == "keep" and kinds is None:
            raise ConfigError(f"--quantize keep: {self.model} has no quantized tensors; leave it out, or give a kind")
        return words, kinds

    def _least(self, config: LlamaConfig, sizes: MeshSizes) -> list[DeviceExchange]:
        """The least that the strategy exchanges; of training whole models only."""
        from llama_jax.analysis.roofline import least_traffic

        if self._remat is None or self.lora:
            return []
        return least_traffic(config, sizes, self.batch, self.length, self._dtype, self._remat)

    def _bounds(
        self,
        config: LlamaConfig,
        sizes: MeshSizes,
        hardware: Hardware,
        found: dict[str, CompiledProgram],
        least: list[DeviceExchange],
    ) -> dict[str, Roofline]:
        """The rooflines of the compiled program and, when training, of one with the least exchanges."""
        from llama_jax.analysis.roofline import decoding_roofline, training_roofline

        if self._remat is None:
            memory, exchanged = found["decode"].memory, found["decode"].collectives
            resident = memory.parameters * sizes.columns + memory.cache
            bound = decoding_roofline(config, sizes, self.batch, self.length, hardware, resident, exchanged)
            return {"decode, a token of each row": bound}
        step = (config, sizes, self.batch, self.length, self._dtype, self._remat, hardware)
        return {
            "as compiled": training_roofline(*step, found["train step"].collectives),
            "with the least exchanges": training_roofline(*step, least),
        }

    def _check(self, config: LlamaConfig) -> None:
        from llama_jax.parallel.mesh import parse_mesh

        for name in ("batch", "length", "accumulate"):
            require_positive_int(name, getattr(self, name))
        # Tokens are counted in 32 bits, bytes in 64: XLA aborts where the scores of all layers overflow.
        scores = config.n_layers * self.batch * config.n_heads * self.length**2
        if self.batch * self.length >= 2**31 or scores > 2**60:
            raise ConfigError(f"batch={self.batch} rows of length={self.length} are more than XLA can plan for; take fewer")
        if self.mode == "decode" and self.remat != "auto":
            raise ConfigError(f"--remat {self.remat} is for --mode train: decoding has no backward pass; leave it out")
        if self.mode == "train" and self.cache != "auto":
            raise ConfigError(f"--cache {self.cache} is for --mode decode: training keeps no cache; leave it out")
        if self.mode == "train" and self.quantize != "auto" and not self.lora:
            raise ConfigError(
                f"--quantize {self.quantize} is for --mode decode or --lora: training changes its weights; leave it out"
            )
        if self.lora:
            require_positive_int("lora", self.lora)
            if self.mode == "decode":
                raise ConfigError(f"--lora {self.lora} is for --mode train: merged adapters cost nothing; leave it out")
        if self.mode == "decode" and (self.accumulate > 1 or not self.packed):
            raise ConfigError("--accumulate and --no-packed are for --mode train; leave them out")
        if self.attention != "auto" and parse_mesh(self.mesh).context > 1:
            raise ConfigError(
                f"--attention {self.attention} is of one device: over context it is ring attention; leave it out"
            )
        if self.batch % self.accumulate:
            raise ConfigError(f"batch={self.batch} rows cannot be divided into accumulate={self.accumulate} equal parts")
        if self.mode == "decode" and self.length > config.max_seq_len:
            raise ConfigError(f"length={self.length} exceeds the model's context of {config.max_seq_len}; give at most that")

    def _programs(
        self, config: LlamaConfig, mesh: Mesh, weights: FormatName | PureFormatName | Llama | None
    ) -> list[Program]:
        from llama_jax.analysis.memory import decode_programs, train_programs
        from llama_jax.inference.generate import SMALLEST_CACHE
        from llama_jax.model.cache import bucket
        from llama_jax.model.lora import Lora

        if self._remat is not None:
            return train_programs(
                config,
                mesh,
                self.batch,
                self.length,
                dtype=self._dtype,
                remat=self._remat,
                packed=self.packed,
                accumulate=self.accumulate,
                attention=self.attention,
                lora=Lora(rank=self.lora) if self.lora else None,
                weights=weights,
            )
        capacity = bucket(self.length, SMALLEST_CACHE)
        return decode_programs(
            config,
            mesh,
            self.batch,
            capacity,
            dtype=self._dtype,
            quantized=self.cache == "int8",
            weights=weights,
            attention=self.attention,
        )


def devices_to_plan_for(hardware: str | None, sizes: MeshSizes) -> tuple[Mesh, str | None, str | None]:
    """A mesh for the hardware's own compiler and that compiler's name, or one of simulated CPU devices and why.

    It starts JAX on CPU.

    Raises:
      MeshError: more devices than can be simulated, or than the hardware is built of.
    """
    from llama_jax.analysis.aot_compile import CompilerError, compiler_version, mesh_for, missing_compiler
    from llama_jax.parallel.mesh import make_mesh

    note = None
    if hardware is not None:
        import jax

        note = missing_compiler(hardware)
        if note is None:
            jax.config.update("jax_platforms", "cpu")
            try:
                return mesh_for(hardware, sizes), compiler_version(hardware), None
            except CompilerError as error:
                note = str(error)
    simulate_devices(sizes.devices)
    return make_mesh(sizes), None, note


def read_config(model: str) -> LlamaConfig:
    """The configuration of a preset, or of a model's files without their weights."""
    from llama_jax.config import PRESETS
    from llama_jax.formats import huggingface
    from llama_jax.formats.loading import open_checkpoint
    from llama_jax.storage import locate

    if model in PRESETS:
        return PRESETS[model]
    path = locate(model)
    if not path.exists():
        raise ConfigError(f"{model!r} is neither a preset nor a path; the presets are {', '.join(PRESETS)}")
    settings = path if path.name == "config.json" else path / "config.json"
    if settings.is_file():  # the weights need not be there
        return huggingface.read_config(settings.parent)
    return open_checkpoint(path).config


def kinds_in_files(model: str) -> tuple[str, Llama | None]:
    """The kinds of the matrices that the files of a model hold, in words and by parameter; "none" and None of floats."""
    from llama_jax.config import PRESETS
    from llama_jax.formats import huggingface
    from llama_jax.formats.build_params import plan
    from llama_jax.formats.device_fill import StackParts
    from llama_jax.formats.lazy_tensors import Opened
    from llama_jax.formats.loading import open_checkpoint
    from llama_jax.formats.quantize_on_load import can_be_kept, kinds_of, quantized_kinds
    from llama_jax.storage import locate

    path = locate(model)
    if model in PRESETS or path.name == "config.json":
        return "none", None
    if (path / "config.json").is_file() and not huggingface.recognizes(path):
        return "none", None
    opened = open_checkpoint(path)
    words = quantized_kinds(opened.tensors, can_be_kept)
    if not words:
        return "none", None
    if not isinstance(opened, Opened):
        raise ConfigError(f"{model} is in orbax, whose kinds are not planned for; pass them with --quantize, or a --dtype")
    import jax

    of_parameter = lambda parts: tuple(map(kinds_of, parts.layers if isinstance(parts, StackParts) else [parts]))
    return words, jax.tree.map(of_parameter, plan(opened))


def simulate_devices(count: int) -> None:
    """Make JAX start with this many CPU devices, whatever the machine has."""
    import jax

    most = 2048  # JAX takes devices of higher numbers for those of another process
    if count > most:
        raise MeshError(f"a mesh of {count} devices is beyond the {most} that can be simulated; estimate a part of it")
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", count)


def as_json(
    about: dict[str, Any],
    found: dict[str, CompiledProgram],
    least: list[DeviceExchange],
    hardware: Hardware | None,
    bounds: dict[str, Roofline],
) -> str:
    """One object: the request, for each program the bytes per device and the communication, and the bounds."""
    from llama_jax.analysis.collectives import add_up

    programs = {name: asdict(one.memory) | {"total": one.memory.total} for name, one in found.items()}
    peak = max((one.memory.total for one in found.values()), default=0)
    sums = {"bytes_per_device": programs, "peak_per_device": peak, "peak_of_mesh": peak * about["devices"]}
    traffic = {name: [asdict(row) for row in add_up(one.collectives)] for name, one in found.items()}
    needed = [asdict(row) | {"sent": row.sent} for row in least]
    rooflines = {
        name: asdict(bound)
        | {"limit": bound.limit, "overlapped": bound.overlapped, "apart": bound.apart}
        | {"mfu_overlapped": bound.utilization(bound.overlapped), "mfu_apart": bound.utilization(bound.apart)}
        for name, bound in bounds.items()
    }
    fits = hardware is not None and not about["refused"] and hardware.holds(peak)
    plan = {"hardware": asdict(hardware), "fits": fits, "rooflines": rooflines} if hardware else {}
    seen = {"programs": {name: {"compile_seconds": one.seconds, "attention": one.attention} for name, one in found.items()}}
    return json.dumps(about | sums | {"exchanged": traffic, "least_exchanged": needed} | plan | seen)


def as_table(about: dict[str, Any], found: dict[str, CompiledProgram], *, for_cpu: bool, own: bool) -> str:
    """A column for each program, and one for all devices together while the program that needs the most memory runs."""
    from llama_jax.parallel.mesh import MeshSizes

    columns = {name: asdict(one.memory) | {"total": one.memory.total} for name, one in found.items()}
    devices = about["devices"]
    if devices > 1 and found:
        worst = max(found, key=lambda name: found[name].memory.total)
        columns[f"{worst}, all {devices}"] = {part: size * devices for part, size in columns[worst].items()}
    rows = [("GB per device", [*columns])]
    for part, label in (LABELS | {"total": "total"}).items():
        if any(column[part] for column in columns.values()):
            rows.append((label, [f"{column[part] / 1e9:,.3f}" for column in columns.values()]))
    width = 3 + max(len(cell) for _, cells in rows for cell in cells)

    mesh = MeshSizes(**about["mesh"])
    scores = "Attention of long rows is planned by blocks, whose scores are never in memory at once; so are GPU kernels'."
    if mesh.context > 1:
        scores = "Where rows are divided over context, attention has the scores of a few hundred tokens in memory at once."
    asked = [about["model"], about["mode"], f"batch {about['batch']} x {about['length']}", about["dtype"]]
    asked += [f"weights {about['quantize']}"] if about["quantize"] != "none" else []
    asked += [f"adapters of rank {about['lora']}"] if about["lora"] else []
    asked += [f"remat {about['remat']}"] if about["remat"] else []
    asked += ["packed"] if about["packed"] else []
    asked += [f"accumulate {about['accumulate']}"] if (about["accumulate"] or 1) > 1 else []
    lines = [
        " · ".join([*asked, str(mesh)]),
        f"{about['parameter_count']:,} parameters · cache {about['cache_bytes_per_token']:,} bytes per token",
        "",
    ]
    if found:
        lines += [*(f"{label:<28}" + "".join(f"{cell:>{width}}" for cell in cells) for label, cells in rows), ""]
    lines += [f"The compiler says that it does not fit: {message}" for message in about["refused"].values()]
    if own:
        lines.append(f"Compiled by {about['compiler']}: this is its plan.")
        return "\n".join(lines)
    lines += [scores, "Temporaries are what XLA plans for CPU devices; GPU and TPU backends fuse differently."]
    if about["note"]:
        lines.append(f"Their own compiler was not asked: {about['note']}")
    if about["dtype"] == "bfloat16" and for_cpu:
        lines.append("XLA for CPU keeps many bfloat16 arrays in float32 as well: --hardware NAME plans without that.")
    return "\n".join(lines)


def programs_table(found: dict[str, CompiledProgram]) -> str:
    """How long each program was compiled, and how it computes attention."""
    attention = {name: f", attention: {'; '.join(one.attention)}" if one.attention else "" for name, one in found.items()}
    return "\n".join(["", *(f"{name}: compiled in {one.seconds:.0f} s{attention[name]}" for name, one in found.items())])


def exchange_table(n_layers: int, found: dict[str, CompiledProgram], least: list[DeviceExchange], *, own: bool) -> str:
    """The communication of a device while each program runs once, and the least for comparison."""
    from llama_jax.inference.generate import STEPS_PER_CHUNK

    lines, exchanged = [], [one for program in found.values() for one in program.collectives]
    for name, program in found.items():
        if program.collectives:
            lines += ["", *_kinds(name, program.collectives, n_layers)]
    lines += ["", *_least_of_each(least)] if least else []
    lines += ["", *_sums(exchanged, least)] if least else []
    lines += ["", "Sent is what a device sends by a ring. Where an all-reduce is followed by a slice, `scattered` is what a"]
    lines += [
        "reduce-scatter would send." if own else "backend sends that forms a reduce-scatter, which XLA for CPU does not."
    ]
    if any(not one.is_counted for one in exchanged):
        lines.append(
            f"One turn is counted of loops whose number of turns is not fixed: {STEPS_PER_CHUNK} tokens of each row."
        )
    return "\n".join(lines)


def _kinds(program: str, members: list[Collective], n_layers: int) -> list[str]:
    """A line for each kind, axes and type of elements."""
    columns = ("forward", "again", "backward", "others", "GB result", "GB sent", "scattered")
    rows: dict[tuple[str, str, str], list[Collective]] = {}
    for one in members:
        rows.setdefault((",".join(one.axes), one.kind, "+".join(one.dtypes)), []).append(one)
    lines = [f"{program + ': exchanges in each layer, and others':<48}" + "".join(f"{c:>11}" for c in columns)]
    for (axes, kind, dtypes), row in sorted(rows.items()):
        layered = [one for one in row if n_layers in one.loops]
        counts = [sum(one.count for one in layered if one.phase == phase) for phase in columns[:3]]
        cells = [*(f"{count / n_layers:g}" for count in counts), f"{sum(one.count for one in row) - sum(counts):,}"]
        sizes = (
            sum(one.count * one.bytes for one in row),
            sum(one.count * one.sent for one in row),
            sum(one.count * one.sent_if_scattered for one in row),
        )
        cells += [f"{size / 1e9:,.3f}" for size in sizes]
        lines.append(f"  {axes + ' ' + kind + ' ' + dtypes:<46}" + "".join(f"{cell:>11}" for cell in cells))
    return lines


def _least_of_each(least: list[DeviceExchange]) -> list[str]:
    lines = [f"{'the least that this strategy exchanges':<81}{'count':>11}{'GB sent':>11}"]
    for one in least:
        name = f"{','.join(one.axes)} {one.kind}: {one.what}"
        lines.append(f"  {name:<79}{one.count:>11,}{one.count * one.sent / 1e9:>11,.3f}")
    return lines


def _sums(members: list[Collective], least: list[DeviceExchange]) -> list[str]:
    """A line for each axis, or group of axes, of the mesh."""
    lines = [f"{'GB sent by a device along':<48}" + "".join(f"{c:>11}" for c in ("compiled", "scattered", "least"))]
    for axes in sorted({one.axes for one in members} | {one.axes for one in least}):
        along = [one for one in members if one.axes == axes]
        sums = (
            sum(one.count * one.sent for one in along),
            sum(one.count * one.sent_if_scattered for one in along),
            sum(one.count * one.sent for one in least if one.axes == axes),
        )
        lines.append(f"  {','.join(axes):<46}" + "".join(f"{size / 1e9:>11,.3f}" for size in sums))
    return lines


def bound_table(hardware: Hardware, peak: int, bounds: dict[str, Roofline]) -> str:
    """Whether it fits, and the least seconds."""
    share = peak / hardware.memory
    beyond = hardware.network_bandwidth
    network = "" if beyond is None else f" and {beyond / 1e9:,.4g} GB/s beyond"
    lines = [
        "",
        f"{hardware.name}: {hardware.flops / 1e12:,.4g} TFLOP/s, memory {hardware.memory_bandwidth / 1e12:,.3g} TB/s, "
        f"links {hardware.link_bandwidth / 1e9:,.4g} GB/s between {hardware.domain:,} devices{network}",
        f"{peak / 1e9:,.1f} GB is {share:.0%} of its memory of {hardware.memory / 1e9:,.1f} GB: "
        + ("it fits" if hardware.holds(peak) else "it does not fit"),
    ]
    if bounds:
        names = "compute", "memory", "exchange", "overlapped", "apart"
        lines += ["", f"{'least seconds':<30}" + "".join(f"{name:>13}" for name in names)]
    for name, bound in bounds.items():
        parts = (bound.compute, bound.memory, bound.exchange, bound.overlapped, bound.apart)
        lines.append(f"{name:<30}" + "".join(f"{seconds:>13,.4g}" for seconds in parts))
        mfu = (f"{bound.utilization(seconds):.0%}" for seconds in parts[3:])
        lines.append(f"{'  MFU at most':<69}" + "".join(f"{share:>13}" for share in mfu))
    return "\n".join(lines)
