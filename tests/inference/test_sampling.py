from contextlib import ExitStack

import jax
import jax.numpy as jnp
import make_goldens
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from llama_jax import Sampling, preset
from llama_jax.errors import GenerationError
from llama_jax.inference.prepare_inputs import prepare_inputs
from llama_jax.inference.sampling import LogitMask, penalize, sample, score_threshold
from llama_jax.ops.sampling import argmax, random_key

jit_sample = jax.jit(sample)
jit_threshold = jax.jit(score_threshold)
jit_argmax = jax.jit(argmax)


def settings_of(rows) -> Sampling:
    temperature, top_k, top_p, min_p, penalty = np.asarray(rows).T
    return Sampling(temperature, top_k.astype(int), top_p, min_p, penalty).per_row(len(rows))


def seen_of(ids, vocab):
    seen = np.zeros((len(ids), vocab), bool)
    np.put_along_axis(seen, ids, True, axis=1)
    return seen


def our_scores(logits, ids, rows):
    """Scores after all rules, -inf where a token is dropped, to compare with transformers' processors."""
    sampling = settings_of(rows)
    scores = penalize(logits, sampling.repetition_penalty, seen_of(ids, logits.shape[1]))
    scores = scores / sampling.temperature[:, None]
    return jnp.where(scores >= jit_threshold(scores, sampling)[:, None], scores, -jnp.inf)


def test_kept_sets_and_scores_equal_transformers():
    with np.load(make_goldens.GOLDENS / "sampling.npz") as file:
        want = file["scores"]
    logits, ids = make_goldens.sampling_case(np.random.default_rng(3), len(make_goldens.SETTINGS))
    got = our_scores(logits, ids, make_goldens.SETTINGS)
    np.testing.assert_array_equal(np.isfinite(got), np.isfinite(want))
    np.testing.assert_allclose(got, want, rtol=1e-6)


@given(st.integers(0, 100_000), st.sampled_from([2, 7, 300]), st.integers(1, 320))
def test_top_k_keeps_the_k_largest_and_ties(seed, vocab, k):
    rng = np.random.default_rng(seed)
    scores = rng.integers(-6, 6, (2, vocab)).astype(np.float32)  # many ties
    sampling = Sampling(temperature=1.0, top_k=k).per_row(2)
    kept = scores >= np.asarray(jit_threshold(jnp.asarray(scores), sampling))[:, None]
    for row, mask in zip(scores, kept, strict=True):
        smallest = np.sort(row)[::-1][min(k, vocab) - 1]
        np.testing.assert_array_equal(mask, row >= smallest)


@given(st.integers(0, 100_000), st.sampled_from([2, 7, 300]), st.floats(0.01, 0.999))
def test_top_p_keeps_the_smallest_set_that_reaches_p(seed, vocab, p):
    scores = 3 * np.random.default_rng(seed).standard_normal((1, vocab)).astype(np.float32)
    sampling = Sampling(temperature=1.0, top_p=p).per_row(1)
    kept = scores[0] >= float(jit_threshold(jnp.asarray(scores), sampling)[0])
    probability = np.exp(scores[0].astype(np.float64))
    probability /= probability.sum()
    mass, smallest = probability[kept].sum(), probability[kept].min()
    assert mass >= p - 1e-5
    assert mass - smallest < p + 1e-5
    assert probability[~kept].max(initial=0) < smallest


@pytest.mark.parametrize(
    "special", [[np.inf, 1, 2], [-np.inf, 1, 2], [0.0, -0.0, -1.0], [-3.0, -2.0, -1e-30], [1e38, -1e38, 5]]
)
def test_thresholds_of_extreme_scores(special):
    scores = jnp.asarray([special], jnp.float32)
    for k in (1, 2):
        got = float(jit_threshold(scores, Sampling(temperature=1.0, top_k=k).per_row(1))[0])
        assert got == np.sort(np.asarray(special, np.float32))[::-1][k - 1]


def test_zero_temperature_is_greedy_whatever_else_is_set():
    logits = jax.random.normal(jax.random.key(0), (3, 100))
    sampling = Sampling(temperature=[0.0, 0.0, 1.0], top_k=5, top_p=0.5, min_p=0.1, seed=[1, 2, 3]).per_row(3)
    got = jit_sample(logits, sampling, np.zeros((3, 100), bool), np.zeros(3, np.int32))
    np.testing.assert_array_equal(got[:2], jnp.argmax(logits, -1)[:2])


