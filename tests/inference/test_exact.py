"""`ComputeOptions(exact=True)`: a row's tokens and the bits of its log-probabilities, alone and in any company."""

import json
import os
import random
import subprocess
import sys
from dataclasses import replace
from functools import partial

import exactness
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from adapters import random_adapters
from conftest import jit_init

import llama_jax
from llama_jax import CacheOptions, ComputeOptions, Sampling
from llama_jax.data import Corpus
from llama_jax.errors import ConfigError, MeshError
from llama_jax.evaluation.measure import WindowRows, cut_windows, evaluation_compute, measure_windows, token_nats
from llama_jax.inference import compiled_decode
from llama_jax.inference.rollouts import Completions, RolloutOptions, RolloutPrompts, roll_out
from llama_jax.inference.speculation import PromptLookup
from llama_jax.model.cache import init_cache
from llama_jax.model.forward_options import Sharding
from llama_jax.model.lora import Lora, apply_adapters
from llama_jax.model.multi_lora import adapter_table, choose_adapters
from llama_jax.model.trees import quantize
from llama_jax.ops.cpu import native
from llama_jax.parallel.generation_sharding import pad_on_mesh
from llama_jax.parallel.mesh import parse_mesh
from llama_jax.runs.tasks.grpo import answer_rows
from llama_jax.serving.engine import Engine
from llama_jax.serving.options import EngineOptions
from llama_jax.serving.requests import GenerationRequest
from llama_jax.training.logprobs import token_logprobs
from llama_jax.training.loss import LossOptions
from llama_jax.training.policy_gradient import PolicyOptions
from llama_jax.training.policy_loss import AnswerLoss

EXACT = ComputeOptions(exact=True)
VARIANT = (pytest.mark.slow, pytest.mark.rotating)
KINDS = ["float32", *(pytest.param(kind, marks=VARIANT) for kind in ("bfloat16", "int8", "q4_0"))]
NEW = 9
# At the edges of the blocks of tokens and of keys, and of the pages.
LENGTHS = [1, 2, 7, 8, 9, 15, 16, 17, 63, 64, 65, 130]
# Matrices that native kernels multiply, and heads whose scores are sums of several vectors.
CONFIG = replace(
    llama_jax.preset("stories-260k"),
    **{"dim": 256, "n_layers": 2, "hidden_dim": 320, "n_heads": 8, "n_kv_heads": 4, "max_seq_len": 640},
)


def model_of(kind):
    params = jit_init(CONFIG, jax.random.key(3), jnp.bfloat16 if kind == "bfloat16" else jnp.float32)
    return CONFIG, quantize(params, kind) if kind in ("int8", "q4_0") else params


@pytest.fixture(scope="module", params=KINDS)
def model(request):
    return model_of(request.param)


def some_prompts(lengths=LENGTHS, seed=0):
    rng = random.Random(seed)
    return [[rng.randrange(3, CONFIG.vocab_size) for _ in range(length)] for length in lengths]


PROMPTS = some_prompts()
SAMPLING = Sampling(
    temperature=[0.0, 1.0, 0.7] * 4,
    top_k=[0, 0, 40, 0] * 3,
    top_p=[1.0, 0.9, 1.0, 1.0, 0.8, 1.0] * 2,
    min_p=[0.0] * 10 + [0.05] * 2,
    repetition_penalty=[1.0, 1.0, 1.0, 1.2] * 3,
    seed=list(range(12)),
)


def of_row(sampling, row):
    return jax.tree.map(lambda values: values[row], sampling, is_leaf=lambda x: isinstance(x, list))


def bits(generations):
    return [(each.tokens, np.asarray(each.logprobs, np.float32).view(np.int32).tolist()) for each in generations]


def continued(model, prompts=PROMPTS, sampling=SAMPLING, compute=EXACT, **options):
    return bits(llama_jax.generate(*model, prompts, max_new_tokens=NEW, sampling=sampling, compute=compute, **options))


@pytest.fixture(scope="module")
def alone(model):
    return [continued(model, [prompt], of_row(SAMPLING, row))[0] for row, prompt in enumerate(PROMPTS)]


