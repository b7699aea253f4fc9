"""Fine-tuning by chats: what the assistant says is learned."""

import json
from dataclasses import replace

import numpy as np
import pytest
from commands import run_here
from mortal_run import recipe
from running import StopAt

import llama_jax
from llama_jax.data import ChatReading, open_chats
from llama_jax.errors import TrainingError
from llama_jax.evaluation.perplexity import evaluate
from llama_jax.formats.loading import bundled
from llama_jax.runs.loop import train
from llama_jax.runs.recipes import find
from llama_jax.tokenizers.sentencepiece import byte_tokenizer

RECIPE = replace(
    recipe(), steps=80, length=40, chats=ChatReading(), evaluate_every=40, save_every=40, log_every=10, ema_decay=0.0
)
ANSWER = " yes, so it is."


@pytest.fixture(scope="module")
def chats(tmp_path_factory):
    """Questions of random letters, which nobody can predict, and one answer."""
    rng = np.random.default_rng(0)
    file = tmp_path_factory.mktemp("chats") / "chats.jsonl"
    prompts = ["".join(map(chr, rng.integers(97, 123, rng.integers(3, 20)))) for _ in range(120)]
    file.write_text("".join(json.dumps({"prompt": prompt, "completion": ANSWER}) + "\n" for prompt in prompts))
    return file


@pytest.fixture(scope="module")
def whole(chats, tmp_path_factory):
    folder, log = tmp_path_factory.mktemp("whole"), StopAt()
    return folder, train(RECIPE, folder, chats, log=log), log.said


@pytest.mark.slow
def test_answers_are_learnt_and_questions_are_not(whole, chats):
    folder, result, said = whole
    assert "chats: 120 of 120 examples" in said
    assert result.validation.loss < 0.1
    config, params, tokenizer = llama_jax.load(folder)
    prompt = tokenizer.encode("whatever")
    (found,) = llama_jax.generate(config, params, [prompt], max_new_tokens=30, stop_tokens=tokenizer.stop_ids)
    assert tokenizer.decode(found.tokens) == ANSWER
    assert found.finish_reason == "stop"
    corpus = open_chats(chats, byte_tokenizer(), RECIPE.length).corpus
    assert evaluate(config, params, corpus).tokens == 120 * (len(ANSWER) + 1)
    everything = evaluate(config, params, replace(corpus, targets=None)).loss
    assert everything > 1.0


def test_fine_tuning_needs_a_model(chats, tmp_path):
    with pytest.raises(TrainingError, match="the recipe sft fine-tunes a model; pass it with --weights"):
        train("sft", tmp_path, chats)
    assert find("sft").chats == ChatReading()
    talk = tmp_path / "talk.jsonl"
    talk.write_text(json.dumps({"instruction": "a", "output": "b"}) + "\n")
    with pytest.raises(TrainingError, match=r"no chat template.*in training set chats.format=plain"):
        train(RECIPE, tmp_path / "run", talk)


@pytest.mark.slow
def test_adapters_learn_from_chats(chats, tmp_path):
    settings = ["lora.rank=4", "chats.format=plain", "steps=30", "batch=8", "length=64", "optimizer.learning_rate=3e-3"]
    done = run_here("train", "sft", *settings, "--weights", bundled(), "--data", chats, "--workdir", tmp_path / "run")
    assert done.returncode == 0, done.stderr
    assert "that stay as they are" in done.stdout + done.stderr
    continued = run_here("generate", "xyz", "--adapter", tmp_path / "run", "--temperature", 0, "--max-new-tokens", 12)
    assert continued.returncode == 0, continued.stderr
    assert "yes, so it is." in continued.stdout
