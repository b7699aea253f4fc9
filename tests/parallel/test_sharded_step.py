"""What one device does, eight simulated ones do: the optimizers that look at whole matrices."""

from functools import partial

import jax
import numpy as np
import pytest
from conftest import jit_init, tiny_config
from training_options import step_options

from llama_jax.parallel.mesh import make_mesh, parse_mesh
from llama_jax.parallel.sharding import shardings, train_state_specs
from llama_jax.training.batch import Batch
from llama_jax.training.optimizer import OptimizerSettings, make_optimizer
from llama_jax.training.step import init_state, train_step

CONFIG = tiny_config(n_heads=8, n_kv_heads=4)
BATCH, LENGTH = 8, 16


@pytest.mark.slow
def test_muon_over_a_mesh_is_muon_on_one_device():
    settings = OptimizerSettings(name="muon", learning_rate=1e-2)
    batch = Batch(np.random.default_rng(0).integers(0, CONFIG.vocab_size, (BATCH, LENGTH + 1), np.int32))
    after = []
    for text in ("data=1", "fsdp=4,tensor=2"):
        sizes, optimizer = parse_mesh(text), make_optimizer(settings, 10)
        placement = shardings(make_mesh(sizes), train_state_specs(CONFIG, sizes, optimizer))
        state = jax.device_put(init_state(optimizer, jit_init(CONFIG, jax.random.key(0))), placement)
        step = jax.jit(
            partial(train_step, CONFIG, optimizer, options=step_options(chunk=8)), out_shardings=(placement, None)
        )
        after.append(step(state, batch)[0])
    alone, spread = after
    qkv = spread.params.blocks.attention.qkv
    assert len(qkv.sharding.device_set) == 8
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), alone.params, spread.params)
