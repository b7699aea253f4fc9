"""`StepOptions.virtual_shards`: the same bits of losses, norms, parameters and optimizer state on every mesh."""

from dataclasses import replace
from functools import partial
from itertools import pairwise

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import test_pmap
from conftest import jit_init
from conftest import same as same_trees
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from training_options import loss_options

from llama_jax.errors import ConfigError, MeshError
from llama_jax.ops.cross_entropy import LossSums
from llama_jax.parallel.mesh import make_mesh, parse_mesh
from llama_jax.parallel.pmap import pmap_replicate, pmap_step
from llama_jax.parallel.sharding import batch_spec, sharded_train_step, shardings, train_state_specs
from llama_jax.training.batch import Batch, target_mask
from llama_jax.training.loss import total_loss
from llama_jax.training.optimizer import OptimizerSettings, make_optimizer
from llama_jax.training.step import StepOptions, init_state, train_step

CONFIG = replace(test_pmap.CONFIG, vocab_size=72)
EXPERTS = replace(CONFIG, experts=4, experts_per_token=2, tie_embeddings=True)
ROWS, LENGTH, STEPS = 16, 24, 4
# Gradients are clipped at each step, and some parameters decay.
OPTIMIZER = make_optimizer(OptimizerSettings(learning_rate=1e-2, warmup_steps=2, clip_norm=0.2), 20)
PLAIN = StepOptions(loss_options(chunk=8, z_loss=1e-4), ema_decay=0.9)
EXACT = replace(PLAIN, virtual_shards=8)
LOW = StepOptions(loss_options("bfloat16", "full", chunk=8), accumulate=2, ema_decay=0.9, virtual_shards=8)
MESHES = ["data=2", "data=4", "data=8", "fsdp=2", "fsdp=8", "data=2,fsdp=4", "pmap"]


