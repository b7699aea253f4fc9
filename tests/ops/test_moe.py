"""Experts in groups beside all experts, JAX's own grouped matmul and the definition; what is computed, counted."""

from functools import partial

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from test_quantized_weights import random_planes

from llama_jax import ops
from llama_jax.ops import grouped, moe
from llama_jax.ops.cpu import native
from llama_jax.ops.moe import Routing, mixture_of_experts
from llama_jax.ops.platform import KernelOptions, target_platform
from llama_jax.ops.weights.quantized_matmul import QuantizedWeight, quantize_matrix

DIM, HIDDEN = 16, 24


def operands(rng, tokens, experts, dim=DIM, hidden=HIDDEN, dtype=np.float32):
    shapes = (tokens, dim), (experts, dim), (experts, hidden, dim), (experts, hidden, dim), (experts, dim, hidden)
    return tuple(jax.device_put((0.5 * rng.normal(size=shape)).astype(dtype)) for shape in shapes)


@partial(jax.jit, static_argnames="routing")
def chosen(*operands, routing):
    return mixture_of_experts(*operands, routing=routing)


@partial(jax.jit, static_argnames="routing")
def every(x, router, *matrices, routing):
    """The oracle."""
    weights, numbers = moe.route(x, router, routing)
    return moe.all_experts(x, weights, numbers, *matrices)


def gradients(function, operands, routing):
    loss = lambda *operands: jnp.sum(jnp.sin(function(*operands, routing=routing).astype(jnp.float32)))
    return jax.jit(jax.grad(loss, argnums=tuple(range(len(operands)))))(*operands)


def close(found, wanted, tolerance):
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_allclose(*(np.asarray(x, np.float64) for x in (a, b)), atol=tolerance * max(1, np.abs(b).max()))


SIZES = st.lists(st.sampled_from([0, 0, 1, 2, 5, 17, 40]), min_size=1, max_size=6).filter(any)


def assert_grouped(sizes, seed, dtype=np.float32, tolerance=1e-5):
    """The product, and the gradients of both arrays, are those of `lax.ragged_dot`."""
    rng = np.random.default_rng(seed)
    x, weight, out = (
        jax.device_put(rng.normal(size=shape).astype(dtype))
        for shape in ((sum(sizes), DIM), (len(sizes), HIDDEN, DIM), (sum(sizes), HIDDEN))
    )
    counts = jax.device_put(np.asarray(sizes, np.int32))
    own = lambda x, weight: grouped.grouped_matmul(x, weight, counts)
    theirs = lambda x, weight: jax.lax.ragged_dot(x, weight.swapaxes(1, 2), counts)
    found, wanted = (jax.jit(lambda f=f: (f(x, weight), jax.vjp(f, x, weight)[1](out)))() for f in (own, theirs))
    close(found, wanted, tolerance)


@pytest.mark.parametrize("sizes", [[5, 0, 40, 1], [0, 17]], ids=str)
def test_groups_of_some_sizes(sizes):
    assert_grouped(sizes, 0)


@pytest.mark.slow
@hypothesis.given(SIZES, st.integers(0, 99))
def test_groups_of_all_sizes(sizes, seed):
    assert_grouped(sizes, seed)


@pytest.mark.slow
@pytest.mark.parametrize("platform", ["gpu", "accelerator"])
@pytest.mark.parametrize("sizes", [[0, 1, 0, 2], [3, 0, 90], [300, 5, 0, 700]], ids=str)
def test_so_they_are_in_the_form_for_other_platforms(platform, sizes):
    with target_platform(platform):
        assert_grouped(sizes, 0)


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [[0, 1, 0, 2], [3, 0, 90], [300, 5, 0, 700]], ids=str)
def test_the_kernel_of_tpus(sizes, monkeypatch):
    monkeypatch.setattr(grouped, "_by_loop", lambda *args: grouped._by_kernel(*args[:-1], interpret=True))
    assert_grouped(sizes, 0)


