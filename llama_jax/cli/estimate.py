"""``llama-jax estimate``: memory, exchanges and least time of training or generating, on devices that need not be there."""

from __future__ import annotations

import json
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import tyro

from llama_jax.errors import ConfigError, MeshError

if TYPE_CHECKING:
    from jax.sharding import Mesh

    from llama_jax.analysis.collectives import Collective
    from llama_jax.analysis.findings import Findings
    from llama_jax.analysis.hardware import Hardware
    from llama_jax.analysis.memory import Program
    from llama_jax.analysis.roofline import Exchange, Roofline
    from llama_jax.config import LlamaConfig
    from llama_jax.parallel.mesh import MeshSizes

LABELS = {
    "parameters": "parameters",
    "gradients": "gradients",
    "optimizer": "optimizer state (AdamW)",
    "cache": "cache",
    "temporaries": "activations and temporaries",
    "scratch": "scratch of CPU kernels",
}


@dataclass(frozen=True)
class Estimate:
    """Print the memory that training or generating takes on each device, what devices exchange, and how fast it could be.

    Nothing is allocated, no weights are read: the program is compiled for devices that need not be there and looked at. For
    --hardware its own compiler is asked where it is installed (the extras compile-tpu and compile-gpu).
    """

    model: tyro.conf.Positional[str]
    """A preset such as llama-3.1-8b, or a model's folder or file, or its config.json; only the settings are read."""
    batch: int
    """Rows over the whole mesh."""
    length: int
    """Tokens per row: to predict when training, to keep in the cache when decoding."""
    mesh: str = "data=1"
    """Ways to split, as data=2,fsdp=4,context=2,tensor=8: the batch; the batch and the parameters; each row's tokens, where
    rows are read whole, and the parameters; heads and features."""
    mode: Literal["train", "decode"] = "decode"
    """train: one step of AdamW; decode: reading prompts, enlarging the cache, generating."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Of computation, parameters and cache; training keeps parameters and optimizer state in float32 all the same."""
    cache: Literal["auto", "int8"] = "auto"
    """When decoding, keys and values are of the dtype, or 8-bit numbers with a factor for each head and position."""
    remat: Literal["auto", "none", "dots", "full"] = "auto"
    """What training computes twice, to keep less: nothing, all but matrix products (dots), or whole layers (full, auto)."""
    packed: bool = True
    """When training, rows are filled with several documents each, as `train` does, and not with one."""
    accumulate: int = 1
    """When training, parts of the batch that are read one after the other."""
    hardware: str | None = None
    """Such as h200 or tpu-v5p: plan for it instead of for CPUs, see whether it fits, and bound the time by its figures."""
    json: bool = False
    """Print one JSON object, sizes in bytes."""

    def run(self) -> None:

        from llama_jax.analysis.findings import examine
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
        use_compilation_cache()
        least = self._least(config, sizes)
        if hardware is not None:
            exchange_seconds(least, sizes, hardware)  # raises before a compilation where its links do not reach

        found: dict[str, Findings] = {}
        refused: dict[str, str] = {}
        for program in self._programs(config, mesh):
            count = f"{sizes.devices} {'simulated ' if compiler is None else ''}device{'s' * (sizes.devices > 1)}"
            by = f" by {compiler}" if compiler else ""
            print(f"compiling {program.name} for {count}{by}...", file=sys.stderr, flush=True)
            try:
                found[program.name] = examine(program, accelerator=hardware is not None)
            except DoesNotFitError as error:
                refused[program.name] = str(error)
        about = {
            "model": self.model,
            "mode": self.mode,
            "batch": self.batch,
            "length": self.length,
            "dtype": self.dtype,
            "remat": self._remat,
            "packed": self.packed if self.mode == "train" else None,
            "accumulate": self.accumulate if self.mode == "train" else None,
            "mesh": dict(sizes.items()),
            "devices": sizes.devices,
            "parameter_count": parameter_count(config),
            "cache_bytes_per_token": cache_bytes(config, 1, 1, self.dtype if self.cache == "auto" else self.cache),
            "compiler": compiler or "XLA for CPU",
            "note": note,
            "refused": refused,
            "seconds": round(time.perf_counter() - started, 1),
        }
        bounds = {} if hardware is None or refused else self._bounds(config, sizes, hardware, found, least)
        if self.json:
            print(as_json(about, found, least, hardware, bounds, own=compiler is not None))
            return
        print(as_table(about, found, for_cpu=hardware is None, own=compiler is not None))
        if sizes.devices > 1:
            print(exchange_table(config.n_layers, found, least, own=compiler is not None))
        if compiler is not None:
            print(programs_table(found))
        if hardware is not None and found and not refused:
            print(bound_table(hardware, max(one.memory.total for one in found.values()), bounds))

    @property
    def _remat(self) -> Literal["none", "dots", "full"] | None:
        """What is done; None where there is no backward pass."""
        if self.mode == "decode":
            return None
        return "full" if self.remat == "auto" else self.remat

    def _least(self, config: LlamaConfig, sizes: MeshSizes) -> list[Exchange]:
        """The least that the strategy exchanges; of training only."""
        from llama_jax.analysis.roofline import least_traffic

        if self._remat is None:
            return []
        return least_traffic(config, sizes, self.batch, self.length, self.dtype, self._remat)

    def _bounds(
        self,
        config: LlamaConfig,
        sizes: MeshSizes,
        hardware: Hardware,
        found: dict[str, Findings],
        least: list[Exchange],
    ) -> dict[str, Roofline]:
        """The rooflines of the compiled program and, when training, of one with the least exchanges."""
        from llama_jax.analysis.roofline import decoding_roofline, training_roofline

        if self._remat is None:
            memory, exchanged = found["decode"].memory, found["decode"].collectives
            resident = memory.parameters * sizes.columns + memory.cache
            bound = decoding_roofline(config, sizes, self.batch, self.length, hardware, resident, exchanged)
            return {"decode, a token of each row": bound}
        step = (config, sizes, self.batch, self.length, self.dtype, self._remat, hardware)
        return {
            "as compiled": training_roofline(*step, found["train step"].collectives),
            "with the least exchanges": training_roofline(*step, least),
        }

    def _check(self, config: LlamaConfig) -> None:
        for name in ("batch", "length", "accumulate"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}={getattr(self, name)} must be a positive whole number")
        # Tokens are counted in 32 bits, bytes in 64: XLA aborts where the scores of all layers overflow.
        scores = config.n_layers * self.batch * config.n_heads * self.length**2
        if self.batch * self.length >= 2**31 or scores > 2**60:
            raise ConfigError(f"batch={self.batch} rows of length={self.length} are more than XLA can plan for; take fewer")
        if self.mode == "decode" and self.remat != "auto":
            raise ConfigError(f"--remat {self.remat} is for --mode train: decoding has no backward pass; leave it out")
        if self.mode == "train" and self.cache != "auto":
            raise ConfigError(f"--cache {self.cache} is for --mode decode: training keeps no cache; leave it out")
        if self.mode == "decode" and (self.accumulate > 1 or not self.packed):
            raise ConfigError("--accumulate and --no-packed are for --mode train; leave them out")
        if self.batch % self.accumulate:
            raise ConfigError(f"batch={self.batch} rows cannot be divided into accumulate={self.accumulate} equal parts")
        if self.mode == "decode" and self.length > config.max_seq_len:
            raise ConfigError(f"length={self.length} exceeds the model's context of {config.max_seq_len}; take less")

    def _programs(self, config: LlamaConfig, mesh: Mesh) -> list[Program]:
        from llama_jax.analysis.memory import decode_programs, train_programs
        from llama_jax.inference.generate import SMALLEST_CACHE
        from llama_jax.model.cache import bucket

        if self._remat is not None:
            return train_programs(
                config,
                mesh,
                self.batch,
                self.length,
                dtype=self.dtype,
                remat=self._remat,
                packed=self.packed,
                accumulate=self.accumulate,
            )
        capacity = bucket(self.length, SMALLEST_CACHE)
        return decode_programs(config, mesh, self.batch, capacity, dtype=self.dtype, quantized=self.cache == "int8")


