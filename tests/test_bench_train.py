import json

import bench_lora
import bench_train
import pytest


@pytest.mark.parity
@pytest.mark.rotating
def test_the_benchmark_runs_and_writes_its_figures(tmp_path, capsys):
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
def test_the_benchmark_of_adapters_runs_and_writes_its_figures(tmp_path):
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