def test_in_a_batch(model, alone):
    assert continued(model) == alone


@pytest.mark.slow
def test_shuffled_and_among_others(model, alone):
    order = random.Random(1).sample(range(len(PROMPTS)), len(PROMPTS))
    rows = [PROMPTS[i] for i in order] + some_prompts([3, 200], seed=5)
    chosen = [of_row(SAMPLING, i) for i in order] + [Sampling(), Sampling(temperature=1.0)]
    sampling = jax.tree.map(lambda *values: list(values), *chosen)
    assert continued(model, rows, sampling)[: len(order)] == [alone[i] for i in order]


def test_read_in_other_chunks(model, alone, monkeypatch):
    monkeypatch.setattr(compiled_decode, "MAX_PREFILL_CHUNK", 24)
    assert continued(model) == alone


@pytest.mark.slow
def test_with_drafts(model, alone):
    repeated = [prompt * 3 for prompt in PROMPTS[1:4]]
    greedy = Sampling()
    plain = continued(model, repeated, greedy)
    assert continued(model, repeated, greedy, draft=PromptLookup()) == plain
    assert continued(model, draft=PromptLookup()) == alone


def served(model, options, turns, prompts=PROMPTS):
    """What an engine gives each prompt, of which more come at every turn."""
    engine = Engine(*model, options)
    waiting = [
        GenerationRequest(prompt=prompt, max_new_tokens=NEW, sampling=of_row(SAMPLING, row))
        for row, prompt in enumerate(prompts)
    ]
    found = {id(request): [] for request in waiting}
    everything = [*waiting]
    rng = random.Random(turns)
    while waiting or engine.busy:
        for _ in range(rng.randrange(turns)):
            if waiting:
                request = waiting.pop()
                engine.submit(request, lambda update, to=found[id(request)]: to.extend(update.tokens))
        engine.step()
    stats = engine.stats()
    engine.close()
    tokens = [found[id(request)] for request in everything]
    return [
        ([t.id for t in each], np.asarray([t.logprob for t in each], np.float32).view(np.int32).tolist()) for each in tokens
    ], stats


OPTIONS = EngineOptions(rows=5, context=160, prefill_chunk=16, compute=EXACT)


@pytest.mark.parametrize("chunk", [16, pytest.param(48, marks=VARIANT)])
def test_served_among_others(model, alone, chunk):
    assert served(model, replace(OPTIONS, prefill_chunk=chunk), 3)[0] == alone


@pytest.mark.slow
def test_served_by_a_full_cache_and_read_again(model):
    prompts = some_prompts([28, 29, 30, 31] * 3, seed=6)  # of two pages, and a third one for what follows
    found, stats = served(model, replace(OPTIONS, cache_tokens=160), 4, prompts)
    assert found == continued(model, prompts)
    assert stats.preempted


def test_kept_prefixes(model):
    shared = some_prompts([48], seed=9)[0]
    prompts = [shared + tail for tail in some_prompts([1, 5, 30], seed=4)]
    want = continued(model, prompts, Sampling())
    engine = Engine(*model, OPTIONS)
    for prompt, expected in zip(prompts, want, strict=True):
        tokens = []
        engine.submit(GenerationRequest(prompt=prompt, max_new_tokens=NEW), lambda update: tokens.extend(update.tokens))  # noqa: B023
        while engine.step():
            pass
        found = [t.id for t in tokens], np.asarray([t.logprob for t in tokens], np.float32).view(np.int32).tolist()
        assert found == expected
    assert engine.stats().cached_tokens
    engine.close()


@pytest.mark.slow
@pytest.mark.rotating
@pytest.mark.parametrize("scaling", ["dynamic", "longrope"])
def test_frequencies_that_depend_on_the_length(scaling):
    """A pass without a cache is that of generation; of both kinds the usual pass is close."""
    factors = {"short_factor": (1.0,) * 16, "long_factor": (2.0,) * 16} if scaling == "longrope" else {}
    config = replace(
        CONFIG, rope_scaling=llama_jax.RopeScaling(kind=scaling, factor=2.0, original_max_seq_len=64, **factors)
    )
    params, tokens = model_of("float32")[1], np.asarray([some_prompts([100])[0]], np.int32)
    usual, found = (np.asarray(llama_jax.logits(config, params, tokens, compute)) for compute in (ComputeOptions(), EXACT))
    np.testing.assert_allclose(found, usual, atol=1e-3)


