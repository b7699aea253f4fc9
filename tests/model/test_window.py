"""Caches that forget and caches of integers: what every query sees is what the definition says."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import sharp
from hypothesis import given
from hypothesis import strategies as st
from int8_outliers import with_outliers

import llama_jax
from llama_jax import ops
from llama_jax.errors import GenerationError
from llama_jax.model.cache import init_cache
from llama_jax.model.forward import forward
from llama_jax.model.forward_options import Positions
from llama_jax.model.operations import select_ops
from llama_jax.ops.int8 import dequantize_rows, quantize_rows

WINDOW, SINKS, LENGTH = 6, 2, 90


@partial(jax.jit, static_argnums=0, static_argnames=("window", "sinks"))
def defined(config, params, tokens, *, window, sinks):
    """Hidden states of whole rows, from the definition: scores of every pair, each from positions of its own."""
    length = tokens.shape[1]
    frequencies, _ = llama_jax.rotary_frequencies(config)
    place = jnp.arange(length)
    near = place[:, None] - place < window
    sink = jnp.broadcast_to(place < sinks, near.shape)
    seen = (place <= place[:, None]) & (near | sink)

    def turned(x, positions):  # [B, K, T, ..., H]
        cos, sin = (t.reshape(length, *[1] * (x.ndim - 4), -1) for t in ops.rotary_table(positions, frequencies))
        return ops.apply_rotary(x, cos, sin)

    hidden = params.embedding[tokens]
    for block in llama_jax.layers_of(params):
        normed = ops.rms_norm(hidden, block.attention_norm, config.norm_eps)
        qkv = ops.project(normed, block.attention.qkv).swapaxes(1, 2)
        queries, keys, values = qkv[..., :-2, :], turned(qkv[..., -2, :], place), qkv[..., -1, :]
        far = jnp.einsum("bktgh,bksh->bktgs", turned(queries, jnp.minimum(place, sinks + window - 1)), keys)
        scores = jnp.einsum("bktgh,bksh->bktgs", turned(queries, place), keys)
        scores = jnp.where(sink[:, None], far, scores) * config.head_dim**-0.5
        weights = jax.nn.softmax(jnp.where(seen[:, None], scores, -jnp.inf), axis=-1)
        mixed = jnp.einsum("bktgs,bksh->btkgh", weights, values).reshape(*tokens.shape, -1)
        hidden = hidden + ops.project(mixed, block.attention.out)
        normed = ops.rms_norm(hidden, block.ffn_norm, config.norm_eps)
        weights = block.feed_forward
        hidden = hidden + ops.feed_forward(normed, weights.gate, weights.up, weights.down)
    return ops.rms_norm(hidden, params.final_norm, config.norm_eps)


read = jax.jit(forward, static_argnums=0)


def read_in_pieces(config, params, tokens, cache, pieces):
    """Hidden states of pieces of so many tokens."""
    found, start = [], 0
    for piece in pieces:
        hidden, cache = read(config, params, tokens[:, start : start + piece], cache)
        found.append(hidden)
        start += piece
    return np.concatenate(found, axis=1), cache


@pytest.fixture(scope="module")
def model(models):
    return models["gqa"]


@pytest.fixture(scope="module")
def tokens(model):
    return jax.device_put(np.asarray(np.random.default_rng(0).integers(0, model[0].vocab_size, (2, LENGTH)), np.int32))


@pytest.mark.parametrize("sinks", [pytest.param(0, marks=pytest.mark.slow), SINKS])
@pytest.mark.parametrize(
    "pieces",
    [*(pytest.param(x, marks=pytest.mark.slow) for x in ([1] * LENGTH, [5] * 18)), [5, 5, 5, 1, 5, 1, 1, 1, 1, 5] * 3],
)
def test_a_ring_of_pages_is_the_definition(model, tokens, sinks, pieces):
    """However the tokens come, through three rounds of the ring."""
    config, params = model
    cache = init_cache(config, 2, LENGTH, window=WINDOW, sinks=sinks, max_tokens_per_pass=5)
    found, cache = read_in_pieces(config, params, tokens, cache, pieces)
    np.testing.assert_allclose(found, defined(config, params, tokens, window=WINDOW, sinks=sinks), rtol=1e-4, atol=1e-5)
    assert cache.pages.shape[1] == 2 * (2 + (sinks > 0))
    assert list(cache.length) == [LENGTH] * 2


def test_ragged_rows(model, tokens):
    """The padding after a row is written over what no window will see again."""
    config, params = model
    expected = defined(config, params, tokens, window=WINDOW, sinks=SINKS)
    cache = init_cache(config, 2, LENGTH, window=WINDOW, sinks=SINKS, max_tokens_per_pass=5)
    done = np.zeros(2, int)
    for step in range(36):
        lengths = np.minimum([5 if step % 2 else 1, 3 if step % 3 else 0], LENGTH - done)
        new = np.stack([np.pad(row[at : at + n], (0, 5 - n)) for row, at, n in zip(tokens, done, lengths, strict=True)])
        hidden, cache = read(
            config, params, jnp.asarray(new), cache, positions=Positions(jax.device_put(np.asarray(lengths, np.int32)))
        )
        for row in range(2):
            got, want = hidden[row, : lengths[row]], expected[row, done[row] : done[row] + lengths[row]]
            np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)
        done += lengths
    assert list(done) == [LENGTH, 72]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["bias", pytest.param("weights", marks=pytest.mark.rotating)])
def test_int8_of_keys_that_stand_out(tokens, kind, monkeypatch):
    """Rounded as they come the others of a head would be lost beside them; in a ring with sinks likewise."""
    config = llama_jax.LlamaConfig(96, 64, 2, 2, 1, 64, 64, 1e-5, 1e4, True, head_dim=64)
    config, params = with_outliers(config, sharp(config, jax.random.key(0)), np.asarray(tokens[0]), kind, 2)

    def states(dtype, **window):
        jax.clear_caches()
        cache = init_cache(config, 2, LENGTH, dtype, max_tokens_per_pass=14, **window)
        return read_in_pieces(config, params, tokens, cache, [14, 1, 1, 14] * 3)[0]

    def errors(**window):
        exact = states(jnp.float32, **window)
        return np.linalg.norm(states(jnp.int8, **window) - exact) / np.linalg.norm(exact)

    found, in_a_ring = errors(), errors(window=WINDOW, sinks=SINKS)
    without_smoothing = lambda *args: select_ops(*args)._replace(smooth_keys=lambda keys, *queries, **_: (keys, *queries))
    monkeypatch.setattr("llama_jax.model.forward.select_ops", without_smoothing)
    assert 0 < found < errors() / 2
    assert 0 < in_a_ring < errors(window=WINDOW, sinks=SINKS) / 2


def back_again(x):
    return dequantize_rows(quantize_rows(x))


@given(st.lists(st.floats(-1e6, 1e6, width=32), min_size=8, max_size=8))
def test_quantized_rows_are_within_half_a_step(row):
    x = np.array([row, [0.0] * 8], np.float32)
    back = jax.jit(back_again)(x)
    assert np.all(np.abs(back - x) <= np.max(np.abs(x), axis=1, keepdims=True) / 253)


def test_a_long_prompt_is_read_in_the_same_room(model):
    """The temporaries of a piece do not grow with what was read before, beyond a layer of the cache."""
    config, params = model

    def temporaries(capacity):
        cache = jax.eval_shape(lambda: init_cache(config, 1, capacity))
        shape = jax.ShapeDtypeStruct((1, 512), jnp.int32)
        compiled = jax.jit(forward, static_argnums=0, donate_argnums=3).lower(config, params, shape, cache).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    more = temporaries(65_536) - temporaries(8_192)
    # The numbers of the positions, counted twice, and the keys and values of a layer, which XLA for CPU copies.
    assert more <= (8 + 256) * (65_536 - 8_192)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"window": 0}, r"window=0 must be at least 1"),
        ({"sinks": 4}, r"sinks=4 are for a cache with a window"),
        ({"window": 4, "capacity": 2**30}, r"capacity=1073741824 must be at least 1 and at most 16777216"),
        ({"dtype": jnp.int32}, r"must be a floating-point type, that of the parameters, or int8"),
    ],
)
def test_invalid_arguments(model, arguments, message):
    with pytest.raises(GenerationError, match=message):
        init_cache(model[0], 1, **({"capacity": 8} | arguments))


def test_a_ring_takes_only_so_much_at_once(model, tokens):
    config, params = model
    cache = init_cache(config, 2, LENGTH, window=6)
    forward(config, params, tokens[:, :12], cache)  # as many as the pages of one at once happen to have room for
    with pytest.raises(GenerationError, match=r"13 tokens at once do not fit .* max_tokens_per_pass=13"):
        forward(config, params, tokens[:, :13], cache)


def test_a_window_takes_pages_for_itself_alone(model):
    config, _ = model
    for window, sinks, max_tokens_per_pass in ((6, 2, 1), (40, 17, 8), (100, 0, 64)):
        long, longer = (
            init_cache(config, 2, capacity, window=window, sinks=sinks, max_tokens_per_pass=max_tokens_per_pass).pages.nbytes
            for capacity in (1_000, 100_000)
        )
        assert long == longer
