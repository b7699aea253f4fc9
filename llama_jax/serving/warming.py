"""Every program of an engine, run once, so that none is compiled while a request waits."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
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
    steps = [*prompts.steps()]
    for pool, longer in zip(pools, [*pools[1:], None], strict=True):
        steps += _steps_of(model, pool, prompts, longer is not None)
    for done, step in enumerate(steps, 1):
        jax.block_until_ready(step())
        progress(done, len(steps))


class _Prompts:
    def __init__(self, model: ServedModel, capacities: tuple[int, ...], piece: int) -> None:
        self.model, self.capacities, self.piece = model, capacities, piece

    def steps(self) -> Iterator[Step]:
        model, piece = self.model, self.piece
        for reading in (self._fresh, *(partial(self._read_to, capacity) for capacity in self.capacities)):
            for width in dict.fromkeys((min(SMALLEST_PIECE, piece), piece)):
                yield partial(self._read, reading, width)
            yield partial(self._score, reading)
            yield lambda reading=reading: model.paste(reading(), model.cut(self._read_to(self.capacities[0]).cache, 0, piece), 0)
        for capacity in self.capacities:
            yield lambda capacity=capacity: model.cut(self._read_to(capacity).cache, 0, piece)
            yield partial(self.begin, capacity)

    def begin(self, capacity: int) -> State:
        """The state of a prompt in a cache of so many slots."""
        request = Request(Sampling().per_row(1), np.ones(1, np.int32), np.full((1, STOPS), -1, np.int32))
        seen = np.zeros((1, self.model.vocab), bool)
        wishes = Wishes.none(1, self.model.config.vocab_size)
        return self.model.begin(self._read_to(capacity), seen, request, wishes)[0]

    def _fresh(self) -> Reading:
        return self.model.empty_reading(self.capacities[0])

    def _read_to(self, capacity: int) -> Reading:
        """A reading that has begun, in a cache of so many slots."""
        reading = self._read(self._fresh, self.piece)
        for size in self.capacities[: self.capacities.index(capacity) + 1]:
            reading = self.model.enlarge(reading, size)
        return reading

    def _read(self, reading: Callable[[], Reading], width: int) -> Reading:
        return self.model.read(reading(), np.zeros((1, width), np.int32), _places(width))

    def _score(self, reading: Callable[[], Reading]) -> Any:
        tokens = np.zeros((1, self.piece), np.int32)
        return self.model.score(reading(), tokens, tokens[0], _places(self.piece), False)


def _places(width: int) -> Places:
    return Places(np.array([width], np.int32), rope_lengths=np.array([width], np.int32))


def _steps_of(model: ServedModel, pool: Pool, prompts: _Prompts, may_move: bool) -> Iterator[Step]:
    wishes = lambda rows: jax.device_put(Wishes.none(rows, model.config.vocab_size))

    def state(rows: int, capacity: int) -> State:
        start = len(pool.rows), pool.state.cache.capacity
        found = pool.state
        for rows_, capacity_ in steps_between(pool.options, start, (rows, capacity)):
            found = model.arrange(found, [-1] * rows_, capacity_)
        return found

    def first() -> State:
        # A state that a program has made: such ones may lie elsewhere than one that was made by hand.
        pool.state, _ = model.take_turn(pool.state, wishes(len(pool.rows)))
        return pool.state

    yield first
    for rows in pool.options.rows:
        for capacity in pool.options.capacities:
            get = partial(state, rows, capacity)
            yield lambda get=get, rows=rows: model.take_turn(model.arrange(get(), [-1] * rows, get().cache.capacity), wishes(rows))
            for rows_, capacity_ in neighbours(pool.options, rows, capacity):
                yield lambda get=get, rows_=rows_, capacity_=capacity_: model.arrange(get(), [-1] * rows_, capacity_)
            for size in prompts.capacities:
                if size <= capacity:
                    yield lambda get=get, size=size, rows=rows: model.insert(
                        model.arrange(get(), [-1] * rows, get().cache.capacity), 0, prompts.begin(size)
                    )
            if may_move and capacity == pool.longest:
                yield lambda get=get: model.take_row(get(), 0)
