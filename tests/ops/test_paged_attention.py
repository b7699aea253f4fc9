"""Attention over pages, in every way: what the definition of attention gives for rows that are not in pages."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llama_jax import ops
from llama_jax.ops import native
from llama_jax.ops.attention.paged import PagedView, attend_paged, choose_paged, paged_reference, write_paged
from llama_jax.ops.attention.paged_blocks import attend_by_blocks
from llama_jax.ops.attention.paged_kernels import PagedProblem, ragged, triton
from llama_jax.ops.platform import native_code
from llama_jax.ops.quantized import dequantize, quantize

SCALE, LAYERS, LAYER, TOKENS = 0.3, 2, 1, 24


@st.composite
def some_rows(draw):
    """(length, new tokens) of each row: decoded ones, pieces of prompts, rows without new tokens and without any."""
    count, left, rows = draw(st.integers(1, 5)), TOKENS, []
    for _ in range(count):
        new = draw(st.sampled_from([0, 1, 1, 2, 7, left]))
        new = min(new, left)
        rows.append((new + draw(st.sampled_from([0, 1, 3, 8, 21])), new))
        left -= new
    return rows


def paged(rows, page, heads, width, dtype=jnp.float32, seed=0):
    """Rows in pages, in an order of their own, and the same keys and values without pages, [1, K, length, H] of each."""
    rng = np.random.default_rng(seed)
    most = max(-(-length // page) for length, _ in rows) or 1
    count = sum(-(-length // page) for length, _ in rows) + 2
    free = list(rng.permutation(count))
    pages = rng.normal(size=(LAYERS, count, page, 2 * heads, width)).astype(np.float32)
    table = rng.integers(0, count, (len(rows), most)).astype(np.int32)
    apart = []
    for r, (length, _) in enumerate(rows):
        own = [free.pop() for _ in range(-(-length // page))]
        table[r, : len(own)] = own
        dense = jnp.asarray(pages[LAYER, own].reshape(-1, 2 * heads, width)[:length])
        dense = dequantize(quantize(dense)) if dtype == jnp.int8 else dense.astype(dtype).astype(jnp.float32)
        apart.append(tuple(dense[:, i::2].swapaxes(0, 1)[None] for i in (0, 1)))
    stored = jax.tree.map(jnp.asarray, quantize(jnp.asarray(pages)) if dtype == jnp.int8 else pages.astype(dtype))
    starts = np.cumsum([0, *(new for _, new in rows)]).astype(np.int32)
    lengths = np.array([length for length, _ in rows], np.int32)
    return PagedView(stored, jnp.int32(LAYER), jnp.asarray(table), jnp.asarray(lengths), jnp.asarray(starts)), apart


def some_queries(heads, groups, width, dtype=jnp.float32, tokens=TOKENS, seed=1):
    return jnp.asarray(np.random.default_rng(seed).normal(size=(tokens, heads, groups, width)), dtype)


def by_definition(queries, rows, apart, window=None, sinks=0, chunk=None):
    """The mixtures of the new tokens of all rows, token by token."""
    found, begin = [], 0
    for (length, new), (keys, values) in zip(rows, apart, strict=True):
        for t in range(new):
            at = length - new + t
            seen = np.zeros(keys.shape[2], bool)
            seen[max(0, at + 1 - (window or length)) : at + 1] = True
            seen[: min(sinks, at + 1)] = True
            seen[: at // chunk * chunk if chunk else 0] = False
            scores = SCALE * np.einsum("kgh,ksh->kgs", np.asarray(queries[begin + t], np.float64), keys[0][:, seen])
            weights = np.exp(scores - scores.max(-1, keepdims=True))
            weights /= weights.sum(-1, keepdims=True)
            found.append(np.einsum("kgs,ksh->kgh", weights, values[0][:, seen]))
        begin += new
    return np.stack(found) if found else np.zeros((0, *queries.shape[1:]))


@settings(max_examples=20, deadline=None)
@given(
    some_rows(),
    st.sampled_from([1, 3, 8]),
    st.sampled_from([(1, 1, 4), (2, 3, 8), (3, 1, 20)]),
    st.sampled_from([(None, 0, None), (5, 0, None), (4, 2, None), (None, 0, 6)]),
    st.sampled_from([jnp.float32, jnp.bfloat16, jnp.int8]),
)
def test_the_plain_form_is_attention_to_the_rows_themselves(rows, page, sizes, limits, dtype):
    (heads, groups, width), (window, sinks, chunk) = sizes, limits
    view, apart = paged(rows, page, heads, width, dtype)
    queries = some_queries(heads, groups, width)
    found = np.asarray(paged_reference(queries, view, scale=SCALE, window=window, sinks=sinks, chunk=chunk))
    wanted = by_definition(queries, rows, apart, window, sinks, chunk)
    np.testing.assert_allclose(found[: len(wanted)], wanted, rtol=1e-5, atol=2e-6)
    assert np.isfinite(found).all()


CASES = [  # rows as (length, new tokens), page, (K, G, H), (window, sinks, chunk)
    ([(5, 5)], 3, (1, 1, 4), (None, 0, None)),
    ([(3, 1), (21, 1), (0, 0), (8, 0), (30, 7)], 8, (2, 3, 16), (5, 0, None)),
    ([(24, 24)], 16, (3, 1, 20), (4, 2, None)),
    ([(0, 0), (700, 1), (1300, 2), (64, 3)], 16, (2, 8, 64), (None, 0, None)),
    ([(1500, 100), (65, 1)], 16, (1, 5, 40), (100, 3, None)),
    ([(300, 70), (65, 1), (40, 40)], 32, (2, 3, 64), (None, 0, 48)),
    ([(1100, 1), (1300, 3)], 16, (2, 2, 16), (200, 0, None)),
]


def natively(queries, view, scale, window, sinks, chunk):
    if native.compiler() is None:
        pytest.skip("no C++ compiler here")
    with native_code(True):
        return attend_paged(queries, view, scale=scale, window=window, sinks=sinks, chunk=chunk)


def by_blocks(queries, view, scale, window, sinks, chunk):
    return attend_by_blocks(queries, view, scale=scale, window=window, sinks=sinks, chunk=chunk)


def by_triton(queries, view, scale, window, sinks, chunk):
    return triton(queries, view, scale=scale, window=window, sinks=sinks, chunk=chunk, interpret=True)


def check(way, rows, page, sizes, limits, dtype, share=1e-5):
    view, apart = paged(rows, page, sizes[0], sizes[2], dtype)
    queries = some_queries(*sizes, tokens=sum(new for _, new in rows) + 3)
    found = np.asarray(jax.jit(way, static_argnums=(2, 3, 4, 5))(queries, view, SCALE, *limits), np.float64)
    wanted = by_definition(queries, rows, apart, *limits)
    np.testing.assert_allclose(found[: len(wanted)], wanted, rtol=share, atol=max(share / 2, 1e-5))
    assert not found[len(wanted) :].any()


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.int8], ids=["float32", "bfloat16", "int8"])
@pytest.mark.parametrize(("rows", "page", "sizes", "limits"), CASES, ids=str)
@pytest.mark.parametrize("way", [natively, by_blocks])
def test_every_way_is_the_plain_form(way, rows, page, sizes, limits, dtype):
    # By blocks of bfloat16 pages, queries and weights are rounded to bfloat16 for their matmuls.
    check(way, rows, page, sizes, limits, dtype, 0.02 if way is by_blocks and dtype == jnp.bfloat16 else 1e-5)


RAGGED = [(3, 1), (21, 1), (0, 0), (8, 0), (30, 7)]


@pytest.mark.parametrize(
    ("rows", "page", "sizes", "limits", "dtype"),
    [
        (RAGGED, 8, (2, 3, 16), (5, 0, None), jnp.int8),
        *(
            pytest.param(rows, page, (2, 3, 32), limits, dtype, marks=pytest.mark.slow)
            for rows, page, limits, dtype in (
                ([(0, 0), (700, 1), (1300, 2), (64, 3)], 16, (None, 0, None), jnp.float32),
                ([(300, 70), (65, 1), (40, 40)], 32, (None, 0, 48), jnp.bfloat16),
                ([(150, 90), (65, 1)], 24, (40, 3, None), jnp.int8),
                ([(1100, 1), (1300, 3)], 16, (200, 0, None), jnp.float32),
            )
        ),
    ],
    ids=str,
)
def test_the_kernel_for_gpus_is_the_plain_form(rows, page, sizes, limits, dtype):
    check(by_triton, rows, page, sizes, limits, dtype)


@pytest.mark.parametrize("window", [None, 5])
def test_the_kernel_for_tpus_is_given_what_it_means(window, monkeypatch):
    """By the definition that its authors keep beside it: JAX's interpreter cannot run the kernel itself."""
    package = pytest.importorskip("jax.experimental.pallas.ops.tpu.ragged_paged_attention")

    def by_its_definition(*args, num_kv_pages_per_block, num_queries_per_block, **options):
        tokens, arrays = len(args[0]), [*args[:5], np.asarray(args[5])]
        mixed = package.ref_ragged_paged_attention(*arrays, **options)
        return jnp.pad(mixed, ((0, tokens - len(mixed)), (0, 0), (0, 0)), constant_values=jnp.nan)

    monkeypatch.setattr(package, "ragged_paged_attention", by_its_definition)
    view, apart = paged(RAGGED, 8, 2, 128)
    found = np.asarray(ragged(some_queries(2, 3, 128, tokens=12), view, scale=SCALE, window=window))
    wanted = by_definition(some_queries(2, 3, 128, tokens=12), RAGGED, apart, window)
    np.testing.assert_allclose(found[: len(wanted)], wanted, rtol=1e-4, atol=1e-4)
    assert not found[len(wanted) :].any()


