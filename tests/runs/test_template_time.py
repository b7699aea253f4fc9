"""Chats whose template writes the date, as those of Llama 3.2, Granite and Llama 4: a run keeps the date of its start."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from datetime import datetime

import mortal_run
import pytest
from running import (  # noqa: F401  # caches is a fixture
    EAST,
    WEST,
    StopAt,
    caches,
    lines,
    same,
    write_dated_vocabulary,
    write_dialogs,
)

from llama_jax.cli.eval import Eval
from llama_jax.data import ChatReading, open_chats
from llama_jax.errors import DataError, TrainingError
from llama_jax.formats.step_dirs import CHECKPOINTS, read_metadata
from llama_jax.runs import preflight
from llama_jax.runs.loop import train
from llama_jax.runs.overrides import override
from llama_jax.tokenizers import load_tokenizer
from llama_jax.training.distillation import DistillOptions
from llama_jax.training.preference_loss import PreferenceOptions

DATE = "%Y-%m-%d"
SFT = replace(
    mortal_run.recipe(),
    steps=4,
    length=40,
    chats=ChatReading(),
    vocabulary="given",
    evaluate_every=2,
    save_every=2,
    ema_decay=0.0,
)


@pytest.fixture
def zone(monkeypatch):
    """Sets the time zone of this process and of those that it starts."""

    def set_zone(name):
        monkeypatch.setenv("TZ", name)
        time.tzset()

    yield set_zone
    monkeypatch.undo()
    time.tzset()


@pytest.fixture(scope="module")
def vocabulary(tmp_path_factory):
    return write_dated_vocabulary(tmp_path_factory.mktemp("tokens") / "vocabulary")


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Files by the kind of training."""
    folder = tmp_path_factory.mktemp("data")

    def said(role, content):
        return [{"role": role, "content": content}]

    rows = {"sigmoid": [], "kto": [], "grpo": []}
    for i in range(40):
        ask = said("user", f"question {i}")
        rows["sigmoid"].append({"prompt": ask, "chosen": said("assistant", "yes"), "rejected": said("assistant", "no")})
        rows["kto"].append({"prompt": ask, "completion": said("assistant", "yes"), "label": i % 2 == 0})
        rows["grpo"].append({"prompt": ask})
    for name, of_kind in rows.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in of_kind))
    dialogs = write_dialogs(folder / "dialogs.jsonl")
    return {name: folder / f"{name}.jsonl" for name in rows} | {"sft": dialogs, "distill": dialogs}


def begin_and_resume(recipe, folder, zone, file, **options):
    """The result of a run that is stopped at step 2 on one day, and resumed on another, in another time zone."""
    zone(WEST)
    stopped = train(recipe, folder, file, log=StopAt("step 2/"), **options)
    assert stopped.step < recipe.steps
    zone(EAST)
    return train(recipe, folder, file, resume=True, log=StopAt(), **options)


@pytest.mark.slow
def test_a_run_that_is_resumed_tomorrow_ends_with_the_same_bits(tmp_path, zone, vocabulary, data):
    zone(WEST)
    whole = train(SFT, tmp_path / "whole", data["sft"], tokenizer=vocabulary)
    began = datetime.now()
    resumed = begin_and_resume(SFT, tmp_path / "resumed", zone, data["sft"], tokenizer=vocabulary)
    same(resumed.state, whole.state)
    assert resumed.validation == whole.validation
    recorded = read_metadata(tmp_path / "resumed" / CHECKPOINTS)["recipe"]["chats"]["template_time"]
    assert began.strftime(DATE) <= recorded < datetime.now().strftime(DATE)


