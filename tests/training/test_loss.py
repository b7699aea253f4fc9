from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import as_float64
from training_options import loss_options

import llama_jax
from llama_jax.ops.cross_entropy import LogitOptions, cross_entropy
from llama_jax.training.batch import Batch, target_mask
from llama_jax.training.loss import next_token_loss

BATCH, LENGTH = 2, 11


def plain_loss(config, params, tokens):
    """The definition: the log of the softmax over all logits at once, at each target."""
    logits = llama_jax.logits(config, params, tokens[:, :-1])
    log_probabilities = jnp.log(jax.nn.softmax(logits, axis=-1))
    return -jnp.mean(jnp.take_along_axis(log_probabilities, tokens[:, 1:, None], axis=-1))


@pytest.fixture(scope="module")
def defined(models):
    """By the kind: (config, params, tokens, (loss, gradients) of the definition), in float64."""

    @cache
    def of(kind):
        config, params = models[kind]
        tokens = np.random.default_rng(0).integers(0, config.vocab_size, (BATCH, LENGTH + 1), np.int32)
        with jax.enable_x64(True):
            params = as_float64(params)
            return config, params, tokens, jax.jit(jax.value_and_grad(partial(plain_loss, config, tokens=tokens)))(params)

    return of


@pytest.mark.parametrize(
    ("kind", "chunk", "remat", "unroll"),
    [
        pytest.param("gqa", 3, "none", False, marks=pytest.mark.slow),
        ("gqa", 4, "full", False),
        ("gqa", None, "dots", True),
        pytest.param("tied", 100, "full", True, marks=pytest.mark.slow),
        pytest.param("gqa", 11, "dots", False, marks=pytest.mark.slow),
        pytest.param("tied", 5, "offload", False, marks=pytest.mark.slow),
    ],
)
def test_value_and_gradient_are_those_of_the_definition(defined, kind, chunk, remat, unroll):
    config, params, tokens, (loss, gradients) = defined(kind)
    with jax.enable_x64(True):
        options = loss_options(chunk=chunk, remat=remat, unroll=unroll)
        loss_of = partial(next_token_loss, config, batch=Batch(tokens), options=options)
        found = jax.jit(jax.value_and_grad(loss_of))(params)
        np.testing.assert_allclose(found[0], loss, rtol=1e-12)
        assert found[0].dtype == jnp.float64
        # The rotary angles are float32 on both sides.
        near = partial(np.testing.assert_allclose, rtol=1e-9, atol=1e-12)
        jax.tree.map(near, found[1], gradients)


def test_in_bfloat16_the_loss_and_the_gradients_stay_float32(defined, models):
    config, _, tokens, (loss, gradients) = defined("gqa")
    loss_of = partial(next_token_loss, config, batch=Batch(tokens), options=loss_options(dtype=jnp.bfloat16))
    found, computed = jax.jit(jax.value_and_grad(loss_of))(models["gqa"][1])
    assert found.dtype == jnp.float32
    assert {leaf.dtype for leaf in jax.tree.leaves(computed)} == {jnp.dtype(jnp.float32)}
    np.testing.assert_allclose(found, np.asarray(loss), rtol=1e-2)
    for a, b in zip(jax.tree.leaves(computed), jax.tree.leaves(gradients), strict=True):
        a, b = np.asarray(a), np.asarray(b)
        assert np.linalg.norm(a - b) < 0.05 * np.linalg.norm(b)


def test_the_logits_never_exist_at_once(models):
    config, params = models["gqa"]
    batch, length, chunk = 3, 40, 8
    tokens = jax.ShapeDtypeStruct((batch, length + 1), jnp.int32)
    step = jax.jit(jax.value_and_grad(partial(next_token_loss, config, options=loss_options(chunk=chunk))))
    program = step.lower(params, Batch(tokens)).as_text()
    assert f"tensor<{batch}x{chunk}x{config.vocab_size}xf32>" in program
    sizes = (f"{batch}x{length}x{config.vocab_size}x", f"{batch * length}x{config.vocab_size}x")
    assert not any(size in program for size in (*sizes, f"{length // chunk}x{batch}x{chunk}x{config.vocab_size}x"))


def test_another_rematerialization_is_an_error():
    with pytest.raises(llama_jax.ConfigError, match="remat='some' must be one of none, dots, full, offload"):
        loss_options(remat="some")


def test_nothing_to_predict_is_an_error(models):
    with pytest.raises(llama_jax.UserError, match=r"int\[B, T\] is needed"):
        next_token_loss(*models["gqa"], Batch(jnp.ones((2, 1), jnp.int32)))


@pytest.fixture(scope="module")
def in_segments(models):
    """Loss and gradients of gqa in chunks of 4, compiled once for rows with segments and positions."""
    loss_of = partial(next_token_loss, models["gqa"][0], options=loss_options(chunk=4))
    return jax.jit(jax.value_and_grad(loss_of))


def empty(rows, length=24):
    return Batch(*(np.zeros((rows, length), np.int32) for _ in range(3)))


