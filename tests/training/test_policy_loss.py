"""A step on judged answers against one that is written out, with the model's own logits."""

from dataclasses import replace
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from conftest import as_float64
from hypothesis import given
from hypothesis import strategies as st
from training_options import loss_options

import llama_jax
from llama_jax.model.forward_options import Sharding
from llama_jax.training.batch import Batch
from llama_jax.training.optimizer import OptimizerSettings, make_optimizer
from llama_jax.training.policy_gradient import PolicyOptions, group_advantages
from llama_jax.training.policy_loss import AnswerLoss, ScoredAnswers
from llama_jax.training.step import StepOptions, init_state, train_step

ROWS, LENGTH = 4, 9
TEMPERATURE = 0.7
POLICIES = {
    "dapo": PolicyOptions("dapo", clip=0.1, clip_high=0.15, beta=0.05),
    "grpo": PolicyOptions("grpo", clip=0.1),
    "dr_grpo": PolicyOptions("dr_grpo", length=6),
}


def judged_of(config, *, sampled=True):
    """Ragged prompts and answers, of which one is masked out."""
    rng = np.random.default_rng(0)
    begins, ends = np.array([1, 4, 2, 3]), np.array([5, 9, 10, 4])
    places = np.arange(LENGTH + 1)
    mask = (places >= begins[:, None]) & (places < ends[:, None])
    mask[3] = False
    tokens = rng.integers(0, config.vocab_size, (ROWS, LENGTH + 1), np.int32)
    numbers = -4 + 0.3 * rng.normal(size=(2, ROWS, LENGTH))
    return ScoredAnswers(Batch(tokens, loss_mask=mask), rng.normal(size=ROWS), numbers[0], numbers[1] if sampled else None)


def plain(config, params, reference, judged, policy):
    """Token by token."""
    tokens, mask = judged.batch.tokens, judged.batch.loss_mask

    def measure(params):
        logits = llama_jax.logits(config, params, tokens[:, :-1]) / TEMPERATURE
        return jnp.take_along_axis(jax.nn.log_softmax(logits), tokens[:, 1:, None], axis=-1)[..., 0]

    own, fixed = measure(params), measure(reference)
    rows = []
    for i in range(ROWS):
        losses = []
        for t in np.flatnonzero(mask[i, 1:]):
            ratio = jnp.exp(own[i, t] - (own[i, t] if judged.old_logprobs is None else judged.old_logprobs[i, t]))
            high = policy.clip if policy.clip_high is None else policy.clip_high
            bounded = jnp.clip(ratio, 1 - policy.clip, 1 + high)
            loss = -jnp.minimum(ratio * judged.advantages[i], bounded * judged.advantages[i])
            gap = fixed[i, t] - own[i, t]
            losses.append(loss + policy.beta * (jnp.exp(gap) - gap - 1))
        rows.append(losses)
    if policy.kind == "grpo":
        return sum(sum(row) / max(len(row), 1) for row in rows) / ROWS
    return sum(map(sum, rows)) / (ROWS * policy.length if policy.kind == "dr_grpo" else sum(map(len, rows)))


@pytest.mark.parametrize(
    ("kind", "accumulate"),
    [("dapo", 2), *((kind, 1) for kind in POLICIES)],
)
@pytest.mark.slow
def test_a_step_is_the_one_that_is_written_out(models, kind, accumulate):
    config, params = models["gqa"]
    policy = POLICIES[kind]
    with jax.enable_x64(True):
        params, judged = as_float64(params), judged_of(config)
        reference = jax.tree.map(lambda x: 1.05 * x, params)
        loss, optimizer = AnswerLoss(policy, TEMPERATURE), optax.sgd(1.0)
        options = StepOptions(loss_options(chunk=4), accumulate=accumulate, count=loss.count)

        def step(state, judged):
            if policy.beta:
                judged = loss.with_reference(reference, 2)(config, state.params, judged, options.loss, Sharding())
            return train_step(config, optimizer, state, judged, options, loss=loss)

        state, metrics = jax.jit(step)(init_state(optimizer, params), judged)
        written = jax.value_and_grad(lambda params: plain(config, params, reference, judged, policy))
        expected, gradients = jax.jit(written)(params)
        np.testing.assert_allclose(metrics["loss"], expected, rtol=1e-9)
        moved = jax.tree.map(jnp.subtract, params, state.params)
        jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-7, atol=1e-10), moved, gradients)
    assert float(metrics["tokens"]) == judged.batch.loss_mask[:, 1:].sum()
    assert 0 < float(metrics["clipped"]) < float(metrics["tokens"])


