"""Quantized Hugging Face folders: read as floats, kept as they are, and quantized in another way."""

import json
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import quantized_folders as writers
from conftest import jit_dequantize, jit_logits, params_of, same

import llama_jax
from llama_jax.errors import CheckpointError, ConfigError
from llama_jax.formats.huggingface import config_from_dict, config_to_dict
from llama_jax.formats.loading import open_checkpoint
from llama_jax.model.trees import kinds_in_memory, quantize
from llama_jax.ops.weights.quantized_matmul import JoinedWeight
from llama_jax.parallel.mesh import MeshSizes
from llama_jax.parallel.padding import unpad_params

KEPT = [name for name, (*_, kinds) in writers.FOLDERS.items() if kinds]
TOKENS = jnp.asarray([[1, 5, 9, 40]])
# These compile programs of their own; each is a variant of one that is always tested.
LONGER = {"nf4", "float8 by tensor", "float8 by blocks", "int4 by 32, asymmetric", "gptq, asymmetric", "gptq_v2"}


@pytest.mark.parametrize("kind", writers.FOLDERS)
def test_numbers_are_those_of_the_format(kind, tmp_path):
    dense = params_of(writers.CONFIG, writers.write_folder(tmp_path, kind))
    same(llama_jax.load(tmp_path, "float32").params, dense)
    same(llama_jax.load(tmp_path, quantize="int8").params, quantize(dense, "int8"))


@pytest.mark.parametrize("kind", writers.PACKAGES)
def test_numbers_are_those_that_the_packages_themselves_decode(kind, tmp_path, monkeypatch):
    """What AutoGPTQ and AutoAWQ packed and decoded, in float16; make_gptq_awq_goldens.py of commit 2b1345d3 wrote it."""
    monkeypatch.setitem(writers.FOLDERS, "golden", (writers.PACKAGES[kind], writers.by_package(kind), None))
    dense = params_of(writers.CONFIG, writers.write_folder(tmp_path, "golden"))
    half = lambda params: jax.tree.map(lambda leaf: np.asarray(leaf, np.float16), params)
    same(half(llama_jax.load(tmp_path, "float32").params), half(dense))
    if kind != "gptq_reordered":
        same(half(jit_dequantize(llama_jax.load(tmp_path, quantize="keep").params)), half(dense))


@pytest.mark.parametrize("kind", [pytest.param(kind, marks=pytest.mark.slow) if kind in LONGER else kind for kind in KEPT])
def test_kept_as_they_are(kind, tmp_path):
    dense = params_of(writers.CONFIG, writers.write_folder(tmp_path, kind, files=3))
    config, params, _ = llama_jax.load(tmp_path)  # floats are asked for
    same(llama_jax.load(tmp_path, quantize="keep").params, params)
    block = params.blocks
    assert (block.attention.qkv.quant_format, block.feed_forward.down.quant_format) == writers.FOLDERS[kind][2]
    assert isinstance(params.embedding, jax.Array)
    assert isinstance(params.lm_head, jax.Array)
    same(jit_dequantize(params), dense)
    wanted = jit_logits(config, dense, TOKENS)
    np.testing.assert_allclose(jit_logits(config, params, TOKENS), wanted, atol=1e-3 * float(jnp.abs(wanted).max()))


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=pytest.mark.nightly) if kind in ("fp8", "nf4 twice") else kind for kind in KEPT]
)
def test_kept_over_a_mesh(kind, tmp_path):
    """Heads are copied, the vocabulary is padded, and groups that no device would hold whole become smaller ones."""
    config = replace(writers.CONFIG, hidden_dim=1536)
    dense = params_of(config, writers.write_folder(tmp_path, kind, config))
    there = llama_jax.load(tmp_path, quantize="keep", mesh=MeshSizes(tensor=2))
    same(jit_dequantize(unpad_params(config, there.params)), dense)
    if kind in ("int4", "int8", "fp8", "nf4 twice"):
        found = llama_jax.generate(there.config, there.params, [[1, 5, 9]], max_new_tokens=3)
        alone = llama_jax.load(tmp_path, quantize="keep")
        wanted = llama_jax.generate(alone.config, alone.params, [[1, 5, 9]], max_new_tokens=3)
        assert [row.tokens for row in found] == [row.tokens for row in wanted]


def test_experts_of_mixtral(tmp_path):
    config = replace(writers.CONFIG, experts=2, experts_per_token=1)
    dense = params_of(config, _experts_stacked(writers.write_folder(tmp_path, "gptq, asymmetric", config)))
    params = llama_jax.load(tmp_path, quantize="keep").params
    assert params.blocks.feed_forward.gate.quant_format == "int4_asym_64"
    same(jit_dequantize(params), dense)


def _experts_stacked(tensors):
    """Tensors with those of the experts as one, as the library's table of names has them."""
    found = {}
    for name, array in tensors.items():
        head, _, tail = name.partition(".experts.")
        if not tail:
            found[name] = array
            continue
        number, rest = tail.split(".", 1)
        found.setdefault(f"{head}.experts.{rest}", {})[int(number)] = array
    return {k: np.stack([v[i] for i in sorted(v)]) if isinstance(v, dict) else v for k, v in found.items()}


def test_values_in_another_kind_than_queries_and_keys(tmp_path):
    """As a list of modules that are not converted makes it."""
    writers.write_folder(tmp_path, "int8")
    tensors, dense = writers.tensors_of(writers.CONFIG, writers.FOLDERS["int8"][1])
    stem = "model.layers.1.self_attn.v_proj.weight"
    del tensors[f"{stem}_scale"]
    tensors[stem] = dense[stem]
    writers.save(tmp_path / "model.safetensors", tensors)
    params = llama_jax.load(tmp_path, quantize="keep").params
    qkv = llama_jax.layers_of(params)[1].attention.qkv
    assert isinstance(qkv, JoinedWeight)
    assert [getattr(part, "quant_format", "dense") for part in qkv.parts] == ["int8", "int8", "dense"]
    same(jit_dequantize(params), params_of(writers.CONFIG, dense))


