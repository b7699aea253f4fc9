"""Loss by length and by position against the definition, and what is known beforehand."""

import math
from dataclasses import replace

import jax
import jax.numpy as jnp
import make_goldens
import numpy as np
import pytest
from conftest import as_float64
from evaluation.test_perplexity import corpus_of
from hypothesis import given, settings
from hypothesis import strategies as st

from llama_jax.config import RopeScaling
from llama_jax.data import DataError
from llama_jax.evaluation import loss_by_length as lengths_module
from llama_jax.evaluation.loss_by_length import LengthLoss, cut_spans, evaluate_lengths
from llama_jax.model.cache import CacheOptions
from llama_jax.model.logits import logits

KIND = "gqa"
CONFIG = make_goldens.KINDS[KIND]
DYNAMIC = replace(CONFIG, max_seq_len=8, rope_scaling=RopeScaling("dynamic", 4.0, original_max_seq_len=8))


def by_definition(config, params, corpus, length, longest):
    """Nats [windows, T] of every window in float64, each read alone and whole, without a cache."""
    windows = [
        ids[start : start + length + 1]
        for ids in map(corpus.document, range(corpus.document_count))
        for span in range(0, len(ids) - longest, longest)
        for start in range(span, span + longest - length + 1, length)
    ]
    rows = np.zeros((len(windows), longest if config.rope_scaling is None else length), np.int32)
    rows[:, :length] = [window[:-1] for window in windows]
    with jax.enable_x64(True):
        wide = as_float64(params)
        # One program for all lengths: what is read after a window changes nothing in it.
        of_row = jax.jit(lambda tokens: jax.nn.log_softmax(logits(config, wide, tokens[None])[0]))
        return np.array(
            [-np.asarray(of_row(row))[np.arange(length), window[1:]] for row, window in zip(rows, windows, strict=True)]
        )


@pytest.fixture
def in_pieces(monkeypatch):
    """A window ends inside a piece."""
    monkeypatch.setattr(lengths_module, "MAX_PREFILL_CHUNK", 5)


