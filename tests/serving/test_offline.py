"""Prompts without end, a few at a time: from Python, and as a command that goes on where it was stopped."""

import json
from dataclasses import replace

import jax
import pytest
from commands import error_of, run_here
from conftest import sharp

import llama_jax
from llama_jax.cli import batch
from llama_jax.errors import GenerationError

SMALL = llama_jax.EngineOptions(rows=4, context=128, prefill_chunk=16)


@pytest.fixture(scope="module")
def model():
    config = replace(llama_jax.preset("stories-260k"), n_layers=2)
    return config, sharp(config, jax.random.key(1))


class TestBatch:
    def test_each_is_what_generate_gives(self, model):
        prompts = [[1, *range(5, 5 + 7 * i % 90)] for i in range(15)]
        limits = [1 + 5 * i % 23 for i in range(15)]
        sampling = llama_jax.Sampling(temperature=[0.0, 0.9, 1.0] * 5, seed=range(15))
        found = dict(
            llama_jax.complete_requests(
                *model, prompts, max_new_tokens=limits, sampling=sampling, stop_tokens=[7], options=SMALL
            )
        )
        wanted = llama_jax.generate(*model, prompts, max_new_tokens=limits, sampling=sampling, stop_tokens=[7])
        assert len(found) == 15
        for i, expected in enumerate(wanted):
            assert found[i].tokens == expected.tokens
            assert found[i].finish_reason == expected.finish_reason

    def test_of_none(self, model):
        assert list(llama_jax.complete_requests(*model, [], max_new_tokens=1)) == []

    def test_an_invalid_prompt(self, model):
        with pytest.raises(GenerationError, match="512"):
            list(llama_jax.complete_requests(*model, [[1], [512]], max_new_tokens=1, options=SMALL))


@pytest.fixture
def files(tmp_path):
    prompts = tmp_path / "prompts.jsonl"
    texts = ["Once upon a time", "The dog", "Lily saw", "One day", "A cat and a dog"]
    prompts.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts))
    return prompts, tmp_path / "out.jsonl"


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


USUAL = ("--max-new-tokens", 12, "--seed", 5, "--rows", 2)


class TestCommand:
    @pytest.mark.slow
    def test_it_goes_on_where_it_was_stopped(self, files):
        prompts, out = files
        done = run_here("batch", prompts, out, *USUAL)
        assert done.returncode == 0, done.stderr
        assert "5 prompts" in done.stderr
        whole = out.read_bytes().splitlines(keepends=True)
        out.write_bytes(b"".join(whole[:2]) + whole[2][:30])  # killed in the middle of a line
        again = run_here("batch", prompts, out, *USUAL[:2], *USUAL[4:])  # from its own seed
        assert again.returncode == 0, again.stderr
        assert "has 2 of 5 prompts" in again.stderr
        assert sorted(out.read_bytes().splitlines(keepends=True)) == sorted(whole)
        assert "seed=5, but this command has 6" in run_here("batch", prompts, out, *USUAL, "--seed", 6).stderr
        assert run_here("batch", prompts, out, *USUAL).returncode == 0  # nothing left to do
        assert sorted(out.read_bytes().splitlines(keepends=True)) == sorted(whole)

    @pytest.mark.slow
    def test_each_is_what_generate_prints(self, files):
        prompts, out = files
        run_here("batch", prompts, out, *USUAL, "--stop", "the")
        printed = run_here("generate", "--prompt-file", prompts, *USUAL[:4], "--stop", "the").stdout
        wanted = [json.loads(line) for line in printed.splitlines()]
        found = sorted(lines(out), key=lambda line: line["line"])
        assert [line["text"] for line in found] == [line["text"] for line in wanted]
        assert [line["finish_reason"] for line in found] == [line["finish_reason"] for line in wanted]
        assert [line["prompt"] for line in found] == [line["prompt"] for line in wanted]

    @pytest.mark.parametrize(
        "content",
        [
            b'{"line": 1}\n',
            b"no JSON\n",
            b'{"line": 1, "prompt": "Once upon a time", "settings": {"seed": 1e999}}\n',
        ],
    )
    def test_a_file_of_another_batch(self, files, content):
        prompts, out = files
        out.write_bytes(content)
        assert "line 1 does not belong to these prompts" in error_of(run_here("batch", prompts, out, *USUAL))
        assert out.read_bytes() == content

    def test_lines_of_another_batch_stay(self, files, monkeypatch):
        """It may end, and let go of the file, while this one loads its model: its lines must not be cut off."""
        prompts, out = files
        monkeypatch.setattr(batch._Output, "check", lambda self, settings: out.write_bytes(b"whole\n"))
        monkeypatch.setattr(batch.BatchPrompts, "load", lambda self: (None, None, None))
        monkeypatch.setattr("llama_jax.serving.engine.Engine", lambda *arguments: None)
        done = run_here("batch", prompts, out, *USUAL)
        assert done.returncode == 2
        assert "was changed after it was read; run the same command again to resume" in done.stderr
        assert out.read_bytes() == b"whole\n"
