"""Drafters and paces for tests: what is drafted, and how much, is known beforehand."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from llama_jax.inference.decode import STEPS_PER_CHUNK
from llama_jax.inference.speculation import Drafter


class Told(Drafter, struct.PyTreeNode):
    """Proposes given tokens, int32[B, any], of which the first is the one that the prompt gives; -1 proposes none."""

    answers: jax.Array
    tokens: int = struct.field(pytree_node=False, default=5)

    def propose(self, drafter_state, state, history, count):
        places = state.count[:, None] + jnp.arange(count)
        inside = jnp.minimum(places, self.answers.shape[1] - 1)
        found = jnp.take_along_axis(self.answers, inside, axis=1)
        return jnp.where(places < self.answers.shape[1], found, -1), drafter_state


def told(results, vocab: int, wrong: float = 0.0, seed: int = 0, tokens: int = 5) -> Told:
    """Of what was generated without a draft, this share replaced by random tokens, and a few by none."""
    longest = max(len(result.tokens) for result in results) + 1
    answers = np.zeros((len(results), longest), np.int32)
    for row, result in zip(answers, results, strict=True):
        row[: len(result.tokens)] = result.tokens
    rng = np.random.default_rng(seed)
    spoilt = np.where(rng.random(answers.shape) < 0.8, rng.integers(0, vocab, answers.shape), -1)
    return Told(np.where(rng.random(answers.shape) < wrong, spoilt, answers).astype(np.int32), tokens)


def forced(*numbers: int, on: tuple[int, ...] = (0,)) -> type:
    """A pace that drafts these numbers in turn, whatever comes of it.

    After a piece of one of the numbers `on`, every other time steps are started before it is seen what the piece gave.
    """

    class Forced:
        def __init__(self, left: Iterator[int]):
            self.left, self.alternately = left, itertools.cycle((True, False))
            self.passes = itertools.cycle((1, 1, 2, 4))

        @classmethod
        def of(cls, tokens, blind=True):
            return cls(itertools.cycle(numbers))

        def choose(self):
            return next(self.left)

        def goes_on(self, number):
            return number in on and next(self.alternately)

        def length(self, number):
            return next(self.passes) * (1 if number else STEPS_PER_CHUNK)

        def observe(self, *_):
            return self

    return Forced
