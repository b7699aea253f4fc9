"""Generation that remembers less: int8 keys and values, and a window of what was last."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import shared_data

import llama_jax
from llama_jax import CacheOptions
from llama_jax.errors import GenerationError
from llama_jax.model.cache import init_cache
from llama_jax.model.forward import forward, unembed


@pytest.fixture(scope="module")
def model(models):
    return models["gqa"]


PROMPTS = [[1, 5, 9, 13, 2, 40, 7], [1, 90]]


@pytest.mark.slow
def test_a_row_of_a_batch_gets_what_it_gets_alone_and_goes_beyond_the_context(model):
    config, params = model
    run = partial(llama_jax.generate, config, params, max_new_tokens=100, cache=CacheOptions(window=16, sinks=2))
    both = run(PROMPTS)
    assert [len(result.tokens) for result in both] == [100, 100]  # the model's context is 64
    assert all(np.isfinite(result.logprobs).all() for result in both)
    for prompt, result in zip(PROMPTS, both, strict=True):
        assert run([prompt])[0].tokens == result.tokens


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"window": 60, "sinks": 5}, r"window=60 and sinks=5 exceed the model's context of 64"),
        ({"sinks": 2}, r"sinks=2 are for a cache with a window"),
        ({"dtype": "int4"}, r"dtype='int4' must be one of int8"),
    ],
)
def test_what_cannot_be(model, options, message):
    with pytest.raises(GenerationError, match=message):
        llama_jax.generate(*model, PROMPTS, max_new_tokens=5, cache=CacheOptions(**options))


class TestInt8:
    @pytest.mark.slow
    def test_perplexity_on_real_text_is_within_half_a_percent(self, stories):
        """Read in pieces through the cache, so that every token but the first of a piece is predicted from int8 keys."""
        config, params, tokenizer = stories
        text = shared_data("text/tinystories-valid.txt").read_text()[:24_000]
        ids = np.array(tokenizer.encode(text.replace("<|endoftext|>", "\n")), np.int32)
        tokens = ids[: 8 * 512].reshape(8, 512)

        @jax.jit
        def read(params, piece, cache):
            hidden, cache = forward(config, params, piece, cache)
            logprobs = jax.nn.log_softmax(unembed(config, params, hidden))
            return -jnp.take_along_axis(logprobs[:, :-1], piece[:, 1:, None], axis=-1), cache

        def perplexity(dtype):
            cache, nats = init_cache(config, 8, 512, dtype), []
            for start in range(0, 512, 64):
                found, cache = read(params, tokens[:, start : start + 64], cache)
                nats.append(np.asarray(found))
            return np.exp(np.mean(nats))

        whole, short = perplexity(jnp.float32), perplexity(jnp.int8)
        assert whole < 6  # the model knows such text: an error could show
        assert abs(short / whole - 1) < 0.005
