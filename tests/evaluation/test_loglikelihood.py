"""Log-probabilities of continuations beside plain logits of each text alone."""

from dataclasses import replace
from functools import partial

import jax
import make_goldens
import numpy as np
import pytest
from adapters import LORA, random_adapters
from conftest import jit_logits

import llama_jax
from llama_jax.errors import GenerationError, UserError
from llama_jax.evaluation.loglikelihood import Continuation, compiled_measure, score_pairs
from llama_jax.model.logits import logits

CONFIG = replace(make_goldens.KINDS["gqa"], max_seq_len=64)


@pytest.fixture(scope="module")
def model(models):
    return CONFIG, models["gqa"][1]


@pytest.fixture(scope="module")
def plain(model):
    """Log-probability and greediness of a continuation, from the logits of that text alone: no packing, no padding seen."""
    config, params = model
    of_row = jax.jit(partial(logits, config))

    def score(context, continuation, params=params, most=config.max_seq_len):
        ids = np.concatenate([context, continuation])[-most - 1 :]
        row = np.zeros((1, config.max_seq_len), np.int32)
        row[0, : len(ids) - 1] = ids[:-1]
        found = np.asarray(of_row(params, row), np.float64)[0, len(ids) - 1 - len(continuation) : len(ids) - 1]
        every = found - np.log(np.exp(found).sum(-1, keepdims=True))
        chosen = every[np.arange(len(continuation)), continuation].sum()
        return chosen, bool((found.argmax(-1) == continuation).all())

    return score


@pytest.fixture(scope="module")
def measure(model):
    return compiled_measure(*model)


def random_pairs(sizes, seed=0):
    draw = np.random.default_rng(seed).integers
    return [Continuation(draw(0, CONFIG.vocab_size, n), draw(0, CONFIG.vocab_size, m)) for n, m in sizes]


def check(found, pairs, plain, **options):
    for (logprob, greedy), pair in zip(found, pairs, strict=True):
        wanted = plain(*pair, **options)
        assert logprob == pytest.approx(wanted[0], abs=1e-4)
        assert greedy == wanted[1]


def test_each_is_what_it_is_alone(model, measure, plain):
    pairs = random_pairs([(1, 1), (30, 4), (3, 60), (64, 1), (1, 64), (5, 5), (17, 2), (40, 9), (2, 1), (8, 8)])
    for context in pairs[1].context, pairs[3].context:  # what greedy decoding gives
        read, found = list(context), []
        for _ in range(3):
            row = np.zeros((1, CONFIG.max_seq_len), np.int32)
            row[0, : len(read[-64:])] = read[-64:]
            found.append(int(np.argmax(jit_logits(*model, row)[0, len(read[-64:]) - 1])))
            read.append(found[-1])
        pairs.append(Continuation(context[-60:], found if len(context) < 60 else found[:1]))
    found = score_pairs(*model, pairs, batch=2, measure=measure)
    check(found, pairs, plain)
    assert found[-2].greedy


def test_what_is_too_long_loses_its_beginning(model, measure, plain):
    pairs = random_pairs([(100, 3), (64, 2), (63, 2), (5, 64)])
    check(score_pairs(*model, pairs, batch=2, measure=measure), pairs, plain)
    check(score_pairs(*model, pairs[:3], context=20, batch=2), pairs[:3], plain, most=20)


def test_answers_to_the_same_question_share_what_is_read(model, measure, plain, monkeypatch):
    question = np.arange(20) % CONFIG.vocab_size
    pairs = [Continuation(question, [answer]) for answer in range(40)]  # more than 64 tokens of 3 questions would hold
    pairs += [
        Continuation(question, [3, 4]),
        Continuation(np.append(question, 3), [4, 9]),
        Continuation(np.append(question, 3), [4]),
    ]
    read = []

    def counting(params, rows):
        read.append(int((np.diff(rows.segment_ids, prepend=0) > 0).sum()))
        return measure(params, rows)

    check(score_pairs(*model, pairs, batch=2, measure=counting), pairs, plain)
    assert sum(read) == 3  # of 43: the question, with an answer of one token after it, and with one of two
    many = [
        Continuation([5], [answer % CONFIG.vocab_size]) for answer in range(150)
    ]  # a row of 64 tokens has no room for all
    check(score_pairs(*model, many, batch=2, measure=measure), many, plain)


def test_of_equal_tokens_the_first_is_greedy(model, measure):
    config, params = model
    context = [7, 8, 9]
    best = int(np.argmax(jit_logits(config, params, np.array([context]))[0, -1]))
    other = (best + 1) % config.vocab_size
    tied = params.replace(lm_head=params.lm_head.at[other].set(params.lm_head[best]))
    pairs = [Continuation(context, [best]), Continuation(context, [other])]
    found = score_pairs(config, tied, pairs, batch=2, measure=measure)
    assert found[0].logprob == found[1].logprob
    assert [one.greedy for one in found] == [best < other, other < best]


@pytest.mark.slow
def test_a_model_with_an_adapter_in_fewer_bits_and_on_a_mesh(tmp_path, plain, model):
    """The scores are those of the model that the parameters are, however they lie."""
    config, params = model
    adapters = random_adapters(config)
    pairs = random_pairs([(30, 4), (3, 40), (64, 1), (5, 5)])
    for other in (llama_jax.apply_adapters(params, adapters, LORA), llama_jax.model.trees.quantize(params, "int8")):
        check(score_pairs(config, other, pairs), pairs, plain, params=other)
    llama_jax.save(tmp_path / "model", config, params)
    fitted, spread, _ = llama_jax.load(tmp_path / "model", mesh=llama_jax.MeshSizes(tensor=2))
    check(score_pairs(fitted, spread, pairs, batch=2), pairs, plain)


@pytest.mark.parametrize(
    ("pairs", "options", "message"),
    [
        ([Continuation([], [1])], {}, "context 0 is empty"),
        ([Continuation([1], [1]), Continuation([1], [])], {}, "continuation 1 is empty"),
        ([Continuation([1], [10_000])], {}, "token id 10000 is outside the vocabulary"),
        ([Continuation([1], [1] * 65)], {}, "continuation 0 has 65 tokens, but the context only 64"),
        ([Continuation([1], [1])], {"batch": 0}, "batch=0 must be at least 1"),
    ],
)
def test_what_cannot_be_scored(model, measure, pairs, options, message):
    with pytest.raises(UserError, match=message):
        score_pairs(*model, pairs, measure=measure, **options)


def test_numbers_that_are_none(model, measure):
    config, params = model
    spoiled = params.replace(final_norm=params.final_norm.at[0].set(np.nan))
    with pytest.raises(GenerationError, match="logits after text 0 are NaN"):
        score_pairs(config, spoiled, [Continuation([1], [2])], batch=2, measure=measure)
