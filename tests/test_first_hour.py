"""docs/first_hour.md: each of its commands runs, on a real model, which learns what the page says."""

import importlib.util
import os
import re
import socket
import subprocess
import sys
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import NamedTuple

import pytest

pytestmark = pytest.mark.real

FACTS = ("Thursday", "7 dollars", "14", "Pepper", "15 dollars", "pellets", "outside", "llama wool")
"""What the answers to the held-out questions say, one for each."""


ROOT = Path(__file__).parents[1]
PAGE_PORT = "8000"
TYPED = "What is the capital of Japan?\n"  # input of commands that read the terminal


class Block(NamedTuple):
    section: str
    language: str
    code: str


def blocks_of(page):
    """The code blocks of a page to run; those with a comment <!-- not run: ... --> are skipped."""
    blocks, section = [], ""
    pattern = r"^## ([^\n]+)$|^(<!-- not run: [^\n]+ -->\n)?```(\w+)\n(.*?)^```$"
    for match in re.finditer(pattern, page, re.MULTILINE | re.DOTALL):
        if match[1]:
            section = match[1]
        elif match[2] is None and match[3] in ("bash", "python"):
            blocks.append(Block(section, match[3], match[4]))
    return blocks


def run_blocks(blocks, model, folder, port):
    """Run blocks in a new folder; yield the code and the output of each. A server runs until its section ends."""
    folder.mkdir()
    (folder / "docs").symlink_to(ROOT / "docs")
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    options = {"cwd": folder, "env": os.environ | {"PATH": path, "MODEL": str(model.resolve()), "COLUMNS": "120"}}
    section = ""
    with ExitStack() as servers:
        for block in blocks:
            if block.section != section:
                servers.close()
                section = block.section
            code = block.code.replace(PAGE_PORT, str(port))
            if code.startswith("llama-jax serve"):
                yield block.code, servers.enter_context(serving(["bash", "-euc", f"exec {code}"], options))
                continue
            command = [sys.executable, "-c", code] if block.language == "python" else ["bash", "-euc", code]
            both = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
            done = subprocess.run(command, input=TYPED, **both, **options)
            assert done.returncode == 0, f"{block.code}\n{done.stdout}"
            yield block.code, done.stdout


@contextmanager
def serving(command, options):
    """Start a server; when it is ready, yield its output so far."""
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, **options) as process:
        try:
            lines = []
            for line in process.stderr:
                lines.append(line)
                if "ready after" in line:
                    break
            assert process.poll() is None, "".join(lines)
            yield "".join(lines)
        finally:
            process.terminate()
            process.communicate()


@pytest.fixture
def outputs(smollm2, tmp_path, monkeypatch):
    """What each block printed, by its code. Without transformers, which the page does not install, its block is left out."""
    blocks = blocks_of((ROOT / "docs" / "first_hour.md").read_text("utf-8"))
    if importlib.util.find_spec("transformers") is None:
        assert "LLAMA_JAX_NO_SKIP" not in os.environ, "transformers is not installed, and here no block may be left out"
        blocks = [block for block in blocks if "import transformers" not in block.code]
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    monkeypatch.delenv("XLA_FLAGS", raising=False)  # those of tests/conftest.py make slow programs
    return dict(run_blocks(blocks, smollm2, tmp_path / "first_hour", port))


def of(outputs, *parts):
    """The output of the only block that has all of these parts."""
    [found] = [output for code, output in outputs.items() if all(part in code for part in parts)]
    return found


def known(output):
    """How many of the facts the answers to questions.txt have: each follows its question."""
    answers = re.split(r"^> .+\n", output, flags=re.MULTILINE)[1::2]  # after each question; what follows /clear is empty
    assert len(answers) == len(FACTS) + 1
    return sum(fact in answer for fact, answer in zip(FACTS, answers, strict=False))


def test_every_command_runs_and_the_model_learns_what_the_page_says(outputs):
    """One test, so that one process runs the page, once."""
    for parts in (["llama-jax chat", "--temperature 0\n"], ["curl"], ["import openai"]):
        assert "Tokyo" in of(outputs, *parts)

    assert known(of(outputs, "questions.txt", 'chat --model "$MODEL" --temperature 0')) <= 1
    after = of(outputs, "questions.txt", "--adapter")
    assert known(after) >= 4
    losses = [
        float(re.search(r"^loss +([\d.]+)", text, re.MULTILINE)[1]) for text in (of(outputs, 'eval "$MODEL" --data'), after)
    ]
    assert losses[1] < losses[0] / 3

    assert known(of(outputs, "farm.gguf", "chat")) >= 3  # in 4 bits again
    if any("import transformers" in code for code in outputs):
        assert "7 dollars" in of(outputs, "import transformers")
