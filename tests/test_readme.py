"""The README tells the truth: its Python runs word for word, with a real model in place of the path."""

import re
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

import llama_jax

README = (Path(__file__).parents[1] / "README.md").read_text()


@pytest.mark.slow
def test_the_python_of_the_readme_runs(stories_folder, tmp_path, capsys):
    blocks = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    assert len(blocks) == 8
    code = "\n".join(blocks).replace("path/to/model", str(stories_folder)).replace("max_new_tokens=100", "max_new_tokens=8")
    code = code.replace("max_new_tokens=300", "max_new_tokens=80")
    code = code.replace("path/to/copy", str(tmp_path / "copy")).replace("path/to/adapter", str(tmp_path / "adapter"))
    names: dict = {}
    exec(compile(code, "README.md", "exec"), names)
    assert names["logits"].shape == (1, 512)
    assert 0 < float(names["metrics"]["loss"]) < 10
    assert int(names["state"].step) == 1
    assert names["small"]().model == names["preset"]("stories-260k")
    assert capsys.readouterr().out.startswith("Once upon a time")


@pytest.mark.slow
def test_the_training_of_the_readme_has_float32_parameters_whatever_the_file_has():
    """With the bundled model, which is bfloat16."""
    (block,) = (b for b in re.findall(r"```python\n(.*?)```", README, re.DOTALL) if "init_state(" in b)
    config, params, tokenizer = llama_jax.load()
    assert params.embedding.dtype == "bfloat16"
    tokens = jnp.array([tokenizer.encode("Once upon a time there was a llama.")])
    names = {"llama_jax": llama_jax, "jax": jax, "config": config, "params": params, "tokens": tokens}
    exec(compile(block, "README.md", "exec"), names)
    assert {leaf.dtype.name for leaf in jax.tree.leaves(names["state"].params)} == {"float32"}
    assert 0 < float(names["metrics"]["loss"]) < 10


def test_every_room_of_the_tree_is_there():
    tree = README.split("## The tree")[1].split("```")[1]
    rooms = re.findall(r"^  (\S+)", tree, re.MULTILINE)
    package = Path(__file__).parents[1] / "llama_jax"
    assert all((package / room).exists() for room in rooms)
    there = {p.name + "/" * p.is_dir() for p in package.iterdir() if not p.name.startswith("__") and p.name != "py.typed"}
    assert there == set(rooms)