def test_at_first_the_ratio_is_one_and_the_sampler_is_compared(models):
    config, params = models["gqa"]
    judged = judged_of(config, sampled=False)
    loss, options = AnswerLoss(PolicyOptions(), TEMPERATURE), loss_options(chunk=4)

    @jax.jit
    def found(params, judged):
        scored = loss.with_reference(params, 2)(config, params, judged, options, Sharding()).reference
        later = judged._replace(sampler_logprobs=scored, old_logprobs=scored)
        return scored, loss(config, params, judged, options, Sharding()), loss(config, params, later, options, Sharding())

    scored, first, again = found(params, judged)
    mask = judged.batch.loss_mask[:, 1:]
    advantages = np.broadcast_to(judged.advantages[:, None], mask.shape)
    np.testing.assert_allclose(first.loss, -advantages[mask].sum(), rtol=1e-6)
    np.testing.assert_allclose(again.loss, first.loss, rtol=1e-5)
    assert first.metrics["clipped"] == again.metrics["clipped"] == 0
    np.testing.assert_allclose(first.metrics["gap"], np.abs(judged.sampler_logprobs - scored)[mask].sum(), rtol=1e-5)
    assert again.metrics["gap"] < 1e-5 * mask.sum()


def same_bits(tree, other):
    """Also of zeros, which have a sign."""
    bits = lambda leaves: jax.tree.map(lambda leaf: np.asarray(leaf).view(np.uint32), leaves)
    jax.tree.map(np.testing.assert_array_equal, bits(tree), bits(other))


@pytest.fixture(scope="module")
def adam_step(models):
    """By the kind of policy: a step of AdamW without weight decay, on answers that an earlier model sampled."""

    @cache
    def of(kind):
        loss = AnswerLoss(replace(POLICIES[kind], beta=0.0), TEMPERATURE)
        optimizer = make_optimizer(OptimizerSettings(weight_decay=0.0, warmup_steps=0), 10)
        options = StepOptions(loss_options(chunk=4), count=loss.count)
        state = jax.jit(partial(init_state, optimizer))(models["gqa"][1])
        return state, jax.jit(partial(train_step, models["gqa"][0], optimizer, options=options, loss=loss))

    return of


@pytest.mark.parametrize("kind", ["dapo", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("grpo", "dr_grpo"))])
@given(st.floats(-1e38, 1e38), st.sampled_from([2, 4]), st.booleans())
def test_equal_rewards_change_no_bit_of_the_parameters(models, adam_step, kind, reward, group, scale):
    state, step = adam_step(kind)
    advantages = group_advantages(np.full(ROWS, reward), group, scale=scale).values
    after, metrics = step(state, judged_of(models["gqa"][0])._replace(advantages=np.asarray(advantages, np.float32)))
    assert metrics["grad_norm"] == metrics["loss"] == metrics["skipped"] == 0
    same_bits(after.params, state.params)


def test_a_group_of_equal_rewards_adds_nothing_to_the_others(models, adam_step):
    state, step = adam_step("dapo")
    advantages = np.asarray(group_advantages(np.array([100.7, 100.7, 0.1, 0.3]), 2).values, np.float32)
    judged = judged_of(models["gqa"][0])._replace(advantages=advantages)
    other = judged._replace(batch=judged.batch._replace(tokens=judged.batch.tokens.copy()))
    other.batch.tokens[:2] = judged.batch.tokens[:2, ::-1]
    (after, metrics), (also, _) = step(state, judged), step(state, other)
    assert metrics["grad_norm"] > 0
    same_bits(after.params, also.params)
