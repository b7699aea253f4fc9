"""Log-probabilities of tokens, and their gradients, over devices are those of one device."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_strategies import CONFIG, LENGTH, ROWS
from training_options import loss_options

import llama_jax
from llama_jax.model.forward_options import Sharding
from llama_jax.parallel.mesh import MeshSizes, make_mesh
from llama_jax.parallel.sharding import batch_spec, param_specs, shardings, training_sharding
from llama_jax.training.batch import Batch
from llama_jax.training.logprobs import token_logprobs

RNG = np.random.default_rng(0)
BATCH = Batch(
    RNG.integers(0, CONFIG.vocab_size, (ROWS, LENGTH + 1), np.int32),
    np.sort(RNG.integers(1, 3, (ROWS, LENGTH + 1), np.int32), axis=1),
    loss_mask=RNG.random((ROWS, LENGTH + 1)) < 0.6,
)


def answers(config, sharding, params, batch):
    """A number of whole answers, whatever the order of their tokens, and its gradient."""

    def total(params):
        found = token_logprobs(config, sharding.prepare_params(params), batch, loss_options(chunk=4), sharding, 0.7).sum(
            axis=1
        )
        return jnp.mean(jnp.tanh(found / 40)), found

    return jax.value_and_grad(total, has_aux=True)(params)


@pytest.fixture(scope="module")
def alone():
    params = jax.jit(partial(llama_jax.init, CONFIG))(jax.random.key(0))
    return params, jax.jit(partial(answers, CONFIG, Sharding()))(params, BATCH)


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [MeshSizes(2, 2, 2)])
def test_devices_together_find_what_one_finds(alone, sizes):
    params, ((loss, rows), gradients) = alone
    mesh = make_mesh(sizes)
    placed = jax.device_put(params, shardings(mesh, param_specs(CONFIG, sizes)))
    spec = jax.sharding.NamedSharding(mesh, batch_spec(sizes, ROWS, LENGTH))
    batch = jax.tree.map(lambda part: jax.device_put(part, spec), BATCH)
    (found, each), grads = jax.jit(partial(answers, *training_sharding(CONFIG, mesh)))(placed, batch)
    np.testing.assert_allclose(found, loss, rtol=1e-5)
    np.testing.assert_allclose(each, rows, rtol=1e-5)
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-4, atol=2e-6), grads, gradients)


def test_rows_in_parts_are_refused(alone):
    sizes = MeshSizes(1, 1, 1, 2)
    config, sharding = training_sharding(CONFIG, make_mesh(sizes))
    with pytest.raises(llama_jax.MeshError, match="which context divides; use data, fsdp and tensor"):
        jax.eval_shape(partial(token_logprobs, config, sharding=sharding), alone[0], BATCH)