def devices_to_plan_for(hardware: str | None, sizes: MeshSizes) -> tuple[Mesh, str | None, str | None]:
    """A mesh for the hardware's own compiler and that compiler's name, or one of simulated CPU devices and why.

    It starts JAX on CPU.

    Raises:
      MeshError: more devices than can be simulated, or than the hardware is built of.
    """
    from llama_jax.analysis.compilers import CompilerError, compiler_missing, compiler_of, mesh_for
    from llama_jax.parallel.mesh import make_mesh

    note = None
    if hardware is not None:
        import jax

        note = compiler_missing(hardware)
        if note is None:
            jax.config.update("jax_platforms", "cpu")
            try:
                return mesh_for(hardware, sizes), compiler_of(hardware), None
            except CompilerError as error:
                note = str(error)
    simulate_devices(sizes.devices)
    return make_mesh(sizes), None, note


def read_config(model: str) -> LlamaConfig:
    """The configuration of a preset, or of a model's files without their weights."""
    from llama_jax.checkpoints import huggingface
    from llama_jax.checkpoints.loading import open_checkpoint
    from llama_jax.config import PRESETS

    if model in PRESETS:
        return PRESETS[model]
    path = Path(model)
    if not path.exists():
        raise ConfigError(f"{model!r} is neither a preset nor a path; the presets are {', '.join(PRESETS)}")
    settings = path if path.name == "config.json" else path / "config.json"
    if settings.is_file():  # the weights need not be there
        return huggingface.read_config(settings.parent)
    return open_checkpoint(path).config


def simulate_devices(count: int) -> None:
    """Make JAX start with so many CPU devices, whatever the machine has."""
    import jax

    most = 2048  # JAX takes devices of higher numbers for those of another process
    if count > most:
        raise MeshError(f"a mesh of {count} devices is beyond the {most} that can be simulated; estimate a part of it")
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", count)


