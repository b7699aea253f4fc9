"""Drafts in the engine, of prompt lookup and of smaller models: they change no token, and are made where they are faster."""

import random
from dataclasses import replace
from functools import partial

import jax
import numpy as np
import pytest
from commands import run_here
from conftest import first_layers
from test_engine import SMALL, Client, EveryOther, alone, come_and_go, exhaust, model, run, some_request  # noqa: F401

import llama_jax
from llama_jax import DraftModel, PromptLookup, Sampling
from llama_jax.errors import GenerationError, MeshError
from llama_jax.inference.drafter import Drafter
from llama_jax.inference.speculation.prompt_lookup import HostLookup
from llama_jax.model.cache import CacheOptions
from llama_jax.parallel.mesh import parse_mesh
from llama_jax.serving.drafting import LookupDrafting, ModelDrafting
from llama_jax.serving.engine import Engine
from llama_jax.serving.options import EngineOptions
from llama_jax.serving.requests import GenerationRequest

TINY = EngineOptions(rows=1, context=32, prefill_chunk=16)
TWO = EngineOptions(rows=2, context=64, prefill_chunk=16)


@pytest.fixture
def force(monkeypatch):
    """As many drafts as `numbers` has, turn by turn, whatever they are worth."""

    def choose(numbers):
        left = iter(numbers)
        chosen = lambda self, shape, rows: next(left) if any(row is not None for row in rows) else 0
        monkeypatch.setattr(ModelDrafting, "choose", chosen)

    return choose


@pytest.fixture(scope="module")
def similar(model):  # noqa: F811
    """A draft that is right about half of the time."""
    config, params = model
    keys = iter(jax.random.split(jax.random.key(5), 99))
    noisy = lambda a: a * (1 + 0.05 * jax.random.normal(next(keys), a.shape)) if a.ndim > 1 else a
    return DraftModel(config, jax.tree.map(noisy, params), tokens=4)


def at_random(rng, numbers=(0, 4)):
    while True:
        yield from [rng.choice(numbers)] * rng.choice([1, 2, 2, 9, 30])  # asked twice in a turn, and of every pool


def same(clients, answers):
    for client, answer in zip(clients, answers, strict=True):
        assert (client.ids, client.finish) == (answer.tokens, answer.finish_reason)
        np.testing.assert_allclose(client.logprobs, answer.logprobs, atol=1e-4)


def test_drafts_of_the_same_model_are_all_right(model, force):  # noqa: F811
    """Which they are only if its cache holds what it should: after a prompt, a found prefix, and tokens without drafts."""
    config, params = model
    model = replace(config, n_layers=1), first_layers(params, 1)
    clients, options = [], replace(TINY, draft=DraftModel(*model, 2))
    for numbers in ([0] * 10_000, [*[2] * 8, *[0] * 40, *[2] * 10_000]):  # without drafts, of the same programs, and with
        force(numbers)
        engine, mine = Engine(*model, options), []
        for prompt in ([1, 7], [1, *range(20, 37)], [1, *range(20, 38)]):
            sampling = Sampling(temperature=1.0, seed=len(prompt))
            mine.append(Client(engine, prompt=prompt, max_new_tokens=32 - len(prompt), sampling=sampling))
        exhaust(engine)
        clients.append(mine)
    assert [client.ids for client in clients[0]] == [client.ids for client in clients[1]]
    assert clients[1][2].updates[0].cached == 16
    found = engine.stats()
    assert found.drafted > 10
    assert found.accepted >= found.drafted - 2 * 3  # what comes after the end of a row is not taken
    assert found.iterations < found.generated_tokens


