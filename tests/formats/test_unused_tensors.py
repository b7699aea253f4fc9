"""Files with more or other names than the model needs: what is ignored, what decides, and what is refused by name."""

import json
from dataclasses import replace

import make_format_goldens as formats
import make_goldens
import numpy as np
import pytest
import quantized_folders
from conftest import params_of, same, write_hf_folder
from safetensors.numpy import save_file

import llama_jax
from llama_jax.errors import CheckpointError
from llama_jax.formats.huggingface import HF_NAMES
from llama_jax.formats.weight_format import IGNORED_TENSORS

CONFIG = make_goldens.KINDS["gqa"]
TENSORS = make_goldens.random_tensors(CONFIG)
ONES = np.ones(3, np.float32)
LAYER = "model.layers.1"
ATTENTION = f"{LAYER}.self_attn"
# For each kind of tensor that nobody needs, the names that people publish.
UNUSED = {
    "frequencies of RoPE": [f"{ATTENTION}.rotary_emb.inv_freq", "model.rotary_emb_local.inv_freq", "rope.freqs"],
    "attention masks": [f"{ATTENTION}.masked_bias", f"{LAYER}.attn.bias", "layers.0.attention.mask"],
    "empty caches": ["layers.0.attention.cache_k"],
    "scales of a quantized cache": [f"{ATTENTION}.{name}" for name in ("k_scale", "kv_scale", "k_proj.output_scale")],
    "scales of quantized activations": [f"{ATTENTION}.q_proj.input_scale", f"{LAYER}.mlp.down_proj.activation_scale"],
    "tensors of layers that predict several tokens (MTP)": ["mtp.fc.weight", "model.layers.2.eh_proj.weight"],
    "tensors for images": ["vision_tower.encoder.layers.0.mlp.fc1.weight", "model.multi_modal_projector.linear.bias"],
    "states of Transformer Engine": [f"{ATTENTION}._extra_state", f"{LAYER}.mlp.up_proj._extra_state/shard_0"],
    "vocabularies": ["spiece_model", "tokenizer.vocab"],
}
STRAY = [f"{ATTENTION}.q_proj.bias", f"{LAYER}.mlp.up_proj.weight_scale", "model.layers.2.mlp.up_proj.weight"]


@pytest.fixture(scope="module")
def params():
    return params_of(CONFIG, TENSORS)


@pytest.mark.parametrize("reason", UNUSED)
def test_tensors_that_nobody_needs_are_ignored_with_one_line(reason, params, tmp_path, caplog):
    folder = write_hf_folder(tmp_path / "model", CONFIG, TENSORS | dict.fromkeys(UNUSED[reason], ONES))
    same(llama_jax.load(folder).params, params)
    assert len(caplog.records) == 1
    assert f"{reason} ({len(UNUSED[reason])}, such as" in caplog.text
    assert set(UNUSED) == set(IGNORED_TENSORS)


@pytest.mark.parametrize("name", STRAY)
def test_what_is_unknown_is_refused_by_name(name, tmp_path):
    everything_unused = dict.fromkeys((unused for names in UNUSED.values() for unused in names[:1]), ONES)
    folder = write_hf_folder(tmp_path / "model", CONFIG, TENSORS | everything_unused | {name: ONES})
    with pytest.raises(CheckpointError, match=f"tensor '{name}' is not part of a Llama"):
        llama_jax.load(folder)


def mtp_layer(prefix):
    """A whole layer after the last, as DeepSeek-V3 publishes the one that predicts the next but one token."""
    layer = {name.replace("layers.1.", "layers.2."): array for name, array in TENSORS.items() if "layers.1." in name}
    own = ("eh_proj", "enorm", "hnorm", "embed_tokens", "shared_head.norm", "shared_head.head")
    return {prefix + name: array for name, array in layer.items()} | {
        f"{prefix}model.layers.2.{n}.weight": ONES for n in own
    }


@pytest.mark.parametrize("prefix", ["", "module."])
def test_a_whole_layer_that_predicts_several_tokens(prefix, params, tmp_path):
    tensors = {prefix + name: array for name, array in TENSORS.items()}
    folder = write_hf_folder(tmp_path / "model", CONFIG, tensors | mtp_layer(prefix), num_nextn_predict_layers=1)
    same(llama_jax.load(folder).params, params)


