"""Weights in fewer bits: their numbers, their matmuls on every way, and that nothing dense is made of them."""

import logging
import platform
from functools import cache, partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from test_paged_attention import CASES, check, natively

from llama_jax import ops
from llama_jax.ops.cpu import native
from llama_jax.ops.platform import KernelOptions, target_platform
from llama_jax.ops.weights import device_layout, nf4
from llama_jax.ops.weights import quantized_matmul as matmul_module
from llama_jax.ops.weights.format_spec import planes_from_blocks
from llama_jax.ops.weights.formats import QUANT_FORMATS
from llama_jax.ops.weights.quantized_matmul import JoinedWeight, QuantizedWeight, quantize_matrix, shardings_of_planes

GOLDENS = Path(__file__).parents[1] / "goldens"
OF_GGUF = [name for name, form in QUANT_FORMATS.items() if form.is_gguf]
MADE = [name for name, form in QUANT_FORMATS.items() if form.encode is not None]
COMMON = {"int8", "int4", "nf4", "q4_k"}
needs_compiler = pytest.mark.skipif(native.compiler() is None, reason="no C++ compiler here")


def random_planes(kind: str, rows: int, columns: int, seed: int = 0) -> tuple[np.ndarray, ...]:
    """Random bytes, with factors that are finite."""
    if kind == "int8":
        return tuple(map(np.asarray, weight_of(kind, rows, columns).planes))
    rng, form = np.random.default_rng(seed), QUANT_FORMATS[kind]
    if not form.is_gguf:

        def plane(shape, dtype):
            if jnp.issubdtype(dtype, jnp.floating):
                return rng.normal(0, 0.1, shape).astype(dtype)
            low, high = (-8, 8) if dtype == np.int8 else (0, 256)
            return rng.integers(low, high, shape).astype(dtype)

        return tuple(plane(*each.packed_shape((rows, columns))) for each in form.planes)
    size = form.bytes_of_row(form.block)
    found = planes_from_blocks(rng.integers(0, 256, (rows, columns // form.block, size), dtype=np.uint8), form.planes)
    if kind == "mxfp4":  # whose factors are powers of two
        return rng.integers(120, 127, found[0].shape, np.uint8), found[1]
    return tuple(rng.normal(0, 0.1, p.shape).astype(p.dtype) if p.dtype == np.float16 else p for p in found)


@cache
def weight_of(kind: str, rows: int = 40, columns: int = 512) -> QuantizedWeight:
    if kind not in MADE:
        return QuantizedWeight(tuple(map(jax.device_put, random_planes(kind, rows, columns))), kind, "float32")
    matrix = np.asarray(np.random.default_rng(1).normal(0, 0.05, (rows, columns)), np.float32)
    return quantize_matrix(jax.device_put(matrix), kind)


def numbers(weight: QuantizedWeight) -> np.ndarray:
    """What it stands for, by NumPy: `decoded` would compile each operation."""
    return weight.form.decode(*map(np.asarray, weight.planes))


@pytest.fixture
def by_xla(monkeypatch):
    monkeypatch.setenv("LLAMA_JAX_NATIVE", "off")


# How far a number may be from what stands for it, in parts of the largest of its group: half a step, of a factor that is
# rounded itself; of int4 one whole step at the end that has one integer fewer; of fp8 half of 1/8 of the number; of nf4 half
# of the widest gap, 0.3, and the factor's own error in 8 bits.
FURTHEST = {"int8": 0.6 / 127, "q8_0": 0.6 / 127, "q4_0": 1.01 / 8, "fp8": 1 / 16, "nf4": 0.18}


@pytest.mark.parametrize("kind", MADE)
def test_quantized_by_the_nearest_numbers(kind):
    matrix = np.random.default_rng(0).normal(0, 1, (8, 256)).astype(np.float32)
    form = QUANT_FORMATS[kind]
    found = form.decode(*form.encode(matrix))
    groups = matrix.reshape(8, -1, 256 if form.block == 1 else form.block)
    largest = np.abs(groups).max(-1, keepdims=True)
    assert (np.abs(found.reshape(groups.shape) - groups) <= largest * FURTHEST.get(kind, 1.01 / 8)).all()
    np.testing.assert_array_equal(form.decode(*form.encode(np.zeros((2, 256), np.float32))), 0)


def test_nf4_is_bit_for_bit_that_of_bitsandbytes():
    """Of its version 0.50.2, which quantized the matrix with blocks of 64 and their factors twice."""
    with np.load(GOLDENS / "nf4.npz") as golden:
        values, absmax = nf4._encode_values(golden["matrix"])
        np.testing.assert_array_equal(values.reshape(-1), golden["weight"])
        np.testing.assert_array_equal(nf4.SINGLE.decode(values, absmax), golden["single"])
        np.testing.assert_array_equal(nf4.NF4, golden["quant_map"])
        np.testing.assert_array_equal(nf4.DYNAMIC, golden["nested_quant_map"])
        nested = np.repeat(golden["nested_absmax"], 256)[: absmax.size]
        offset = np.float32(golden["nested_offset"])
        factors = (nf4.DYNAMIC[golden["absmax"]] * nested + offset).reshape(absmax.shape)
        np.testing.assert_array_equal(nf4.SINGLE.decode(values, factors), golden["double"])
        ours = nf4._nearest(nf4.DYNAMIC, (absmax.reshape(-1) - offset) / nested)
        np.testing.assert_array_equal(ours, golden["absmax"])


@pytest.mark.parametrize("kind", QUANT_FORMATS)
def test_numbers_are_the_same_by_jax(kind):
    weight = weight_of(kind)
    # Absolute too: of scale times number plus offset, near zero, XLA may round once where NumPy rounds twice.
    np.testing.assert_allclose(jax.jit(QuantizedWeight.to_dense)(weight), numbers(weight), rtol=1e-6, atol=1e-6)


def held_by(platform: str, weight: QuantizedWeight, monkeypatch) -> QuantizedWeight:
    """As devices of a platform hold it, on a CPU."""
    monkeypatch.setattr(device_layout, "platform_of", lambda sharding: platform)
    return weight.to_device_layout()


@pytest.mark.parametrize(
    ("kind", "tokens"),
    [
        *(("int8", 40), ("int4", 1), ("nf4", 40), ("q4_k", 1)),
        *(pytest.param(kind, 40 if kind in ("int4", "q4_k") else 1, marks=pytest.mark.slow) for kind in QUANT_FORMATS),
        *(pytest.param(kind, 40, marks=pytest.mark.slow) for kind in QUANT_FORMATS if kind not in COMMON),
        *(pytest.param(kind, 3, marks=pytest.mark.nightly) for kind in QUANT_FORMATS),
    ],
)
def test_matmul_and_its_derivative_are_those_of_the_numbers(kind, tokens, by_xla, monkeypatch):
    monkeypatch.setattr(matmul_module, "DECODED_AT_ONCE", 1 << 12)  # several parts, of which the last has rows too many
    weight = weight_of(kind, rows=37)
    x = jax.device_put(np.asarray(np.random.default_rng(2).normal(0, 1, (2, tokens, 512)), np.float32))
    dense = numbers(weight).astype(np.float64)
    scale = np.abs(dense).max() * 10
    found, gradient = jax.jit(jax.value_and_grad(lambda x: jnp.sum(jnp.sin(ops.project(x, weight) / scale))))(x)
    angles = np.asarray(x, np.float64) @ dense.T / scale
    its_gradient = np.cos(angles) / scale @ dense
    # Of int8 a CPU makes two integers of each entry of x, wrong by 1.6e-5 of the largest.
    np.testing.assert_allclose(found, np.sin(angles).sum(), rtol=1e-3, atol=5e-3)
    np.testing.assert_allclose(gradient, its_gradient, atol=2e-3 * np.abs(its_gradient).max())


@pytest.mark.parametrize(
    "kind", [kind if kind in ("int8", "q4_k") else pytest.param(kind, marks=pytest.mark.slow) for kind in QUANT_FORMATS]
)
def test_planes_are_divided_over_a_mesh_as_their_matrix_is(kind, by_xla):
    """Factors lie where their numbers do, and the product is that of one device."""
    weight = weight_of(kind, rows=8, columns=1024)
    x = jax.device_put(np.asarray(np.random.default_rng(2).normal(0, 1, (3, 1024)), np.float32))

    @jax.jit
    def product_and_gradient(x, weight):
        product = lambda x: ops.project(x, weight)
        return product(x), jax.grad(lambda x: jnp.sum(product(x) ** 2))(x)

    wanted, alone = product_and_gradient(x, weight)
    mesh = jax.make_mesh((2, 2), ("rows", "columns"), axis_types=(AxisType.Auto,) * 2)
    places = shardings_of_planes(weight.form, NamedSharding(mesh, P("rows", "columns")), 2)
    there = weight.replace(planes=tuple(map(jax.device_put, weight.planes, places)))
    for plane, place, array in zip(weight.form.planes, places, there.planes, strict=True):
        parts = (2, 2) if plane.entries else (2,)
        held = tuple(size // by for size, by in zip(array.shape, (*parts, 1), strict=False))
        assert array.addressable_shards[0].data.shape[: len(held)] == held
        assert place.is_equivalent_to(array.sharding, array.ndim)
    with jax.set_mesh(mesh):
        found, gradient = product_and_gradient(x, there)
    np.testing.assert_allclose(found, wanted, atol=1e-4 * np.abs(wanted).max())
    np.testing.assert_allclose(gradient, alone, atol=1e-3 * np.abs(alone).max())


def test_rows_are_looked_up():
    ids = jnp.asarray([[3, 0], [7, 3]])
    for kind in QUANT_FORMATS:
        table = weight_of(kind)
        # Absolute too: of scale times number plus offset, near zero, XLA may round once where NumPy rounds twice.
        np.testing.assert_allclose(jax.jit(ops.embed)(table, ids), numbers(table)[ids], rtol=1e-6, atol=1e-6)
    assert ops.embed(jnp.arange(8.0).reshape(4, 2), ids[:, 1]).shape == (2, 2)


@pytest.mark.parametrize("kind", ["int8", "int4", "int4_asym", "fp8_128", "q8_0", "q4_k"])
@pytest.mark.parametrize("rows", [128, 40])
def test_rows_are_looked_up_on_a_tpu_by_whole_tiles(kind, rows, monkeypatch):
    """Of 8-bit numbers 32 rows lie together, of groups of 4-bit ones 64; a table that has a part of that at its end is taken
    from row by row."""
    table, ids = held_by("tpu", weight_of(kind, rows=rows), monkeypatch), jnp.asarray([[0, 39, 5], [31, 32, 7]])
    with target_platform("tpu"):
        found = jax.jit(ops.embed)(table, ids)
        program = str(jax.make_jaxpr(ops.embed)(table, ids))
        many = jnp.tile(ids, (20, 1))
        runs = jax.jit(lambda table, ids: ops.embed(table, ids))(table, many) if kind in ("int8", "int4") else None
    np.testing.assert_array_equal(found, jax.jit(lambda table, ids: ops.embed(table, ids))(table, ids))
    if runs is not None:
        np.testing.assert_array_equal(runs, np.tile(found, (20, 1, 1)))
    values = max(table.planes, key=lambda plane: (plane.dtype.itemsize == 1, plane.ndim, plane.shape[-1]))
    tile = 64 if kind.startswith("int4") else 32
    by_tiles = f"[2,3,4,{tile},128]" if values.ndim == 3 else f"[2,3,{tile},{values.shape[-1]}]"
    assert (by_tiles in program) == (rows == 128)


@pytest.mark.parametrize("platform", ["gpu", "tpu"])
@pytest.mark.parametrize("tokens", [1, 20, *(pytest.param(x, marks=pytest.mark.slow) for x in (2, 8, 70))])
@pytest.mark.parametrize("kind", ["int8", "int4", pytest.param("q4_0", marks=pytest.mark.slow)])
def test_as_accelerators_multiply(kind, tokens, platform, monkeypatch):
    """The forms for them, on a CPU: in float32 they give what the decoded numbers give."""
    weight = held_by(platform, weight_of(kind, rows=24), monkeypatch)
    x = jax.device_put(np.asarray(np.random.default_rng(2).normal(0, 1, (tokens, 512)), np.float32))
    with target_platform(platform):
        found = jax.jit(ops.project)(x, weight)
        program = str(jax.make_jaxpr(ops.project)(x, weight))
    assert found.shape == (tokens, 24)
    np.testing.assert_allclose(found, np.asarray(x) @ numbers(weight).T, rtol=1e-4, atol=1e-4)
    # A single row is no matter of a TPU's matrix unit.
    rows = 2 if (platform, tokens) == ("tpu", 1) else tokens
    assert f"f32[{rows},512]" in program
    apart = kind == "int4" and (tokens <= 64 if platform == "tpu" else 4 < tokens <= 16)
    assert (f"f32[4,{rows},24]" in program) == apart  # sums of its four groups


@pytest.mark.parametrize("kind", OF_GGUF)
def test_a_gpu_decodes_blocks_for_one_token_in_one_kernel(kind):
    """Without a loop over chunks, and with factors made for each number, as no other platform makes them."""
    weight = weight_of(kind)
    x = jax.device_put(np.asarray(np.random.default_rng(2).normal(0, 1, (1, 512)), np.float32))
    with target_platform("gpu"):
        found = jax.jit(ops.project)(x, weight)
        program = str(jax.make_jaxpr(ops.project)(x, weight))
    wanted = np.asarray(x, np.float64) @ numbers(weight).T.astype(np.float64)
    np.testing.assert_allclose(found, wanted, atol=1e-5 * np.abs(wanted).max())
    assert "while" not in program
    assert "scan" not in program


def test_parts_of_different_kinds_side_by_side():
    rng = np.random.default_rng(0)
    parts = [jax.device_put(np.asarray(rng.normal(0, 0.1, (2, wide, 4, 256)), np.float32)) for wide in (3, 1, 1)]
    joined = JoinedWeight((quantize_matrix(parts[0], "q4_0"), quantize_matrix(parts[1], "q8_0"), parts[2]))
    x = jax.device_put(np.asarray(rng.normal(0, 1, (5, 256)), np.float32))
    wanted = np.tensordot(x, jax.jit(JoinedWeight.to_dense)(joined), axes=((-1,), (-1,)))
    assert joined.shape == (2, 5, 4, 256)
    np.testing.assert_allclose(jax.jit(ops.project)(x, joined), wanted, atol=0.02 * np.abs(wanted).max())


# --- the kernel for CPUs ---------------------------------------------------------------------------------------------------


WIDTHS = [
    (kind, columns)
    for kind in native.NATIVE_FORMATS
    for columns in (256, 768, 32, 96, 303)
    if columns % QUANT_FORMATS[kind].block == 0
]
TOKENS = (1, 2, 5, 12, 40)  # by rows, and in one, two and more panels


def check_integers(kind: str, columns: int) -> None:
    """Of entries that are integers times the factor of their group nothing is rounded but the sums."""
    planes = random_planes(kind, 70, columns)
    rng = np.random.default_rng(3)
    group = columns if kind == "int8" else 32

    def entries(tokens):
        x = rng.integers(-127, 128, (tokens, columns // group, group)).astype(np.float32)
        x[..., 0] = 127
        return (x * rng.uniform(0.01, 0.02, (tokens, columns // group, 1)).astype(np.float32)).reshape(tokens, columns)

    each = {tokens: entries(tokens) for tokens in TOKENS}
    multiply = jax.jit(
        lambda each, planes: {tokens: native.multiply_quantized(x, planes, kind) for tokens, x in each.items()}
    )
    found = multiply(each, tuple(map(jax.device_put, planes)))
    for tokens, x in each.items():
        wanted = x.astype(np.float64) @ QUANT_FORMATS[kind].decode(*planes).astype(np.float64).T
        np.testing.assert_allclose(found[tokens], wanted, atol=2e-6 * np.abs(wanted).max(), err_msg=f"{tokens} tokens")


@needs_compiler
@pytest.mark.parametrize(
    ("kind", "columns"),
    [case if case[1] in (256, 32, 303) else pytest.param(*case, marks=pytest.mark.slow) for case in WIDTHS],
)
def test_the_native_kernel_multiplies_integers_exactly(kind, columns):
    check_integers(kind, columns)


def check_sums(found: jax.Array, x: jax.Array, weight: jax.Array) -> None:
    """A product is rounded as sums of floats are at most, in whatever order."""
    x, weight = np.asarray(x, np.float64), np.asarray(weight, np.float64)
    most = (x.shape[1] + 1) * 2.0**-24 * (np.abs(x) @ np.abs(weight).T)
    assert np.all(np.abs(np.asarray(found, np.float64) - x @ weight.T) <= most)


def check_floats(columns: int, dtype: str = "float32") -> None:
    """Weights of floats by few tokens and many: every token as if it were alone."""
    rng = np.random.default_rng(4)
    weight, x = (jnp.asarray(rng.normal(size=(rows, columns)), dtype) for rows in (70, 45))
    each = {tokens: x[:tokens] for tokens in (1, 2, 5, 6, 7, 12, 16, 30, 45)}
    multiply = jax.jit(lambda each, weight: {tokens: native.multiply_floats(x, weight) for tokens, x in each.items()})
    found = multiply(each, weight)
    check_sums(found[6], x[:6], weight)
    check_sums(found[45], x, weight)
    for tokens, rows in found.items():
        np.testing.assert_array_equal(rows, found[6 if tokens <= 6 else 45][:tokens], err_msg=f"{tokens} tokens")


@needs_compiler
@given(
    st.integers(1, 600), st.integers(1, 150), st.integers(1, 150), st.sampled_from(["float32", "bfloat16"]), st.booleans()
)
def test_the_native_kernel_multiplies_floats_of_any_shape(tokens, rows, columns, dtype, stacked):
    """And those of a stack; of infinities around the matrix it reads none."""
    rng = np.random.default_rng(tokens)
    x, weight = (jnp.asarray(rng.normal(size=(count, columns)), dtype) for count in (tokens, rows))
    around = jnp.full((rows, columns), jnp.inf, dtype)
    if stacked:
        found = jax.jit(native.multiply_floats)(x, jnp.stack([around, weight, around]), jnp.int32(1))
    else:
        found = jax.jit(native.multiply_floats)(x, weight)
    check_sums(found, x, weight)


@needs_compiler
@pytest.mark.parametrize(
    ("columns", "dtype"),
    [
        *((768, "float32"), (303, "bfloat16")),
        *(pytest.param(*x, marks=pytest.mark.slow) for x in ((768, "bfloat16"), (303, "float32"))),
        *(pytest.param(5, dtype, marks=pytest.mark.slow) for dtype in ("float32", "bfloat16")),
    ],
)
def test_the_native_kernel_multiplies_floats(columns, dtype):
    check_floats(columns, dtype)


EXACT_KINDS = [("float32", 303), ("bfloat16", 303), ("int8", 303), ("q4_0", 608), ("q4_k", 768), ("q6_k", 768)]


def check_exact(kind: str, columns: int) -> None:
    """A token has the same bits among any number of others, wherever it is, and they are near those of other kernels."""
    rng, rows, most = np.random.default_rng(6), 70, 480
    if kind in native.NATIVE_FORMATS:
        planes = tuple(map(jnp.asarray, random_planes(kind, rows, columns)))
        x, run = (
            jnp.asarray(rng.normal(size=(most, columns)), jnp.float32),
            partial(native.multiply_quantized, quant_format=kind),
        )
    else:
        planes = jnp.asarray(rng.normal(size=(rows, columns)), kind)
        x, run = jnp.asarray(rng.normal(size=(most, columns)), kind), native.multiply_floats
    each = {tokens: x[:tokens] for tokens in (*range(1, 41), most)}
    multiply = jax.jit(
        lambda each, planes, exact: jax.tree.map(lambda x: run(x, planes, exact=exact), each), static_argnums=2
    )
    found, reverse = multiply((each, x[::-1]), planes, True)
    for tokens, some in found.items():
        np.testing.assert_array_equal(some, found[most][:tokens], err_msg=f"{tokens} tokens")
    np.testing.assert_array_equal(reverse[::-1], found[most])
    usual = np.asarray(multiply({most: x}, planes, False)[most])
    np.testing.assert_allclose(found[most], usual, rtol=1e-4, atol=1e-4 * np.abs(usual).max())


@needs_compiler
@pytest.mark.parametrize(
    ("kind", "columns"),
    [
        case if case[0] == "q4_0" else pytest.param(*case, marks=(pytest.mark.slow, pytest.mark.rotating))
        for case in EXACT_KINDS
    ],
)
def test_exact_kernels_give_a_token_the_same_bits_among_any_number(kind, columns):
    check_exact(kind, columns)


@needs_compiler
def test_rows_of_floats_are_native_in_a_program_that_is_native_anyway():
    """And there alone; with the derivative of a matmul."""
    rng = np.random.default_rng(5)
    x, weight = rng.normal(size=(2, 3, 256)).astype(np.float32), rng.normal(0, 1 / 16, (300, 256)).astype(np.float32)

    def run(x, weight, native_code=True):
        return jnp.sum(jnp.sin(ops.project(x, weight, kernels=KernelOptions(native_code=native_code))))

    plainly = partial(run, native_code=False)
    assert "llama_jax_floats_" in jax.jit(run).lower(x, weight).as_text()
    many = jax.jit(run).lower(np.repeat(x, 6, axis=0), weight).as_text()
    assert ("llama_jax_floats_" in many) == native.has_tiles()
    ours, theirs = (jax.value_and_grad(function, (0, 1))(x, weight) for function in (run, plainly))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5), ours, theirs)
    assert "llama_jax_floats_" not in jax.jit(plainly).lower(x, weight).as_text()


@needs_compiler
@pytest.mark.slow
@pytest.mark.skipif(platform.machine() != "x86_64", reason="other processors have one kernel")
@pytest.mark.parametrize("level", ["cascadelake", "x86-64-v3", "x86-64-v2"])
def test_the_native_kernel_of_lesser_processors(level, monkeypatch):
    """With AVX-512 but no instruction for bfloat16, with AVX2, and with neither AVX2 nor VNNI."""
    if level == "cascadelake" and "avx512_vnni" not in native.processor().split():
        pytest.skip("this processor has no AVX-512")
    monkeypatch.setattr(native, "COMPILER_FLAGS", tuple(flag.replace("native", level) for flag in native.COMPILER_FLAGS))
    monkeypatch.setattr(native, "KERNEL_PREFIX", f"llama_jax_{level}_")
    monkeypatch.setattr(native, "_futures", {})
    usual = [name for name in native.LIBRARIES if not name.startswith("exact_")]
    native.prepare(usual)
    assert all(map(native.usable, usual))
    for kind, columns in WIDTHS:
        check_integers(kind, columns)
    for dtype in ("float32", "bfloat16"):
        check_floats(303, dtype)
    for case in CASES:
        check(natively, *case, jnp.float32)
    for kind, columns in EXACT_KINDS:
        check_exact(kind, columns)


@needs_compiler
@pytest.mark.parametrize("tokens", [2, 20])
@pytest.mark.parametrize(("kind", "error"), [("q4_0", 0.02), ("int8", 6e-5)])
def test_the_native_kernel_rounds_tokens_and_keeps_what_is_not_a_number(kind, error, tokens):
    weight = weight_of(kind, rows=200)
    x = np.random.default_rng(0).normal(0, 1, (tokens, 512)).astype(np.float32)
    multiply = jax.jit(lambda x: native.multiply_quantized(x, weight.planes, kind))
    wanted = x @ numbers(weight).T
    found = np.asarray(multiply(x))
    assert 0 < np.abs(found - wanted).max() < error * np.abs(wanted).max()
    for bad in (np.nan, np.inf):
        x[1, 40] = bad
        found = np.asarray(multiply(x))
        assert not np.isfinite(found[1]).any()
        assert np.isfinite(np.delete(found, 1, axis=0)).all()


def test_without_a_compiler_xla_computes_and_says_so_once(monkeypatch, caplog, tmp_path):
    monkeypatch.setattr(native, "_futures", {})
    monkeypatch.setattr(native, "_say_missing", cache(native._say_missing.__wrapped__))
    monkeypatch.setenv("CXX", "")
    monkeypatch.setenv("PATH", str(tmp_path))
    weight = weight_of("q4_0")
    with caplog.at_level(logging.WARNING, "llama_jax.native"):
        assert not native.usable("quantized_q4_0")
        x = np.ones((1, 512), np.float32)
        np.testing.assert_allclose(jax.jit(lambda x: ops.project(x, weight))(x), x @ numbers(weight).T, rtol=1e-5)
    assert "multiplied by XLA, slower: no native kernel (no C++ compiler was found" in caplog.text


def test_a_compiler_that_fails_is_no_crash(monkeypatch, caplog, tmp_path):
    monkeypatch.setattr(native, "_futures", {})
    monkeypatch.setattr(native, "_say_missing", cache(native._say_missing.__wrapped__))
    monkeypatch.setattr("platformdirs.user_cache_dir", lambda name: str(tmp_path))
    compiler = tmp_path / "broken"
    compiler.write_text(
        '#!/bin/sh\n[ "$1" = --version ] && printf "\\377 1" && exit 0\n'  # in some other encoding
        'echo "quantized.cc: error: no such luck" >&2\nexit 1\n'
    )
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    with caplog.at_level(logging.WARNING, "llama_jax.native"):
        assert not native.usable("quantized_q4_0")
    assert "error: no such luck" in caplog.text
    assert not (tmp_path / "native").exists()


# --- what is compiled ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "kind", [kind if kind in ("int8", "int4") else pytest.param(kind, marks=pytest.mark.slow) for kind in QUANT_FORMATS]
)
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
