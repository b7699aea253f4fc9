"""Attention over pages, in every way: what the definition of attention gives for rows that are not in pages."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from llama_jax.errors import MeshError
from llama_jax.ops.attention import HeadSharding
from llama_jax.ops.attention.paged import PagedView, attend_paged, choose_paged_backend, paged_reference, write_paged
from llama_jax.ops.attention.paged_blocks import attend_by_blocks
from llama_jax.ops.attention.paged_kernels import PagedAttentionShape, ragged, triton
from llama_jax.ops.cpu import native
from llama_jax.ops.int8 import dequantize_rows, quantize_rows
from llama_jax.ops.platform import KernelOptions

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
    stored = jax.jit(quantize_rows)(pages) if dtype == jnp.int8 else jax.device_put(pages.astype(dtype))
    rounded = np.asarray(jax.jit(dequantize_rows)(stored)) if dtype == jnp.int8 else np.asarray(stored, np.float32)
    table = rng.integers(0, count, (len(rows), most)).astype(np.int32)
    apart = []
    for r, (length, _) in enumerate(rows):
        own = [free.pop() for _ in range(-(-length // page))]
        table[r, : len(own)] = own
        dense = rounded[LAYER, own].reshape(-1, 2 * heads, width)[:length]
        apart.append(tuple(dense[:, i::2].swapaxes(0, 1)[None] for i in (0, 1)))
    starts = np.cumsum([0, *(new for _, new in rows)]).astype(np.int32)
    lengths = np.array([length for length, _ in rows], np.int32)
    return PagedView(stored, jnp.int32(LAYER), jnp.asarray(table), jnp.asarray(lengths), jnp.asarray(starts)), apart


def some_queries(heads, groups, width, dtype=jnp.float32, tokens=TOKENS, seed=1):
    return jnp.asarray(np.random.default_rng(seed).normal(size=(tokens, heads, groups, width)), dtype)


def by_definition(queries, rows, apart, window=None, chunk=None, sinks=0, sink_queries=None):
    """The mixtures of the new tokens of all rows, token by token."""
    found, begin = [], 0
    for (length, new), (keys, values) in zip(rows, apart, strict=True):
        for t in range(new):
            at, slots = length - new + t, np.arange(keys.shape[2])
            seen, first = slots <= at, (slots <= at) & (slots < sinks)
            if window:
                seen &= at - slots < window
            if chunk:
                seen &= at // chunk == slots // chunk
            of_sinks, own = (
                np.einsum("kgh,ksh->kgs", np.asarray(queries[begin + t], np.float64), keys[0])
                for queries in (queries if sink_queries is None else sink_queries, queries)
            )
            scores = np.where(seen | first, SCALE * np.where(first, of_sinks, own), -np.inf)
            weights = np.exp(scores - scores.max(-1, keepdims=True, initial=-1e30))
            weights /= np.maximum(weights.sum(-1, keepdims=True), 1e-30)
            found.append(np.einsum("kgs,ksh->kgh", weights, values[0]))
        begin += new
    return np.stack(found) if found else np.zeros((0, *queries.shape[1:]))


CASES = [  # rows as (length, new tokens), page, (K, G, H), limits
    ([(5, 5)], 3, (1, 1, 4), {}),
    ([(3, 1), (21, 1), (0, 0), (8, 0), (30, 7)], 8, (2, 3, 16), {"window": 5}),
    ([(24, 24)], 16, (3, 1, 20), {"window": 4}),
    ([(0, 0), (700, 1), (1300, 2), (64, 3)], 16, (2, 8, 64), {}),
    ([(1500, 100), (65, 1)], 16, (1, 5, 40), {"window": 100}),
    ([(300, 70), (65, 1), (40, 40)], 32, (2, 3, 64), {"chunk": 48}),
    ([(1100, 1), (1300, 3)], 16, (2, 2, 16), {"window": 200}),
]
WITH_SINKS = [
    ([(24, 24)], 16, (3, 1, 20), {"window": 4, "sinks": 2}),
    ([(1500, 100), (65, 1)], 16, (1, 5, 40), {"window": 100, "sinks": 3}),
    ([(3, 1), (90, 1), (0, 0), (30, 7)], 4, (2, 3, 16), {"window": 10, "sinks": 7}),
    ([(60, 2), (9, 9)], 4, (2, 1, 16), {"window": 10, "sinks": 7, "chunk": 16}),
    ([(12, 2), (9, 9)], 8, (2, 1, 16), {"window": 10, "sinks": 400}),
]


def natively(queries, view, **options):
    if native.compiler() is None:
        pytest.skip("no C++ compiler here")
    return attend_paged(queries, view, scale=SCALE, kernels=KernelOptions(native_code=True), **options)


def by_blocks(queries, view, **options):
    return attend_by_blocks(queries, view, scale=SCALE, **options)


def by_triton(queries, view, **options):
    return triton(queries, view, scale=SCALE, interpret=True, **options)


def plainly(queries, view, **options):
    return paged_reference(queries, view, scale=SCALE, **options)


def check(way, rows, page, sizes, limits, dtype, share=1e-5, of_queries=jnp.float32):
    view, apart = paged(rows, page, sizes[0], sizes[2], dtype)
    queries = some_queries(*sizes, of_queries, tokens=sum(new for _, new in rows) + 3)
    if "sinks" in limits:
        limits = limits | {"sink_queries": some_queries(*sizes, of_queries, tokens=len(queries), seed=4)}
    found = np.asarray(jax.jit(lambda queries, view: way(queries, view, **limits))(queries, view), np.float64)
    wanted = by_definition(queries, rows, apart, **limits)
    np.testing.assert_allclose(found[: len(wanted)], wanted, rtol=share, atol=max(share / 2, 1e-5))
    assert not found[len(wanted) :].any()


def in_each_dtype(way, cases):
    """By default one case in all, and each other in one of them in turn."""
    for number, case in enumerate(cases):
        for turn, dtype in enumerate((jnp.float32, jnp.bfloat16, jnp.int8)):
            default = number == 1 or number % 3 == turn
            yield pytest.param(way, *case, dtype, marks=[] if default else pytest.mark.slow)


@pytest.mark.parametrize(
    ("way", "rows", "page", "sizes", "limits", "dtype"),
    [*in_each_dtype(natively, CASES), *in_each_dtype(by_blocks, CASES + WITH_SINKS)],
    ids=lambda x: getattr(x, "__name__", str(x)),
)
def test_every_way_is_the_plain_form(way, rows, page, sizes, limits, dtype):
    # By blocks of bfloat16 pages, queries and weights are rounded to bfloat16 for their matmuls.
    check(way, rows, page, sizes, limits, dtype, 0.02 if way is by_blocks and dtype == jnp.bfloat16 else 1e-5)


def test_with_sinks_the_text_between_them_and_the_window_is_not_read():
    rows, page, limits = [(4000, 3), (2100, 1)], 16, {"window": 600, "sinks": 20}
    view, apart = paged(rows, page, 1, 16)
    bad = np.array(view.pages)
    for r, (length, new) in enumerate(rows):
        bad[:, view.table[r, 2 : (length - new - 600) // 512 * 32]] = np.nan  # before the first block of 512
    queries, of_sinks = (some_queries(1, 2, 16, tokens=4, seed=seed) for seed in (1, 4))
    view = view.replace(pages=jnp.asarray(bad))
    for way in by_blocks, natively:  # the public one, which leaves sinks to the plain form
        found = jax.jit(lambda queries, view, way=way: way(queries, view, sink_queries=of_sinks, **limits))(queries, view)
        wanted = by_definition(queries, rows, apart, sink_queries=of_sinks, **limits)
        np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-5)


RAGGED = [(3, 1), (21, 1), (0, 0), (8, 0), (30, 7)]


@pytest.mark.parametrize(
    ("rows", "page", "sizes", "limits", "dtype"),
    [
        (RAGGED, 8, (2, 3, 16), {"window": 5}, jnp.int8),
        *(
            pytest.param(rows, page, (2, 3, 32), limits, dtype, marks=pytest.mark.slow)
            for rows, page, limits, dtype in (
                ([(0, 0), (700, 1), (1300, 2), (64, 3)], 16, {}, jnp.float32),
                ([(300, 70), (65, 1), (40, 40)], 32, {"chunk": 48}, jnp.bfloat16),
                ([(150, 90), (65, 1)], 24, {"window": 40}, jnp.int8),
                ([(1100, 1), (1300, 3)], 16, {"window": 200}, jnp.float32),
            )
        ),
    ],
    ids=str,
)
def test_the_kernel_for_gpus_is_the_plain_form(rows, page, sizes, limits, dtype):
    check(by_triton, rows, page, sizes, limits, dtype)


@pytest.fixture
def by_ragged(monkeypatch):
    """By the definition that its authors keep beside it: JAX's interpreter cannot run the kernel itself."""
    package = pytest.importorskip("jax.experimental.pallas.ops.tpu.ragged_paged_attention")

    def by_its_definition(
        queries, pages, lengths, table, starts, count, *, num_kv_pages_per_block, num_queries_per_block, **more
    ):
        # The kernel itself reads the first page of the row for what is beyond its table.
        needed = -(-int(jnp.max(lengths)) // pages.shape[1])
        assert 0 < num_kv_pages_per_block <= table.shape[1]
        table = jnp.concatenate([table, jnp.repeat(table[:, :1], max(needed - table.shape[1], 0), axis=1)], axis=1)
        mixed = package.ref_ragged_paged_attention(queries, pages, lengths, table, starts, np.asarray(count), **more)
        return jnp.pad(mixed, ((0, len(queries) - len(mixed)), (0, 0), (0, 0)), constant_values=jnp.nan)

    monkeypatch.setattr(package, "ragged_paged_attention", by_its_definition)
    return lambda queries, view, **options: ragged(queries, view, scale=SCALE, **options)


@pytest.mark.slow  # a row beyond the table is another test's
@pytest.mark.parametrize("window", [None, 5])
def test_the_kernel_for_tpus_is_given_what_it_means(window, by_ragged):
    view, apart = paged(RAGGED, 4, 2, 128)
    queries = some_queries(2, 3, 128, tokens=12)
    found = np.asarray(by_ragged(queries, view, window=window))
    wanted = by_definition(queries, RAGGED, apart, window)
    np.testing.assert_allclose(found[: len(wanted)], wanted, rtol=1e-4, atol=1e-4)
    assert not found[len(wanted) :].any()


def test_what_a_kernel_cannot_compute_is_left_to_the_plain_form_with_a_reason():
    def asked(width=128, dtype=jnp.bfloat16, page_dtype=jnp.bfloat16, heads=8, pages=500, entries=99, **more):
        shapes = (64, heads, 4, width), (32, pages, 64, 2 * heads, width), (64, entries)
        return PagedAttentionShape(*shapes, jnp.dtype(dtype), jnp.dtype(page_dtype), **more)

    assert choose_paged_backend("tpu", asked()) == ("ragged", "on tpu")
    assert choose_paged_backend("gpu", asked()) == ("triton", "on gpu")
    assert choose_paged_backend("gpu", asked(page_dtype=jnp.int8, chunk=64)) == ("triton", "on gpu")
    for platform, problem, reason in (
        ("cpu", asked(), "no kernel for cpu"),
        ("tpu", asked(width=64), "multiples of 128; these are 64"),
        ("tpu", asked(page_dtype=jnp.int8), "int8 pages"),
        ("tpu", asked(sinks=4), "no sinks"),
        ("gpu", asked(width=96), "these have 96"),
        ("gpu", asked(devices=4), "one device"),
        ("tpu", asked(entries=4096), "131072 entries"),
        ("gpu", asked(page_dtype=jnp.int8, pages=600), "32 bits"),
    ):
        name, why = choose_paged_backend(platform, problem)
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
    for way in natively, by_blocks, by_triton, plainly:
        found = np.asarray(jax.jit(way)(queries, view))[:6]
        np.testing.assert_allclose(found, by_definition(queries, rows, apart), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("way", "window"),
    [
        *((natively, None), (by_blocks, None)),
        *((way, 6) for way in (natively, by_blocks, by_triton, plainly, "by_ragged")),
        *(pytest.param(way, None, marks=pytest.mark.slow) for way in (by_triton, plainly, "by_ragged")),
    ],
)
def test_nothing_beyond_the_table_is_read(way, window, request):
    """Of rows with tokens beyond it: some, all, far beyond; the entries after those of a row are others'."""
    rows, page, entries = [(14, 5), (1000, 4), (0, 0), (12, 12), (8, 0), (12, 1), (15, 3), (40, 2)], 4, 3
    if way == "by_ragged":
        way, width, rows = request.getfixturevalue(way), 128, rows[:5]  # each row is compiled
    else:
        width = 16
    view, apart = paged(rows, page, 2, width)
    used = np.asarray(view.table[:, :entries])
    bad = np.full(view.pages.shape, np.nan, np.float32)
    bad[LAYER, used] = np.asarray(view.pages)[LAYER, used]
    view = view.replace(pages=jnp.asarray(bad), table=view.table[:, :entries])
    queries = some_queries(2, 3, width, tokens=30)
    attend = partial(way, window=window)
    attend = attend if width == 128 else jax.jit(attend)
    found = np.asarray(attend(queries, view), np.float64)
    held = [[x[:, :, : entries * page] for x in both] for both in apart]
    wanted = by_definition(queries, rows, held, window)
    inside = np.concatenate([np.arange(length - new, length) < entries * page for length, new in rows])
    compared = inside if width == 128 else inside | True  # the kernel for TPUs reads other keys of the row
    np.testing.assert_allclose(found[: len(wanted)][compared], wanted[compared], rtol=1e-4, atol=1e-4)
    assert np.isfinite(found).all()
    assert way is plainly or not found[len(wanted) :].any()


@pytest.mark.parametrize(
    ("way", "sinks", "each"),
    [
        *((natively, 0, each) for each in (1, 5)),
        *((by_blocks, 0, 1), (by_blocks, 6, 5), (by_triton, 0, 5), (plainly, 0, 5), (plainly, 6, 1)),
        *(pytest.param(way, 0, 1, marks=pytest.mark.slow) for way in (by_triton, plainly, "by_ragged")),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in ((by_blocks, 0, 5), (by_blocks, 6, 1), (plainly, 6, 5))),
        # Of the kernel for TPUs the table and the window are the same as in other tests.
        pytest.param("by_ragged", 0, 5, marks=pytest.mark.slow),
    ],
)
def test_with_a_window_pages_are_a_ring(way, sinks, each, request):
    """A text that is read piece by piece, of which only as many pages are kept as the window and a piece need."""
    way, width = (request.getfixturevalue(way), 128) if way == "by_ragged" else (way, 16)
    rows, page, window, heads, total = 2, 4, 9, 2, 60
    options = {"window": window, "sinks": sinks} if sinks else {"window": window}
    kept, ring = -(-sinks // page), -(-(window + each - 1) // page) + 1
    place = [p if p < kept else kept + (p - kept) % ring for p in range(-(-total // page))]
    table = jnp.asarray(np.array(place) + (kept + ring) * np.arange(rows)[:, None], jnp.int32)
    pages = jnp.zeros((LAYERS, rows * (kept + ring), page, 2 * heads, width))
    queries, of_sinks = (some_queries(heads, 2, width, tokens=rows * total, seed=seed) for seed in (1, 4))
    keys, values = (some_queries(heads, 1, width, tokens=rows * total, seed=seed)[:, :, 0] for seed in (2, 3))
    apart = [
        tuple(x.reshape(rows, total, heads, width)[r].swapaxes(0, 1)[None] for x in (keys, values)) for r in range(rows)
    ]
    layer, starts = jnp.int32(LAYER), jnp.arange(rows + 1, dtype=jnp.int32) * each
    write = jax.jit(write_paged)
    attend = lambda queries, view, **more: way(queries, view, **options, **more)
    attend = attend if width == 128 else jax.jit(attend)
    for begin in range(0, total, each):
        part = lambda x, begin=begin: x.reshape(rows, total, *x.shape[1:])[:, begin : begin + each].reshape(-1, *x.shape[1:])
        view = PagedView(None, layer, table, jnp.full(rows, begin + each, jnp.int32), starts, each)
        pages = write(pages, part(keys), part(values), view)
        if begin % 15 and begin + each < total:
            continue
        more = {"sink_queries": part(of_sinks)} if sinks else {}
        found = attend(part(queries), view.replace(pages=pages), **more)
        held = [[x[:, :, : begin + each] for x in both] for both in apart]
        wanted = by_definition(part(queries), [(begin + each, each)] * rows, held, **options | more)
        np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-4)


DIVISIONS = {
    "rows": ((8,), ("data",), HeadSharding(("data",))),
    "heads": ((8,), ("tensor",), HeadSharding((), ("tensor",))),
    "both": ((4, 2), ("data", "tensor"), HeadSharding(("data",), ("tensor",))),
    "some": ((2, 2, 2), ("data", "fsdp", "spare"), HeadSharding(("data", "fsdp"), ())),
}


DIVIDED = [  # dtype, native, new tokens of each row, limits
    (jnp.float32, True, 1, {"window": 7}),
    (jnp.int8, True, 3, {}),
    (jnp.bfloat16, True, 3, {"chunk": 8}),
    (jnp.float32, False, 3, {"window": 7, "sinks": 2}),
    (jnp.int8, False, 1, {}),
]


@pytest.mark.parametrize(
    ("head_sharding", "dtype", "native", "each", "limits"),
    [
        pytest.param(name, *case, marks=[] if name == "both" or division == number else pytest.mark.slow)
        for division, name in enumerate(DIVISIONS)
        for number, case in enumerate(DIVIDED)
    ],
    ids=str,
)
def test_devices_write_and_read_their_own_rows_and_heads(head_sharding, dtype, native, each, limits):
    sizes, names, head_sharding = DIVISIONS[head_sharding]
    mesh = jax.make_mesh(sizes, names, axis_types=(AxisType.Auto,) * len(names))
    ways = int(np.prod([mesh.shape[axis] for axis in head_sharding.mesh_axes_of_rows], dtype=int))
    rng, rows, page, entries, heads, width = np.random.default_rng(0), 8, 4, 5, 8, 16
    # Each device has as many pages for its rows as they need.
    mine = rows // ways * entries
    table = np.stack([mine * part + rng.permutation(mine) for part in range(ways)]).reshape(rows, entries).astype(np.int32)
    pages = jnp.asarray(rng.normal(size=(LAYERS, rows * entries, page, 2 * heads, width)), jnp.float32)
    pages = quantize_rows(pages) if dtype == jnp.int8 else pages.astype(dtype)
    lengths = jnp.asarray(rng.integers(each, entries * page + 3, rows), jnp.int32)  # one or another beyond the table
    starts = jnp.arange(rows + 1, dtype=jnp.int32) * each
    keys, values = (some_queries(heads, 1, width, tokens=rows * each, seed=seed)[:, :, 0] for seed in (2, 3))
    queries, of_sinks = (some_queries(heads, 2, width, tokens=rows * each, seed=seed) for seed in (1, 4))
    more = limits | {"sink_queries": of_sinks} if "sinks" in limits else limits
    view = PagedView(None, jnp.int32(LAYER), jnp.asarray(table), lengths, starts, each)

    def step(pages, view, head_sharding):
        options = {"head_sharding": head_sharding, "kernels": KernelOptions(native_code=native)}
        written = write_paged(pages, keys, values, view, **options)
        return written, attend_paged(queries, view.replace(pages=written), scale=SCALE, **options, **more)

    spec = P(None, head_sharding.mesh_axes_of_rows or None, None, head_sharding.mesh_axes_of_heads or None)
    cut = jax.device_put(pages, jax.tree.map(lambda _: NamedSharding(mesh, spec), pages))
    with jax.set_mesh(mesh):
        program = jax.jit(step, static_argnums=2, donate_argnums=0).lower(cut, view, head_sharding).compile()
        assert ("llama_jax_paged_" in program.as_text()) == (native and "sinks" not in limits)
        written, found = program(cut, view)
    wanted = jax.jit(write_paged)(pages, keys, values, view)
    for ours, theirs in zip(jax.tree.leaves(written), jax.tree.leaves(wanted), strict=True):
        assert ours.sharding.is_equivalent_to(NamedSharding(mesh, spec), ours.ndim)
        np.testing.assert_array_equal(np.asarray(ours, np.float32), np.asarray(theirs, np.float32))
    theirs = jax.jit(lambda queries, view: plainly(queries, view, **more))(queries, view.replace(pages=wanted))
    np.testing.assert_allclose(found, theirs, rtol=1e-4, atol=1e-5)


def test_what_cannot_be_divided_is_refused():
    mesh = jax.make_mesh((4, 2), ("data", "tensor"), axis_types=(AxisType.Auto,) * 2)
    view, _ = paged([(9, 2)] * 4, 4, 2, 8)  # 14 pages
    keys = jnp.zeros((8, 2, 8))
    rows, heads = HeadSharding(("data",)), HeadSharding((), ("tensor",))
    three = view.replace(pages=jnp.zeros((LAYERS, 16, 4, 6, 8)), tokens_per_row=2)
    with jax.set_mesh(mesh):
        for asked, head_sharding, tokens, reason in (
            (view, rows, keys, "different numbers of new tokens"),
            (view.replace(tokens_per_row=2), rows, jnp.zeros((12, 2, 8)), "or padding"),
            (view.replace(tokens_per_row=2), rows, keys, "14 pages cannot be sharded over data=4"),
            (view.replace(tokens_per_row=2, lengths=view.lengths[:2]), rows, keys[:4], "2 rows cannot be sharded over"),
            (three, heads, jnp.zeros((8, 3, 8)), "3 key/value heads cannot be sharded over tensor=2"),
        ):
            with pytest.raises(MeshError, match=reason):
                write_paged(asked.pages, tokens, tokens, asked, head_sharding)
            with pytest.raises(MeshError, match=reason):
                attend_paged(tokens[:, :, None], asked, scale=SCALE, head_sharding=head_sharding)


@given(
    some_rows(),
    st.sampled_from([1, 3, 8]),
    st.sampled_from([jnp.float32, jnp.bfloat16, jnp.int8]),
    st.booleans(),
    st.integers(1, 9),
)
def test_what_is_written_stands_in_its_slots_and_nothing_else_changes(rows, page, dtype, natively, entries):
    heads, width = 2, 4
    view, _ = paged(rows, page, heads, width, dtype)
    view = view.replace(table=view.table[:, :entries])  # what is beyond is dropped
    keys, values = (some_queries(heads, 1, width, seed=i)[:, :, 0] for i in (2, 3))
    wanted = jax.tree.map(lambda x: np.array(x, np.float32), view.pages)
    both = np.stack([keys, values], axis=2).reshape(TOKENS, 2 * heads, width)
    new = quantize_rows(jnp.asarray(both)) if dtype == jnp.int8 else jnp.asarray(both, dtype)
    token = 0
    for r, (length, count) in enumerate(rows):
        for position in range(length - count, length):
            if position >= view.table.shape[1] * page:
                token += 1
                continue
            at = LAYER, int(view.table[r, position // page]), position % page
            for whole, part in zip(jax.tree.leaves(wanted), jax.tree.leaves(new), strict=True):
                whole[at] = np.asarray(part[token], np.float32)
            token += 1
    write = partial(write_paged, kernels=KernelOptions(native_code=natively))
    found = jax.jit(write)(view.pages, keys, values, view)
    assert jax.tree.map(lambda x: x.dtype, found) == jax.tree.map(lambda x: x.dtype, view.pages)
    for ours, theirs in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_array_equal(np.asarray(ours, np.float32), theirs)
