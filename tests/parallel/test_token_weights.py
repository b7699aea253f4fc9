"""Weights of tokens in the loss mask: in parts of a batch and over devices, the mean is that of all weights together."""

from functools import partial

import jax
import numpy as np
import optax
import pytest
import test_pmap
from conftest import jit_init
from training_options import loss_options

from llama_jax.parallel.mesh import make_mesh, parse_mesh
from llama_jax.parallel.pmap import pmap_replicate, pmap_step
from llama_jax.parallel.sharding import batch_spec, sharded_train_step, shardings, train_state_specs
from llama_jax.training.step import StepOptions, init_state, train_step

CONFIG, ROWS = test_pmap.CONFIG, test_pmap.ROWS
OPTIMIZER = optax.sgd(1.0)  # the change of a parameter is its gradient


def take_step(mesh, **options):
    packed = test_pmap.packed(0)
    weights = np.random.default_rng(1).random(packed.tokens.shape, np.float32) ** 3 / 1000
    batch, options = packed._replace(loss_mask=packed.loss_mask * weights), StepOptions(loss_options(chunk=8), **options)
    state = init_state(OPTIMIZER, jit_init(CONFIG, jax.random.key(0)))
    if mesh == "pmap":
        step = pmap_step(partial(train_step, CONFIG, OPTIMIZER, options=options), jax.devices())
        after, metrics = step(pmap_replicate(state, jax.devices()), batch)
    else:
        sizes = parse_mesh(mesh)
        placement = shardings(make_mesh(sizes), train_state_specs(CONFIG, sizes, OPTIMIZER))
        rows = shardings(make_mesh(sizes), batch_spec(sizes, ROWS // options.accumulate, batch.tokens.shape[1] - 1))
        step = jax.jit(
            partial(sharded_train_step(CONFIG, make_mesh(sizes)), OPTIMIZER, options=options),
            out_shardings=(placement, None),
        )
        after, metrics = step(jax.device_put(state, placement), jax.device_put(batch, rows))
    gradients = jax.tree.map(lambda old, new: np.asarray(old) - np.asarray(new), state.params, after.params)
    return gradients, jax.tree.map(np.asarray, metrics)


@pytest.fixture(scope="module")
def alone():
    return take_step("data=1")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mesh", "options"),
    [
        ("data=4,fsdp=2", {"accumulate": 2}),
        ("fsdp=2,context=2,tensor=2", {}),
        ("pmap", {}),
        ("pmap", {"virtual_shards": 8}),
        ("data=2", {"virtual_shards": 8, "accumulate": 2}),
    ],
    ids=str,
)
def test_a_weighted_mean_is_that_of_one_device(alone, mesh, options):
    gradients, metrics = take_step(mesh, **options)
    assert 0 < alone[1]["tokens"] < 0.5, "the sum of the weights"
    for name in ("loss", "tokens", "grad_norm"):
        np.testing.assert_allclose(metrics[name], alone[1][name], rtol=1e-5)
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-6), gradients, alone[0])