def test_rows_known_to_be_greedy():
    """Without settings, the result is that of greedy settings, also where tokens are not allowed."""
    logits, seen, count = jax.random.normal(jax.random.key(0), (3, 100)), np.zeros((3, 100), bool), np.zeros(3, np.int32)
    settings = Sampling(seed=[1, 2, 3], top_k=4).per_row(3)
    assert settings.is_greedy()
    prepared = lambda sampling: prepare_inputs(preset("stories-260k"), [[1], [1]], 1, sampling, ())[2].sampling
    assert prepared(Sampling(seed=1)) is None
    assert all(prepared(Sampling(**other)) is not None for other in ({"temperature": [0, 0.1]}, {"repetition_penalty": 1.1}))
    np.testing.assert_array_equal(jit_sample(logits, None, seen, count), jit_sample(logits, settings, seen, count))
    branches = [str(jax.make_jaxpr(sample)(logits, each, seen, count)).count("cond[") for each in (None, settings)]
    assert branches[0] == 0 < branches[1]  # a GPU's host waits at each of them
    mask = LogitMask(jnp.bool_(True), lambda logits: logits.at[:, :50].set(-jnp.inf))
    np.testing.assert_array_equal(sample(logits, None, seen, count, mask), jnp.argmax(logits[:, 50:], axis=-1) + 50)


@given(st.integers(0, 100_000), st.sampled_from([256, 512, 1280, 300]), st.integers(1, 5))
def test_the_first_of_equal_scores_wins_in_parts_too(seed, vocab, kinds):
    """A CPU looks for the largest part of a row first, where its length can be divided."""
    rng = np.random.default_rng(seed)
    scores = rng.choice(np.array([-np.inf, -1, 0, 2, np.inf], np.float32)[:kinds], (3, vocab))
    scores[0, rng.integers(vocab)] = 3
    np.testing.assert_array_equal(jit_argmax(scores), scores.argmax(-1))


@pytest.mark.parametrize(
    ("impl", "partitionable", "dtype"),
    [
        *(("threefry2x32", True, "float32"), ("threefry2x32", False, "float64"), ("rbg", True, "float32")),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                ("threefry2x32", True, "float64"),
                ("threefry2x32", False, "float32"),
                *(("rbg", True, "float64"), ("rbg", False, "float32"), ("rbg", False, "float64")),
            )
        ),
    ],
)
def test_the_noise_is_that_of_jax(dtype, partitionable, impl):
    """Bit for bit, for every setting of JAX, although a CPU has another program for it."""

    @jax.jit
    def both(seed, step):
        plain = jax.random.fold_in(jax.random.key(seed), step)
        return [jax.random.gumbel(key, (1001,), dtype) for key in (random_key(seed, step), plain)]

    settings = jax.enable_x64(dtype == "float64"), jax.threefry_partitionable(partitionable), jax.default_prng_impl(impl)
    with ExitStack() as stack:
        for setting in settings:
            stack.enter_context(setting)
        for seed, step in [(0, 0), (2**32 - 1, 5), (7, 2**31 - 1)]:
            ours, plain = both(jnp.uint32(seed), jnp.int32(step))
            assert ours.dtype == dtype
            np.testing.assert_array_equal(ours, plain)


def test_the_noise_of_many_rows_is_that_of_jax_in_one_loop():
    seeds, steps = jnp.arange(5, dtype=jnp.uint32), jnp.arange(5)
    draw = lambda key: jax.jit(jax.vmap(lambda seed, step: jax.random.gumbel(key(seed, step), (700,))))
    plain = draw(lambda seed, step: jax.random.fold_in(jax.random.key(seed), step))
    ours = draw(random_key)
    np.testing.assert_array_equal(ours(seeds, steps), plain(seeds, steps))
    if jax.default_backend() == "cpu":
        loops = [run.lower(seeds, steps).as_text().count("stablehlo.while") for run in (ours, plain)]
        assert loops[0] < loops[1]


