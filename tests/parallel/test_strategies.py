"""Every way to split a step over eight devices computes what one device does, and says to the others what it must."""

import itertools
import math
from dataclasses import replace
from functools import partial

import jax
import numpy as np
import pytest
from conftest import jit_init, tiny_config
from jax.sharding import PartitionSpec as P
from training_options import step_options

import llama_jax
from llama_jax.analysis.collectives import find_collectives
from llama_jax.analysis.memory import bytes_per_device, train_programs
from llama_jax.model.trees import parameter_count
from llama_jax.parallel.mesh import MeshSizes, make_mesh
from llama_jax.parallel.sharding import batch_spec, sharded_train_step, shardings, train_state_specs
from llama_jax.training.batch import Batch
from llama_jax.training.optimizer import OptimizerSettings, adamw, make_optimizer, with_clipping
from llama_jax.training.step import init_state

# A vocabulary to be padded, and key/value heads of which eight devices need copies.
CONFIG = tiny_config(vocab_size=250, n_heads=16, n_kv_heads=4, head_dim=8)
ROWS, LENGTH, STEPS = 8, 16, 10
OPTIMIZER = with_clipping(adamw(1e-3), 1.0)
EIGHT = [MeshSizes(*sizes) for sizes in itertools.product((1, 2, 4, 8), repeat=4) if math.prod(sizes) == 8]
# The other ways to split eight devices combine these.
QUICK = [MeshSizes(1, 1, 2, 4)]
SLOW = [MeshSizes(1, 1, 8), MeshSizes(2, 2, 2), MeshSizes(2, 2, context=2)]
NIGHTLY = [sizes for sizes in EIGHT if sizes not in QUICK + SLOW]
EVERY = [
    *QUICK,
    *(pytest.param(sizes, marks=pytest.mark.slow) for sizes in SLOW),
    *(pytest.param(sizes, marks=pytest.mark.nightly) for sizes in NIGHTLY),
]


def batches():
    rng = np.random.default_rng(0)
    for _ in range(STEPS):
        tokens = rng.integers(0, CONFIG.vocab_size, (ROWS, LENGTH + 1), np.int32)
        segments = np.repeat([[1] * 9 + [2] * 6 + [0] * 2, [1] * 17], ROWS // 2, axis=0)
        yield Batch(tokens, segments.astype(np.int32), np.broadcast_to(np.arange(LENGTH + 1, dtype=np.int32), tokens.shape))


def run(sizes, config=CONFIG, **options):
    """The losses of ten steps and the parameters after them; the first moments after one step, tenths of the gradients."""
    mesh = make_mesh(sizes)
    placement = shardings(mesh, train_state_specs(config, sizes, OPTIMIZER))
    rows = shardings(mesh, batch_spec(sizes, ROWS))
    state = jax.jit(lambda: init_state(OPTIMIZER, llama_jax.init(config, jax.random.key(0))), out_shardings=placement)()
    step = partial(
        sharded_train_step(config, mesh),
        OPTIMIZER,
        options=step_options(**{"remat": "full", "chunk": 8, **options}),
    )
    jitted = jax.jit(step, donate_argnums=0, out_shardings=(placement, shardings(mesh, P())))
    losses = []
    for i, batch in enumerate(batches()):
        state, metrics = jitted(state, jax.device_put(batch, rows))
        losses.append(float(metrics["loss"]))
        if i == 0:
            (adam,) = (kept for kept in state.opt_state if hasattr(kept, "mu"))
            gradients = jax.tree.map(np.asarray, adam.mu)
    return losses, gradients, jax.tree.map(np.asarray, state.params)


@pytest.fixture(scope="module")
def alone():
    return run(MeshSizes())


@pytest.mark.parametrize("sizes", EVERY, ids=str)
def test_ten_steps_are_those_of_one_device(alone, sizes):
    assert_same(run(sizes), alone)


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [MeshSizes(2, 2, 2), MeshSizes(2, 1, 1, 4)], ids=str)
def test_so_are_those_of_a_batch_in_parts(alone, sizes):
    assert_same(run(sizes, accumulate=2, remat="none"), alone)


@pytest.mark.slow
def test_so_are_those_of_a_sequence_in_parts_that_keeps_its_products(alone):
    assert_same(run(MeshSizes(1, 2, context=4), remat="dots"), alone)


EXPERTS = replace(CONFIG, experts=4, experts_per_token=2)


@pytest.fixture(scope="module")
def experts_alone():
    return run(MeshSizes(), EXPERTS)


