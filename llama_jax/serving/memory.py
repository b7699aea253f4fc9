"""What a server needs of the memory: planned before anything is allocated."""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import jax

from llama_jax.config import LlamaConfig
from llama_jax.errors import UserError
from llama_jax.serving.options import EngineOptions

# Of the room for it, what the pool may have: the first share that something fits into. A machine has other work, and the
# rest of the plan is an estimate.
MACHINE_SHARES = 0.5, 0.75, 0.95
ACCELERATOR_SHARES = (0.9,)
# Of a compiled program, for each layer. On a CPU SmolLM2's take 1.07 MB, and 1.63 where they come from the cache; the others
# have not been measured.
LAYER_BYTES = {"cpu": 1_600_000, "gpu": 200_000, "tpu": 200_000}
CGROUPS = Path("/sys/fs/cgroup")
MEMINFO = Path("/proc/meminfo")


@dataclass(frozen=True, kw_only=True)
class MemoryPlan:
    """Bytes that a server needs of a device's memory; of the machine's where the processor is the device.

    Attributes:
      weights: of the model, and of one that drafts.
      pool: of the pages for keys and values, of running requests and of prefixes that are kept.
      programs: an estimate for the compiled programs and their largest temporary array.
      free: what there is for all of this; None where nothing says.
    """

    weights: int
    pool: int
    programs: int
    free: int | None

    @property
    def total(self) -> int:
        return self.weights + self.pool + self.programs

    @property
    def room(self) -> int | None:
        """What a pool may have beside the rest; may be negative."""
        return None if self.free is None else self.free - (self.total - self.pool)

    def fits(self, share: float) -> bool:
        """Whether the pool takes at most a share of the room for it."""
        return self.room is None or self.pool <= share * self.room

    def __str__(self) -> str:
        parts = {"weights": self.weights, "keys and values": self.pool}
        parts |= {"programs about": self.programs, "all": self.total}
        free = "" if self.free is None else f" of {self.free / 1e6:,.0f} MB free"
        return f"{', '.join(f'{name} {size / 1e6:,.0f}' for name, size in parts.items())}{free}"


def fit(
    options: EngineOptions,
    config: LlamaConfig,
    plan_of: Callable[[EngineOptions], MemoryPlan],
    chosen: Collection[str],
    shares: Sequence[float] = MACHINE_SHARES,
) -> tuple[EngineOptions, MemoryPlan]:
    """Options with as many rows and as much context as the memory allows, and their plan.

    Args:
      chosen: names of those that stay as they are.

    Raises:
      UserError: what was chosen does not fit; the message names the options that help.
    """
    plans = [(smaller, plan_of(smaller)) for smaller in options.smaller(config, chosen)]
    for share in shares:
        for smaller, plan in plans:
            if plan.fits(share):
                return smaller, plan
    smallest, plan = plans[-1]
    fitting = next((smaller for smaller in options.smaller(config) if plan_of(smaller).fits(shares[-1])), None)
    if fitting is None:
        remedy = "choose fewer bits (--quantize q4_0), or a smaller model"
    else:
        names = [name for name in chosen if getattr(fitting, name) != getattr(smallest, name)]
        remedy = " ".join(f"--{name.replace('_', '-')} {getattr(fitting, name)}" for name in names) + " would fit"
    raise UserError(f"the memory is too small: {plan}; {remedy}")


def program_bytes(config: LlamaConfig, platform: str) -> int:
    """About how many bytes a compiled program takes."""
    return LAYER_BYTES.get(platform, 0) * config.n_layers


def free_memory(device: jax.Device) -> int | None:
    """Bytes of a device that nobody uses; None where nothing says. A processor's are those that the system, and the control
    groups of this process (containers), still give."""
    if device.platform == "cpu":
        return min((free for free in (_free_of_system(), *_free_of_groups()) if free is not None), default=None)
    stats = device.memory_stats() or {}
    return stats["bytes_limit"] - stats.get("bytes_in_use", 0) if "bytes_limit" in stats else None


def _free_of_system() -> int | None:
    with suppress(OSError, StopIteration):
        line = next(line for line in MEMINFO.read_text().splitlines() if line.startswith("MemAvailable:"))
        return int(line.split()[1]) << 10
    with suppress(OSError, ValueError, AttributeError):  # all of it, where the system does not say how much is free
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return None


def _free_of_groups() -> list[int]:
    """What each control group of this process with a limit (version 2) has left; files that it caches can be given back."""
    left = []
    with suppress(OSError):
        group_path = next(
            (line[3:] for line in Path("/proc/self/cgroup").read_text().splitlines() if line[:3] == "0::"), "/"
        )
        folder = CGROUPS / group_path.strip("/")
        for group in (folder, *folder.parents):
            with suppress(OSError, ValueError):  # "max" is no limit
                limit, used = (int((group / f"memory.{name}").read_text()) for name in ("max", "current"))
                stats = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
                left.append(limit - used + int(stats.get("inactive_file", 0)))
    return left


def return_freed_memory() -> None:
    """Give freed memory back to the system: glibc keeps it, and compiling and trying programs leave gigabytes."""
    if sys.platform == "linux":
        with suppress(OSError, AttributeError):  # another C library
            ctypes.CDLL(None).malloc_trim(0)
