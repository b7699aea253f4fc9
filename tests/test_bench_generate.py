import json

import bench_generate
import pytest


@pytest.mark.slow
def test_the_benchmark_runs_and_writes_its_figures(tmp_path, capsys):
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
