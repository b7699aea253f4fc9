"""How an engine is laid out: how many rows at once, of how many tokens, and what may wait."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import jax

from llama_jax.config import LlamaConfig
from llama_jax.errors import GenerationError, shown
from llama_jax.inference.speculation import DraftModel, PromptLookup
from llama_jax.model.cache import cache_bytes
from llama_jax.model.options import Compute
from llama_jax.model.window import CacheOptions

SMALLEST_PIECE = 16  # the last piece of a prompt may be so short
ONE_SIZE = 512  # slots of a row that may stay empty for the sake of fewer programs: more would be much memory


@dataclass(frozen=True, kw_only=True)
class PoolOptions:
    """Rows that are decoded together, in one state of `inference.state`.

    Attributes:
      rows: numbers of rows that programs are compiled for, rising. The state has as few as hold all that runs.
      capacities: slots of each row, likewise, each a multiple of the piece.
    """

    rows: tuple[int, ...]
    capacities: tuple[int, ...]

    def __post_init__(self) -> None:
        for name in ("rows", "capacities"):
            sizes = getattr(self, name)
            whole = all(isinstance(size, int) and not isinstance(size, bool) and size > 0 for size in sizes)
            if not sizes or not whole or any(after <= before for before, after in pairwise(sizes)):
                raise GenerationError(f"{name}={sizes!r} must be rising positive integers")


@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """What an engine is told beside model and requests.

    Attributes:
      rows: requests that are decoded at once at most, of those that `short` tokens hold.
      long_rows: the same of longer ones, which have a pool of their own, so that nobody pays for the length of a few.
      short: most tokens of prompt and continuation of a request that is not long.
      context: tokens that prompt and continuation may have together; None takes the model's.
      piece: tokens of a prompt that are read at once, between which others get a token each. Whole pieces are what the
        prefix cache keeps, and what makes it exact: a piece is read by a program that its place alone determines.
      smallest_capacity: slots of a row at least, a multiple of `piece`; each further size is twice the one before. None is
        128; and where empty slots cost no time (`ServedModel.reads_filled_slots`) rows of short requests then have the
        longest of their sizes at once, which leaves less than half of the programs.
      most_waiting, most_waiting_tokens: requests, and tokens of their prompts, that may wait; more are refused.
      prefix_bytes: that the prefix cache may take of the device's memory; 0 turns it off.
      cache: in int8, or of the parameters' dtype. A window is not served.
      draft: proposes tokens, several of which are then verified in a turn, if that is faster: where text repeats itself, or
        by a smaller model of the same vocabulary and at least this context, which reads all prompts as well; None for none.
        It changes how fast tokens come and, near ties apart, not which they are.
      compute: an attention of your own, or a dtype; by default the parameters'.

    Raises:
      GenerationError: a value that cannot be.
    """

    rows: int = 16
    long_rows: int = 4
    short: int = 512
    context: int | None = None
    piece: int = 64
    smallest_capacity: int | None = None
    most_waiting: int = 256
    most_waiting_tokens: int = 2**18
    prefix_bytes: int = 2**28
    cache: CacheOptions = CacheOptions()
    draft: PromptLookup | DraftModel | None = None
    compute: Compute = field(default_factory=Compute)

    def __post_init__(self) -> None:
        least: dict[str, int] = {"rows": 1, "long_rows": 1, "short": 1, "piece": SMALLEST_PIECE, "prefix_bytes": 0}
        least |= {"most_waiting": 0, "most_waiting_tokens": 0}
        for name, lowest in (("context", 2), ("smallest_capacity", 1)):
            if getattr(self, name) is not None:
                least[name] = lowest
        for name, lowest in least.items():
            value: Any = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < lowest:
                raise GenerationError(f"{name}={value!r} must be an integer of at least {lowest}")
        if self._smallest % self.piece:
            raise GenerationError(f"smallest_capacity={self._smallest} must be a multiple of piece={self.piece}")
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
                f"the draft's context is {self.draft.config.max_seq_len} tokens, the engine's {context}; give"
                f" context={self.draft.config.max_seq_len} (--context), or a draft that can read as many"
            )
        return context

    def pool_bytes(self, config: LlamaConfig, dtype: jax.typing.DTypeLike) -> int:
        """Most bytes of keys and values that running requests of the model take, whose computation is in `dtype`.

        Every pool at its largest, half of the largest one again, from which it grows, and a prompt that is read into a row
        of its own, likewise.
        """
        kept = self.cache.dtype or dtype
        pools = [cache_bytes(config, pool.rows[-1], pool.capacities[-1], kept) for pool in self.pools(config)]
        row = cache_bytes(config, 1, self.capacities(config)[-1], kept)
        return sum(pools) + (max(pools) + 3 * row) // 2

    def programs(self, config: LlamaConfig) -> int:
        """About how many programs are compiled: three for each number of rows and of slots."""
        return 3 * sum(len(pool.rows) * len(pool.capacities) for pool in self.pools(config, True))

    def smaller(self, config: LlamaConfig, fixed: Collection[str] = ()) -> Iterator[EngineOptions]:
        """The same options, then with fewer long rows, less context, and fewer rows, by halves; but for `fixed` ones."""
        context = self.context_of(config)
        options = replace(self, context=context)
        yield options
        for name, least in (("long_rows", 1), ("context", min(self.short, context)), ("rows", 1)):
            while name not in fixed and (value := getattr(options, name)) > least:
                options = replace(options, **{name: max(value // 2, least)})
                yield options

    @property
    def _smallest(self) -> int:
        return -(-128 // self.piece) * self.piece if self.smallest_capacity is None else self.smallest_capacity

    def capacities(self, config: LlamaConfig) -> tuple[int, ...]:
        """Slots of the caches that prompts are read into."""
        context, sizes = self.context_of(config), [self._smallest]
        while sizes[-1] < context:
            sizes.append(min(2 * sizes[-1], -(-context // self.piece) * self.piece))
        return tuple(sizes)

    def pools(self, config: LlamaConfig, reads_filled_slots: bool = False) -> tuple[PoolOptions, ...]:
        """The pools: of short requests, and of long ones where the context allows any.

        Args:
          reads_filled_slots: whether empty slots of a row cost no time.
        """
        capacities = self.capacities(config)
        short = tuple(size for size in capacities if size == capacities[0] or size <= self.short)
        long = tuple(size for size in capacities if size not in short)
        if reads_filled_slots and self.smallest_capacity is None:
            short = tuple(size for size in short if size >= min(short[-1], ONE_SIZE))
        pools = PoolOptions(rows=_doubled(self.rows), capacities=short)
        return (pools, PoolOptions(rows=_doubled(self.long_rows), capacities=long)) if long else (pools,)


def _doubled(most: int) -> tuple[int, ...]:
    """1, 2, 4, ... and the last."""
    sizes = [1]
    while sizes[-1] < most:
        sizes.append(min(2 * sizes[-1], most))
    return tuple(sizes)
