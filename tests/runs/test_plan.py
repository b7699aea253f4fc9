"""Runs given in epochs: steps, batch and length follow from the data, and a resumed run has the same ones."""

import json
from dataclasses import replace

import numpy as np
import pytest
from mortal_run import preferring, recipe, rewarding, write_words
from running import StopAt

from llama_jax.data import ChatReading
from llama_jax.data.data_files import find_data
from llama_jax.errors import ConfigError, TrainingError
from llama_jax.parallel.mesh import MeshSizes
from llama_jax.runs.log import Log
from llama_jax.runs.loop import train
from llama_jax.runs.preflight import describe_plan, find_task_type
from llama_jax.runs.recipe import fit_to_data
from llama_jax.runs.recipes import find
from llama_jax.runs.tasks.interface import TaskInputs
from llama_jax.tokenizers.sentencepiece import byte_tokenizer
from llama_jax.training.optimizer import OptimizerSettings

CHATS = replace(recipe(), steps=0, batch=16, length=60, chats=ChatReading(), evaluate_every=0, save_every=0, ema_decay=0.0)


@pytest.fixture(scope="module")
def chats(tmp_path_factory):
    """Twenty short chats: with BOS and EOS each has 20 tokens, so that a row of 33 holds one."""
    file = tmp_path_factory.mktemp("chats") / "chats.jsonl"
    lines = [{"prompt": f"What is {i:02d}?", "completion": " a llama"} for i in range(20)]
    file.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    return file


def opened(recipe, file, mesh=MeshSizes()):
    """The task of a recipe and a file, not compiled."""
    return find_task_type(recipe).open(recipe, TaskInputs(find_data([file]), (), byte_tokenizer(), mesh, Log(quiet=True)))


def test_few_chats_make_a_short_run(chats):
    """16 of the 20 are trained on, each in a row of its own, instead of hundreds of steps of 16 rows of 60."""
    task = opened(CHATS, chats)
    sizes = task.recipe
    assert (sizes.steps, sizes.epochs, sizes.batch, sizes.length) == (24, 0.0, 2, 32)
    assert task.tokens == 64
    assert "24 steps of 2 x 32 are 3.0 epochs" in task.facts[0]
    assert opened(replace(CHATS, epochs=1.0), chats).recipe.steps == 8
    given = replace(CHATS, steps=5)
    assert opened(given, chats).recipe == given
    assert not any(line.startswith("warning") for line in task.facts)


def test_data_that_are_small_for_the_steps_or_the_batch(chats):
    """A row holds two of the 16 chats."""
    often, small = opened(replace(CHATS, steps=60), chats).facts[1:]
    assert "the data is read 120 times, so that the model memorizes it; add data, or train for fewer epochs" in often
    assert "has 8 rows, but a step reads 16, each 2 times" in small


def test_sizes_are_bounds_and_remain_multiples():
    def sizes(mesh=MeshSizes(), longest=100, rows=40, **changes):
        given = replace(CHATS, optimizer=OptimizerSettings(), **changes)
        found = fit_to_data(given, mesh, longest, lambda length: rows)
        return found.steps, found.batch, found.length

    assert sizes() == (30, 4, 60)
    assert sizes(longest=0, rows=1) == (3, 1, 16)
    assert sizes(rows=10_000) == (1875, 16, 60)
    assert sizes(accumulate=4, rows=3) == (3, 4, 60)
    assert sizes(MeshSizes(data=2, fsdp=2), rows=3) == (3, 4, 60)
    assert sizes(MeshSizes(context=3), longest=40, batch=3, rows=24) == (24, 3, 48)
    assert sizes(epochs=0.01) == (1, 4, 60)


def test_the_warm_up_is_part_of_a_short_run():
    warm = replace(find("sft"), model=CHATS.model, length=60)
    for rows, steps, warmup in ((8, 24, 2), (2, 6, 0), (10_000, 1875, 20)):
        for given in (warm, replace(warm, steps=steps)):
            found = fit_to_data(given, MeshSizes(), 60, lambda length, rows=rows: rows)
            assert (found.steps, found.optimizer.warmup_steps) == (steps, warmup)
    named = replace(warm, optimizer=replace(warm.optimizer, warmup_steps=20))
    assert fit_to_data(named, MeshSizes(), 60, lambda length: 100).optimizer.warmup_steps == 20
    with pytest.raises(ConfigError, match="warmup_steps=20 must be below steps=6"):
        fit_to_data(named, MeshSizes(), 60, lambda length: 2)