def assert_as_all(tokens, counts, normalized, seed):
    experts, per_token = counts
    routing = Routing(per_token, normalized)
    case = operands(np.random.default_rng(seed), tokens, experts)
    close(chosen(*case, routing=routing), every(*case, routing=routing), 1e-5)


@pytest.mark.parametrize(("tokens", "counts", "normalized"), [(1, (9, 3), True), (70, (5, 5), False)])
def test_they_are_all_experts_with_weights_of_zero(tokens, counts, normalized):
    assert_as_all(tokens, counts, normalized, 0)


@pytest.mark.slow
@hypothesis.given(
    st.integers(1, 70), st.sampled_from([(1, 1), (4, 1), (4, 2), (5, 5), (9, 3)]), st.booleans(), st.integers(0, 99)
)
def test_so_they_are_in_any_number(tokens, counts, normalized, seed):
    assert_as_all(tokens, counts, normalized, seed)


@pytest.mark.parametrize("favorite", [pytest.param(None, marks=pytest.mark.slow), 2])
def test_gradients(favorite):
    """Also of experts that nobody chooses: zeros."""
    x, router, *matrices = operands(np.random.default_rng(0), 90, 4)
    if favorite is not None:  # one that all choose, and one that nobody does
        x = jnp.abs(x)
        router = router.at[favorite].set(3.0).at[0].set(-3.0)
    case, routing = (x, router, *matrices), Routing(2)
    found = gradients(chosen, case, routing)
    close(found, gradients(every, case, routing), 1e-5)
    if favorite is not None:
        assert all(not np.any(gradient[0]) for gradient in found[2:])


@pytest.mark.parametrize("per_token", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_sigmoids_of_scores_multiply_what_experts_are_given(per_token):
    x, router, gate, up, down = map(np.asarray, operands(np.random.default_rng(4), 7, 3))
    want = np.zeros_like(x)
    for t in range(7):
        scores = router @ x[t]
        for e in np.argsort(scores)[-per_token:]:
            given = x[t] / (1 + np.exp(-scores[e]))
            gates = gate[e] @ given
            want[t] += down[e] @ (gates / (1 + np.exp(-gates)) * (up[e] @ given))
    routing = Routing(per_token, scale_inputs=True)
    np.testing.assert_allclose(chosen(x, router, gate, up, down, routing=routing), want, atol=1e-5)
    x = jnp.asarray(x)
    weights, numbers = moe.route(x, jnp.asarray(router), routing)
    np.testing.assert_allclose(moe.all_experts(x, weights, numbers, gate, up, down, scale_inputs=True), want, atol=1e-5)


def test_ties_are_broken_alike():
    x, _, *matrices = operands(np.random.default_rng(0), 9, 4)
    case, routing = (x, jnp.zeros((4, DIM)), *matrices), Routing(2)
    close(chosen(*case, routing=routing), every(*case, routing=routing), 1e-6)


@pytest.mark.parametrize(
    "dtypes",
    [
        pytest.param((jnp.bfloat16, jnp.bfloat16), marks=(pytest.mark.slow, pytest.mark.rotating)),
        (jnp.bfloat16, jnp.float32),
    ],
    ids=["short", "mixed"],
)
def test_16_bits(dtypes):
    """As near to float32 as all experts are, which round in other places; a mixed gradient is one of the weight's dtype."""
    rng, routing = np.random.default_rng(0), Routing(2)
    exact = operands(rng, 64, 4)
    x, router, *matrices = exact
    rounded = [x.astype(dtypes[0]), *(a.astype(dtypes[1]) for a in (router, *matrices))]
    wanted = gradients(every, [a.astype(jnp.float32) for a in (rounded[0].astype(jnp.float32), *rounded[1:])], routing)
    for own, theirs, right in zip(
        gradients(chosen, rounded, routing), gradients(every, rounded, routing), wanted, strict=True
    ):
        assert own.dtype == theirs.dtype
        mine, other = (np.linalg.norm(np.asarray(a, np.float32) - right) for a in (own, theirs))
        assert mine <= 1.5 * other + 1e-3 * np.linalg.norm(right)


@pytest.mark.slow
@pytest.mark.rotating
def test_derivatives_in_forward_mode_and_of_gradients():
    with jax.enable_x64(True):
        rng, routing = np.random.default_rng(1), Routing(2, normalized=False)
        case, along = (operands(rng, 12, 4, dtype=np.float64) for _ in range(2))
        for function in (partial(chosen, routing=routing), lambda *args: gradients(partial(chosen), args, routing)):
            oracle = partial(every, routing=routing)
            if isinstance(function, partial):
                wanted = jax.jvp(oracle, case, along)
            else:
                wanted = jax.jvp(lambda *args: gradients(every, args, routing), case, along)
            close(jax.jvp(function, case, along), wanted, 1e-6)


def test_a_batch_is_mapped():
    routing, case = Routing(2), operands(np.random.default_rng(2), 6, 4)
    x = jnp.stack([case[0], case[0][::-1]])
    found = jax.jit(jax.vmap(lambda x: chosen(x, *case[1:], routing=routing)))(x)
    close(found, jnp.stack([chosen(row, *case[1:], routing=routing) for row in x]), 1e-6)


@pytest.mark.parametrize(
    "kind", ["q4_0", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("int8", "q8_0", "nf4", "int4", "fp8"))]
)
@pytest.mark.parametrize("tokens", [pytest.param(1, marks=pytest.mark.slow), 40])
def test_quantized(kind, tokens):
    rng, routing = np.random.default_rng(3), Routing(2)
    x, router, *matrices = operands(rng, tokens, 4, 64, 128)
    case = x, router, *(quantize_matrix(matrix, kind) for matrix in matrices)
    close(chosen(*case, routing=routing), every(*case, routing=routing), 2e-5)
    of_x = [jax.jit(jax.grad(lambda x, f=f: jnp.sum(jnp.sin(f(x, *case[1:], routing=routing)))))(x) for f in (chosen, every)]
    close(*of_x, 2e-5)


