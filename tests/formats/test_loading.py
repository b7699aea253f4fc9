"""Files in: what is read, and how every kind of damage is named."""

import json
import struct
from dataclasses import replace

import jax
import jax.numpy as jnp
import make_goldens
import ml_dtypes
import numpy as np
import pytest
from conftest import same, write_hf_folder
from make_format_goldens import write_llama2c
from safetensors.numpy import load_file, save_file

import llama_jax
from llama_jax.errors import CheckpointError, ConfigError
from llama_jax.formats.huggingface import HF_NAMES, config_from_dict, config_to_dict

KINDS = make_goldens.KINDS


@pytest.mark.parametrize("kind", KINDS)
def test_hf_folder_of_every_kind(kind, tmp_path, models):
    folder = write_hf_folder(tmp_path / "model", KINDS[kind])
    for path in (folder, folder / "model.safetensors"):
        config, params, tokenizer = llama_jax.load(path)
        assert config == KINDS[kind]
        assert tokenizer is None
        same(params, models[kind][1])


def shard(folder, n):
    tensors = load_file(folder / "model.safetensors")
    names = sorted(tensors)
    weight_map = {}
    for i in range(n):
        file = f"model-{i + 1:05}-of-{n:05}.safetensors"
        part = {name: tensors[name] for name in names[i::n]}
        save_file(part, folder / file)
        weight_map |= dict.fromkeys(part, file)
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return weight_map


@pytest.mark.parametrize("stored", [np.float32, np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("wanted", [None, "float32", "bfloat16"])
def test_dtypes(stored, wanted, tmp_path):
    tensors = {k: v.astype(stored) for k, v in make_goldens.random_tensors(KINDS["gqa"]).items()}
    folder = write_hf_folder(tmp_path / "model", KINDS["gqa"], tensors)
    params = llama_jax.load(folder, wanted).params
    by_default = np.float32 if stored == np.float16 else stored  # on a CPU
    assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {jnp.dtype(wanted or by_default)}
    np.testing.assert_array_equal(params.embedding, tensors[HF_NAMES["embedding"]].astype(params.embedding.dtype))


def test_weights_do_not_change_with_the_file(tmp_path):
    """What is loaded is a copy: writing over the file later must not reach the arrays."""
    path = tmp_path / "model.bin"
    write_llama2c(path, KINDS["tied"], make_goldens.random_tensors(KINDS["tied"]), 0)
    params = llama_jax.load(path).params
    before = [np.array(leaf) for leaf in jax.tree.leaves(params)]
    with path.open("r+b") as file:
        file.write(b"\1" * path.stat().st_size)
    for leaf, old in zip(jax.tree.leaves(params), before, strict=True):
        np.testing.assert_array_equal(leaf, old)


# -- configuration ----------------------------------------------------------------------------------------------------


def published(hidden, inter, layers, heads, kv=None, eps=1e-5, context=4096, vocab=32_000, tied=False, **more):
    """The lines of a release's config.json that matter, and some that do not."""
    found = dict(model_type="llama", architectures=["LlamaForCausalLM"], bos_token_id=1, eos_token_id=[2, 3], use_cache=True)
    found |= dict(hidden_act="silu", initializer_range=0.02, pretraining_tp=1, torch_dtype="bfloat16", attention_dropout=0.0)
    found |= dict(hidden_size=hidden, intermediate_size=inter, num_hidden_layers=layers, num_attention_heads=heads)
    found |= dict(rms_norm_eps=eps, max_position_embeddings=context, vocab_size=vocab, tie_word_embeddings=tied)
    return found | ({} if kv is None else dict(num_key_value_heads=kv)) | more


def llama3(factor=None, **more):
    more |= dict(vocab=128_256, rope_theta=500_000.0, context=8192 if factor is None else 131_072, attention_bias=False)
    if factor is None:
        return more | dict(rope_scaling=None)
    scaling = dict(low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=8192, rope_type="llama3")
    return more | dict(rope_scaling=scaling | dict(factor=factor), mlp_bias=False)


RELEASES = {
    "llama-7b": published(4096, 11_008, 32, 32, eps=1e-6, context=2048),
    "llama-2-7b": published(4096, 11_008, 32, 32, 32, rope_scaling=None),
    "llama-2-70b": published(8192, 28_672, 80, 64, 8),
    "codellama-34b": published(8192, 22_016, 48, 64, 8, context=16_384, rope_theta=1_000_000),
    "tinyllama-1.1b": published(2048, 5632, 22, 32, 4, context=2048, rope_theta=10_000.0),
    "llama-3-8b": published(4096, 14_336, 32, 32, 8, **llama3()),
    "llama-3.1-8b": published(4096, 14_336, 32, 32, 8, **llama3(8.0)),
    "llama-3.2-1b": published(2048, 8192, 16, 32, 8, tied=True, head_dim=64, **llama3(32.0)),
    "llama-3.2-3b": published(3072, 8192, 28, 24, 8, tied=True, head_dim=128, **llama3(32.0)),
}


@pytest.mark.parametrize("name", RELEASES)
def test_released_config_json(name):
    assert config_from_dict(RELEASES[name]) == llama_jax.preset(name)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "gemma2"}, "model_type='gemma2' is not supported"),
        ({"attention_bias": "yes"}, "='yes' must be True or False"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"rope_parameters": {"rope_type": "proportional", "factor": 2}}, "rope scaling 'proportional' is not supported"),
        ({"rope_parameters": {"rope_type": "llama3", "factor": 8}}, "'llama3' has no low_freq_factor"),
        ({"rope_parameters": {"rope_type": "linear", "factor": 2, "mscale": 1}}, "'linear' with mscale=1"),
        ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}, "partial_rotary_factor=0.5"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 2.0}}, "contradict each other"),
        ({"sliding_window": 4096}, "sliding_window=4096"),
        ({"max_position_embeddings": 10**30}, "max_seq_len=1000"),
    ],
)
def test_settings_that_are_not_supported_are_refused(changes, message, tmp_path):
    with pytest.raises(ConfigError, match=message):
        config_from_dict(config_to_dict(KINDS["gqa"]) | changes)
    folder = write_hf_folder(tmp_path / "model", KINDS["gqa"], **changes)
    with pytest.raises(CheckpointError, match=r"config.json: .*") as caught:
        llama_jax.load(folder)
    for name in changes:  # in the file's own words
        assert name in str(caught.value) or "rope" in str(caught.value)


