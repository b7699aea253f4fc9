"""``--mesh`` of the commands that generate."""

import json
from functools import partial
from pathlib import Path

import pytest
from commands import process

from llama_jax.cli.generate import Generate
from llama_jax.errors import MeshError

run = partial(process, JAX_NUM_CPU_DEVICES=2)


@pytest.mark.slow
def test_generate_over_a_mesh_gives_the_same_text():
    """Its one key/value head is copied for the second device."""
    arguments = ["generate", "Once upon a time", "--dtype", "float32", "--seed", 3, "--max-new-tokens", 12, "--json"]
    alone, divided = run(*arguments), run(*arguments, "--mesh", "tensor=2")
    assert divided.returncode == 0, divided.stderr
    one, two = json.loads(alone.stdout), json.loads(divided.stdout)
    assert two["tokens"] == one["tokens"]
    assert (one["statistics"]["mesh"], two["statistics"]["mesh"]) == ("", "data=1,fsdp=1,tensor=2")
    assert "2.4M parameters" in divided.stderr  # the model's own, not those of the copies


@pytest.mark.slow
def test_chat_over_a_mesh():
    done = run("chat", "--max-new-tokens", 4, "--mesh", "tensor=2", lines="A cat sat.\n")
    assert done.returncode == 0, done.stderr
    assert " · mesh data=1,fsdp=1,tensor=2 · " in done.stderr
    assert done.stdout.strip()


def test_more_devices_than_there_are_is_one_line():
    done = run("generate", "Once", "--mesh", "tensor=4")
    assert done.returncode == 2
    assert done.stderr == (
        "llama-jax: error: mesh data=1,fsdp=1,tensor=4 needs 4 devices, but there are 2; JAX_NUM_CPU_DEVICES=4 simulates"
        " them\n"
    )


@pytest.mark.parametrize(
    ("mesh", "message"),
    [
        ("tensor=9", "needs 9 devices, but there are 8"),
        ("data=2", "only the Python API splits prompts over data and fsdp; use only tensor"),
        ("context=2,tensor=2", "generation has no sequence to split over context; use only tensor"),
    ],
)
def test_a_mesh_that_cannot_be_is_refused_before_the_model_is_looked_for(mesh, message):
    with pytest.raises(MeshError, match=message):
        Generate(prompt="Once", model=Path("absent"), mesh=mesh).load()


def test_a_mesh_that_the_model_does_not_fit():
    message = r"n_kv_heads=1 \(of 2 queries each\) cannot be split over tensor=4; 1, 2 would do"
    with pytest.raises(MeshError, match=message):
        Generate(prompt="Once", mesh="tensor=4").load()