def test_what_is_predicted():
    tokens = np.zeros((1, 7), np.int32)
    segments = np.array([[1, 1, 1, 2, 2, 0, 0]])
    np.testing.assert_array_equal(target_mask(Batch(tokens)), np.ones((1, 6), bool))
    np.testing.assert_array_equal(target_mask(Batch(tokens, segments)), [[1, 1, 0, 1, 0, 0]])
    mask = np.array([[1, 0, 1, 1, 1, 1, 1]])
    np.testing.assert_array_equal(target_mask(Batch(tokens, segments, loss_mask=mask)), [[0, 1, 0, 1, 0, 0]])


@pytest.fixture(scope="module")
def with_weights(models):
    """Loss and gradients of gqa in chunks of 4 with a z-loss, compiled once for rows with segments and weights."""
    loss_of = partial(next_token_loss, models["gqa"][0], options=loss_options(chunk=4, z_loss=0.1))
    return jax.jit(jax.value_and_grad(loss_of))


def test_weights_of_tokens_make_a_weighted_mean(defined, with_weights):
    """By the definition, of packed rows; the weights add up to less than 1."""
    config, params, tokens, _ = defined("gqa")
    segments = np.array([[1] * 5 + [2] * 7, [1] * 9 + [0] * 3], np.int32)
    positions = np.array([[*range(5), *range(7)], [*range(9), 0, 0, 0]], np.int32)
    weights = np.random.default_rng(1).random(tokens.shape) ** 3 / 20
    weights[0, 2] = weights[1, 4] = 0
    counted = weights[:, 1:] * ((segments[:, 1:] == segments[:, :-1]) & (segments[:, 1:] > 0))
    assert 0.1 < counted.sum() < 0.9

    def plain(params):
        context = llama_jax.Positions(position_ids=positions[:, :-1], segment_ids=segments[:, :-1])
        hidden, _ = llama_jax.forward(config, params, tokens[:, :-1], positions=context)
        logits = llama_jax.unembed(config, params, hidden)
        normalizer = jax.nn.logsumexp(logits, axis=-1)
        losses = normalizer - jnp.take_along_axis(logits, tokens[:, 1:, None], axis=-1)[..., 0] + 0.1 * normalizer**2
        return jnp.sum(counted * losses) / counted.sum()

    with jax.enable_x64(True):
        expected, of_plain = jax.jit(jax.value_and_grad(plain))(params)
        loss, gradients = with_weights(params, Batch(tokens, segments, positions, weights))
        np.testing.assert_allclose(loss, expected, rtol=1e-9)
        # The rotary angles are float32, rounded differently by two programs.
        jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-7), gradients, of_plain)


@pytest.mark.parametrize(
    ("value", "dtype", "message"),
    [
        (-0.5, np.float32, r"loss_mask\[1, 3\]=-0.5 of a batch: a weight must be finite and at least 0"),
        (np.nan, np.float32, r"loss_mask\[1, 3\]=nan of a batch"),
        (2, np.int32, r"loss_mask\[1, 3\]=2 of a batch: integers must be 0 or 1; pass weights as floats"),
    ],
)
def test_weights_that_mean_nothing(models, value, dtype, message):
    mask = np.ones((2, 6), dtype)
    mask[1, 3] = value
    for loss_mask in (mask, jax.device_put(mask)):
        with pytest.raises(llama_jax.UserError, match=message):
            next_token_loss(*models["gqa"], Batch(np.zeros((2, 6), np.int32), loss_mask=loss_mask))


def test_nothing_to_predict_in_a_batch_is_a_loss_of_zero(models, in_segments, with_weights):
    loss, gradients = with_weights(models["gqa"][1], empty(2, 12)._replace(loss_mask=np.zeros((2, 12), np.float32)))
    assert loss == 0
    assert all(not np.any(leaf) for leaf in jax.tree.leaves(gradients))
    loss, gradients = in_segments(models["gqa"][1], empty(1))
    assert loss == 0
    assert all(not np.any(leaf) for leaf in jax.tree.leaves(gradients))


def test_what_a_bfloat16_scan_keeps_of_its_layers_has_no_float32_copy(models):
    """XLA for CPU slices no bfloat16: it made a float32 copy of all that the layers had kept, three times the memory."""
    config, params = models["gqa"]
    tokens = jax.ShapeDtypeStruct((5, 34), jnp.int32)
    loss_of = partial(next_token_loss, config, options=loss_options(dtype=jnp.bfloat16))
    step = jax.jit(jax.grad(lambda params, tokens: loss_of(params, Batch(tokens))))
    program = step.lower(params, tokens).compile().as_text()
    assert f"u16[{config.n_layers},5,33,{config.dim}]" in program
    assert f"f32[{config.n_layers},5,33" not in program


@pytest.mark.parametrize("target", [-100, 10**6])
def test_a_target_that_does_not_count_may_be_anything(models, target):
    """It was taken along the logits all the same, where there is none NaN, and 0 times NaN is NaN."""
    _, params = models["gqa"]
    hidden = jax.random.normal(jax.random.key(0), (1, 3, params.embedding.shape[1]))
    weights = jnp.array([[1.0, 0.0, 1.0]])

    @jax.jit
    def loss(hidden, target):
        return cross_entropy(hidden, params.embedding, jnp.array([[1, target, 2]]), weights, LogitOptions(chunk=2)).loss

    found, wanted = (jax.jit(jax.value_and_grad(loss))(hidden, x) for x in (target, 5))
    jax.tree.map(np.testing.assert_array_equal, found, wanted)