def test_missing_settings_are_named():
    with pytest.raises(ConfigError, match="vocab_size, hidden_size"):
        config_from_dict({"model_type": "llama"})


# -- damage ------------------------------------------------------------------------------------------------------------


def spoil_tensors(folder, change):
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


Q1 = HF_NAMES["q"].format(1)
EXTRA = "model.layers.2.mlp.up_proj.weight"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop(Q1), f"tensor '{Q1}' is missing"),
        (lambda t: t.update({EXTRA: np.zeros((2, 2), np.float32)}), f"'{EXTRA}' is not part of a Llama"),
        (lambda t: t.update({Q1: t[Q1][:-1].copy()}), rf"'{Q1}' has shape \[31, 32\]; the configuration needs \[32, 32\]"),
        (lambda t: t[Q1].__setitem__((3, 4), np.nan), f"'{Q1}' holds NaN or infinity"),
        (lambda t: t.update({Q1: np.zeros((32, 32), np.int8)}), f"'{Q1}' is I8; a 16- or 32-bit float"),
    ],
)
def test_a_tensor_that_does_not_fit_is_named(hf_folder, change, message):
    spoil_tensors(hf_folder, change)
    with pytest.raises(CheckpointError, match=message):
        llama_jax.load(hf_folder)


def test_tied_model_with_another_head(tmp_path, caplog):
    """As in transformers 5, which warns and does not tie the two."""
    config = KINDS["tied"]
    tensors = make_goldens.random_tensors(config)
    good = tensors | {HF_NAMES["lm_head"]: tensors[HF_NAMES["embedding"]].copy()}
    assert llama_jax.load(write_hf_folder(tmp_path / "good", config, good)).params.lm_head is None
    other = tensors | {HF_NAMES["lm_head"]: tensors[HF_NAMES["embedding"]] + 1}
    untied, params, _ = llama_jax.load(write_hf_folder(tmp_path / "other", config, other))
    assert "lm_head.weight differs from the embedding" in caplog.text
    assert untied == replace(config, tie_embeddings=False)
    np.testing.assert_array_equal(params.lm_head, other[HF_NAMES["lm_head"]])


