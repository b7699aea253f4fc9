"""``llama-jax estimate``: memory, communication and least time of training or generating, without the devices."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple

import tyro

from llama_jax.cli.options import QUANTIZE, AttentionOption, CompileOptions, PartsOption, unless_auto
from llama_jax.cli.terminal import columns
from llama_jax.errors import ConfigError, MeshError
from llama_jax.settings import at_least

if TYPE_CHECKING:
    from jax.sharding import Mesh

    from llama_jax.analysis.collectives import Collective
    from llama_jax.analysis.hardware import Hardware
    from llama_jax.analysis.memory import Memory, Program
    from llama_jax.analysis.roofline import DeviceExchange, Roofline
    from llama_jax.config import LlamaConfig
    from llama_jax.model.params import LlamaParams
    from llama_jax.ops.weights.formats import FormatName, PureFormatName
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


def compile_program(program: Program, *, accelerator: bool) -> CompiledProgram:
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
class Estimate(PartsOption, AttentionOption, CompileOptions):
    """Estimate memory per device, communication between devices, and a lower bound on the time of training or generation.

    Nothing is allocated and no weights are read: the program is compiled for devices that need not exist, and analyzed. For
    --hardware its own compiler is used if it is installed (the extras compile-tpu and compile-gpu).
    """

    model: tyro.conf.Positional[Annotated[str, tyro.conf.arg(metavar="PRESET|PATH")]]
    """A preset such as llama-3.1-8b, folder or file of a model, or a config.json. Only the settings are read."""
    batch: Annotated[int, at_least(1)]
    """Rows of the whole mesh together."""
    length: Annotated[int, at_least(1)]
    """Tokens per row: predicted in training, kept in the cache in decoding."""
    mesh: Annotated[str, tyro.conf.arg(metavar="AXIS=N,...")] = "data=1"
    """The mesh, for example data=2,fsdp=4,context=2,tensor=8. data shards the batch; fsdp the batch and the parameters;
    context the tokens of each row and the parameters; tensor heads and features."""
    mode: Literal["train", "decode"] = "decode"
    """train is a step with AdamW; decode is prefill and decoding."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Type of computation, parameters and cache; parameters and optimizer state in training are always float32. auto is
    float32 and keeps quantized matrices of the files, except when they are trained."""
    cache: Literal["auto", "int8"] = "auto"
    """Decoding: type of the key/value cache. auto is --dtype; int8 has a scale per head and position."""
    quantize: QUANTIZE = "auto"
    """Decoding, or training with --lora: quantize the matrices. keep takes the quantized matrices of the files."""
    lora: Annotated[int, at_least(0)] = 0
    """Training: rank of LoRA adapters on all matrices of the frozen model, which is in --dtype. With LoRA, and for a
    model with custom parts, no lower bound on the time is computed."""
    remat: Literal["auto", "none", "dots", "full"] = "auto"
    """Training: what the backward pass recomputes to save memory: nothing (none), everything except matrix products (dots),
    or whole layers (full, auto). Fine-tuning recipes use dots."""
    packed: Annotated[bool, tyro.conf.arg(help_behavior_hint="")] = True
    """Training: one document per row. By default several are packed into a row, as `train` does."""
    accumulate: Annotated[int, at_least(1)] = 1
    """Training: number of parts of the batch whose gradients are accumulated sequentially."""
    hardware: Annotated[str | None, tyro.conf.arg(metavar="NAME")] = None
    """Hardware to plan for, such as h200 or tpu-v5p: does the program fit, and how fast could it be? The default is a
    CPU."""
    json: bool = False
    """Print a JSON object, with sizes in bytes."""

    def run(self) -> None:
        from llama_jax.analysis.hardware import hardware_by_name
        from llama_jax.analysis.memory import DoesNotFitError
        from llama_jax.analysis.roofline import exchange_seconds, least_traffic
        from llama_jax.cli.jax_setup import use_compilation_cache
        from llama_jax.model.cache import cache_bytes
        from llama_jax.model.trees import parameter_count
        from llama_jax.parallel.mesh import parse_mesh

        started = time.perf_counter()
        hardware = None if self.hardware is None else hardware_by_name(self.hardware)
        sizes = parse_mesh(self.mesh)
        mesh, compiler, reason = devices_to_plan_for(self.hardware, sizes)  # before a run's folder is opened: it starts JAX
        (config,) = self.with_parts(read_model_config(self.model))
        self._check(config)
        quantization, weights = self._weights()
        use_compilation_cache(self.no_cache)
        least: list[DeviceExchange] = []
        if self._remat is not None and not self.lora and not config.parts:
            least = least_traffic(config, sizes, self.batch, self.length, self._dtype, self._remat)
        if hardware is not None:
            exchange_seconds(least, sizes, hardware)  # raises before a compilation where its links do not reach

        programs: dict[str, CompiledProgram] = {}
        refused: dict[str, str] = {}
        for program in self._programs(config, mesh, weights):
            count = f"{sizes.devices} {'simulated ' if compiler is None else ''}device{'s' * (sizes.devices > 1)}"
            by = f" by {compiler}" if compiler else ""
            print(f"compiling {program.name} for {count}{by}...", file=sys.stderr, flush=True)
            try:
                programs[program.name] = compile_program(program, accelerator=hardware is not None)
            except DoesNotFitError as error:
                refused[program.name] = str(error)
        training = ("packed", "accumulate")
        request = {
            **{name: getattr(self, name) for name in ("model", "mode", "batch", "length", "attention")},
            **{name: getattr(self, name) if self.mode == "train" else None for name in training},
            "dtype": self._dtype,
            "quantize": quantization,
            "lora": self.lora or None,
            "remat": self._remat,
            "mesh": dict(sizes.items()),
            "devices": sizes.devices,
            "parameter_count": parameter_count(config),
            "cache_bytes_per_token": cache_bytes(config, 1, 1, unless_auto(self.cache) or self._dtype),
            "compiler": compiler or "XLA for CPU",
            "note": reason,
            "refused": refused,
            "seconds": round(time.perf_counter() - started, 1),
        }
        bounds = (
            {}
            if hardware is None or refused or self.lora or config.parts
            else self._bounds(config, sizes, hardware, programs, least)
        )
        if self.json:
            print(estimate_json(request, programs, least, hardware, bounds))
            return
        print(estimate_table(request, programs, for_cpu=hardware is None, has_compiler=compiler is not None))
        if sizes.devices > 1:
            print(exchange_table(config.n_layers, programs, least, has_compiler=compiler is not None))
        print(programs_table(programs))
        if hardware is not None and programs and not refused:
            print(bound_table(hardware, max(program.memory.total for program in programs.values()), bounds))

    @property
    def _remat(self) -> Literal["none", "dots", "full"] | None:
        """What the backward pass recomputes; None without a backward pass."""
        if self.mode == "decode":
            return None
        return unless_auto(self.remat) or "full"

    @property
    def _dtype(self) -> Literal["float32", "bfloat16"]:
        return unless_auto(self.dtype) or "float32"

    @property
    def _capacity(self) -> int:
        """Slots of the cache in each row, of which `length` are filled."""
        from llama_jax.inference.compiled_decode import MIN_CACHE_CAPACITY
        from llama_jax.model.cache import bucket

        return bucket(self.length, MIN_CACHE_CAPACITY)

    def _weights(self) -> tuple[str, FormatName | PureFormatName | LlamaParams | None]:
        """The kinds of the matrices, in words and as an argument of `decode_programs`."""
        if self.quantize != "auto" and self.quantize != "keep":
            return self.quantize, self.quantize
        trained = self.mode == "train" and not self.lora
        if trained or (self.quantize == "auto" and self.dtype != "auto"):
            return "none", None
        words, formats = formats_in_files(self.model)
        if self.quantize == "keep" and formats is None:
            raise ConfigError(f"--quantize keep: {self.model} has no quantized tensors; omit it, or choose a kind")
        return words, formats

    def _bounds(
        self,
        config: LlamaConfig,
        sizes: MeshSizes,
        hardware: Hardware,
        programs: dict[str, CompiledProgram],
        least: list[DeviceExchange],
    ) -> dict[str, Roofline]:
        """The rooflines of the compiled program and, when training, of one with the least exchanges."""
        from llama_jax.analysis.roofline import decoding_roofline, training_roofline
        from llama_jax.training.flops import last_token_scores

        if self._remat is None:
            memory, exchanged = programs["decode"].memory, programs["decode"].collectives
            slots = config.n_layers * config.n_heads * self._capacity
            cache_read = memory.cache * last_token_scores(config, self.length) / slots
            resident = memory.parameters * sizes.columns + cache_read
            bound = decoding_roofline(config, sizes, self.batch, self.length, hardware, resident, exchanged)
            return {"decode, a token of each row": bound}
        step = (config, sizes, self.batch, self.length, self._dtype, self._remat, hardware)
        return {
            "as compiled": training_roofline(*step, programs["train step"].collectives),
            "with the least exchanges": training_roofline(*step, least),
        }

    def _check(self, config: LlamaConfig) -> None:
        from llama_jax.parallel.mesh import parse_mesh

        # Tokens are counted in 32 bits, bytes in 64: XLA aborts where the scores of all layers overflow.
        scores = config.n_layers * self.batch * config.n_heads * self.length**2
        if self.batch * self.length >= 2**31 or scores > 2**60:
            raise ConfigError(f"batch={self.batch} rows of length={self.length} are more than XLA can plan for; lower them")
        decode = self.mode == "decode"
        for name, mode, applies, why in (
            ("remat", "--mode train", not decode, "decoding has no backward pass"),
            ("cache", "--mode decode", decode, "training keeps no cache"),
            ("quantize", "--mode decode or --lora", decode or self.lora, "training changes its weights"),
            ("lora", "--mode train", not decode, "merged adapters cost nothing"),
            ("accumulate", "--mode train", not decode, "decoding has no gradients"),
            ("packed", "--mode train", not decode, "decoding has one text per row"),
        ):
            value = getattr(self, name)
            if value != getattr(type(self), name) and not applies:
                option = f"--{name} {value}" if name != "packed" else "--no-packed"
                raise ConfigError(f"{option} is only for {mode}: {why}; omit it")
        if self.attention != "auto" and parse_mesh(self.mesh).context > 1:
            raise ConfigError(
                f"--attention {self.attention} does not apply to a mesh with context, which uses ring attention; omit it"
            )
        if self.batch % self.accumulate:
            raise ConfigError(f"batch={self.batch} rows cannot be divided into accumulate={self.accumulate} equal parts")
        if self.mode == "decode" and self.length > config.max_seq_len:
            raise ConfigError(f"length={self.length} exceeds the model's context of {config.max_seq_len}; lower it")

    def _programs(
        self, config: LlamaConfig, mesh: Mesh, weights: FormatName | PureFormatName | LlamaParams | None
    ) -> list[Program]:
        from llama_jax.analysis.memory import decode_programs, train_programs
        from llama_jax.model.lora import Lora

        options: dict[str, Any] = {"dtype": self._dtype, "attention": self.attention, "weights": weights}
        if self._remat is None:
            return decode_programs(config, mesh, self.batch, self._capacity, quantized=self.cache == "int8", **options)
        options |= {"remat": self._remat, "packed": self.packed, "accumulate": self.accumulate}
        lora = Lora(rank=self.lora) if self.lora else None
        return train_programs(config, mesh, self.batch, self.length, lora=lora, **options)


def devices_to_plan_for(hardware: str | None, sizes: MeshSizes) -> tuple[Mesh, str | None, str | None]:
    """A mesh for the hardware's own compiler and that compiler's name, or one of simulated CPU devices and why.

    It starts JAX on CPU.

    Raises:
      MeshError: more devices than can be simulated, or than the hardware is built of.
    """
    from llama_jax.analysis.aot_compile import CompilerError, compiler_version, mesh_for, missing_compiler
    from llama_jax.parallel.mesh import make_mesh

    reason = None
    if hardware is not None:
        import jax

        reason = missing_compiler(hardware)
        if reason is None:
            jax.config.update("jax_platforms", "cpu")
            try:
                return mesh_for(hardware, sizes), compiler_version(hardware), None
            except CompilerError as error:
                reason = str(error)
    simulate_devices(sizes.devices)
    return make_mesh(sizes), None, reason


def read_model_config(model: str) -> LlamaConfig:
    """The configuration of a preset, or of a model's files without their weights."""
    from llama_jax.config.presets import PRESETS
    from llama_jax.formats import huggingface, orbax_format
    from llama_jax.formats.loading import open_checkpoint
    from llama_jax.storage import locate

    if model in PRESETS:
        return PRESETS[model]
    path = locate(model)
    if not path.exists():
        raise ConfigError(f"{model!r} is neither a preset nor a path; the presets are {', '.join(PRESETS)}")
    settings = path if path.name == "config.json" else path / "config.json"
    if settings.is_file() and not orbax_format.is_orbax(path):  # the weights need not be there
        return huggingface.read_config_json(settings.parent)
    return open_checkpoint(path).config


