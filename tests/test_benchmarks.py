"""The benchmarks run, small, and write their figures."""

import json
from dataclasses import replace

import bench_data
import bench_derivatives
import bench_generate
import bench_lora
import bench_train
import pytest
import track

from llama_jax.tokenizers import load_tokenizer


@pytest.mark.slow
def test_generation(tmp_path, capsys):
    output = tmp_path / "results" / "bench.json"
    arguments = bench_generate.Arguments(
        shapes=("stories-260k",),
        peers=("llama_jax", "llama_jax:int8"),
        repetitions=2,
        prompt_tokens=8,
        new_tokens=8,
        output=output,
    )
    bench_generate.main(arguments)
    figures = json.loads(output.read_text())["tokens_per_second"]["stories-260k"]
    assert figures.keys() == {"decode 1", "decode 8", "prefill 256"}
    assert all(peers.keys() == set(arguments.peers) for peers in figures.values())
    assert all(len(runs) == 1 and runs[0] > 0 for peers in figures.values() for runs in peers.values())
    assert "stories-260k" in capsys.readouterr().out


@pytest.mark.parity
@pytest.mark.rotating
def test_training(tmp_path, capsys):
    output = tmp_path / "results" / "bench.json"
    arguments = bench_train.Arguments(
        shape="stories-260k",
        peers=("llama_jax", "torch eager"),
        batch=2,
        length=16,
        steps=1,
        repetitions=3,
        output=output,
    )
    bench_train.main(arguments)
    results = json.loads(output.read_text())["results"]
    assert results.keys() == {"float32", "bfloat16"}
    for peers in results.values():
        assert peers.keys() == {"llama_jax", "torch eager"}
        for figures in peers.values():
            assert len(figures["tokens_per_second"]) == len(figures["processor_seconds_per_step"]) == 2
            assert min(figures["tokens_per_second"]) > 0
            assert figures["peak_memory_mb"] is None or figures["peak_memory_mb"] > 10
        assert peers["llama_jax"]["speed_of_llama_jax_over_this"] == 1
    assert "stories-260k" in capsys.readouterr().out


@pytest.mark.parity
@pytest.mark.rotating
def test_adapters(tmp_path):
    output = tmp_path / "bench.json"
    peers = ("lora", "full", "peft eager")
    small = {"rank": 2, "batch": 2, "length": 16, "steps": 1, "repetitions": 3, "output": output}
    bench_lora.main(bench_lora.Arguments(shape="stories-260k", peers=peers, **small))
    results = json.loads(output.read_text())["results"]
    assert results.keys() == {"float32", "bfloat16"}
    for found in results.values():
        assert found.keys() == set(peers)
        assert found["lora"]["speed_of_lora_over_this"] == 1
        for figures in found.values():
            assert len(figures["tokens_per_second"]) == 2
            assert min(figures["tokens_per_second"]) > 0


@pytest.mark.slow
@pytest.mark.rotating
def test_derivatives(tmp_path):
    output = tmp_path / "bench.json"
    small = bench_derivatives.Arguments(batch=1, length=8, calls=1, lengths=(16,), output=output)
    bench_derivatives.main(small)
    rows = json.loads(output.read_text())["rows"]
    assert {row["derivative"] for row in rows if row["length"] == 16} == set(bench_derivatives.LONG)
    assert all(row["temporary_mb"] > 0 and row.get("milliseconds", 1) > 0 for row in rows)


@pytest.mark.slow
def test_both_vocabularies_are_measured_in_turns(tmp_path, capsys):
    (tmp_path / "text.txt").write_text("Once upon a time there was a llama who saw a dog. " * 400)
    arguments = bench_data.Arguments(
        megabytes=0.2, data=(tmp_path / "text.txt",), processes=(1,), repeats=1, out=tmp_path / "report.json"
    )
    report = bench_data.main(arguments)
    assert json.loads((tmp_path / "report.json").read_text())["rows"] == report["rows"]
    found = [(row["vocabulary"], row["what"], row["processes"]) for row in report["rows"]]
    assert found == [
        (kind, what, 1) for kind in ("sentencepiece", "tokenizers") for what in ("library", "build", "build of all")
    ]
    for row in report["rows"]:
        assert row["megabytes_per_second"] > 0
        assert row["of_library"] == 1 or row["what"] != "library"
        assert ("of_a_quarter" in row) == (row["what"] == "build of all")
    assert capsys.readouterr().out.count("\n") == 8


def test_the_vocabulary_that_it_learns_is_one_of_ours(tmp_path):
    (tmp_path / "text.txt").write_text("Once upon a time there was a llama. " * 40)
    bench_data.learn(tmp_path / "text.txt", tmp_path / "tokenizer.json")
    tokenizer = load_tokenizer(tmp_path / "tokenizer.json")
    assert tokenizer.bos_id >= 0
    ids = tokenizer.encode_batch(["Once upon a llama"])
    assert ids == bench_data.encoder("tokenizers", tmp_path / "tokenizer.json")(["Once upon a llama"])
    assert tokenizer.decode(ids[0]) == "Once upon a llama"


def test_ratios_of_commits_are_taken_within_turns(tmp_path):
    found = track.ratios([10.0, 20.0, 40.0], [20.0, 20.0, 60.0])
    assert (found["ratio"], found["lowest"], found["highest"], found["turns"]) == (1.5, 1.0, 2.0, 3)
    assert track.ratios([1.0, "ImportError: no"], [1.0, 1.0]) == {"error": "ImportError: no"}
    about = {"date": "2026-11-26", "cpu": "a CPU", "base": "abc", "committed": "2026-11-25"}
    rows = [about | {"commit": commit, "measurement": "start"} | found for commit in ("def", "fed")]
    rows.append(about | {"commit": "def", "measurement": "train", "error": "ImportError: no"})
    head, _, *lines = track.table(rows).splitlines()
    assert head.endswith("| start | train |")
    assert lines[0].endswith("| abc | def | 1.50 (1.00 to 2.00) | error |")
    track.draw(rows, tmp_path / "history.png")
    assert (tmp_path / "history.png").stat().st_size > 5_000


@pytest.mark.slow
@pytest.mark.rotating
def test_two_commits_are_measured_side_by_side(tmp_path, capsys):
    output, small = tmp_path / "history.json", {"prompt_tokens": 8, "new_tokens": 4, "batch": 2, "length": 16, "steps": 1}
    arguments = track.Arguments(("HEAD", "HEAD"), shape="stories-260k", repetitions=2, output=output, **small)
    for only in (("train",), ("decode", "prefill")):
        track.main(replace(arguments, only=only))
    rows = json.loads(output.read_text())["rows"]
    assert [row["measurement"] for row in rows] == ["train stories-260k", "decode stories-260k", "prefill stories-260k"]
    assert all(row["ratio"] > 0 < row["per_second"] and row["base"] == row["commit"] for row in rows)
    assert "| train stories-260k |" in capsys.readouterr().out
    assert output.with_suffix(".md").exists()
    assert output.with_suffix(".png").exists()
    with pytest.raises(SystemExit, match="not a commit"):
        track.main(track.Arguments(("HEAD", "nothing"), output=output))
