"""Where arguments may stand, and what the help of the program and of its commands shows, without a golden copy of it."""

import os
import re
import shutil
import subprocess
import sys

import pytest
import tyro

from llama_jax.cli import COMMANDS, command_type, overview
from llama_jax.cli.argv import VALUELESS_OPTIONS, check_settings, parse_command, reorder_argv
from llama_jax.cli.eval import Eval
from llama_jax.cli.train import FUNCTIONS, Train, settings_page
from llama_jax.errors import UserError
from llama_jax.runs.overrides import keys_of
from llama_jax.runs.recipes import find

FILE_COMMANDS = {"train": Train, "eval": Eval}
NAMES = [name for group in COMMANDS.values() for name in group]


def test_the_overview_has_every_command_in_a_group():
    page = overview()
    for group, commands in COMMANDS.items():
        below = page.split(f"\n{group}\n")[1].split("\n\n")[0].split("\n")
        assert [line.split()[0] for line in below] == list(commands)
    assert max(map(len, page.split("\n"))) <= 80
    assert len(set(NAMES)) == len(NAMES)


@pytest.mark.parametrize("arguments", [*([name] for name in NAMES), ["data", "show"], ["data", "build"]], ids=" ".join)
def test_the_help_of_a_command(arguments, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    name, *rest = arguments
    with pytest.raises(SystemExit) as ended:
        parse_command(command_type(name), name, [*rest, "--help"])
    page = capsys.readouterr().out
    assert ended.value.code in (0, None)
    assert max(len(line) for line in page.split("\n") if not line.startswith("usage: ")) <= 80
    assert "None" not in page
    assert not re.search(r"--([a-z-]+), --no-\1", page)
    options = re.findall(r"^. --([a-z-]+)", page, re.MULTILINE)
    exotic = {"attention", "mesh", "cache", "draft", "rope"} & set(options)
    assert "model" not in options or all(options.index("model") < options.index(name) for name in exotic)


def test_a_flag_has_one_name(capsys):
    with pytest.raises(SystemExit):
        parse_command(command_type("inspect"), "inspect", ["model", "--no-json"])
    assert "--no-json" in capsys.readouterr().err
    assert parse_command(command_type("inspect"), "inspect", ["model", "--json"]).json


def test_nothing_heavy_is_imported_before_a_command_runs():
    """That the help is quick; seconds would depend on the machine."""
    code = (
        "import sys\n"
        "from llama_jax.cli import COMMANDS, command_type, main, overview\n"
        "overview()\n"
        "assert 'tyro' not in sys.modules\n"
        "for name in [name for group in COMMANDS.values() for name in group]: command_type(name)\n"
        "sys.argv[1:] = ['generate', '--help']\n"
        "try: main()\n"
        "except SystemExit as end: assert not end.code\n"
        "heavy = {'jax', 'numpy', 'flax', 'orbax', 'optax', 'sentencepiece', 'safetensors', 'huggingface_hub', 'tqdm'}\n"
        "assert not heavy & set(sys.modules), heavy & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_the_help_of_a_recipe_lists_its_settings():
    page = settings_page("sft", ["steps=70", "lora.rank=4"])
    for line in (
        "  steps=70\n",
        "  lora.rank=4\n",
        "  dtype=bfloat16\n",
        "  optimizer.learning_rate=2e-05\n",
        "  distill=none\n",
    ):
        assert line in page
    assert max(map(len, page.split("\n"))) <= 80
    for key in keys_of(find("sft")):
        assert key.rpartition(".")[2] in FUNCTIONS or key in page
    with pytest.raises(UserError, match="no recipe 'tny'"):
        settings_page("tny")


def test_the_completion_of_a_shell(capsys, tmp_path):
    from llama_jax.cli.setup import Completion

    Completion("bash").run()
    script = capsys.readouterr().out
    assert '[[ -z "$completions" || ' in script, "file names where it knows no word"
    assert "compopt -o filenames" in script
    assert "'None'" not in script
    for word in (*NAMES, "--max-new-tokens", "splash"):
        assert word in script
    if shutil.which("bash"):
        (tmp_path / "script").write_text(script)
        subprocess.run(["bash", "-n", tmp_path / "script"], check=True, env=os.environ)


def parsed(line):
    name, *rest = reorder_argv(line.split())
    return tyro.cli(FILE_COMMANDS[name], args=rest)


@pytest.mark.parametrize(
    "data",
    [
        "ABOUT --data a b",
        "--data a b ABOUT",
        "--data a --data b ABOUT",
        "ABOUT --data=a --data b",
    ],
)
@pytest.mark.parametrize("command", FILE_COMMANDS)
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
    for command in FILE_COMMANDS.values():
        names = [name for name, kind in command.__dataclass_fields__.items() if kind.type in ("bool", bool)]
        flags = {f"--{name.replace('_', '-')}" for name in names}
        assert flags <= set(VALUELESS_OPTIONS)


@pytest.mark.parametrize(("word", "meant"), [("--steps", "steps"), ("--learning-rate=1e-3", "optimizer.learning_rate")])
def test_a_setting_written_as_an_option_is_told_how_it_is_written(word, meant):
    line = ["train", "tiny", "--workdir", "w", "--data", "a", "--save-timeout", "9", "--resume"]
    check_settings(Train.__dataclass_fields__, line)
    with pytest.raises(UserError, match=f"{word} is not an option of train; write a setting of the recipe as {meant}=VALUE"):
        check_settings(Train.__dataclass_fields__, [*line, word, "3"])