@pytest.mark.parametrize(
    "damage",
    [
        *(lambda whole, end=end: whole[:end] for end in (0, 4, 8, 100, -1)),
        lambda whole: whole[: len(whole) // 2],
        lambda whole: np.random.default_rng(0).bytes(len(whole)),
    ],
)
def test_damaged_safetensors(hf_folder, damage):
    path = hf_folder / "model.safetensors"
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(CheckpointError, match=r"model.safetensors is not a whole safetensors file"):
        llama_jax.load(hf_folder)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda w: w.update({Q1: "../model-00001-of-00002.safetensors"}), "not in the same folder"),
        (lambda w: w.update({Q1: "/etc/hostname"}), "not in the same folder"),
        (lambda w: w.update({Q1: "model-00003-of-00002.safetensors"}), "which is missing from"),
        (lambda w: w.update({Q1: 3}), "not an index of weights"),
        (lambda w: w.clear(), "2 layers are configured, but the file has 0 tensors"),
        (lambda w: w.update(weight_map=None), "not an index of weights"),
    ],
)
def test_spoiled_index(hf_folder, change, message):
    weight_map = shard(hf_folder, 2)
    change(weight_map)
    found = {} if "weight_map" in weight_map else {"weight_map": weight_map}
    (hf_folder / "model.safetensors.index.json").write_text(json.dumps(found))
    with pytest.raises(CheckpointError, match=message):
        llama_jax.load(hf_folder)


@pytest.mark.parametrize("word", range(7))
def test_llama2c_with_a_garbled_header(tmp_path, word):
    path = tmp_path / "model.bin"
    write_llama2c(path, KINDS["tied"], make_goldens.random_tensors(KINDS["tied"]), 0)
    for value in (0, -1, 2**31 - 1, -(2**31)):
        content = bytearray(path.read_bytes())
        content[4 * word : 4 * word + 4] = struct.pack("i", value)
        other = tmp_path / "garbled.bin"
        other.write_bytes(content)
        with pytest.raises(CheckpointError, match="not a whole llama2"):
            llama_jax.load(other)


def test_llama2c_made_with_another_theta(tmp_path):
    path = tmp_path / "model.bin"
    config = replace(KINDS["tied"], rope_theta=500_000.0)
    write_llama2c(path, config, make_goldens.random_tensors(config), 0)
    with pytest.raises(CheckpointError, match="stored rotary angles"):
        llama_jax.load(path)


def test_numbers_too_large_for_the_wanted_dtype(hf_folder):
    spoil_tensors(hf_folder, lambda t: t[Q1].__setitem__((3, 4), 70_000))
    assert llama_jax.load(hf_folder, "bfloat16").config == KINDS["gqa"]
    with pytest.raises(CheckpointError, match=f"'{Q1}' holds numbers too large for float16"):
        llama_jax.load(hf_folder, "float16")


def test_where_there_is_no_model(tmp_path):
    with pytest.raises(CheckpointError, match=r"nowhere does not exist"):
        llama_jax.load(tmp_path / "nowhere")
    with pytest.raises(CheckpointError, match="holds no model"):
        llama_jax.load(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(config_to_dict(KINDS["gqa"])))
    with pytest.raises(CheckpointError, match=r"has a config.json, but no weights: model.safetensors"):
        llama_jax.load(tmp_path)
    other = tmp_path / "model.safetensors"
    other.write_bytes(b"hello" * 10)
    with pytest.raises(CheckpointError, match="not a model of a supported format"):
        llama_jax.load(other)


def test_several_models_in_a_folder(tmp_path):
    for name in ("a.bin", "b.bin"):
        write_llama2c(tmp_path / name, KINDS["tied"], make_goldens.random_tensors(KINDS["tied"]), 0)
    with pytest.raises(CheckpointError, match=r"several models \(a.bin, b.bin\)"):
        llama_jax.load(tmp_path)
