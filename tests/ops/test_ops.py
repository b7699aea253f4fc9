"""Each operation against its definition in float64."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llama_jax import ops
from llama_jax.ops.attention import AttentionMask, KVView
from llama_jax.ops.platform import target_platform


def gradients(function, *arguments):
    """Of the sum of what `function` returns, each number weighted by chance."""

    def weighted(*arguments):
        out = function(*arguments)
        return jnp.sum(out * normal(99, *out.shape).astype(out.dtype))

    return jax.jit(jax.grad(weighted, argnums=tuple(range(len(arguments)))))(*arguments)


def precise_gradients(function, *arguments):
    """The same by JAX's own rules in float64."""
    with jax.enable_x64(True):
        wide = [jnp.asarray(a, np.float64) if np.issubdtype(np.asarray(a).dtype, np.floating) else a for a in arguments]
        return jax.tree.map(np.asarray, gradients(function, *wide))


def assert_close(found, expected, share):
    """Within a share of the largest number of each array."""
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_allclose(np.asarray(a, np.float64), b, rtol=0, atol=share * np.abs(b).max())


def rounded(*arrays):
    """Numbers that bfloat16 can hold, in bfloat16 and in float32."""
    short = [jnp.asarray(a, jnp.bfloat16) for a in arrays]
    return short, [np.asarray(a, np.float32) for a in short]


