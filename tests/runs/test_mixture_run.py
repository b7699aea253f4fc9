"""Runs on several sources: shares, curves of each, and what a resumed run must be given."""

import io
import json
from dataclasses import replace

import jax
import numpy as np
import pytest
from mortal_run import preferring, recipe
from running import StopAt, caches, lines  # noqa: F401  # caches is a fixture

from llama_jax.data import DataError, WeightedData
from llama_jax.data.data_files import find_data
from llama_jax.errors import TrainingError
from llama_jax.parallel.mesh import MeshSizes
from llama_jax.runs.log import Log
from llama_jax.runs.loop import train
from llama_jax.runs.tasks.interface import TaskInputs
from llama_jax.runs.tasks.language_modeling import describe_corpora, read_data
from llama_jax.tokenizers.sentencepiece import byte_tokenizer

RECIPE = replace(recipe(), steps=6, evaluate_every=3, save_every=3, log_every=2, ema_decay=0.0)


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Two texts of different words; the second is short."""
    folder = tmp_path_factory.mktemp("texts")
    for name, words, count in (("stories", "the llama ate grass", 700), ("books", "a king saw seven seas", 60)):
        text = np.random.default_rng(0).choice(words.split(), count)
        (folder / f"{name}.txt").write_text(" ".join(text))
    return folder


def sources(files, **weights):
    return [WeightedData(name, files / f"{name}.txt", weight) for name, weight in weights.items()]


@pytest.fixture(scope="module")
def whole(files, tmp_path_factory):
    """A run of six steps: (folder, result, what was said)."""
    folder, log = tmp_path_factory.mktemp("run"), io.StringIO()
    return folder, train(RECIPE, folder, sources(files, stories=0.75, books=0.25), log=Log(log)), log.getvalue()


def test_each_source_has_its_share_its_epochs_and_its_loss(whole):
    folder, result, said = whole
    (*_, last) = lines(folder, "train")
    rows = {name: last[f"epochs/{name}"] for name in ("stories", "books")}
    assert rows["books"] > 4 * rows["stories"] / 3 > 0
    assert "books: 1/4 of the rows (25.0%)" in said
    assert "stories: 3/4 of the rows (75.0%)" in said
    (*_, held) = lines(folder, "validation")
    assert held["loss"] == pytest.approx(0.75 * held["loss/stories"] + 0.25 * held["loss/books"])
    assert result.validation.loss == held["loss"]
    assert result.validation.numbers["loss/books"] == held["loss/books"]
    assert "loss/stories" in held


def test_what_is_read_too_often_is_said(files):
    given = TaskInputs(find_data(sources(files, stories=1, books=1)), (), byte_tokenizer(), MeshSizes(), Log(quiet=True))
    corpora = read_data(RECIPE, given)
    said = describe_corpora(replace(RECIPE, steps=30), corpora)
    assert [line for line in said if "repeated text" in line] == [said[-1]]
    assert said[-1].startswith("  books is read ")
    assert not any("repeated text" in line for line in describe_corpora(RECIPE, corpora))
    assert describe_corpora(replace(RECIPE, steps=90), corpora)[-1].startswith("warning: the data books is read ")


@pytest.mark.slow
def test_resumed_it_goes_on_with_the_same_rows(whole, files, tmp_path):
    """In whatever order the sources are given, and however their weights are written."""
    first = train(RECIPE, tmp_path, sources(files, stories=3, books=1), log=StopAt("step 2/"))
    assert first.stopped
    again = train(RECIPE, tmp_path, sources(files, books="0.25", stories=0.75), resume=True)
    jax.tree.map(np.testing.assert_array_equal, again.state, whole[1].state)


@pytest.mark.slow
def test_other_weights_are_refused_unless_asked_for_and_then_noted(files, tmp_path):
    train(RECIPE, tmp_path, sources(files, stories=3, books=1), log=StopAt("step 2/"))
    other = sources(files, stories=1, books=1)
    with pytest.raises(TrainingError, match=r"were books 1/4, stories 3/4, but are books 1/2, stories 1/2 now; .*--reweigh"):
        train(RECIPE, tmp_path, other, resume=True)
    result = train(RECIPE, tmp_path, other, resume=True, reweigh=True)
    about = json.loads((tmp_path / "checkpoints" / str(result.step) / "about" / "note.json").read_text())
    (begin, shares), (changed, now) = about["data"]["mixture"]
    assert (begin, shares) == (0, {"books": "1/4", "stories": "3/4"})
    assert changed % RECIPE.batch == 0
    assert now == {"books": "1/2", "stories": "1/2"}
    train(RECIPE, tmp_path, other, resume=True)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (lambda files: [*sources(files, stories=1), files / "books.txt"], "books.txt has no name and weight"),
        (lambda files: sources(files, stories=1) * 2, "two sources are named stories"),
        (lambda files: [WeightedData("a b", files / "books.txt", 1)], "the name 'a b' of a source must be letters"),
        (lambda files: [WeightedData(name, files / "books.txt", 1) for name in "ab"], "books.txt is given twice"),
        (lambda files: sources(files, stories=0), "the weight of stories, 0, must be a number above 0"),
    ],
)
def test_wrong_sources(files, given, message):
    with pytest.raises(DataError, match=message):
        find_data(given(files))


def test_preferences_are_not_mixed(files, tmp_path):
    with pytest.raises(TrainingError, match="mixtures are not supported for preferences"):
        train(preferring(), tmp_path, sources(files, stories=1, books=1))


def test_validation_files_are_of_the_same_sources_or_of_none(files, tmp_path):
    (tmp_path / "held.txt").write_text("the llama saw a king")
    poems = [WeightedData("poems", tmp_path / "held.txt")]
    with pytest.raises(TrainingError, match="the validation data have the sources poems, but the data books, stories"):
        train(RECIPE, tmp_path / "run", sources(files, stories=1, books=1), validation_data=poems)
