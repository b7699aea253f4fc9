"""Loss, perplexity and bits per byte against the definition, and what is known beforehand."""

import math
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import make_goldens
import numpy as np
import pytest
from conftest import as_float64, jit_init
from hypothesis import given, settings
from hypothesis import strategies as st

from llama_jax.data import Corpus, DataError
from llama_jax.data.preference_batches import Pairs
from llama_jax.evaluation.measure import WindowRows, choose_sizes, token_nats
from llama_jax.evaluation.perplexity import evaluate, pair_logprobs, preference_accuracy
from llama_jax.model.forward_options import ComputeOptions
from llama_jax.model.logits import logits

KIND = "gqa"
CONFIG = make_goldens.KINDS[KIND]
LENGTHS = [40, 1, 9, 150, 2, 64, 65, 66]


def corpus_of(lengths, seed=0, vocab_size=CONFIG.vocab_size):
    """Documents of random tokens, with others between them."""
    stops = np.cumsum(np.array(lengths, np.int64) + 3)
    return Corpus(
        tokens=np.random.default_rng(seed).integers(0, vocab_size, int(stops[-1])).astype(np.uint16),
        starts=stops - lengths,
        stops=stops,
        byte_counts=np.array(lengths, np.int64) * 4,
        vocab_size=vocab_size,
        digest="",
    )


def strided(corpus, length, stride, log_probabilities):
    """The recipe of transformers' documentation ("Perplexity of fixed-length models"): nats of every predicted token.

    `log_probabilities(ids)` of each of ids[1:] given those before.
    """
    found = []
    for number in range(corpus.document_count):
        ids = corpus.document(number).astype(np.int64)
        previous = 0
        for begin in range(0, len(ids), stride):
            end = min(begin + length + 1, len(ids))
            count = min(end - previous, end - begin - 1)  # the first of all has nothing before it
            if count:
                found += list(-log_probabilities(ids[begin:end])[-count:])
            previous = end
            if end == len(ids):
                break
    return np.array(found)


@pytest.fixture(scope="module")
def plain(models):
    """Log-probabilities of a run of tokens in float64, one run at a time and without packing."""
    config, params = models[KIND]
    with jax.enable_x64(True):
        params = as_float64(params)
        of_row = jax.jit(lambda tokens: jax.nn.log_softmax(logits(config, params, tokens)[0]))

    def log_probabilities(ids):
        row = np.zeros((1, config.max_seq_len), np.int32)
        row[0, : len(ids) - 1] = ids[:-1]  # padding comes after all that is read
        with jax.enable_x64(True):
            return np.asarray(of_row(row))[np.arange(len(ids) - 1), ids[1:]]

    return log_probabilities


@pytest.fixture(scope="module")
def measure():
    """Compiled once for each shape, by whichever test comes first."""
    return jax.jit(partial(token_nats, CONFIG, logit_block=7))


@pytest.mark.parametrize(
    ("length", "stride", "batch"), [(64, 32, 3), (64, 64, 3), (13, 5, 2), pytest.param(1, 1, 4, marks=pytest.mark.slow)]
)
def test_it_is_the_definition(models, measure, plain, length, stride, batch):
    corpus = corpus_of(LENGTHS)
    nats = strided(corpus, length, stride, plain)
    assert len(nats) == sum(LENGTHS) - len(LENGTHS)
    found = evaluate(*models[KIND], corpus, length=length, stride=stride, batch=batch, measure=measure)
    assert (found.tokens, found.documents, found.bytes) == (len(nats), len(LENGTHS), 4 * sum(LENGTHS))
    assert found.loss == pytest.approx(nats.mean(), rel=1e-6)
    assert found.perplexity == pytest.approx(np.exp(nats.mean()), rel=1e-5)
    assert found.bits_per_byte == pytest.approx(nats.sum() / math.log(2) / (4 * sum(LENGTHS)), rel=1e-6)


