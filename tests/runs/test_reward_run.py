"""Training by rewards: what is judged better becomes more probable."""

import json
from dataclasses import replace

import jax
import numpy as np
import pytest
from mortal_run import recipe, write_words
from running import StopAt, caches, lines, same  # noqa: F401  # caches is a fixture

from llama_jax.errors import TrainingError
from llama_jax.model.lora import Lora
from llama_jax.runs.loop import train
from llama_jax.runs.recipe import RewardSettings
from llama_jax.training.optimizer import OptimizerSettings

REWARDS = '''
def letters(completions, **columns):
    """The share of characters that are letters."""
    return [sum(c.isascii() and c.isalpha() for c in text) / max(len(text), 1) for text in completions]

def vowels(completions, **columns):
    return [text.count("a") / max(len(text), 1) for text in completions]
'''
ANSWER = 8


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    path = tmp_path_factory.mktemp("rewards") / "judge.py"
    path.write_text(REWARDS)
    return path


@pytest.fixture(scope="module")
def prompts(tmp_path_factory):
    rng = np.random.default_rng(0)
    path = tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
    texts = ["".join(map(chr, rng.integers(97, 123, rng.integers(1, 8)))) for _ in range(40)]
    path.write_text("".join(json.dumps({"prompt": text, "id": i}) + "\n" for i, text in enumerate(texts)))
    return path


def recipe_for(file, **changes):
    """The model of the other runs, from random numbers."""
    rewards = RewardSettings((f"{file}:letters",), group=8, answer=ANSWER, held=8, samples=1)
    rewards = replace(rewards, **changes.pop("rewards", {}))
    usual = replace(
        recipe(),
        steps=12,
        batch=32,
        length=16,
        optimizer=OptimizerSettings(learning_rate=3e-2, schedule="constant", weight_decay=0.0),
        evaluate_every=6,
        save_every=0,
        log_every=1,
        ema_decay=0.0,
        rewards=rewards,
    )
    return replace(usual, **changes)


@pytest.fixture(scope="module")
def whole(file, prompts, tmp_path_factory):
    """A run of two updates on the same answers, without interruption: (folder, result, what was said)."""
    folder, log = tmp_path_factory.mktemp("whole"), StopAt()
    return folder, train(recipe_for(file, rewards={"updates": 2}), folder, [prompts], log=log), log.said


def test_what_is_rewarded_becomes_more_probable(whole):
    folder, result, said = whole
    found = lines(folder, "train")
    rewards = [line["reward"] for line in found]
    assert rewards[-1] > rewards[0] + 0.15
    assert found[0]["gap"] < 1e-4, "the sampler's log-probabilities are the trainer's"
    assert found[0]["clipped"] == 0
    assert rewards[0] == rewards[1], "the same answers for two steps"
    assert found[1]["clipped"] > 0
    assert 0 <= found[-1]["stopped"] <= 1
    assert 1 <= found[-1]["length"] <= ANSWER
    first, last = lines(folder, "validation")
    assert last["reward"] > first["reward"]
    assert result.validation.numbers["reward"] == last["reward"] == -last["loss"]
    assert result.validation.text.endswith("(64 answers)")
    assert "32 prompts to train on, of at most 8 tokens, 8 to evaluate" in said
    assert "on; 8 answers of at most 8 tokens to each of 4 prompts" in said
    assert "validation reward " in said
    assert said.count("    [") == 2, "a sample at each evaluation"


@pytest.mark.slow
def test_another_function_is_another_run(file, prompts, tmp_path):
    mine = tmp_path / "mine.py"
    mine.write_text(REWARDS)
    settings = recipe_for(mine, steps=2)
    train(settings, tmp_path / "run", [prompts])
    mine.write_text(REWARDS + "\n")
    with pytest.raises(TrainingError, match=r"the rewards is not what this run began with"):
        train(replace(settings, steps=4), tmp_path / "run", [prompts], resume=True)


@pytest.mark.slow
@pytest.mark.parametrize("quantize", [pytest.param("none", marks=pytest.mark.nightly), "int8"])
def test_adapters_learn_beside_a_reference(file, prompts, tmp_path, quantize):
    base = tmp_path / "base"
    train(replace(recipe(), evaluate_every=0, save_every=0), base, [write_words(tmp_path)])
    rewards = {"beta": 0.01, "loss": "grpo", "functions": (f"{file}:vowels",)}
    settings = recipe_for(file, steps=30, evaluate_every=0, rewards=rewards)
    adapters = replace(settings, lora=Lora(rank=4), quantize=quantize, vocabulary="given")
    train(adapters, tmp_path / "run", [prompts], weights=base)
    found = lines(tmp_path / "run", "train")
    assert found[0]["kl"] < 1e-6, "adapters change nothing at first"
    assert found[-1]["kl"] > found[0]["kl"]
    means = [np.mean([line["reward"] for line in some]) for some in (found[:5], found[-10:])]
    assert means[1] > means[0] + 0.1


@pytest.mark.slow
def test_with_all_parameters_the_reference_is_what_training_began_with(file, prompts, tmp_path):
    base = tmp_path / "base"
    settings = recipe_for(file, steps=2, evaluate_every=0)
    train(settings, base, [prompts])
    told = replace(settings, steps=4, rewards=replace(settings.rewards, beta=0.1), vocabulary="given")
    train(replace(told, steps=2), tmp_path / "half", [prompts], weights=base)
    whole = train(told, tmp_path / "run", [prompts], weights=base)
    found = [line["kl"] for line in lines(tmp_path / "run", "train")]
    assert found[0] < 1e-6 < found[-1]
    resumed = train(told, tmp_path / "half", [prompts], weights=base, resume=True)
    same(resumed.state, whole.state)
    with pytest.raises(
        TrainingError, match=r"rewards.beta penalizes divergence from the initial model; pass it with --weights"
    ):
        train(replace(told, vocabulary="byte"), tmp_path / "none", [prompts])


@pytest.mark.slow
def test_nothing_is_compiled_after_the_first_step(file, prompts, tmp_path, caplog):
    class Counting(StopAt):
        def _write(self, text, *, stays):
            super()._write(text, stays=stays)
            if text.startswith("step 1/"):
                caplog.clear()

    with jax.log_compiles():
        train(recipe_for(file, steps=4, evaluate_every=0, rewards={"updates": 2}), tmp_path, [prompts], log=Counting())
    assert [record.message for record in caplog.records if "Compiling" in record.message] == []