@pytest.mark.slow
@pytest.mark.rotating
@pytest.mark.parametrize(
    ("sizes", "options"),
    [
        (MeshSizes(1, 2, 2, 2), {}),
        *(
            pytest.param(MeshSizes(*sizes), options, marks=pytest.mark.slow)
            for sizes, options in (((2, 2, 2), {"remat": "none"}), ((1, 1, 8), {}), ((2, 4), {"remat": "dots"}))
        ),
    ],
    ids=str,
)
def test_so_are_those_of_experts(experts_alone, sizes, options):
    """Each device sorts its own tokens, and computes its part of each chosen expert."""
    assert_same(run(sizes, EXPERTS, **options), experts_alone)


@pytest.mark.slow
def test_a_step_of_muon_is_that_of_one_device():
    optimizer = make_optimizer(OptimizerSettings(name="muon", learning_rate=1e-2), 10)
    config, batch, after = replace(CONFIG, vocab_size=64, n_heads=8), next(batches()), []
    batch = batch._replace(tokens=batch.tokens % 64)
    for sizes in (MeshSizes(), MeshSizes(fsdp=4, tensor=2)):
        mesh = make_mesh(sizes)
        placement = shardings(mesh, train_state_specs(config, sizes, optimizer))
        state = jax.device_put(init_state(optimizer, jit_init(config, jax.random.key(0))), placement)
        step = partial(sharded_train_step(config, mesh), optimizer, options=step_options(chunk=8))
        after.append(jax.jit(step, out_shardings=(placement, None))(state, batch)[0].params)
    assert len(after[1].blocks.attention.qkv.sharding.device_set) == 8
    jax.tree.map(partial(np.testing.assert_allclose, atol=1e-5), *after)


def assert_same(found, expected):
    np.testing.assert_allclose(found[0], expected[0], rtol=1e-5)
    for trees in zip(found[1:], expected[1:], strict=True):
        for a, b in zip(*map(jax.tree.leaves, trees), strict=True):
            # Of the whole array: Adam makes as large a step of a gradient that is but rounding as of any other.
            assert np.linalg.norm(a - b) <= 1e-5 * np.linalg.norm(b)


DIVISIBLE = replace(CONFIG, vocab_size=256, n_kv_heads=8, n_layers=3)
LAYERS = DIVISIBLE.n_layers
# Of a layer's matrices: qkv, out, gate, up, down.
MATRICES = [[8 * 4 * 8, 32], [32, 128], [48, 32], [48, 32], [32, 48]]


@pytest.fixture(scope="module")
def exchanged():
    """{mesh: the collectives of a step}; two chunks of logits, layers computed twice."""
    found = {}

    def of(sizes):
        if sizes not in found:
            mesh = make_mesh(sizes)
            (program,) = train_programs(DIVISIBLE, mesh, ROWS, 128)
            compiled = program.function.lower(*program.arguments).compile()
            found[sizes] = find_collectives(compiled.as_text(), mesh)
        return found[sizes]

    return of


def shapes_of(collectives):
    """Of every array of their results."""
    texts = (shape.split("[")[1].rstrip("]") for c in collectives for shape in c.shapes)
    return sorted([int(n) for n in text.split(",") if n] for text in texts)


