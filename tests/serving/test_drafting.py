"""Drafts in the engine: they change no token, and are made where they are worth a turn's time."""

import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_engine import SMALL, Client, alone, exhaust, model, some_request  # noqa: F401  # the fixture

from llama_jax import PromptLookup
from llama_jax.errors import GenerationError
from llama_jax.inference.speculation.lookup import Following
from llama_jax.serving.drafting import FORGETTING, LookupDrafting
from llama_jax.serving.engine import Engine
from llama_jax.serving.options import EngineOptions
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
    rng, engine, clients, answers = random.Random(seed), Engine(*model, DRAFTING), [], []
    wanted = [some_request(rng) for _ in range(16)]
    expected = {repr(fields): foresight(GenerationRequest(**fields)) for fields in wanted}
    while wanted or engine.busy:
        if wanted and rng.random() < 0.4:
            answers.append(expected[repr(wanted[-1])])
            clients.append(Client(engine, **wanted.pop(), alternatives=rng.choice([0, 2])))
        if rng.random() < 0.05 and clients:
            clients[rng.randrange(len(clients))].ticket.cancel()
        engine.turn()
    found = engine.stats()
    assert 0 < found.accepted < found.drafted, found
    for client, answer in zip(clients, answers, strict=True):
        if client.finish == "cancelled":
            assert client.ids == answer.tokens[: len(client.ids)]
        else:
            assert (client.ids, client.finish) == (answer.tokens, answer.finish_reason)
        for update in client.updates:
            assert all(len(token.alternatives) == client.request.alternatives for token in update.tokens)


@pytest.mark.slow
def test_nothing_is_compiled_once_it_is_warm(model, foresight):  # noqa: F811
    rng, engine = random.Random(7), Engine(*model, DRAFTING)
    wanted = [some_request(rng) for _ in range(30)]
    for fields in wanted:
        foresight(GenerationRequest(**fields))
    engine.warm()
    for fields in wanted:
        Client(engine, **fields, alternatives=rng.choice([0, 3]))
        engine.turn()
    exhaust(engine)
    found = engine.stats()
    engine.close()
    assert found.accepted > 0
    assert found.compilations_after_ready == 0


@pytest.mark.slow
def test_a_row_that_outgrows_its_pool(model, foresight):  # noqa: F811
    engine = Engine(*model, DRAFTING)
    clients = [Client(engine, prompt=[1, 5 + i], max_new_tokens=120) for i in range(4)]
    expected = [foresight(client.request) for client in clients]
    exhaust(engine)
    assert [client.ids for client in clients] == [answer.tokens for answer in expected]
    assert engine.stats().turns < 120  # two rows after two others, of 120 tokens each


class Row:
    """Of which a share of the tokens repeats."""

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


def test_turns_of_two_pools_say_nothing_of_each():
    drafting, shape = LookupDrafting(PromptLookup()), (1, 128)
    drafting.observe([(shape, 0), ((2, 256), 0)], 1.0)
    drafting.observe([], 1.0)
    drafting.observe([(shape, 0)], None)
    drafting.record(True, True)
    assert not drafting.choose(shape, [Row()])


def test_a_draft_that_cannot_be():
    with pytest.raises(GenerationError, match=r"draft='prompt': an engine drafts by a PromptLookup or a DraftModel"):
        EngineOptions(draft="prompt")
