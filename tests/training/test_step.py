from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from conftest import jit_init, tiny_config
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from training_options import step_options

import llama_jax
from llama_jax import preset
from llama_jax.errors import ConfigError
from llama_jax.model.forward_options import Sharding
from llama_jax.model.trees import param_shapes, quantize
from llama_jax.ops.cross_entropy import LossSums
from llama_jax.ops.weights.formats import ENCODABLE
from llama_jax.training.batch import Batch
from llama_jax.training.optimizer import adamw, with_clipping
from llama_jax.training.step import StepOptions, init_state, train_step

CONFIG = preset("stories-260k")
OPTIMIZER = adamw(3e-3)
TOKENS = np.random.default_rng(0).integers(0, CONFIG.vocab_size, (4, 33), np.int32)
BATCH = Batch(TOKENS)


@pytest.fixture(scope="module")
def step():
    return jax.jit(partial(train_step, CONFIG, OPTIMIZER, options=step_options(remat="full", chunk=16, ema_decay=0.5)))


def start(dtype=jnp.float32, ema=False):
    return init_state(OPTIMIZER, jit_init(CONFIG, jax.random.key(0), dtype), dtype=dtype, ema=ema)


def test_a_few_steps_lower_the_loss(step):
    state, losses = start(ema=True), []
    for _ in range(12):
        state, metrics = step(state, BATCH)
        losses.append(float(metrics["loss"]))
    assert losses[0] == pytest.approx(np.log(CONFIG.vocab_size), rel=0.02)  # it knows nothing yet
    assert losses[-1] < 0.7 * losses[0]
    assert int(state.step) == 12


def sum_of_norm(config, params, batch, options, sharding):
    """A loss of which little is to be compiled."""
    return LossSums(300.0 * TOKENS[:, 1:].size * jnp.sum(params.final_norm.astype(jnp.float32)), jnp.float32(0))


def test_the_state_is_updated_in_place():
    state = start()
    jax.jit(partial(train_step, CONFIG, OPTIMIZER, loss=sum_of_norm), donate_argnums=0)(state, BATCH)
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(state))


def test_a_step_is_the_optimizers_update_of_the_gradient(step):
    """The definition, without rematerialization and chunks."""
    state = start(ema=True)

    def loss_of(params):
        logits = llama_jax.logits(CONFIG, params, TOKENS[:, :-1])
        return optax.softmax_cross_entropy_with_integer_labels(logits, TOKENS[:, 1:]).mean()

    loss, gradients = jax.jit(jax.value_and_grad(loss_of))(state.params)
    _, opt_state = jax.jit(OPTIMIZER.update)(gradients, state.opt_state, state.params)
    after, metrics = step(state, BATCH)
    np.testing.assert_allclose(metrics["loss"], loss, rtol=1e-6)
    squares = sum(float(np.sum(np.square(g))) for g in jax.tree.leaves(gradients))
    np.testing.assert_allclose(metrics["grad_norm"], np.sqrt(squares), rtol=1e-4)
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-3, atol=1e-6), after.opt_state, opt_state)


@pytest.mark.slow
@pytest.mark.parametrize("stored", [jnp.bfloat16, jnp.float16])
def test_weights_of_16_bits_are_trained_in_float32(stored):
    """Of bfloat16 parameters updates of 1e-5 would change one in seven within twelve steps."""
    optimizer = adamw(1e-5)
    before = jit_init(CONFIG, jax.random.key(0), stored)
    state = init_state(optimizer, before, ema=True)
    for tree in (state.params, state.opt_state, state.ema):
        assert {leaf.dtype for leaf in jax.tree.leaves(tree)} <= {jnp.dtype("float32"), jnp.dtype("int32")}
    assert {leaf.dtype for leaf in jax.tree.leaves(before)} == {jnp.dtype(stored)}
    after, _ = jax.jit(partial(train_step, CONFIG, optimizer, options=step_options(dtype="bfloat16")))(state, BATCH)
    changed = jax.tree.map(lambda old, new: np.mean(np.asarray(old) != new), before, after.params)
    assert min(jax.tree.leaves(changed)) > 0.9


def test_quantized_weights_are_refused_with_the_remedy():
    shapes = param_shapes(replace(CONFIG, dim=256, hidden_dim=256))  # rows of whole blocks
    for name in ENCODABLE:
        for dtype in (None, "float32"):
            with pytest.raises(ConfigError, match='quantized weights cannot be trained; load the model with dtype="float32'):
                init_state(OPTIMIZER, quantize(shapes, name), dtype=dtype)
    params = jit_init(CONFIG, jax.random.key(0))
    for dtype in ("float8_e4m3fn", "int8"):
        with pytest.raises(ConfigError, match=f"dtype={dtype} cannot be trained; use float32"):
            init_state(OPTIMIZER, params, dtype=dtype)
        with pytest.raises(ConfigError, match="quantized weights cannot be trained"):
            init_state(OPTIMIZER, params.replace(embedding=params.embedding.astype(dtype)))


