"""Adapters over eight devices train and generate as on one."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from adapters import LORA, random_adapters
from conftest import jit_init, jit_logits
from jax.sharding import PartitionSpec as P
from test_strategies import CONFIG, LENGTH, OPTIMIZER, ROWS
from training_options import step_options

import llama_jax
from llama_jax.model.lora import apply_adapters, freeze_base
from llama_jax.model.multi_lora import adapter_table, choose_adapters
from llama_jax.parallel.mesh import MeshSizes, make_mesh
from llama_jax.parallel.padding import pad_params, padded_config, unpad_params
from llama_jax.parallel.sharding import (
    batch_spec,
    param_specs,
    shardings,
    shardings_like,
    train_state_specs,
    training_sharding,
)
from llama_jax.training.batch import Batch
from llama_jax.training.step import init_state, train_step

STEPS = 4


def run(sizes):
    """The losses of a few steps, and the adapters after them."""
    mesh = make_mesh(sizes)
    held, sharding = training_sharding(CONFIG, mesh)
    placement = shardings(mesh, train_state_specs(CONFIG, sizes, OPTIMIZER, lora=LORA))
    base = jax.device_put(jit_init(CONFIG, jax.random.key(0)), shardings(mesh, param_specs(CONFIG, sizes)))
    state = jax.device_put(init_state(OPTIMIZER, random_adapters(CONFIG)), placement)

    def step(base, state, batch):
        options = step_options(remat="full", chunk=8)
        return train_step(held, OPTIMIZER, state, batch, options, freeze_base(sharding, base, LORA))

    jitted = jax.jit(step, donate_argnums=1, out_shardings=(placement, shardings(mesh, P())))
    rng, losses = np.random.default_rng(0), []
    for _ in range(STEPS):
        batch = Batch(rng.integers(0, CONFIG.vocab_size, (ROWS, LENGTH + 1), np.int32))
        state, metrics = jitted(base, state, jax.device_put(batch, shardings(mesh, batch_spec(sizes, ROWS))))
        losses.append(float(metrics["loss"]))
    return losses, jax.tree.map(np.asarray, state.params)


@pytest.fixture(scope="module")
def alone():
    return run(MeshSizes())


@pytest.mark.slow
@pytest.mark.parametrize(
    "sizes",
    [
        MeshSizes(2, 2, 2),
        MeshSizes(1, 2, 2, 2),
        pytest.param(MeshSizes(fsdp=2, tensor=4), marks=pytest.mark.nightly),
        pytest.param(MeshSizes(tensor=8), marks=pytest.mark.nightly),
    ],
    ids=str,
)
def test_steps_are_those_of_one_device(alone, sizes):
    losses, adapters = run(sizes)
    np.testing.assert_allclose(losses, alone[0], rtol=1e-5)
    for a, b in zip(jax.tree.leaves(adapters), jax.tree.leaves(alone[1]), strict=True):
        assert np.linalg.norm(a - b) <= 1e-4 * np.linalg.norm(b)


def test_an_adapted_model_is_fitted_as_a_plain_one_is():
    """Copied heads, padded vocabulary: joined before or after, the same logits."""
    params, adapters = jit_init(CONFIG, jax.random.key(0)), random_adapters(CONFIG)
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, 250, (2, 9), np.int32))
    wanted = jit_logits(CONFIG, apply_adapters(params, adapters, LORA), tokens)
    sizes = MeshSizes(tensor=8)
    joined = pad_params(CONFIG, sizes, apply_adapters(params, adapters, LORA))
    apart = apply_adapters(pad_params(CONFIG, sizes, params), pad_params(CONFIG, sizes, adapters), LORA)
    jax.tree.map(np.testing.assert_array_equal, joined, apart)
    np.testing.assert_allclose(jit_logits(padded_config(CONFIG, sizes), joined, tokens)[..., :250], wanted, atol=1e-5)


@pytest.mark.slow
def test_so_are_magnitudes_and_a_table():
    params, dora = jit_init(CONFIG, jax.random.key(0)), replace(LORA, targets=("q_proj", "up_proj"), dora=True)
    adapters = [(random_adapters(CONFIG), LORA), (random_adapters(CONFIG, dora, seed=1), dora)]
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, 250, (2, 9), np.int32))
    table = adapter_table(CONFIG, params, adapters)
    sizes = MeshSizes(tensor=8)
    held = pad_params(CONFIG, sizes, table)
    wanted = jit_logits(CONFIG, choose_adapters(table, [1, 0]), tokens)
    found = jit_logits(padded_config(CONFIG, sizes), choose_adapters(held, [1, 0]), tokens)[..., :250]
    np.testing.assert_allclose(found, wanted, atol=1e-5)
    alone = jit_logits(CONFIG, apply_adapters(params, *adapters[1]), tokens)
    np.testing.assert_allclose(wanted[0], alone[0], atol=1e-5)
    jax.tree.map(np.testing.assert_array_equal, unpad_params(CONFIG, held), table)


@pytest.mark.slow
def test_it_generates_over_tensor():
    config = replace(CONFIG, vocab_size=256)
    params, adapters = jit_init(config, jax.random.key(0)), random_adapters(config)
    joined = apply_adapters(params, adapters, LORA)
    wanted = llama_jax.generate(config, joined, [[1, 5], [2]], max_new_tokens=6)
    sizes = MeshSizes(tensor=4)
    mesh = make_mesh(sizes)
    places = shardings_like(joined, shardings(mesh, param_specs(config, sizes)))
    found = llama_jax.generate(config, jax.device_put(joined, places), [[1, 5], [2]], max_new_tokens=6)
    assert [row.tokens for row in found] == [row.tokens for row in wanted]