def as_json(
    about: dict[str, Any],
    found: dict[str, Findings],
    least: list[Exchange],
    hardware: Hardware | None,
    bounds: dict[str, Roofline],
    *,
    own: bool,
) -> str:
    """One object: what was asked, for each program the bytes per device and what is exchanged, and the bounds."""
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
    seen = {"programs": {name: one.as_dict() for name, one in found.items()}} if own else {}
    return json.dumps(about | sums | {"exchanged": traffic, "least_exchanged": needed} | plan | seen)


def as_table(about: dict[str, Any], found: dict[str, Findings], *, for_cpu: bool, own: bool) -> str:
    """A column for each program, and one for all devices together while the hungriest of them runs."""
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
    lines += [f"It does not fit, says the compiler: {message}" for message in about["refused"].values()]
    if own:
        lines.append(f"Compiled by {about['compiler']}: this is its plan.")
        return "\n".join(lines)
    lines += [scores, "Temporaries are what XLA plans for CPU devices; GPU and TPU backends fuse differently."]
    if about["note"]:
        lines.append(f"Their own compiler was not asked: {about['note']}")
    if about["dtype"] == "bfloat16" and for_cpu:
        lines.append("XLA for CPU keeps many bfloat16 arrays in float32 as well: --hardware NAME plans without that.")
    return "\n".join(lines)


def programs_table(found: dict[str, Findings]) -> str:
    """What the accelerator's compiler made of each program: kernels, copies, and what a token reads."""
    lines = []
    for name, one in found.items():
        lines += ["", f"{name}: compiled in {one.seconds:.0f} s"]
        if one.attention:
            lines.append(f"  attention: {'; '.join(one.attention)}")
        if one.calls:
            calls = ", ".join(f"{kernel} in {count} place{'s' * (count > 1)}" for kernel, count in one.calls.items())
            lines.append(f"  kernels called: {calls}")
        if one.asynchronous is not None:
            lines.append(f"  of the bytes sent {one.asynchronous:.0%} while matrices are multiplied")
        if one.copies:
            lines.append(f"  copies of at least 1 MiB: {len(one.copies)}, {one.copied / 1e9:,.3f} GB in all; the largest")
            for copy in sorted(one.copies, key=lambda copy: -copy.bytes * copy.times)[:3]:
                times = f" x {copy.times}" if copy.times > 1 else ""
                lines.append(f"    {copy.shape} {copy.bytes / 1e9:,.3f} GB{times}{', in a loop' if copy.in_loop else ''}")
        if one.token is not None and one.read_ratio is not None and one.kernels_per_layer is not None:
            lines.append(
                f"  a token of each row reads {one.token.read / 1e9:,.3f} GB, {one.read_ratio:.3f} of the least (weights and"
                f" cache: {one.per_token / 1e9:,.3f} GB), and writes {one.token.written / 1e9:,.3f} GB"
            )
            lines.append(f"  {one.kernels_per_layer:.1f} kernels a layer, {one.token.kernels:,} in all")
    return "\n".join(lines)


def exchange_table(n_layers: int, found: dict[str, Findings], least: list[Exchange], *, own: bool) -> str:
    """What a device exchanges while each program runs once, and beside it the least."""
    from llama_jax.inference.generate import CHUNK

    exchanged = {name: list(one.collectives) for name, one in found.items()}
    lines = []
    for program, members in exchanged.items():
        if members:
            lines += ["", *_kinds(program, members, n_layers)]
    lines += ["", *_least_of_each(least)] if least else []
    lines += ["", *_sums([one for members in exchanged.values() for one in members], least)] if least else []
    lines += ["", "Sent is what a device sends by a ring. Where an all-reduce is followed by a slice, `scattered` is what a"]
    lines += [
        "reduce-scatter would send." if own else "backend sends that forms a reduce-scatter, which XLA for CPU does not."
    ]
    if any(not one.is_counted for members in exchanged.values() for one in members):
        lines.append(f"Of loops whose turns the program does not know one turn is counted: {CHUNK} tokens of each row.")
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


def _least_of_each(least: list[Exchange]) -> list[str]:
    lines = [f"{'the least that this strategy exchanges':<81}{'count':>11}{'GB sent':>11}"]
    for one in least:
        name = f"{','.join(one.axes)} {one.kind}: {one.what}"
        lines.append(f"  {name:<79}{one.count:>11,}{one.count * one.sent / 1e9:>11,.3f}")
    return lines


def _sums(members: list[Collective], least: list[Exchange]) -> list[str]:
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
        "",
        f"{'least seconds':<30}" + "".join(f"{c:>13}" for c in ("compute", "memory", "exchange", "overlapped", "apart")),
    ]
    for name, bound in bounds.items():
        parts = (bound.compute, bound.memory, bound.exchange, bound.overlapped, bound.apart)
        lines.append(f"{name:<30}" + "".join(f"{seconds:>13,.4g}" for seconds in parts))
        mfu = (f"{bound.utilization(seconds):.0%}" for seconds in parts[3:])
        lines.append(f"{'  MFU at most':<69}" + "".join(f"{share:>13}" for share in mfu))
    return "\n".join(lines)