@pytest.mark.slow
def test_a_run_that_did_not_record_its_date_names_what_it_needs(tmp_path, zone, vocabulary, data, monkeypatch):
    """As earlier versions left it: it goes on on the same day, and on another one if it is given."""
    zone(WEST)
    today = datetime.now().strftime(DATE)
    with monkeypatch.context() as patch:
        patch.setattr(preflight, "fix_template_time", lambda recipe, *_: recipe)
        begun = train(SFT, tmp_path / "run", data["sft"], tokenizer=vocabulary, log=StopAt("step 2/"))
    assert begun.step < SFT.steps
    zone(EAST)
    with pytest.raises(TrainingError, match=r"resume with the same files and chats.template_time=DATE"):
        train(SFT, tmp_path / "run", data["sft"], tokenizer=vocabulary, resume=True)
    dated = override(SFT, [f"chats.template_time={today}"])
    assert train(dated, tmp_path / "run", data["sft"], tokenizer=vocabulary, resume=True).step == SFT.steps
    assert read_metadata(tmp_path / "run" / CHECKPOINTS)["recipe"]["chats"]["template_time"] == today
    other = override(SFT, ["chats.template_time=1999-12-31"])
    with pytest.raises(TrainingError, match=f"chats.template_time={today}"):
        train(other, tmp_path / "run", data["sft"], tokenizer=vocabulary, resume=True)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["sigmoid", "kto", "grpo", "distill"])
def test_so_it_is_in_every_kind_of_training(kind, tmp_path, zone, vocabulary, data):
    base = tmp_path / "base"
    zone(WEST)
    train(replace(SFT, steps=3, evaluate_every=0), base, data["sft"], tokenizer=vocabulary, log=StopAt())
    if kind == "grpo":
        recipe = replace(mortal_run.rewarding(), vocabulary="given", length=40)
    elif kind == "distill":
        recipe = replace(SFT, distill=DistillOptions(str(base)))
    else:
        recipe = replace(mortal_run.preferring(), steps=4, save_every=2, preference=PreferenceOptions(kind, beta=0.5))
    options = {"weights": base}
    whole = train(recipe, tmp_path / "whole", data[kind], log=StopAt(), **options)
    resumed = begin_and_resume(recipe, tmp_path / "resumed", zone, data[kind], **options)
    same(resumed.state, whole.state)
    assert lines(tmp_path / "resumed", "validation")[-1]["loss"] == lines(tmp_path / "whole", "validation")[-1]["loss"]


@pytest.mark.slow
def test_an_evaluation_repeats_that_of_the_run_if_it_has_its_time(tmp_path, zone, vocabulary, data, calling):
    zone(WEST)
    held = write_dialogs(tmp_path / "held.jsonl", 8, "another")
    arguments = (tmp_path / "run", data["sft"])
    result = train(SFT, *arguments, validation_data=held, tokenizer=vocabulary)
    recorded = read_metadata(tmp_path / "run" / CHECKPOINTS)["recipe"]["chats"]["template_time"]
    zone(EAST)
    evaluation = (Eval, tmp_path / "run", "--data", held, "--length", 40, "--json")
    dated, today = (json.loads(calling(*evaluation, *more).out) for more in (("--template-time", recorded), ()))
    assert dated["loss"] == pytest.approx(result.validation.loss, abs=1e-6)
    assert abs(today["loss"] - result.validation.loss) > 1e-5


def test_chats_with_a_given_time_are_the_same_anywhere(zone, vocabulary, data):
    tokenizer = load_tokenizer(vocabulary)
    digests = {}
    for name in (WEST, EAST):
        zone(name)
        for reading in (ChatReading(), ChatReading(template_time="2026-07-31T23:59:59")):
            digests[name, reading.template_time] = open_chats(data["sft"], tokenizer, 40, reading).corpus.digest
    assert digests[WEST, "2026-07-31T23:59:59"] == digests[EAST, "2026-07-31T23:59:59"]
    assert digests[WEST, None] != digests[EAST, None]
    with pytest.raises(DataError, match="template_time='tomorrow' must be a date or a time"):
        ChatReading(template_time="tomorrow")


def test_a_run_without_a_date_in_its_chats_records_none(tmp_path, data):
    plain = replace(SFT, steps=3, chats=ChatReading("plain"), vocabulary="byte", evaluate_every=0)
    train(plain, tmp_path, data["sft"])
    assert read_metadata(tmp_path / CHECKPOINTS)["recipe"]["chats"]["template_time"] is None
