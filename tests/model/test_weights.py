"""Gradients through weights that are no arrays."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import jit_dequantize, jit_init, tiny_config

import llama_jax
from llama_jax.model.trees import quantize
from llama_jax.training.loss import next_token_loss


@pytest.mark.parametrize("kind", [pytest.param("int8", marks=pytest.mark.slow), "int4"])
def test_the_gradient_goes_through_a_frozen_quantized_model(kind):
    config = tiny_config(vocab_size=40, dim=128, n_layers=1, hidden_dim=128, max_seq_len=32, tie_embeddings=True)
    params = jit_init(config, jax.random.key(1))
    frozen = quantize(params, kind)
    batch = llama_jax.Batch(jnp.asarray([[1, 5, 9, 2, 7, 3, 30, 11]]))

    @jax.jit
    def of_norm(norm, model):
        return next_token_loss(config, model.replace(final_norm=norm), batch)

    gradient = jax.jit(jax.grad(of_norm))
    ours, wanted = (gradient(params.final_norm, model) for model in (frozen, jit_dequantize(frozen)))
    np.testing.assert_allclose(ours, wanted, atol=2e-3 * float(jnp.abs(wanted).max()))  # activations in 16 bits on a CPU