@pytest.mark.skipif(native.compiler() is None, reason="needs a C++ compiler")
@pytest.mark.parametrize(
    ("tokens", "dtype"),
    [
        *((1, jnp.bfloat16), (5, jnp.float32)),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in ((1, jnp.float32), (5, jnp.bfloat16))),
    ],
)
def test_natively(dtype, tokens):
    """Few rows of each expert, whose matrix is read where it lies."""
    rng, routing = np.random.default_rng(4), Routing(2)
    case = tuple(a.astype(dtype) for a in operands(rng, tokens, 4, 256, 256))
    compute = partial(mixture_of_experts, routing=routing, kernels=KernelOptions(native_code=True))
    program = jax.jit(compute).lower(*case)
    assert "llama_jax_floats_" in program.as_text()
    found = program.compile()(*case)
    wanted = every(*(a.astype(jnp.float32) for a in case), routing=routing)
    assert np.linalg.norm(found - wanted) <= (1e-5 if dtype == jnp.float32 else 2e-2) * np.linalg.norm(wanted)


def computed(sizes, mode, monkeypatch):
    """Rows that the loop multiplies with a matrix, for groups of these sizes, run by Python."""
    rows = []
    multiply, outer = grouped.multiply_group, grouped.weight_gradient
    monkeypatch.setattr(
        grouped, "multiply_group", lambda x, *more, **options: rows.append(len(x)) or multiply(x, *more, **options)
    )
    monkeypatch.setattr(grouped, "weight_gradient", lambda a, *more: rows.append(len(a)) or outer(a, *more))
    with jax.disable_jit():
        x, sizes = np.zeros((sum(sizes), 2), np.float32), np.asarray(sizes, np.int32)
        other = x if mode == "outer" else np.zeros((len(sizes), 2, 2), np.float32)
        grouped._by_loop(mode, jnp.asarray(x), jnp.asarray(other), jnp.asarray(sizes), jnp.float32, KernelOptions())
    return sum(rows)


