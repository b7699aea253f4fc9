"""Generation across the original context of a longrope, after which all keys are rotated by other frequencies."""

from dataclasses import replace

import jax
import numpy as np
import pytest
from family_models import SIBLINGS, random_params

import llama_jax
from llama_jax import RopeScaling, Sampling
from llama_jax.errors import GenerationError
from llama_jax.inference.prepare_inputs import prepare_inputs
from llama_jax.inference.single_program import complete
from llama_jax.serving.engine import Engine
from llama_jax.serving.options import EngineOptions
from llama_jax.serving.requests import GenerationRequest

BORDER = 24
CONFIG = replace(
    SIBLINGS["phi3"],
    max_seq_len=96,
    rope_scaling=RopeScaling(
        "longrope",
        4.0,
        original_max_seq_len=BORDER,
        short_factor=[1 + 0.1 * i for i in range(6)],
        long_factor=[1.5 + i for i in range(6)],
    ),
)
TOKENS = np.random.default_rng(3).integers(1, 96, (5, 40))
# One that crosses after some tokens, one at once, one that begins beyond it, one that ends before it, one that ends at it.
PROMPTS = [row[:n].tolist() for row, n in zip(TOKENS, (13, BORDER, BORDER + 1, 10, 15), strict=True)]
LIMITS = [20, 10, 12, 8, BORDER + 1 - 15]


@pytest.fixture(scope="module")
def params():
    return jax.tree.map(lambda leaf: leaf * 2, random_params(CONFIG, seed=7))


def test_tokens_are_those_of_whole_rows(params):
    found = llama_jax.generate(CONFIG, params, PROMPTS, max_new_tokens=LIMITS)
    for prompt, limit, row in zip(PROMPTS, LIMITS, found, strict=True):
        assert len(row.tokens) == limit
        for n in range(len(prompt), len(prompt) + limit):  # each token, from the whole row before it
            whole = np.zeros((1, 40), np.int32)
            whole[0, :n] = (prompt + row.tokens)[:n]
            logits = np.asarray(_of_length(params, whole, np.array([n], np.int32)))
            assert row.tokens[n - len(prompt)] == logits.argmax()
            logprob = -np.log(np.exp(logits - logits.max()).sum())
            np.testing.assert_allclose(row.logprobs[n - len(prompt)], logprob, atol=2e-3)
    (alone,) = llama_jax.generate(CONFIG, params, PROMPTS[:1], max_new_tokens=20)
    assert alone.tokens == found[0].tokens


@jax.jit
def _of_length(params, tokens, lengths):
    positions = llama_jax.Positions(lengths)
    hidden, _ = llama_jax.forward(CONFIG, params, tokens, positions=positions)
    return llama_jax.unembed(CONFIG, params, hidden)[0, lengths[0] - 1]


@pytest.mark.slow
@pytest.mark.rotating
@pytest.mark.parametrize("cache", [llama_jax.CacheOptions(), llama_jax.CacheOptions(dtype="int8")], ids=["plain", "int8"])
def test_what_is_drawn_and_penalised_goes_on_as_without_the_point(params, cache):
    """Where both lists of factors are the same nothing changes there, so the tokens are those of a row that is read once."""
    scaling = replace(CONFIG.rope_scaling, long_factor=CONFIG.rope_scaling.short_factor, attention_factor=1.1)
    asked = dict(max_new_tokens=LIMITS, sampling=Sampling(temperature=1.0, repetition_penalty=1.3, seed=5), cache=cache)
    texts = []
    for original in (BORDER, 96):
        config = replace(CONFIG, rope_scaling=replace(scaling, original_max_seq_len=original))
        texts.append([row.tokens for row in llama_jax.generate(config, params, PROMPTS, **asked)])
    assert texts[0] == texts[1]


def test_a_row_that_a_stop_token_ends_does_not_go_on(params):
    (whole,) = llama_jax.generate(CONFIG, params, PROMPTS[:1], max_new_tokens=20)
    at_the_point = BORDER - len(PROMPTS[0])  # the index of the first token that follows from a whole original context
    for stop in (3, at_the_point, at_the_point + 2):
        first = whole.tokens.index(whole.tokens[stop])
        (found,) = llama_jax.generate(CONFIG, params, PROMPTS[:1], max_new_tokens=20, stop_tokens=[whole.tokens[stop]])
        assert (found.tokens, found.finish_reason) == (whole.tokens[:first], "stop")


def test_what_cannot_read_again_refuses(params):
    draft = llama_jax.PromptLookup()
    with pytest.raises(GenerationError, match=r"draft: .* prefill row 0 again after 24 tokens.* at most 12 tokens"):
        llama_jax.generate(CONFIG, params, PROMPTS[:1], max_new_tokens=13, draft=draft)
    plain = llama_jax.generate(CONFIG, params, PROMPTS[:1], max_new_tokens=12)
    assert llama_jax.generate(CONFIG, params, PROMPTS[:1], max_new_tokens=12, draft=draft)[0].tokens == plain[0].tokens
    prepared = prepare_inputs(CONFIG, PROMPTS[:1], 4, Sampling(), ())
    with pytest.raises(GenerationError, match=r"capacity=64: .* prefill a row again after 24 tokens"):
        complete(CONFIG, 64, params, *prepared)


@pytest.mark.slow
@pytest.mark.rotating
def test_an_engine_stops_where_it_would_have_to_read_again(params):
    engine = Engine(CONFIG, params, EngineOptions(rows=2, prefill_chunk=16))
    refused = GenerationRequest(prompt=PROMPTS[0], max_new_tokens=13)
    with pytest.raises(GenerationError, match=r"exceed 24 tokens, .* longrope frequencies change .* at most 12,"):
        engine.submit(refused, print)
    assert [engine.room(n) for n in (13, BORDER, BORDER + 1)] == [12, 1, 96 - BORDER - 1]
    updates = []
    for row, limit in enumerate((12, 1, 12)):
        engine.submit(GenerationRequest(prompt=PROMPTS[row], max_new_tokens=limit), updates.append)
        while engine.busy:
            engine.step()
        tokens = [token.id for update in updates for token in update.tokens]
        (want,) = llama_jax.generate(CONFIG, params, [PROMPTS[row]], max_new_tokens=limit)
        assert tokens == want.tokens
        updates.clear()