def test_the_norm_of_gradients_of_16_bits_is_taken_in_float32():
    """Their squares overflow float16, and the step was skipped as if it were not finite."""
    state = init_state(OPTIMIZER, jit_init(CONFIG, jax.random.key(0)), dtype=jnp.float16)
    after, metrics = jax.jit(partial(train_step, CONFIG, OPTIMIZER, loss=sum_of_norm))(state, BATCH)
    assert metrics["grad_norm"].dtype == jnp.float32
    np.testing.assert_allclose(metrics["grad_norm"], 300 * CONFIG.dim**0.5, rtol=1e-3)
    assert int(after.skipped) == 0


def test_a_loss_of_other_rows_has_its_own_divisor_and_sums():
    """Rows that are no `Batch`, in parts as at once: the mean is over what `count` says, and further sums are whole."""
    rows = {"wanted": np.arange(8, dtype=np.float32), "weight": np.array([1, 0, 2, 1, 1, 3, 0, 1], np.float32)}

    def loss(config, params, batch, options, sharding):
        squares = (batch["wanted"] - jnp.mean(params.final_norm)) ** 2 * batch["weight"]
        return LossSums(jnp.sum(squares), jnp.sum(squares), {"tokens": jnp.sum(batch["wanted"] > 3)})

    state = init_state(OPTIMIZER, jit_init(CONFIG, jax.random.key(0)))
    found = []
    for parts in (1, 4):
        options = StepOptions(accumulate=parts, count=lambda batch: jnp.sum(batch["weight"]))
        found.append(jax.jit(partial(train_step, CONFIG, OPTIMIZER, loss=loss, options=options))(state, rows))
    (after, whole), (other, divided) = found
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-6), (after, whole), (other, divided))
    expected = np.sum((rows["wanted"] - 1) ** 2 * rows["weight"]) / 9
    np.testing.assert_allclose(whole["loss"], expected, rtol=1e-6)
    assert int(whole["tokens"]) == 4


@pytest.mark.parametrize("master", [jnp.float32, jnp.bfloat16])
def test_the_state_keeps_its_dtype_whatever_computes(master):
    state = jax.eval_shape(lambda: start(master))
    after, metrics = jax.eval_shape(
        partial(train_step, CONFIG, OPTIMIZER, options=step_options(dtype=jnp.bfloat16)), state, BATCH
    )
    for old, new in zip(jax.tree.leaves(state), jax.tree.leaves(after), strict=True):
        assert (old.shape, old.dtype) == (new.shape, new.dtype)
    assert {leaf.dtype for leaf in jax.tree.leaves(after.params)} == {jnp.dtype(master)}
    assert metrics["loss"].dtype == jnp.float32


def without(state, *names):
    return state.replace(**dict.fromkeys(names))


@pytest.fixture(scope="module")
def ragged():
    """Packed rows with very unequal numbers of predicted tokens."""
    segments = np.ones_like(TOKENS)
    segments[0, 5:] = 0
    segments[1, 20:] = 2
    positions = np.arange(TOKENS.shape[1]) - np.where(segments == 2, 20, 0)
    return Batch(TOKENS, segments, positions.astype(np.int32))


@pytest.mark.parametrize("weight", [pytest.param(1.0, marks=pytest.mark.slow), 1e-3])
@pytest.mark.parametrize("accumulate", [2, pytest.param(8, marks=pytest.mark.slow)])
def test_accumulated_parts_are_the_whole_batch(ragged, accumulate, weight):
    """To 1e-6 of each array's largest entry, whatever the number of labels in a part, or the sum of their weights."""
    if weight != 1:
        random = np.random.default_rng(0).random(ragged.tokens.shape, np.float32)
        ragged = ragged._replace(loss_mask=np.where(random < 0.3, 0, weight * random))

    batch = jax.tree.map(lambda part: np.concatenate([part, part[::-1, ::-1]]), ragged)

    def gradients(**options):
        step = jax.jit(partial(train_step, CONFIG, optax.sgd(1.0), options=step_options(chunk=16, **options)))
        state = init_state(optax.sgd(1.0), jit_init(CONFIG, jax.random.key(0)))
        after, metrics = step(state, batch)
        return jax.tree.map(lambda old, new: np.asarray(old) - np.asarray(new), state.params, after.params), metrics

    (whole, expected), (parts, metrics) = gradients(), gradients(accumulate=accumulate)
    for name in expected:
        np.testing.assert_allclose(metrics[name], expected[name], rtol=1e-6)
    for a, b in zip(jax.tree.leaves(parts), jax.tree.leaves(whole), strict=True):
        assert np.abs(a - b).max() <= 1e-6 * max(1.0, np.abs(b).max())


