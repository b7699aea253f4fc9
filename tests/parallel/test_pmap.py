"""The step under pmap on eight simulated devices does what jit does on one with all rows."""

from functools import partial
from itertools import pairwise

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import jit_init, tiny_config
from jax.sharding import PartitionSpec as P
from training_options import step_options

from llama_jax.errors import MeshError
from llama_jax.parallel.pmap import pmap_replicate, pmap_step
from llama_jax.training.batch import Batch
from llama_jax.training.optimizer import adamw
from llama_jax.training.step import init_state, train_step

CONFIG = tiny_config()
ROWS, LENGTH, STEPS = 16, 24, 10
OPTIMIZER = adamw(1e-3)


def packed(seed: int) -> Batch:
    """Rows of several documents, padding and a mask: every device gets another number of labels, one of them none."""
    random = np.random.default_rng(seed)
    tokens = random.integers(0, CONFIG.vocab_size, (ROWS, LENGTH + 1), np.int32)
    segments, positions = np.zeros_like(tokens), np.zeros_like(tokens)
    for row in range(2, ROWS):  # the first two rows, which are one device's share, are padding alone
        ends = [0, *sorted(random.choice(np.arange(1, LENGTH), 2, replace=False)), LENGTH + 1 - row]
        for document, (start, end) in enumerate(pairwise(ends), start=1):
            segments[row, start:end], positions[row, start:end] = document, np.arange(max(end - start, 0))
    return Batch(tokens, segments, positions, random.random(tokens.shape) < 0.7)


def start():
    return init_state(OPTIMIZER, jit_init(CONFIG, jax.random.key(0)), ema=True)


STEP = partial(train_step, CONFIG, OPTIMIZER, options=step_options(chunk=8, ema_decay=0.9))


@pytest.fixture(scope="module")
def alone():
    return jax.jit(STEP)


@pytest.fixture(scope="module")
def on_all():
    return pmap_step(STEP, jax.devices())


@pytest.mark.slow
def test_one_step_has_the_loss_and_the_gradients_of_jit(alone, on_all):
    batch = packed(0)
    expected, metrics = alone(start(), batch)
    after, found = on_all(pmap_replicate(start(), jax.devices()), batch)
    assert set(found) == set(metrics)
    for name in metrics:
        np.testing.assert_allclose(found[name], metrics[name], rtol=1e-6, err_msg=name)
    # The first moment after one step is a tenth of the gradient, the second a twentieth of its square.
    close = partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-7)
    jax.tree.map(close, after.opt_state, expected.opt_state)
    assert int(after.step) == 1


def test_the_state_is_replicated_and_donated(on_all):
    before = pmap_replicate(start(), jax.devices())
    after, metrics = on_all(before, packed(0))
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(before))
    for leaf in jax.tree.leaves((after, metrics)):
        assert leaf.sharding.spec == P()
        copies = [np.asarray(shard.data) for shard in leaf.addressable_shards]
        assert len(copies) == 8
        for copy in copies:
            np.testing.assert_array_equal(copy, copies[0])


def test_replicate_leaves_the_original(on_all):
    """Also one that is bound to a device, as what a checkpoint was read into."""
    original = jax.device_put(start(), jax.devices()[0])
    on_all(pmap_replicate(original, jax.devices()), packed(0))
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(original))
    jax.tree.map(np.testing.assert_array_equal, original.params, start().params)


def test_a_step_that_is_not_finite_is_skipped_on_all_devices(on_all):
    state = start()
    broken = state.params.replace(final_norm=state.params.final_norm.at[0].set(jnp.nan))
    after, _ = on_all(pmap_replicate(state.replace(params=broken), jax.devices()), packed(0))
    assert (int(after.skipped), int(after.skipped_in_a_row)) == (1, 1)
    jax.tree.map(np.testing.assert_array_equal, after.params, broken)


def test_rows_that_cannot_be_divided_are_an_error_before_anything_is_donated(on_all):
    state = pmap_replicate(start(), jax.devices())
    with pytest.raises(MeshError, match="batch=13 cannot be split over devices=8; 1, 13 would do"):
        on_all(state, jax.tree.map(lambda part: part[:13], packed(0)))
    assert not state.step.is_deleted()


def test_a_state_on_other_devices_is_an_error(on_all):
    for state in (start(), pmap_replicate(start(), jax.devices()[:4])):
        with pytest.raises(MeshError, match="is not on all 8 devices; replicate it first"):
            on_all(state, packed(0))


def test_several_processes_are_an_error(monkeypatch):
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    with pytest.raises(MeshError, match="pmap needs a single process, but this is one of 2"):
        pmap_step(STEP, jax.devices())
