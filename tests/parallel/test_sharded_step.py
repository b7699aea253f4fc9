"""Eight simulated devices compute what one does."""

from functools import partial

import jax
import numpy as np
import pytest

import llama_jax
from llama_jax import LlamaConfig
from llama_jax.parallel.mesh import make_mesh, parse_mesh
from llama_jax.parallel.specs import batch_spec, constrain_over, shardings, train_state_specs
from llama_jax.training.batch import Batch
from llama_jax.training.optimizer import OptimizerSettings, adamw, make_optimizer
from llama_jax.training.step import init_state, train_step

CONFIG = LlamaConfig(
    vocab_size=64,
    dim=32,
    n_layers=2,
    n_heads=8,
    n_kv_heads=4,
    hidden_dim=48,
    max_seq_len=64,
    norm_eps=1e-5,
    rope_theta=10_000.0,
    tie_embeddings=False,
)
BATCH, LENGTH = 8, 16


def program(text):
    """A compiled step over a mesh, and its arguments."""
    sizes, optimizer = parse_mesh(text), adamw(1e-2)
    mesh = make_mesh(sizes)
    placement = shardings(mesh, train_state_specs(CONFIG, sizes, optimizer))
    params = llama_jax.init(CONFIG, jax.random.key(0))
    state = jax.device_put(init_state(optimizer, params), placement)
    tokens = jax.random.randint(jax.random.key(1), (BATCH, LENGTH + 1), 0, CONFIG.vocab_size)
    tokens = jax.device_put(tokens, shardings(mesh, batch_spec(sizes, BATCH)))
    step = partial(train_step, CONFIG, optimizer, remat="full", chunk=8, constrain=constrain_over(mesh))
    jitted = jax.jit(step, donate_argnums=0, out_shardings=(placement, None))
    batch = Batch(tokens)
    return jitted.lower(state, batch).compile(), state, batch


@pytest.fixture(scope="module")
def alone():
    step, state, batch = program("data=1")
    return step(state, batch)


@pytest.mark.parametrize("text", ["fsdp=2,tensor=4", "data=2,fsdp=2,tensor=2"])
def test_a_mesh_computes_what_one_device_does(alone, text):
    step, state, batch = program(text)
    assert len(jax.tree.leaves(state.params)[0].sharding.device_set) == 8
    after, metrics = step(state, batch)
    for name, value in metrics.items():
        np.testing.assert_allclose(value, alone[1][name], rtol=1e-5)
    (moments,) = (s for s in after.opt_state if hasattr(s, "mu"))
    (expected,) = (s for s in alone[0].opt_state if hasattr(s, "mu"))
    # The first moment after one step is a tenth of the gradient.
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-3, atol=1e-7), moments.mu, expected.mu)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-3), after.params, alone[0].params)
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(state))
    text = step.as_text()
    # What a device computes is its share: no whole batch of scores, nor of logits.
    assert f"f32[{BATCH},{CONFIG.n_kv_heads},{LENGTH}," not in text
    assert f"f32[{BATCH},8,{CONFIG.vocab_size}]" not in text


def test_muon_over_a_mesh_is_muon_on_one_device():
    settings = OptimizerSettings(name="muon", learning_rate=1e-2)
    batch = Batch(np.random.default_rng(0).integers(0, CONFIG.vocab_size, (BATCH, LENGTH + 1), np.int32))
    after = []
    for text in ("data=1", "fsdp=4,tensor=2"):
        sizes, optimizer = parse_mesh(text), make_optimizer(settings, 10)
        placement = shardings(make_mesh(sizes), train_state_specs(CONFIG, sizes, optimizer))
        state = jax.device_put(init_state(optimizer, llama_jax.init(CONFIG, jax.random.key(0))), placement)
        step = jax.jit(partial(train_step, CONFIG, optimizer, chunk=8), out_shardings=(placement, None))
        after.append(step(state, batch)[0])
    alone, spread = after
    qkv = spread.params.blocks.attention.qkv
    assert len(qkv.sharding.device_set) == 8
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-3), alone.params, spread.params)