def formats_in_files(model: str) -> tuple[str, LlamaParams | None]:
    """The kinds of the matrices that the files of a model hold, in words and by parameter; "none" and None of floats."""
    from llama_jax.config.presets import PRESETS
    from llama_jax.formats import huggingface
    from llama_jax.formats.build_params import plan
    from llama_jax.formats.device_fill import StackedSource
    from llama_jax.formats.loading import open_checkpoint
    from llama_jax.formats.quantize_on_load import can_be_kept, describe_quantized_types, kept_formats
    from llama_jax.storage import locate

    path = locate(model)
    if model in PRESETS or path.name == "config.json":
        return "none", None
    if (path / "config.json").is_file() and not huggingface.is_huggingface(path):
        return "none", None
    opened = open_checkpoint(path)
    words = describe_quantized_types(opened.tensors, can_be_kept)
    if not words:
        return "none", None
    if not opened.names:
        raise ConfigError(f"{model} is in orbax, whose quantization is not read here; pass --quantize or --dtype")
    import jax

    of_parameter = lambda parts: tuple(map(kept_formats, parts.layers if isinstance(parts, StackedSource) else [parts]))
    return words, jax.tree.map(of_parameter, plan(opened))


def simulate_devices(count: int) -> None:
    """Make JAX start with this many CPU devices, whatever the machine has."""
    import jax

    most = 2048  # JAX takes devices of higher numbers for those of another process
    if count > most:
        raise MeshError(f"a mesh of {count} devices exceeds the {most} that can be simulated; use a smaller mesh")
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", count)