def normal(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


sizes = st.sampled_from([1, 5])  # few shapes: each compiles
seeds = st.integers(0, 10_000)


class TestLinear:
    @given(sizes, sizes, sizes, seeds)
    def test_is_a_product_with_each_row(self, batch, time, out, seed):
        x, w = normal(seed, batch, time, 6), normal(seed + 1, out, 2, 6)
        np.testing.assert_allclose(jax.jit(ops.project)(x, w), np.einsum("btd,ocd->btoc", x, w), rtol=1e-5, atol=1e-5)

    def test_accumulates_in_float32(self):
        x = jnp.full((1, 4096), 1 / 64, jnp.bfloat16)
        w = jnp.full((1, 4096), 1 / 64, jnp.bfloat16)
        assert ops.project(x, w) == 1.0  # a bfloat16 sum stops growing at 256 terms
        assert ops.project(x, w).dtype == jnp.bfloat16
        assert ops.project(x, w, out_dtype=jnp.float32).dtype == jnp.float32

    @pytest.mark.parametrize("out", [512, 2048])
    def test_leaves_no_copy_of_the_weight(self, out):
        """A weight of several axes must not be transposed into a copy: that cost half of the decoding speed."""
        weight = jax.ShapeDtypeStruct((out, 2, 256), jnp.float32)
        program = jax.jit(ops.project).lower(jax.ShapeDtypeStruct((1, 256), jnp.float32), weight).compile()
        assert program.memory_analysis().temp_size_in_bytes < out * 2 * 256

    def test_a_single_token_on_a_gpu(self):
        """By sums of products instead of a matmul, to the last bit of bfloat16; other rows and dtypes are matmuls."""
        short, wide = rounded(normal(0, 1, 1, 96), normal(1, 5, 2, 96))
        with target_platform("gpu"):
            program = lambda *operands: str(jax.make_jaxpr(lambda x, w: ops.project(x, w, out_dtype=jnp.float32))(*operands))
            assert "dot_general" not in program(*short)
            assert "dot_general" in program(jnp.repeat(short[0], 2, axis=1), short[1])
            assert "dot_general" in program(*wide)
            over_tokens = jax.vmap(lambda x, w: ops.project(x, w), in_axes=(0, None))
            assert "dot_general" in str(jax.make_jaxpr(over_tokens)(jnp.ones((7, 96), jnp.bfloat16), short[1]))
            found = jax.jit(ops.project)(*short)
            of_each = gradients(ops.project, *short)
        plain = lambda x, w: jnp.einsum("btd,fcd->btfc", x, w)
        assert found.dtype == jnp.bfloat16
        np.testing.assert_allclose(found.astype(jnp.float32), plain(*wide), rtol=0.005)
        assert_close(of_each, precise_gradients(plain, *wide), 0.02)

    @pytest.mark.parametrize("rows", [1, 7])
    def test_gradients_of_16_bit_operands(self, rows):
        short, wide = rounded(normal(0, rows, 6), normal(1, 5, 2, 6))
        found = gradients(ops.project, *short)
        assert [g.dtype for g in found] == [jnp.bfloat16] * 2
        assert_close(found, precise_gradients(lambda x, w: jnp.einsum("rd,fcd->rfc", x, w), *wide), 0.02)

    def test_gradients_of_16_bit_operands_are_summed_in_float32(self):
        x, w = jnp.ones((4096, 2), jnp.bfloat16), jnp.ones((3, 2), jnp.bfloat16)
        of_w = jax.grad(lambda w: jnp.sum(ops.project(x, w, out_dtype=jnp.float32)))(w)
        assert (of_w == 4096).all()  # a bfloat16 sum stops growing at 256


class TestNorm:
    @pytest.mark.parametrize(("dtype", "share"), [(jnp.float32, 1e-5), (jnp.bfloat16, 0.02)])
    def test_gradients(self, dtype, share):
        _, (x, w) = rounded(normal(0, 3, 4, 40), normal(1, 40))

        def plain(x, w):
            return x / jnp.sqrt(jnp.mean(x**2, -1, keepdims=True) + 0.1) * w

        found = gradients(lambda x, w: ops.rms_norm(x, w, 0.1), jnp.asarray(x, dtype), jnp.asarray(w, dtype))
        assert [g.dtype for g in found] == [dtype] * 2
        assert_close(found, precise_gradients(plain, x, w), share)

    @given(st.sampled_from([2, 40]), seeds, st.sampled_from([1e-6, 1e-5, 0.1]))
    def test_definition(self, dim, seed, eps):
        x, w = normal(seed, 3, dim), normal(seed + 1, dim)
        wide = x.astype(np.float64)
        want = wide / np.sqrt((wide**2).mean(-1, keepdims=True) + eps) * w
        np.testing.assert_allclose(ops.rms_norm(jnp.asarray(x), jnp.asarray(w), eps), want, rtol=1e-5, atol=1e-6)

    @pytest.mark.parametrize("before", [True, False])
    def test_rounds_before_the_weight_or_only_after_it(self, before):
        x, w = (jnp.asarray(normal(seed, 64), jnp.bfloat16) for seed in (0, 1))
        normed = x.astype(jnp.float32) * jax.lax.rsqrt(jnp.mean(x.astype(jnp.float32) ** 2) + 1e-5)
        normed = normed.astype(jnp.bfloat16).astype(jnp.float32) if before else normed
        expected = (normed * w.astype(jnp.float32)).astype(jnp.bfloat16)
        np.testing.assert_array_equal(ops.rms_norm(x, w, 1e-5, round_before_weight=before), expected)

    def test_takes_the_mean_in_float32(self):
        x = jnp.full((1, 8192), 0.1, jnp.bfloat16)
        got = ops.rms_norm(x, jnp.ones(8192, jnp.bfloat16), 0.0)
        assert got.dtype == jnp.bfloat16
        np.testing.assert_allclose(np.asarray(got, np.float32), 1.0, rtol=0.01)


@partial(jax.jit, static_argnums=2)
def rotate(x, positions, theta=100.0):
    cos, sin = ops.rotary_table(positions, ops.inverse_frequencies(x.shape[-1], theta))
    return ops.apply_rotary(x, cos, sin)


class TestRotary:
    @given(st.sampled_from([1, 6]), seeds)
    def test_is_a_complex_product(self, pairs, seed):
        """RoFormer, equation 12: pair i times exp(1j * position * theta_i)."""
        x, positions = normal(seed, 7, 2 * pairs), np.arange(7) * 5
        angles = positions[:, None] * ops.inverse_frequencies(2 * pairs, 100.0)
        want = (x[:, :pairs] + 1j * x[:, pairs:]) * np.exp(1j * angles)
        np.testing.assert_allclose(rotate(x, positions), np.concatenate([want.real, want.imag], -1), rtol=1e-4, atol=1e-4)


def plain_attention(q, k, v, positions, scale):
    """[B, K, T, G, H] by loops over everything, float64: the definition."""
    batch, heads, time, group, _ = q.shape
    out = np.zeros(q.shape)
    for b in range(batch):
        for h in range(heads):
            for t in range(time):
                seen = positions[b, t] + 1
                for g in range(group):
                    scores = k[b, h, :seen].astype(np.float64) @ q[b, h, t, g] * scale
                    weights = np.exp(scores - scores.max())
                    out[b, h, t, g] = weights / weights.sum() @ v[b, h, :seen]
    return out


def attend_at(positions, queries, keys, values, *, scale=0.5, segments=(None, None)):
    """Queries at positions [B|1, T], keys at their slots."""
    seen = AttentionMask(positions, jnp.arange(keys.shape[2])[None], *segments)
    return ops.attend(queries, KVView(keys, values), seen, scale=scale)


half_scaled = jax.jit(lambda q, k, v, positions: attend_at(positions, q, k, v))


class TestAttention:
    @settings(max_examples=10)  # each is a compilation
    @given(sizes, sizes, sizes, sizes, st.sampled_from([0, 6]), seeds)
    def test_definition(self, batch, heads, time, group, before, seed):
        slots = before + time + 2  # two slots that nobody may see
        q, k, v = normal(seed, batch, heads, time, group, 4), normal(seed + 1, batch, heads, slots, 4), None
        v = normal(seed + 2, batch, heads, slots, 4)
        start = np.random.default_rng(seed).integers(0, before + 1, batch)
        positions = start[:, None] + np.arange(time)
        got = half_scaled(q, k, v, jnp.asarray(positions))
        np.testing.assert_allclose(got, plain_attention(q, k, v, positions, 0.5), rtol=1e-4, atol=1e-5)

    @pytest.mark.parametrize(
        ("dtype", "share", "packed"),
        [
            *((jnp.float32, 1e-5, True), (jnp.bfloat16, 0.02, False)),
            *(pytest.param(*x, marks=pytest.mark.slow) for x in ((jnp.float32, 1e-5, False), (jnp.bfloat16, 0.02, True))),
        ],
    )
    def test_gradients(self, packed, dtype, share):
        _, (q, k, v) = rounded(normal(0, 2, 3, 6, 2, 4), normal(1, 2, 3, 8, 4), normal(2, 2, 3, 8, 4))
        positions = np.broadcast_to(np.arange(6) + 1, (2, 6))  # the last slot is seen by nobody
        documents = np.array([[0, 0, 0, 0, 1, 1, 1, 1], [0, 1, 1, 2, 2, 2, 3, 3]])
        segments = (documents[:, 1:7], documents) if packed else (None, None)

        def plain(q, k, v):
            seen = np.arange(8) <= positions[..., None]
            if packed:
                seen &= documents[:, 1:7, None] == documents[:, None, :]
            scores = jnp.where(seen[:, None, :, None], jnp.einsum("bktgh,bksh->bktgs", q, k) * 0.5, -jnp.inf)
            return jnp.einsum("bktgs,bksh->bktgh", jax.nn.softmax(scores, axis=-1), v)

        def ours(q, k, v):
            return attend_at(positions, q, k, v, segments=segments)

        found = jax.jit(partial(gradients, ours))(*(jnp.asarray(a, dtype) for a in (q, k, v)))
        assert [g.dtype for g in found] == [dtype] * 3
        assert_close(found, precise_gradients(plain, q, k, v), share)


class TestFeedForward:
    @given(sizes, sizes, seeds)
    def test_definition(self, dim, hidden, seed):
        x, gate, up, down = (
            normal(seed + i, *s) for i, s in enumerate([(3, dim), (hidden, dim), (hidden, dim), (dim, hidden)])
        )
        # Not by BLAS, whose kernels for float32 once set the flag of an invalid operation on valid numbers.
        product = lambda x, weight: np.einsum("td,fd->tf", x, weight, dtype=np.float64)
        g = product(x, gate)
        want = product(g / (1 + np.exp(-g)) * product(x, up), down)
        got = jax.jit(ops.feed_forward)(x, gate, up, down)
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4)

    @pytest.mark.parametrize(("dtype", "share"), [(jnp.float32, 1e-5), (jnp.bfloat16, 0.03)])
    def test_gradients(self, dtype, share):
        _, operands = rounded(normal(0, 2, 3, 6), normal(1, 10, 6), normal(2, 10, 6), normal(3, 6, 10))

        def plain(x, gate, up, down):
            gate, up = x @ gate.T, x @ up.T
            return (gate / (1 + jnp.exp(-gate)) * up) @ down.T

        found = gradients(ops.feed_forward, *(jnp.asarray(a, dtype) for a in operands))
        assert [g.dtype for g in found] == [dtype] * 4
        assert_close(found, precise_gradients(plain, *operands), share)


