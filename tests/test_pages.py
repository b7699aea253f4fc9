"""The README and the pages of docs tell the truth: their code runs, their links lead somewhere, what they list is there."""

from __future__ import annotations

import importlib
import json
import pkgutil
import re
import shlex
import subprocess
import tomllib
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import jax
import pytest
from commands import run_here

import llama_jax
import llama_jax.cli
from llama_jax import OptimizerSettings, Recipe
from llama_jax.cli.argv import CHANGE
from llama_jax.errors import UserError
from llama_jax.formats.loading import bundled
from llama_jax.runs.overrides import override
from llama_jax.runs.recipes import BUILT_IN, tiny

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md")]
PAGES += sorted((ROOT / "docs").rglob("*.md"))
MODEL = str(bundled())

# What a page's code says, and what is run: the bundled model in place of one's own, and less of everything.
INSTEAD = {
    "python": {
        r"path/to/model": MODEL,
        r"path/to/": "",
        r'llama_jax\.train\("tiny", "runs/': 'llama_jax.train(short, "python/',
        r"max_new_tokens=\d+": "max_new_tokens=8",
    },
    "bash": {
        r"(?<![\w/])(PATH|LARGE)\b": MODEL,
        r"(?<![\w/])TEXT\b": "stories.txt",
        r"(?<![\w./-])tokenizer\.json": f"{MODEL}/tokenizer.model",
        r"model\.vocab_size=32000": "model.vocab_size=4096",
        r"--max-new-tokens \d+": "--max-new-tokens 8",
        r"--window \d+": "--window 64",
        r"--length \d+": "--length 128",
        r"llama-3\.1-8b": "stories-110m",
        r"--mesh tensor=8": "--mesh tensor=2",
        r"\bsteps=\d+": "steps=2",
        r"--trace \d+:\d+": "--trace 2:3",
        r"\bbatch=\d+": "batch=4",
        r"(?<![\w.])length=\d+": "length=64",
        r"lora\.rank=\d+": "lora.rank=2",
    },
}
# What commands are told besides, where the page does not.
LESS = {
    "generate": {"--max-new-tokens": "8"},
    "batch": {"--max-new-tokens": "8", "--rows": "2"},
    "chat": {"--max-new-tokens": "8", "--format": "plain"},
    "eval": {"--max-documents": "2"},
    "train": {
        "--mesh": "data=1",
        **{
            "steps=": "2",
            "batch=": "4",
            "length=": "64",
            "evaluate_every=": "2",
            "evaluate_tokens=": "64",
            "save_every=": "2",
        },
        **{"sample_tokens=": "4", "log_every=": "1", "prompts=": "()"},
    },
}
LESS_OF = {
    "sft": {"chats.format=": "plain"},
    "dpo": {"chats.format=": "plain"},
    "grpo": {"rewards.group=": "2", "rewards.answer=": "8", "rewards.held=": "2"},
    "exact=true": {"batch=": "8"},
}
NOT_ENDING = ("serve",)  # of which the arguments are read, and no more
# What a page takes for granted.
BEFORE = {
    "docs/speculation.md": """
import llama_jax
config, params, tokenizer = llama_jax.load()
prompts = [tokenizer.encode("Once upon a time")]
""",
    "docs/data.md": "import llama_jax",
}
VARIABLE = re.compile(r"\w+=\S+")


class Block(NamedTuple):
    page: str
    line: int
    language: str
    code: str
    not_run: str
    """Why not, where the page says so."""


def blocks_of(path: Path) -> list[Block]:
    """The fenced blocks of Python and of a shell, with what stands in a comment right above."""
    found, text = [], path.read_text("utf-8")
    for block in re.finditer(r"^( *)```(python|bash)\n(.*?)^\1```$", text, re.MULTILINE | re.DOTALL):
        above = text[: block.start()].rstrip("\n").rpartition("\n")[2].strip()
        reason = re.fullmatch(r"<!-- not run: (.+) -->", above)
        line = text[: block.start()].count("\n") + 2
        found.append(Block(path.relative_to(ROOT).as_posix(), line, block[2], block[3], reason[1] if reason else ""))
    return found


BLOCKS = [block for page in PAGES for block in blocks_of(page)]
RUN = sorted({block.page for block in BLOCKS if not block.not_run} - {"docs/first_hour.md"})  # see test_first_hour.py


