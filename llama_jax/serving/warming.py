"""Running every program of an engine once, so that none is compiled while a request waits."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax
import numpy as np

from llama_jax.inference.sampling import Sampling
from llama_jax.inference.state import Reading, Request
from llama_jax.model.options import Places
from llama_jax.serving.ahead import compile_ahead
from llama_jax.serving.choosing import Wishes
from llama_jax.serving.memory import return_freed_memory
from llama_jax.serving.model import STOPS, ServedModel, Slots
from llama_jax.serving.options import SMALLEST_PIECE
from llama_jax.serving.pool import BURST, Pool, neighbours

Step = Callable[[], Any]


def warm(
    model: ServedModel,
    pools: Sequence[Pool],
    capacities: tuple[int, ...],
    piece: int,
    progress: Callable[[int, int], None],
) -> None:
    """Run all programs, of prompts and of pools, on dummy states.

    Args:
      capacities: of the caches that prompts are read into.
      piece: tokens that are read at once.
      progress: called after each program that is compiled, and each that is run, with how many that were and the total.
    """

    def walks_of(model: ServedModel) -> list[_Rows]:
        prompts = _Prompts(model, capacities, piece)
        return [_Rows(model, pool, prompts, may_move=pool is not pools[-1]) for pool in pools]

    ahead = model.layout.mesh is None  # over a mesh only a compiled program knows the sharding of its results
    compiled, walks = 0, walks_of(model)
    steps = _steps(walks)

    def compiling(done: int, of: int) -> None:
        nonlocal compiled
        compiled = done
        progress(done, of + len(steps))

    if ahead:
        compile_ahead(model, lambda model: _steps(walks_of(model)), compiling)
    for done, step in enumerate(steps, compiled + 1):
        jax.block_until_ready(step())
        return_freed_memory()
        progress(done, compiled + len(steps))
    for pool, walk in zip(pools, walks, strict=True):
        pool.slots = walk.beginning()


def _steps(walks: list[_Rows]) -> list[Step]:
    return [*walks[0].prompts.steps(), *(step for walk in walks for step in walk.steps())]


@dataclass(frozen=True)
class _Prompts:
    """The programs that read prompts."""

    model: ServedModel
    capacities: tuple[int, ...]
    piece: int

    def steps(self) -> Iterator[Step]:
        for capacity in self.capacities:
            for width in dict.fromkeys((SMALLEST_PIECE, self.piece)):
                yield from (partial(self.read, model, capacity, width) for model in self.model.models)
            yield partial(self.score, capacity)
            yield from (partial(self.paste, model, capacity) for model in self.model.models)
            yield partial(self.begin, capacity)

    def reading(self, model: ServedModel, capacity: int) -> Reading:
        """An empty reading, in a cache of this many slots."""
        reading = model.empty_reading(self.capacities[0])
        for size in self.capacities[: self.capacities.index(capacity) + 1]:
            reading = model.enlarge(reading, size)
        return reading

    def read(self, model: ServedModel, capacity: int, width: int) -> Reading:
        return model.read(self.reading(model, capacity), np.zeros((1, width), np.int32), _places(width), -1)

    def score(self, capacity: int) -> Any:
        tokens = np.zeros((1, self.piece), np.int32)
        return self.model.score(self.reading(self.model, capacity), tokens, tokens[0], _places(self.piece), -1, False)

    def paste(self, model: ServedModel, capacity: int) -> Any:
        piece = model.cut(self.reading(model, capacity).cache, 0, self.piece)
        return model.paste(self.reading(model, capacity), piece, 0)

    def begin(self, capacity: int) -> Slots:
        """The state of one row after a prompt in a cache of this many slots."""
        request = Request(Sampling().per_row(1), np.ones(1, np.int32), np.full((1, STOPS), -1, np.int32))
        seen = np.zeros((1, self.model.vocab), bool)
        wishes = Wishes.none(1, self.model.config.vocab_size)
        own, *drafts = [self.reading(model, capacity) for model in self.model.models]
        return Slots(self.model.begin(own, seen, request, wishes)[0], *(draft.cache for draft in drafts))


def _places(width: int) -> Places:
    return Places(np.array([width], np.int32), rope_lengths=np.array([width], np.int32))


@dataclass
class _Rows:
    """The programs of a pool, run on one state that goes through all shapes, each a neighbour of the one before."""

    model: ServedModel
    pool: Pool
    prompts: _Prompts
    may_move: bool
    slots: Slots = field(init=False)

    def __post_init__(self) -> None:
        self.slots = self.pool.slots

    def steps(self) -> Iterator[Step]:
        """The programs, to be run in this order."""
        options = self.pool.options
        yield self.take_turn  # the state then comes from a program: one made by hand may be sharded otherwise
        path = [(rows, size) for i, rows in enumerate(options.rows) for size in options.capacities[:: (1, -1)[i % 2]]]
        for shape, following in zip(path, [*path[1:], None], strict=True):
            yield self.take_turn
            if self.pool.drafting is None and shape[0] == options.rows[0]:
                yield self.take_burst
            if self.model.draft is not None:
                yield self.catch_up
            if self.pool.drafting is not None:
                yield from (partial(self.take_drafts, number) for number in self.pool.drafting.numbers)
            for size in self.prompts.capacities:
                if size <= shape[1]:
                    yield partial(self.insert, size)
            for other in neighbours(options, *shape):
                yield partial(self.arrange, other)
            if self.may_move and shape[1] == self.pool.longest:
                yield self.take_row
            if following is not None:
                yield partial(self.go, following)

    def beginning(self) -> Slots:
        """The first slots of the pool, made by a program."""
        options = self.pool.options
        slots = self.model.empty_slots(options.rows[0], options.capacities[0])
        return self.model.take_turn(slots, self.wishes(options.rows[0]))[0]

    def wishes(self, rows: int) -> Wishes:
        return jax.device_put(Wishes.none(rows, self.model.config.vocab_size))

    @property
    def rows(self) -> int:
        return len(self.slots.state.done)

    def take_turn(self) -> Any:
        self.slots, packed = self.model.take_turn(self.slots, self.wishes(self.rows))
        return packed

    def take_burst(self) -> Any:
        self.slots, packed = self.model.take_burst(self.slots, self.wishes(self.rows), 1, BURST)
        return packed

    def take_drafts(self, number: int) -> Any:
        assert self.pool.drafting is not None
        told = self.pool.drafting.propose([None] * self.rows, number)
        self.slots, packed = self.model.take_drafts(self.slots, self.wishes(self.rows), told, number)
        return packed

    def catch_up(self) -> Slots:
        numbers = np.zeros(self.rows, np.int32)
        self.slots = self.model.catch_up(self.slots, np.zeros((self.rows, SMALLEST_PIECE), np.int32), numbers, numbers)
        return self.slots

    def insert(self, size: int) -> Slots:
        self.slots = self.model.insert(self.slots, 0, self.prompts.begin(size))
        return self.slots

    def arrange(self, shape: tuple[int, int]) -> Slots:
        return self.model.arrange(self.slots, [-1] * shape[0], shape[1])

    def go(self, shape: tuple[int, int]) -> Slots:
        self.slots = self.arrange(shape)
        return self.slots

    def take_row(self) -> Slots:
        return self.model.take_row(self.slots, 0)
