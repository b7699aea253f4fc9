"""Adapters in GGUF: llama.cpp's names, order of rows and scale, there and back."""

import jax
import make_adapter_goldens as theirs
import make_goldens
import numpy as np
import pytest
from adapters import LORA, random_adapters
from conftest import jit_init, write_hf_folder

import llama_jax
from llama_jax.cli.convert import Convert
from llama_jax.errors import CheckpointError
from llama_jax.formats import convert, load_adapter, save_adapter
from llama_jax.formats.gguf import read_file
from llama_jax.model.lora import Lora, merge

CONFIG = make_goldens.KINDS["gqa"]
SOME = Lora(rank=2, alpha=3.0, targets=("q_proj", "v_proj", "down_proj"), rslora=True)


@pytest.mark.parametrize("lora", [LORA, SOME], ids=["all", "some"])
def test_what_is_written_is_read_again(lora, tmp_path):
    adapters = random_adapters(CONFIG, lora)
    save_adapter(tmp_path / "a.gguf", CONFIG, adapters, lora, base="some/model")
    found = load_adapter(tmp_path / "a.gguf", CONFIG)
    assert found.base == "some/model"
    assert (found.lora.rank, set(found.lora.targets)) == (lora.rank, set(lora.targets))
    assert found.lora.scale == pytest.approx(lora.scale, rel=1e-6)  # also of the root of the rank
    jax.tree.map(np.testing.assert_array_equal, found.params, adapters)


def test_the_file_is_what_llama_cpp_reads(tmp_path):
    """By its own reader: types, names, shapes."""
    from gguf import GGUFReader

    save_adapter(tmp_path / "a.gguf", CONFIG, random_adapters(CONFIG), LORA)
    reader = GGUFReader(tmp_path / "a.gguf")
    fields = {name: field.contents() for name, field in reader.fields.items()}
    assert fields["general.type"] == "adapter"
    assert fields["adapter.type"] == "lora"
    assert fields["general.architecture"] == "llama"
    assert fields["adapter.lora.alpha"] == LORA.alpha
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    assert len(tensors) == 2 * 7 * CONFIG.n_layers
    save = tensors["blk.1.ffn_down.weight.lora_a"], tensors["blk.1.ffn_down.weight.lora_b"]
    assert [one.data.shape for one in save] == [(3, CONFIG.hidden_dim), (CONFIG.dim, 3)]
    assert [list(one.shape) for one in save] == [[CONFIG.hidden_dim, 3], [3, CONFIG.dim]]  # as ggml counts its axes


def test_beside_a_model_in_gguf_it_changes_the_same_rows(tmp_path):
    """What llama.cpp does: B A of the file, times alpha / R, added to the weights of the file."""
    from gguf import GGUFReader

    params = jit_init(CONFIG, jax.random.key(0))
    adapters = random_adapters(CONFIG)
    llama_jax.save(tmp_path / "base.gguf", CONFIG, params)
    llama_jax.save(tmp_path / "merged.gguf", CONFIG, merge(params, adapters, LORA))
    save_adapter(tmp_path / "a.gguf", CONFIG, adapters, LORA)
    base, merged, pairs = (
        {tensor.name: tensor.data for tensor in GGUFReader(tmp_path / f"{name}.gguf").tensors}
        for name in ("base", "merged", "a")
    )
    changed = {name.removesuffix(".lora_a") for name in pairs if name.endswith(".lora_a")}
    assert {name for name in base if np.abs(base[name] - merged[name]).max() > 1e-3} == changed
    for name in changed:
        change = LORA.scale * pairs[f"{name}.lora_b"] @ pairs[f"{name}.lora_a"]
        np.testing.assert_allclose(base[name] + change, merged[name], atol=1e-5)


def test_adapters_are_converted_both_ways(calling, tmp_path):
    base = write_hf_folder(tmp_path / "base", CONFIG)
    theirs.write_adapter(tmp_path / "peft", CONFIG, LORA)
    with pytest.raises(
        CheckpointError, match=r"says nothing of its base; pass the base's folder or file as base \(--base\)"
    ):
        convert(tmp_path / "peft", tmp_path / "a.gguf")
    calling(Convert, tmp_path / "peft", tmp_path / "a.gguf", "--base", base, "--dtype", "float16")
    assert {tensor.kind for tensor in read_file(tmp_path / "a.gguf")[1].values()} == {"F16"}
    calling(Convert, tmp_path / "a.gguf", tmp_path / "again")  # it says where its base is
    before, after = (load_adapter(tmp_path / name, CONFIG) for name in ("peft", "again"))
    assert (after.lora, after.base) == (before.lora, str(base))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-6), after.params, before.params)


def test_what_cannot_be(tmp_path):
    base = write_hf_folder(tmp_path / "base", CONFIG)
    adapters = random_adapters(CONFIG)
    save_adapter(tmp_path / "a.gguf", CONFIG, adapters, LORA, base="a/hub")
    with pytest.raises(CheckpointError, match="exists; remove it, or replace it"):
        save_adapter(tmp_path / "a.gguf", CONFIG, adapters, LORA)
    with pytest.raises(CheckpointError, match=r"is an adapter; pass the model that it was trained on"):
        llama_jax.load(tmp_path / "a.gguf")
    with pytest.raises(CheckpointError, match=r"was trained on 'a/hub', which is not here; pass the base"):
        convert(tmp_path / "a.gguf", tmp_path / "peft")
    with pytest.raises(CheckpointError, match="is an adapter: it is written as safetensors or gguf, in a float"):
        convert(tmp_path / "a.gguf", tmp_path / "b.gguf", dtype="q8_0", base=base)
    with pytest.raises(CheckpointError, match=r"an adapter in GGUF is a file named .gguf, and for PEFT a folder"):
        convert(tmp_path / "a.gguf", tmp_path / "b", format="gguf", base=base)
    with pytest.raises(CheckpointError, match=r"is for an adapter, and .* is a model"):
        convert(base, tmp_path / "b.gguf", base=base)
    with pytest.raises(CheckpointError, match="rank 3 and this base need"):
        load_adapter(tmp_path / "a.gguf", make_goldens._config(hidden_dim=64))
    with pytest.raises(CheckpointError, match=r"general.architecture='llama', but an adapter of this base has 'qwen2'"):
        load_adapter(tmp_path / "a.gguf", make_goldens._config(qkv_bias=True))
    dora = Lora(rank=2, dora=True)
    with pytest.raises(CheckpointError, match=r"dora=True: llama.cpp does not support magnitudes; merge the adapter"):
        save_adapter(tmp_path / "c.gguf", CONFIG, random_adapters(CONFIG, dora), dora)
    assert not (tmp_path / "c.gguf").exists()
    llama_jax.save(tmp_path / "model.gguf", *_model())
    with pytest.raises(CheckpointError, match="holds no adapter"):
        load_adapter(tmp_path / "model.gguf", CONFIG)


def _model():
    return CONFIG, jit_init(CONFIG, jax.random.key(0))
