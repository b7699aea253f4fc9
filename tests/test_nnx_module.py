"""The model as a `flax.nnx.Module` computes what the pure functions do, to the bit, and optax's optimizers train both."""

from functools import partial

import jax
import numpy as np
import optax
import pytest
from adapters import LORA, random_adapters
from conftest import jit_logits, same
from flax import nnx

import llama_jax
from llama_jax import Batch, LlamaModule, OptimizerSettings, Sharding, make_optimizer
from llama_jax.errors import ConfigError
from llama_jax.model.trees import quantize
from llama_jax.training.step import init_state, train_step

TOKENS = np.random.default_rng(0).integers(0, 64, (4, 17), np.int32)
BATCH = Batch(TOKENS)
loss_of = lambda module: llama_jax.next_token_loss(module.config, module.pure(), BATCH)


@pytest.fixture(scope="module")
def model(models):
    return models["gqa"]


def module_steps(module, optimizer, wrt=nnx.Param, steps=5):
    """The losses of some steps of `nnx.Optimizer`, which change the module."""
    holder = nnx.Optimizer(module, optimizer, wrt=wrt)

    @nnx.jit
    def step(module, holder):
        loss, gradients = nnx.value_and_grad(loss_of, argnums=nnx.DiffState(0, wrt))(module)
        holder.update(module, gradients)
        return loss

    return [float(step(module, holder)) for _ in range(steps)]


def pure_steps(config, optimizer, params, sharding=Sharding(), steps=5):
    """(Losses, parameters) of `train_step`."""
    state, losses = init_state(optimizer, params), []
    step = jax.jit(partial(train_step, config, optimizer, sharding=sharding))
    for _ in range(steps):
        state, metrics = step(state, BATCH)
        losses.append(float(metrics["loss"]))
    return losses, state.params


def test_logits_and_gradients_are_those_of_the_functions(model):
    config, params = model
    module = LlamaModule(config, params)
    np.testing.assert_array_equal(nnx.jit(lambda module: module(TOKENS))(module), jit_logits(config, params, TOKENS))
    gradients = nnx.jit(nnx.grad(loss_of))(module)
    expected = jax.jit(jax.grad(partial(llama_jax.next_token_loss, config)))(params, BATCH)
    same(nnx.merge(nnx.graphdef(params), nnx.as_pure(gradients)["params"]), expected)  # by the names of the fields


@pytest.mark.parametrize("kind", [*(pytest.param(kind, marks=pytest.mark.slow) for kind in ("dense", "int8")), "adapters"])
def test_split_merge_and_back(model, kind):
    config, params = model
    given = {"dense": (params,), "int8": (quantize(params, "int8"),), "adapters": (params, random_adapters(config), LORA)}[
        kind
    ]
    module = LlamaModule(config, *given)
    merged = nnx.merge(*nnx.split(module))
    expected = given[0] if kind != "adapters" else llama_jax.apply_adapters(*given)
    same(merged.pure(), expected)
    prompt = [[1, 5, 9]]
    found = llama_jax.generate(config, merged.pure(), prompt, max_new_tokens=4)
    assert found == llama_jax.generate(config, expected, prompt, max_new_tokens=4)


@pytest.mark.parametrize(
    "settings",
    [
        OptimizerSettings(learning_rate=1e-2, clip_norm=0.2, warmup_steps=2),
        OptimizerSettings(name="muon", learning_rate=1e-2),
    ],
    ids=["adamw", "muon"],
)
@pytest.mark.slow
def test_steps_with_our_optimizers(model, settings):
    config, params = model
    module, optimizer = LlamaModule(config, params), make_optimizer(settings, 10)
    losses, expected = pure_steps(config, optimizer, params)
    assert module_steps(module, module.wrap_optimizer(optimizer)) == losses
    same(module.pure(), expected)


OF_OPTAX = {
    "apply_if_finite": optax.apply_if_finite(optax.adamw(1e-2), 5),
    "MultiSteps": optax.MultiSteps(optax.adamw(1e-2), 2),
    "partition": optax.partition(
        {"train": optax.adamw(1e-2), "freeze": optax.set_to_zero()},
        lambda params: jax.tree.map(lambda array: "train" if array.ndim > 2 else "freeze", params),
    ),
    "inject_hyperparams": optax.inject_hyperparams(optax.adamw)(optax.linear_schedule(1e-2, 1e-3, 5)),
    "adafactor": optax.adafactor(1e-2, min_dim_size_to_factor=8),
    "lion": optax.lion(1e-3),
    "schedule_free": optax.contrib.schedule_free_adamw(1e-2),
    "prodigy": optax.contrib.prodigy(),
}


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.slow] * (n != "apply_if_finite")) for n in OF_OPTAX])
def test_steps_with_optimizers_of_optax(model, name):
    config, params = model
    losses, expected = pure_steps(config, OF_OPTAX[name], params)
    assert losses[-1] < losses[0]
    module = LlamaModule(config, params)
    np.testing.assert_allclose(module_steps(module, OF_OPTAX[name]), losses, rtol=1e-5)
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-3, atol=1e-5), module.pure(), expected)


def test_adapters_alone_are_trained(model):
    config, params = model
    module = LlamaModule(config, params, random_adapters(config), LORA)
    optimizer = make_optimizer(OptimizerSettings(lora_plus=4), 10)
    sharding = llama_jax.freeze_base(Sharding(), params, LORA)
    losses, expected = pure_steps(config, optimizer, random_adapters(config), sharding)
    assert module_steps(module, module.wrap_optimizer(optimizer), nnx.LoRAParam) == losses
    same(nnx.as_pure(module.adapters), expected)
    same(nnx.as_pure(module.params), params)


def test_what_does_not_go_together_is_an_error(model):
    config, params = model
    with pytest.raises(ConfigError, match="adapters and lora belong together"):
        LlamaModule(config, params, random_adapters(config))
    with pytest.raises(ConfigError, match="hooks"):
        LlamaModule(config, llama_jax.with_hooks(params, {"embedded": lambda x: None}))
