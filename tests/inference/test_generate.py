from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import sharp
from hypothesis import given
from hypothesis import strategies as st

import llama_jax
from llama_jax import CacheOptions, ComputeOptions, Parts, Sampling, ops
from llama_jax.data import open_corpus
from llama_jax.errors import GenerationError
from llama_jax.evaluation.loglikelihood import Continuation, score_pairs
from llama_jax.evaluation.perplexity import evaluate
from llama_jax.inference import compiled_decode as module
from llama_jax.inference import prepare_inputs
from llama_jax.inference.sharding import sharding_of
from llama_jax.ops.platform import lowering_platform
from llama_jax.serving.served_model import ServedModel
from llama_jax.tokenizers.sentencepiece import byte_tokenizer

NEW = 12


jit_logits = jax.jit(llama_jax.logits, static_argnums=0)


def plain_greedy(config, params, prompt, new):
    """The oracle: the whole sequence through the model again for every token, without a cache."""
    ids = np.zeros((1, 64 if len(prompt) + new <= 64 else 512), np.int32)  # what comes after cannot be seen
    ids[0, : len(prompt)] = prompt
    for n in range(len(prompt), len(prompt) + new):
        ids[0, n] = int(np.argmax(jit_logits(config, params, ids)[0, n - 1]))
    return ids[0, len(prompt) : len(prompt) + new].tolist()


@pytest.fixture(scope="module")
def model():
    """Random, with sharp logits so that rounding between batch sizes cannot turn an argmax over."""
    config = replace(llama_jax.preset("stories-260k"), n_layers=2)
    return config, sharp(config, jax.random.key(1))


PROMPTS = [[1, 5, 7], [1], list(range(40, 62)), [9] * 17]


def test_greedy_equals_the_plain_oracle(model):
    for prompt, result in zip(PROMPTS, llama_jax.generate(*model, PROMPTS, max_new_tokens=NEW), strict=True):
        assert result.tokens == plain_greedy(*model, prompt, NEW)
        assert result.finish_reason == "length"


@pytest.mark.parametrize("kind", [jnp.array, np.array])
def test_arrays_are_taken_wherever_lists_are(model, kind):
    prompts = [[1, 5, 7], [2, 6, 8], [3, 9, 4], [8, 8, 1]]
    arguments = {"max_new_tokens": [3, 5, 1, 4], "stop_tokens": [0, 511]}
    want = llama_jax.generate(*model, prompts, **arguments)
    got = llama_jax.generate(*model, kind(prompts), **{name: kind(value) for name, value in arguments.items()})
    assert [r.tokens for r in got] == [r.tokens for r in want]
    assert [r.tokens for r in llama_jax.generate(*model, [kind(prompts[0])], max_new_tokens=kind(3))] == [want[0].tokens]


@pytest.mark.parametrize("how", ["generate", pytest.param("score", marks=pytest.mark.slow), "evaluate"])
def test_programs_are_for_the_platform_of_the_parameters(model, how, tmp_path, monkeypatch):
    """Of parameters that were put on the CPU of a machine whose default devices are GPUs."""
    plain, params = model[0], jax.device_put(model[1], jax.devices()[0])
    traced = set()

    def attend(queries, view, seen, **options):
        traced.add(lowering_platform())
        return ops.attend(queries, view, seen, backend="dense", **options)

    config = replace(plain, parts=Parts(attend=attend))
    [want] = llama_jax.generate(plain, params, [[1, 5, 7]], max_new_tokens=3)
    (tmp_path / "text.txt").write_text("a few words")
    corpus = open_corpus([tmp_path / "text.txt"], byte_tokenizer())
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert lowering_platform() == "gpu"
    if how == "generate":
        [got] = llama_jax.generate(config, params, [[1, 5, 7]], max_new_tokens=3)
        assert got.tokens == want.tokens
    elif how == "score":
        score_pairs(config, params, [Continuation((1, 5), (7, 9))], batch=1)
    else:
        evaluate(config, params, corpus, length=8, batch=1)
    assert traced == {"cpu"}
    assert (
        ServedModel.of(config, params, CacheOptions(), ComputeOptions()).static.sharding.mesh
        == sharding_of(params).mesh
        is not None
    )