@pytest.mark.slow
def test_weights_are_not_gathered_over_tensor():
    """Where each device has a single row XLA preferred that to gathering activations."""
    rows, mesh = 4, make_mesh(MeshSizes(1, 4, 2))
    (program,) = train_programs(DIVISIBLE, mesh, rows, 128, remat="none")
    compiled = program.function.lower(*program.arguments).compile()
    gathers = [c for c in find_collectives(compiled.as_text(), mesh) if c.opcode == "all-gather" and c.loops]
    weights = [c for c in gathers if c.axes == ("fsdp",)]
    halves = [[128, 32], [32, 64], [24, 32], [24, 32], [32, 24]]
    assert shapes_of(c for c in weights if c.phase == "forward") == sorted(halves)
    assert all(c.axes == ("tensor",) and c.bytes == rows // 4 * 128 * 32 * 4 for c in gathers if c not in weights)


def test_data_parallel_sums_every_gradient_once(exchanged):
    """In one bucket per layer, and one for all that is in no layer."""
    collectives = exchanged(MeshSizes(8))
    assert {c.opcode for c in collectives} == {"all-reduce"}
    assert sorted(c.loops for c in collectives) == [(), (LAYERS,)]
    gradients = 4 * parameter_count(DIVISIBLE)
    assert gradients <= sum(c.count * c.bytes for c in collectives) <= gradients + 16  # and the loss


def test_fsdp_gathers_the_weights_of_each_layer_once_forward_and_once_backward(exchanged):
    collectives = exchanged(MeshSizes(1, 8))
    gathers = [c for c in collectives if c.opcode == "all-gather"]
    forward = [c for c in gathers if c.loops and c.phase == "forward"]
    backward = [c for c in gathers if c.loops and c.phase != "forward"]
    assert shapes_of(forward) == shapes_of(backward) == sorted(MATRICES)
    assert all(c.loops == (LAYERS,) for c in forward + backward)
    # No activations: besides, only the output projection and the integers that are to be looked up.
    (head,) = (c for c in gathers if not c.loops and "s32" not in c.dtypes)
    assert shapes_of([head]) == [[DIVISIBLE.vocab_size, DIVISIBLE.dim]]
    assert all(c.loops == (LAYERS,) for c in collectives if c.loops)  # nothing for every chunk of logits


@pytest.mark.slow
def test_tensor_parallel_sums_twice_per_layer_forward(exchanged):
    """Each sum is a reduce-scatter where the residual stream is split by positions, with a gather before what reads it."""
    collectives = [c for c in exchanged(MeshSizes(1, 1, 8)) if c.loops == (LAYERS,) and c.phase == "forward"]
    kinds = [c.opcode for c in collectives]
    assert kinds.count("all-reduce") == kinds.count("all-gather") == 2
    assert len(kinds) == 4
    stream = ROWS * 128 * DIVISIBLE.dim * 4
    assert {c.bytes for c in collectives} == {stream}
    assert all(c.sliced == stream for c in collectives if c.opcode == "all-reduce")


@pytest.mark.slow
def test_context_sends_keys_and_values_around_and_shares_weights_as_fsdp(exchanged):
    """Of an eighth of each row; what else travels in a layer are the weights, once for each pass."""
    collectives = exchanged(MeshSizes(context=8))
    keys = ROWS * 8 * 128 // 8 * 8 * 4  # [B, K, T / n, H] of float32
    ring = [c for c in collectives if c.opcode == "collective-permute"]
    assert {c.bytes for c in ring} == {keys}
    turns = {phase: sum(c.count for c in ring if c.phase == phase) for phase in ("forward", "again", "backward")}
    # Two arrays, seven times; in the backward pass their gradients go with them, and home.
    assert turns == {"forward": 14 * LAYERS, "again": 14 * LAYERS, "backward": (14 + 16) * LAYERS}
    gathers = [c for c in collectives if c.opcode == "all-gather" and c.loops]
    for again in (False, True):
        assert shapes_of(c for c in gathers if (c.phase == "forward") != again) == sorted(MATRICES)
    assert {c.opcode for c in collectives if c.loops} == {"collective-permute", "all-gather", "all-reduce"}
    assert all(c.loops[0] == LAYERS for c in collectives if c.loops)  # nothing for every chunk of logits
    outside = [c for c in collectives if not c.loops and c.opcode == "all-gather" and "s32" not in c.dtypes]
    assert shapes_of(outside) == [[DIVISIBLE.vocab_size, DIVISIBLE.dim]]


@pytest.mark.slow
def test_a_device_computes_its_share_of_scores_and_logits():
    (program,) = train_programs(DIVISIBLE, make_mesh(MeshSizes(2, 2, 2)), ROWS, 32)
    text = program.function.lower(*program.arguments).compile().as_text()
    assert f"f32[{ROWS // 4},{DIVISIBLE.n_kv_heads // 2},32," in text
    assert f"f32[{ROWS},{DIVISIBLE.n_kv_heads},32," not in text
    assert f"f32[{ROWS // 4},32,{DIVISIBLE.vocab_size // 2}]" in text
    assert f"f32[{ROWS},32,{DIVISIBLE.vocab_size}]" not in text


@pytest.mark.parametrize(
    ("heads", "sizes"),
    [
        (8, MeshSizes(2, 2, 2)),
        pytest.param(2, MeshSizes(2, 1, 4), marks=pytest.mark.nightly),
        pytest.param(2, MeshSizes(1, 1, 4, 2), marks=pytest.mark.slow),
        pytest.param(8, MeshSizes(1, 2, 2, 2), marks=pytest.mark.nightly),
    ],
)
def test_nothing_is_gathered_for_want_of_a_better_way(heads, sizes, capfd):
    """XLA warns where it can reshard an array only by making it whole on every device."""
    (program,) = train_programs(replace(DIVISIBLE, n_kv_heads=heads), make_mesh(sizes), ROWS, 32)
    program.function.lower(*program.arguments).compile()
    assert "rematerialization" not in capfd.readouterr().err


@pytest.mark.parametrize("sizes", [*(MeshSizes(1, fsdp) for fsdp in (2, 4, 8)), MeshSizes(1, 2, context=4)], ids=str)
def test_the_state_takes_its_share_of_memory(sizes):
    def bytes_held(sizes):
        (program,) = train_programs(CONFIG, make_mesh(sizes), ROWS, LENGTH)
        return bytes_per_device(program.arguments[0])

    assert bytes_held(sizes) == pytest.approx(bytes_held(MeshSizes()) / sizes.columns, rel=0.1)