def packed(seed):
    """Rows of several documents, padding and a mask: every shard has another number of labels, and one of them none."""
    random = np.random.default_rng(seed)
    tokens = random.integers(0, CONFIG.vocab_size, (ROWS, LENGTH + 1), np.int32)
    segments, positions = np.zeros_like(tokens), np.zeros_like(tokens)
    for row in range(2, ROWS):
        ends = [0, *sorted(random.choice(np.arange(1, LENGTH), 2, replace=False)), LENGTH + 1 - row // 2]
        for document, (start, end) in enumerate(pairwise(ends), start=1):
            segments[row, start:end], positions[row, start:end] = document, np.arange(max(end - start, 0))
    return Batch(tokens, segments, positions, random.random(tokens.shape) < 0.7)


def begin(config=CONFIG):
    return jax.tree.map(np.asarray, init_state(OPTIMIZER, jit_init(config, jax.random.key(0)), ema=True))


def place_on(mesh, config=CONFIG, options=EXACT, **more):
    """A step on a mesh, or by pmap over 8 devices, and functions that put a state and a batch there."""
    if mesh == "pmap":
        step = pmap_step(partial(train_step, config, OPTIMIZER, options=options, **more), jax.devices())
        return step, partial(pmap_replicate, devices=jax.devices()), lambda batch: batch
    sizes = parse_mesh(mesh)
    devices = make_mesh(sizes)
    placement = shardings(devices, train_state_specs(config, sizes, OPTIMIZER, ema=True))
    rows = NamedSharding(devices, batch_spec(sizes, ROWS))
    step = jax.jit(
        partial(sharded_train_step(config, devices), OPTIMIZER, options=options, **more),
        out_shardings=(placement, NamedSharding(devices, P())),
    )
    return step, partial(jax.device_put, device=placement), partial(jax.device_put, device=rows)


def take_steps(state, numbers, mesh, *arguments, **more):
    """The state after steps on batches of these numbers, and the metrics of each, on the host."""
    step, put, put_batch = place_on(mesh, *arguments, **more)
    state, metrics = put(state), []
    for number in numbers:
        state, found = step(state, put_batch(packed(number)))
        metrics.append(found)
    return jax.tree.map(np.asarray, (state, metrics))


@pytest.fixture(scope="module")
def alone():
    return take_steps(begin(), range(STEPS), "data=1")


def test_what_is_compared_is_uneven_and_clipped(alone):
    counts = np.asarray(target_mask(packed(0))).reshape(8, -1).sum(axis=1)
    assert counts[0] == 0
    assert len(set(counts.tolist())) >= 5
    assert all(metrics["grad_norm"] > 0.2 for metrics in alone[1])
    assert int(alone[0].step) == STEPS


@pytest.mark.parametrize(
    "mesh",
    [
        pytest.param(m, marks=[] if m in ("pmap", "data=2,fsdp=4") else (pytest.mark.slow, pytest.mark.rotating))
        for m in MESHES
    ],
)
def test_every_mesh_has_the_same_bits(alone, mesh):
    same_trees(take_steps(begin(), range(STEPS), mesh), alone)


@pytest.mark.slow
def test_a_step_without_a_mesh_has_them_too(alone):
    step, state = jax.jit(partial(train_step, CONFIG, OPTIMIZER, options=EXACT)), begin()
    for number in range(STEPS):
        state, metrics = step(state, packed(number))
    same_trees(jax.tree.map(np.asarray, (state, metrics)), (alone[0], alone[1][-1]))


@pytest.mark.slow
@pytest.mark.rotating
@pytest.mark.parametrize("mesh", ["data=2,fsdp=4", pytest.param("pmap", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("config", "options"),
    [
        pytest.param(CONFIG, LOW, id="bfloat16 in parts"),
        pytest.param(EXPERTS, EXACT, id="experts", marks=pytest.mark.slow),
        pytest.param(CONFIG, replace(EXACT, virtual_shards=16), id="16 shards", marks=pytest.mark.slow),
    ],
)
def test_other_models_and_options(config, options, mesh):
    expected = take_steps(begin(config), range(2), "data=1", config, options)
    same_trees(take_steps(begin(config), range(2), mesh, config, options), expected)


@pytest.mark.slow
def test_a_run_moves_between_meshes(alone):
    state = begin()
    for number, mesh in enumerate(["fsdp=8", "pmap", "data=2,fsdp=4", "data=2"]):
        state, _ = take_steps(state, [number], mesh)
    same_trees(state, alone[0])


def test_it_computes_what_a_plain_step_does(alone):
    (state, metrics), (plain, expected) = alone, take_steps(begin(), range(STEPS), "data=1", CONFIG, PLAIN)
    for found, wanted in zip(metrics, expected, strict=True):
        for name in wanted:
            np.testing.assert_allclose(found[name], wanted[name], rtol=1e-5, err_msg=name)
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-3, atol=1e-6), state.opt_state, plain.opt_state)
    jax.tree.map(partial(np.testing.assert_allclose, atol=1e-4), state.params, plain.params)


def weighted(config, params, batch, options, sharding):
    """A loss with weights that no order of summation adds exactly, and a sum of its own to report."""
    sums = total_loss(config, params, batch, options, sharding)
    weight = weight_of(batch)
    return LossSums(weight * sums.loss, weight * sums.nll, {"weight": weight})


def weight_of(batch):
    return jnp.sum(jnp.sqrt(batch.tokens.astype(jnp.float32)))


@pytest.mark.slow
def test_a_loss_of_ones_own_and_its_sums():
    options = replace(EXACT, count=weight_of)
    expected = take_steps(begin(), range(2), "data=1", CONFIG, options, loss=weighted)
    assert expected[1][0]["weight"] == expected[1][0]["tokens"] > 0
    for mesh in ("fsdp=8", "pmap"):
        same_trees(take_steps(begin(), range(2), mesh, CONFIG, options, loss=weighted), expected)


def test_a_step_that_is_not_finite_is_skipped():
    state = begin()
    norm = np.array(state.params.final_norm)
    norm[0] = np.nan
    before = state.replace(params=state.params.replace(final_norm=norm))
    after, (metrics,) = take_steps(before, [0], "data=2,fsdp=4")
    assert (int(after.skipped), int(metrics["skipped"])) == (1, 1)
    same_trees(after.params, before.params)


@pytest.mark.parametrize(
    ("mesh", "options", "error", "message"),
    [
        (
            "tensor=2",
            EXACT,
            MeshError,
            "exact training divides rows, but tensor=2 divides sums within a row; use data",
        ),
        ("data=8", replace(EXACT, virtual_shards=4), MeshError, "virtual_shards=4 cannot be divided over 8 devices; use a"),
        (
            "data=2",
            replace(EXACT, virtual_shards=32),
            ConfigError,
            "a batch of 16 rows cannot be divided into virtual_shards=32",
        ),
        ("data=2", replace(EXACT, accumulate=4), ConfigError, "a batch of 2 rows cannot be divided into accumulate=4"),
    ],
)
def test_what_cannot_be_promised_is_refused(mesh, options, error, message):
    with pytest.raises(error, match=message):
        take_steps(begin(), [0], mesh, CONFIG, options)


@pytest.mark.parametrize("shards", [3, -8, 2.0])
def test_shards_make_a_binary_tree(shards):
    with pytest.raises(ConfigError, match=f"virtual_shards={shards} must be"):
        StepOptions(virtual_shards=shards)
