"""Preference losses against TRL's; and their formulas in NumPy, which other tests take."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from preference_inputs import CASES, GOLDEN, numbers

from llama_jax.errors import ConfigError
from llama_jax.training.preference_loss import Pair, PreferenceOptions, kto_loss, preference_loss

ROWS = 6


@pytest.fixture(autouse=True)
def _in_float64():
    with jax.enable_x64(True):
        yield


def drawn(seed=0):
    """Sums of log-probabilities of model and reference, lengths, and the ratios of mismatched answers."""
    rng = np.random.default_rng(seed)
    lengths = Pair(*rng.integers(1, 20, (2, ROWS)).astype(float))
    policy = Pair(*(-np.abs(rng.normal(size=ROWS)) * count for count in lengths))
    reference = Pair(*(own + rng.normal(size=ROWS) for own in policy))
    return policy, reference, lengths, rng.normal(size=ROWS) + 0.5


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def formula(policy, reference, lengths, mismatched, o):
    """As the papers have them."""
    per_token = [sums / count for sums, count in zip(policy, lengths, strict=True)]
    ratios = [own - other for own, other in zip(policy, reference, strict=True)]
    difference = ratios[0] - ratios[1]
    if o.kind == "sigmoid":
        p = sigmoid(o.beta * difference)
        return -(1 - o.label_smoothing) * np.log(p) - o.label_smoothing * np.log(1 - p)
    if o.kind == "hinge":
        return np.maximum(0, 1 - o.beta * difference)
    if o.kind == "ipo":
        return (ratios[0] / lengths.chosen - ratios[1] / lengths.rejected - 0.5 / o.beta) ** 2
    if o.kind == "simpo":
        gamma = 0.5 if o.margin is None else o.margin
        p = sigmoid(o.beta * (per_token[0] - per_token[1]) - gamma)
        return -(1 - o.label_smoothing) * np.log(p) - o.label_smoothing * np.log(1 - p)
    if o.kind == "orpo":
        odds = [np.exp(x) / (1 - np.exp(x)) for x in per_token]
        return -per_token[0] - o.beta * np.log(sigmoid(np.log(odds[0] / odds[1])))
    z = max(0.0, float(np.mean(mismatched)))
    good, bad = sigmoid(o.beta * (ratios[0] - z)), sigmoid(o.beta * (z - ratios[1]))
    return (o.desirable * (1 - good) + o.undesirable * (1 - bad)) / 2


def losses_of(options, policy, reference, lengths, mismatched):
    return preference_loss(
        policy,
        None if options.kind in ("simpo", "orpo") else reference,
        lengths,
        options,
        mismatched if options.kind == "kto" else None,
    )


def test_nothing_flows_into_the_reference_or_the_rewards():
    policy, reference, lengths, mismatched = (jax.tree.map(jnp.asarray, part) for part in drawn())
    for options in CASES.values():

        def total(reference, mismatched, options=options):
            return losses_of(options, policy, reference, lengths, mismatched).losses.sum()

        assert not any(map(np.any, jax.tree.leaves(jax.grad(total, (0, 1))(reference, mismatched))))
        rewards = jax.grad(lambda p, o=options: sum(losses_of(o, p, reference, lengths, mismatched).rewards).sum())
        assert not any(map(np.any, rewards(policy)))


@pytest.mark.parametrize("logprob", [-1e-12, -1e-3, -0.7, -3.0, -800.0])
def test_odds_are_finite_near_both_ends(logprob):
    pair = Pair(jnp.full(1, logprob), jnp.full(1, -1.0))
    found = jax.value_and_grad(lambda p: preference_loss(p, None, Pair(1.0, 1.0), PreferenceOptions("orpo")).losses[0])(pair)
    assert all(map(np.isfinite, jax.tree.leaves(found)))


def test_answers_that_are_no_pairs():
    policy, reference, _, mismatched = drawn()
    options = PreferenceOptions("kto", 0.3, undesirable=1.3)
    ratios = np.concatenate([own - other for own, other in zip(policy, reference, strict=True)])
    each = kto_loss(ratios, np.arange(2 * ROWS) < ROWS, mismatched, options)
    np.testing.assert_allclose(each.reshape(2, ROWS).mean(axis=0), losses_of(options, *drawn()).losses, rtol=1e-12)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"kind": "dpo"}, "kind='dpo' must be one of sigmoid, hinge"),
        ({"beta": 0}, "beta=0 must be above 0"),
        ({"kind": "hinge", "label_smoothing": 0.1}, "label_smoothing=0.1 applies only to sigmoid and simpo, not to hinge"),
        ({"margin": 0.5}, "margin=0.5 applies only to simpo, not to sigmoid"),
    ],
)
def test_options_that_cannot_be(settings, message):
    with pytest.raises(ConfigError, match=message):
        PreferenceOptions(**settings)


@pytest.mark.parametrize(
    ("kind", "given", "message"),
    [
        ("sigmoid", (), "sigmoid needs the reference's log-probabilities"),
        ("simpo", ("reference", "lengths"), "simpo has no reference; pass None"),
        ("kto", ("reference",), "kto needs log-probabilities of mismatched answers"),
    ],
)
def test_what_is_missing_is_named(kind, given, message):
    policy, reference, lengths, mismatched = drawn()
    values = {"reference": reference, "lengths": lengths, "mismatched": mismatched}
    with pytest.raises(ConfigError, match=message):
        preference_loss(policy, options=PreferenceOptions(kind), **{name: values[name] for name in given})


@pytest.mark.parametrize("case", CASES)
def test_losses_and_gradients_are_trls(case):
    """Of a mean over pairs, as TRL's trainers take it."""
    goldens = np.load(GOLDEN)
    policy, reference, lengths, mismatched = numbers()
    options = CASES[case]

    def mean(policy):
        losses = losses_of(options, policy, reference, lengths, mismatched).losses
        if options.kind == "orpo":  # TRL's function is of the odds alone
            losses = losses + policy.chosen / lengths.chosen
        return jnp.mean(losses)

    loss, gradients = jax.jit(jax.value_and_grad(mean))(Pair(*map(jnp.asarray, policy)))
    np.testing.assert_allclose(loss, goldens[f"{case} loss"], rtol=1e-6)
    np.testing.assert_allclose(np.stack(gradients), goldens[f"{case} gradients"], rtol=1e-6, atol=1e-12)