def estimate_json(
    request: dict[str, Any],
    programs: dict[str, CompiledProgram],
    least: list[DeviceExchange],
    hardware: Hardware | None,
    bounds: dict[str, Roofline],
) -> str:
    """One object: the request, for each program the bytes per device and the communication, and the bounds."""
    from llama_jax.analysis.collectives import sum_traffic

    peak = max((program.memory.total for program in programs.values()), default=0)
    result = request | {
        "bytes_per_device": {
            name: asdict(program.memory) | {"total": program.memory.total} for name, program in programs.items()
        },
        "peak_per_device": peak,
        "peak_of_mesh": peak * request["devices"],
        "exchanged": {name: [asdict(row) for row in sum_traffic(program.collectives)] for name, program in programs.items()},
        "least_exchanged": [asdict(row) | {"sent": row.sent} for row in least],
        "programs": {
            name: {"compile_seconds": program.seconds, "attention": program.attention} for name, program in programs.items()
        },
    }
    if hardware is not None:
        result |= {
            "hardware": asdict(hardware),
            "fits": not request["refused"] and hardware.holds(peak),
            "rooflines": {
                name: asdict(bound)
                | {"limit": bound.limit, "overlapped": bound.overlapped, "apart": bound.apart}
                | {"mfu_overlapped": bound.utilization(bound.overlapped), "mfu_apart": bound.utilization(bound.apart)}
                for name, bound in bounds.items()
            },
        }
    return json.dumps(result)


