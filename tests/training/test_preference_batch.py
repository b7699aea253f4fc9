"""Batches of pairs: their losses are those of every answer read alone, in parts as at once."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import as_float64
from test_preference_loss import formula
from training_options import loss_options

import llama_jax
from llama_jax.data.corpus import Corpus
from llama_jax.data.preference_batches import PairRows, Pairs, mismatched_answers
from llama_jax.model.forward_options import Sharding
from llama_jax.training.preference_batch import (
    AnswerSums,
    PairBatch,
    answer_logprobs,
    pair_loss,
    preferred,
    preparing,
)
from llama_jax.training.preference_loss import FREE, Pair, PreferenceOptions

LENGTH, BATCH = 23, 2
SIZES = [(3, 4, 2), (2, 5, 9), (4, 1, 1), (1, 6, 3), (5, 2, 7), (2, 3, 3), (6, 9, 8)]  # of a prompt and its two answers


def corpus_of(texts, vocab_size):
    """Documents of (prompt, answer), of which the answers are the targets."""
    stops = np.cumsum([len(prompt) + len(answer) for prompt, answer in texts])
    targets = np.concatenate([[False] * len(prompt) + [True] * len(answer) for prompt, answer in texts])
    tokens = np.concatenate([part for text in texts for part in text]).astype(np.uint16)
    starts = np.concatenate([[0], stops[:-1]])
    return Corpus(tokens, starts, stops, np.zeros(len(texts), np.int64), vocab_size, "random", targets)


def drawn(config, seed=0):
    rng = np.random.default_rng(seed)
    prompts, chosen, rejected = (
        [rng.integers(1, config.vocab_size, n) for n in sizes] for sizes in zip(*SIZES, strict=True)
    )
    first, second = (
        corpus_of(list(zip(prompts, answers, strict=True)), config.vocab_size) for answers in (chosen, rejected)
    )
    return Pairs(first, second)


def judged(config):
    pairs = drawn(config)
    return Pairs(
        pairs.first, mismatched_answers(pairs.first, LENGTH), np.array([True, False, True, True, False, False, True])
    )


@pytest.fixture(scope="module")
def alone():
    """The sum of the log-probabilities of each text's targets, and their number, one text after the other."""
    logits = jax.jit(llama_jax.logits, static_argnums=0)

    def alone(config, params, corpus):
        found = []
        for number in range(corpus.document_count):
            text = corpus.document(number).astype(np.int32)
            said = corpus.targets[corpus.starts[number] : corpus.stops[number]]
            padded = np.zeros((1, LENGTH + 1), np.int32)
            padded[0, : len(text)] = text
            logprobs = jax.nn.log_softmax(logits(config, params, padded)[0], axis=-1)
            found.append((sum(float(logprobs[i - 1, text[i]]) for i in range(1, len(text)) if said[i]), said[1:].sum()))
        return np.array(found).T

    return alone


OPTIONS = [
    PreferenceOptions("sigmoid", 0.3, label_smoothing=0.1),
    PreferenceOptions("hinge", 0.4),
    PreferenceOptions("ipo", 0.7),
    PreferenceOptions("simpo", 2.0),
    PreferenceOptions("orpo", 0.25),
]


@pytest.fixture(scope="module")
def read(models, alone):
    """Config, parameters of policy and reference in float64, and what both think of each answer of the pairs."""
    with jax.enable_x64(True):
        config, params = models["gqa"]
        policy = as_float64(params)
        reference = jax.tree.map(lambda leaf: leaf * 1.1, policy)
        pairs = drawn(config)
        sums = [[alone(config, model, side) for side in (pairs.first, pairs.second)] for model in (policy, reference)]
    return config, policy, reference, pairs, np.array(sums)  # [model, side, sum or length, N]


def batches_of(pairs, reference=None):
    rows = PairRows(pairs, BATCH, LENGTH, seed=None, reference=reference)
    return [rows[number] for number in range(len(rows))]


@pytest.mark.parametrize("options", OPTIONS, ids=lambda o: o.kind)
def test_the_loss_is_that_of_every_answer_read_alone(read, options):
    config, policy, _, pairs, sums = read
    chosen, rejected = (Pair(sums[model, 0, 0], sums[model, 1, 0]) for model in (0, 1))
    lengths = Pair(sums[0, 0, 1], sums[0, 1, 1])
    expected = formula(chosen, rejected, lengths, None, options)
    reference = None if options.kind in FREE else sums[1, :, 0].T
    with jax.enable_x64(True):
        loss = jax.jit(partial(pair_loss, options, config, options=loss_options(chunk=5)))
        found = [loss(policy, batch) for batch in batches_of(pairs, reference)]
    assert len(found) > 1, "several batches, of which the last is filled up with nothing"
    # The batch holds the reference in float32.
    np.testing.assert_allclose(sum(float(one.loss) for one in found), expected.sum(), rtol=1e-5)
    assert sum(int(one.metrics["tokens"]) for one in found) == lengths.chosen.sum() + lengths.rejected.sum()
    assert sum(int(one.metrics["chosen"]) for one in found) == len(SIZES)
    np.testing.assert_allclose(sum(float(one.metrics["chosen_logprob"]) for one in found), chosen.chosen.sum(), rtol=1e-9)