class TestEveryRequestGetsWhatItGetsAlone:
    @pytest.mark.slow
    @pytest.mark.parametrize("seed", [0, *(pytest.param(x, marks=pytest.mark.nightly) for x in (1, 2))])
    def test_among_others_that_come_and_go(self, model, similar, force, seed):  # noqa: F811
        rng = random.Random(seed)
        force(at_random(rng))
        wanted = [some_request(rng) for _ in range(20)]
        shared = [1, *(rng.randrange(3, 512) for _ in range(60))]
        wanted += [some_request(rng) | {"prompt": shared[:n], "max_new_tokens": 30} for n in (20, 40, 61, 60, 33)]
        rng.shuffle(wanted)
        for fields in wanted:
            fields |= {"alternatives": rng.choice([0, 3]), "score_prompt": rng.random() < 0.2}
        engine = Engine(*model, replace(SMALL, draft=similar))
        engine.warm()
        come_and_go(engine, wanted, rng, partial(alone, model))
        found = engine.stats()
        assert 0.2 * found.drafted < found.accepted < 0.9 * found.drafted
        assert found.cached_tokens > 0

    @pytest.mark.slow
    def test_with_the_model_as_its_own_draft(self, model, force):  # noqa: F811
        """Among others: a wrong slot anywhere would make drafts wrong."""
        rng = random.Random(3)
        force(at_random(rng))
        engine = Engine(*model, replace(SMALL, draft=DraftModel(*model, 4)))
        clients = [Client(engine, prompt=[1, 5 + i], max_new_tokens=120) for i in range(4)]  # for two places in the end
        clients += [Client(engine, **some_request(rng)) for _ in range(6)]
        exhaust(engine)
        same(clients, [alone(model, client.request) for client in clients])
        found = engine.stats()
        assert found.drafted > 300
        assert found.accepted >= found.drafted - 4 * len(clients)

    @pytest.mark.slow
    def test_with_a_grammar_and_a_scored_prompt_beside_it(self, model, similar, force):  # noqa: F811
        force(at_random(random.Random(1)))
        engine = Engine(*model, replace(SMALL, draft=similar))
        bound = Client(engine, prompt=[1, 7], max_new_tokens=20, constraint=EveryOther(512))
        scored = Client(engine, prompt=[1, *range(50, 90)], max_new_tokens=30, score_prompt=True, alternatives=2)
        free = run(engine, prompt=[1, 7], max_new_tokens=40, min_new_tokens=3)
        assert [token % 2 for token in bound.ids] == [0, 1] * 10
        same([scored, free], [alone(model, client.request) for client in (scored, free)])
        assert len(scored.updates[0].prompt) == 41

    @pytest.mark.slow
    def test_with_caches_of_int8(self, model, similar, force):  # noqa: F811
        force(at_random(random.Random(2)))
        options = CacheOptions(dtype="int8")
        found = []
        for draft in (similar, None):  # a prompt read in pieces is rounded otherwise than one read whole, so not by `alone`
            engine = Engine(*model, replace(TWO, draft=draft, cache=options))
            found.append([Client(engine, prompt=[1, *range(5, 5 + 9 * i)], max_new_tokens=30) for i in range(1, 4)])
            exhaust(engine)
            assert (engine.stats().accepted > 0) == (draft is not None)
        for drafted, plain in zip(*found, strict=True):
            assert drafted.ids == plain.ids

    @pytest.mark.slow
    def test_on_a_mesh(self, model, force, tmp_path):  # noqa: F811
        llama_jax.save(tmp_path / "model", *model)
        there = llama_jax.load(tmp_path / "model", mesh=parse_mesh("tensor=2"))[:2]
        force(at_random(random.Random(4)))
        engine = Engine(*there, replace(TWO, draft=DraftModel(*there, tokens=4)))
        engine.warm()
        clients = [Client(engine, prompt=[1, *range(5, 5 + 9 * i)], max_new_tokens=20) for i in range(1, 5)]
        exhaust(engine)
        engine.close()
        same(clients, [alone(model, client.request) for client in clients])
        found = engine.stats()
        assert found.accepted >= found.drafted - 4 * len(clients)
        assert found.compilations_after_ready == 0
        with pytest.raises(MeshError, match="the draft model is on other devices than the model"):
            Engine(*there, replace(SMALL, draft=DraftModel(*model)))


class TestBatch:
    @pytest.mark.slow
    def test_in_the_forms_that_generate_takes(self, model, similar):  # noqa: F811
        prompts = [[1, *range(5, 5 + 7 * i)] for i in range(6)]
        wanted = [llama_jax.generate(*model, [prompt], max_new_tokens=20)[0] for prompt in prompts]
        for draft in (similar, llama_jax.PromptLookup()):
            options = replace(SMALL, draft=draft)
            found = dict(llama_jax.complete_requests(*model, prompts, max_new_tokens=20, options=options))
            assert [found[i].tokens for i in range(6)] == [row.tokens for row in wanted]


class Other(Drafter):
    tokens = 4

    def propose(self, drafter_state, state, history, count):
        raise NotImplementedError


