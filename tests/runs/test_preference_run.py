"""Runs that train on preferences: with adapters and without, and killed."""

import json
import shutil
import signal
from dataclasses import replace
from pathlib import Path

import mortal_run
import numpy as np
import pytest
from mortal_run import environment_of, preferring, recipe, write_words
from running import StopAt, caches, lines, same  # noqa: F401  # caches is a fixture

from llama_jax.errors import TrainingError
from llama_jax.model.lora import Lora
from llama_jax.runs.loop import train
from llama_jax.training.preference_loss import PreferenceOptions

FULL = preferring()
LEARNT = {"lora": Lora(rank=2, alpha=16.0), "vocabulary": "given"}
ADAPTERS = replace(FULL, **LEARNT)
KTO = replace(FULL, preference=PreferenceOptions("kto", beta=0.5))


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A model of a text, which knows nothing of the answers."""
    folder = tmp_path_factory.mktemp("base")
    text = write_words(folder)
    short = replace(recipe(), steps=4, evaluate_every=0, save_every=0, ema_decay=0.0)
    train(short, folder / "run", [text], log=StopAt())
    return folder / "run"


@pytest.fixture(scope="module")
def pairs(tmp_path_factory):
    """Questions of random letters, and of two words the one that is preferred."""
    rng = np.random.default_rng(0)
    file = tmp_path_factory.mktemp("pairs") / "pairs.jsonl"
    questions = ["".join(map(chr, rng.integers(97, 123, rng.integers(3, 10)))) for _ in range(60)]
    answers = {"chosen": " the llama", "rejected": " no grass"}
    file.write_text("".join(json.dumps({"prompt": question, **answers}) + "\n" for question in questions))
    return file


@pytest.fixture(scope="module")
def judged(pairs):
    file = pairs.with_name("judged.jsonl")
    read = list(map(json.loads, pairs.read_text().splitlines()))
    said = [(one["prompt"], one[name], name == "chosen") for one in read for name in ("chosen", "rejected")]
    file.write_text(
        "".join(json.dumps(dict(zip(("prompt", "completion", "label"), one, strict=True))) + "\n" for one in said)
    )
    return file


@pytest.fixture(scope="module")
def whole(base, pairs, tmp_path_factory):
    """{name: (folder, result, what was said)} of runs without interruption."""
    found = {}
    for name, one in (("full", FULL), ("adapters", ADAPTERS)):
        folder, log = tmp_path_factory.mktemp(name), StopAt()
        found[name] = folder, train(one, folder, pairs, weights=base, log=log), log.said
    return found


pytestmark = pytest.mark.slow


@pytest.mark.parametrize("name", ["full", "adapters"])
def test_the_preferred_answer_becomes_more_probable(whole, name):
    folder, result, said = whole[name]
    found = lines(folder, "train")
    assert found[0]["loss"] == pytest.approx(np.log(2), abs=1e-5), "model and reference are the same"
    assert (found[0]["margin"], found[0]["accuracy"]) == pytest.approx((0, 0), abs=1e-4) or found[0]["accuracy"] <= 1
    assert found[-1]["loss"] < found[0]["loss"]
    assert result.validation.numbers["accuracy"] == 1.0
    assert result.validation.numbers["margin"] > 0.1
    assert result.validation.text.endswith("(12 held out)")
    assert (folder / "reference.npz").exists() == (name == "full")
    last = lines(folder, "validation")[-1]
    assert last["accuracy"] == 1.0
    assert last["chosen_reward"] - last["rejected_reward"] == pytest.approx(last["margin"])
    assert last["chosen_logprob"] < 0 > last["rejected_logprob"]
    assert "preferences: 60 of 60 examples" in said
    assert "48 pairs in " in said
    assert f"accuracy {found[-1]['accuracy']:.4g} · margin {found[-1]['margin']:.4g}" in said


def test_a_killed_run_ends_with_the_same_bits(base, pairs, tmp_path):
    """Once before anything but the reference is saved, and once after the first checkpoint."""
    program = Path(mortal_run.__file__)

    def live(folder, lines=1000):
        given = f"{program}:preferring", "--workdir", folder, "--data", pairs, "--weights", base, "--resume"
        return mortal_run.live(environment_of(tmp_path / "cache"), *given, "--mesh", "data=1", lines=lines)

    assert live(tmp_path / "whole") == 0
    for lines_before in (2, 6):
        assert live(tmp_path / "run", lines_before) == -signal.SIGKILL
        assert (tmp_path / "run" / "reference.npz").exists()
    assert live(tmp_path / "run") == 0
    # Read where the runs have ended, which changes nothing.
    ended = [train(FULL, tmp_path / name, pairs, weights=base, resume=True, log=StopAt()) for name in ("run", "whole")]
    assert ended[0].step == 8
    same(*(one.state for one in ended))
    assert lines(tmp_path / "run", "validation")[-1] == lines(tmp_path / "whole", "validation")[-1]


def test_the_cached_reference_belongs_to_the_run(whole, base, pairs, tmp_path):
    folder = shutil.copytree(whole["full"][0], tmp_path / "run")
    with np.load(folder / "reference.npz") as file:
        held = dict(file)
    assert held["train"].shape == (48, 2)
    np.savez(folder / "reference.npz", **held | {"train": held["train"] + 1e-3})
    with pytest.raises(TrainingError, match=r"reference\.npz is not from this run: its values differ; copy it"):
        train(FULL, folder, pairs, weights=base, resume=True)
    (folder / "reference.npz").write_bytes(b"PK\3\4")
    with pytest.raises(TrainingError, match=r"reference\.npz, .* initial model, cannot be read .* copy it from the"):
        train(FULL, folder, pairs, weights=base, resume=True)
    other = replace(FULL, preference=PreferenceOptions(beta=0.1))
    with pytest.raises(TrainingError, match=r"preference.beta: 0.5 in the folder, 0.1 now"):
        train(other, folder, pairs, weights=base, resume=True)


@pytest.mark.parametrize("kind", ["hinge", "simpo", *(pytest.param(x, marks=pytest.mark.nightly) for x in ("ipo", "orpo"))])
def test_every_loss_trains(base, pairs, tmp_path, kind):
    options = PreferenceOptions(kind, 2.0 if kind == "simpo" else 0.5)
    log = StopAt()
    result = train(replace(FULL, preference=options, evaluate_every=8), tmp_path, pairs, weights=base, log=log)
    losses = [line["loss"] for line in lines(tmp_path, "train")]
    assert losses[-1] < losses[0]
    assert result.validation.numbers["accuracy"] == 1.0
    assert (tmp_path / "reference.npz").exists() == (kind in ("hinge", "ipo"))


def test_answers_with_a_label(base, pairs, judged, tmp_path):
    """Pairs are answers with a label, too."""
    of_pairs = train(KTO, tmp_path / "pairs", pairs, weights=base, log=StopAt())
    log = StopAt()
    of_answers = train(KTO, tmp_path / "judged", judged, weights=base, log=log)
    for result in (of_pairs, of_answers):
        assert result.validation.numbers["margin"] > 0.1
        assert "accuracy" not in result.validation.numbers
    assert "96 answers in " in log.said
    found = lines(tmp_path / "judged", "train")
    assert found[0]["loss"] == pytest.approx(0.5, abs=1e-5)
    assert found[-1]["loss"] < 0.5
    assert "accuracy" not in found[0]
    with pytest.raises(TrainingError, match=r"has single answers with a label, which only preference.kind=kto supports"):
        train(FULL, tmp_path / "other", judged, weights=base)
