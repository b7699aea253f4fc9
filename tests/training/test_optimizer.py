from dataclasses import replace
from operator import attrgetter

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from adapters import random_adapters
from conftest import jit_init

import llama_jax
from llama_jax.model.lora import Lora
from llama_jax.model.params import PARAM_SPECS
from llama_jax.training.optimizer import OptimizerSettings, adamw, learning_rate_schedule, make_optimizer

CONFIG = llama_jax.preset("stories-260k")
STEPS = 100


@pytest.fixture(scope="module")
def params():
    return jit_init(CONFIG, jax.random.key(0))


def rates(**settings):
    rate = learning_rate_schedule(OptimizerSettings(learning_rate=1.0, **settings), STEPS)
    return np.array([float(rate(step)) for step in range(STEPS)])


def test_cosine_warms_up_and_falls_to_its_final_share():
    found = rates(schedule="cosine", warmup_steps=10, final_share=0.1)
    np.testing.assert_allclose(found[:10], np.arange(1, 11) / 10, rtol=1e-6)
    turn = np.pi * np.arange(90) / 89
    np.testing.assert_allclose(found[10:], 0.1 + 0.9 * (1 + np.cos(turn)) / 2, rtol=1e-5)
    assert found[-1] == pytest.approx(0.1)


def test_wsd_stays_and_then_falls():
    found = rates(schedule="wsd", warmup_steps=10, decay_share=0.2, final_share=0.0)
    np.testing.assert_allclose(found[:10], np.arange(1, 11) / 10, rtol=1e-6)
    np.testing.assert_allclose(found[10:80], 1)
    np.testing.assert_allclose(found[79:], np.linspace(1, 0, 21), atol=1e-6)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"name": "adam"}, "name='adam' must be one of adamw, muon"),
        ({"schedule": "linear"}, "schedule='linear' must be one of cosine, wsd, constant"),
        ({"learning_rate": 0.0}, r"learning_rate=0\.0 must be above 0"),
        ({"clip_norm": -1.0}, r"clip_norm=-1\.0 must be at least 0"),  # it would climb the loss
        ({"b2": 1.0}, r"b2=1\.0 must be at least 0 and below 1"),
        ({"final_share": 2.0}, r"final_share=2\.0 must be at least 0 and at most 1"),
    ],
)
def test_settings_that_cannot_be(settings, message):
    with pytest.raises(llama_jax.ConfigError, match=message):
        OptimizerSettings(**settings)


def test_a_warmup_longer_than_the_run():
    with pytest.raises(llama_jax.ConfigError, match="warmup_steps=100 must be below steps=100"):
        rates(warmup_steps=100)


def test_weight_decay_is_for_matrices_only(params):
    """Without a gradient a matrix shrinks by learning rate times decay, and the weight of a normalization stays."""
    optimizer = adamw(0.5, weight_decay=0.1)
    updates, _ = jax.jit(optimizer.update)(jax.tree.map(jnp.zeros_like, params), optimizer.init(params), params)
    after = optax.apply_updates(params, updates)
    for found, old in (
        (after.embedding, params.embedding),
        (after.blocks.attention.qkv, params.blocks.attention.qkv),
        (after.blocks.feed_forward.down, params.blocks.feed_forward.down),
    ):
        np.testing.assert_allclose(found, 0.95 * old, rtol=1e-6)
    for norm in (after.blocks.attention_norm, after.blocks.ffn_norm, after.final_norm):
        np.testing.assert_array_equal(norm, 1)


def test_weight_decay_does_not_shrink_the_magnitudes_of_dora():
    """A magnitude starts as the length of a row of the base; decay would shrink the model that is adapted."""
    lora = Lora(rank=2, dora=True)
    adapters = random_adapters(CONFIG, lora)
    optimizer = make_optimizer(OptimizerSettings(learning_rate=0.5, schedule="constant", weight_decay=0.1), STEPS)
    updates, _ = jax.jit(optimizer.update)(jax.tree.map(jnp.zeros_like, adapters), optimizer.init(adapters), adapters)
    for place in ("attention.qkv", "attention.out", "feed_forward.down"):
        update, pair = (attrgetter(place)(tree.blocks) for tree in (updates, adapters))
        np.testing.assert_array_equal(update.magnitude, 0)
        np.testing.assert_allclose(update.a, -0.05 * pair.a, rtol=1e-5)
        np.testing.assert_allclose(update.b, -0.05 * pair.b, rtol=1e-5)


def test_parameters_of_every_family_decay_if_they_are_matrices():
    decaying = {spec.path for spec in PARAM_SPECS if spec.decays}
    others = {spec.path for spec in PARAM_SPECS} - decaying
    assert not [path for path in decaying if path.endswith(("norm", "bias"))]
    assert all(path.endswith(("norm", "bias")) for path in others)


@pytest.fixture(scope="module")
def muon_update(params):
    settings = OptimizerSettings(name="muon", learning_rate=1.0, schedule="constant", weight_decay=0.0, clip_norm=0.0)
    optimizer = make_optimizer(settings, STEPS)
    rng = np.random.default_rng(0)
    gradients = jax.tree.map(lambda a: rng.standard_normal(a.shape).astype(np.float32), params)
    updates, _ = jax.jit(optimizer.update)(gradients, jax.jit(optimizer.init)(params), params)
    return updates