class TestInvalidDrafts:
    def test_drafts_for_another_model(self, model):  # noqa: F811
        config, params = model
        with pytest.raises(GenerationError, match="the draft has a vocabulary of 511, the model one of 512") as caught:
            Engine(*model, replace(SMALL, draft=DraftModel(replace(config, vocab_size=511), params)))
        assert "\n" not in str(caught.value)
        with pytest.raises(GenerationError, match="the draft model's context is 100 tokens, but the engine's 128; set"):
            Engine(*model, replace(SMALL, draft=DraftModel(replace(config, max_seq_len=100), params)))
        with pytest.raises(GenerationError, match="must be a PromptLookup, a DraftModel or None"):
            EngineOptions(draft=Other())

    @pytest.mark.parametrize("command", ["serve", "batch"])
    def test_on_the_command_line(self, model, tmp_path, command):  # noqa: F811
        llama_jax.save(tmp_path / "draft", *model)
        prompts = tmp_path / "prompts.jsonl"
        prompts.write_text('{"prompt": "Once"}\n')
        given = ("--port", 0) if command == "serve" else (prompts, tmp_path / "out.jsonl")
        ended = run_here(command, *given, "--draft", tmp_path / "draft")
        assert ended.returncode == 2
        assert "has a vocabulary of 512, but the model's has 4096; use a draft with" in ended.stderr.splitlines()[-1]


ROWS = [[1, 2]] * 2  # the last tokens of two rows
SHAPE = (2, 128)


def drafting_by_model():
    return ModelDrafting(DraftModel(llama_jax.preset("stories-260k"), None, 4))


class TestWhenDraftsAreMade:
    def run(self, drafting, acceptance, cost, tokens, rows=ROWS, every=1):
        """The speed of iterations of two rows, relative to those without drafts; of one of `every`, the time is known."""
        rng, made, time, count = np.random.default_rng(0), 0.0, 0.0, 0
        while made < tokens:
            number = drafting.choose(SHAPE, rows)
            right = np.cumprod(rng.random((2, number)) < acceptance, axis=1).sum(axis=1) if number else np.zeros(2, int)
            if number:
                drafting.propose(rows, number)
                drafting.settle(number, (right + 1).tolist())
            if isinstance(drafting, LookupDrafting):
                drafting._right = int(right.sum() + (rng.random(2) < acceptance).sum())
                drafting._examined = int(right.sum() + 2)
            seconds = cost if number else 1.0
            drafting.observe((SHAPE, number), seconds / 1000 if count % every == 0 else None)
            made, time, count = made + 1 + right.mean(), time + seconds, count + 1
        assert 0 <= drafting.accepted <= drafting.offered
        return made / time

    @pytest.mark.parametrize("every", [1, 5])
    @pytest.mark.parametrize(("cost", "acceptance"), [(2.5, 0.1), (1.7, 0.3), (2.0, 0.8), (1.3, 0.9)])
    def test_where_they_are_faster(self, cost, acceptance, every):
        best = max(1.0, sum(acceptance**i for i in range(5)) / cost)
        share = 0.9 if best > 1 else 0.97
        lookup = LookupDrafting(PromptLookup(tokens=4))
        rows = [lookup.begin([5, 6, 5, 6])] * 2
        assert self.run(lookup, acceptance, cost, 2000, rows, every) > share * best
        assert self.run(drafting_by_model(), acceptance, cost, 2000, ROWS, every) > share * best

    def test_text_without_an_earlier_occurrence_has_none(self):
        drafting = LookupDrafting(PromptLookup())
        copied, new = drafting.begin([5, 6] * 20), drafting.begin([5, 6])
        for token in [5, 6] * 10:
            drafting.learn(copied, token)
        drafting.observe((SHAPE, 0), 1.0)
        assert drafting.choose(SHAPE, [copied, new]) == 7
        assert drafting.choose(SHAPE, [new, None]) == 0
        assert drafting.propose([copied, new, None], 3).tolist() == [[5, 6, 5], [-1] * 3, [-1] * 3]


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

    monkeypatch.setattr(HostLookup, "following", following)
    monkeypatch.setattr(LookupDrafting, "choose", lambda self, shape, rows: 4 if any(rows) and rng.random() < 0.8 else 0)
    return expect


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.nightly)])
def test_prompt_lookup_changes_no_token(model, foresight, seed):  # noqa: F811
    rng, engine = random.Random(seed), Engine(*model, DRAFTING)
    wanted = [some_request(rng) | {"alternatives": rng.choice([0, 3])} for _ in range(16)]
    answers = {fields["sampling"].seed: foresight(GenerationRequest(**fields)) for fields in wanted}
    engine.warm()
    come_and_go(engine, wanted, rng, lambda request: answers[request.sampling.seed])
    assert 0 < engine.stats().accepted < engine.stats().drafted
