"""The benchmarks run, small, and write their figures."""

import json

import bench_generate
import bench_serve
import bench_train
import pytest


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
    assert "stories-260k, prefill 256" in capsys.readouterr().out


@pytest.mark.parity
@pytest.mark.rotating
def test_training(tmp_path, capsys):
    output = tmp_path / "results" / "bench.json"
    arguments = bench_train.Arguments(
        shape="stories-260k",
        peers=("llama_jax", "torch eager", "lora", "peft eager"),
        rank=2,
        batch=2,
        length=16,
        steps=1,
        repetitions=3,
        output=output,
    )
    bench_train.main(arguments)
    results = json.loads(output.read_text())["results"]
    assert results.keys() == {"float32", "bfloat16"}
    for measured in results.values():
        assert measured["tokens_per_second"].keys() == measured["peak_memory_mb"].keys() == set(arguments.peers)
        assert all(len(runs) == 2 and min(runs) > 0 for runs in measured["tokens_per_second"].values())
        assert all(memory > 10 for [memory] in measured["peak_memory_mb"].values())
    assert "stories-260k" in capsys.readouterr().out


@pytest.mark.slow
def test_serving(tmp_path):
    output = tmp_path / "bench.json"
    small = {"shape": "stories-260k", "clients": (1, 16), "rows": 16, "prompt_tokens": 8, "new_tokens": 8, "requests": 1}
    bench_serve.main(bench_serve.Arguments(**small, repetitions=1, arrivals=4, output=output))
    loads = json.loads(output.read_text())["loads"]
    assert loads.keys() == {"closed 1", "closed 16", "poisson"}
    assert all(loads[f"closed {count}"]["llama_jax"]["median"] > 0 for count in (1, 16))
