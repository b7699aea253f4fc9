"""Keys and queries that are smoothed before they are rounded to 8 bits."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from llama_jax import ops
from llama_jax.ops.int8 import dequantize_rows, hadamard, quantize_rows, smooth_keys

smoothed = jax.jit(smooth_keys, static_argnames="rotary_dim")


@pytest.mark.parametrize("size", [1, 6, 64, 80, 128])
def test_a_hadamard_matrix_is_symmetric_and_orthogonal(size):
    found = hadamard(size)
    np.testing.assert_array_equal(found, found.T)
    np.testing.assert_allclose(found @ found, np.eye(size), atol=1e-6)
    entries = np.abs(found[found != 0])
    np.testing.assert_allclose(entries, (size & -size) ** -0.5, rtol=1e-6)


@pytest.mark.parametrize("rotary_dim", [16, 8])
def test_products_stay_and_rounding_costs_less(rotary_dim):
    random, half = np.random.default_rng(0), rotary_dim // 2
    bias = random.standard_normal((2, 16), np.float32)
    bias[:, 5] = 200
    angles = random.uniform(0, 6, (7, half)).astype(np.float32)
    keys = random.standard_normal((3, 2, 7, 16), np.float32) + bias[:, None]
    rotate = jax.jit(ops.apply_rotary)
    keys = np.concatenate([rotate(keys[..., :rotary_dim], np.cos(angles), np.sin(angles)), keys[..., rotary_dim:]], -1)
    queries, others = random.standard_normal((2, 3, 2, 7, 3, 16), np.float32)
    found = smoothed(keys, queries, others, bias=bias, rotary_dim=rotary_dim)
    product = lambda keys, queries: np.einsum("bktgh,bksh->bktgs", queries, keys)
    for before, after in zip((queries, others), found[1:], strict=True):
        np.testing.assert_allclose(product(found[0], after), product(keys, before), rtol=1e-4, atol=2e-3)
    rounded = lambda keys: np.asarray(dequantize_rows(quantize_rows(jnp.asarray(keys))))
    error = lambda keys, queries: np.square(product(rounded(keys), queries) - product(keys, queries)).mean()
    assert error(*found[:2]) < error(keys, queries) / 4
