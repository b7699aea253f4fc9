"""Every program of an engine, run once, so that none is compiled while a request waits."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import numpy as np

from llama_jax.inference.sampling import Sampling
from llama_jax.inference.state import Reading, Request, State
from llama_jax.model.options import Places
from llama_jax.serving.model import STOPS, ServedModel
from llama_jax.serving.options import SMALLEST_PIECE
from llama_jax.serving.pool import Pool, neighbours, steps_between
from llama_jax.serving.programs import Wishes

Step = Callable[[], Any]


def warm(
    model: ServedModel,
    pools: Sequence[Pool],
    capacities: tuple[int, ...],
    piece: int,
    progress: Callable[[int, int], None],
) -> None:
    """Run all programs, of prompts and of pools, on states that nobody needs.

    Args:
      capacities: of caches that prompts are read into.
      piece: tokens that are read at once.
      progress: told after each program how many are done, of how many.
    """
    prompts = _Prompts(model, capacities, piece)
    steps = list(prompts.steps())
    for pool, longer in zip(pools, [*pools[1:], None], strict=True):
        steps += _Rows(model, pool, prompts).steps(may_move=longer is not None)
    for done, step in enumerate(steps, 1):
        jax.block_until_ready(step())
        progress(done, len(steps))


@dataclass(frozen=True)
class _Prompts:
    """The programs that read prompts."""

    model: ServedModel
    capacities: tuple[int, ...]
    piece: int

    def steps(self) -> Iterator[Step]:
        for capacity in self.capacities:
            for width in dict.fromkeys((SMALLEST_PIECE, self.piece)):
                yield partial(self.read, capacity, width)
            yield partial(self.score, capacity)
            yield partial(self.paste, capacity)
            yield partial(self.begin, capacity)

    def reading(self, capacity: int) -> Reading:
        """One of nothing, in a cache of so many slots."""
        reading = self.model.empty_reading(self.capacities[0])
        for size in self.capacities[: self.capacities.index(capacity) + 1]:
            reading = self.model.enlarge(reading, size)
        return reading

    def read(self, capacity: int, width: int) -> Reading:
        return self.model.read(self.reading(capacity), np.zeros((1, width), np.int32), _places(width), -1)

    def score(self, capacity: int) -> Any:
        tokens = np.zeros((1, self.piece), np.int32)
        return self.model.score(self.reading(capacity), tokens, tokens[0], _places(self.piece), -1, False)

    def paste(self, capacity: int) -> Any:
        piece = self.model.cut(self.reading(capacity).cache, 0, self.piece)
        return self.model.paste(self.reading(capacity), piece, 0)

    def begin(self, capacity: int) -> State:
        """The state of one row after a prompt in a cache of so many slots."""
        request = Request(Sampling().per_row(1), np.ones(1, np.int32), np.full((1, STOPS), -1, np.int32))
        seen = np.zeros((1, self.model.vocab), bool)
        wishes = Wishes.none(1, self.model.config.vocab_size)
        return self.model.begin(self.reading(capacity), seen, request, wishes)[0]


def _places(width: int) -> Places:
    return Places(np.array([width], np.int32), rope_lengths=np.array([width], np.int32))


@dataclass(frozen=True)
class _Rows:
    """The programs of a pool."""

    model: ServedModel
    pool: Pool
    prompts: _Prompts

    def steps(self, may_move: bool) -> Iterator[Step]:
        yield self.begin
        options = self.pool.options
        for rows in options.rows:
            for capacity in options.capacities:
                yield partial(self.take_turn, rows, capacity)
                if self.pool.drafting is not None:
                    yield partial(self.take_drafts, rows, capacity, self.pool.drafting.count)
                for shape in neighbours(options, rows, capacity):
                    yield partial(self.arrange, rows, capacity, shape)
                for size in self.prompts.capacities:
                    if size <= capacity:
                        yield partial(self.insert, rows, capacity, size)
                if may_move and capacity == self.pool.longest:
                    yield partial(self.take_row, rows, capacity)

    def begin(self) -> None:
        """Take a turn, after which the state is one that a program has made: one made by hand may lie elsewhere."""
        self.pool.state, _ = self.model.take_turn(self.pool.state, self.wishes(len(self.pool.rows)))

    def wishes(self, rows: int) -> Wishes:
        return jax.device_put(Wishes.none(rows, self.model.config.vocab_size))

    def state(self, rows: int, capacity: int) -> State:
        """Another state of empty rows."""
        found, start = self.pool.state, (len(self.pool.rows), self.pool.state.cache.capacity)
        for shape in steps_between(self.pool.options, start, (rows, capacity)):
            found = self.model.arrange(found, [-1] * shape[0], shape[1])
        return found

    def take_turn(self, rows: int, capacity: int) -> Any:
        return self.model.take_turn(self.own(rows, capacity), self.wishes(rows))

    def take_drafts(self, rows: int, capacity: int, count: int) -> Any:
        return self.model.take_drafts(self.own(rows, capacity), self.wishes(rows), np.full((rows, count), -1, np.int32))

    def own(self, rows: int, capacity: int) -> State:
        """A state that may be donated."""
        return self.arrange(rows, capacity, (rows, capacity))

    def arrange(self, rows: int, capacity: int, shape: tuple[int, int]) -> State:
        return self.model.arrange(self.state(rows, capacity), [-1] * shape[0], shape[1])

    def insert(self, rows: int, capacity: int, size: int) -> State:
        return self.model.insert(self.own(rows, capacity), 0, self.prompts.begin(size))

    def take_row(self, rows: int, capacity: int) -> State:
        return self.model.take_row(self.state(rows, capacity), 0)
