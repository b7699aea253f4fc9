"""``llama-jax estimate``: how much memory training or generating takes per device, on devices that need not be there."""

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
    from llama_jax.config import LlamaConfig
    from llama_jax.parallel.memory import Memory, Program
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
    """Print the memory that training or generating takes on each device. Nothing is allocated, no weights are read."""

    model: tyro.conf.Positional[str]
    """A preset such as llama-3.1-8b, or a model's folder or file, or its config.json; only the settings are read."""
    batch: int
    """Rows over the whole mesh."""
    length: int
    """Tokens per row: to predict when training, to keep in the cache when decoding."""
    mesh: str = "data=1"
    """Ways to split, as data=2,fsdp=4,tensor=8: the batch; the batch and the parameters; heads and features."""
    mode: Literal["train", "decode"] = "decode"
    """train: one step of AdamW; decode: reading prompts, enlarging the cache, generating."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Of computation, parameters and cache; training keeps parameters and optimizer state in float32 all the same."""
    remat: Literal["auto", "none", "dots", "full"] = "auto"
    """What training computes twice, to keep less: nothing, all but matrix products (dots), or whole layers (full, auto)."""
    json: bool = False
    """Print one JSON object, sizes in bytes."""

    def run(self) -> None:
        import jax.numpy as jnp

        from llama_jax.cli.runtime import use_compilation_cache
        from llama_jax.model.cache import cache_bytes
        from llama_jax.model.params import parameter_count
        from llama_jax.parallel.mesh import parse_mesh

        started = time.perf_counter()
        config = read_config(self.model)
        sizes = parse_mesh(self.mesh)
        self._check(config)
        simulate_devices(sizes.devices)
        use_compilation_cache()

        found = {}
        for program in self._programs(config, sizes):
            count = f"{sizes.devices} simulated device{'s' * (sizes.devices > 1)}"
            print(f"compiling {program.name} for {count}...", file=sys.stderr, flush=True)
            found[program.name] = program.memory()
        about = {
            "model": self.model,
            "mode": self.mode,
            "batch": self.batch,
            "length": self.length,
            "dtype": self.dtype,
            "remat": self._remat,
            "mesh": dict(sizes.items()),
            "devices": sizes.devices,
            "parameter_count": parameter_count(config),
            "cache_bytes_per_token": cache_bytes(config, 1, 1, jnp.dtype(self.dtype)),
            "seconds": round(time.perf_counter() - started, 1),
        }
        print(as_json(about, found) if self.json else as_table(about, found))

    @property
    def _remat(self) -> Literal["none", "dots", "full"] | None:
        """What is done; None where there is no backward pass."""
        if self.mode == "decode":
            return None
        return "full" if self.remat == "auto" else self.remat

    def _check(self, config: LlamaConfig) -> None:
        for name in ("batch", "length"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}={getattr(self, name)} must be a positive whole number")
        # Tokens are counted in 32 bits, bytes in 64: XLA aborts where the scores of all layers overflow.
        scores = config.n_layers * self.batch * config.n_heads * self.length**2
        if self.batch * self.length >= 2**31 or scores > 2**60:
            raise ConfigError(f"batch={self.batch} rows of length={self.length} are more than XLA can plan for; take fewer")
        if self.mode == "decode" and self.remat != "auto":
            raise ConfigError(f"--remat {self.remat} is for --mode train: decoding has no backward pass; leave it out")
        if self.mode == "decode" and self.length > config.max_seq_len:
            raise ConfigError(f"length={self.length} exceeds the model's context of {config.max_seq_len}; take less")

    def _programs(self, config: LlamaConfig, sizes: MeshSizes) -> list[Program]:
        from llama_jax.inference.generate import SMALLEST_CACHE
        from llama_jax.model.cache import bucket
        from llama_jax.parallel.memory import decode_programs, train_programs
        from llama_jax.parallel.mesh import make_mesh

        mesh = make_mesh(sizes)
        if self._remat is not None:
            return train_programs(config, mesh, self.batch, self.length, dtype=self.dtype, remat=self._remat)
        return decode_programs(config, mesh, self.batch, bucket(self.length, SMALLEST_CACHE), dtype=self.dtype)


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

    most = 16_384  # takes a quarter of a minute and 2 GB
    if count > most:
        raise MeshError(f"a mesh of {count} devices is beyond the {most} that can be simulated; estimate a part of it")
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", count)


def as_json(about: dict[str, Any], found: dict[str, Memory]) -> str:
    """One object: what was asked, and for each program the bytes per device."""
    programs = {name: asdict(memory) | {"total": memory.total} for name, memory in found.items()}
    peak = max(memory.total for memory in found.values())
    sums = {"bytes_per_device": programs, "peak_per_device": peak, "peak_of_mesh": peak * about["devices"]}
    return json.dumps(about | sums)


def as_table(about: dict[str, Any], found: dict[str, Memory]) -> str:
    """A column for each program, and one for all devices together while the hungriest of them runs."""
    columns = {name: asdict(memory) | {"total": memory.total} for name, memory in found.items()}
    devices = about["devices"]
    if devices > 1:
        worst = max(found, key=lambda name: found[name].total)
        columns[f"{worst}, all {devices}"] = {part: size * devices for part, size in columns[worst].items()}
    rows = [("GB per device", [*columns])]
    for part, label in (LABELS | {"total": "total"}).items():
        if any(column[part] for column in columns.values()):
            rows.append((label, [f"{column[part] / 1e9:,.3f}" for column in columns.values()]))
    width = 3 + max(len(cell) for _, cells in rows for cell in cells)

    mesh = ",".join(f"{axis}={size}" for axis, size in about["mesh"].items())
    asked = [about["model"], about["mode"], f"batch {about['batch']} x {about['length']}", about["dtype"]]
    asked += [f"remat {about['remat']}"] if about["remat"] else []
    lines = [
        " · ".join([*asked, mesh]),
        f"{about['parameter_count']:,} parameters · cache {about['cache_bytes_per_token']:,} bytes per token",
        "",
        *(f"{label:<28}" + "".join(f"{cell:>{width}}" for cell in cells) for label, cells in rows),
        "",
        "The scores [B, N, T, T] of a layer's attention are in memory at once.",
        "Temporaries are what XLA plans for CPU devices; GPU and TPU backends fuse differently.",
    ]
    if about["dtype"] == "bfloat16":
        lines.append("XLA for CPU keeps many bfloat16 arrays in float32 as well: elsewhere expect fewer temporaries.")
    return "\n".join(lines)