@settings(max_examples=10)
@given(st.lists(st.integers(0, 100), max_size=5).map(lambda some: [30, *some]), st.integers(0, 1000))
def test_documents_of_any_length(models, measure, plain, lengths, seed):
    corpus = corpus_of(lengths, seed)
    found = evaluate(*models[KIND], corpus, length=13, stride=6, batch=2, measure=measure)
    assert found.loss == pytest.approx(strided(corpus, 13, 6, plain).mean(), rel=1e-6)


def test_more_context_helps(stories, stories_folder):
    """On text that the model knows, a window that overlaps gives the lower loss."""
    ids = stories.tokenizer.encode("Once upon a time, there was a little girl named Lily. She loved to play outside. " * 6)
    corpus = replace(corpus_of([len(ids)], vocab_size=512), tokens=np.array([0, 0, 0, *ids], np.uint16))
    measure = jax.jit(partial(token_nats, stories.config))
    sizes = ({"length": 32, "stride": stride} for stride in (32, 8))
    losses = [evaluate(stories.config, stories.params, corpus, measure=measure, **size).loss for size in sizes]
    assert losses[1] < losses[0] - 0.05


def test_bfloat16(models, measure):
    config, params = models[KIND]
    corpus = corpus_of(LENGTHS)
    expected = evaluate(config, params, corpus, batch=3, measure=measure).loss
    assert evaluate(config, params, corpus).loss == pytest.approx(expected, rel=1e-6)
    in_bfloat16 = jax.jit(partial(token_nats, config, compute=ComputeOptions(jnp.bfloat16)))
    found = evaluate(config, params, corpus, measure=in_bfloat16).loss
    assert found != expected
    assert found == pytest.approx(expected, rel=1e-2)


def test_a_model_that_knows_nothing(models, measure):
    """Every token costs ln V, whatever the window."""
    config, params = models[KIND]
    nothing = jax.tree.map(jnp.zeros_like, params)
    found = evaluate(config, nothing, corpus_of(LENGTHS), length=13, batch=2, measure=measure)
    assert found.loss == pytest.approx(math.log(config.vocab_size), rel=1e-6)
    assert found.perplexity == pytest.approx(config.vocab_size, rel=1e-5)
    assert found.standard_error == pytest.approx(0, abs=1e-6)
    assert found.bits_per_byte == pytest.approx(math.log2(config.vocab_size) * found.tokens / found.bytes, rel=1e-6)


def test_one_program_is_compiled_and_the_logits_never_exist_at_once(models):
    config, params = models[KIND]
    measure = jax.jit(partial(token_nats, config, logit_block=8))
    for lengths in (LENGTHS, [41]):  # a single row is filled up to three
        evaluate(config, params, corpus_of(lengths), length=40, batch=3, measure=measure)
    assert measure._cache_size() == 1
    rows = WindowRows(*[jax.ShapeDtypeStruct((3, 40), jnp.int32)] * 4)
    program = measure.lower(params, rows).as_text()
    assert f"tensor<3x8x{config.vocab_size}xf32>" in program
    assert f"3x40x{config.vocab_size}x" not in program


# -- what needs no model: a measure that is told what each token costs ---------------------------------------------------


def costing(table):
    return lambda _, rows: np.where(rows.targets >= 0, table[rows.targets], 0).astype(np.float32)


def test_bits_per_byte_compare_across_vocabularies():
    """The same text in tokens of one byte and of two, the same probability of the text."""
    single = corpus_of([101], vocab_size=10)
    double = replace(corpus_of([51], vocab_size=10), byte_counts=single.byte_counts)
    one = evaluate(CONFIG, None, single, measure=costing(np.full(10, 0.5)))
    two = evaluate(CONFIG, None, double, measure=costing(np.full(10, 1.0)))
    assert two.loss == 2 * one.loss
    assert two.bits_per_byte == one.bits_per_byte == pytest.approx(50 / math.log(2) / 404)


