"""Chats whose template writes the date, as those of Llama 3.2, Granite and Llama 4: a run keeps the date of its start."""

from __future__ import annotations

import json
from dataclasses import replace

import mortal_run
import pytest
from running import (  # noqa: F401  # caches is a fixture
    EAST,
    WEST,
    caches,
    write_dated_vocabulary,
    write_dialogs,
    zone_fixture,
)

from llama_jax.cli.eval import Eval
from llama_jax.data import ChatReading, open_chats
from llama_jax.errors import DataError
from llama_jax.formats.step_dirs import CHECKPOINTS, read_metadata
from llama_jax.runs.loop import train
from llama_jax.tokenizers import load_tokenizer

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


@pytest.fixture(scope="module")
def vocabulary(tmp_path_factory):
    return write_dated_vocabulary(tmp_path_factory.mktemp("tokens") / "vocabulary")


@pytest.fixture(scope="module")
def dialogs(tmp_path_factory):
    return write_dialogs(tmp_path_factory.mktemp("data") / "dialogs.jsonl")


@pytest.mark.slow
def test_an_evaluation_repeats_that_of_the_run_if_it_has_its_time(tmp_path, zone, vocabulary, dialogs, calling):
    zone(WEST)
    held = write_dialogs(tmp_path / "held.jsonl", 8, "another")
    arguments = (tmp_path / "run", dialogs)
    result = train(SFT, *arguments, validation_data=held, tokenizer=vocabulary)
    recorded = read_metadata(tmp_path / "run" / CHECKPOINTS)["recipe"]["chats"]["template_time"]
    zone(EAST)
    evaluation = (Eval, tmp_path / "run", "--data", held, "--length", 40, "--json")
    dated, today = (json.loads(calling(*evaluation, *more).out) for more in (("--template-time", recorded), ()))
    assert dated["loss"] == pytest.approx(result.validation.loss, abs=1e-6)
    assert abs(today["loss"] - result.validation.loss) > 1e-5


def test_chats_with_a_given_time_are_the_same_anywhere(zone, vocabulary, dialogs):
    tokenizer = load_tokenizer(vocabulary)
    digests = {}
    for name in (WEST, EAST):
        zone(name)
        for reading in (ChatReading(), ChatReading(template_time="2026-07-31T23:59:59")):
            digests[name, reading.template_time] = open_chats(dialogs, tokenizer, 40, reading).corpus.digest
    assert digests[WEST, "2026-07-31T23:59:59"] == digests[EAST, "2026-07-31T23:59:59"]
    assert digests[WEST, None] != digests[EAST, None]
    with pytest.raises(DataError, match="template_time='tomorrow' must be a date or a time"):
        ChatReading(template_time="tomorrow")


def test_a_run_without_a_date_in_its_chats_records_none(tmp_path, dialogs):
    plain = replace(SFT, steps=3, chats=ChatReading("plain"), vocabulary="byte", evaluate_every=0)
    train(plain, tmp_path, dialogs)
    assert read_metadata(tmp_path / CHECKPOINTS)["recipe"]["chats"]["template_time"] is None