def _numbers_table(rows: list[list[str]]) -> str:
    """Rows whose first cells are names and whose other cells are numbers."""
    return columns(rows, right=range(1, len(rows[0])))


def estimate_table(
    request: dict[str, Any], programs: dict[str, CompiledProgram], *, for_cpu: bool, has_compiler: bool
) -> str:
    """A column for each program, and one for all devices together while the program that needs the most memory runs."""
    from llama_jax.parallel.mesh import MeshSizes

    memory = {name: asdict(program.memory) | {"total": program.memory.total} for name, program in programs.items()}
    devices, mesh = request["devices"], MeshSizes(**request["mesh"])
    if devices > 1 and programs:
        worst = max(programs, key=lambda name: programs[name].memory.total)
        memory[f"{worst}, all {devices}"] = {part: size * devices for part, size in memory[worst].items()}
    rows = [["GB per device", *memory]]
    for part, label in (LABELS | {"total": "total"}).items():
        if any(column[part] for column in memory.values()):
            rows.append([label, *(f"{column[part] / 1e9:,.3f}" for column in memory.values())])

    words = [request["model"], request["mode"], f"batch {request['batch']} x {request['length']}", request["dtype"]]
    words += [f"weights {request['quantize']}"] if request["quantize"] != "none" else []
    words += [f"adapters of rank {request['lora']}"] if request["lora"] else []
    words += [f"remat {request['remat']}"] if request["remat"] else []
    words += ["packed"] if request["packed"] else []
    words += [f"accumulate {request['accumulate']}"] if (request["accumulate"] or 1) > 1 else []
    lines = [
        " · ".join([*words, str(mesh)]),
        f"{request['parameter_count']:,} parameters · cache {request['cache_bytes_per_token']:,} bytes per token",
        "",
        *([_numbers_table(rows), ""] if programs else []),
        *(f"The compiler reports that it does not fit: {message}" for message in request["refused"].values()),
    ]
    if has_compiler:
        return "\n".join([*lines, f"Compiled by {request['compiler']}: this is its plan."])
    if mesh.context > 1:
        lines.append(
            "Where rows are divided over context, attention has the scores of a few hundred tokens in memory at once."
        )
    else:
        lines.append(
            "Attention of long rows is planned by blocks, whose scores are never in memory at once; so are GPU kernels'."
        )
    lines.append("Temporaries are what XLA plans for CPU devices; GPU and TPU backends fuse differently.")
    if request["note"]:
        lines.append(f"The hardware's own compiler was not used: {request['note']}")
    if request["dtype"] == "bfloat16" and for_cpu:
        lines.append("XLA for CPU keeps many bfloat16 arrays in float32 as well: --hardware NAME plans without that.")
    return "\n".join(lines)