@pytest.mark.parametrize(
    ("config", "lengths"),
    [(CONFIG, (8, 24)), pytest.param(DYNAMIC, (12,), marks=pytest.mark.slow)],
    ids=["plain", "rope by length"],
)
def test_it_is_the_definition(models, in_pieces, config, lengths):
    """Several windows at once, of which the last batch is not full; and beyond the model's context."""
    corpus = corpus_of([60, 24, 25, 40, 1])
    found = evaluate_lengths(config, models[KIND][1], corpus, lengths[::-1], batch=3)
    assert tuple(one.length for one in found) == lengths
    for one in found:
        nats = by_definition(config, models[KIND][1], corpus, one.length, lengths[-1])
        assert nats.shape == (one.windows, one.length)
        assert one.tokens == nats.size
        np.testing.assert_allclose(one.by_position, nats.mean(axis=0), rtol=1e-5)
        assert one.loss == pytest.approx(nats.mean(), rel=1e-5)
        assert one.perplexity == pytest.approx(math.exp(nats.mean()), rel=1e-4)
        assert one.last_quarter == pytest.approx(nats[:, -(one.length // 4) :].mean(), rel=1e-5)
        spans = nats.reshape(found[-1].windows, -1).mean(axis=1)
        assert one.standard_error == pytest.approx(spans.std(ddof=1) / math.sqrt(len(spans)), rel=1e-3)
    assert len({one.tokens for one in found}) == 1


def test_a_model_that_knows_nothing(models, in_pieces):
    params = models[KIND][1]
    (found,) = evaluate_lengths(CONFIG, jax.tree.map(jnp.zeros_like, params), corpus_of([80]), [24], batch=3)
    np.testing.assert_allclose(found.by_position, math.log(CONFIG.vocab_size), rtol=1e-6)
    assert found.standard_error == pytest.approx(0, abs=1e-6)


@pytest.mark.slow
def test_a_trained_model_breaks_beyond_its_context(stories):
    """And yarn mends the most of it: stories260K was trained at 512 tokens."""
    text = "Once upon a time, there was a little girl named Lily. She loved to play outside in the park with her friends. "
    ids = stories.tokenizer.encode(text * 80)
    corpus = replace(corpus_of([len(ids)]), tokens=np.array([0, 0, 0, *ids], np.uint16), vocab_size=512)
    within, beyond = evaluate_lengths(stories.config, stories.params, corpus, [512, 2048], max_tokens=2048)
    yarn = replace(stories.config, rope_scaling=RopeScaling("yarn", 4.0, original_max_seq_len=512), max_seq_len=2048)
    (extended,) = evaluate_lengths(yarn, stories.params, corpus, [2048], max_tokens=2048)
    assert within.tokens == beyond.tokens == extended.tokens == 2048
    assert beyond.last_quarter > within.last_quarter + 0.1
    assert extended.last_quarter < beyond.last_quarter - 0.1


def test_one_program_for_a_length_and_no_logits_of_a_whole_window(models, monkeypatch):
    monkeypatch.setattr(lengths_module, "MAX_PREFILL_CHUNK", 16)
    monkeypatch.setattr(lengths_module, "ROWS_OF_LOGITS", 8)
    config, params = models[KIND]
    before = lengths_module._piece_nats._cache_size()
    for seed in range(2):
        found = evaluate_lengths(config, params, corpus_of([145], seed), [48], batch=2)
    assert lengths_module._piece_nats._cache_size() == before + 1
    assert math.isfinite(found[0].standard_error)
    cache = lengths_module.empty_cache(config, params, 2, 48)
    tokens = jnp.zeros((2, 16), jnp.int32)
    program = lengths_module._piece_nats.lower(config, params, 48, cache, tokens, tokens).as_text()
    assert f"tensor<2x4x{config.vocab_size}xf32>" in program
    assert f"2x16x{config.vocab_size}x" not in program
    assert f"2x48x{config.dim}x" not in program


def test_what_is_remembered_is_what_generation_remembers(models, monkeypatch):
    """A window as long as the text changes nothing, a short one does; int8 does little; one cache serves all windows."""
    monkeypatch.setattr(lengths_module, "MAX_PREFILL_CHUNK", 16)
    config, params = models[KIND]

    def by_position(**options):
        cache = CacheOptions(**options)
        return evaluate_lengths(config, params, corpus_of([145]), [48], batch=1, cache=cache)[0].by_position

    whole = by_position()
    np.testing.assert_allclose(by_position(window=48, sinks=2), whole, rtol=1e-4)
    short = by_position(window=4)
    np.testing.assert_allclose(short[:4], whole[:4], rtol=1e-4)
    assert np.abs(short - whole)[4:].max() > 1e-3
    assert 0 < np.abs(by_position(dtype="int8") - whole).max() < 0.1


def test_progress_sees_every_piece_and_its_end(models, monkeypatch):
    monkeypatch.setattr(lengths_module, "MAX_PREFILL_CHUNK", 16)
    ended = []

    def progress(numbers):
        yield from numbers
        ended.append(len(numbers))

    params = models[KIND][1]
    evaluate_lengths(CONFIG, params, corpus_of([97]), [48], batch=1, progress=progress)
    assert ended == [2 * 3]
    (one_window,) = evaluate_lengths(CONFIG, params, corpus_of([97]), [48], batch=1, max_tokens=50)
    assert math.isnan(one_window.standard_error)


# -- what needs no model -------------------------------------------------------------------------------------------------


@given(st.lists(st.integers(0, 60), min_size=1, max_size=8), st.integers(1, 30), st.integers(1, 200))
def test_spans_lie_in_documents_and_do_not_overlap(lengths, length, limit):
    corpus = corpus_of(lengths)
    spans = cut_spans(corpus, length, None)
    covered = np.zeros(len(corpus.tokens), int)
    for start in spans:
        assert ((corpus.starts <= start) & (start + length < corpus.stops)).sum() == 1
        covered[start : start + length] += 1
    assert covered.max(initial=0) <= 1
    # What is left of a document has no lengths_module for another.
    used = [covered[begin:end].sum() for begin, end in zip(corpus.starts, corpus.stops, strict=True)]
    assert max(np.array(lengths) - 1 - used) < length
    kept = cut_spans(corpus, length, max(limit, length))
    assert len(kept) == min(len(spans), max(limit, length) // length)
    assert np.isin(kept, spans).all()
    assert (np.diff(kept) > 0).all()


def test_a_limit_takes_spans_from_all_of_the_text():
    spans = cut_spans(corpus_of([1001]), 10, 50)
    np.testing.assert_array_equal(np.diff(spans), 200)


@settings(max_examples=20)
@given(st.integers(1, 3000))
def test_buckets_are_the_loss_in_parts(length):
    by_position = np.random.default_rng(length).random(length)
    one = LengthLoss(length, 1, length, 0.0, 0.0, 0.0, 0.0, by_position)
    assert [bucket.first for bucket in one.buckets] == [1, *(bucket.last + 1 for bucket in one.buckets[:-1])]
    assert one.buckets[-1].last == length
    assert all(bucket.last <= 2 * bucket.first for bucket in one.buckets)
    total = sum((bucket.last - bucket.first + 1) * bucket.loss for bucket in one.buckets)
    assert total == pytest.approx(by_position.sum())


@given(st.integers(1, 5000))
def test_pieces_hold_the_length_and_waste_little(length):
    piece, pieces = lengths_module.cut_pieces(length)
    assert piece <= lengths_module.MAX_PREFILL_CHUNK
    assert 0 <= piece * pieces - length < pieces


@pytest.mark.parametrize(
    ("lengths", "more", "message"),
    [
        ([], {}, r"lengths is empty"),
        ([4, 0], {}, r"length=0 must be at least 1 token"),
        ([4, 8, 4], {}, r"length=4 is given twice"),
        ([4, 50], {}, r"length=50 needs a document with one token more, but the longest has 50; use a longer text"),
        ([4, 8], {"max_tokens": 7}, r"max_tokens=7 is less than one window of length=8"),
        ([4], {"batch": 0}, r"batch=0 must be at least 1 row"),
    ],
)
def test_mistakes(lengths, more, message):
    with pytest.raises(DataError, match=message):
        evaluate_lengths(CONFIG, None, corpus_of([50, 20]), lengths, **more)


def test_a_larger_vocabulary():
    corpus = replace(corpus_of([10]), vocab_size=97)
    corpus.tokens[corpus.starts[0]] = 96
    with pytest.raises(DataError, match=r"document 1 contains the token id 96, which has no row .* of 96 rows"):
        evaluate_lengths(CONFIG, None, corpus, [4])