def test_the_standard_error_is_the_spread_of_the_loss():
    """Over many texts of the same kind the loss varies by as much as each of them says."""
    rng = np.random.default_rng(0)
    table = rng.exponential(2, CONFIG.vocab_size)
    found = [evaluate(CONFIG, None, corpus_of(rng.integers(2, 30, 60), seed), measure=costing(table)) for seed in range(300)]
    assert np.mean([one.standard_error for one in found]) == pytest.approx(np.std([one.loss for one in found]), rel=0.15)


# -- mistakes ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"length": 0}, "length=0 must be at least 1 and within the model's context of 64"),
        ({"length": 8, "stride": 9}, "stride=9 must be at least 1 and at most 8"),
        ({"batch": 0}, "batch=0 must be at least 1"),
    ],
)
def test_sizes_that_cannot_be(sizes, message):
    with pytest.raises(DataError, match=message):
        evaluate(CONFIG, None, corpus_of([10]), **sizes)


def test_a_larger_vocabulary():
    corpus = replace(corpus_of([10]), vocab_size=97)
    assert choose_sizes(CONFIG, corpus, length=None, stride=None, batch=1).length > 0  # no document has the last token
    corpus.tokens[corpus.starts[0]] = 96
    with pytest.raises(DataError, match=r"document 1 contains the token id 96, which has no row .* of 96 rows"):
        evaluate(CONFIG, None, corpus)


@pytest.mark.parametrize("lengths", [[], [0], [1, 1]])
def test_nothing_to_predict(lengths):
    corpus = corpus_of([3]).select(np.array([], int)) if not lengths else corpus_of(lengths)
    with pytest.raises(DataError, match=f"{len(lengths)} documents have no token to predict"):
        evaluate(CONFIG, None, corpus)


def test_sizes_that_are_not_given():
    given = {"length": None, "stride": None, "batch": None}
    assert choose_sizes(CONFIG, corpus_of([10]), **given) == (64, 32, 1)
    assert choose_sizes(replace(CONFIG, max_seq_len=1 << 17), corpus_of([10]), **given) == (4096, 2048, 1)


# -- against transformers ------------------------------------------------------------------------------------------------


def test_rows_of_a_batch_are_bounded():
    corpus = corpus_of(LENGTHS)
    with pytest.raises(DataError, match=r"batch=99999999999 must be at least 1 and at most \d+"):
        choose_sizes(CONFIG, corpus, length=16, stride=None, batch=99_999_999_999)
    params = jit_init(CONFIG, jax.random.key(0))
    found = [
        evaluate(CONFIG, params, corpus, length=16, batch=batch).loss for batch in (64, 10**8)
    ]  # no more than there are
    assert found[0] == pytest.approx(found[1])


def test_logprobs_of_pairs_are_those_of_their_targets(models):
    """Whole documents, several in a row, beside each of them by itself."""
    config, params = models[KIND]
    sides = [corpus_of(lengths, seed) for seed, lengths in enumerate(([9, 30, 17], [12, 8, 33]))]
    sides = [replace(side, targets=np.random.default_rng(i).random(len(side.tokens)) < 0.5) for i, side in enumerate(sides)]
    found = pair_logprobs(config, params, Pairs(*sides), length=40, batch=1)
    for i, side in enumerate(sides):
        for number in range(side.document_count):
            ids = side.document(number).astype(np.int64)
            row = np.zeros((1, 40), np.int64)
            row[0, : len(ids)] = ids
            each = np.asarray(jax.nn.log_softmax(jax.jit(logits, static_argnums=0)(config, params, row)[0]))
            wanted = np.flatnonzero(side.targets[side.starts[number] + 1 : side.stops[number]])
            assert found.tokens[number, i] == len(wanted)
            assert found.logprobs[number, i] == pytest.approx(each[wanted, ids[wanted + 1]].sum(), rel=1e-4)
    same = preference_accuracy(found, found)
    assert (same.margin, same.accuracy, same.pairs, same.tokens) == (0, 0, 3, found.tokens.sum())