def programs_table(programs: dict[str, CompiledProgram]) -> str:
    """How long each program was compiled, and how it computes attention."""
    attention = {
        name: f", attention: {'; '.join(program.attention)}" if program.attention else ""
        for name, program in programs.items()
    }
    return "\n".join(
        ["", *(f"{name}: compiled in {program.seconds:.0f} s{attention[name]}" for name, program in programs.items())]
    )


def exchange_table(
    n_layers: int, programs: dict[str, CompiledProgram], least: list[DeviceExchange], *, has_compiler: bool
) -> str:
    """The communication of a device while each program runs once, and the least for comparison."""
    from llama_jax.inference.decode import STEPS_PER_CHUNK

    exchanged = [exchange for program in programs.values() for exchange in program.collectives]
    tables = [
        _collectives_table(name, program.collectives, n_layers) for name, program in programs.items() if program.collectives
    ]
    if least:
        rows = [["the least that this strategy exchanges", "count", "GB sent"]]
        for exchange in least:
            name = f"  {','.join(exchange.axes)} {exchange.opcode}: {exchange.what}"
            rows.append([name, f"{exchange.count:,}", _gigabytes([exchange])])
        totals = [["GB sent by a device along", "compiled", "scattered", "least"]]
        for axes in sorted({exchange.axes for exchange in exchanged} | {exchange.axes for exchange in least}):
            along = [exchange for exchange in exchanged if exchange.axes == axes]
            needed = [exchange for exchange in least if exchange.axes == axes]
            totals.append(
                [f"  {','.join(axes)}", _gigabytes(along), _gigabytes(along, "sent_if_scattered"), _gigabytes(needed)]
            )
        tables += [_numbers_table(rows), _numbers_table(totals)]
    backend = (
        "reduce-scatter would send."
        if has_compiler
        else "backend sends that forms a reduce-scatter, which XLA for CPU does not."
    )
    legend = f"""\
Sent is what a device sends by a ring. Where an all-reduce is followed by a slice, `scattered` is what a
{backend}"""
    if any(not exchange.is_counted for exchange in exchanged):
        legend += f"\nA loop without a fixed number of iterations is counted once: {STEPS_PER_CHUNK} tokens of each row."
    return "".join(f"\n{table}\n" for table in tables) + f"\n{legend}"


