"""The benchmark of `data build` measures, small, what it says."""

import json

import bench_data
import pytest

from llama_jax.tokenizers import load_tokenizer


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
