"""A trace is what the forward pass does."""

from dataclasses import replace

import jax
import numpy as np
import pytest
from conftest import first_layers, jit_logits

import llama_jax
from llama_jax import ops
from llama_jax.verify.trace import Origin, nats_per_token, run_layer, run_output, trace

TOKENS = np.random.default_rng(0).integers(0, 96, 24, dtype=np.int32)


@pytest.fixture(scope="module")
def traced(models):
    config, params = models["gqa"]
    return trace(params, TOKENS, Origin("test", config, ("F32",), "float32", {}))


def test_streams_and_logits_are_those_of_the_forward_pass(models, traced):
    config, params = models["gqa"]
    np.testing.assert_array_equal(traced.streams[0], np.asarray(params.embedding)[TOKENS])
    for i in (1, 2):
        forward = jax.jit(llama_jax.forward, static_argnums=0)
        hidden, _ = forward(replace(config, n_layers=i), first_layers(params, i), TOKENS[None])
        normed = jax.jit(ops.rms_norm)(traced.streams[i], params.final_norm, config.norm_eps)
        np.testing.assert_allclose(normed, hidden[0], atol=1e-5)
    np.testing.assert_allclose(traced.logits, jit_logits(config, params, TOKENS[None])[0], atol=1e-5)
    assert (traced.logits.dtype, traced.streams.dtype) == (np.float32, np.float32)


def test_the_parts_one_by_one_make_up_the_whole(models, traced):
    config, params = models["gqa"]
    for i, block in enumerate(llama_jax.layers_of(params)):
        np.testing.assert_allclose(run_layer(config, block, traced.streams[i]), traced.streams[i + 1], atol=1e-5)
    np.testing.assert_allclose(run_output(config, params, traced.streams[-1]), traced.logits, atol=1e-5)


def test_guessing_costs_the_logarithm_of_the_vocabulary():
    assert nats_per_token(np.arange(5), np.zeros((5, 96), np.float32)) == pytest.approx(np.log(96))
