"""The model in the box: what its card says is so, and the commands take it where none is named."""

import json
import re
from pathlib import Path

import bundled as experiment
import numpy as np
import pytest
from commands import run_here
from conftest import shared_data

import llama_jax
from llama_jax.formats.loading import bundled

PAGE = Path(__file__).parents[1] / "docs" / "models.md"
GREEDY = "Once upon a time, there was a little girl named Lily. She loved to play"


@pytest.fixture(scope="module")
def model():
    return llama_jax.load(bundled())


@pytest.fixture(scope="module")
def card():
    return (bundled() / "README.md").read_text("utf-8")


@pytest.fixture(scope="module")
def text():
    return shared_data("text")


@pytest.fixture
def run():
    def run(*arguments, lines=""):
        done = run_here(*arguments, lines=lines.encode())
        assert done.returncode == 0, done.stderr
        return done

    return run


def test_the_recipe_of_the_script_made_it_and_it_is_small(model):
    recipe = experiment.recipe()
    assert model.config == recipe.model
    assert model.tokenizer.vocab_size == recipe.model.vocab_size
    assert model.params.embedding.dtype == "bfloat16"
    assert {path.name for path in bundled().iterdir()} == {
        "README.md",
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.model",
        "tokenizer_config.json",
    }
    assert sum(path.stat().st_size for path in bundled().iterdir()) <= experiment.MAX_ASSET_BYTES


@pytest.mark.parametrize("path", [(), (None,)])
def test_load_without_a_path_is_the_bundled_model(path, model):
    found = llama_jax.load(*path)
    assert found.config == model.config
    assert (np.asarray(found.params.embedding) == np.asarray(model.params.embedding)).all()
    assert found.tokenizer.vocab_size == model.tokenizer.vocab_size
    assert llama_jax.load(*path, dtype="float32").params.embedding.dtype == "float32"


@pytest.mark.slow
def test_eval_gives_the_figure_of_the_card(run, card, text, tmp_path, monkeypatch):
    """With plain options, on the stories that the experiment writes."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    experiment.Stories(path=tmp_path / "stories.jsonl", data=text).run()
    options = "--data", tmp_path / "stories.jsonl", "--max-documents", experiment.FIRST, "--json"
    found = json.loads(run("eval", bundled(), *options).stdout)
    said = re.search(rf"the first {experiment.FIRST} \| ([\d,]+) \| [\d.]+ \| ([\d.]+) \|", card)
    assert found["bytes"] == int(said[1].replace(",", ""))
    assert found["bits_per_byte"] == pytest.approx(float(said[2]), rel=2e-3)
    commands = "python experiments/bundled.py stories stories.jsonl", "llama-jax eval llama_jax/assets --data stories.jsonl"
    for page in (card, PAGE.read_text("utf-8")):
        assert all(command in " ".join(page.split()) for command in commands)
        assert "unseen" not in page


def test_the_vocabulary_has_every_paragraph_end_as_one_token_and_reads_any_text(model):
    paragraph = model.tokenizer.encode("One.\n\nTwo.", bos=False)
    assert [model.tokenizer.token_bytes(token) for token in paragraph].count(b"\n\n") == 1
    for sample in ("One.\n\nTwo.", "“Smile” \U0001f600\n", "  spaces  "):
        assert model.tokenizer.decode(model.tokenizer.encode(sample)) == sample


@pytest.mark.slow
def test_generate_takes_it_where_no_model_is_named(run):
    done = run("generate", "Once upon a time", "--temperature", 0, "--json", "--max-new-tokens", 60)
    assert "model: the bundled stories model (" in done.stderr
    assert "pass another with --model" in done.stderr
    found = json.loads(done.stdout)
    text = found["prompt"] + found["text"]
    assert text.startswith(GREEDY)
    assert re.fullmatch(r"[\w\s.,!?'\"-]+", text)


def test_chat_goes_on_with_the_users_story(run):
    done = run("chat", "--temperature", 0, "--max-new-tokens", 12, lines="Once upon a time\nOne day,\n")
    assert "format plain" in done.stderr
    first, second = done.stdout.split("\n", 1)
    assert GREEDY.startswith("Once upon a time" + first[:20])
    assert len(second.split()) > 3