def _gigabytes(exchanges: Iterable[Any], size: str = "sent") -> str:
    return f"{sum(exchange.count * getattr(exchange, size) for exchange in exchanges) / 1e9:,.3f}"


def _collectives_table(program: str, collectives: list[Collective], n_layers: int) -> str:
    """A line for each kind, axes and type of elements."""
    phases = ("forward", "again", "backward")
    groups: dict[tuple[str, str, str], list[Collective]] = {}
    for collective in collectives:
        groups.setdefault((",".join(collective.axes), collective.opcode, "+".join(collective.dtypes)), []).append(collective)
    rows = [[f"{program}: exchanges in each layer, and others", *phases, "others", "GB result", "GB sent", "scattered"]]
    for names, group in sorted(groups.items()):
        counts = [
            sum(collective.count for collective in group if n_layers in collective.loops and collective.phase == phase)
            for phase in phases
        ]
        outside = sum(collective.count for collective in group) - sum(counts)
        sizes = [_gigabytes(group, size) for size in ("bytes", "sent", "sent_if_scattered")]
        rows.append([f"  {' '.join(names)}", *(f"{count / n_layers:g}" for count in counts), f"{outside:,}", *sizes])
    return _numbers_table(rows)


def bound_table(hardware: Hardware, peak: int, bounds: dict[str, Roofline]) -> str:
    """Whether it fits, and the least seconds."""
    network = hardware.network_bandwidth
    lines = [
        "",
        f"{hardware.name}: {hardware.flops / 1e12:,.4g} TFLOP/s, memory {hardware.memory_bandwidth / 1e12:,.3g} TB/s, "
        f"links {hardware.link_bandwidth / 1e9:,.4g} GB/s between {hardware.domain:,} devices"
        + ("" if network is None else f" and {network / 1e9:,.4g} GB/s beyond"),
        f"{peak / 1e9:,.1f} GB is {peak / hardware.memory:.0%} of its memory of {hardware.memory / 1e9:,.1f} GB: "
        + ("it fits" if hardware.holds(peak) else "it does not fit"),
    ]
    names = ["compute", "memory", "exchange", "overlapped", "apart"]
    rows = [["least seconds", *names]]
    for name, bound in bounds.items():
        rows.append([name, *(f"{getattr(bound, part):,.4g}" for part in names)])
        mfu = [f"{bound.utilization(seconds):.0%}" for seconds in (bound.overlapped, bound.apart)]
        rows.append(["  MFU at most", "", "", "", *mfu])
    return "\n".join([*lines, *(["", _numbers_table(rows)] if bounds else [])])
