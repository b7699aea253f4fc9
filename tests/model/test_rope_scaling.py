"""Every rope scaling against transformers' numbers, and what depends on the length of a row."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import make_goldens
import numpy as np
import pytest
from conftest import jit_init, jit_logits, params_of
from make_goldens import ROPE_LENGTHS, ROPE_MODELS, ROPES

import llama_jax
from llama_jax import rotary_frequencies
from llama_jax.errors import GenerationError
from llama_jax.inference.decode import PrefillState, prefill
from llama_jax.model.forward import forward
from llama_jax.model.forward_options import Positions

jit_forward = jax.jit(forward, static_argnums=0)
jit_read = jax.jit(prefill, static_argnums=0)


@pytest.fixture(scope="module")
def ropes():
    with np.load(make_goldens.GOLDENS / "ropes.npz") as file:
        return dict(file)


@pytest.fixture(scope="module")
def scaled():
    """{name: (config, params)} of the models whose logits are kept."""
    return {name: (ROPES[name], params_of(ROPES[name], make_goldens.random_tensors(ROPES[name]))) for name in ROPE_MODELS}


@pytest.mark.parametrize("name", ROPES)
def test_frequencies_are_those_of_transformers(name, ropes):
    config = ROPES[name]
    for length, want, factor in zip(ROPE_LENGTHS, ropes[f"{name} frequencies"], ropes[f"{name} factor"], strict=True):
        got, got_factor = rotary_frequencies(config, length)
        assert got.dtype == np.float32
        assert got.shape == (config.head_dim // 2,)
        np.testing.assert_allclose(got, want, rtol=4e-7)  # theirs is computed in float32
        assert got_factor == pytest.approx(factor, rel=1e-12)
    for lengths in (np.array(ROPE_LENGTHS), jnp.array(ROPE_LENGTHS)):
        rows, _ = rotary_frequencies(config, lengths)
        assert rows.dtype == np.float32
        np.testing.assert_allclose(
            np.broadcast_to(rows, ropes[f"{name} frequencies"].shape), ropes[f"{name} frequencies"], rtol=1e-6
        )
    np.testing.assert_array_equal(rotary_frequencies(config)[0], rotary_frequencies(config, 1)[0])


@pytest.mark.parametrize("name", ROPE_MODELS)
def test_logits_are_those_of_transformers(name, ropes, scaled):
    """The attention factor and, for a dynamic scaling, the length of the rows reach the scores."""
    config, params = scaled[name]
    got = jit_logits(config, params, make_goldens.tokens(config))
    np.testing.assert_allclose(got, ropes[f"{name} logits"], atol=2e-4, rtol=0)


@pytest.fixture(scope="module", params=["dynamic", pytest.param("longrope", marks=pytest.mark.slow)])
def by_length(request):
    """(config, params) of a model of one layer, for what is asked of `forward` and not of the layers."""
    config = replace(ROPES[request.param], n_layers=1, hidden_dim=16)
    return config, jit_init(config, jax.random.key(0))


def alone(config, params, tokens):
    """The states [n, D] of a row of n tokens by itself, padded to 24 so that one program serves all."""
    row = np.zeros((1, 24), np.int32)
    row[0, : len(tokens)] = tokens
    hidden, _ = jit_forward(config, params, row, positions=Positions(np.array([len(tokens)])))
    return np.asarray(hidden)[0, : len(tokens)]


def test_a_row_read_in_pieces_is_what_it_is_alone(by_length):
    """Prompts of other lengths in pieces through the cache, and each alone: it goes by its own length, not the batch's."""
    config, params = by_length
    lengths = np.array([24, 9, 17])
    tokens = np.random.default_rng(5).integers(0, config.vocab_size, (3, 24), dtype=np.int32)

    def last_states(**given):
        reading = PrefillState(llama_jax.init_cache(config, 3, 24), jnp.zeros((3, config.dim)))
        for start in range(0, 24, 8):
            new = np.clip(lengths - start, 0, 8)
            reading = jit_read(config, params, reading, tokens[:, start : start + 8], Positions(new, **given))
        return np.asarray(reading.hidden)

    whole, _ = jit_forward(config, params, tokens, positions=Positions(lengths))
    whole = np.asarray(whole)[np.arange(3), lengths - 1]
    np.testing.assert_allclose(last_states(rope_lengths=lengths), whole, atol=2e-5, rtol=0)
    for row, length in enumerate(lengths):
        np.testing.assert_allclose(whole[row], alone(config, params, tokens[row, :length])[-1], atol=2e-5, rtol=0)
    blind = last_states()  # not told: the first pieces are then turned as shorter prompts are
    assert np.abs(blind[0] - whole[0]).max() > 1e-3
    np.testing.assert_allclose(blind[1], whole[1], atol=2e-5, rtol=0)  # within the original context it makes no difference


@pytest.mark.parametrize("with_segments", [True, False])
def test_a_packed_document_goes_by_its_own_length(with_segments, by_length):
    config, params = by_length
    sizes = [4, 20] if with_segments else [24]
    tokens = np.random.default_rng(7).integers(0, config.vocab_size, (1, 24), dtype=np.int32)
    positions = np.concatenate([np.arange(n) for n in sizes])[None].astype(np.int32)
    segments = np.repeat([100, -9][: len(sizes)], sizes)[None].astype(np.int32) if with_segments else None
    packed, _ = jit_forward(config, params, tokens, positions=Positions(position_ids=positions, segment_ids=segments))
    start = 0
    for n in sizes:
        want = alone(config, params, tokens[0, start : start + n])
        np.testing.assert_allclose(packed[0, start : start + n], want, atol=2e-5, rtol=0)
        start += n


def test_a_decoding_row_goes_by_its_length_so_far(by_length):
    """The step after the original context is turned as a longer row; the keys in the cache stay as they were read."""
    config, params = by_length
    tokens = np.random.default_rng(8).integers(0, config.vocab_size, (1, 17), dtype=np.int32)
    _, cache = jit_forward(config, params, tokens[:, :16], llama_jax.init_cache(config, 1, 20))
    step, _ = jit_forward(config, params, tokens[:, 16:], cache)
    told = jax.jit(forward, static_argnums=0)
    same, other = (
        told(config, params, tokens[:, 16:], cache, positions=Positions(rope_lengths=np.array([n])))[0] for n in (17, 16)
    )
    np.testing.assert_allclose(step, same, atol=1e-6, rtol=0)
    assert np.abs(step - other).max() > 1e-4


def test_lengths_of_another_shape_are_named(by_length):
    config, params = by_length
    with pytest.raises(GenerationError, match=r"rope_lengths are int\d+\[3\]; int\[2\]"):
        forward(config, params, make_goldens.tokens(config), positions=Positions(rope_lengths=np.array([1, 2, 3])))
