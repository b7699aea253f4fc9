"""Drafts in the engine: they change no token, and are made where they are worth a turn's time."""

import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_engine import SMALL, alone, come_and_go, model, run_warm, some_request  # noqa: F401

from llama_jax import PromptLookup
from llama_jax.inference.speculation.prompt_lookup import Following
from llama_jax.serving.drafting import FORGETTING, LookupDrafting
from llama_jax.serving.engine import Engine
from llama_jax.serving.requests import GenerationRequest

DRAFTING = replace(SMALL, draft=PromptLookup(tokens=4))


@pytest.fixture
def foresight(model, monkeypatch):  # noqa: F811
    """Drafts in most turns, whatever they are worth; most of them are what comes, of what `expect` was asked for before."""
    rng, texts = random.Random(0), []

    def following(self, count):
        text = next((text for text in texts if text[: len(self.row)] == self.row), self.row)
        drafted = text[len(self.row) :][:count]
        return [token if rng.random() < 0.8 else 3 for token in drafted]

    def expect(request):
        answer = alone(model, request)
        texts.append([*request.prompt, *answer.tokens])
        return answer

    monkeypatch.setattr(Following, "following", following)
    monkeypatch.setattr(LookupDrafting, "choose", lambda self, shape, rows: 4 if any(rows) and rng.random() < 0.8 else 0)
    return expect


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.nightly)])
def test_every_request_gets_what_it_gets_alone(model, foresight, seed):  # noqa: F811
    rng, engine = random.Random(seed), Engine(*model, DRAFTING)
    wanted = [some_request(rng) | {"alternatives": rng.choice([0, 2])} for _ in range(16)]
    answers = {fields["sampling"].seed: foresight(GenerationRequest(**fields)) for fields in wanted}
    come_and_go(engine, wanted, rng, lambda request: answers[request.sampling.seed])
    assert 0 < engine.stats().accepted < engine.stats().drafted


@pytest.mark.slow
def test_nothing_is_compiled_once_it_is_warm(model, foresight):  # noqa: F811
    rng = random.Random(7)
    wanted = [some_request(rng) | {"alternatives": rng.choice([0, 3])} for _ in range(30)]
    for fields in wanted:
        foresight(GenerationRequest(**fields))
    _, stats = run_warm(Engine(*model, DRAFTING), wanted)
    assert stats.accepted > 0


class Row:
    """A row with a draft."""

    draft = 1


@given(st.floats(0.05, 1.0), st.floats(1.1, 4.0), st.integers(1, 8))
def test_drafts_are_made_where_they_are_faster(acceptance, cost, rows):
    drafting, shape = LookupDrafting(PromptLookup(tokens=4)), (8, 128)
    assert not drafting.choose(shape, [Row()] * rows)  # nothing is known of turns
    rng = random.Random(0)
    for _ in range(2000):
        drafting.record(True, rng.random() < acceptance)
    drafting.observe([(shape, 0)], 1.0)
    drafting.observe([(shape, 4)], cost)
    gained = sum(acceptance**i for i in range(5)) / cost
    if not 0.85 < gained < 1.25:  # the acceptance is known from some hundred tokens
        assert drafting.choose(shape, [Row()] * rows) == (4 if gained > 1.05 else 0)
    assert not drafting.choose(shape, [None] * rows)


def test_what_was_slow_once_is_tried_again():
    drafting, shape = LookupDrafting(PromptLookup(tokens=4)), (1, 128)
    for _ in range(100):
        drafting.record(True, True)
    drafting.observe([(shape, 0)], 1.0)
    drafting.observe([(shape, 4)], 50.0)
    assert not drafting.choose(shape, [Row()])
    turns = 0
    while not drafting.choose(shape, [Row()]):
        drafting.observe([(shape, 0)], 1.0)
        turns += 1
        assert turns < 10_000
    assert FORGETTING**turns > 5


def test_times_of_several_turns_are_ignored():
    drafting, shape = LookupDrafting(PromptLookup()), (1, 128)
    drafting.observe([(shape, 0), ((2, 256), 0)], 1.0)
    drafting.observe([], 1.0)
    drafting.observe([(shape, 0)], None)
    drafting.record(True, True)
    assert not drafting.choose(shape, [Row()])