def test_converted_they_are_numbers(tmp_path):
    dense = params_of(writers.CONFIG, writers.write_folder(tmp_path / "a", "gptq"))
    llama_jax.convert(tmp_path / "a", tmp_path / "b")
    llama_jax.convert(tmp_path / "a", tmp_path / "c.gguf")
    same(llama_jax.load(tmp_path / "b").params, dense)
    same(llama_jax.load(tmp_path / "c.gguf").params, dense)


def test_columns_in_another_order_are_not_kept(tmp_path, caplog):
    writers.write_folder(tmp_path, "gptq, reordered")
    with pytest.raises(CheckpointError, match=r"has reordered columns \(desc_act\); use int8"):
        llama_jax.load(tmp_path, quantize="keep")
    assert kinds_in_memory(llama_jax.load(tmp_path).params) == "float32"
    assert "tensors in int4_asym become floats" in caplog.text


@pytest.mark.parametrize(
    ("kind", "end", "array", "message"),
    [
        ("gptq", ".scales", None, "tensor .*scales' is missing, but its weight is quantized"),
        ("gptq", ".qzeros", np.zeros((2, 16), np.int32), r"has qzeros as I32 of \[2, 16\]; I32 of \[1, 16\] is needed"),
        (
            "gptq",
            ".qzeros",
            np.zeros((1, 16), np.int32),
            "has asymmetric zero points, but quantization_config says sym=true",
        ),
        ("gptq, reordered", ".g_idx", np.full(128, 7, np.int32), "assigns a column to group 7, but has 1 groups"),
        ("int4", ".weight_shape", np.asarray([128, 120]), r"a weight_shape unlike its weight_packed, \[128, 128\]"),
        ("int4", ".weight_scale", np.full((128, 1), np.nan, np.float32), "holds NaN or infinity; the file is damaged"),
        ("float8 by rows", ".weight", np.full((128, 128), np.nan).astype(jnp.float8_e4m3fn), "holds NaN or infinity"),
        (
            "fp8",
            ".weight_scale_inv",
            np.ones((1, 2), np.float32),
            r"has weight_scale_inv as F32 of \[1, 2\]; .* of \[1, 1\] is needed",
        ),
        ("nf4", ".weight.quant_map", np.zeros(16, np.float32), "has a quant_map other than that of bitsandbytes"),
        (
            "nf4",
            ".weight.quant_state.bitsandbytes__nf4",
            np.frombuffer(b'{"shape": [1000000000, 6400], "quant_type": "nf4", "blocksize": 64}', np.uint8),
            r"has weight as U8 of \[8192, 1\]; U8 of \[3200000000000, 1\]",
        ),
        ("nf4 twice", ".weight.nested_quant_map", None, "quantized scales without all of their nested tensors"),
    ],
)
def test_what_does_not_fit_together_is_named(kind, end, array, message, tmp_path):
    writers.write_folder(tmp_path, kind)
    tensors, _ = writers.tensors_of(writers.CONFIG, writers.FOLDERS[kind][1])
    name = f"model.layers.0.self_attn.o_proj{end}"
    del tensors[name]
    if array is not None:
        tensors[name] = array
    writers.save(tmp_path / "model.safetensors", tensors)
    for quantization in (None, "keep") if kind in KEPT else (None,):
        with pytest.raises(CheckpointError, match=message) as raised:
            llama_jax.load(tmp_path, quantize=quantization)
        assert "o_proj" in str(raised.value)
        assert "\n" not in str(raised.value)


INT4 = writers.FOLDERS["int4"][0]
WEIGHTS = INT4["config_groups"]["group_0"]["weights"]


def _with_weights(**changes):
    return INT4 | {"config_groups": {"group_0": INT4["config_groups"]["group_0"] | {"weights": WEIGHTS | changes}}}


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        *[({"quant_method": name}, f"quant_method='{name}' is not supported") for name in ("hqq", "exl2")],
        ({}, "quant_method=None is not supported; compressed-tensors, fp8, gptq, awq, bitsandbytes are supported"),
        (7, "quantization_config=7 must be an object"),
        ({"quant_method": "gptq", "bits": 8}, "bits=8 is not supported; GPTQ weights must have 4"),
        ({"quant_method": "gptq", "group_size": 16}, "group_size=16 is not supported; it must be a multiple of 32, or -1"),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "bnb_4bit_quant_type='fp4' is not supported"),
        ({"quant_method": "fp8", "weight_block_size": [128, 100]}, "the number of columns must be a multiple of 32"),
        (INT4 | {"format": "nvfp4-pack-quantized"}, "format='nvfp4-pack-quantized' is not supported"),
        (_with_weights(actorder="group"), "actorder='group' is not supported"),
    ],
)
def test_other_schemes_are_refused_by_name(setting, message):
    with pytest.raises(ConfigError, match=message) as raised:
        config_from_dict(config_to_dict(writers.CONFIG) | {"quantization_config": setting})
    assert "\n" not in str(raised.value)


def test_a_setting_without_quantized_weights_is_an_error(hf_folder):
    config = json.loads((hf_folder / "config.json").read_text())
    (hf_folder / "config.json").write_text(json.dumps(config | {"quantization_config": writers.FOLDERS["gptq"][0]}))
    with pytest.raises(
        CheckpointError, match=r"has a quantization_config, but no weight is quantized that way \(\.qweight\)"
    ):
        open_checkpoint(hf_folder)
