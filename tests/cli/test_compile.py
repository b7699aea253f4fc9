"""`llama-jax compile`: programs made ahead are those that `generate` runs."""

import pytest
from commands import run_here as run

from llama_jax import compiled


@pytest.mark.slow
def test_what_is_compiled_ahead_is_what_generate_runs(tmp_path, monkeypatch):
    folder = tmp_path / "executables"
    monkeypatch.setenv(compiled.EXECUTABLES_ENV, str(folder))
    done = run("compile", "--max-tokens", "16")
    assert done.returncode == 0
    files = sorted(folder.iterdir())
    size = sum(file.stat().st_size for file in files)
    assert done.stdout.startswith(f"{len(files)} programs made, {size / 1e6:.1f} MB, in {folder} ")
    assert f"prompts of up to 16 tokens: {len(files)} programs so far" in done.stderr
    for temperature in ("0", "0.8"):  # two programs
        assert run("generate", "Once", "--max-new-tokens", "9", "--temperature", temperature).returncode == 0
        assert sorted(folder.iterdir()) == files
    assert run("compile", "--max-tokens", "16").stdout.startswith("0 programs made, 0.0 MB")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ([], "executables are not stored: LLAMA_JAX_EXECUTABLES or JAX's settings turn them off; set"),
        (["--no-cache"], "compile needs the cache of programs; omit --no-cache"),
        (["--max-tokens", "0"], "max_tokens=0"),
    ],
)
def test_what_cannot_be_kept_is_refused(options, said):
    done = run("compile", *options)
    assert done.returncode == 2
    assert said in done.stderr


def test_a_folder_that_others_may_write_is_refused(tmp_path, monkeypatch):
    tmp_path.chmod(0o777)
    monkeypatch.setenv(compiled.EXECUTABLES_ENV, str(tmp_path))
    done = run("compile")
    assert done.returncode == 2
    assert "executables are not stored: others may write to it (mode 777); set LLAMA_JAX_EXECUTABLES" in done.stderr
