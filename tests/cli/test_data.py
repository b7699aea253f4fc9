"""`llama-jax data show` and `data build` as a user meets them."""

import json
import re

import pytest
import vocabularies
from commands import run_here

TALK = [{"role": "user", "content": "Hi\n🦙"}, {"role": "assistant", "content": "Hello world"}]


@pytest.fixture(scope="module")
def vocabulary(tmp_path_factory):
    return vocabularies.write(tmp_path_factory.mktemp("vocabulary"), "bytes")


@pytest.fixture
def chats(tmp_path):
    path = tmp_path / "chats.jsonl"
    lines = [{"messages": TALK}, {"instruction": "Hi", "output": "Hello " * 40}, {"prompt": "once", "completion": " upon"}]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_ids_text_and_mask_are_side_by_side(chats, vocabulary):
    found = run_here("data", "show", chats, "--tokenizer", vocabulary)
    assert found.returncode == 0
    assert found.stderr == ""
    first, header, *rows = found.stdout.strip().split("\n")
    assert re.fullmatch(r".*chats\.jsonl, line 1: (\d+) tokens, 3 targets", first)
    assert header.split() == ["id", "text", "mask"]
    cells = [re.fullmatch(r" +(\d+) +(\d+)  (\S.*?) +(target|·)", row).groups() for row in rows]
    assert [int(place) for place, *_ in cells] == list(range(len(rows)))
    assert [(text, mask) for *_, text, mask in cells][-3:] == [
        ('"Hello"', "target"),
        ('" world"', "target"),
        ("<|eot_id|>", "target"),
    ]
    texts = [text for _, _, text, _ in cells]
    assert texts[0] == "<|begin_of_text|>"
    assert '"\\n\\n"' in texts
    assert "\x1b" not in found.stdout


def test_which_examples_and_how_long(chats, vocabulary):
    options = ("--tokenizer", vocabulary, "--json")
    found = run_here("data", "show", chats, *options, "--examples", 9).stdout.splitlines()
    assert [json.loads(line)["line"] for line in found] == [1, 2, 3]
    (answer,) = json.loads(found[2])["answers"]
    assert answer["texts"] == ["<|begin_of_text|>", '"once"', '" upon"', "<|end_of_text|>"]
    assert answer["targets"] == [0, 0, 1, 1]
    cut = run_here("data", "show", chats, *options, "--line", 2, "--length", 30)
    (answer,) = json.loads(cut.stdout)["answers"]
    assert len(answer["ids"]) == 31
    dropped = run_here("data", "show", chats, *options, "--line", 2, "--length", 30, "--too-long", "drop", "--count")
    assert json.loads(dropped.stdout) == {"line": 2, "answers": [None]}
    assert "2 of 3 examples" in dropped.stderr
    assert "1 as too long" in dropped.stderr
    page = run_here("data", "show", chats, "--tokenizer", vocabulary, "--line", 2, "--length", 30, "--too-long", "drop")
    assert "line 2: dropped, because it has over 30 + 1 tokens" in page.stdout


def test_the_vocabulary_of_the_bundled_model(chats):
    found = run_here("data", "show", chats, "--line", 3)
    assert found.returncode == 0
    assert "</s>" in found.stdout
    assert "target" in found.stdout
    found = run_here("data", "show", chats)  # it is no chat model
    assert found.returncode == 2
    assert "choose a format (--format)" in found.stderr
    assert run_here("data", "show", chats, "--format", "plain").returncode == 0


def test_warnings_come_as_lines(tmp_path, vocabulary):
    path = tmp_path / "chats.jsonl"
    path.write_text(json.dumps({"prompt": "<|eot_id|>", "completion": "Hello"}) + "\n")
    found = run_here("data", "show", path, "--tokenizer", vocabulary, "--count")
    assert re.search(r"^llama-jax: .*line 1: '<\|eot_id\|>' is a special token.*special=True", found.stderr, re.MULTILINE)


def test_a_build_says_what_it_made_and_what_it_left_out(vocabulary, tmp_path):
    story = " ".join(f"On day {n} the llama saw {n * 7} boats on the river." for n in range(30))
    texts = [story, story, f"{story} The end.", "Another one, of which there is but this."]
    (tmp_path / "a.txt").write_text("<|endoftext|>".join(texts))
    command = ("data", "build", tmp_path / "a.txt", "--out", tmp_path / "out", "--tokenizer", vocabulary, "--processes", 1)
    found = run_here(*command, "--drop-duplicates")
    assert found.returncode == 0
    assert re.match(rf"[\d,]+ tokens of 3 documents, 1 duplicates left out in {tmp_path}/out; ", found.stdout)
    found = run_here(*command)
    assert (found.returncode, found.stdout) == (2, "")
    said = f"llama-jax: error: {tmp_path}/out was built with different drop_duplicates; use another folder"
    assert found.stderr.startswith(said)
