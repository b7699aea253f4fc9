"""Attention over pages by the native kernel: of the slots that are seen and no others, and where it is taken.

What it gives beside the definition: `test_paged_attention`.
"""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import sharp

import llama_jax
from llama_jax.model.trees import quantize
from llama_jax.ops.attention.paged import PagedView, attend_paged, paged_reference
from llama_jax.ops.cpu import native
from llama_jax.ops.platform import KernelOptions

pytestmark = pytest.mark.skipif(not native.usable("paged_float32"), reason="no C++ compiler here")
CONFIG = replace(llama_jax.preset("stories-260k"), n_layers=2, vocab_size=500, hidden_dim=192)
SCALE, PAGE = 0.3, 8


def operands(rows, heads, groups, width, seed=0):
    """Queries and keys and values of rows given as (length, new tokens), whose pages lie one after another."""
    rng = np.random.default_rng(seed)
    entries = max(-(-length // PAGE) for length, _ in rows)
    tokens = sum(new for _, new in rows)
    pages = rng.normal(size=(1, len(rows) * entries, PAGE, 2 * heads, width)).astype(np.float32)
    table = np.arange(len(rows) * entries, dtype=np.int32).reshape(len(rows), entries)
    starts = np.cumsum([0, *(new for _, new in rows)]).astype(np.int32)
    lengths = np.array([length for length, _ in rows], np.int32)
    view = PagedView(*map(jnp.asarray, (pages, np.int32(0), table, lengths, starts)))
    return jnp.asarray(rng.normal(size=(tokens, heads, groups, width)), jnp.float32), view


def natively(queries, view, scale=SCALE):
    attend = partial(attend_paged, scale=scale, kernels=KernelOptions(native_code=True))
    return np.asarray(jax.jit(attend)(queries, view))


def test_what_is_not_seen_is_not_read_and_what_is_seen_counts():
    queries, view = operands([(10, 1), (26, 2)], 2, 2, 16)
    slots = view.pages.reshape(2, 32, 4, 16)  # of the two rows
    wanted = natively(queries, view)
    unseen = slots.at[0, 10:, 0::2].set(jnp.nan).at[1, 26:].set(jnp.inf)
    np.testing.assert_array_equal(natively(queries, view.replace(pages=unseen.reshape(view.pages.shape))), wanted)
    for bad in (np.nan, np.inf):
        changed = slots.at[1, 25, 0].set(bad)  # the first head's key of the last token
        found = natively(queries, view.replace(pages=changed.reshape(view.pages.shape)))
        assert np.isfinite(found[:2]).all()
        assert np.isnan(found[2, 0]).any()
        assert np.isfinite(found[2, 1]).all()


def test_scores_far_apart_are_no_overflow():
    queries, view = operands([(30, 1)], 1, 1, 16)
    wanted = paged_reference(100 * queries, view, scale=5.0)
    np.testing.assert_allclose(natively(100 * queries, view, 5.0), wanted, rtol=1e-5, atol=1e-6)


ONE_LAYER = replace(CONFIG, n_layers=1)


def program(params, dtype=jnp.float32, new=1, slots=64, **options):
    cache = jax.eval_shape(lambda: llama_jax.init_cache(ONE_LAYER, 1, slots, dtype, **options))
    tokens = jax.ShapeDtypeStruct((1, new), jnp.int32)
    return jax.jit(partial(llama_jax.forward, ONE_LAYER)).lower(params, tokens, cache).as_text()


def test_it_is_taken_beside_native_matmuls_where_it_can_be(monkeypatch):
    dense = jax.eval_shape(partial(sharp, ONE_LAYER), jax.random.key(0))
    params = quantize(dense, "int8")
    taken = lambda *args, **options: "llama_jax_paged_" in program(*args, **options)
    assert taken(params)
    assert taken(params, new=40)
    assert taken(params, dtype=jnp.int8)
    assert taken(params, dtype=jnp.bfloat16)
    assert taken(params, window=40)
    assert not taken(params, window=40, sinks=2)
    assert not taken(params, dtype=jnp.float16)
    assert not taken(dense), "a model of floats does not wait for a compiler"
    assert not taken(quantize(dense, "fp8"))
    monkeypatch.setenv("LLAMA_JAX_NATIVE", "off")
    assert not taken(params, slots=48), "of other shapes: what is taken is no part of JAX's keys"


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [None, "int8"])
def test_tokens_and_their_probabilities_are_those_without_it(dtype, monkeypatch):
    """Of a ragged batch; matmuls are native both times."""
    params = quantize(llama_jax.init(CONFIG, jax.random.key(1)), "q8_0")
    options = {"max_new_tokens": 20, "cache": llama_jax.CacheOptions(dtype=dtype)}
    run = partial(llama_jax.generate, CONFIG, params, [[1, 5, 9], [4], list(range(3, 40))], **options)
    found = run()
    monkeypatch.setattr(
        native, "attend_pages", lambda queries, view, *, exact, **options: paged_reference(queries, view, **options)
    )
    jax.clear_caches()
    wanted = run()
    jax.clear_caches()
    assert [row.tokens for row in found] == [row.tokens for row in wanted]
    for ours, theirs in zip(found, wanted, strict=True):
        np.testing.assert_allclose(ours.logprobs, theirs.logprobs, atol=2e-5)