def test_a_gguf_with_a_layer_that_predicts_several_tokens(params, tmp_path):
    layer = {f"blk.2.{name}.weight": ONES for name in ("nextn.eh_proj", "nextn.enorm", "attn_norm", "attn_q", "ffn_up")}
    path, config = tmp_path / "model.gguf", replace(CONFIG, n_layers=3)  # a GGUF counts all blocks
    formats.write_gguf(path, config, TENSORS, extra=layer, **{"llama.nextn_predict_layers": 1})
    loaded = llama_jax.load(path)
    assert loaded.config == CONFIG
    same(loaded.params, params)
    formats.write_gguf(path, config, TENSORS, extra=layer, **{"llama.nextn_predict_layers": 3})
    with pytest.raises(CheckpointError, match="nextn_predict_layers=3 must be below block_count=3"):
        llama_jax.load(path)
    formats.write_gguf(path, CONFIG, TENSORS, extra={"blk.2.attn_norm.weight": ONES})
    with pytest.raises(CheckpointError, match=r"tensor 'blk.2.attn_norm.weight' is not part of a Llama"):
        llama_jax.load(path)


# -- an index ------------------------------------------------------------------------------------------------------------

FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
NORM, TABLE = HF_NAMES["final_norm"], HF_NAMES["embedding"]


def write_sharded(folder, change):
    """Two files and an index, after a change of (tensors by file, index)."""
    write_hf_folder(folder, CONFIG, TENSORS)
    (folder / "model.safetensors").unlink()
    names = sorted(TENSORS)
    files = {FIRST: {name: TENSORS[name] for name in names[::2]}, SECOND: {name: TENSORS[name] for name in names[1::2]}}
    index = {name: file for file, tensors in files.items() for name in tensors}
    change(files, index)
    for file, tensors in files.items():
        save_file(tensors, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    return folder


def other(file):
    return SECOND if file == FIRST else FIRST


def change_of(name, value=ONES, listed_in=None, stored_in=None):
    """A change of `write_sharded`: a tensor of this name in one file, and an entry of the index for it."""

    def change(files, index):
        if stored_in is not None:
            files[stored_in][name] = value
        if listed_in is not None:
            index[name] = listed_in

    return change


def zeros_elsewhere(name):
    """A change: a copy of zeros in the file where the index does not list the tensor."""
    return lambda files, index: files[other(index[name])].update({name: np.zeros_like(TENSORS[name])})


@pytest.mark.parametrize(
    ("change", "line"),
    [
        (change_of("model.old.weight", listed_in=SECOND), "names in model.safetensors.index.json without a tensor (1,"),
        (change_of("mtp.fc.weight", listed_in="mtp.safetensors"), "index.json without a tensor (1,"),
        (zeros_elsewhere(TABLE), "copies of a tensor in another file (1, such as 'model.embed_tokens.weight')"),
        (change_of(f"{ATTENTION}.rotary_emb.inv_freq", stored_in=FIRST), "frequencies of RoPE (1,"),
        (change_of("model.old.weight", stored_in=SECOND), "not in model.safetensors.index.json (1,"),
        (change_of(EXTRA := "model.layers.2.mlp.up_proj.weight", stored_in=SECOND), f"index.json (1, such as '{EXTRA}'"),
        (lambda files, index: index.pop(NORM), ""),  # needed, so it is read
        (lambda files, index: index.update({NORM: other(index[NORM])}), ""),
    ],
    ids=["stale", "mtp", "copy", "inv_freq", "unknown", "layer", "unlisted", "elsewhere"],
)
def test_the_index_decides(change, line, params, tmp_path, caplog):
    same(llama_jax.load(write_sharded(tmp_path / "model", change)).params, params)
    assert line in caplog.text
    assert len(caplog.records) == bool(line)


def without_norm(files, index):
    """A change: a tensor of the model is nowhere."""
    del files[index[NORM]][NORM]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (without_norm, f"tensor '{NORM}' is missing; the configuration needs it"),
        (lambda files, index: (without_norm(files, index), index.pop(NORM)), f"tensor '{NORM}' is missing"),
        (
            lambda files, index: (without_norm(files, index), index.update({NORM: "third.safetensors"})),
            "index.json names 'third.safetensors', which is missing from",
        ),
        (change_of(STRAY[0], listed_in=SECOND, stored_in=SECOND), f"tensor '{STRAY[0]}' is not part of a Llama"),
    ],
)
def test_a_tensor_that_is_needed_or_listed_and_unknown_is_an_error(change, message, tmp_path):
    folder = write_sharded(tmp_path / "model", change)
    with pytest.raises(CheckpointError, match=message):
        llama_jax.load(folder)