@pytest.mark.parametrize("mode", ["rows", "outer"])
@pytest.mark.parametrize(
    ("tokens", "experts", "per_token"),
    [
        *((1, 8, 2), (100, 8, 2)),
        *(pytest.param(*sizes, marks=pytest.mark.slow) for sizes in ((1024, 8, 2), (4096, 8, 2), (2048, 64, 8))),
    ],
)
def test_what_is_computed_is_a_tenth_more_than_the_chosen_experts_at_most(tokens, experts, per_token, mode, monkeypatch):
    """All experts would be experts / per_token times as much."""
    scores = np.random.default_rng(tokens).normal(size=(tokens, experts))
    sizes = np.bincount(np.argsort(scores, axis=1)[:, -per_token:].reshape(-1), minlength=experts)
    assert tokens * per_token <= computed(sizes, mode, monkeypatch) <= 1.1 * tokens * per_token


def test_no_product_is_made_of_all_rows_and_experts():
    """In the compiled program, whose loops multiply a block by one expert's matrix."""
    case = operands(np.random.default_rng(0), 512, 8)
    program = jax.jit(partial(mixture_of_experts, routing=Routing(2))).lower(*case).compile().as_text()
    assert f"[8,{HIDDEN},{DIM}]" in program
    assert f"[1024,{8 * HIDDEN}]" not in program
    assert f"[8,1024,{HIDDEN}]" not in program


@pytest.mark.slow
def test_on_each_device():
    """Under `jax.pmap`, and under a `jax.shard_map` that checks what varies over devices."""
    x, *rest = operands(np.random.default_rng(5), 40, 4)
    loss = lambda x, *rest: jnp.sum(jnp.sin(mixture_of_experts(x, *rest, routing=Routing(2))))
    wanted = jax.jit(jax.grad(loss, argnums=(1, 2, 3, 4)))(x, *rest)
    mapped = jax.pmap(
        lambda x, *rest: jax.lax.psum(jax.grad(loss, argnums=(1, 2, 3, 4))(x, *rest), "d"),
        axis_name="d",
        in_axes=(0, *[None] * 4),
    )
    close([a[0] for a in mapped(x.reshape(4, 10, DIM), *rest)], list(wanted), 1e-5)
    mesh = jax.make_mesh((4,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    total = jax.shard_map(
        lambda x, *rest: jax.lax.psum(loss(x, *rest), "d"), mesh=mesh, in_specs=(P("d"), *[P()] * 4), out_specs=P()
    )
    close(jax.jit(jax.grad(total, argnums=(1, 2, 3, 4)))(x, *rest), wanted, 1e-5)


@pytest.mark.skipif(native.compiler() is None, reason="needs a C++ compiler")
@pytest.mark.parametrize(
    "kind", [kind if kind == "q4_k" else pytest.param(kind, marks=pytest.mark.slow) for kind in native.NATIVE_FORMATS]
)
def test_every_kind_is_read_where_it_lies(kind):
    """Bit for bit as each group's weight by itself."""
    planes = [random_planes(kind, 40, 512, seed) for seed in range(4)]
    weight_of = lambda planes: QuantizedWeight(tuple(map(jax.device_put, planes)), kind, "float32")
    x = jax.device_put(np.random.default_rng(0).normal(size=(9, 512)).astype(np.float32))
    sizes = np.array([2, 0, 6, 1], np.int32)
    program = jax.jit(grouped.grouped_matmul).lower(x, weight_of(map(np.stack, zip(*planes, strict=True))), sizes)
    assert f"llama_jax_quantized_{kind}" in program.as_text()
    found = program.compile()(x, weight_of(map(np.stack, zip(*planes, strict=True))), sizes)
    rows = np.split(np.asarray(x), np.cumsum(sizes)[:-1])
    wanted = [ops.project(jnp.asarray(part), weight_of(own)) for own, part in zip(planes, rows, strict=True) if len(part)]
    np.testing.assert_array_equal(found, np.concatenate(wanted))
