"""What the help of the program and of its commands shows, without a golden copy of it."""

import os
import re
import shutil
import subprocess
import sys

import pytest

from llama_jax.cli import COMMANDS, command_type, overview
from llama_jax.cli.argv import parse_command
from llama_jax.cli.train import FUNCTIONS, settings_page
from llama_jax.errors import UserError
from llama_jax.runs.overrides import keys_of
from llama_jax.runs.recipes import find

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
