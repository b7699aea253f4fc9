"""The loss in forward mode: directional derivatives and curvature beside finite differences, in float64."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import as_float64
from jax.flatten_util import ravel_pytree
from training_options import loss_options

from llama_jax.training.batch import Batch
from llama_jax.training.loss import next_token_loss


@pytest.fixture(scope="module")
def problem(models):
    """(loss of flat parameters, flat parameters, a direction), for packed rows whose logits are made in two chunks."""
    config, params = models["gqa"]
    with jax.enable_x64(True):
        flat, unravel = ravel_pytree(as_float64(params))
        rng = np.random.default_rng(0)
        segments = np.array([[1, 1, 1, 2, 2, 2, 2, 0], [1] * 8], np.int32)
        places = np.array([[0, 1, 2, 0, 1, 2, 3, 0], list(range(8))], np.int32)
        batch = Batch(rng.integers(0, config.vocab_size, (2, 8), np.int32), segments, places)
        options = loss_options(chunk=4, z_loss=1e-2, forward_mode=True)
        loss_of = partial(next_token_loss, config, batch=batch, options=options)
        direction = jnp.asarray(rng.standard_normal(flat.shape))
        return jax.jit(lambda flat: loss_of(unravel(flat))), flat, direction / jnp.linalg.norm(direction)


@pytest.mark.slow
def test_a_directional_derivative_is_the_difference(problem):
    loss, at, along = problem
    step = 1e-5
    with jax.enable_x64(True):
        value, found = jax.jit(lambda at, along: jax.jvp(loss, (at,), (along,)))(at, along)
        np.testing.assert_allclose(value, loss(at), rtol=1e-12)
        high, low = (float(loss(np.asarray(at) + sign * step * np.asarray(along))) for sign in (1, -1))
        np.testing.assert_allclose(found, (high - low) / (2 * step), rtol=1e-6)
        np.testing.assert_allclose(found, np.asarray(jax.jit(jax.grad(loss))(at)) @ along, rtol=1e-9)
        again, linear = jax.linearize(loss, at)
        np.testing.assert_allclose([again, jax.jit(linear)(along)], [value, found], rtol=1e-9)


@pytest.mark.slow
def test_a_hessian_vector_product_is_the_difference_of_gradients(problem):
    loss, at, along = problem
    step = 1e-5
    with jax.enable_x64(True):
        gradient = jax.jit(jax.grad(loss))
        found = jax.jit(lambda at, along: jax.jvp(gradient, (at,), (along,))[1])(at, along)
        high, low = (np.asarray(gradient(np.asarray(at) + sign * step * np.asarray(along))) for sign in (1, -1))
        wanted = (high - low) / (2 * step)
        np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-7 * np.abs(found).max() + 1e-9)


@pytest.mark.slow
def test_a_hessian_is_that_of_finite_differences(problem):
    """Of the loss in a few directions, which is a small matrix; symmetric, as a Hessian is."""
    loss, at, _ = problem
    step = 1e-4
    with jax.enable_x64(True):
        few = np.linalg.qr(np.random.default_rng(1).normal(size=(at.size, 3)))[0]
        part = jax.jit(lambda x: loss(at + few @ x))
        found = jax.jit(jax.hessian(part))(np.zeros(3))
        np.testing.assert_allclose(found, found.T, rtol=1e-9, atol=1e-12)
        unit = np.eye(3) * step
        for i in range(3):
            for j in range(3):
                corners = [float(part(a * unit[i] + b * unit[j])) for a in (1, -1) for b in (1, -1)]
                wanted = (corners[0] - corners[1] - corners[2] + corners[3]) / (4 * step**2)
                np.testing.assert_allclose(found[i, j], wanted, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("remat", ["none", pytest.param("full", marks=pytest.mark.slow)])
@pytest.mark.parametrize("stored", ["float32", pytest.param("bfloat16", marks=pytest.mark.slow)])
def test_forward_mode_in_16_bits_is_the_gradient_along_the_direction(models, stored, remat):
    """With matmuls whose weights are cast, or not, and by blocks of attention."""
    config, params = models["gqa"]
    params = jax.tree.map(lambda a: a.astype(stored), params)
    direction = jax.tree.map(lambda a: jax.random.normal(jax.random.key(1), a.shape).astype(stored), params)
    batch = Batch(np.random.default_rng(0).integers(0, config.vocab_size, (2, 130), np.int32))
    loss, plain_loss = (
        partial(next_token_loss, config, batch=batch, options=loss_options(dtype="bfloat16", remat=remat, forward_mode=mode))
        for mode in (False, True)
    )
    found = jax.jit(lambda params, along: jax.jvp(plain_loss, (params,), (along,))[1])(params, direction)
    gradient = jax.jit(jax.grad(loss))(params)
    pairs = zip(jax.tree.leaves(gradient), jax.tree.leaves(direction), strict=True)
    np.testing.assert_allclose(found, sum(np.vdot(*(np.float64(x) for x in pair)) for pair in pairs), rtol=0.02)


@pytest.mark.slow
def test_a_second_derivative_in_16_bits(models):
    """By the fast functions an error, since a CPU keeps bits of floats; in forward mode near that of float32."""
    config, params = models["gqa"]
    batch = Batch(np.random.default_rng(0).integers(0, config.vocab_size, (1, 9), np.int32))

    def product(dtype, forward_mode):
        options = loss_options(dtype=dtype, forward_mode=forward_mode)
        loss = partial(next_token_loss, config, batch=batch, options=options)
        return jax.jit(lambda params: jax.jvp(jax.grad(loss), (params,), (params,))[1])

    with pytest.raises(TypeError, match="forward_mode=True"):
        jax.eval_shape(product("bfloat16", False), params)
    pairs = zip(*(jax.tree.leaves(product(dtype, True)(params)) for dtype in ("bfloat16", "float32")), strict=True)
    for product_16_bit, expected in pairs:
        assert np.linalg.norm(product_16_bit - expected) < 0.05 * np.linalg.norm(expected)
