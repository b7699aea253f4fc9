"""Hooks: what is seen at each point fits together, and what is changed is changed in every kind of pass."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import make_goldens
import numpy as np
import pytest
from conftest import as_float64, jit_init, sharp
from jax.tree_util import Partial

import llama_jax
from llama_jax import CacheOptions, ComputeOptions, Sharding, StepOptions
from llama_jax.errors import ConfigError, GenerationError
from llama_jax.inference.speculation import PromptLookup
from llama_jax.model.hooks import HOOK_POINTS, with_hooks
from llama_jax.model.logits import logits_and_activations
from llama_jax.model.lora import Lora, apply_adapters, init_adapters
from llama_jax.model.trees import quantize
from llama_jax.parallel.mesh import parse_mesh
from llama_jax.serving.engine import Engine
from llama_jax.serving.options import EngineOptions
from llama_jax.serving.requests import GenerationRequest

# Heads in groups; layers of two kinds, one with a window.
CONFIG = replace(
    make_goldens.KINDS["gqa"],
    **{"dim": 32, "n_heads": 4, "n_kv_heads": 2, "head_dim": 8, "n_layers": 2, "tie_embeddings": False, "max_seq_len": 64},
)
CONFIG = replace(CONFIG, layers=(llama_jax.LayerConfig(), llama_jax.LayerConfig(window=5)))
PROMPTS = [[3, 5, 7, 11, 13], [2, 4], list(range(20, 37))]
NEW = 6


def read(value, at):
    return value, value


def disturb(strength, value, at):
    """Something that depends on layer and position, and on the token alone."""
    layer = 0 if at.layer is None else at.layer + 1
    change = strength * (1 + layer)
    if at.positions is not None:
        per_token = jnp.sin(at.positions + 1.0)  # [B, T]
        on_queries = at.name in ("scores", "pattern")
        per_token = per_token[:, None] if on_queries else per_token
        change = change * per_token.reshape(per_token.shape + (1,) * (value.ndim - per_token.ndim))
    return value * (1 + change).astype(value.dtype), None


def everywhere(strength, names=tuple(HOOK_POINTS)):
    return {name: Partial(disturb, strength) for name in names}


@pytest.fixture(scope="module")
def params():
    return sharp(CONFIG, jax.random.key(1))


def greedy(params, prompt, new=NEW):
    """Token by token, from whole sequences."""
    tokens = list(prompt)
    for _ in range(new):
        padded = jnp.asarray([tokens + [0] * (32 - len(tokens))])
        tokens.append(int(jit_logits(params, padded)[0, len(tokens) - 1].argmax()))
    return tokens[len(prompt) :]


jit_logits = jax.jit(partial(llama_jax.logits, CONFIG))
jit_observe = jax.jit(
    lambda params, tokens, cache=None: logits_and_activations(
        CONFIG, params, tokens, dict.fromkeys(HOOK_POINTS, read), cache
    )
)
TOKENS = np.asarray([[3, 5, 7, 11, 13, 17, 19, 23], [2, 4, 6, 8, 10, 12, 14, 16]], np.int32)


def test_what_is_seen_fits_together(params):
    with jax.enable_x64(True):
        params = as_float64(params)
        logits, cache, kept = jit_observe(params, TOKENS)
        assert cache is None
        assert set(kept) == set(HOOK_POINTS)
        sizes = {"B": 2, "T": 8, "S": 8, "D": 32, "N": 4, "K": 2, "H": 8, "F": CONFIG.hidden_dim, "V": CONFIG.vocab_size}
        for name, axes in HOOK_POINTS.items():
            inside = () if name in ("embedded", "final", "logits") else (2,)
            assert kept[name].shape == inside + tuple(sizes[axis] for axis in axes.replace("...", "B T").split())
        close = partial(np.testing.assert_allclose, rtol=1e-9, atol=1e-9)
        close(kept["embedded"], params.embedding[TOKENS])
        blocks = params.blocks
        before = kept["embedded"]
        for layer, window in enumerate((99, 5)):
            seen = {name: value[layer] for name, value in kept.items() if name not in ("embedded", "final", "logits")}
            close(seen["residual_before"], before)
            keys, values = (jnp.repeat(seen[name], 2, axis=2) for name in ("keys", "values"))
            scores = jnp.einsum("btnh,bsnh->bnts", seen["queries"], keys) / np.sqrt(8)
            distance = np.arange(8)[:, None] - np.arange(8)
            scores = jnp.where((distance >= 0) & (distance < window), scores, jnp.finfo(jnp.float64).min)
            close(seen["scores"], scores)
            close(seen["pattern"], jax.nn.softmax(scores, axis=-1))
            close(seen["heads"], jnp.einsum("bnts,bsnh->btnh", seen["pattern"], values))
            close(seen["attention"], seen["heads"].reshape(2, 8, 32) @ blocks.attention.out[layer].T)
            close(seen["residual_between"], before + seen["attention"])
            close(seen["feed_forward"], seen["neurons"] @ blocks.feed_forward.down[layer].T)
            close(seen["residual_after"], seen["residual_between"] + seen["feed_forward"])
            before = seen["residual_after"]
        close(kept["logits"], kept["final"] @ params.lm_head.T)
        close(logits, kept["logits"])
        close(logits, jit_logits(params, TOKENS))


@pytest.mark.parametrize("name", HOOK_POINTS)
def test_with_a_cache_and_without_hooks_see_and_change_the_same(params, name):
    # At all points, of which the others change nothing: one program for every name.
    hooked = with_hooks(params, {point: Partial(disturb, 0.1 if point == name else 0.0) for point in HOOK_POINTS})
    whole, _, kept = jit_observe(hooked, TOKENS)
    assert float(jnp.abs(whole - jit_logits(params, TOKENS)).max()) > 1e-3
    cache = llama_jax.init_cache(CONFIG, 2, 16)
    _, cache, _ = jit_observe(hooked, TOKENS[:, :5], cache)
    logits, cache, cached = jit_observe(hooked, TOKENS[:, 5:], cache)
    np.testing.assert_allclose(logits, whole[:, 5:], rtol=1e-4, atol=1e-4)
    for point, value in kept.items():
        queries, axis = (value, -2) if point in ("logits", "final", "embedded") else (value, 2)
        axis = 3 if point in ("scores", "pattern") else axis
        expected = np.split(np.asarray(queries), [5], axis=axis)[1]
        found = cached[point][..., :8] if point in ("scores", "pattern") else cached[point]
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4, err_msg=point)


def test_a_layer_that_gets_another_runs_values_continues_it(params):
    """Activation patching: everything after the last layer's input is the other run's."""
    _, _, other = jit_observe(params, TOKENS[::-1])

    def patch(values, value, at):
        return jnp.where(at.layer == 1, values[1], value), None

    patched = with_hooks(params, {"residual_before": Partial(patch, other["residual_before"])})
    np.testing.assert_allclose(jit_logits(patched, TOKENS), other["logits"], rtol=1e-5, atol=1e-5)


STEERED = everywhere(0.05, ["residual_after", "heads", "neurons", "keys", "logits"])


@pytest.fixture(scope="module")
def steered(params):
    hooked = with_hooks(params, STEERED)
    expected = [greedy(hooked, prompt) for prompt in PROMPTS]
    assert expected != [greedy(params, prompt) for prompt in PROMPTS]
    return hooked, expected


@pytest.mark.parametrize(
    "options",
    [{}, {"draft": PromptLookup()}, pytest.param({"cache": CacheOptions(window=64)}, marks=pytest.mark.slow)],
    ids=str,
)
def test_generate_is_what_whole_sequences_say(steered, options):
    hooked, expected = steered
    found = llama_jax.generate(CONFIG, hooked, PROMPTS, max_new_tokens=NEW, **options)
    assert [row.tokens for row in found] == expected


def test_a_server(steered):
    hooked, expected = steered
    engine, found = Engine(CONFIG, hooked, EngineOptions(context=32)), [[] for _ in PROMPTS]
    for prompt, tokens in zip(PROMPTS, found, strict=True):
        engine.submit(
            GenerationRequest(prompt=prompt, max_new_tokens=NEW),
            lambda update, to=tokens: to.extend(each.id for each in update.tokens),
        )
    while engine.busy:
        engine.step()
    assert found == expected


@pytest.mark.slow
@pytest.mark.rotating
def test_over_a_mesh(steered, params, tmp_path):
    _, expected = steered
    llama_jax.save(tmp_path / "model", CONFIG, params)
    config, sharded, *_ = llama_jax.load(tmp_path / "model", mesh=parse_mesh("tensor=2"))
    found = llama_jax.generate(config, with_hooks(sharded, STEERED), PROMPTS, max_new_tokens=NEW)
    assert [row.tokens for row in found] == expected


def test_another_vector_compiles_nothing(params):
    traced = []

    def steer(vector, value, at):
        traced.append(at.name)
        return value + vector.astype(value.dtype), None

    counts = []
    for strength in (0.0, 1.0, 2.0):
        hooked = with_hooks(params, {"residual_after": Partial(steer, jnp.full(CONFIG.dim, strength))})
        llama_jax.generate(CONFIG, hooked, PROMPTS[:1], max_new_tokens=NEW)
        counts.append(len(traced))
    assert counts[0] > 0
    assert counts == counts[:1] * 3


@pytest.mark.parametrize("remat", [pytest.param("none", marks=pytest.mark.slow), "full"])
def test_derivatives_with_respect_to_a_hooks_arrays(params, remat):
    with jax.enable_x64(True):
        params = as_float64(params)

        @jax.jit
        def loss(strength):
            hooked = with_hooks(params, everywhere(strength, [name for name in HOOK_POINTS if name != "logits"]))
            options = llama_jax.LossOptions(compute=ComputeOptions(remat=remat))
            return llama_jax.next_token_loss(CONFIG, hooked, llama_jax.Batch(TOKENS), options=options)

        at, step = jnp.float64(0.03), 1e-6
        difference = (loss(at + step) - loss(at - step)) / (2 * step)
        np.testing.assert_allclose(jax.grad(loss)(at), difference, rtol=1e-6)
        np.testing.assert_allclose(jax.vmap(loss)(jnp.asarray([0.0, 0.03])), [loss(jnp.float64(0)), loss(at)], rtol=1e-12)


def test_a_training_step(params):
    """Hooks are not part of the state: they are added where the step takes its parameters."""
    optimizer = llama_jax.make_optimizer(llama_jax.OptimizerSettings(), 10)
    batch = llama_jax.Batch(np.asarray(TOKENS))
    hooks = everywhere(0.1, ["residual_after"])
    options = StepOptions()
    step = partial(llama_jax.train_step, CONFIG, optimizer, options=options)
    sharding = Sharding(prepare_params=partial(with_hooks, hooks=hooks))
    state, metrics = jax.jit(partial(step, sharding=sharding))(llama_jax.init_state(optimizer, params), batch)
    assert state.params.hooks is None
    loss = jax.jit(partial(llama_jax.next_token_loss, CONFIG, options=options.loss))
    wanted = loss(with_hooks(params, hooks), batch)
    np.testing.assert_allclose(metrics["loss"], wanted, rtol=1e-5)
    assert abs(float(wanted) - float(loss(params, batch))) > 1e-3


def test_hooks_at_one_point_run_in_order_and_none_is_nothing(params):
    double = lambda value, at: (2 * value, None)
    add = lambda value, at: (value + 1, value)
    _, _, kept = logits_and_activations(CONFIG, with_hooks(params, {"embedded": double}), TOKENS, {"embedded": add})
    np.testing.assert_allclose(kept["embedded"], 2 * params.embedding[TOKENS])
    assert with_hooks(params, {}).hooks is None


def test_logits_are_those_of_the_vocabulary(params):
    """Rows of padding, which a mesh adds, are not seen and stay impossible."""
    bias = jnp.arange(CONFIG.vocab_size, dtype=jnp.float32)
    hooked = with_hooks(params, {"logits": lambda value, at: (value + bias, None)})
    rows = lambda table: jnp.pad(table, ((0, 7), (0, 0)))
    padded = hooked.replace(embedding=rows(params.embedding), lm_head=rows(params.lm_head))
    expected, found = (llama_jax.logits(CONFIG, each, TOKENS) for each in (hooked, padded))
    np.testing.assert_allclose(found[..., : CONFIG.vocab_size], expected, rtol=1e-5, atol=1e-5)
    assert bool((found[..., CONFIG.vocab_size :] == -jnp.inf).all())


def test_generate_is_not_transformed(params):
    def summed(vector):
        hooked = with_hooks(params, {"final": Partial(lambda vector, value, at: (value + vector, None), vector)})
        return sum(llama_jax.generate(CONFIG, hooked, PROMPTS, max_new_tokens=NEW)[0].logprobs)

    with pytest.raises(GenerationError, match="loop on the host"):
        jax.grad(summed)(jnp.zeros(CONFIG.dim))


def raises(message):
    return pytest.raises(ConfigError, match=message)


def test_errors(params):
    with raises("residual_after"):
        with_hooks(params, {"residual": read})
    for wrong in (lambda value, at: (value[..., :1], None), lambda value, at: (value.astype(jnp.bfloat16), None)):
        with raises("float32"):
            logits_and_activations(CONFIG, params, TOKENS, {"heads": wrong})
    with raises("return"):
        logits_and_activations(CONFIG, params, TOKENS, {"final": lambda value, at: value})
    with raises("two hooks"):
        logits_and_activations(CONFIG, with_hooks(params, {"final": read}), TOKENS, {"final": read})
    hooked = with_hooks(params, {"logits": read})
    with raises("exact"):
        llama_jax.logits(CONFIG, hooked, TOKENS, ComputeOptions(exact=True))
    with raises("logits"):
        llama_jax.next_token_loss(CONFIG, hooked, llama_jax.Batch(TOKENS))
    with raises("attached"):
        apply_adapters(params, with_hooks(init_adapters(CONFIG, Lora(2), jax.random.key(0)), {"final": read}), Lora(2))
    optimizer = llama_jax.make_optimizer(llama_jax.OptimizerSettings(), 10)
    for keeps in (
        partial(llama_jax.init_state, optimizer),
        partial(quantize, quant_format="int8"),
        partial(llama_jax.save, "x", CONFIG),
    ):
        with raises("hooks"):
            keeps(with_hooks(params, {"final": Partial(disturb, 1.0)}))
    cache = llama_jax.init_cache(CONFIG, 2, 32, window=16, sinks=2, max_tokens_per_pass=8)
    for name in ("queries", "pattern"):
        with raises("sinks"):
            logits_and_activations(CONFIG, params, TOKENS, {name: read}, cache)
    with raises("attention"):
        logits_and_activations(CONFIG, params, TOKENS, {"scores": read}, compute=ComputeOptions(attention="blockwise"))

    mixture = replace(CONFIG, layers=(), experts=4, experts_per_token=2)
    with raises("experts"):
        logits_and_activations(mixture, jit_init(mixture, jax.random.key(0)), TOKENS, {"neurons": read})
