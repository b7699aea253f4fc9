"""Checkpoints and runs from before gate and up were arrays of their own: see experiments/make_joined_goldens.py."""

from __future__ import annotations

import io
import zipfile

import jax
import numpy as np
import pytest
from conftest import jit_logits
from make_joined_goldens import CONFIG, JOINED, TOKENS, logits_of, recipe_of, write_text

import llama_jax
from llama_jax.checkpoints.store import name_of
from llama_jax.parallel.mesh import MeshSizes
from llama_jax.runs.log import Log
from llama_jax.runs.loop import train


@pytest.fixture(scope="module")
def expected():
    with np.load(JOINED / "expected.npz") as found:
        return dict(found)


@pytest.fixture
def old(tmp_path):
    def unpacked(name):
        with zipfile.ZipFile(JOINED / f"{name}.zip") as archive:
            assert any("_METADATA" in member for member in archive.namelist())
            archive.extractall(tmp_path / name)
        return tmp_path / name

    return unpacked


@pytest.mark.slow
@pytest.mark.parametrize("name", ["adamw", pytest.param("muon", marks=pytest.mark.nightly)])
def test_the_model_is_the_same(old, expected, name):
    folder = old(name)
    np.testing.assert_allclose(logits_of(folder), expected[f"{name}.logits"], rtol=1e-5, atol=1e-6)
    sizes = MeshSizes(fsdp=2, tensor=2)
    config, params, _ = llama_jax.load(folder, mesh=sizes)
    logits = jit_logits(config, params, TOKENS)[:, ::6, : CONFIG.vocab_size]
    np.testing.assert_allclose(logits, expected[f"{name}.logits"], rtol=1e-4, atol=1e-5)


def test_a_seed_gives_the_same_model(expected):
    logits = jit_logits(CONFIG, llama_jax.init(CONFIG, jax.random.key(0)), TOKENS)
    np.testing.assert_allclose(logits[:, ::6], expected["saved.logits"], rtol=1e-5, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("optimizer", "mesh"),
    [
        ("adamw", MeshSizes()),
        ("muon", MeshSizes(fsdp=2, tensor=2)),
        pytest.param("adamw", MeshSizes(fsdp=2, tensor=2), marks=pytest.mark.nightly),
        pytest.param("muon", MeshSizes(), marks=pytest.mark.nightly),
    ],
    ids=str,
)
def test_a_run_goes_on(old, expected, tmp_path, optimizer, mesh):
    """With all that the optimizer kept: without it the parameters would be other ones."""
    log = Log(io.StringIO())
    state = train(recipe_of(optimizer), old(optimizer), [write_text(tmp_path)], resume=True, mesh=mesh, log=log).state
    assert int(state.step) == 6
    for kept, params in (("params", state.params), ("ema", state.ema)):
        named = {f"{optimizer}.{kept}.{name_of(path)}": array for path, array in jax.tree.leaves_with_path(params)}
        for name, array in named.items():
            if name.endswith((".gate", ".up")):
                joined = expected[name.removesuffix(".gate").removesuffix(".up") + ".gate_up"]
                wanted = joined[..., int(name.endswith(".up")), :]
            else:
                wanted = expected[name]
            np.testing.assert_allclose(array, wanted, rtol=1e-4, atol=2e-5, err_msg=name)