def test_an_answer_is_the_weighted_sum_of_its_tokens(read):
    """With weights in the mask, which also count in its length; a weight of 1 is the mask's."""
    config, policy, _, pairs, _ = read
    batch = batches_of(pairs)[0]
    weights = np.random.default_rng(0).random(batch.loss_mask.shape)
    with jax.enable_x64(True):
        measure = jax.jit(partial(answer_logprobs, config, options=loss_options(chunk=5)))
        plain, ones, some, others = (
            measure(policy, batch._replace(loss_mask=mask))
            for mask in (batch.loss_mask, *(batch.loss_mask * w for w in (1.0, weights, 1 - weights)))
        )
    for whole, first, second in zip(plain, some, others, strict=True):
        np.testing.assert_allclose(first + second, whole, rtol=1e-6, atol=1e-9)
        assert np.abs(first - second).max() > 0.1
    np.testing.assert_array_equal(ones, plain)


@pytest.mark.slow
def test_the_divergence_of_kto_is_of_the_whole_batch(models, alone):
    """In parts as at once, and as the formula has it of single answers."""
    config, params = models["gqa"]
    options = PreferenceOptions("kto", 0.3, undesirable=1.3)
    with jax.enable_x64(True):
        policy = as_float64(params)
        reference = jax.tree.map(lambda leaf: leaf * 1.1, policy)
        pairs = judged(config)
        batch = PairRows(pairs, 4, LENGTH, seed=None)[0]
        assert batch.there.sum() == pairs.count
        found = []
        for parts in (1, 2):
            prepare = preparing(True, reference, parts)
            rows = jax.jit(lambda p, b, prepare=prepare: prepare(config, p, b, loss_options(), Sharding()))(policy, batch)
            assert rows.tokens.shape == (4, 1, LENGTH + 1)
            found.append(float(pair_loss(options, config, policy, rows).loss))
        of = [[alone(config, model, side)[0] for side in (pairs.first, pairs.second)] for model in (policy, reference)]
    ratios, others = (of[0][side] - of[1][side] for side in (0, 1))
    z = max(0.0, others.mean())
    sigmoid = lambda x: 1 / (1 + np.exp(-x))
    good, bad = 1 - sigmoid(0.3 * (ratios - z)), 1.3 * (1 - sigmoid(0.3 * (z - ratios)))
    expected = np.where(pairs.desirable, good, bad).sum()
    np.testing.assert_allclose(found, expected, rtol=1e-9)


@pytest.mark.parametrize("options", [*OPTIONS, PreferenceOptions("kto")], ids=lambda o: o.kind)
def test_what_is_not_there_has_no_loss_and_no_gradient(options):
    """Of ORPO the odds of log-probability 0 are infinite."""
    there = np.array([[True, False], [False, False]])
    rng = np.random.default_rng(0)
    logprobs = -np.abs(rng.normal(size=(2, 2, 2))) * there[:, None]
    kto = options.kind == "kto"
    batch = PairBatch(
        *(None,) * 4,
        there=there,
        desirable=there if kto else None,
        reference=None if options.kind in FREE else 1.1 * logprobs,
        divergence=np.full(2, 0.1) if kto else None,
    )
    lengths = there[:, None] * np.full((2, 2, 2), 3.0)
    loss = lambda logprobs: jnp.sum(preferred(AnswerSums(logprobs, lengths), batch, options).losses)
    found, gradients = jax.jit(jax.value_and_grad(loss))(logprobs)
    assert np.isfinite(found)
    assert found > 0
    np.testing.assert_array_equal(np.asarray(gradients)[~np.broadcast_to(there[:, None], (2, 2, 2))], 0)
    assert np.asarray(gradients)[0, 0, 0] < 0
    only = AnswerSums(logprobs[:1, :, :1], lengths[:1, :, :1])
    cut = jax.tree.map(lambda part: part[:1, ..., :1] if part.ndim > 1 else part[:1], batch)
    np.testing.assert_allclose(found, preferred(only, cut, options).losses.sum(), rtol=1e-6)
