"""Generation by longrope models: the list of factors is chosen for a row's final length, prompt and limit."""

from dataclasses import replace

import jax
import numpy as np
import pytest
from family_models import SIBLINGS, random_params

import llama_jax
from llama_jax import RopeScaling, Sampling
from llama_jax.inference.compiled_decode import round_capacity
from llama_jax.inference.decode import STEPS_PER_CHUNK
from llama_jax.inference.prepare_inputs import prepare_inputs
from llama_jax.inference.single_program import complete
from llama_jax.serving.engine import Engine
from llama_jax.serving.options import EngineOptions
from llama_jax.serving.requests import GenerationRequest

ORIGINAL = 24
CONFIG = replace(
    SIBLINGS["phi3"],
    max_seq_len=96,
    rope_scaling=RopeScaling(
        "longrope",
        4.0,
        original_max_seq_len=ORIGINAL,
        short_factor=[1 + 0.1 * i for i in range(6)],
        long_factor=[1.5 + i for i in range(6)],
    ),
)
TOKENS = np.random.default_rng(3).integers(1, 96, (5, 40))
# Rows that cross the original context, by one token too, that begin beyond it, and that end within it and at its end.
PROMPTS = [row[:n].tolist() for row, n in zip(TOKENS, (13, ORIGINAL, ORIGINAL + 1, 10, 15), strict=True)]
LIMITS = [20, 1, 12, 8, ORIGINAL - 15]


@pytest.fixture(scope="module")
def params():
    return jax.tree.map(lambda leaf: leaf * 2, random_params(CONFIG, seed=7))


@pytest.fixture(scope="module")
def generated(params):
    return llama_jax.generate(CONFIG, params, PROMPTS, max_new_tokens=LIMITS)


def test_tokens_are_those_of_whole_rows_of_the_final_length(params, generated):
    for prompt, limit, row in zip(PROMPTS, LIMITS, generated, strict=True):
        assert len(row.tokens) == limit
        for n in range(len(prompt), len(prompt) + limit):  # each token, from the whole row before it
            whole = np.zeros((1, 40), np.int32)
            whole[0, :n] = (prompt + row.tokens)[:n]
            logits = np.asarray(logits_after(params, whole, np.array([n], np.int32), np.array([len(prompt) + limit])))
            assert row.tokens[n - len(prompt)] == logits.argmax()
            logprob = -np.log(np.exp(logits - logits.max()).sum())
            np.testing.assert_allclose(row.logprobs[n - len(prompt)], logprob, atol=2e-3)


@jax.jit
def logits_after(params, tokens, lengths, final_lengths):
    positions = llama_jax.Positions(lengths, rope_lengths=final_lengths)
    hidden, _ = llama_jax.forward(CONFIG, params, tokens, positions=positions)
    return llama_jax.unembed(CONFIG, params, hidden)[0, lengths[0] - 1]


def test_the_limit_chooses_the_factors(params, generated):
    """A prompt that fits into the original context is continued by other factors if its continuation may not."""
    (short,) = llama_jax.generate(CONFIG, params, PROMPTS[:1], max_new_tokens=ORIGINAL - len(PROMPTS[0]))
    assert short.logprobs[0] != pytest.approx(generated[0].logprobs[0], abs=1e-3)


def test_drafts_and_a_single_program_change_no_token(params, generated):
    draft = llama_jax.PromptLookup()
    drafted = llama_jax.generate(CONFIG, params, PROMPTS, max_new_tokens=LIMITS, draft=draft)
    assert [row.tokens for row in drafted] == [row.tokens for row in generated]
    prepared = prepare_inputs(CONFIG, PROMPTS, LIMITS, Sampling(), ())
    capacity = round_capacity(int(prepared[1].max()), max(LIMITS) + STEPS_PER_CHUNK)
    chunk = complete(CONFIG, capacity, params, *prepared)
    tokens = [np.asarray(row)[np.asarray(valid)].tolist() for row, valid in zip(chunk.tokens, chunk.valid, strict=True)]
    assert tokens == [row.tokens for row in generated]


@pytest.mark.slow
@pytest.mark.rotating
def test_an_engine_generates_the_same(params, generated):
    """Also with a prefix cache, whose pages are shared only among rows with the same factors."""
    engine = Engine(CONFIG, params, EngineOptions(rows=2, prefill_chunk=16))
    assert engine.room(13) == 96 - 13
    prompts = [PROMPTS[2], PROMPTS[2][:20], *PROMPTS]
    limits = [12, 4, *LIMITS]  # the second has the first page of the first, by other factors
    expected = [row.tokens for row in llama_jax.generate(CONFIG, params, prompts, max_new_tokens=limits)]
    assert expected[2:] == [row.tokens for row in generated]
    for prompt, limit, tokens in zip(prompts, limits, expected, strict=True):
        updates = []
        engine.submit(GenerationRequest(prompt=prompt, max_new_tokens=limit), updates.append)
        while engine.busy:
            engine.step()
        assert [token.id for update in updates for token in update.tokens] == tokens
