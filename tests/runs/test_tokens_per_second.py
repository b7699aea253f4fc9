"""Tokens per second are of tokens that are not padding, in every kind of training."""

import json
from dataclasses import replace

import mortal_run
import numpy as np
import pytest
from mortal_run import preferring, recipe, write_words
from running import StopAt, caches, lines  # noqa: F401  # caches is a fixture

from llama_jax.data import ChatReading
from llama_jax.parallel.mesh import MeshSizes
from llama_jax.runs.loop import train
from llama_jax.tokenizers.sentencepiece import byte_tokenizer
from llama_jax.training.distillation import DistillOptions
from llama_jax.training.preference_loss import PreferenceOptions

BATCH, LENGTH, STEPS = 8, 48, 3
PROMPT, ANSWER, OTHER = "abcdefghijkl", " yes, it is so.", " no, it is not."
QUICK = {"steps": STEPS, "batch": BATCH, "length": LENGTH, "evaluate_every": 0, "save_every": 0, "ema_decay": 0.0}
# One conversation fits into a row of 49 tokens.
CONVERSATION = len(byte_tokenizer().encode(PROMPT + ANSWER)) + 1


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Examples for every task, in which all prompts have the same number of tokens."""
    folder = tmp_path_factory.mktemp("data")
    prompts = [f"{PROMPT[:-2]}{i}" for i in range(10, 90)]

    def write(name, **fields):
        path = folder / f"{name}.jsonl"
        path.write_text("".join(json.dumps({"prompt": prompt, **fields}) + "\n" for prompt in prompts))
        return path

    return {
        "chats": write("chats", completion=ANSWER),
        "pairs": write("pairs", chosen=ANSWER, rejected=OTHER),
        "prompts": write("prompts"),
        "text": write_words(folder),
    }


def tokens_of_steps(settings, data, folder, **options):
    """Tokens per second times seconds, and the lines of the steps: the first has compilation in it, as the step's time."""
    train(settings, folder, [data], log=StopAt(), **options)
    found = lines(folder, "train")
    seconds = np.diff([0.0, *(line["seconds"] for line in found)])
    return seconds * [line["tokens_per_second"] for line in found], found


@pytest.mark.parametrize(
    ("changes", "options"),
    [
        ({}, {}),
        pytest.param({}, {"mesh": MeshSizes(2), "backend": "pmap"}, marks=pytest.mark.slow),
        pytest.param({"exact": True}, {"mesh": MeshSizes(4)}, marks=pytest.mark.slow),
    ],
    ids=["one", "pmap", "exact"],
)
def test_of_chats(data, tmp_path, changes, options):
    settings = replace(recipe(), **QUICK, chats=ChatReading(), **changes)
    found, logged = tokens_of_steps(settings, data["chats"], tmp_path, **options)
    np.testing.assert_allclose(found, BATCH * CONVERSATION, rtol=1e-3)
    assert 2 * CONVERSATION > LENGTH + 1  # one in each row
    # The targets are the answers.
    assert [line["tokens"] for line in logged] == [step * BATCH * (len(ANSWER) + 1) for step in (1, 2, 3)]


@pytest.mark.slow
def test_of_text_rows_are_full(data, tmp_path):
    settings = replace(recipe(), **QUICK, log_every=3)
    found, _ = tokens_of_steps(settings, data["text"], tmp_path / "teacher")
    np.testing.assert_allclose(found, 3 * BATCH * LENGTH, rtol=1e-3)  # of all steps since the line before
    settings = replace(settings, distill=DistillOptions(str(tmp_path / "teacher")), vocabulary="given")
    found, _ = tokens_of_steps(settings, data["text"], tmp_path / "student")
    np.testing.assert_allclose(found, 3 * BATCH * LENGTH, rtol=1e-3)  # each once, though the teacher reads it too


@pytest.mark.slow
def test_of_preferences_and_rewards(data, tmp_path):
    base = tmp_path / "base"
    train(replace(recipe(), **QUICK), base, [data["text"]])
    settings = replace(preferring(), **QUICK)
    pairs, _ = tokens_of_steps(settings, data["pairs"], tmp_path / "dpo", weights=base)
    np.testing.assert_allclose(pairs, BATCH * 2 * CONVERSATION, rtol=1e-3)
    kto = replace(settings, preference=PreferenceOptions("kto"))
    answers, _ = tokens_of_steps(kto, data["pairs"], tmp_path / "kto", weights=base)
    np.testing.assert_allclose(answers, BATCH * CONVERSATION, rtol=1e-3)
    rewards = replace(mortal_run.rewarding().rewards, group=4, answer=8, updates=1)
    for truncated in ("count", "mask"):
        grpo = replace(recipe(), **QUICK, rewards=replace(rewards, truncated=truncated))
        found, logged = tokens_of_steps(grpo, data["prompts"], tmp_path / truncated)
        prompt = len(byte_tokenizer().encode(PROMPT))
        np.testing.assert_allclose(found, [BATCH * (prompt + line["length"]) for line in logged], rtol=1e-3)