@given(st.lists(st.lists(st.integers(0, 511), min_size=1, max_size=20), min_size=4, max_size=4), st.booleans())
def test_a_row_is_token_for_token_what_it_is_alone(model, prompts, sampled):
    sampling = [Sampling(temperature=1.0 if sampled else 0.0, top_p=0.9, seed=i) for i in range(len(prompts))]
    together = Sampling(temperature=[s.temperature for s in sampling], top_p=0.9, seed=[s.seed for s in sampling])
    batch = llama_jax.generate(*model, prompts, max_new_tokens=NEW, sampling=together)
    for prompt, own, result in zip(prompts, sampling, batch, strict=True):
        assert llama_jax.generate(*model, [prompt], max_new_tokens=NEW, sampling=own)[0].tokens == result.tokens


def test_one_batch_mixes_requests(model):
    greedy, sampled, *more = llama_jax.generate(
        *model, [PROMPTS[0]] * 4, max_new_tokens=NEW, sampling=Sampling(temperature=[0.0, 3.0, 0.0, 3.0], seed=3)
    )
    assert greedy.tokens == more[0].tokens == plain_greedy(*model, PROMPTS[0], NEW)
    assert sampled.tokens == more[1].tokens != greedy.tokens


def test_stop_tokens_end_a_row_and_only_that_row(model):
    free = llama_jax.generate(*model, PROMPTS, max_new_tokens=NEW)
    stop = free[0].tokens[4], free[2].tokens[7]
    for row, before in zip(llama_jax.generate(*model, PROMPTS, max_new_tokens=NEW, stop_tokens=stop), free, strict=True):
        ends = [i for i, token in enumerate(before.tokens) if token in stop]
        assert row.tokens == before.tokens[: ends[0] if ends else None]
        assert row.finish_reason == ("stop" if ends else "length")


def test_decoding_stops_early_when_every_row_has(model):
    first = llama_jax.generate(*model, [PROMPTS[0]], max_new_tokens=NEW)[0].tokens
    pieces = list(llama_jax.stream(*model, [PROMPTS[0]], max_new_tokens=400, stop_tokens=[first[1]], max_chunks=1 << 20))
    steps = sum(piece.tokens.shape[1] for piece in pieces)
    assert steps <= 1 + module.STEPS_PER_CHUNK * (2 if first[0] != first[1] else 1)


def test_any_number_of_new_tokens(model):
    want = llama_jax.generate(*model, [PROMPTS[0]], max_new_tokens=NEW)[0]
    for n in (1, 2, module.STEPS_PER_CHUNK, module.STEPS_PER_CHUNK + 1, NEW - 1):
        got = llama_jax.generate(*model, [PROMPTS[0]], max_new_tokens=n)[0]
        assert got.tokens == want.tokens[:n]
        assert got.logprobs == want.logprobs[:n]


def test_logprobs_are_the_models_own(model):
    result = llama_jax.generate(*model, [PROMPTS[0]], max_new_tokens=NEW, sampling=Sampling(temperature=2.0, top_k=9))[0]
    ids = PROMPTS[0] + result.tokens
    scores = jax.nn.log_softmax(jit_logits(*model, np.array([ids]))[0])
    want = [float(scores[len(PROMPTS[0]) - 1 + i, token]) for i, token in enumerate(result.tokens)]
    np.testing.assert_allclose(result.logprobs, want, atol=1e-4)


def test_the_penalty_sees_prompt_and_continuation(model):
    """A huge penalty forbids what was seen: all tokens differ, and none is in the prompt."""
    result = llama_jax.generate(*model, [PROMPTS[0]], max_new_tokens=40, sampling=Sampling(repetition_penalty=1e6))[0]
    positive = len(set(result.tokens))
    assert positive == 40
    assert not set(result.tokens) & set(PROMPTS[0])


