"""Features that Llama's own tests cover in depth, for every family: a small random model of each through all of them."""

from dataclasses import replace
from functools import cache, partial

import jax
import numpy as np
import pytest
from adapters import random_adapters
from conftest import jit_dequantize, jit_logits
from family_models import FAMILY_MODELS, random_params
from jax.tree_util import Partial

import llama_jax
from llama_jax import Batch, CacheOptions, ComputeOptions, LayerConfig, Lora, PromptLookup, StepOptions
from llama_jax.errors import ConfigError
from llama_jax.model.forward import forward, unembed
from llama_jax.model.forward_options import Sharding
from llama_jax.model.lora import apply_adapters, freeze_base, merge
from llama_jax.model.trees import quantize
from llama_jax.serving.engine import Engine
from llama_jax.serving.options import EngineOptions
from llama_jax.serving.requests import GenerationRequest
from llama_jax.training.optimizer import adamw

TOKENS = np.random.default_rng(0).integers(0, 96, (2, 20), dtype=np.int32)
PROMPTS = [TOKENS[0, :4].tolist() * 2, TOKENS[1, :11].tolist()]
NEW, LONGEST = 6, 17
jit_forward, jit_unembed = (jax.jit(function, static_argnums=0) for function in (forward, unembed))


@cache
def model(kind):
    return FAMILY_MODELS[kind], random_params(FAMILY_MODELS[kind])


def tokens_of(config, params, **options):
    return [row.tokens for row in llama_jax.generate(config, params, PROMPTS, max_new_tokens=NEW, **options)]


def are_greedy(found, config, params):
    """Assert that each token is the argmax of the logits of whole sequences."""
    whole = [prompt + row for prompt, row in zip(PROMPTS, found, strict=True)]
    best = np.asarray(jit_logits(config, params, np.array([row + [0] * (LONGEST - len(row)) for row in whole]))).argmax(-1)
    for row, prompt, tokens in zip(best, PROMPTS, found, strict=True):
        assert row[len(prompt) - 1 : len(prompt) + NEW - 1].tolist() == tokens


@cache
def greedy(kind):
    found = tokens_of(*model(kind))
    are_greedy(found, *model(kind))
    return found


def near(found, wanted, share):
    """Assert that logits are at most so far apart, of their norm."""
    assert np.linalg.norm(found - wanted) <= share * np.linalg.norm(wanted)


def generates(kind):
    greedy(kind)


def computes_in(form, kind):
    config, params = model(kind)
    blocks = quantize(params, form)
    near(jit_logits(config, blocks, TOKENS), jit_logits(config, jit_dequantize(blocks), TOKENS), 0.05)
    assert all(len(row) == NEW for row in tokens_of(config, blocks))


def caches_in_int8(kind):
    config, params = model(kind)
    cache, found = llama_jax.init_cache(config, 2, 24, np.int8), []
    for start, stop in ((0, 11), (11, 12), (12, 20)):
        hidden, cache = jit_forward(config, params, TOKENS[:, start:stop], cache)
        found.append(jit_unembed(config, params, hidden))
    near(np.concatenate(found, axis=1), jit_logits(config, params, TOKENS), 0.05)


def slides(kind):
    """A cache with a window is the model whose layers have that window where their own is not smaller."""
    config, params = model(kind)
    layers = tuple(
        replace(layer, window=min(8, layer.window or config.window or 8)) for layer in config.layers or (LayerConfig(),)
    )
    are_greedy(tokens_of(config, params, cache=CacheOptions(window=8)), replace(config, window=None, layers=layers), params)


def speculates(kind):
    assert tokens_of(*model(kind), draft=PromptLookup()) == greedy(kind)


def is_served(kind):
    engine, found = Engine(*model(kind), EngineOptions(rows=2, context=32, prefill_chunk=16)), [[] for _ in PROMPTS]
    for prompt, tokens in zip(PROMPTS, found, strict=True):
        engine.submit(
            GenerationRequest(prompt=prompt, max_new_tokens=NEW),
            lambda update, to=tokens: to.extend(each.id for each in update.tokens),
        )
    while engine.busy:
        engine.step()
    engine.close()
    assert found == greedy(kind)


def is_exact(kind):
    config, params = model(kind)

    def bits(prompts):
        rows = llama_jax.generate(config, params, prompts, max_new_tokens=NEW, compute=ComputeOptions(exact=True))
        return [(row.tokens, np.asarray(row.logprobs, np.float32).tobytes()) for row in rows]

    if config.experts:
        with pytest.raises(ConfigError, match="exact=True does not support mixtures of experts"):
            bits(PROMPTS)
    else:
        assert bits([*PROMPTS, PROMPTS[0][:3]])[:2] == [bits([prompt])[0] for prompt in PROMPTS]


def _add(vector, value, at):
    return value + vector, None


def has_hooks(kind):
    config, params = model(kind)
    vector = np.random.default_rng(1).normal(size=config.dim).astype(np.float32)
    hooked = llama_jax.with_hooks(params, dict.fromkeys(("residual_after", "attention"), Partial(_add, vector)))
    found = tokens_of(config, hooked)
    are_greedy(found, config, hooked)
    assert found != greedy(kind)


def has_adapters(kind):
    """Matrices of experts have no adapters."""
    config, params = model(kind)
    lora = Lora(rank=3, alpha=5.0)
    if config.experts:
        with pytest.raises(ConfigError, match="gate_proj is a matrix of each expert"):
            random_adapters(config, lora)
        lora = replace(lora, targets=("q_proj", "k_proj", "v_proj", "o_proj"))
    adapters = random_adapters(config, lora)
    merged = jit_logits(config, merge(params, adapters, lora), TOKENS)
    near(jit_logits(config, apply_adapters(params, adapters, lora), TOKENS), merged, 1e-4)
    optimizer = adamw(1e-2)
    step = jax.jit(
        lambda params, state: llama_jax.train_step(
            config, optimizer, state, Batch(TOKENS), StepOptions(), freeze_base(Sharding(), params, lora)
        )
    )
    state, losses = llama_jax.init_state(optimizer, adapters), []
    for _ in range(6):
        state, metrics = step(params, state)
        losses.append(float(metrics["loss"]))
    assert losses[-1] < losses[0] - 0.3 / config.logits_scaling  # by which logits, and what a step changes, are smaller


FEATURES = {
    "generate": generates,
    "speculation": speculates,
    "engine": is_served,
    "int8": partial(computes_in, "int8"),
    "Q4_0": partial(computes_in, "q4_0"),
    "int8 cache": caches_in_int8,
    "window": slides,
    "exact": is_exact,
    "hooks": has_hooks,
    "LoRA": has_adapters,
}


def claim(kind, feature):
    refused = feature == "exact" and FAMILY_MODELS[kind].experts
    return pytest.mark.refuses(feature) if refused else pytest.mark.supports(feature)


@pytest.mark.slow
@pytest.mark.rotating
@pytest.mark.parametrize(
    ("kind", "feature"),
    [pytest.param(kind, feature, marks=claim(kind, feature)) for kind in FAMILY_MODELS for feature in FEATURES],
)
def test_each_family_has(kind, feature):
    FEATURES[feature](kind)
