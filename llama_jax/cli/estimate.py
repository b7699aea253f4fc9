"""``llama-jax estimate``: memory, communication and least time of training or generating, without the devices."""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal

import tyro

from llama_jax.cli.estimate_tables import as_json, as_table, bound_table, exchange_table, programs_table
from llama_jax.cli.options import ATTENTION, QUANTIZE, CompileOptions
from llama_jax.config.numbers import require_positive_int
from llama_jax.errors import ConfigError, MeshError

if TYPE_CHECKING:
    from jax.sharding import Mesh

    from llama_jax.analysis.findings import Findings
    from llama_jax.analysis.hardware import Hardware
    from llama_jax.analysis.memory import Program
    from llama_jax.analysis.roofline import DeviceExchange, Roofline
    from llama_jax.config import LlamaConfig
    from llama_jax.model.params import Llama
    from llama_jax.ops.weights import Name, Pure
    from llama_jax.parallel.mesh import MeshSizes


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
    """When training, the rank of LoRA adapters of all matrices; the model itself is frozen, in --dtype. No least
    communication and no least time are given for that."""
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
        kinds, weights = self._weights()
        use_compilation_cache(self.no_cache)
        least = self._least(config, sizes)
        if hardware is not None:
            exchange_seconds(least, sizes, hardware)  # raises before a compilation where its links do not reach

        found: dict[str, Findings] = {}
        refused: dict[str, str] = {}
        for program in self._programs(config, mesh, weights):
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
        """The work of the program; None if there is no backward pass."""
        if self.mode == "decode":
            return None
        return "full" if self.remat == "auto" else self.remat

    @property
    def _dtype(self) -> Literal["float32", "bfloat16"]:
        return "float32" if self.dtype == "auto" else self.dtype

    def _weights(self) -> tuple[str, Name | Pure | Llama | None]:
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
        found: dict[str, Findings],
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

    def _programs(self, config: LlamaConfig, mesh: Mesh, weights: Name | Pure | Llama | None) -> list[Program]:
        from llama_jax.analysis.memory import decode_programs, train_programs
        from llama_jax.inference.generate import SMALLEST_CACHE
        from llama_jax.model.adapters import Lora
        from llama_jax.model.cache import bucket

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
