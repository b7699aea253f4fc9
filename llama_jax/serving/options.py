"""Options of an engine: number of rows, context length, limits of the queue; and the memory that they need.

The memory of a server is planned before anything is allocated.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated

import jax
import jax.numpy as jnp

from llama_jax.config import LlamaConfig, suggest_context
from llama_jax.errors import GenerationError, UserError, short_repr
from llama_jax.inference.speculation import DraftModel, PromptLookup
from llama_jax.model.cache import PAGE_SIZE, CacheOptions, cache_bytes
from llama_jax.model.forward_options import ComputeOptions
from llama_jax.settings import Bounds, at_least, check_fields

CPU_CHUNK, CHUNK = 32, 256  # tokens of a prefill chunk
TOKENS_OF_ROW = 512  # default capacity per row
# Shares of the available memory for the page pool: the first share in which some options fit is used. A machine has other
# work, and the rest of the plan is an estimate.
MACHINE_SHARES = 0.5, 0.75, 0.95
ACCELERATOR_SHARES = (0.9,)
# Bytes of a compiled program per layer. On a CPU SmolLM2's take 1.07 MB, and 1.63 MB if loaded from the compilation cache;
# other platforms have not been measured.
LAYER_BYTES = {"cpu": 1_600_000, "gpu": 200_000, "tpu": 200_000}
CGROUPS = Path("/sys/fs/cgroup")
MEMINFO = Path("/proc/meminfo")


@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """Options of an engine.

    Attributes:
      rows: maximum number of requests served concurrently.
      cache_tokens: capacity of the cache in tokens, for all requests and cached prefixes together; None for 512 per row, and
        at least one whole context. If it is full, requests wait, and the youngest are preempted and prefilled again later.
      context: maximum number of tokens of prompt and continuation together; None for the model's context length, but no more
        than the cache holds if RoPE scaling extends it (`LlamaConfig.default_context`): the cache does not grow by that.
      prefill_chunk: tokens of a prompt that are prefilled per step, in which every other row gets a token. The prefix cache
        holds whole chunks, all of which are prefilled by one program. A multiple of 16, the page size; None for 32 on a
        CPU, where the time of a step is proportional to its tokens, and 256 elsewhere.
      most_waiting, most_waiting_tokens: maximum number of waiting requests, and of tokens of their prompts; more are
        rejected.
      prefix_bytes: maximum bytes of cached prefixes; 0 disables the prefix cache.
      cache: dtype of the cache: int8, or by default that of the parameters. A window is not supported.
      draft: drafts tokens, several of which are verified in a turn if that is faster: by prompt lookup, or by a smaller
        model with the same vocabulary and at least this context, which prefills all prompts too; None for no drafts. Drafts
        change the speed but, except for near-ties, not the tokens.
      compute: an attention implementation, or a dtype; by default that of the parameters.

    Raises:
      GenerationError: an invalid value.
    """

    rows: Annotated[int, at_least(1)] = 16
    cache_tokens: Annotated[int, at_least(1)] | None = None
    context: Annotated[int, at_least(2)] | None = None
    prefill_chunk: Annotated[int, at_least(PAGE_SIZE)] | None = None
    most_waiting: Annotated[int, at_least(0)] = 256
    most_waiting_tokens: Annotated[int, at_least(0)] = 2**18
    prefix_bytes: Annotated[int, Bounds(0)] = 2**28
    cache: CacheOptions = CacheOptions()
    draft: PromptLookup | DraftModel | None = None
    compute: ComputeOptions = field(default_factory=ComputeOptions)

    def __post_init__(self) -> None:
        check_fields(self, GenerationError)
        if self.prefill_chunk is not None and self.prefill_chunk % PAGE_SIZE:
            raise GenerationError(
                f"prefill_chunk={self.prefill_chunk} must be a multiple of {PAGE_SIZE}, the tokens of a page"
            )
        if not isinstance(self.draft, PromptLookup | DraftModel | None):
            raise GenerationError(f"draft={short_repr(self.draft, 40)} must be a PromptLookup, a DraftModel or None")
        if self.cache.window is not None:
            raise GenerationError(f"window={self.cache.window} is not supported by an engine; omit it")

    def context_of(self, config: LlamaConfig) -> int:
        """The maximum number of tokens of prompt and continuation together.

        Raises:
          GenerationError: more than the context of the model or of the draft model.
        """
        if self.context is not None and self.context > config.max_seq_len:
            raise GenerationError(
                f"context={self.context} must be at most the model's context of {config.max_seq_len}"
                f"{suggest_context(config, self.context)}"
            )
        context = self.context
        if context is None:
            planned, longest = config.default_context, config.max_seq_len
            if isinstance(self.draft, DraftModel):
                longest = min(longest, max(planned, self.draft.config.max_seq_len))
            context = min(longest, max(planned, self.cache_tokens or self.rows * min(TOKENS_OF_ROW, planned)))
        if isinstance(self.draft, DraftModel) and context > self.draft.config.max_seq_len:
            raise GenerationError(
                f"the draft model's context is {self.draft.config.max_seq_len} tokens, but the engine's {context}; set"
                f" context={self.draft.config.max_seq_len} (--context), or use a draft model with a longer context"
            )
        return context

    def pool_bytes(self, config: LlamaConfig, dtype: jax.typing.DTypeLike) -> int:
        """Bytes of the cache of a model that computes in `dtype`."""
        return self.pages(config) * cache_bytes(config, 1, PAGE_SIZE, jnp.dtype(self.cache.dtype or dtype))

    @property
    def programs(self) -> int:
        """Approximate number of compiled programs: one per step shape, and `burst`, `score`, `empty` and `enter`."""
        return len(self.steps) + 4

    def smaller(self, config: LlamaConfig, fixed: Collection[str] = ()) -> Iterator[EngineOptions]:
        """These options, then variants with the context and then the rows halved repeatedly, except `fixed` ones."""
        options = replace(self, context=self.context_of(config))
        yield options
        for name, least in (("context", TOKENS_OF_ROW), ("rows", 1)):
            while name not in fixed and (value := getattr(options, name)) > least:
                options = replace(options, **{name: max(value // 2, least)})
                yield options

    def pages(self, config: LlamaConfig) -> int:
        """The number of pages of the cache.

        Raises:
          GenerationError: fewer than a request with the whole context needs.
        """
        context = self.context_of(config)
        tokens = self.cache_tokens
        if tokens is None:
            tokens = max(self.rows * min(TOKENS_OF_ROW, context, config.default_context), context)
        if tokens < context:
            raise GenerationError(
                f"cache_tokens={tokens} must be at least the context of {context}; increase it, or set a shorter context"
            )
        return -(-tokens // PAGE_SIZE)

    def for_platform(self, platform: str) -> EngineOptions:
        """The options with the default `prefill_chunk` for a model on this platform."""
        return replace(self, prefill_chunk=self.prefill_chunk or (CPU_CHUNK if platform == "cpu" else CHUNK))

    @property
    def chunk_tokens(self) -> int:
        """`prefill_chunk`, or the default for the devices of this process."""
        return self.prefill_chunk or self.for_platform(jax.default_backend()).chunk_tokens

    @property
    def steps(self) -> tuple[tuple[int, int], ...]:
        """The (rows, tokens) of steps with compiled programs, ascending; only the last can prefill whole chunks."""
        sizes = [1]
        while sizes[-1] < self.rows:
            sizes.append(min(4 * sizes[-1], self.rows))
        with_prefill = ((self.rows, self.rows + count) for count in sorted({PAGE_SIZE, self.chunk_tokens}))
        return (*((size, size) for size in sizes), *with_prefill)


@dataclass(frozen=True, kw_only=True)
class MemoryPlan:
    """Bytes of device memory that a server needs; of main memory if the device is the CPU.

    Attributes:
      weights: weights of the model and of the draft model.
      pool: pages for keys and values, of running requests and of cached prefixes.
      programs: an estimate for the compiled programs and their largest temporary array.
      free: memory available for all of this; None if unknown.
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
        """The bytes left for the pool; may be negative."""
        return None if self.free is None else self.free - (self.total - self.pool)

    def fits(self, share: float) -> bool:
        """Whether the pool takes at most this share of `room`."""
        return self.room is None or self.pool <= share * self.room

    def __str__(self) -> str:
        parts = {"weights": self.weights, "keys and values": self.pool}
        parts |= {"programs about": self.programs, "in all": self.total}
        free = "" if self.free is None else f"; {self.free / 1e6:,.0f} MB are free"
        return f"{', '.join(f'{name} {size / 1e6:,.0f}' for name, size in parts.items())} MB{free}"