# -- prefixes ------------------------------------------------------------------------------------------------------------

# Prefixes of the backbone and of the output projection, instead of "model." and none.
PREFIXES = {
    "LlamaModel.save_pretrained": ("", ""),
    "PEFT": ("base_model.model.model.", "base_model.model."),
    "torch.compile": ("_orig_mod.model.", "_orig_mod."),
    "FSDP": ("_fsdp_wrapped_module.model.", "_fsdp_wrapped_module."),
    "LLaVA": ("language_model.model.", "language_model."),
    "Gemma3ForConditionalGeneration": ("model.language_model.", ""),
    "Lightning": ("model.model.", "model."),
}


def with_prefixes(tensors, backbone, head):
    """The tensors under other prefixes; each layer of FSDP is wrapped as well."""

    def name_of(name):
        if not name.startswith("model."):
            return head + name
        inner = ".mlp._fsdp_wrapped_module." if "fsdp" in backbone else ".mlp."
        return backbone + name.removeprefix("model.").replace(".mlp.", inner)

    return {name_of(name): array for name, array in tensors.items()}


@pytest.mark.parametrize("prefixes", PREFIXES.values(), ids=PREFIXES)
@pytest.mark.parametrize("kind", ["gqa", "tied"])
def test_any_prefix_that_all_layers_have(kind, prefixes, models, tmp_path):
    config, params = models[kind]
    tensors = make_goldens.random_tensors(config)
    same(llama_jax.load(write_hf_folder(tmp_path / "model", config, with_prefixes(tensors, *prefixes))).params, params)


def test_a_backbone_without_a_head(tmp_path):
    backbone = {name: array for name, array in with_prefixes(TENSORS, "", "").items() if name != "lm_head.weight"}
    with pytest.raises(CheckpointError, match=r"'lm_head.weight' is missing.*tie_word_embeddings is false.*backbone"):
        llama_jax.load(write_hf_folder(tmp_path / "model", CONFIG, backbone))


def test_prefixes_that_are_ambiguous_or_hide_strays(tmp_path):
    module = with_prefixes(TENSORS, "module.model.", "module.")
    for name, extra in {
        "copy": {NORM: TENSORS[NORM]},
        "bias": {"module.model.layers.0.self_attn.q_proj.bias": ONES},
        "score": {"module.score.weight": ONES},
        "layers": {name.replace("module.", "other."): array for name, array in module.items()},
    }.items():
        with pytest.raises(CheckpointError, match=r"differ only in a prefix|q_proj\.bias|score\.weight|is missing"):
            llama_jax.load(write_hf_folder(tmp_path / name, CONFIG, module | extra))


# -- quantized folders ---------------------------------------------------------------------------------------------------


def test_a_folder_that_quantizes_only_the_cache(params, tmp_path):
    only_cache = {"quant_method": "compressed-tensors", "config_groups": {}, "kv_cache_scheme": {"num_bits": 8}}
    tensors = TENSORS | {f"{ATTENTION}.k_scale": ONES[:1], f"{ATTENTION}.v_scale": ONES[:1]}
    same(llama_jax.load(write_hf_folder(tmp_path / "model", CONFIG, tensors, quantization_config=only_cache)).params, params)


@pytest.mark.parametrize("value", [0, 1])
def test_biases_that_gptq_adds_to_every_matrix(value, tmp_path, caplog):
    dense = params_of(quantized_folders.CONFIG, quantized_folders.write_folder(tmp_path, "gptq"))
    tensors, _ = quantized_folders.tensors_of(quantized_folders.CONFIG, quantized_folders.FOLDERS["gptq"][1])
    biases = {
        name.replace(".qweight", ".bias"): np.full(array.shape[1], value, np.float16)
        for name, array in tensors.items()
        if name.endswith(".qweight")
    }
    quantized_folders.save(tmp_path / "model.safetensors", tensors | biases)
    if value:
        with pytest.raises(CheckpointError, match=r"down_proj.bias' is not part of a Llama"):
            llama_jax.load(tmp_path)
        return
    same(llama_jax.load(tmp_path, "float32").params, dense)
    assert f"zero biases of GPTQ ({len(biases)}, such as" in caplog.text
