"""Quantized weights decoded by 32-bit words, as on a GPU, compared with decoding by NumPy."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_quantized_weights import held_by, numbers, random_planes, weight_of

from llama_jax import ops
from llama_jax.ops.platform import KernelOptions, target_platform
from llama_jax.ops.weights import quantized_matmul as matmul_module
from llama_jax.ops.weights.formats import QUANT_FORMATS

BY_WORDS = [name for name, form in QUANT_FORMATS.items() if form.words is not None]
MOST_USED = {"int8", "q4_0", "int4", "q5_1"}
USUAL = [kind if kind in MOST_USED else pytest.param(kind, marks=pytest.mark.slow) for kind in BY_WORDS]


def random_rows(rows: int, columns: int) -> jax.Array:
    return jax.device_put(np.asarray(np.random.default_rng(2).normal(0, 1, (rows, columns)), np.float32))


@pytest.mark.parametrize("kind", BY_WORDS)
def test_words_hold_the_same_numbers(kind):
    form, planes = QUANT_FORMATS[kind], random_planes(kind, 6, 768)
    read = form.words.read(tuple(map(jnp.asarray, planes)))
    wanted = form.decode(*planes)
    # Absolute too: of scale times number plus offset, near zero, XLA may round once where NumPy rounds twice.
    for dtype, error in ((jnp.float32, 1e-6), (jnp.bfloat16, 2**-8)):
        found = form.words.in_order(jax.jit(form.words.dequantize, static_argnums=1)(read, dtype))
        assert found.dtype == dtype
        np.testing.assert_allclose(found.astype(jnp.float32), wanted, rtol=error, atol=1e-6)


def test_the_least_zero_point_has_no_negative():
    form, (values, scales, zeros) = QUANT_FORMATS["int4_asym"], random_planes("int4_asym", 2, 256)
    planes = values, scales, np.full_like(zeros, -128)
    read = form.words.read(tuple(map(jnp.asarray, planes)))
    np.testing.assert_allclose(form.words.dequantize(read, jnp.float32), form.decode(*planes), rtol=1e-6)


@pytest.mark.parametrize("rows", [1, 4, 5, *(pytest.param(rows, marks=pytest.mark.slow) for rows in (2, 3))])
@pytest.mark.parametrize("kind", USUAL)
def test_few_rows_are_multiplied_on_a_gpu(kind, rows, monkeypatch):
    weight = held_by("gpu", weight_of(kind, rows=37, columns=768), monkeypatch)
    x = random_rows(rows, 768)
    with target_platform("gpu"):
        found = jax.jit(ops.project)(x, weight)
        program = str(jax.make_jaxpr(ops.project)(x, weight))
    wanted = np.asarray(x, np.float64) @ numbers(weight).T.astype(np.float64)
    np.testing.assert_allclose(found, wanted, atol=1e-6 * np.abs(wanted).max(), rtol=0)
    few = 1 if weight.form.has_row_scales else 4
    assert ("dot_general" in program) == (rows > few)


def test_rows_that_are_not_whole_words_are_multiplied_otherwise(monkeypatch):
    weight = held_by("gpu", weight_of("int8", rows=8, columns=102), monkeypatch)
    x = random_rows(1, 102)
    with target_platform("gpu"):
        found = jax.jit(ops.project)(x, weight)
    np.testing.assert_allclose(found, np.asarray(x) @ numbers(weight).T, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", USUAL)
def test_many_rows_and_gradients_by_words(kind, monkeypatch):
    """By chunks, of which the last has rows that the weight lacks."""
    monkeypatch.setattr(matmul_module, "DECODED_AT_ONCE_ON_GPU", 1 << 13)
    weight = held_by("gpu", weight_of(kind, rows=37, columns=768), monkeypatch)
    x, dense = random_rows(20, 768), numbers(weight).astype(np.float64)
    with target_platform("gpu"):
        found, gradient = jax.jit(
            lambda x: (ops.project(x, weight), jax.grad(lambda x: jnp.sum(ops.project(x, weight) ** 2))(x))
        )(x)
    wanted = np.asarray(x, np.float64) @ dense.T
    its_gradient = 2 * wanted @ dense
    np.testing.assert_allclose(found, wanted, atol=1e-6 * np.abs(wanted).max(), rtol=0)
    np.testing.assert_allclose(gradient, its_gradient, atol=1e-6 * np.abs(its_gradient).max(), rtol=0)


def test_exact_programs_have_the_same_bits_for_any_rows(monkeypatch):
    weight = held_by("gpu", weight_of("q4_0", rows=37, columns=768), monkeypatch)
    x = random_rows(5, 768)
    project = jax.jit(partial(ops.project, kernels=KernelOptions(exact=True)))
    with target_platform("gpu"):
        together = project(x, weight)
        alone = [project(x[i : i + 1], weight)[0] for i in range(5)]
    np.testing.assert_array_equal(together, np.stack(alone))
