"""Drafters for tests: what is drafted, and how much, is known beforehand."""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from llama_jax.inference.decode import STEPS_PER_CHUNK
from llama_jax.inference.speculation import Drafter, speculative_decode


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


def force_draft_lengths(monkeypatch, *numbers: int) -> None:
    """Let every generation draft these numbers in turn, whatever comes of it, in rounds of 1, 1, 2 and 4 passes."""

    class Forced:
        @staticmethod
        def start(lengths, prior):
            return itertools.cycle(numbers), itertools.cycle((1, 1, 2, 4))

    steps = lambda state, length: next(state[1]) * (1 if length else STEPS_PER_CHUNK)
    monkeypatch.setattr(speculative_decode, "DraftLength", Forced)
    monkeypatch.setattr(speculative_decode, "next_draft_length", lambda state: next(state[0]))
    monkeypatch.setattr(speculative_decode, "max_passes", steps)
    monkeypatch.setattr(speculative_decode, "record_passes", lambda state, *_: state)