@pytest.mark.slow
@pytest.mark.rotating
def test_many_sinks_in_caches_of_other_capacities():
    model, cache = model_of("float32"), CacheOptions(window=20, sinks=300)
    prompts = some_prompts([200, 330], seed=2)
    alone = continued(model, prompts[:1], of_row(SAMPLING, 0), cache=cache)
    assert continued(model, prompts, Sampling(), cache=cache)[:1] == alone


@pytest.mark.slow
@pytest.mark.rotating
@pytest.mark.parametrize("cache", [CacheOptions("int8"), CacheOptions(window=20), CacheOptions(window=20, sinks=4)])
def test_other_caches(cache):
    model = model_of("float32")
    alone = [continued(model, [prompt], of_row(SAMPLING, row), cache=cache)[0] for row, prompt in enumerate(PROMPTS)]
    assert continued(model, cache=cache) == alone


@pytest.mark.slow
@pytest.mark.rotating
def test_with_an_adapter():
    lora = Lora(rank=3, alpha=5.0)
    model = CONFIG, apply_adapters(model_of("float32")[1], random_adapters(CONFIG, lora, seed=1), lora)
    alone = [continued(model, [prompt], of_row(SAMPLING, row))[0] for row, prompt in enumerate(PROMPTS[:6])]
    assert continued(model)[:6] == alone
    assert alone != [
        continued(model_of("float32"), [prompt], of_row(SAMPLING, i))[0] for i, prompt in enumerate(PROMPTS[:6])
    ]


@pytest.mark.slow
@pytest.mark.rotating
def test_without_native_kernels(monkeypatch):
    monkeypatch.setenv("LLAMA_JAX_NATIVE", "off")
    model = model_of("float32")
    alone = [continued(model, [prompt], of_row(SAMPLING, row))[0] for row, prompt in enumerate(PROMPTS)]
    assert continued(model) == alone


def test_the_numbers_are_those_of_the_model(model):
    for (tokens, logprobs), (others, plain) in zip(
        continued(model), continued(model, compute=ComputeOptions()), strict=True
    ):
        if tokens == others:
            # With quantized weights activations are rounded to 8 bits, near the middle of two steps to another one.
            matrix = model[1].blocks.attention.out
            tolerance = 0.05 if hasattr(matrix, "project") or matrix.dtype == jnp.bfloat16 else 1e-4
            both = (np.asarray(x, np.int32).view(np.float32) for x in (logprobs, plain))
            np.testing.assert_allclose(*both, atol=tolerance)


@pytest.mark.parametrize("kind", ["float32", pytest.param("bfloat16", marks=VARIANT)])
def test_a_neighbor_that_is_not_a_number(kind):
    """Its embedding overflows; the others' numbers are as they are alone."""
    config, params = model_of(kind)
    table = params.embedding
    params = params.replace(embedding=table.at[2].set(jnp.nan))
    lengths = np.asarray([4, 1, 7], np.int32)
    tokens = np.zeros((3, 8), np.int32)
    for row, prompt in enumerate((PROMPTS[2][:4], [2], PROMPTS[2])):
        tokens[row, : len(prompt)] = prompt
    cache = lambda rows: init_cache(config, rows, 32, table.dtype)
    positions = llama_jax.Positions(lengths=lengths)
    read = jax.jit(partial(llama_jax.forward, config, compute=EXACT))
    both, _ = read(params, tokens, cache(3), positions=positions)
    one, _ = read(params, tokens[2:], cache(1), positions=llama_jax.Positions(lengths=lengths[2:]))
    assert np.isnan(np.asarray(both[1, 0], np.float32)).all()
    assert (np.asarray(both[2, :7], np.float32) == np.asarray(one[0, :7], np.float32)).all()


