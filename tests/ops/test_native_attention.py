"""Attention of a few queries by the native kernel: what the definition gives, of the slots that are seen and no others."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import sharp

import llama_jax
from llama_jax.model.trees import quantize
from llama_jax.ops import cpu, native
from llama_jax.ops.attention import Seen
from llama_jax.ops.attention.reference import reference
from llama_jax.ops.attention.rows import rows
from llama_jax.ops.platform import native_code

pytestmark = pytest.mark.skipif(not native.usable("attention_float32"), reason="no C++ compiler here")
CONFIG = replace(llama_jax.preset("stories-260k"), n_layers=2, vocab_size=500, hidden_dim=192)
SCALE = 0.3


def operands(batch, heads, tokens, groups, width, slots):
    rng = np.random.default_rng(width)
    shapes = (batch, heads, tokens, groups, width), (batch, heads, slots, width), (batch, heads, slots, width)
    arrays = tuple(jax.device_put(np.asarray(rng.normal(size=shape), np.float32)) for shape in shapes)
    positions = jnp.asarray(rng.integers(0, slots, (batch, tokens)), jnp.int32).at[0, 0].set(slots - 1)
    return arrays, Seen(positions, jnp.arange(slots, dtype=jnp.int32)[None], by_slot=True)


def natively(queries, keys, values, seen, scale):
    with native_code(True):
        return jax.jit(partial(rows, scale=scale))(queries, keys, values, seen)


def by_definition(queries, keys, values, seen, scale):
    return jax.jit(partial(reference, scale=scale))(queries, keys, values, seen)


SIZES = [  # rows, heads, tokens, groups, width, slots
    (1, 12, 1, 1, 64, 200),  # as one token of a model is decoded
    (3, 4, 1, 1, 48, 40),
    (2, 2, 5, 6, 128, 70),  # four queries at a time, and the rest
    (2, 3, 3, 8, 20, 33),  # heads that are no whole vectors
    (1, 1, 1, 1, 8, 1),
]


def check_attention(*sizes: int) -> None:
    """Natively as by the definition."""
    arrays, seen = operands(*sizes)
    wanted = by_definition(*arrays, seen, SCALE)
    np.testing.assert_allclose(natively(*arrays, seen, SCALE), wanted, rtol=1e-5, atol=2e-6)
    short = [x.astype(jnp.bfloat16) for x in arrays]
    wanted = by_definition(*(x.astype(jnp.float32) for x in short), seen, SCALE)
    found = jax.jit(partial(native.attend, scale=SCALE))(*short, seen.query_positions + 1)
    np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_it_gives_what_the_definition_gives(sizes):
    check_attention(*sizes)


def test_rows_at_the_same_place_share_their_positions():
    (queries, keys, values), seen = operands(2, 2, 3, 1, 16, 20)
    seen = seen.replace(query_positions=seen.query_positions[:1])
    wanted = by_definition(queries, keys, values, seen, SCALE)
    np.testing.assert_allclose(natively(queries, keys, values, seen, SCALE), wanted, rtol=1e-5, atol=2e-6)


def test_what_is_not_seen_is_not_read_and_what_is_seen_counts():
    (queries, keys, values), seen = operands(1, 2, 3, 2, 16, 40)
    seen = seen.replace(query_positions=jnp.array([[9, -1, 25]], jnp.int32))
    wanted = natively(queries, keys, values, seen, SCALE)
    found = natively(queries, keys.at[:, :, 26:].set(jnp.nan), values.at[:, :, 26:].set(jnp.inf), seen, SCALE)
    np.testing.assert_array_equal(found, wanted)
    assert not np.asarray(found)[:, :, 1].any()  # sees nothing
    for bad in (np.nan, np.inf):
        found = np.asarray(natively(queries, keys.at[:, 0, 20].set(bad), values, seen, SCALE))
        assert np.isfinite(found[:, :, 0]).all()
        assert np.isnan(found[:, 0, 2]).any()
        assert np.isfinite(found[:, 1]).all()


def test_scores_far_apart_are_no_overflow():
    (queries, keys, values), seen = operands(1, 1, 1, 1, 16, 30)
    wanted = by_definition(100 * queries, keys, values, seen, 5.0)
    np.testing.assert_allclose(natively(100 * queries, keys, values, seen, 5.0), wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_it_has_the_derivative_of_the_plain_function():
    arrays, seen = operands(1, 2, 2, 3, 8, 12)

    def total(attend, arrays):
        return jnp.sum(jnp.sin(attend(*arrays, seen, SCALE)))

    found, wanted = (jax.grad(partial(total, attend))(arrays) for attend in (natively, rows))
    for ours, theirs in zip(found, wanted, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)


ONE_LAYER = replace(CONFIG, n_layers=1)


def program(params, dtype=jnp.float32, new=1, slots=64, **options):
    cache = jax.eval_shape(lambda: llama_jax.init_cache(ONE_LAYER, 1, slots, dtype, **options))
    tokens = jax.ShapeDtypeStruct((1, new), jnp.int32)
    return jax.jit(partial(llama_jax.forward, ONE_LAYER)).lower(params, tokens, cache).as_text()


def test_it_is_taken_beside_native_matmuls_where_it_can_be(monkeypatch):
    dense = jax.eval_shape(partial(sharp, ONE_LAYER), jax.random.key(0))
    params = quantize(dense, "int8")
    assert "llama_jax_attention_" in program(params)
    assert "llama_jax_attention_" in program(params, new=cpu.MOST_QUERIES)
    assert "llama_jax_attention_" not in program(params, new=cpu.MOST_QUERIES + 1)
    assert "llama_jax_attention_" not in program(dense), "a model of floats does not wait for a compiler"
    assert "llama_jax_attention_" not in program(quantize(dense, "fp8"))
    assert "llama_jax_attention_" not in program(params, jnp.int8)
    assert "llama_jax_attention_" not in program(params, jnp.bfloat16)
    assert "llama_jax_attention_" not in program(params, fresh=True)
    assert "llama_jax_attention_" not in program(params, window=40)
    assert "llama_jax_attention_" in program(params, slots=48)
    monkeypatch.setenv("LLAMA_JAX_NATIVE", "off")
    assert "llama_jax_attention_" not in program(params, slots=40), "of other shapes: what is taken is no part of JAX's keys"


@pytest.mark.slow
def test_tokens_and_their_probabilities_are_those_without_it(monkeypatch):
    """Of a ragged batch; matmuls are native both times."""
    params = quantize(llama_jax.init(CONFIG, jax.random.key(1)), "q8_0")
    run = partial(llama_jax.generate, CONFIG, params, [[1, 5, 9], [4], list(range(3, 40))], max_new_tokens=20)
    found = run()
    monkeypatch.setattr(cpu, "MOST_QUERIES", 0)
    jax.clear_caches()
    wanted = run()
    jax.clear_caches()
    assert [row.tokens for row in found] == [row.tokens for row in wanted]
    for ours, theirs in zip(found, wanted, strict=True):
        np.testing.assert_allclose(ours.logprobs, theirs.logprobs, atol=2e-5)