@pytest.mark.parametrize(
    ("settings", "forbidden"),
    [
        *(({}, True), ({"repetition_penalty": 2.0}, True)),
        *(({"temperature": [0.0, 0.9, 0.0], "seed": 4}, forbidden) for forbidden in (False, True)),
        *(pytest.param(settings, False, marks=pytest.mark.slow) for settings in ({}, {"repetition_penalty": 2.0})),
    ],
)
def test_what_a_row_may_not_choose_is_never_chosen(settings, forbidden):
    """Whatever the other rows do, and the rest is chosen as from the logits with -inf."""
    rng = np.random.default_rng(1)
    logits, seen = jnp.asarray(rng.standard_normal((3, 128)), jnp.float32), jnp.asarray(rng.random((3, 128)) < 0.5)
    barred = np.zeros((3, 128), bool)
    barred[1, np.argsort(logits[1])[-20:]] = True
    apply = lambda logits: jnp.where(barred, -jnp.inf, logits)
    sampling, steps = Sampling(**settings).per_row(3), np.arange(3, dtype=np.int32)
    restricted = jax.jit(lambda needed: sample(logits, sampling, seen, steps, LogitMask(needed, apply)))
    got = np.asarray(restricted(forbidden))
    want = jit_sample(apply(logits) if forbidden else logits, sampling, seen, steps)
    np.testing.assert_array_equal(got, want)
    assert not (forbidden and barred[1, got[1]])


def test_a_sharp_distribution_follows_its_probabilities():
    """20,000 draws from four tokens: frequencies within five standard errors of the softmax at the temperature."""
    logits, temperature, draws = np.array([1.0, 0.0, -1.0, 2.0], np.float32), 0.7, 20_000
    sampling = Sampling(temperature=temperature, seed=5).per_row(1)
    many = jax.jit(jax.vmap(lambda step: sample(jnp.asarray(logits)[None], sampling, np.zeros((1, 4), bool), step[None])[0]))
    counts = np.bincount(many(jnp.arange(draws)), minlength=4)
    want = np.exp(logits / temperature) / np.exp(logits / temperature).sum()
    np.testing.assert_array_less(np.abs(counts / draws - want), 5 * np.sqrt(want * (1 - want) / draws))


def test_a_row_depends_on_its_own_seed_and_step_alone():
    logits = jax.random.normal(jax.random.key(0), (1, 100))
    four = jnp.repeat(logits, 4, axis=0)
    unseen = np.zeros((4, 100), bool)
    batch = Sampling(temperature=[2.0, 1.0, 2.0, 2.0], top_k=[0, 3, 0, 0], seed=[7, 8, 7, 9]).per_row(4)
    steps = np.array([5, 5, 5, 5], np.int32)
    together = np.asarray(jit_sample(four, batch, unseen, steps))
    alone = jit_sample(logits, Sampling(temperature=2.0, seed=7).per_row(1), unseen[:1], steps[:1])
    assert together[0] == together[2] == int(alone[0])
    streams = [
        [
            int(jit_sample(logits, Sampling(temperature=2.0, seed=s).per_row(1), unseen[:1], np.array([i], np.int32))[0])
            for i in range(8)
        ]
        for s in (7, 8)
    ]
    assert streams[0] != streams[1]
    assert len(set(streams[0])) > 2


def test_nothing_sorts_the_vocabulary():
    sampling = Sampling(temperature=1.0, top_k=5, top_p=0.9, min_p=0.1, repetition_penalty=1.2).per_row(2)
    text = jit_sample.lower(np.zeros((2, 500), np.float32), sampling, np.zeros((2, 500), bool), np.zeros(2, np.int32))
    text = text.compile().as_text()
    assert " sort(" not in text
    assert "TopK" not in text


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -0.1),
        ("temperature", float("nan")),
        ("temperature", "hot"),
        ("top_k", -2),
        ("top_p", -0.1),
        ("min_p", -0.1),
        ("repetition_penalty", 0.0),
        ("seed", -1),
        ("top_k", [1, 2, 3]),
        ("temperature", 1e39),
        ("top_k", 10**23),
    ],
)
def test_impossible_values_are_named(field, value):
    with pytest.raises(GenerationError, match=field):
        Sampling(**{field: value}).per_row(2)


def test_values_near_zero_are_off_or_the_smallest():
    sampling = Sampling(temperature=1e-38, top_k=-1, top_p=0.0, min_p=1e-38).per_row(1)
    assert (sampling.temperature, sampling.top_k, sampling.min_p) == (0, 0, 0)
    assert 0 < sampling.top_p <= 1e-9