def fit_options(
    options: EngineOptions,
    config: LlamaConfig,
    plan_of: Callable[[EngineOptions], MemoryPlan],
    chosen: Collection[str],
    shares: Sequence[float] = MACHINE_SHARES,
) -> tuple[EngineOptions, MemoryPlan]:
    """Options with as many rows and as much context as the memory allows, and their plan.

    Args:
      chosen: names of options that must not be changed.

    Raises:
      UserError: the chosen options do not fit; the message names options that help.
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
    """Approximate bytes of a compiled program."""
    return LAYER_BYTES.get(platform, 0) * config.n_layers


def free_memory(device: jax.Device) -> int | None:
    """Free bytes of a device's memory; None if unknown. For a CPU: the memory that the system, and the control groups of
    this process (containers), still allow."""
    if device.platform == "cpu":
        return min((free for free in (_free_of_system(), *_free_of_groups()) if free is not None), default=None)
    stats = device.memory_stats() or {}
    return stats["bytes_limit"] - stats.get("bytes_in_use", 0) if "bytes_limit" in stats else None


def _free_of_system() -> int | None:
    with suppress(OSError, StopIteration):
        line = next(line for line in MEMINFO.read_text().splitlines() if line.startswith("MemAvailable:"))
        return int(line.split()[1]) << 10
    with suppress(OSError, ValueError, AttributeError):  # total memory, if the system does not report free memory
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return None


def _free_of_groups() -> list[int]:
    """Free bytes of each control group (version 2) of this process with a limit; cached files count as free."""
    left = []
    with suppress(OSError):
        group_path = next(
            (line[3:] for line in Path("/proc/self/cgroup").read_text().splitlines() if line[:3] == "0::"), "/"
        )
        folder = CGROUPS / group_path.strip("/")
        for group in (folder, *folder.parents):
            with suppress(OSError, ValueError):  # "max" means no limit
                limit, used = (int((group / f"memory.{name}").read_text()) for name in ("max", "current"))
                stats = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
                left.append(limit - used + int(stats.get("inactive_file", 0)))
    return left


def return_freed_memory() -> None:
    """Return freed memory to the system: glibc keeps it, and compiling and warming up programs leaves gigabytes."""
    if sys.platform == "linux":
        with suppress(OSError, AttributeError):  # another C library
            ctypes.CDLL(None).malloc_trim(0)
