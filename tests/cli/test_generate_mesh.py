"""``--mesh`` of the commands that generate."""

import json
from functools import partial

import pytest
from commands import process

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


def test_more_devices_than_there_are_is_one_line():
    done = run("generate", "Once", "--mesh", "tensor=4")
    assert done.returncode == 2
    assert done.stderr == (
        "llama-jax: error: mesh data=1,fsdp=1,tensor=4 needs 4 devices, but there are 2; JAX_NUM_CPU_DEVICES=4 simulates"
        " them\n"
    )
