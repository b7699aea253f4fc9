"""--adapter of the commands that read a model, and merge."""

import json
from dataclasses import replace
from functools import partial

import jax
import numpy as np
import pytest
from adapters import LORA, random_adapters
from conftest import jit_init

from llama_jax.cli.convert import Merge
from llama_jax.cli.eval import Eval
from llama_jax.cli.generate import Generate
from llama_jax.cli.verify import Verify
from llama_jax.config.presets import preset
from llama_jax.errors import CheckpointError
from llama_jax.formats import open_checkpoint, save, save_adapter


@pytest.fixture(scope="module")
def adapter(stories, tmp_path_factory):
    """One that changes what the stories model says, and not whether it says anything."""
    adapters = jax.tree.map(lambda array: 0.7 * array, random_adapters(stories.config))
    folder = tmp_path_factory.mktemp("adapter") / "adapter"
    save_adapter(folder, stories.config, adapters, LORA)
    return folder


@pytest.fixture
def merged(stories_folder, adapter, calling, tmp_path):
    _, err = calling(Merge, stories_folder, adapter, tmp_path / "merged")
    assert "merged: 1." in err
    return tmp_path / "merged"


@pytest.mark.slow
def test_a_merged_model_says_what_the_adapted_one_does(calling, stories_folder, adapter, merged, tmp_path):
    options = "Once upon a time", "--temperature", 0, "--max-new-tokens", 12, "--json"
    said = partial(calling, Generate, *options)
    beside = json.loads(said("--model", stories_folder, "--adapter", adapter).out)
    assert json.loads(said("--model", merged).out)["text"] == beside["text"]
    assert json.loads(said("--model", stories_folder).out)["text"] != beside["text"]

    (tmp_path / "text.txt").write_text("Once upon a time, there was a little girl named Lily.")
    measured = partial(calling, Eval, "--data", tmp_path / "text.txt", "--length", 64, "--json")
    found = json.loads(measured(stories_folder, "--adapter", adapter).out)
    assert found["adapter"] == str(adapter)
    assert found["loss"] == pytest.approx(json.loads(measured(merged).out)["loss"], rel=1e-5)
    assert found["loss"] != pytest.approx(json.loads(measured(stories_folder).out)["loss"], rel=1e-2)

    oracle = tmp_path / "oracle.npz"
    codes = []
    for arguments in (
        (merged, "--write-oracle", oracle, "--tokens", 16),
        (stories_folder, "--adapter", adapter, "--oracle", oracle),
        (stories_folder, "--oracle", oracle),
    ):
        with pytest.raises(SystemExit) as ended:
            calling(Verify, *arguments)
        codes.append(ended.value.code)
    assert codes == [0, 0, 1]


def test_what_cannot_be(calling, stories_folder, adapter, hf_folder, tmp_path):
    with pytest.raises(CheckpointError, match="is this the adapter's base"):
        calling(Generate, "x", "--model", hf_folder, "--adapter", adapter)
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "mine.txt").write_text("x")
    with pytest.raises(CheckpointError, match="exists; remove it"):
        calling(Merge, stories_folder, adapter, tmp_path / "there")
    with pytest.raises(CheckpointError, match="is, contains or is inside the model being read"):
        calling(Merge, stories_folder, adapter, adapter)


@pytest.mark.parametrize("dtype", ["auto", pytest.param("q4_0", marks=pytest.mark.slow)])
def test_it_is_merged_into_a_quantized_base(calling, tmp_path, dtype):
    """Each matrix keeps its blocks, others the same bits; and changes of a hundredth of a step are not rounded away."""
    base, out = tmp_path / "base.gguf", tmp_path / "out.gguf"
    config = replace(preset("stories-260k"), hidden_dim=192)
    save(base, config, jit_init(config, jax.random.key(0)), dtype="q4_0")
    save_adapter(tmp_path / "small", config, jax.tree.map(lambda array: 0.01 * array, random_adapters(config)), LORA)
    _, dense = calling(Merge, base, tmp_path / "small", tmp_path / "dense")
    assert "q4_0 and q8_0" in dense
    assert "become float32" in dense
    _, err = calling(Merge, base, tmp_path / "small", out, "--dtype", dtype)
    assert f"the weights of {base} have" in err
    before, after = open_checkpoint(base).tensors, open_checkpoint(out).tensors
    assert {name: tensor.storage_type for name, tensor in before.items()} == {
        name: tensor.storage_type for name, tensor in after.items()
    }
    assert base.stat().st_size == pytest.approx(out.stat().st_size, abs=4096)
    exact = open_checkpoint(tmp_path / "dense").tensors["model.layers.0.mlp.down_proj.weight"]

    def read(tensor):
        return np.asarray(tensor.read(0, tensor.shape[0]), np.float32)

    old, new = (read(tensors["blk.0.ffn_down.weight"]) for tensors in (before, after))
    added = read(exact) - old
    assert 0 < np.abs(added).max() < 0.1 * np.abs(old[old != 0]).min()
    assert np.vdot(new - old, added) / np.vdot(added, added) == pytest.approx(1, abs=0.3)
    old, new = (read(tensors["token_embd.weight"]) for tensors in (before, after))
    assert np.array_equal(old, new)


def test_it_is_merged_into_other_formats(calling, stories, stories_folder, adapter, tmp_path):
    calling(Merge, stories_folder, adapter, tmp_path / "merged.gguf", "--dtype", "float16")
    config, tensors = (merged := open_checkpoint(tmp_path / "merged.gguf")).config, merged.tensors
    assert tensors["token_embd.weight"].storage_type == tensors["blk.0.attn_output.weight"].storage_type == "F16"
    assert config.dim == stories.config.dim
