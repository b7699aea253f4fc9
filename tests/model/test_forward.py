"""The model against transformers' results, and one forward pass for every use."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import make_goldens
import numpy as np
import pytest
from conftest import as_float64

import llama_jax
from llama_jax.errors import ConfigError, GenerationError
from llama_jax.model.forward import forward, unembed
from llama_jax.model.forward_options import Positions
from llama_jax.model.logits import logits
from llama_jax.ops.platform import target_platform

KINDS = list(make_goldens.KINDS)
TOKENS = make_goldens.tokens(make_goldens.KINDS["gqa"])
jit_forward = jax.jit(forward, static_argnums=0)
jit_logits = jax.jit(logits, static_argnums=0)
jit_unembed = jax.jit(unembed, static_argnums=0)


def cached_logits(config, params, tokens, pieces, capacity=None, forward=jit_forward):
    """Logits of the same tokens read in pieces of the given sizes."""
    cache = llama_jax.init_cache(config, len(tokens), capacity or sum(pieces))
    out, start = [], 0
    for size in pieces:
        hidden, cache = forward(config, params, tokens[:, start : start + size], cache)
        out.append(hidden)
        start += size
    np.testing.assert_array_equal(cache.length, [start] * len(tokens))
    return jit_unembed(config, params, np.concatenate(out, axis=1))


@pytest.mark.parametrize("kind", KINDS)
def test_logits_equal_transformers(kind, models, goldens):
    config, params = models[kind]
    np.testing.assert_allclose(jit_logits(config, params, TOKENS), goldens[kind], atol=1e-4, rtol=0)


@pytest.mark.parametrize("kind", [x if x == "llama3" else pytest.param(x, marks=pytest.mark.slow) for x in KINDS])
def test_logits_through_the_cache_equal_transformers(kind, models, goldens):
    config, params = models[kind]
    got = cached_logits(config, params, TOKENS, [19, 1, 1, 19])
    np.testing.assert_allclose(got, goldens[kind], atol=1e-4, rtol=0)


@pytest.mark.parametrize("kind", ["gqa", *(pytest.param(x, marks=pytest.mark.slow) for x in ("tied", "llama3"))])
@pytest.mark.parametrize("batch", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_scanned_and_unrolled_layers_are_the_same(kind, batch, models):
    config, params = models[kind]
    tokens = TOKENS[:batch]
    want = jit_logits(config, params, tokens)
    with target_platform("gpu"):  # where layers are unrolled
        found = cached_logits(config, params, tokens, [30, 10], forward=jax.jit(forward, static_argnums=0))
    np.testing.assert_allclose(found, want, atol=1e-5)


def test_a_row_of_a_ragged_batch_is_what_it_is_alone(models):
    config, params = models["gqa"]
    lengths, more = np.array([3, 11, 7]), 4
    texts = [TOKENS.reshape(-1)[20 * i : 20 * i + n + more] for i, n in enumerate(lengths)]
    padded = np.zeros((3, 11), np.int32)
    for row, text, n in zip(padded, texts, lengths, strict=True):
        row[:n] = text[:n]
        row[n:] = 95  # whatever lies in the padding
    cache = llama_jax.init_cache(config, 3, 16)
    hidden, cache = jit_forward(config, params, padded, cache, positions=Positions(jnp.asarray(lengths)))
    np.testing.assert_array_equal(cache.length, lengths)
    logits_of = lambda hidden: np.asarray(jit_unembed(config, params, hidden))
    got = [[row[:n]] for row, n in zip(logits_of(hidden), lengths, strict=True)]
    for step in range(more):
        token = np.array([[text[n + step]] for text, n in zip(texts, lengths, strict=True)])
        hidden, cache = jit_forward(config, params, token, cache)
        for row, one in zip(got, logits_of(hidden), strict=True):
            row.append(one)
    for found, text in zip(got, texts, strict=True):
        alone = jit_logits(config, params, np.pad(text, (0, 15 - len(text)))[None])[0, : len(text)]
        np.testing.assert_allclose(np.concatenate(found), alone, atol=1e-5)


def test_a_future_token_cannot_change_a_past_logit(models):
    config, params = models["gqa"]
    want = jit_logits(config, params, TOKENS)
    for t in (1, 17, 39):
        changed = TOKENS.copy()
        changed[:, t:] = (changed[:, t:] + 1) % config.vocab_size
        got = jit_logits(config, params, changed)
        np.testing.assert_array_equal(got[:, :t], want[:, :t])
        assert (got[:, t:] != want[:, t:]).any()


def test_with_a_cache_there_is_no_derivative(models):
    """Rather an error than the part of a gradient that does not go through the cache."""
    config, params = models["gqa"]

    def loss(params):
        hidden, _ = forward(config, params, TOKENS, llama_jax.init_cache(config, 2, 40))
        return jnp.sum(jnp.sin(hidden))

    with pytest.raises(ValueError, match=r"[Dd]ifferentiat"):
        jax.eval_shape(jax.grad(loss), params)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["llama3", "gqa", "mqa"])
def test_float64_oracle(models, kind):
    """In float64 cache and no cache agree to 1e-12: what is left in float32 is rounding, not a mistake."""
    config, params = models[kind]
    with jax.enable_x64(True):
        wide, tokens = as_float64(params), TOKENS[:1]
        cache = llama_jax.init_cache(config, 1, 40, jnp.float64)
        first, cache = jit_forward(config, wide, tokens[:, :30], cache)
        second, cache = jit_forward(config, wide, tokens[:, 30:], cache)
        hidden, _ = jit_forward(config, wide, tokens)
        np.testing.assert_allclose(np.concatenate([first, second], 1), hidden, atol=1e-12)


def test_bfloat16_follows_float32(models):
    config, params = models["gqa"]
    low = jax.tree.map(lambda a: a.astype(jnp.bfloat16), params)
    high = jax.tree.map(lambda a: a.astype(jnp.float32), low)
    got, want = jit_logits(config, low, TOKENS), jit_logits(config, high, TOKENS)
    assert got.dtype == jnp.float32
    # bfloat16 keeps 8 bits: the residual stream is rounded some 10 times, each time to 0.4 %; between scanned layers, too,
    # where XLA keeps float32 within a layer.
    assert np.abs(got - want).max() < 0.06 * np.abs(want).max()


def test_a_token_outside_the_vocabulary_is_named(models):
    config, params = models["gqa"]
    for bad in (96, -1):
        with pytest.raises(GenerationError, match=f"token id {bad} is outside the vocabulary of 96"):
            logits(config, params, np.array([[1, bad]]))


def test_a_full_cache_is_an_error_before_anything_runs(models):
    config, params = models["gqa"]
    cache = llama_jax.init_cache(config, 2, 16)
    _, cache = jit_forward(config, params, TOKENS[:, :14], cache)
    with pytest.raises(GenerationError, match="3 tokens after 14 do not fit into a cache of capacity=16"):
        forward(config, params, TOKENS[:, 14:17], cache)
    with pytest.raises(GenerationError, match="17 tokens after 0"):
        jit_forward(config, params, TOKENS[:, :17], cache)
    with pytest.raises(GenerationError, match="batch=1 but the cache has 2 rows"):
        forward(config, params, TOKENS[:1, :1], cache)
    _, cache = jit_forward(config, params, TOKENS[:, 14:16], cache)
    np.testing.assert_array_equal(cache.length, [16, 16])


@pytest.mark.usefixtures("own_errors")
@pytest.mark.parametrize("tokens", [[1, 2], [[[1]]], [[1.5]], [[]]])
def test_tokens_of_another_form_are_refused(models, tokens):
    with pytest.raises(GenerationError, match=r"int\[B, T\] is needed"):
        forward(*models["gqa"], np.array(tokens))


def test_what_does_not_fit_is_refused(models):
    config, params = models["gqa"]
    cache, other = (llama_jax.init_cache(replace(config, n_kv_heads=heads), 2, 64) for heads in (2, 4))
    short = jnp.zeros((2, 3), jnp.int32)
    for error, message, model, tokens, context, positions in (
        (ConfigError, "not those of the configuration", replace(config, hidden_dim=60), TOKENS, None, Positions()),
        (GenerationError, "does not match the configuration", config, TOKENS, other, Positions()),
        (GenerationError, r"position_ids are int32\[2, 3\]; int", config, TOKENS, None, Positions(position_ids=short)),
        (GenerationError, r"segment_ids are int32\[2, 3\]; int", config, TOKENS, None, Positions(segment_ids=short)),
        (GenerationError, "segment_ids are for packed rows", config, short, cache, Positions(segment_ids=short)),
    ):
        with pytest.raises(error, match=message):
            forward(model, params, tokens, context, positions=positions)
