"""Weights in fewer bits: their numbers, their matmuls on every way, and that nothing dense is made of them."""

import logging
import platform

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from llama_jax import ops
from llama_jax.ops import native
from llama_jax.ops.weights import KINDS, JoinedWeight, QuantizedWeight, quantized
from llama_jax.ops.weights import weight as room
from llama_jax.ops.weights.kinds import join, split

BYTES = {"q8_0": 34, "q4_0": 18, "q4_k": 144, "q5_k": 176, "q6_k": 210}
MADE = [name for name, form in KINDS.items() if form.encode is not None]
needs_compiler = pytest.mark.skipif(not native.usable(), reason="no C++ compiler here")


def random_planes(kind: str, rows: int, columns: int, seed: int = 0) -> tuple[np.ndarray, ...]:
    """Blocks of random bytes, with factors that are finite."""
    if kind == "int8":
        return tuple(map(np.asarray, weight_of(kind, rows, columns).planes))
    rng, form = np.random.default_rng(seed), KINDS[kind]
    blocks = rng.integers(0, 256, (rows, columns // form.block, BYTES[kind]), dtype=np.uint8)
    found = split(blocks, form.planes)
    return tuple(rng.normal(0, 0.1, p.shape).astype(p.dtype) if p.dtype == np.float16 else p for p in found)


def weight_of(kind: str, rows: int = 40, columns: int = 512) -> QuantizedWeight:
    if kind in BYTES:
        return QuantizedWeight(tuple(map(jnp.asarray, random_planes(kind, rows, columns))), kind, "float32")
    return quantized(jnp.asarray(np.random.default_rng(1).normal(0, 0.05, (rows, columns)), jnp.float32), kind)


@pytest.fixture
def by_xla(monkeypatch):
    monkeypatch.setenv("LLAMA_JAX_NATIVE", "off")


@pytest.mark.parametrize("kind", BYTES)
def test_blocks_stand_for_the_numbers_that_the_gguf_package_says(kind):
    gguf = pytest.importorskip("gguf")
    planes = random_planes(kind, 6, 768)
    blocks = join(planes, KINDS[kind])
    wanted = gguf.quants.dequantize(blocks.reshape(6, -1), gguf.GGMLQuantizationType[kind.upper()])
    np.testing.assert_array_equal(KINDS[kind].decode(*planes), wanted)
    for plane, again in zip(planes, split(blocks, KINDS[kind].planes), strict=True):
        np.testing.assert_array_equal(plane, again)


@pytest.mark.parametrize("kind", MADE)
def test_quantised_by_the_nearest_numbers(kind):
    matrix = np.random.default_rng(0).normal(0, 1, (8, 256)).astype(np.float32)
    form = KINDS[kind]
    found = form.decode(*form.encode(matrix))
    groups = matrix.reshape(8, -1, 256 if kind == "int8" else form.block)
    largest = np.abs(groups).max(-1, keepdims=True)
    # Half a step, of a factor that is rounded itself; and of 4 bits one whole step at the end that has one integer fewer.
    step = largest / 127 * 0.6 if form.bits > 7 else largest / 8 * 1.01
    assert (np.abs(found.reshape(groups.shape) - groups) <= step).all()
    np.testing.assert_array_equal(form.decode(*form.encode(np.zeros((2, 256), np.float32))), 0)


@pytest.mark.parametrize("tokens", [1, 3, 40])
@pytest.mark.parametrize("kind", KINDS)
def test_matmul_and_its_derivative_are_those_of_the_numbers(kind, tokens, by_xla, monkeypatch):
    monkeypatch.setattr(room, "CHUNK", 1 << 12)  # several parts, of which the last has rows too many
    weight = weight_of(kind, rows=37)
    x = jnp.asarray(np.random.default_rng(2).normal(0, 1, (2, tokens, 512)), jnp.float32)
    dense = jnp.asarray(weight.decoded())

    def loss(project):
        return lambda x: jnp.sum(jnp.sin(project(x) / scale))

    scale = float(jnp.abs(dense).max()) * 10

    found, gradient = jax.jit(jax.value_and_grad(loss(lambda x: ops.project(x, weight))))(x)
    wanted, its_gradient = jax.jit(jax.value_and_grad(loss(lambda x: jnp.tensordot(x, dense, axes=((-1,), (-1,))))))(x)
    # Of int8 a CPU makes two integers of each entry of x, wrong by 1.6e-5 of the largest.
    np.testing.assert_allclose(found, wanted, rtol=1e-3, atol=5e-3)
    np.testing.assert_allclose(gradient, its_gradient, atol=2e-3 * float(jnp.abs(its_gradient).max()))


def test_several_axes_of_outputs_and_of_bfloat16():
    matrix = jnp.asarray(np.random.default_rng(0).normal(0, 0.1, (2, 3, 4, 256)), jnp.bfloat16)
    for kind in MADE:
        weight = quantized(matrix, kind)
        assert (weight.shape, weight.ndim, weight.dtype) == (matrix.shape, 4, jnp.bfloat16)
        x = jnp.asarray(np.random.default_rng(1).normal(0, 1, (5, 256)), jnp.bfloat16)
        found = ops.project(x, weight)
        assert (found.shape, found.dtype) == ((5, 2, 3, 4), jnp.bfloat16)
        wanted = jnp.tensordot(x.astype(jnp.float32), weight.decoded().astype(jnp.float32), axes=((-1,), (-1,)))
        np.testing.assert_allclose(found.astype(jnp.float32), wanted, atol=0.03 * float(jnp.abs(wanted).max()))


def test_rows_are_looked_up():
    ids = jnp.asarray([[3, 0], [7, 3]])
    for kind in KINDS:
        table = weight_of(kind)
        np.testing.assert_allclose(ops.look_up(table, ids), jnp.asarray(table.decoded())[ids], rtol=1e-6)
    assert ops.look_up(jnp.arange(8.0).reshape(4, 2), ids[:, 1]).shape == (2, 2)


def test_parts_of_different_kinds_side_by_side():
    rng = np.random.default_rng(0)
    parts = [jnp.asarray(rng.normal(0, 0.1, (2, wide, 4, 256)), jnp.float32) for wide in (3, 1, 1)]
    joined = JoinedWeight((quantized(parts[0], "q4_0"), quantized(parts[1], "q8_0"), parts[2]))
    x = jnp.asarray(rng.normal(0, 1, (5, 256)), jnp.float32)
    wanted = jnp.tensordot(x, jnp.asarray(joined.decoded()), axes=((-1,), (-1,)))
    assert joined.shape == (2, 5, 4, 256)
    np.testing.assert_allclose(ops.project(x, joined), wanted, atol=0.02 * float(jnp.abs(wanted).max()))


# --- the kernel for CPUs ---------------------------------------------------------------------------------------------------


WIDTHS = [
    (kind, columns) for kind in native.KINDS for columns in (256, 768, 32, 96, 303) if columns % KINDS[kind].block == 0
]
TOKENS = (1, 2, 5, 12, 40)  # by rows, and in one, two and more panels


def check_integers(kind: str, columns: int, tokens: int) -> None:
    """Of entries that are integers times the factor of their group nothing is rounded but the sums."""
    planes = random_planes(kind, 70, columns)
    rng = np.random.default_rng(3)
    group = columns if kind == "int8" else 32
    x = rng.integers(-127, 128, (tokens, columns // group, group)).astype(np.float32)
    x[..., 0] = 127
    x = (x * rng.uniform(0.01, 0.02, (tokens, columns // group, 1)).astype(np.float32)).reshape(tokens, columns)
    found = jax.jit(lambda x, planes: native.multiply(x, planes, kind))(x, tuple(map(jnp.asarray, planes)))
    wanted = x.astype(np.float64) @ KINDS[kind].decode(*planes).astype(np.float64).T
    np.testing.assert_allclose(found, wanted, atol=2e-6 * np.abs(wanted).max())


@needs_compiler
@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize(("kind", "columns"), WIDTHS)
def test_the_native_kernel_multiplies_integers_exactly(kind, columns, tokens):
    check_integers(kind, columns, tokens)


@needs_compiler
@pytest.mark.slow
@pytest.mark.skipif(platform.machine() != "x86_64", reason="other processors have one kernel")
@pytest.mark.parametrize("level", ["x86-64-v3", "x86-64-v2"])
def test_the_native_kernel_of_lesser_processors(level, monkeypatch):
    """With AVX2, and with neither AVX2 nor VNNI."""
    monkeypatch.setattr(native, "FLAGS", tuple(flag.replace("native", level) for flag in native.FLAGS))
    monkeypatch.setattr(native, "TARGET", f"{native.TARGET}_{level}")
    assert native._register.__wrapped__()
    for kind, columns in WIDTHS:
        for tokens in TOKENS:
            check_integers(kind, columns, tokens)


@needs_compiler
@pytest.mark.parametrize("tokens", [2, 20])
@pytest.mark.parametrize(("kind", "error"), [("q4_0", 0.02), ("int8", 6e-5)])
def test_the_native_kernel_rounds_tokens_and_keeps_what_is_not_a_number(kind, error, tokens):
    weight = weight_of(kind, rows=200)
    x = np.random.default_rng(0).normal(0, 1, (tokens, 512)).astype(np.float32)
    wanted = x @ np.asarray(weight.decoded()).T
    found = np.asarray(native.multiply(jnp.asarray(x), weight.planes, kind))
    assert 0 < np.abs(found - wanted).max() < error * np.abs(wanted).max()
    for bad in (np.nan, np.inf):
        x[1, 40] = bad
        found = np.asarray(native.multiply(jnp.asarray(x), weight.planes, kind))
        assert not np.isfinite(found[1]).any()
        assert np.isfinite(np.delete(found, 1, axis=0)).all()


@needs_compiler
def test_the_native_kernel_takes_no_tokens_and_batches_of_them():
    weight = weight_of("int8")
    assert native.multiply(jnp.zeros((0, 512)), weight.planes, "int8").shape == (0, 40)
    x = jnp.asarray(np.random.default_rng(0).normal(0, 1, (3, 2, 512)), jnp.float32)
    found = jax.vmap(lambda x: ops.project(x, weight))(x)
    np.testing.assert_allclose(found, ops.project(x, weight), rtol=1e-6, atol=1e-6)


@needs_compiler
def test_int8_takes_the_native_kernel_where_there_is_one(monkeypatch):
    weight, x = weight_of("int8"), jnp.ones((1, 512))

    def program() -> str:
        return jax.jit(lambda x: ops.project(x, weight)).lower(x).as_text()

    assert native.TARGET in program()
    monkeypatch.setenv("LLAMA_JAX_NATIVE", "off")
    jax.clear_caches()
    assert native.TARGET not in program()


def test_without_a_compiler_xla_computes_and_says_so_once(monkeypatch, caplog, tmp_path):
    monkeypatch.setattr(native, "_register", native._register.__wrapped__)
    monkeypatch.setenv("CXX", "")
    monkeypatch.setenv("PATH", str(tmp_path))
    weight = weight_of("q4_0")
    with caplog.at_level(logging.WARNING, "llama_jax.native"):
        assert not native.usable()
        x = jnp.ones((1, 512))
        np.testing.assert_allclose(ops.project(x, weight), x @ jnp.asarray(weight.decoded()).T, rtol=1e-5)
    assert "multiplied by XLA, slower: no native kernel (no C++ compiler was found" in caplog.text


def test_a_compiler_that_fails_is_no_crash(monkeypatch, caplog, tmp_path):
    monkeypatch.setattr(native, "_register", native._register.__wrapped__)
    monkeypatch.setattr(native.platformdirs, "user_cache_dir", lambda name: str(tmp_path))
    compiler = tmp_path / "broken"
    compiler.write_text(
        '#!/bin/sh\n[ "$1" = --version ] && echo 1 && exit 0\necho "blocks.cc: error: no such luck" >&2\nexit 1\n'
    )
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    with caplog.at_level(logging.WARNING, "llama_jax.native"):
        assert not native.usable()
    assert "error: no such luck" in caplog.text
    assert not (tmp_path / "native").exists()


# --- what is compiled ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_no_dense_copy_is_made(kind, by_xla):
    """Of a weight of 4,096 x 1,024 numbers, 4 MB in int8, a loop of tokens needs less than its own bytes beside."""
    weight = weight_of(kind, rows=4096, columns=1024)

    def tokens(x, weight):
        def step(x, _):
            return jnp.tanh(ops.project(x, weight)[:, :1024]), None

        return jax.lax.scan(step, x, length=4)[0]

    compiled = jax.jit(tokens).lower(jnp.ones((1, 1024)), weight).compile()
    dense = 4096 * 1024 * 4
    limit = 4096 * 1024 if kind == "int8" else dense // 2
    assert compiled.memory_analysis().temp_size_in_bytes < limit
