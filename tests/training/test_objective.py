from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import as_float64
from hypothesis import given
from hypothesis import strategies as st

import llama_jax
from llama_jax.training.objective import next_token_loss

BATCH, LENGTH = 2, 11


def plain_loss(config, params, tokens):
    """The definition: the log of the softmax over all logits at once, at each target."""
    logits = llama_jax.logits(config, params, tokens[:, :-1])
    log_probabilities = jnp.log(jax.nn.softmax(logits, axis=-1))
    return -jnp.mean(jnp.take_along_axis(log_probabilities, tokens[:, 1:, None], axis=-1))


@pytest.fixture(scope="module")
def defined(models):
    """{kind: (config, params with stacked blocks, tokens, (loss, gradients) of the definition)}, in float64."""

    def of(config, params):
        tokens = np.random.default_rng(0).integers(0, config.vocab_size, (BATCH, LENGTH + 1), np.int32)
        params = llama_jax.stack(as_float64(params))
        return config, params, tokens, jax.jit(jax.value_and_grad(partial(plain_loss, config, tokens=tokens)))(params)

    with jax.enable_x64(True):
        return {kind: of(*models[kind]) for kind in ("gqa", "tied")}


@pytest.mark.parametrize(
    ("kind", "chunk", "remat", "stacked"),
    [("gqa", 3, "none", True), ("gqa", 4, "full", False), ("tied", 100, "full", True)],
)
def test_value_and_gradient_are_those_of_the_definition(defined, kind, chunk, remat, stacked):
    config, params, tokens, (loss, gradients) = defined[kind]
    with jax.enable_x64(True):
        loss_of = partial(next_token_loss, config, tokens=tokens, chunk=chunk, remat=remat)
        found = jax.jit(jax.value_and_grad(loss_of))(params if stacked else llama_jax.unstack(params))
        np.testing.assert_allclose(found[0], loss, rtol=1e-12)
        assert found[0].dtype == jnp.float64
        # The rotary angles are float32 on both sides.
        near = partial(np.testing.assert_allclose, rtol=1e-9, atol=1e-12)
        jax.tree.map(near, llama_jax.stack(found[1]), gradients)


def test_in_bfloat16_the_loss_and_the_gradients_stay_float32(defined, models):
    config, _, tokens, (loss, gradients) = defined["gqa"]
    loss_of = partial(next_token_loss, config, tokens=tokens, dtype=jnp.bfloat16)
    found, computed = jax.jit(jax.value_and_grad(loss_of))(llama_jax.stack(models["gqa"][1]))
    assert found.dtype == jnp.float32
    assert {leaf.dtype for leaf in jax.tree.leaves(computed)} == {jnp.dtype(jnp.float32)}
    np.testing.assert_allclose(found, np.asarray(loss), rtol=1e-2)
    for a, b in zip(jax.tree.leaves(computed), jax.tree.leaves(gradients), strict=True):
        a, b = np.asarray(a), np.asarray(b)
        assert np.linalg.norm(a - b) < 0.05 * np.linalg.norm(b)


@pytest.fixture(scope="module")
def loss_of_gqa(models):
    return jax.jit(partial(next_token_loss, models["gqa"][0], chunk=4))


@given(st.integers(0, 2**31 - 1))
def test_the_loss_of_a_batch_is_the_mean_of_its_rows(models, loss_of_gqa, seed):
    config, params = models["gqa"]
    tokens = jax.random.randint(jax.random.key(seed), (2, 6), 0, config.vocab_size)
    rows = [loss_of_gqa(params, jnp.stack([row, row])) for row in tokens]
    np.testing.assert_allclose(loss_of_gqa(params, tokens), np.mean(rows), rtol=1e-5)


def test_a_model_that_knows_nothing_is_surprised_by_the_vocabulary(models, loss_of_gqa):
    config, params = models["gqa"]
    loss = loss_of_gqa(jax.tree.map(jnp.zeros_like, params), jnp.ones((2, 6), jnp.int32))
    np.testing.assert_allclose(loss, np.log(config.vocab_size), rtol=1e-6)


def test_the_logits_never_exist_at_once(models):
    config, params = models["gqa"]
    batch, length, chunk = 3, 40, 8
    tokens = jax.ShapeDtypeStruct((batch, length + 1), jnp.int32)
    step = jax.jit(jax.value_and_grad(partial(next_token_loss, config, chunk=chunk)))
    program = step.lower(params, tokens).as_text()
    assert f"tensor<{batch}x{chunk}x{config.vocab_size}xf32>" in program
    sizes = (f"{batch}x{length}x{config.vocab_size}x", f"{batch * length}x{config.vocab_size}x")
    assert not any(size in program for size in (*sizes, f"{length // chunk}x{batch}x{chunk}x{config.vocab_size}x"))


def test_another_rematerialisation_is_an_error(models):
    with pytest.raises(llama_jax.ConfigError, match="remat='some' must be one of none, full"):
        next_token_loss(*models["gqa"], jnp.ones((2, 3), jnp.int32), remat="some")


def test_nothing_to_predict_is_an_error(models):
    with pytest.raises(llama_jax.UserError, match=r"int\[B, T\] is needed"):
        next_token_loss(*models["gqa"], jnp.ones((2, 1), jnp.int32))