def test_a_loop_looks_up_rows_of_16_bits_without_a_wider_table():
    table = jnp.asarray(np.random.default_rng(0).normal(size=(3000, 16)), jnp.bfloat16)

    def follow(table, row):
        def step(row, _):
            found = ops.embed(table, row).astype(jnp.float32)
            return (row + 1 + jnp.sum(found).astype(jnp.int32)) % 3000, found

        return jax.lax.scan(step, row, None, length=5)

    compiled = jax.jit(follow).lower(table, jnp.array([3, 299])).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < table.nbytes
    with jax.disable_jit():
        wanted = follow(table, jnp.array([3, 299]))
    jax.tree.map(np.testing.assert_array_equal, compiled(table, jnp.array([3, 299])), wanted)
    gradient = jax.grad(lambda look, table: jnp.sum(look(table).astype(jnp.float32) ** 2), argnums=1)
    rows = jnp.array([[3, 299], [0, 3]])
    found, wanted = gradient(lambda t: ops.embed(t, rows), table), gradient(lambda t: t[rows], table)
    np.testing.assert_array_equal(found, wanted)


def test_one_row_of_a_divided_table_is_looked_up_on_gpus():
    """By another way than several rows: XLA for GPUs would gather the table."""
    mesh = jax.make_mesh((2,), ("tensor",), axis_types=(jax.sharding.AxisType.Auto,))
    numbers = np.arange(64 * 8, dtype=np.float32).reshape(64, 8)
    table = jax.device_put(numbers, jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("tensor")))
    with jax.set_mesh(mesh), target_platform("gpu"):
        for token in (5, 40):
            found = jax.jit(ops.embed)(table, jnp.array([[token]]))
            assert found.shape == (1, 1, 8)
            np.testing.assert_array_equal(found[0, 0], numbers[token])