def test_what_a_kernel_cannot_compute_is_left_to_the_plain_form_with_a_reason():
    def asked(width=128, dtype=jnp.bfloat16, page_dtype=jnp.bfloat16, heads=8, pages=500, entries=99, **more):
        shapes = (64, heads, 4, width), (32, pages, 64, 2 * heads, width), (64, entries)
        return PagedProblem(*shapes, jnp.dtype(dtype), jnp.dtype(page_dtype), **more)

    assert choose_paged("tpu", asked()) == ("ragged", "on tpu")
    assert choose_paged("gpu", asked()) == ("triton", "on gpu")
    assert choose_paged("gpu", asked(page_dtype=jnp.int8, sinks=4)) == ("triton", "on gpu")
    for platform, problem, reason in (
        ("cpu", asked(), "needs a TPU"),
        ("tpu", asked(width=64), "multiples of 128; these are 64"),
        ("tpu", asked(page_dtype=jnp.int8), "int8 pages"),
        ("tpu", asked(heads=3), "3 heads have 3"),
        ("tpu", asked(sinks=4), "no sinks"),
        ("tpu", asked(chunk=64), "no chunks"),
        ("tpu", asked(devices=4), "one device"),
        ("gpu", asked(width=96), "these have 96"),
        ("gpu", asked(dtype=jnp.float64), "float64 queries"),
        ("gpu", asked(devices=4), "one device"),
        ("tpu", asked(entries=4096), "131072 entries"),
        ("gpu", asked(page_dtype=jnp.int8, pages=600), "32 bits"),
    ):
        name, why = choose_paged(platform, problem)
        assert name == "paged blocks"
        assert reason in why


