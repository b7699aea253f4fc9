"""Conversations in packed rows against rows of their own."""

from functools import partial

import jax
import numpy as np
import pytest
from conftest import as_float64
from training_options import loss_options

from llama_jax.data import Corpus, validation_batches
from llama_jax.training.batch import target_mask
from llama_jax.training.loss import next_token_loss

SIZES = [7, 3, 12, 5, 4, 9, 2]
LENGTH = 15


def conversations(config, sizes, seed=0):
    """Documents of random tokens, of which about half are targets."""
    rng = np.random.default_rng(seed)
    stops = np.cumsum(sizes)
    targets = rng.random(stops[-1]) < 0.5
    targets[stops - sizes] = False  # they are predicted from nothing
    return Corpus(
        tokens=rng.integers(0, config.vocab_size, stops[-1], np.uint16),
        starts=stops - sizes,
        stops=stops,
        byte_counts=np.ones(len(sizes), np.int64),
        vocab_size=config.vocab_size,
        digest="",
        targets=targets,
    )


def both(corpus):
    """The corpus in as few rows as hold it, and each conversation in a row of its own."""
    (packed,) = validation_batches(corpus, 4, LENGTH)
    rows = [next(iter(validation_batches(corpus.select(np.array([i])), 1, LENGTH))) for i in range(corpus.document_count)]
    alone = jax.tree.map(lambda *parts: np.concatenate(parts), *rows)
    assert packed.segment_ids.max() > alone.segment_ids.max() == 1
    return packed, alone


@pytest.mark.parametrize("kind", ["gqa", pytest.param("tied", marks=pytest.mark.slow)])
def test_loss_and_gradients_are_those_of_rows_of_their_own(models, kind):
    """What shares a row is not seen, and no target is lost or added."""
    config, params = models[kind]
    packed, alone = both(conversations(config, SIZES))
    assert target_mask(packed).sum() == target_mask(alone).sum() == conversations(config, SIZES).targets.sum()
    with jax.enable_x64(True):
        measured = jax.jit(jax.value_and_grad(partial(next_token_loss, config, options=loss_options())))
        params = as_float64(params)
        loss, gradients = measured(params, batch=jax.tree.map(jax.device_put, packed))
        expected, wanted = measured(params, batch=jax.tree.map(jax.device_put, alone))
        np.testing.assert_allclose(loss, expected, rtol=1e-9)
        # The rotary angles are float32 on both sides, and the same ones.
        jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-6, atol=1e-9), gradients, wanted)


def test_a_row_without_a_target_counts_nothing(models):
    config, params = models["gqa"]
    corpus = conversations(config, [4, 4])
    corpus.targets[:] = False
    (batch,) = validation_batches(corpus, 1, LENGTH)
    assert not np.asarray(target_mask(batch)).any()
    assert jax.jit(partial(next_token_loss, config, options=loss_options()))(params, batch) == 0
