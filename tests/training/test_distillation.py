"""The divergence from a teacher against its definition, in float64."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import as_float64
from training_options import loss_options

import llama_jax
from llama_jax.errors import ConfigError
from llama_jax.ops.cross_entropy import LogitOptions
from llama_jax.ops.kl_divergence import DivergenceOptions, Logits, token_divergence
from llama_jax.training.batch import Batch, target_mask
from llama_jax.training.distillation import DistillOptions, Teacher, distillation_loss

ROWS, LENGTH, VOCABULARY = 2, 11, 40


def drawn(dim, seed):
    rng = np.random.default_rng(seed)
    return rng.normal(size=(ROWS, LENGTH, dim)), 0.7 * rng.normal(size=(VOCABULARY, dim))


def drawn_float32():
    return [tuple(part.astype(np.float32) for part in drawn(*one)) for one in ((6, 0), (9, 1))]


def plain(logits, wanted, temperature, top_k):
    """As it is defined; the tokens beyond the k most probable ones are one."""
    q, p = (np.exp(one / temperature) for one in (logits, wanted))
    q, p = (one / one.sum(-1, keepdims=True) for one in (q, p))
    found = np.zeros(p.shape[:-1])
    for at in np.ndindex(*found.shape):
        order = np.argsort(-p[at])
        k = top_k or len(order)
        kept, rest = order[:k], order[k:]
        found[at] = np.sum(p[at][kept] * np.log(p[at][kept] / q[at][kept]))
        if len(rest):
            found[at] += p[at][rest].sum() * np.log(p[at][rest].sum() / q[at][rest].sum())
    return found


def divergence_of(targets, made, options):
    """Of a student's hidden states and head and a teacher's, as one program."""
    return jax.jit(lambda *given: token_divergence(Logits(*given[:2]), Logits(*given[2:]), targets, made, options))


@pytest.mark.parametrize(("temperature", "top_k", "chunk"), [(1.0, 0, 4), (2.0, 0, 100), (1.0, 5, 3), (0.5, 39, 11)])
def test_values_are_those_of_the_definition(temperature, top_k, chunk):
    (hidden, head), (theirs, their_head) = drawn(6, 0), drawn(9, 1)
    targets = np.random.default_rng(2).integers(-3, VOCABULARY, (ROWS, LENGTH))
    made = LogitOptions(chunk), LogitOptions(chunk)
    with jax.enable_x64(True):
        run = divergence_of(jnp.asarray(targets), made, DivergenceOptions(temperature, top_k))
        found = run(hidden, head, theirs, their_head)
    logits, wanted = hidden @ head.T, theirs @ their_head.T
    counted = targets >= 0
    np.testing.assert_allclose(found.divergence, plain(logits, wanted, temperature, top_k) * counted, rtol=1e-9, atol=1e-12)
    logprobs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    nll = -np.take_along_axis(logprobs, np.maximum(targets, 0)[..., None], -1)[..., 0] * counted
    np.testing.assert_allclose(found.nll, nll, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("top_k", [0, 5])
def test_gradients_are_those_of_the_definition_and_the_teacher_has_none(top_k):
    given = *drawn(6, 0), *drawn(9, 1)
    targets = np.random.default_rng(2).integers(-3, VOCABULARY, (ROWS, LENGTH))

    def total(hidden, head, theirs, their_head):
        made = LogitOptions(4), LogitOptions(4)
        student, teacher = Logits(hidden, head), Logits(theirs, their_head)
        found = token_divergence(student, teacher, jnp.asarray(targets), made, DivergenceOptions(2.0, top_k))
        return jnp.sum(found.divergence)

    def definition(hidden, head):
        logq, logp = (jax.nn.log_softmax(one / 2.0) for one in (hidden @ head.T, given[2] @ given[3].T))
        kept = jnp.argsort(jnp.argsort(-logp)) < (top_k or VOCABULARY)
        terms = jnp.where(kept, jnp.exp(logp) * (logp - logq), 0).sum(-1)
        if top_k:
            p, q = (jnp.where(kept, 0, jnp.exp(one)).sum(-1) for one in (logp, logq))
            terms += p * (jnp.log(p) - jnp.log(q))
        return jnp.sum(jnp.where(targets >= 0, terms, 0))

    with jax.enable_x64(True):
        found = jax.jit(jax.grad(total, argnums=(0, 1, 2, 3)))(*given)
        expected = jax.jit(jax.grad(definition, argnums=(0, 1)))(*given[:2])
    for ours, theirs in zip(found, expected, strict=False):
        np.testing.assert_allclose(ours, theirs, rtol=1e-9, atol=1e-12)
    assert not any(np.asarray(part).any() for part in found[2:])


@pytest.mark.slow
def test_equal_distributions_and_ties_are_finite():
    (hidden, head), _ = drawn_float32()
    targets, made = jnp.zeros((ROWS, LENGTH), int), (LogitOptions(4), LogitOptions(4))
    flat = jnp.zeros_like(hidden)  # a teacher for which all are as probable: all of them are among the first two
    for theirs, top_k in ((hidden, 0), (hidden, 3), (flat, 2)):

        def total(hidden, teacher=Logits(jnp.asarray(theirs), head), top_k=top_k):
            options = DivergenceOptions(1.0, top_k)
            return jnp.sum(token_divergence(Logits(hidden, head), teacher, targets, made, options).divergence)

        value, gradient = jax.value_and_grad(total)(hidden)
        assert np.isfinite(np.asarray(gradient)).all()
        if theirs is hidden:
            np.testing.assert_allclose(value, 0, atol=1e-4)
            np.testing.assert_allclose(gradient, 0, atol=1e-5)


@pytest.mark.slow
def test_padding_of_the_vocabulary_has_no_probability():
    (hidden, head), (theirs, their_head) = drawn_float32()
    padded = [np.concatenate([one, np.full((8, one.shape[1]), 3.0, np.float32)]) for one in (head, their_head)]
    targets = jnp.zeros((ROWS, LENGTH), int)
    made = LogitOptions(4), LogitOptions(4)
    more = LogitOptions(4, vocab_size=VOCABULARY), LogitOptions(4, vocab_size=VOCABULARY)
    for top_k in (0, 5):
        options = DivergenceOptions(1.0, top_k)
        expected = divergence_of(targets, made, options)(hidden, head, theirs, their_head)

        def total(hidden, options=options):
            found = token_divergence(Logits(hidden, padded[0]), Logits(theirs, padded[1]), targets, more, options)
            return jnp.sum(found.divergence), found

        (_, found), gradient = jax.jit(jax.value_and_grad(total, has_aux=True))(hidden)
        jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6), found, expected)
        assert np.isfinite(np.asarray(gradient)).all()


@pytest.mark.slow
@pytest.mark.parametrize("weighted", [False, True])
def test_the_loss_mixes_divergence_and_likelihood(models, weighted):
    """The student has another shape, and each token a weight."""
    (config, params), (other, theirs) = models["gqa"], models["tied"]
    assert config.vocab_size == other.vocab_size
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, config.vocab_size, (ROWS, LENGTH + 1), np.int32)
    mask = rng.random(tokens.shape)
    batch = Batch(tokens, loss_mask=np.maximum(mask - 0.4, 0) if weighted else mask < 0.6)
    options = DistillOptions(weight=0.3, temperature=2.0)
    with jax.enable_x64(True):
        params, theirs = as_float64(params), as_float64(theirs)
        found = distillation_loss(options, Teacher(other, theirs))(config, params, batch, loss_options(chunk=4))
        read = batch.tokens[:, :-1]
        logits, wanted = (
            np.asarray(llama_jax.logits(config, params, read)),
            np.asarray(llama_jax.logits(other, theirs, read)),
        )
    counted = np.asarray(target_mask(batch))
    kl = (plain(logits, wanted, 2.0, 0) * counted).sum()
    logprobs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    nll = -(np.take_along_axis(logprobs, tokens[:, 1:, None], -1)[..., 0] * counted).sum()
    np.testing.assert_allclose(found.loss, 0.3 * 4 * kl + 0.7 * nll, rtol=1e-8)
    np.testing.assert_allclose((found.metrics["kl"], found.metrics["cross_entropy"]), (kl, nll), rtol=1e-8)


def test_options_that_cannot_be():
    for changes, message in (
        ({"temperature": 0}, "temperature=0 must be above 0"),
        ({"weight": 0.0}, r"weight=0.0 must be above 0 and at most 1"),
        ({"top_k": -1}, "top_k=-1 must be at least 0"),
    ):
        with pytest.raises(ConfigError, match=message):
            DistillOptions(**changes)