def commands_of(code: str) -> list[tuple[dict[str, str], list[str], str]]:
    """(variables, words, the line) of every command of a shell block."""
    found = []
    for line in code.replace("\\\n", " ").splitlines():
        for each in shlex.join(shlex.split(line, comments=True)).split(" '&&' "):
            words, variables = shlex.split(each), {}
            while words and VARIABLE.fullmatch(words[0]):
                name, _, value = words.pop(0).partition("=")
                variables[name] = value
            if words:
                found.append((variables, words, line))
    return found


def less(words: list[str]) -> list[str]:
    """The words of a command, and what makes it short."""
    command = words[0]
    wanted = dict(LESS.get(command, {}))
    if command == "train":
        wanted |= LESS_OF.get(next((word for word in words[1:] if word in LESS_OF), ""), {})
    more = []
    for name, value in wanted.items():
        if not any(word.startswith(name) for word in words):
            more += [name + value] if name.endswith("=") else [name, value]
    return [*words, *more]


def short() -> Recipe:
    """The recipe `tiny`, for pages that train in Python."""
    few = replace(tiny(), steps=2, batch=2, length=64, optimizer=OptimizerSettings(warmup_steps=0))
    return replace(few, evaluate_every=2, evaluate_tokens=64, save_every=2, prompts=())