@pytest.mark.slow
def test_the_cache_grows_through_buckets_and_prompts_are_read_in_pieces(model, monkeypatch):
    monkeypatch.setattr(module, "MIN_CACHE_CAPACITY", 16)
    monkeypatch.setattr(module, "MAX_PREFILL_CHUNK", 8)
    monkeypatch.setattr(prepare_inputs, "MIN_PREFILL_LENGTH", 4)
    prompts = [PROMPTS[2], PROMPTS[0], list(range(8))]
    for prompt, result in zip(prompts, llama_jax.generate(*model, prompts, max_new_tokens=30), strict=True):
        assert result.tokens == plain_greedy(*model, prompt, 30)


def test_streaming_yields_the_same_tokens_in_pieces(model):
    want = llama_jax.generate(*model, PROMPTS, max_new_tokens=NEW)
    pieces = list(llama_jax.stream(*model, PROMPTS, max_new_tokens=NEW))
    assert [piece.tokens.shape[1] for piece in pieces[:2]] == [1, module.STEPS_PER_CHUNK]
    tokens, valid = (np.concatenate([getattr(p, name) for p in pieces], axis=1) for name in ("tokens", "valid"))
    for row, result in enumerate(want):
        assert tokens[row][valid[row]].tolist() == result.tokens


def test_the_number_of_compilations_is_bounded(model):
    """Prompts of 1 to 60 tokens and any sampling: one prefill per power of two, one decode program for the bucket."""
    config, params = model
    before = module._prefill._cache_size(), module._decode_for("cpu")._cache_size()
    for length in range(1, 61, 3):
        sampling = Sampling(temperature=length / 30, top_k=length, top_p=0.5 + length / 200, seed=length)
        llama_jax.generate(config, params, [[3] * length], max_new_tokens=3 + length % 4, sampling=sampling)
    assert module._prefill._cache_size() - before[0] <= 3  # buckets 16, 32, 64
    assert module._decode_for("cpu")._cache_size() - before[1] <= 1


@pytest.mark.parametrize(
    ("prompts", "arguments", "message"),
    [
        ([], {}, "no prompts"),
        ([[1], []], {}, "prompt 1 is empty"),
        ([[512]], {}, "token id 512 is outside the vocabulary of 512"),
        (["Once"], {}, "prompt 0 is the text 'Once'; encode it"),
        ([1, 2], {}, "prompt 0=1 must be a flat sequence of integers"),
        ([[1.5]], {}, "must be a flat sequence of integers"),
        ([[1]], {"stop_tokens": 2}, "stop_tokens=2 must be a flat sequence"),
        ([[1]], {"max_new_tokens": 0}, "max_new_tokens=0"),
        ([[1] * 500], {"max_new_tokens": 13}, "exceed the model's context of 512"),
        ([[1]], {"stop_tokens": [-1]}, "stop token -1 is outside"),
        ([[1]], {"sampling": Sampling(top_p=2.0)}, "top_p=2.0 must be at least 0 and at most 1"),
        ([[1]], {"sampling": Sampling(seed=[1, 2])}, r"seed has shape \(2,\) for a batch of 1"),
    ],
)
def test_bad_requests_are_refused_before_anything_runs(model, prompts, arguments, message):
    with pytest.raises(GenerationError, match=message):
        llama_jax.stream(*model, prompts, **({"max_new_tokens": 4} | arguments))


def test_logits_that_are_no_numbers_are_an_error(model):
    config, params = model
    broken = params.replace(final_norm=params.final_norm * np.float32(np.inf))
    with pytest.raises(GenerationError, match="logits in row 0 are NaN"):
        llama_jax.generate(config, broken, [[1, 2]], max_new_tokens=3)
    # Hidden states that are finite, and whose squares are not: the norm would make them zeros, and the logits all alike.
    large = params.replace(embedding=params.embedding * np.float32(1e25))
    with pytest.raises(GenerationError, match="logits in row 0 are NaN"):
        llama_jax.generate(config, large, [[1, 2]], max_new_tokens=3)


def test_stories_260k_greedy_text_is_exactly_what_llama2c_gives(stories, stories_folder):
    """200 greedy steps from BOS, float32: the real model, file, tokenizer and decode loop at once."""
    result = llama_jax.generate(stories.config, stories.params, [[stories.tokenizer.bos_id]], max_new_tokens=200)[0]
    assert stories.tokenizer.decode(result.tokens) == (stories_folder / "expected.txt").read_text()