def test_evaluated(model):
    """The loss of a text is the sum of what generation says of its tokens."""
    config, params = model
    (prompt,) = some_prompts([70], seed=8)
    (answer,) = llama_jax.generate(*model, [prompt], max_new_tokens=NEW, compute=EXACT)
    texts = [[*prompt, *answer.tokens], *some_prompts([3, 90, 12], seed=7)]
    found = []
    for rows in (texts, texts[:1]):
        ends = np.cumsum([len(row) for row in rows])
        starts = np.concatenate([[0], ends[:-1]])
        tokens = np.concatenate(rows).astype(np.int32)
        corpus = Corpus(tokens, starts, ends, np.ones(len(rows), np.int64), config.vocab_size, "")
        windows = cut_windows(corpus, 100, 100)
        measure = jax.jit(partial(token_nats, config, compute=evaluation_compute(params, EXACT)))
        measured = measure_windows(corpus, windows, 3, partial(measure, params), None, packed=False)
        nats, owner = (np.concatenate(parts) for parts in zip(*measured, strict=True))
        found.append(-nats[owner == 0].astype(np.float32))
    assert (found[0] == found[1]).all()
    assert found[0][-NEW:].tolist() == [np.float32(x) for x in answer.logprobs]


@pytest.mark.slow
@pytest.mark.rotating
@pytest.mark.parametrize("kind", ["float32", "bfloat16"])
def test_the_sampler_is_the_trainer(kind):
    """Log-probabilities of answers in a training step are those with which they were sampled."""
    config, params = model_of(kind)
    prompts, temperature = some_prompts([5, 17], seed=3), 0.7
    tokens, lengths = np.zeros((2, 17), np.int32), np.asarray([5, 17], np.int32)
    for row, prompt in zip(tokens, prompts, strict=True):
        row[: len(prompt)] = prompt
    options = RolloutOptions(3, 12, temperature, stop=(2,))
    rolled = jax.jit(partial(roll_out, config, options=options, compute=EXACT))
    answers = Completions(*map(np.asarray, rolled(params, RolloutPrompts(tokens, lengths, np.arange(6, dtype=np.uint32)))))
    rows = answer_rows(prompts, answers, np.ones(6, bool), 28)
    scored = rows._replace(advantages=jnp.asarray([1.0, -1.0, 0.5, 0.3, -0.2, 0.1]))
    loss = AnswerLoss(PolicyOptions("dapo"), temperature)

    @jax.jit
    def first_update(params, scored):
        total = lambda params: loss(config, params, scored, LossOptions(compute=EXACT), Sharding())
        gradients = jax.grad(lambda params: total(params).loss)(params)
        return (
            total(params),
            gradients,
            token_logprobs(config, params, scored.batch, LossOptions(compute=EXACT), temperature=temperature),
        )

    sums, gradients, logprobs = first_update(params, scored)
    mask = np.asarray(scored.batch.loss_mask[:, 1:])
    assert (np.asarray(logprobs)[mask] == rows.sampler_logprobs[mask]).all()
    assert sums.metrics["gap"] == 0
    # With the sampler's own numbers as those of the policy before, every ratio is 1.
    again, _, _ = first_update(params, scored._replace(old_logprobs=rows.sampler_logprobs))
    assert again.loss == sums.loss
    plain = jax.jit(jax.grad(lambda params: loss(config, params, scored, LossOptions(), Sharding()).loss))(params)
    tolerance = 1e-4 if kind == "float32" else 0.1
    for one, other in zip(jax.tree.leaves(gradients), jax.tree.leaves(plain), strict=True):
        scale = np.abs(np.asarray(other, np.float32)).max()
        np.testing.assert_allclose(np.asarray(one, np.float32), np.asarray(other, np.float32), atol=tolerance * scale)


