"""A trace is what the forward pass does; and what a model shows of itself: whether it is whole, and whether it speaks."""

from dataclasses import replace

import jax
import numpy as np
import pytest
from conftest import first_layers, jit_logits, params_of

import llama_jax
from llama_jax import ops
from llama_jax.formats.huggingface import NAMES, from_params
from llama_jax.verify.activations import (
    TEXT,
    Origin,
    Trace,
    check_logits,
    check_speech,
    check_vocabulary,
    nats_per_token,
    run_layer,
    run_output,
    trace,
)

TOKENS = np.random.default_rng(0).integers(0, 96, 24, dtype=np.int32)


@pytest.fixture(scope="module")
def traced(models):
    config, params = models["gqa"]
    return trace(params, TOKENS, Origin("test", config, ("F32",), "float32", {}))


def test_streams_and_logits_are_those_of_the_forward_pass(models, traced):
    config, params = models["gqa"]
    np.testing.assert_array_equal(traced.streams[0], np.asarray(params.embedding)[TOKENS])
    for i in (1, 2):
        forward = jax.jit(llama_jax.forward, static_argnums=0)
        hidden, _ = forward(replace(config, n_layers=i), first_layers(params, i), TOKENS[None])
        normed = jax.jit(ops.rms_norm)(traced.streams[i], params.final_norm, config.norm_eps)
        np.testing.assert_allclose(normed, hidden[0], atol=1e-5)
    np.testing.assert_allclose(traced.logits, jit_logits(config, params, TOKENS[None])[0], atol=1e-5)
    assert (traced.logits.dtype, traced.streams.dtype) == (np.float32, np.float32)


def test_the_parts_one_by_one_make_up_the_whole(models, traced):
    config, params = models["gqa"]
    for i, block in enumerate(llama_jax.layers_of(params)):
        np.testing.assert_allclose(run_layer(config, block, traced.streams[i]), traced.streams[i + 1], atol=1e-5)
    np.testing.assert_allclose(run_output(config, params, traced.streams[-1]), traced.logits, atol=1e-5)


def test_guessing_costs_the_logarithm_of_the_vocabulary():
    assert nats_per_token(np.arange(5), np.zeros((5, 96), np.float32)) == pytest.approx(np.log(96))


@pytest.fixture(scope="module")
def read(stories):
    """Trace the stories model, its tensors changed by a function, over the built-in text."""
    config, params, tokenizer = stories
    tokens = np.array(tokenizer.encode(TEXT)[:64], np.int32)

    def read(change=lambda tensors: {}):
        whole = from_params(config, params, None).tensors
        tensors = {name: tensor.read(0, tensor.shape[0]) for name, tensor in whole.items()}
        spoiled = params_of(config, tensors | change(tensors))
        return trace(spoiled, tokens, Origin("stories", config, ("F32",), "float32", {}))

    return read


def other_layout(turn):
    def change(tensors):
        parts = [(NAMES[part].format(i), heads) for i in range(5) for part, heads in (("q", 8), ("k", 4))]
        return {name: turn(tensors[name].reshape(heads, 8, 64)).reshape(-1, 64) for name, heads in parts}

    return change


def test_the_stories_model_speaks(read):
    found = check_speech(read())
    assert found.passed
    assert "1.37 nats per token, where guessing costs 6.24" in found.found


@pytest.mark.parametrize(
    "change",
    [
        other_layout(ops.rope_layout.half_from_interleaved),
        other_layout(ops.rope_layout.interleaved_from_half),
        lambda t: {name: t[name].T.copy() for name in (NAMES["out"].format(i) for i in range(5))},
        lambda t: {NAMES["gate"].format(i): t[NAMES["up"].format(i)] for i in range(5)},
        lambda t: {NAMES["embedding"]: t[NAMES["embedding"]][::-1].copy()},
    ],
    ids=["Meta's layout", "turned twice", "out transposed", "up for gate", "vocabulary reversed"],
)
def test_a_model_that_is_put_together_wrongly_does_not(read, change):
    assert not check_speech(read(change)).passed


def test_logits(stories):
    origin = Origin("x", stories[0], ("F32",), "float32", {})
    logits = np.zeros((4, 512), np.float32)
    logits[1, 3] = -7
    good = Trace(origin, np.zeros(4, np.int32), logits, np.zeros((6, 4, 64), np.float32))
    assert check_logits(good)[1:] == (True, "finite, the largest 7")
    logits[2, 5] = np.nan
    assert check_logits(good)[1:] == (False, "NOT finite from position 2 on")


class Vocabulary:
    def __init__(self, size=512, back=lambda text: text):
        self.vocab_size = size
        self.back = back

    def encode(self, text, bos, eos):
        assert not bos
        assert not eos
        return [ord(c) for c in text]

    def decode(self, ids):
        return self.back("".join(map(chr, ids)))


def test_vocabulary(stories):
    assert check_vocabulary(stories.tokenizer, 512, TEXT).passed
    assert check_vocabulary(Vocabulary(500), 512, TEXT).passed
    large = check_vocabulary(Vocabulary(513), 512, TEXT)
    assert (large.passed, large.found.split(";")[0]) == (False, "513 pieces for 512 rows of the embedding")
    lossy = check_vocabulary(Vocabulary(back=str.lower), 512, TEXT)
    assert (lossy.passed, "does NOT come back" in lossy.found) == (False, True)