def test_pages_of_other_rows_and_layers_are_not_read():
    rows = [(9, 1), (5, 5)]
    view, apart = paged(rows, 4, 2, 8)
    used = np.concatenate([np.asarray(view.table[0, :3]), np.asarray(view.table[1, :2])])
    bad = np.full(view.pages.shape, np.nan, np.float32)
    bad[LAYER, used] = np.asarray(view.pages)[LAYER, used]
    bad[LAYER, int(view.table[0, 2]), 1:] = bad[LAYER, int(view.table[1, 1]), 1:] = np.nan  # beyond the lengths
    queries = some_queries(2, 3, 8, tokens=8)
    view = view.replace(pages=jnp.asarray(bad))
    for way in (natively, by_blocks, lambda q, v, s, w, i, c: paged_reference(q, v, scale=s, window=w, sinks=i, chunk=c)):
        found = np.asarray(way(queries, view, SCALE, None, 0, None))[:6]
        np.testing.assert_allclose(found, by_definition(queries, rows, apart), rtol=1e-5, atol=1e-5)


@settings(max_examples=20, deadline=None)
@given(some_rows(), st.sampled_from([1, 3, 8]), st.sampled_from([jnp.float32, jnp.bfloat16, jnp.int8]), st.booleans())
def test_what_is_written_stands_in_its_slots_and_nothing_else_changes(rows, page, dtype, natively):
    heads, width = 2, 4
    view, _ = paged(rows, page, heads, width, dtype)
    keys, values = (some_queries(heads, 1, width, seed=i)[:, :, 0] for i in (2, 3))
    wanted = jax.tree.map(lambda x: np.array(x, np.float32), view.pages)
    both = np.stack([keys, values], axis=2).reshape(TOKENS, 2 * heads, width)
    new = quantize(jnp.asarray(both)) if dtype == jnp.int8 else jnp.asarray(both, dtype)
    token = 0
    for r, (length, count) in enumerate(rows):
        for position in range(length - count, length):
            at = LAYER, int(view.table[r, position // page]), position % page
            for whole, part in zip(jax.tree.leaves(wanted), jax.tree.leaves(new), strict=True):
                whole[at] = np.asarray(part[token], np.float32)
            token += 1
    with ops.native_anyway(natively):
        found = jax.jit(write_paged)(view.pages, keys, values, view)
    assert jax.tree.map(lambda x: x.dtype, found) == jax.tree.map(lambda x: x.dtype, view.pages)
    for ours, theirs in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_array_equal(np.asarray(ours, np.float32), theirs)
