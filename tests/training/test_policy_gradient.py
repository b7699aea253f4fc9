"""Advantages, and policy gradients against TRL's."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from preference_inputs import GOLDEN, POLICIES, rollouts

from llama_jax.errors import ConfigError
from llama_jax.training.policy_gradient import PolicyOptions, group_advantages, policy_loss


@pytest.fixture(autouse=True)
def _in_float64():
    with jax.enable_x64(True):
        yield


def mean_of(options, logprobs, sampled, advantages, mask, reference):
    found = policy_loss(logprobs, sampled, advantages, mask, options, reference if options.beta else None)
    return found.loss / found.divisor


def test_what_is_counted():
    advantages = jnp.array([1.0, -1.0])
    mask = jnp.array([[True, True, False], [True, True, True]])
    ratios = jnp.array([[1.5, 0.5, 9.0], [1.5, 0.5, 1.0]])
    found = policy_loss(jnp.log(ratios), jnp.zeros((2, 3)), advantages, mask)
    assert (found.clipped, found.tokens, found.divisor, found.divergence) == (2, 5, 5, 0)
    high = policy_loss(jnp.log(ratios), jnp.zeros((2, 3)), advantages, mask, PolicyOptions(clip_high=0.6))
    assert high.clipped == 1
    assert policy_loss(jnp.log(ratios), jnp.zeros((2, 3)), advantages, mask, PolicyOptions("grpo")).divisor == 2
    assert (
        policy_loss(jnp.log(ratios), jnp.zeros((2, 3)), advantages, mask, PolicyOptions("dr_grpo", length=9)).divisor == 18
    )


def test_what_lies_outside_the_answers_changes_nothing():
    logprobs, sampled, reference, advantages, mask = rollouts()
    options = PolicyOptions(beta=0.1)
    wild = np.where(mask, logprobs, np.inf)
    found = jax.value_and_grad(lambda x: mean_of(options, x, sampled, advantages, mask, reference))
    for one, other in zip(found(jnp.asarray(logprobs)), found(jnp.asarray(wild)), strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.slow
def test_parts_of_a_batch_are_the_batch():
    for options in POLICIES.values():
        whole, *parts = (loss_of(options, rows) for rows in (slice(None), slice(0, 2), slice(2, None)))
        for name in ("loss", "divisor", "clipped", "divergence", "tokens"):
            np.testing.assert_allclose(sum(getattr(part, name) for part in parts), getattr(whole, name), rtol=1e-12)


def loss_of(options, rows):
    logprobs, sampled, reference, advantages, mask = (part[rows] for part in rollouts())
    return policy_loss(logprobs, sampled, advantages, mask, options, reference if options.beta else None)


def test_advantages_are_differences_within_a_group():
    rewards = np.array([1.0, 0.0, 0.0, 1.0, 0.5, 0.5, 0.5, 0.5, 3.0, 1.0, 2.0, 2.0])
    found = group_advantages(jnp.asarray(rewards), 4)
    groups = rewards.reshape(3, 4)
    expected = (groups - groups.mean(axis=1, keepdims=True)) / (groups.std(axis=1, ddof=1, keepdims=True) + 1e-4)
    np.testing.assert_allclose(found.values, expected.ravel(), rtol=1e-12)
    assert found.flat == 1
    assert not np.asarray(found.values)[4:8].any()
    unscaled = group_advantages(jnp.asarray(rewards), 4, scale=False).values
    np.testing.assert_allclose(unscaled, (groups - groups.mean(axis=1, keepdims=True)).ravel())
    for group in (1, 5):
        with pytest.raises(ConfigError, match=f"group={group} must be at least 2 and divide the 12 answers"):
            group_advantages(jnp.asarray(rewards), group)


FINITE = st.floats(-1e38, 1e38)


@given(st.lists(FINITE, min_size=1, max_size=4), st.integers(2, 17), st.booleans(), st.sampled_from(["f8", "f4"]))
def test_advantages_of_equal_rewards_are_exactly_zero(rewards, group, scale, dtype):
    repeated = np.repeat(np.array(rewards, dtype), group)
    traced = jax.jit(group_advantages, static_argnames=("group", "scale"))
    for found in (
        group_advantages(repeated, group, scale=scale),
        group_advantages(jax.device_put(repeated), group, scale=scale),
        traced(repeated, group=group, scale=scale),
    ):
        assert not np.asarray(found.values).any()
        assert found.flat == len(rewards)


@given(st.floats(1e-9, 1e-2), st.floats(-1e6, 1e6), st.integers(2, 9), st.booleans())
def test_differences_below_a_float32_step_of_the_rewards_are_kept(difference, reward, group, scale):
    rewards = np.full(group, reward)
    rewards[1] += difference
    difference = rewards[1] - reward  # as float64 rounds it
    found = group_advantages(rewards, group, scale=scale)
    expected = np.full(group, -difference / group)
    expected[1] += difference
    expected /= difference / np.sqrt(group) + 1e-4 if scale else 1
    np.testing.assert_allclose(found.values, expected, rtol=1e-9, atol=1e-300)
    assert found.flat == (difference == 0)


@pytest.mark.parametrize("reward", [np.nan, np.inf, -np.inf, 1e39])
def test_rewards_without_an_advantage_are_refused(reward):
    with pytest.raises(ConfigError, match=r"rewards\[2\]=.* must be finite and within 1e\+38 of 0"):
        group_advantages(np.array([0.0, 1.0, reward, 1.0]), 2)


def test_weights_of_tokens_are_factors_in_every_sum():
    logprobs, sampled, reference, advantages, mask = rollouts()
    weights = mask * np.random.default_rng(0).random(mask.shape) / 10
    options = PolicyOptions(beta=0.1)
    found = policy_loss(logprobs, sampled, advantages, weights, options, reference)
    parts = []
    for i, t in np.argwhere(mask):
        alone = np.zeros(mask.shape, bool)
        alone[i, t] = True
        parts.append((weights[i, t], policy_loss(logprobs, sampled, advantages, alone, options, reference)))
    for name in ("loss", "divisor", "clipped", "divergence", "tokens"):
        np.testing.assert_allclose(getattr(found, name), sum(w * getattr(part, name) for w, part in parts), rtol=1e-12)
    mean = policy_loss(logprobs, sampled, advantages, weights, PolicyOptions("grpo"))
    ten = policy_loss(logprobs, sampled, advantages, 10 * weights, PolicyOptions("grpo"))
    np.testing.assert_allclose(mean.loss, ten.loss, rtol=1e-12)  # of each answer the weighted mean


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"kind": "ppo"}, "kind='ppo' must be one of grpo, dr_grpo, dapo"),
        ({"clip": 1.0}, "clip=1.0 must be at least 0 and below 1"),
        ({"kind": "dr_grpo"}, "dr_grpo needs the length of the longest answer"),
        ({"length": 3}, "dapo does not use length, but length=3"),
    ],
)
def test_options_that_cannot_be(settings, message):
    with pytest.raises(ConfigError, match=message):
        PolicyOptions(**settings)


def test_a_reference_is_read_or_refused():
    logprobs, sampled, reference, advantages, mask = rollouts()
    with pytest.raises(ConfigError, match=r"beta=0.1 needs the reference's"):
        policy_loss(logprobs, sampled, advantages, mask, PolicyOptions(beta=0.1))
    with pytest.raises(ConfigError, match=r"beta=0.0 does not use a reference"):
        policy_loss(logprobs, sampled, advantages, mask, PolicyOptions(), reference)


@pytest.mark.parametrize("case", POLICIES)
def test_losses_and_gradients_are_trls(case):
    goldens = np.load(GOLDEN)
    logprobs, sampled, reference, advantages, mask = rollouts()
    loss, gradient = jax.value_and_grad(
        lambda logprobs: mean_of(POLICIES[case], logprobs, sampled, advantages, mask, reference)
    )(jnp.asarray(logprobs))
    np.testing.assert_allclose(loss, goldens[f"{case} loss"], rtol=1e-6)
    np.testing.assert_allclose(gradient, goldens[f"{case} gradients"], rtol=1e-6, atol=1e-12)