def test_rows_that_cannot_be_divided():
    with pytest.raises(llama_jax.ConfigError, match="4 rows cannot be divided into accumulate=3 equal parts"):
        train_step(CONFIG, OPTIMIZER, start(), BATCH, options=step_options(accumulate=3))


@pytest.mark.parametrize(
    ("told", "message"),
    [
        ({"accumulate": 0}, "accumulate=0 must be at least 1"),
        ({"ema_decay": 1.0}, "ema_decay=1.0 must be at least 0 and below 1"),
        ({"z_loss": -1e-4}, "z_loss=-0.0001 must be at least 0"),
    ],
)
def test_values_that_cannot_be(told, message):
    with pytest.raises(llama_jax.ConfigError, match=message):
        step_options(**told)


def test_a_step_that_is_not_finite_changes_only_the_counters(step):
    before = start(ema=True)
    poisoned = before.replace(params=before.params.replace(final_norm=before.params.final_norm.at[3].set(np.inf)))
    state = poisoned
    for count in (1, 2):
        state, metrics = step(state, BATCH)
        assert not np.isfinite(metrics["loss"])
        assert (int(state.step), int(state.skipped), int(state.skipped_in_a_row)) == (count, count, count)
    counters = ("step", "skipped", "skipped_in_a_row")
    jax.tree.map(np.testing.assert_array_equal, without(state, *counters), without(poisoned, *counters))
    state, metrics = step(state.replace(params=before.params, ema=before.params), BATCH)
    assert np.isfinite(metrics["loss"])
    assert (int(state.step), int(state.skipped), int(state.skipped_in_a_row)) == (3, 2, 0)


def test_the_average_follows_the_parameters(step):
    state = start(ema=True)
    expected = np.asarray(state.params.embedding, np.float64)
    for i in range(6):
        state, _ = step(state, BATCH)
        keep = min(0.5, (1 + i) / (10 + i))
        expected = keep * expected + (1 - keep) * np.asarray(state.params.embedding, np.float64)
    np.testing.assert_allclose(state.ema.embedding, expected, atol=1e-6)


@pytest.mark.slow
def test_rematerialization_trades_memory():
    """By the compiled program's plan: less and less is kept for the backward pass, and every policy gives one loss."""
    config = tiny_config(dim=64, n_layers=8, n_kv_heads=4, hidden_dim=192, max_seq_len=512, tie_embeddings=True)
    batch = Batch(np.random.default_rng(0).integers(0, 64, (2, 257), np.int32))
    temporaries, losses = {}, []
    for remat in ("none", "dots", "full", "offload"):
        state = init_state(OPTIMIZER, jit_init(config, jax.random.key(0)))
        step = partial(train_step, config, OPTIMIZER, options=step_options(remat=remat))
        step = jax.jit(step, donate_argnums=0).lower(state, batch).compile()
        temporaries[remat] = step.memory_analysis().temp_size_in_bytes
        losses.append(float(step(state, batch)[1]["loss"]))
    assert temporaries["full"] < 0.7 * temporaries["dots"]
    assert temporaries["dots"] < temporaries["none"]
    np.testing.assert_allclose(losses, losses[0], rtol=1e-6)


@pytest.mark.parametrize("clip_norm", [1e-3, pytest.param(1e3, marks=pytest.mark.slow)])
def test_clipping_scales_all_gradients_together(clip_norm):
    """With a step size of one the update is the clipped gradient."""
    optimizer = with_clipping(optax.sgd(1.0), clip_norm)
    state = init_state(optimizer, jit_init(CONFIG, jax.random.key(0)))
    step = partial(train_step, CONFIG, optimizer, options=step_options(chunk=16))
    after, metrics = jax.jit(step)(state, BATCH)
    pairs = zip(jax.tree.leaves(state.params), jax.tree.leaves(after.params), strict=True)
    moved = np.sqrt(sum(np.sum((np.asarray(old, np.float64) - new) ** 2) for old, new in pairs))
    np.testing.assert_allclose(moved, min(clip_norm, float(metrics["grad_norm"])), rtol=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("accumulate", [1, 2])
def test_under_shard_map_that_checks_what_varies(accumulate):
    """`check_vma=True` is the default of `jax.shard_map`: sums over devices are then taken exactly once."""
    devices = 2
    mesh = jax.make_mesh((devices,), ("rows",), (AxisType.Auto,), devices=jax.devices()[:devices])
    options = step_options(accumulate=accumulate, chunk=16)
    alone = partial(train_step, CONFIG, with_clipping(OPTIMIZER, 1.0), options=options)
    each = partial(alone, sharding=Sharding(axis_name="rows"))
    spread = jax.jit(jax.shard_map(each, mesh=mesh, in_specs=(P(), P("rows")), out_specs=P()))
    (after, metrics), (wanted, expected) = spread(start(), BATCH), jax.jit(alone)(start(), BATCH)
    for name in expected:
        np.testing.assert_allclose(metrics[name], expected[name], rtol=1e-5)
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5), after.opt_state, wanted.opt_state)
