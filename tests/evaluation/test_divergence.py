"""How far a model's predictions are from a reference's, beside the definition."""

import math
from dataclasses import replace

import jax
import make_goldens
import numpy as np
import pytest
from conftest import jit_logits
from evaluation.test_perplexity import corpus_of

from llama_jax.data import Corpus, DataError
from llama_jax.evaluation.perplexity import evaluate, kl_to_reference

CONFIG = make_goldens.KINDS["gqa"]
LENGTHS = [40, 1, 9, 64, 2, 33]


@pytest.fixture(scope="module")
def pair(models):
    """A model, and the same with noise in its weights."""
    _, params = models["gqa"]

    @jax.jit
    def with_noise(params):
        keys = iter(jax.random.split(jax.random.key(1), len(jax.tree.leaves(params))))
        return jax.tree.map(lambda a: a + 0.1 * a.std() * jax.random.normal(next(keys), a.shape, a.dtype), params)

    return with_noise(params), params


def by_definition(corpus: Corpus, noisy, params) -> tuple[np.ndarray, ...]:
    """KL of the reference's distribution from the model's, and whether the top token is the same, document by document."""
    kls, same = [], []
    for number in range(corpus.document_count):
        ids = corpus.document(number).astype(np.int64)
        if len(ids) > 1:
            row = np.zeros((1, 64), np.int64)  # of one length, so that one program serves; what follows is not seen
            row[0, : len(ids) - 1] = ids[:-1]
            each = (np.asarray(jit_logits(CONFIG, one, row)[0], np.float64) for one in (noisy, params))
            q, p = (logits[: len(ids) - 1] for logits in each)
            p, q = (x - x.max(-1, keepdims=True) for x in (p, q))
            p, q = (x - np.log(np.exp(x).sum(-1, keepdims=True)) for x in (p, q))
            kls.append((np.exp(p) * (p - q)).sum(-1))
            same.append(p.argmax(-1) == q.argmax(-1))
    return np.concatenate(kls), np.concatenate(same)


def test_as_defined(pair):
    corpus = corpus_of(LENGTHS)
    found = kl_to_reference(CONFIG, *pair, corpus, length=64, batch=2)
    kl, same = by_definition(corpus, *pair)
    assert found.kl > 0.001
    np.testing.assert_allclose(found.kl, kl.mean(), rtol=1e-4)
    np.testing.assert_allclose((found.kl_median, found.kl_99), np.quantile(kl, (0.5, 0.99)), rtol=1e-3)
    np.testing.assert_allclose(found.kl_max, kl.max(), rtol=1e-3)
    assert found.same_top == same.mean() < 1
    for one, params in zip((found.model, found.reference), pair, strict=True):
        alone = evaluate(CONFIG, params, corpus, length=64, batch=2)
        assert (one.tokens, one.windows) == (alone.tokens, alone.windows)
        np.testing.assert_allclose((one.loss, one.standard_error), (alone.loss, alone.standard_error), rtol=1e-5)
    np.testing.assert_allclose(found.loss_difference, found.model.loss - found.reference.loss, atol=1e-6)
    np.testing.assert_allclose(found.perplexity_ratio, math.exp(found.loss_difference))
    assert 0 < found.loss_difference_error < found.model.standard_error
    assert 0 < found.kl_error < found.kl


def test_of_a_model_from_itself_there_is_none(pair):
    found = kl_to_reference(CONFIG, pair[0], pair[0], corpus_of([40]), batch=1)
    assert (found.kl, found.kl_max, found.loss_difference, found.perplexity_ratio, found.same_top) == (0, 0, 0, 1, 1)
    assert math.isnan(found.kl_error)


def test_windows_are_read_as_evaluate_reads_them_and_the_shorter_context_counts(pair):
    corpus, shorter = corpus_of([150]), replace(CONFIG, max_seq_len=32)
    found = kl_to_reference(CONFIG, *pair, corpus, reference_config=shorter, batch=1)
    alone = evaluate(shorter, pair[1], corpus, batch=1)
    assert found.reference.tokens == alone.tokens == 149
    assert found.reference.windows == alone.windows
    np.testing.assert_allclose(found.reference.loss, alone.loss, rtol=1e-5)


def test_another_vocabulary_is_refused(pair):
    other = replace(CONFIG, vocab_size=CONFIG.vocab_size + 1)
    with pytest.raises(DataError, match=r"the reference has a vocabulary of \d+, but the model one of \d+"):
        kl_to_reference(CONFIG, *pair, corpus_of([40]), reference_config=other)