@pytest.mark.slow
def test_with_the_usual_options_of_the_compiler(tmp_path):
    """Other tests are compiled without optimization."""
    text, found = tmp_path / "text.txt", tmp_path / "found.json"
    text.write_text(" ".join(random.Random(0).choices(["once", "upon", "a", "time", "there", "was", "king,"], k=4000)))
    options = ["--text", text, "--output", found, "--prompts", "12", "--longest", "120", "--no-price"]
    command = [sys.executable, exactness.__file__, *map(str, options), "--formats", "float32", "q4_0"]
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    subprocess.run(command, env=environment, check=True)
    for kind in ("float32", "q4_0"):
        ways = json.loads(found.read_text())[kind]["exact"]
        assert {way: result["other bits"] for way, result in ways.items() if isinstance(result, dict)} == dict.fromkeys(
            ["batches", "chunks", "drafts", "served", "full", "cached", "trainer"], 0
        )
        assert ways["preempted"]
        assert ways["cached tokens"]


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_without_native_matmuls_of_any_number_of_rows(dtype, monkeypatch):
    """Those of a CPU without AVX2 are for few rows."""
    monkeypatch.setattr(native, "has_tiles", lambda: False)
    config = replace(CONFIG, norm_eps=2e-5)  # programs of its own
    params = jit_init(config, jax.random.key(3), dtype)
    prompts = some_prompts([40, 20, 3, 9, 1, 60])
    alone = [llama_jax.generate(config, params, [prompt], max_new_tokens=NEW, compute=EXACT)[0] for prompt in prompts[:3]]
    assert llama_jax.generate(config, params, prompts, max_new_tokens=NEW, compute=EXACT)[:3] == alone


class TestRefused:
    @pytest.mark.parametrize("kind", ["dynamic", "longrope"])
    def test_texts_whose_length_changes_their_frequencies(self, kind):
        factors = {"short_factor": (1.0,) * 16, "long_factor": (2.0,) * 16} if kind == "longrope" else {}
        scaling = llama_jax.RopeScaling(kind=kind, factor=4.0, original_max_seq_len=32, **factors)
        config = replace(CONFIG, rope_scaling=scaling)
        params = jax.eval_shape(lambda: jit_init(config, jax.random.key(0)))
        rows = lambda length: WindowRows(*(np.ones((1, length), np.int32),) * 4)
        with pytest.raises(ConfigError, match=f"{kind}.*use at most 32"):
            jax.eval_shape(partial(token_nats, config, compute=EXACT), params, rows(33))
        assert jax.eval_shape(partial(token_nats, config, compute=EXACT), params, rows(32)).shape == (1, 32)

    def test_activations(self):
        hooks = {"final": lambda value, at: (value, value)}
        with pytest.raises(ConfigError, match="hooks"):
            llama_jax.logits_and_activations(*model_of("float32"), np.asarray([[1, 2]]), hooks, compute=EXACT)

    def test_rows_of_several_texts(self):
        positions = llama_jax.Positions(segment_ids=np.asarray([[1, 2]]), position_ids=np.asarray([[0, 0]]))
        with pytest.raises(ConfigError, match="packed rows"):
            llama_jax.forward(*model_of("float32"), np.asarray([[1, 2]]), positions=positions, compute=EXACT)

    def test_another_attention(self):
        with pytest.raises(ConfigError, match="exact"):
            ComputeOptions(exact=True, attention="dense")

    def test_experts(self):
        config = replace(llama_jax.preset("stories-260k"), experts=4, experts_per_token=2)
        with pytest.raises(ConfigError, match="experts"):
            llama_jax.generate(config, jit_init(config, jax.random.key(0)), [[1]], max_new_tokens=1, compute=EXACT)

    def test_a_table_of_adapters(self):
        lora = Lora(rank=2)
        params = adapter_table(CONFIG, model_of("float32")[1], [(random_adapters(CONFIG, lora, seed=1), lora)])
        with pytest.raises(ConfigError, match="adapter tables"):
            llama_jax.generate(CONFIG, choose_adapters(params, [0]), [[1]], max_new_tokens=1, compute=EXACT)

    def test_a_mesh(self):
        model = CONFIG, pad_on_mesh(CONFIG, parse_mesh("tensor=2"), jit_init(CONFIG, jax.random.key(0)))
        with pytest.raises(MeshError, match="one device"):
            llama_jax.generate(*model, [[1]], max_new_tokens=1, compute=EXACT)
