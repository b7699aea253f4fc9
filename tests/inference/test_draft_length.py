"""Drafts are made where they are faster, and never cost much, on a simulated machine."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from llama_jax.inference.decode import STEPS_PER_CHUNK
from llama_jax.inference.speculation.draft_length import (
    CREDIT_PER_STEP,
    START_CREDIT,
    DraftLength,
    max_passes,
    next_draft_length,
    record_passes,
)

STEP_SECONDS = 0.01


def simulate(right, costs, counts_without_drafting):
    """The speed with drafts, relative to plain decoding.

    Args:
      right: whether each token of the text would be drafted right.
      costs: the time of a pass in steps, for each number of drafts.
      counts_without_drafting: whether right drafts are counted in plain steps, too, as by prompt lookup.
    """
    state = DraftLength.start(tuple(costs), prior=0.0 if counts_without_drafting else 1.0)
    position, time = 0, 0.0
    while position < len(right):
        length, begin = next_draft_length(state), position
        count = max_passes(state, length)
        if length:
            accepted = examined = 0
            for _ in range(count):
                run = next((n for n in range(length) if not right[position + n : position + n + 1].any()), length)
                accepted, examined, position = accepted + run, examined + min(run + 1, length), position + run + 1
            seconds = count * costs[length]
        else:
            seconds = count = -(-count // STEPS_PER_CHUNK) * STEPS_PER_CHUNK
            position += count
            examined = count if counts_without_drafting else 0
            accepted = int(right[begin:position].sum()) if counts_without_drafting else 0
        state = record_passes(state, length, count, position - begin, accepted, examined, seconds * STEP_SECONDS)
        time += seconds
    return position / time


def phases(lengths):
    """Text that is alternately drafted wrong and right, for these numbers of tokens."""
    return np.concatenate([np.full(length, i % 2 == 1) for i, length in enumerate(lengths)])


TOKENS = 200
TEXTS = st.one_of(
    st.integers(0, 2**32 - 1).flatmap(
        lambda seed: st.floats(0, 1).map(lambda p: np.random.default_rng(seed).random(TOKENS) < p)
    ),
    st.lists(st.integers(1, 120), min_size=1, max_size=60).map(
        lambda lengths: phases(itertools.islice(itertools.cycle(lengths), TOKENS))[:TOKENS]
    ),
    st.lists(st.booleans(), min_size=1, max_size=TOKENS).map(lambda text: np.resize(text, TOKENS)),
)
COSTS = st.lists(st.floats(1.0, 2.5), min_size=2, max_size=2).map(
    lambda costs: dict(zip((3, 7), sorted(costs), strict=True))
)


@given(TEXTS, COSTS, st.booleans())
def test_the_speed_is_never_under_0_97_of_plain_decoding(right, costs, counts_without_drafting):
    """From 160 tokens on; of shorter texts, the start is a larger share."""
    assert simulate(right, costs, counts_without_drafting) >= 0.97


@given(st.integers(0, 2**31), st.floats(0, 1), st.floats(1.0, 2.5), st.integers(20, 1000), st.booleans())
def test_no_more_is_lost_than_the_credit_and_one_pass(seed, acceptance, cost, tokens, counts_without_drafting):
    right = np.random.default_rng(seed).random(tokens) < acceptance
    speed = simulate(right, {3: cost, 7: cost}, counts_without_drafting)
    assert tokens / speed - tokens <= START_CREDIT + (cost - 1) + CREDIT_PER_STEP * tokens + 1e-6


@pytest.mark.parametrize("cost", [1.0, 1.5, 2.0, 2.5])
@pytest.mark.parametrize("counts_without_drafting", [False, True])
def test_copied_text_is_drafted(cost, counts_without_drafting):
    assert simulate(np.ones(400, bool), {3: cost, 7: cost}, counts_without_drafting) > 0.9 * 8 / cost