def lay_out(folder: Path) -> None:
    """The files that pages name, made of the pages themselves, and the clone's folders."""
    text = "".join(path.read_text("utf-8") for path in PAGES)
    (folder / "texts").mkdir()
    (folder / "books").mkdir()
    for name in ("stories.txt", "book.txt", "letters.txt", "texts/one.txt", "books/one.txt", "held.txt", "more.txt"):
        documents = [text[start : start + 2000] for start in range(len(name) * 1000, len(name) * 1000 + 20_000, 2000)]
        (folder / name).write_text("\n<|endoftext|>\n".join(documents))
    lines = {
        "chats.jsonl": [
            {"messages": [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": f"Hi {i}"}]}
            for i in range(40)
        ],
        "pairs.jsonl": [{"prompt": f"Once {i}", "chosen": " upon a time", "rejected": " no"} for i in range(40)],
        "prompts.jsonl": [{"prompt": f"{i} and {i} is", "answer": str(2 * i)} for i in range(8)],
    }
    for name, objects in lines.items():
        (folder / name).write_text("".join(json.dumps(each) + "\n" for each in objects))
    for block in BLOCKS:
        if named := re.match(r"# (\w+\.py)\b", block.code):
            (folder / named[1]).write_text(block.code)
    (folder / "another").symlink_to(MODEL)
    for name in ("docs", "experiments", "notebooks", "llama_jax"):
        (folder / name).symlink_to(ROOT / name)


def run_shell(block: Block) -> None:
    for variables, words, line in commands_of(_instead(block)):
        where = f"{block.page}:{block.line}: {line.strip()}"
        if words[0] in ("pip", "pytest"):  # what brought this test here
            continue
        if words[0] == "python":  # tests/test_experiments.py runs them
            assert (ROOT / words[1]).exists() or Path(words[1]).exists(), where  # or they are blocks of the page
        elif words[:2] == ["docker", "build"]:
            assert (ROOT / words[words.index("-f") + 1]).exists(), where
        elif words[:2] == ["docker", "run"]:
            if inside := words[words.index("llama-jax") + 1 :]:
                only_parsed(inside, where)
        elif words[0] == "llama-jax" and words[1] in NOT_ENDING:
            only_parsed(words[1:], where)
        elif words[0] == "llama-jax":
            with pytest.MonkeyPatch.context() as patch:
                for name, value in variables.items():
                    patch.setenv(name, value)
                done = run_here(*less(words[1:]), lines=b"Hello\n")
            assert done.returncode == 0, f"{where}\n{shlex.join(less(words[1:]))}\n{done.stderr}"
        else:
            assert words[0] == "cat", f"{where}: cannot be run here; say why in a comment <!-- not run: ... --> above"
            subprocess.run(["bash", "-ec", line], check=True)


def _instead(block: Block) -> str:
    code = block.code
    for written, meant in INSTEAD[block.language].items():
        code = re.sub(written, lambda _, meant=meant: meant, code)
    return code


def only_parsed(words: list[str], where: str) -> None:
    """The arguments are those of the command; it is not run."""
    ran = []
    with pytest.MonkeyPatch.context() as patch:
        for module in pkgutil.iter_modules(llama_jax.cli.__path__):
            for kind in vars(importlib.import_module(f"llama_jax.cli.{module.name}")).values():
                if isinstance(kind, type) and "run" in vars(kind):
                    patch.setattr(kind, "run", lambda self: ran.append(self))
        done = run_here(*words)
    assert len(ran) == 1, f"{where}\n{done.stderr}"


@pytest.mark.slow
@pytest.mark.parametrize(
    "page", [pytest.param(page, marks=[pytest.mark.rotating] if page != "README.md" else []) for page in RUN]
)
def test_the_blocks_of_a_page_run_one_after_the_other(page, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("LLAMA_JAX_CACHE", str(tmp_path / "tokens"))
    lay_out(tmp_path)
    names: dict = {"short": short()}
    exec(BEFORE.get(page, ""), names)
    for block in (block for block in BLOCKS if block.page == page and not block.not_run):
        if block.language == "bash":
            run_shell(block)
            continue
        exec(compile("\n" * (block.line - 1) + _instead(block), str(ROOT / page), "exec"), names)


@pytest.mark.slow
def test_commands_that_are_not_run_have_the_options_that_they_name():
    for block in BLOCKS:
        if block.not_run and block.language == "bash" and "for i in" not in block.code:
            for _, words, line in commands_of(_instead(block)):
                if words[0] == "llama-jax" and "$" not in line:
                    only_parsed(words[1:], f"{block.page}: {line}")


def test_training_on_the_pages_has_settings_that_go_together():
    """As they are written: the blocks are run with fewer steps."""
    for block in (block for block in BLOCKS if block.language == "bash"):
        for _, words, line in commands_of(block.code):
            if words[:2] != ["llama-jax", "train"] or words[2] not in BUILT_IN:
                continue
            try:
                changes = [word for before, word in pairwise(words) if CHANGE.match(word) and not before.startswith("--")]
                recipe = override(BUILT_IN[words[2]](), changes)
            except UserError as error:
                pytest.fail(f"{block.page}: {line}: {error}")
            trace = words[words.index("--trace") + 1] if "--trace" in words else "1:1"
            assert int(trace.partition(":")[2]) <= recipe.steps + 1, f"{block.page}: {line}"


def test_every_block_is_run_or_says_why_not():
    assert len([block for block in BLOCKS if not block.not_run]) > 30
    assert len([block for block in BLOCKS if block.not_run]) < 30
    fences = sum(
        len(re.findall(r"^ *```(?:python|bash|sh|shell|console|py)\b", page.read_text("utf-8"), re.MULTILINE))
        for page in PAGES
    )
    assert fences == len(BLOCKS), "a block in another language, or that does not end"


DIFFS = re.findall(r"```diff\n(.*?)```", (ROOT / "docs" / "extending.md").read_text(), re.S)


@pytest.mark.parametrize("diff", DIFFS, ids=lambda diff: re.search(r"^\+\+\+ b/(.*)", diff, re.M)[1])
def test_a_diff_of_the_page_applies_and_touches_few_files(diff):
    assert 1 <= len(re.findall(r"^\+\+\+ ", diff, re.M)) <= 3
    subprocess.run(["git", "apply", "--check", "-"], input=diff, text=True, check=True, cwd=ROOT)


def test_extras_that_pages_install_exist():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for page in PAGES:
        for named in re.findall(r"\.\[([a-z0-9,-]+)\]\"", page.read_text("utf-8")):
            assert set(named.split(",")) <= set(extras), f"{page.name}: {named}"


def test_every_dependency_is_in_the_table():
    named = set(re.findall(r"^\| (`.+?) \|", _text("docs/install.md"), re.MULTILINE))
    asked = tomllib.loads(_text("pyproject.toml"))["project"]["dependencies"]
    assert {re.match(r"[\w-]+", each)[0] for each in asked} <= {
        name for row in named for name in re.findall(r"`([\w-]+)`", row)
    }


def anchor(title: str) -> str:
    """As GitHub and MyST make it of a heading."""
    plain = re.sub(r"`|\[([^]]*)\]\([^)]*\)", r"\1", title.lower())
    return re.sub(r"[^\w\- ]", "", plain).strip().replace(" ", "-")


def without_code(text: str) -> str:
    return re.sub(r"`[^`\n]*`", "", re.sub(r"^( *)```.*?^\1```", "", text, flags=re.MULTILINE | re.DOTALL))


def test_links_lead_somewhere():
    anchors = {
        page: {anchor(title) for title in re.findall(r"^#+ (.+)$", page.read_text("utf-8"), re.MULTILINE)} for page in PAGES
    }
    for page in PAGES:
        for link in re.findall(r"\]\(([^)\s]+)\)", without_code(page.read_text("utf-8"))):
            if re.match(r"https?://", link):
                continue
            path, _, place = link.partition("#")
            target = (page.parent / path).resolve() if path else page
            assert target.exists(), f"{page.relative_to(ROOT)}: {link} is not there"
            if place:
                assert place in anchors[target], f"{page.relative_to(ROOT)}: {link}: no such heading"


def test_every_page_is_on_the_site():
    listed = re.findall(
        r"^([\w/]+)$",
        "\n".join(re.findall(r"```\{toctree\}.*?\n\n(.*?)```", _text("docs/index.md"), re.DOTALL)),
        re.MULTILINE,
    )
    assert sorted([*listed, "index"]) == sorted(
        page.relative_to(ROOT / "docs").with_suffix("").as_posix() for page in PAGES if ROOT / "docs" in page.parents
    )


def test_the_reference_has_every_public_name():
    named = re.findall(r"^\.\. auto\w+:: llama_jax\.(\w+)$", _text("docs/api.md"), re.MULTILINE)
    assert sorted(named) == sorted(llama_jax.__all__)


def test_the_page_of_commands_has_every_command():
    listed = set(re.findall(r"^\| `llama-jax ([\w-]+)", _text("docs/commands.md"), re.MULTILINE))
    assert listed == {name for commands in llama_jax.cli.COMMANDS.values() for name in commands}


def _text(name: str) -> str:
    return (ROOT / name).read_text("utf-8")


@pytest.mark.slow
def test_the_training_step_of_the_page_has_float32_parameters_whatever_the_file_has():
    """With the bundled model, which is bfloat16."""
    block = next(block for block in BLOCKS if block.page == "docs/training.md" and "init_state(" in block.code)
    names: dict = {"llama_jax": llama_jax}
    exec(compile(_instead(block), "docs/training.md", "exec"), names)
    assert llama_jax.load().params.embedding.dtype == "bfloat16"
    assert {leaf.dtype.name for leaf in jax.tree.leaves(names["state"].params)} == {"float32"}
    assert 0 < float(names["metrics"]["loss"]) < 10
    assert int(names["state"].step) == 1


EXAMPLES = [block for block in BLOCKS if block.page == "docs/parallel_examples.md" and block.language == "python"]


@pytest.mark.slow
@pytest.mark.parametrize("exact", [True, False])
def test_the_programs_of_the_page_continue_each_others_runs(exact, tmp_path, monkeypatch):
    """Over a mesh, then by pmap, then over the mesh, with the losses of a run that stays on the mesh."""
    lay_out(tmp_path)

    def losses(folder: str, *runs: tuple[int, int]) -> list[float]:
        """The losses of consecutive runs of (program, steps)."""
        (tmp_path / folder).mkdir()
        monkeypatch.chdir(tmp_path / folder)
        Path("stories.txt").symlink_to(tmp_path / "stories.txt")
        found = []
        for program, steps in runs:
            code = _instead(EXAMPLES[program]).replace("STEPS, FOLDER = 4,", f"STEPS, FOLDER = {steps},")
            if exact:
                code = code.replace("options = StepOptions()", "options = StepOptions(virtual_shards=8)")
            names: dict = {}
            exec(compile(code, EXAMPLES[program].page, "exec"), names)
            found += names["losses"]
        return found

    stayed, moved = losses("stayed", (0, 6)), losses("moved", (0, 2), (1, 2), (0, 2))
    assert len(moved) == 6
    assert moved == (stayed if exact else pytest.approx(stayed, rel=1e-5))


def test_every_name_of_the_tree_is_there():
    tree = _text("docs/source_tree.md").split("```")[1]
    named = re.findall(r"^  (\S+)", tree.split("\nexperiments/")[0], re.MULTILINE)
    package = ROOT / "llama_jax"
    assert all((package / name).exists() for name in named)
    there = {p.name + "/" * p.is_dir() for p in package.iterdir() if not p.name.startswith("__") and p.name != "py.typed"}
    assert there == set(named)