@pytest.mark.slow
def test_a_prolonged_run_keeps_the_warm_up_that_it_began_with(chats, tmp_path):
    """1 step, a tenth of 10; 2 are a tenth of 20, and would have been another first step."""
    optimizer = replace(CHATS.optimizer, warmup_steps=None, max_warmup_steps=5, schedule="constant")
    short = replace(CHATS, steps=10, optimizer=optimizer)
    train(short, tmp_path, [chats])
    assert train(replace(short, steps=20), tmp_path, [chats], resume=True).step == 20
    written = json.loads((tmp_path / "recipe.json").read_text())
    assert (written["steps"], written["optimizer"]["warmup_steps"]) == (20, 1)
    other = replace(short, steps=20, optimizer=replace(optimizer, warmup_steps=2))
    with pytest.raises(TrainingError, match=r"optimizer\.warmup_steps: 1 in the folder, 2 now"):
        train(other, tmp_path, [chats], resume=True)


def test_other_tasks_have_epochs_too(tmp_path):
    text = opened(replace(recipe(), steps=0, epochs=2.0), write_words(tmp_path))
    assert (text.recipe.batch, text.recipe.length) == (8, 24)  # the text has rows enough
    assert f"{text.recipe.steps} steps of 8 x 24 are 2.0 epochs" in text.facts[0]
    pairs = tmp_path / "pairs.jsonl"
    lines = [{"prompt": f"{i} ", "chosen": "a llama", "rejected": "none"} for i in range(30)]
    pairs.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    task = opened(replace(preferring(), steps=0), pairs)
    assert (task.recipe.steps, task.recipe.batch, task.recipe.length) == (36, 2, 16)
    assert "36 steps of 2 rows x 2 x 16 are 3.0 epochs" in task.facts[0]
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": f"{i}?"}) + "\n" for i in range(40)))
    task = opened(replace(rewarding(), steps=0, epochs=2.0), prompts)
    assert (task.recipe.batch, task.recipe.steps) == (16, 2 * 2 * 32 // 4)
    assert "2.0 epochs" in task.facts[0]
    assert "warning" not in "".join(task.facts)
    assert describe_plan(rewarding(), task, 1).startswith("plan: 32 steps of 176 tokens (batch=16 of at most 32): about ")
    few = opened(replace(rewarding(), steps=500, batch=256), prompts)
    assert ["read 500 times" in few.facts[1], "has 32 prompts, but a step reads 64" in few.facts[2]] == [True, True]


def test_a_run_in_epochs_is_planned_and_resumed(chats, tmp_path):
    log = StopAt("step 10/")
    first = train(CHATS, tmp_path, [chats], log=log)
    assert (first.step, first.stopped) == (10, "SIGTERM")
    (plan,) = [line for line in log.said.splitlines() if line.startswith("plan: ")]
    assert plan.startswith("plan: 24 steps of 64 tokens (batch=2 of at most 16, length=32 of at most 60): about ")
    assert "with 5 s to compile" in plan
    written = json.loads((tmp_path / "recipe.json").read_text())
    assert (written["steps"], written["batch"], written["length"]) == (24, 2, 32)
    with pytest.raises(TrainingError, match=r"steps: 24 in the folder, 40 now"):
        train(replace(CHATS, epochs=5.0), tmp_path, [chats], resume=True)
    with pytest.raises(TrainingError, match=r"another recipe \(seed: 0 in the folder, 1 now\)"):
        train(replace(CHATS, seed=1), tmp_path, [chats], resume=True)
    with pytest.raises(TrainingError, match="trace=24:26 must lie within the run's steps, 1 to 24"):
        train(CHATS, tmp_path, [chats], resume=True, trace=range(24, 26))
    log = StopAt()
    last = train(CHATS, tmp_path, [chats], resume=True, log=log)
    assert ": 14 left, about " in log.said
    assert (last.step, last.stopped) == (24, None)
    assert np.isfinite(last.validation.loss)
