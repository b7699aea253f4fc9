"""Groups of answers against a plain loop without a cache, and their log-probabilities against the trainer's."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from adapters import LORA, random_adapters
from conftest import jit_logits, louder
from training_options import loss_options

from llama_jax.errors import ConfigError
from llama_jax.inference.rollouts import RolloutOptions, RolloutPrompts, roll_out
from llama_jax.model.lora import apply_adapters
from llama_jax.model.trees import quantize
from llama_jax.training.batch import Batch
from llama_jax.training.logprobs import token_logprobs

LENGTHS = [1, 7, 4]
GROUP, MOST, WIDTH = 2, 11, 8
STOP = tuple(range(0, 60, 5))


def asked(config, seed=0):
    rng = np.random.default_rng(seed)
    tokens = rng.integers(0, config.vocab_size, (len(LENGTHS), WIDTH), np.int32)
    return RolloutPrompts(tokens, np.array(LENGTHS, np.int32), np.arange(len(LENGTHS) * GROUP, dtype=np.uint32) + 5)


def plain(config, params, prompts, options):
    """One answer after the other, the whole row anew for every token."""
    width = WIDTH + MOST
    for row, seed in enumerate(prompts.seeds):
        length = prompts.lengths[row // options.group_size]
        ids = prompts.tokens[row // options.group_size, :length].tolist()
        logprobs = []
        while len(logprobs) < options.max_new_tokens:
            padded = jnp.array([ids + [0] * (width - len(ids))])
            scores = jit_logits(config, params, padded)[0, len(ids) - 1].astype(jnp.float32) / options.temperature
            key = jax.random.fold_in(jax.random.key(seed), len(logprobs))
            token = int(jnp.argmax(scores + jax.random.gumbel(key, scores.shape)))
            logprobs.append(float(jax.nn.log_softmax(scores)[token]))
            ids.append(token)
            if token in options.stop:
                break
        yield ids[length:], logprobs


def rows_of(prompts, answers):
    """As a trainer reads them."""
    tokens = np.zeros((len(answers.tokens), WIDTH + MOST), np.int32)
    mask = np.zeros(tokens.shape, bool)
    for row, (found, valid) in enumerate(zip(answers.tokens, answers.valid, strict=True)):
        length, count = prompts.lengths[row // GROUP], valid.sum()
        tokens[row, :length] = prompts.tokens[row // GROUP, :length]
        tokens[row, length : length + count] = found[:count]
        mask[row, length : length + count] = True
    return Batch(tokens, loss_mask=mask)


def sampled(config, params, temperature):
    """Prompts, options, and the answers on the host."""
    options = RolloutOptions(GROUP, MOST, temperature, STOP)
    prompts = asked(config)
    found = jax.jit(partial(roll_out, config, options=options))(params, prompts)
    return prompts, options, type(found)(*map(np.asarray, found))


def check_by_trainer(config, params, prompts, answers, temperature, tolerance=2e-5):
    batch = rows_of(prompts, answers)
    measure = jax.jit(partial(token_logprobs, config, options=loss_options()))
    theirs = np.asarray(measure(params, batch, temperature=temperature))
    np.testing.assert_allclose(answers.logprobs[answers.valid], theirs[batch.loss_mask[:, 1:]], atol=tolerance)


@pytest.mark.parametrize("temperature", [0.7, pytest.param(1.0, marks=pytest.mark.slow)])
def test_answers_are_those_of_a_plain_loop_and_log_probabilities_the_trainers(models, temperature):
    config, params = models["gqa"]
    params = louder(params, 3)
    prompts, options, answers = sampled(config, params, temperature)
    ended = 0
    for row, (ids, logprobs) in enumerate(plain(config, params, prompts, options)):
        count = len(ids)
        assert answers.tokens[row, :count].tolist() == ids
        np.testing.assert_allclose(answers.logprobs[row, :count], logprobs, atol=2e-5)
        assert answers.valid[row].tolist() == [True] * count + [False] * (MOST - count)
        assert answers.stopped[row] == (ids[-1] in STOP)
        ended += answers.stopped[row]
    assert 0 < ended < len(answers.tokens), "both kinds of ends are to be seen"
    assert len({tuple(row) for row in answers.tokens.tolist()}) > len(LENGTHS), "answers of a group differ"
    check_by_trainer(config, params, prompts, answers, temperature)


@pytest.mark.parametrize(("temperature", "kind"), [(1.0, None), (0.7, "int8")], ids=["dense", "int8"])
@pytest.mark.slow
def test_with_adapters_over_stacked_blocks_they_are_the_trainers_too(models, temperature, kind):
    config, params = models["tied"]
    params = params
    params = params if kind is None else quantize(params, kind)
    joined = apply_adapters(params, random_adapters(config), LORA)
    prompts, _, answers = sampled(config, joined, temperature)
    # A CPU rounds activations of a quantized model too.
    check_by_trainer(config, joined, prompts, answers, temperature, 2e-5 if kind is None else 2e-2)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"group_size": 0}, "group_size=0"),
        ({"max_new_tokens": 0}, "max_new_tokens=0"),
        ({"temperature": 0}, "temperature=0 must be above 0"),
    ],
)
def test_options_that_cannot_be(settings, message):
    with pytest.raises(ConfigError, match=message):
        RolloutOptions(**{"group_size": 2, "max_new_tokens": 4} | settings)
