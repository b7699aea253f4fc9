"""docs/first_hour.md: each of its commands runs, on a real model, which learns what the page says."""

import importlib.util
import os
import re
import socket

import first_hour
import pytest

pytestmark = pytest.mark.real

FACTS = ("Thursday", "7 dollars", "14", "Pepper", "15 dollars", "pellets", "outside", "llama wool")
"""What the answers to the held-out questions say, one for each."""


@pytest.fixture
def outputs(smollm2, tmp_path, monkeypatch):
    """What each block printed, by its code. Without transformers, which the page does not install, its block is left out."""
    wanted = first_hour.blocks(first_hour.PAGE.read_text("utf-8"))
    if importlib.util.find_spec("transformers") is None:
        assert "LLAMA_JAX_NO_SKIP" not in os.environ, "transformers is not installed, and here no block may be left out"
        wanted = [block for block in wanted if "import transformers" not in block.code]
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    monkeypatch.delenv("XLA_FLAGS", raising=False)  # those of tests/conftest.py make slow programs
    return {done.code: done.output for done in first_hour.run(wanted, smollm2, tmp_path / "first_hour", port)}


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
