"""Log-probabilities of tokens against the definition."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import as_float64
from test_packed_conversations import SIZES, both, conversations
from training_options import loss_options

import llama_jax
from llama_jax.training.batch import Batch, target_mask
from llama_jax.training.logprobs import token_logprobs

ROWS, LENGTH = 3, 11


def plain(config, params, tokens, temperature):
    logits = llama_jax.logits(config, params, tokens[:, :-1]) / temperature
    return jnp.take_along_axis(jax.nn.log_softmax(logits, axis=-1), tokens[:, 1:, None], axis=-1)[..., 0]


def batch_of(config, seed=0):
    rng = np.random.default_rng(seed)
    tokens = rng.integers(0, config.vocab_size, (ROWS, LENGTH + 1), np.int32)
    return Batch(tokens, loss_mask=rng.random(tokens.shape) < 0.6)


@pytest.mark.parametrize(
    ("kind", "temperature", "chunk"), [("gqa", 1.0, 4), pytest.param("tied", 0.7, 100, marks=pytest.mark.slow)]
)
def test_values_and_gradients_are_those_of_the_definition(models, kind, temperature, chunk):
    config, params = models[kind]
    batch = batch_of(config)
    weights = np.random.default_rng(1).normal(size=(ROWS, LENGTH))
    counted = np.asarray(target_mask(batch))
    with jax.enable_x64(True):
        params = as_float64(params)

        def found(params, temperature):
            logprobs = token_logprobs(config, params, batch, loss_options(chunk=chunk), temperature=temperature)
            return jnp.sum(logprobs * weights), logprobs

        def wanted(params, temperature):
            logprobs = jnp.where(counted, plain(config, params, batch.tokens, temperature), 0)
            return jnp.sum(logprobs * weights), logprobs

        (_, ours), gradients = jax.jit(jax.value_and_grad(found, has_aux=True))(params, temperature)
        (_, theirs), expected = jax.jit(jax.value_and_grad(wanted, has_aux=True))(params, temperature)
        assert ours.dtype == jnp.float64
        np.testing.assert_allclose(ours, theirs, rtol=1e-10, atol=1e-12)
        jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-8, atol=1e-11), gradients, expected)
    assert not np.asarray(ours)[~counted].any()


def test_conversations_that_share_a_row_have_those_of_their_own(models):
    config, params = models["gqa"]
    packed, alone = both(conversations(config, SIZES))
    measured = jax.jit(partial(token_logprobs, config, options=loss_options()))
    count = int(np.asarray(target_mask(packed)).sum())
    ours, theirs = (np.sort(np.ravel(measured(params, batch)))[:count] for batch in (packed, alone))
    np.testing.assert_allclose(ours, theirs, atol=1e-5)
    assert (ours < 0).all()
