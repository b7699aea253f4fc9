"""Runs in which a small model learns what a larger one predicts."""

from dataclasses import replace

import numpy as np
import pytest
from mortal_run import recipe
from running import StopAt, caches, lines, same, text_fixture  # noqa: F401  # two fixtures

import llama_jax
from llama_jax.errors import TrainingError
from llama_jax.model.lora import Lora
from llama_jax.runs.loop import train
from llama_jax.training.distillation import DistillOptions

pytestmark = pytest.mark.slow

LARGE = replace(recipe(), steps=40, evaluate_every=0, save_every=0, log_every=20, ema_decay=0.0)
SMALL = replace(
    LARGE,
    model=replace(LARGE.model, dim=16, hidden_dim=32, n_layers=1),
    steps=30,
    evaluate_every=10,
    save_every=10,
    log_every=1,
    vocabulary="given",
)


@pytest.fixture(scope="module")
def teacher(text, tmp_path_factory):
    folder = tmp_path_factory.mktemp("teacher")
    train(LARGE, folder, [text], log=StopAt())
    return folder


@pytest.fixture(scope="module")
def student(teacher):
    return replace(SMALL, distill=DistillOptions(str(teacher), weight=0.9, temperature=1.5))


@pytest.fixture(scope="module")
def whole(text, student, tmp_path_factory):
    folder, log = tmp_path_factory.mktemp("student"), StopAt()
    return folder, train(student, folder, [text], log=log), log.said


def test_the_student_approaches_the_teacher(whole, teacher):
    folder, result, said = whole
    found = [line["kl"] for line in lines(folder, "validation")]
    assert found[-1] < 0.5 * found[0]
    assert result.validation.numbers["kl"] == found[-1]
    assert [line["kl"] for line in lines(folder, "train")][-1] < 0.5 * lines(folder, "train")[0]["kl"]
    assert f"teacher: {teacher}" in said
    config, _, tokenizer = llama_jax.load(folder)
    assert config.dim == 16
    assert tokenizer.encode("a llama") == llama_jax.load(teacher).tokenizer.encode("a llama")


def test_a_teacher_for_adapters_and_in_fewer_bits(teacher, text, whole, student, tmp_path):
    changed = replace(student, lora=Lora(rank=2, alpha=16.0), steps=4, distill=replace(student.distill, quantize="int8"))
    result = train(changed, tmp_path, [text], weights=whole[0], log=StopAt())
    assert np.isfinite(result.validation.numbers["kl"])
    assert result.validation.numbers["kl"] < 1.1 * whole[1].validation.numbers["kl"]


def test_teachers_that_cannot_be(teacher, text, student, whole, tmp_path):
    folder = tmp_path / "run"
    for changes, message in (
        (
            {"distill": replace(student.distill, teacher="")},
            "distillation needs a teacher; pass a model's folder",
        ),
        (
            {"model": replace(SMALL.model, vocab_size=384)},
            r"a vocabulary of 320, but the student one of 384, .* student, model",
        ),
    ):
        with pytest.raises(TrainingError, match=message):
            train(replace(student, **changes), folder, "missing.txt")
    assert not folder.exists()
    config, params, tokenizer = llama_jax.load(teacher)
    llama_jax.save(tmp_path / "other", config, params.replace(final_norm=params.final_norm * 1.1), tokenizer)
    other = replace(student, distill=replace(student.distill, teacher=str(tmp_path / "other")))
    with pytest.raises(TrainingError, match="the teacher is not what this run began with; resume with the same"):
        train(other, whole[0], [text], resume=True, log=StopAt())
    llama_jax.save(tmp_path / "moved", config, params, tokenizer)
    moved = replace(student, distill=replace(student.distill, teacher=str(tmp_path / "moved")))
    same(train(moved, whole[0], [text], resume=True, log=StopAt()).state, whole[1].state)