def test_muon_updates_queries_keys_and_values_as_three_matrices(params):
    """optax's Muon on each of them as an array of its own is the oracle. The keys' gradients are 30 times as large."""
    settings = OptimizerSettings(name="muon", learning_rate=0.1, warmup_steps=2, weight_decay=0.1, clip_norm=0.0)
    optimizer = make_optimizer(settings, STEPS)

    def matrices(params):
        qkv = params.blocks.attention.qkv  # [L, K, G + 2, H, D]
        parts = {"queries": qkv[:, :, :-2], "keys": qkv[:, :, -2], "values": qkv[:, :, -1]}
        return {name: part.reshape(CONFIG.n_layers, -1, CONFIG.dim) for name, part in parts.items()}

    axes = optax.contrib.MuonDimensionNumbers(reduction_axis=-1, output_axis=-2)
    oracle = optax.contrib.muon(
        learning_rate_schedule(settings, STEPS),
        beta=settings.momentum,
        weight_decay=settings.weight_decay,
        muon_weight_dimension_numbers=dict.fromkeys(("queries", "keys", "values"), axes),
        consistent_rms=0.2,
    )

    @jax.jit
    def step(seed, params, state, apart, apart_state):
        random = lambda a: jax.random.normal(jax.random.key(seed), a.shape, a.dtype)
        gradients = jax.tree.map(random, params)
        attention = gradients.blocks.attention
        attention = attention.replace(qkv=attention.qkv.at[:, :, -2].multiply(30))
        gradients = gradients.replace(blocks=gradients.blocks.replace(attention=attention))
        updates, state = optimizer.update(gradients, state, params)
        apart_updates, apart_state = oracle.update(matrices(gradients), apart_state, apart)
        return (
            optax.apply_updates(params, updates),
            state,
            optax.apply_updates(apart, apart_updates),
            apart_state,
        )

    after, apart = params, matrices(params)
    state, apart_state = optimizer.init(after), oracle.init(apart)
    for seed in range(3):
        after, state, apart, apart_state = step(seed, after, state, apart, apart_state)
    for name, matrix in matrices(after).items():
        np.testing.assert_allclose(matrix, apart[name], rtol=1e-4, atol=1e-5, err_msg=name)


def test_muon_leaves_routers_to_adamw():
    config = replace(CONFIG, experts=4, experts_per_token=2)
    params = jit_init(config, jax.random.key(0))
    settings = OptimizerSettings(name="muon", learning_rate=1.0, schedule="constant", weight_decay=0.0, clip_norm=0.0)
    optimizer = make_optimizer(settings, STEPS)
    updates, _ = jax.jit(optimizer.update)(params, optimizer.init(params), params)
    np.testing.assert_allclose(updates.blocks.feed_forward.router, -np.sign(params.blocks.feed_forward.router), atol=1e-3)
    assert np.sqrt(np.mean(np.square(updates.blocks.feed_forward.down))) < 0.3


def test_muon_refuses_adapters():
    adapters = random_adapters(CONFIG, Lora(rank=2, targets=("q_proj", "o_proj")))
    with pytest.raises(llama_jax.ConfigError, match="adamw"):
        make_optimizer(OptimizerSettings(name="muon"), STEPS).init(adapters)


def test_muon_leaves_the_rest_to_adamw(params, muon_update):
    """AdamW's first update has the gradient's sign and the learning rate's size."""
    for found in (muon_update.embedding, muon_update.final_norm, muon_update.blocks.ffn_norm):
        np.testing.assert_allclose(np.abs(found), 1, rtol=1e-3)


class TestLoraPlus:
    """B of adapters by a learning rate of its own (Hayou et al. 2024)."""

    def test_it_is_another_rate_for_b_and_magnitudes_and_their_decay(self):
        lora = Lora(rank=2, targets=("q_proj", "up_proj"), dora=True)
        adapters = random_adapters(CONFIG, lora)
        gradients = random_adapters(CONFIG, lora, seed=1)

        def after(settings, steps=3):
            optimizer = make_optimizer(settings, STEPS)

            @jax.jit
            def run(params, gradients):
                state = optimizer.init(params)
                for _ in range(steps):
                    updates, state = optimizer.update(gradients, state, params)
                    params = optax.apply_updates(params, updates)
                return params.blocks

            return run(adapters, gradients)

        usual = {"learning_rate": 1e-3, "schedule": "constant", "weight_decay": 0.2}
        found = after(OptimizerSettings(**usual, lora_plus=16.0))
        slow, fast = after(OptimizerSettings(**usual)), after(OptimizerSettings(**usual | {"learning_rate": 16e-3}))
        for place in ("attention.qkv", "feed_forward.up"):
            pair, one, other = (attrgetter(place)(blocks) for blocks in (found, slow, fast))
            np.testing.assert_allclose(pair.a, one.a, rtol=1e-6)
            np.testing.assert_allclose(pair.b, other.b, rtol=1e-5, atol=1e-7)
            np.testing.assert_allclose(pair.magnitude, other.magnitude, rtol=1e-5, atol=1e-7)
        assert not np.allclose(found.feed_forward.up.b, slow.feed_forward.up.b, atol=1e-3)

    def test_parameters_that_are_no_adapters(self, params):
        optimizer = make_optimizer(OptimizerSettings(lora_plus=4.0), STEPS)
        with pytest.raises(llama_jax.ConfigError, match="lora_plus is for the learning rate of adapters, and these"):
            optimizer.init(params)
        with pytest.raises(llama_jax.ConfigError, match=r"lora_plus=0\.0 must be above 0"):
            OptimizerSettings(lora_plus=0.0)
