"""The gradients of transformers' model, and the course of torch's AdamW."""

from __future__ import annotations

from functools import partial

import jax
import make_goldens
import numpy as np
import pytest
from safetensors.numpy import load_file
from training_options import loss_options, step_options

import llama_jax
from llama_jax.training.batch import Batch
from llama_jax.training.loss import next_token_loss
from llama_jax.training.optimizer import OptimizerSettings, learning_rate_schedule, make_optimizer
from llama_jax.training.step import init_state, train_step

pytestmark = [
    pytest.mark.parity,
    # transformers and torch warn about themselves
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning"),
]

STEPS = 20
SETTINGS = OptimizerSettings(learning_rate=5e-3, warmup_steps=4)


@pytest.fixture(autouse=True)
def needs_torch():
    pytest.importorskip("torch", reason="needs the parity extra")
    pytest.importorskip("transformers", reason="needs the parity extra")


def tokens_of(config, seed, rows=4, length=24):
    return np.random.default_rng(seed).integers(0, config.vocab_size, (rows, length + 1), dtype=np.int32)


def their_loss(model, tokens):
    import torch

    logits = model(torch.from_numpy(tokens[:, :-1]).long()).logits
    targets = torch.from_numpy(tokens[:, 1:]).long().reshape(-1)
    return torch.nn.functional.cross_entropy(logits.reshape(len(targets), -1), targets)


@pytest.mark.parametrize("kind", ["gqa", "tied", "llama3", "biases"])
def test_gradients_are_those_of_transformers(kind, models, tmp_path):
    """To 1e-4 of each tensor's norm: our gradients are written as a model is, under transformers' names and layout."""
    config, params = models[kind]
    tokens = tokens_of(config, 0)
    model = make_goldens.transformers_model(config, make_goldens.random_tensors(config))
    loss = their_loss(model, tokens)
    loss.backward()
    loss_of = partial(next_token_loss, config, batch=Batch(tokens), options=loss_options(chunk=8))
    found, gradients = jax.jit(jax.value_and_grad(loss_of))(params)
    np.testing.assert_allclose(found, loss.item(), rtol=1e-5)
    llama_jax.save(tmp_path / "gradients", config, gradients, format="safetensors")
    ours = load_file(tmp_path / "gradients" / "model.safetensors")
    theirs = {name: parameter.grad.numpy() for name, parameter in model.named_parameters()}
    assert ours.keys() == theirs.keys()
    for name, expected in theirs.items():
        assert np.linalg.norm(ours[name] - expected) <= 1e-4 * np.linalg.norm(expected), name


def test_twenty_steps_follow_torch(models):
    """AdamW with decay for matrices only, clipping to 1, warm-up and cosine: every loss to 1e-4."""
    import torch

    config, params = models["gqa"]
    model = make_goldens.transformers_model(config, make_goldens.random_tensors(config)).train()
    matrices = [p for p in model.parameters() if p.ndim == 2]
    others = [p for p in model.parameters() if p.ndim != 2]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}], betas=(0.9, 0.95), eps=1e-8
    )
    rates = learning_rate_schedule(SETTINGS, STEPS)
    ours = make_optimizer(SETTINGS, STEPS)
    step = jax.jit(partial(train_step, config, ours, options=step_options(chunk=8)))
    state = init_state(ours, params)
    clipped = 0
    for i in range(STEPS):
        tokens = tokens_of(config, i)
        for group in optimizer.param_groups:
            group["lr"] = float(rates(i))
        optimizer.zero_grad()
        loss = their_loss(model, tokens)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        clipped += norm.item() > 1
        optimizer.step()
        state, metrics = step(state, Batch(tokens))
        assert float(metrics["loss"]) == pytest.approx(loss.item(), abs=1e-4), i
        assert float(metrics["grad_norm"]) == pytest.approx(norm.item(), rel=1e-3), i
    assert clipped  # or the test would not see it
