"""How an engine is laid out: how many rows at once, of how many tokens, what may wait; and whether the memory has room.

What a server needs of the memory is planned before anything is allocated.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from llama_jax.config import LlamaConfig
from llama_jax.errors import GenerationError, UserError, shown
from llama_jax.inference.speculation import DraftModel, PromptLookup
from llama_jax.model.cache import PAGE_SIZE, CacheOptions, cache_bytes
from llama_jax.model.forward_options import Compute

CPU_CHUNK, CHUNK = 32, 256  # tokens of a prompt that are read in one step
TOKENS_OF_ROW = 512  # for which there is room by default
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
class EngineOptions:
    """What an engine is told beside model and requests.

    Attributes:
      rows: requests that are served at once at most.
      cache_tokens: that there is room for, of all requests and kept prefixes together; None for 512 of each row, and for one
        whole context at least. Where there is no room, requests wait, and the youngest are read again later.
      context: tokens that prompt and continuation may have together; None takes the model's.
      prefill_chunk: tokens of a prompt that are read in one step, in which every other row gets a token. The prefix cache
        keeps whole chunks, all of which are read by one program. A multiple of 16, the tokens of a page; None for 32 on a
        CPU, where a step takes as long as it has tokens, and 256 elsewhere.
      most_waiting, most_waiting_tokens: requests, and tokens of their prompts, that may wait; more are refused.
      prefix_bytes: that prefixes which are kept may take of the cache; 0 turns that off.
      cache: in int8, or of the parameters' dtype. A window is not served.
      draft: proposes tokens, several of which are then verified in a turn, if that is faster: where text repeats itself, or
        by a smaller model of the same vocabulary and at least this context, which reads all prompts as well; None for none.
        It changes how fast tokens come and, near ties apart, not which they are.
      compute: an attention of your own, or a dtype; by default the parameters'.

    Raises:
      GenerationError: a value that cannot be.
    """

    rows: int = 16
    cache_tokens: int | None = None
    context: int | None = None
    prefill_chunk: int | None = None
    most_waiting: int = 256
    most_waiting_tokens: int = 2**18
    prefix_bytes: int = 2**28
    cache: CacheOptions = CacheOptions()
    draft: PromptLookup | DraftModel | None = None
    compute: Compute = field(default_factory=Compute)

    def __post_init__(self) -> None:
        least: dict[str, int] = {"rows": 1, "prefix_bytes": 0, "most_waiting": 0, "most_waiting_tokens": 0}
        for name, lowest in (("context", 2), ("cache_tokens", 1), ("prefill_chunk", PAGE_SIZE)):
            if getattr(self, name) is not None:
                least[name] = lowest
        for name, lowest in least.items():
            value: Any = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < lowest:
                raise GenerationError(f"{name}={value!r} must be an integer of at least {lowest}")
        if self.prefill_chunk is not None and self.prefill_chunk % PAGE_SIZE:
            raise GenerationError(
                f"prefill_chunk={self.prefill_chunk} must be a multiple of {PAGE_SIZE}, the tokens of a page"
            )
        if not isinstance(self.draft, PromptLookup | DraftModel | None):
            raise GenerationError(f"draft={shown(self.draft, 40)}: an engine drafts by a PromptLookup or a DraftModel")
        if self.cache.window is not None:
            raise GenerationError(f"window={self.cache.window}: an engine keeps whole contexts; leave the window out")

    def context_of(self, config: LlamaConfig) -> int:
        """Tokens of prompt and continuation together.

        Raises:
          GenerationError: more than the model's, or the draft's.
        """
        if self.context is not None and self.context > config.max_seq_len:
            raise GenerationError(f"context={self.context} exceeds the model's of {config.max_seq_len}; choose at most that")
        context = self.context or config.max_seq_len
        if isinstance(self.draft, DraftModel) and context > self.draft.config.max_seq_len:
            raise GenerationError(
                f"the draft's context is {self.draft.config.max_seq_len} tokens, the engine's {context}; pass"
                f" context={self.draft.config.max_seq_len} (--context), or a draft that can read as many"
            )
        return context

    def pool_bytes(self, config: LlamaConfig, dtype: jax.typing.DTypeLike) -> int:
        """Bytes of the cache of a model whose computation is in `dtype`."""
        return self.pages(config) * cache_bytes(config, 1, PAGE_SIZE, jnp.dtype(self.cache.dtype or dtype))

    @property
    def programs(self) -> int:
        """About how many programs are compiled: one for each step, a burst, a scoring, and what empties and enters rows."""
        return len(self.steps) + 4

    def smaller(self, config: LlamaConfig, fixed: Collection[str] = ()) -> Iterator[EngineOptions]:
        """The same options, then with less context and fewer rows, by halves; but for `fixed` ones."""
        options = replace(self, context=self.context_of(config))
        yield options
        for name, least in (("context", TOKENS_OF_ROW), ("rows", 1)):
            while name not in fixed and (value := getattr(options, name)) > least:
                options = replace(options, **{name: max(value // 2, least)})
                yield options

    def pages(self, config: LlamaConfig) -> int:
        """Pages of the cache.

        Raises:
          GenerationError: fewer than one request of the whole context takes.
        """
        context = self.context_of(config)
        tokens = self.cache_tokens
        if tokens is None:
            tokens = max(self.rows * min(TOKENS_OF_ROW, context), context)
        if tokens < context:
            raise GenerationError(
                f"cache_tokens={tokens} are less than the context of {context}; set as many, or a shorter context"
            )
        return -(-tokens // PAGE_SIZE)

    def for_platform(self, platform: str) -> EngineOptions:
        """The same with the default of `prefill_chunk` for a model on devices of this platform."""
        return replace(self, prefill_chunk=self.prefill_chunk or (CPU_CHUNK if platform == "cpu" else CHUNK))

    @property
    def chunk(self) -> int:
        """`prefill_chunk`, or the default for this process's devices."""
        return self.prefill_chunk or self.for_platform(jax.default_backend()).chunk

    @property
    def steps(self) -> tuple[tuple[int, int], ...]:
        """The rows and tokens of steps that programs are compiled for, rising; only the last reads whole chunks."""
        sizes = [1]
        while sizes[-1] < self.rows:
            sizes.append(min(4 * sizes[-1], self.rows))
        with_prefill = ((self.rows, self.rows + count) for count in sorted({PAGE_SIZE, self.chunk}))
        return (*((size, size) for size in sizes), *with_prefill)


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
