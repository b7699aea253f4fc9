from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import llama_jax
from llama_jax import preset
from llama_jax.training.optimizer import adamw
from llama_jax.training.step import init_state, train_step

CONFIG = preset("stories-260k")
OPTIMIZER = adamw(3e-3)
TOKENS = np.random.default_rng(0).integers(0, CONFIG.vocab_size, (4, 33), np.int32)


@pytest.fixture(scope="module")
def step():
    return jax.jit(partial(train_step, CONFIG, OPTIMIZER, remat="full", chunk=16), donate_argnums=0)


def start(dtype=jnp.float32):
    return init_state(OPTIMIZER, llama_jax.init(CONFIG, jax.random.key(0), dtype))


def test_a_few_steps_lower_the_loss(step):
    state, losses = start(), []
    for _ in range(12):
        state, metrics = step(state, TOKENS)
        losses.append(float(metrics["loss"]))
    assert losses[0] == pytest.approx(np.log(CONFIG.vocab_size), rel=0.02)  # it knows nothing yet
    assert losses[-1] < 0.7 * losses[0]
    assert int(state.step) == 12


def test_the_state_is_updated_in_place(step):
    state = start()
    step(state, TOKENS)
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(state))


def test_a_step_is_the_optimizers_update_of_the_gradient(step):
    """The definition, without rematerialisation and chunks."""
    state = start()

    def loss_of(params):
        logits = llama_jax.logits(CONFIG, params, TOKENS[:, :-1])
        return optax.softmax_cross_entropy_with_integer_labels(logits, TOKENS[:, 1:]).mean()

    loss, gradients = jax.jit(jax.value_and_grad(loss_of))(state.params)
    _, opt_state = OPTIMIZER.update(gradients, state.opt_state, state.params)
    after, metrics = step(state, TOKENS)
    np.testing.assert_allclose(metrics["loss"], loss, rtol=1e-6)
    squares = sum(float(jnp.sum(jnp.square(g))) for g in jax.tree.leaves(gradients))
    np.testing.assert_allclose(metrics["grad_norm"], np.sqrt(squares), rtol=1e-4)
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-3, atol=1e-6), after.opt_state, opt_state)


def test_weight_decay_is_for_matrices_only():
    """Without a gradient a matrix shrinks by learning rate times decay, and the weight of a normalisation stays."""
    before, optimizer = start().params, adamw(0.5, weight_decay=0.1)
    updates, _ = optimizer.update(jax.tree.map(jnp.zeros_like, before), optimizer.init(before), before)
    after = optax.apply_updates(before, updates)
    for found, old in (
        (after.embedding, before.embedding),
        (after.blocks.attention.qkv, before.blocks.attention.qkv),
        (after.blocks.feed_forward.down, before.blocks.feed_forward.down),
    ):
        np.testing.assert_allclose(found, 0.95 * old, rtol=1e-6)
    for norm in (after.blocks.attention_norm, after.blocks.ffn_norm, after.final_norm):
        np.testing.assert_array_equal(norm, 1)


def test_adamw_has_the_betas_of_llama():
    params = start().params
    _, (adam, *_) = OPTIMIZER.update(jax.tree.map(jnp.ones_like, params), OPTIMIZER.init(params), params)
    np.testing.assert_allclose(adam.mu.final_norm, 0.1, rtol=1e-6)
    np.testing.assert_allclose(adam.nu.final_norm, 0.05, rtol=1e-6)


@pytest.mark.parametrize("master", [jnp.float32, jnp.bfloat16])
def test_the_state_keeps_its_dtype_whatever_computes(master):
    state = jax.eval_shape(lambda: start(master))
    after, metrics = jax.eval_shape(partial(train_step, CONFIG, OPTIMIZER, dtype=jnp.bfloat16), state, TOKENS)
    for old, new in zip(jax.tree.leaves(state), jax.tree.leaves(after), strict=True):
        assert (old.shape, old.dtype) == (new.shape, new.dtype)
    assert {leaf.dtype for leaf in jax.tree.leaves(after.params)} == {jnp.dtype(master)}
    assert metrics["loss"].dtype == jnp.float32
