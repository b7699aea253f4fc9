"""Where arguments may stand."""

import pytest
import tyro

from llama_jax.cli.argv import VALUELESS_OPTIONS, check_settings, reorder_argv
from llama_jax.cli.eval import Eval
from llama_jax.cli.train import Train
from llama_jax.errors import UserError

COMMANDS = {"train": Train, "eval": Eval}


def parsed(line):
    name, *rest = reorder_argv(line.split())
    return tyro.cli(COMMANDS[name], args=rest)


@pytest.mark.parametrize(
    "data",
    [
        "ABOUT --data a b",
        "--data a b ABOUT",
        "--data a --data b ABOUT",
        "ABOUT --data=a --data b",
    ],
)
@pytest.mark.parametrize("command", COMMANDS)
def test_several_files_after_one_option_or_each_after_its_own(command, data):
    workdir = " --workdir w" if command == "train" else ""
    for line in (f"{command} {data}{workdir}", f"{command}{workdir} {data}"):
        found = parsed(line)
        assert list(map(str, found.data)) == ["a", "b"]
        assert str(found.recipe if command == "train" else found.path) == "ABOUT"


def test_changes_and_other_options_between_the_files():
    found = parsed("train tiny steps=3 --data a seed=1 b --resume --validation-data c d --workdir w=1 model.dim=8")
    assert list(map(str, found.data)) == ["a", "b"]
    assert list(map(str, found.validation_data)) == ["c", "d"]
    assert found.changes == ("steps=3", "seed=1", "model.dim=8")
    assert (found.recipe, str(found.workdir)) == ("tiny", "w=1")
    found = parsed("eval --json model --stride 4 --data a x=1 --longest 9")
    assert list(map(str, found.data)) == ["a", "x=1"]
    assert found.json


def test_every_option_without_a_value_is_known():
    for command in COMMANDS.values():
        names = [name for name, kind in command.__dataclass_fields__.items() if kind.type in ("bool", bool)]
        flags = {f"--{name.replace('_', '-')}" for name in names}
        assert flags <= set(VALUELESS_OPTIONS)


@pytest.mark.parametrize(("word", "meant"), [("--steps", "steps"), ("--learning-rate=1e-3", "optimizer.learning_rate")])
def test_a_setting_written_as_an_option_is_told_how_it_is_written(word, meant):
    line = ["train", "tiny", "--workdir", "w", "--data", "a", "--save-timeout", "9", "--resume"]
    check_settings(Train.__dataclass_fields__, line)
    with pytest.raises(UserError, match=f"{word} is not an option of train; write a setting of the recipe as {meant}=VALUE"):
        check_settings(Train.__dataclass_fields__, [*line, word, "3"])
