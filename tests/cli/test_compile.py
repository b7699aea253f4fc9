"""`llama-jax compile`: the programs that it keeps are those that `generate` runs."""

import pytest
from commands import process


@pytest.mark.slow
def test_generate_compiles_nothing_more(tmp_path):
    cache = {"JAX_COMPILATION_CACHE_DIR": tmp_path}
    done = process("compile", "--max-tokens", "16", **cache)
    assert done.returncode == 0
    programs = sorted(path.name for path in tmp_path.iterdir())
    size = sum((tmp_path / name).stat().st_size for name in programs)
    assert done.stdout.startswith(f"{len(programs)} programs made, {size / 1e6:.1f} MB, in {tmp_path} ")
    assert f"prompts of up to 16 tokens: {len(programs)} programs so far" in done.stderr
    for temperature in ("0", "0.8"):  # two programs
        done = process("generate", "Once", "--max-new-tokens", "9", "--temperature", temperature, **cache)
        assert done.returncode == 0
        assert sorted(path.name for path in tmp_path.iterdir()) == programs
    assert process("compile", "--max-tokens", "16", **cache).stdout.startswith("0 programs made, 0.0 MB")


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"JAX_ENABLE_COMPILATION_CACHE": "false"}, "compile needs JAX's compilation cache"),
        ({"JAX_COMPILATION_CACHE_DIR": "s3://bucket/programs"}, "compile needs JAX's compilation cache"),
        ({"JAX_COMPILATION_CACHE_DIR": __file__}, "cannot be written"),
    ],
)
def test_a_cache_that_cannot_be_filled_is_refused(variables, message):
    done = process("compile", **variables)
    assert done.returncode == 2
    assert message in done.stderr
