"""Biases of the projections of attention and feed-forward, through all subpackages.

Logits, gradients and round trips of a model with all biases are those of transformers: `make_goldens.KINDS["biases"]`.
"""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import make_format_goldens as formats
import make_goldens
import numpy as np
import pytest
from adapters import random_adapters
from conftest import jit_dequantize, jit_logits, params_of, same, write_hf_folder
from family_models import FAMILY_MODELS, PLAIN, random_params

import llama_jax
from llama_jax.config import Parts
from llama_jax.config.families import FAMILIES
from llama_jax.errors import CheckpointError, ConfigError
from llama_jax.formats import load_adapter, open_checkpoint, save_adapter
from llama_jax.formats.huggingface import config_from_dict, config_to_dict
from llama_jax.model.forward_options import ComputeOptions
from llama_jax.model.lora import Lora, apply_adapters, merge
from llama_jax.model.trees import quantize
from llama_jax.parallel.mesh import MeshSizes
from llama_jax.training.optimizer import OptimizerSettings, make_optimizer

CONFIG = replace(PLAIN, qkv_bias=True, out_bias=True, mlp_bias=True)
TOKENS = np.random.default_rng(0).integers(0, 96, (2, 20), dtype=np.int32)
SETTINGS = {"attention_bias": ("qkv_bias", "out_bias"), "mlp_bias": ("mlp_bias",)}


@pytest.fixture(scope="module")
def params():
    return random_params(CONFIG)


def biases_of(params):
    """Every bias by its name, with the layers' axis first."""
    attention, feed_forward = params.blocks.attention, params.blocks.feed_forward
    found = {name: getattr(attention, name) for name in ("qkv_bias", "out_bias")}
    return found | {name: getattr(feed_forward, name) for name in ("gate_bias", "up_bias", "down_bias")}


def with_bias(params, name, value):
    part = "attention" if name in ("qkv_bias", "out_bias") else "feed_forward"
    changed = getattr(params.blocks, part).replace(**{name: value})
    return params.replace(blocks=params.blocks.replace(**{part: changed}))


@pytest.mark.slow
def test_an_exact_pass_has_them(params):
    found = jax.jit(partial(llama_jax.logits, CONFIG, compute=ComputeOptions(exact=True)))(params, TOKENS)
    np.testing.assert_allclose(found, jit_logits(CONFIG, params, TOKENS), atol=1e-4)


def test_they_stay_floats_and_do_not_decay(params):
    quantized = quantize(params, "int8")
    same(biases_of(quantized), biases_of(params))
    np.testing.assert_allclose(
        jit_logits(CONFIG, jit_dequantize(quantized), TOKENS), jit_logits(CONFIG, quantized, TOKENS), atol=0.05
    )
    nothing = jax.tree.map(jnp.zeros_like, params)
    for name in ("adamw", "muon"):
        rule = make_optimizer(OptimizerSettings(name=name, weight_decay=0.5, schedule="constant"), 20)
        updates, _ = jax.jit(rule.update)(nothing, rule.init(params), params)
        assert not any(np.asarray(update).any() for update in biases_of(updates).values())
        assert np.asarray(updates.blocks.attention.out).any()


@pytest.mark.parametrize("tensor", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_over_a_mesh_tokens_are_those_of_one_device(params, tensor, tmp_path):
    """With tensor=4, heads are copied. Each device adds a part of a projection's sum, but not the bias."""
    llama_jax.save(tmp_path / "model", CONFIG, params)
    prompts = TOKENS[:, :7].tolist()
    wanted = [row.tokens for row in llama_jax.generate(CONFIG, params, prompts, max_new_tokens=8)]
    config, sharded, _ = llama_jax.load(tmp_path / "model", mesh=MeshSizes(tensor=tensor))
    assert [row.tokens for row in llama_jax.generate(config, sharded, prompts, max_new_tokens=8)] == wanted


@pytest.mark.parametrize("dora", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_adapters_leave_them_alone(params, dora, tmp_path):
    lora = Lora(rank=3, alpha=5.0, dora=dora)
    save_adapter(tmp_path / "adapter", CONFIG, random_adapters(CONFIG, lora), lora)
    adapters = load_adapter(tmp_path / "adapter", CONFIG).params
    merged = merge(params, adapters, lora)
    same(biases_of(merged), biases_of(params))
    np.testing.assert_allclose(
        jit_logits(CONFIG, merged, TOKENS), jit_logits(CONFIG, apply_adapters(params, adapters, lora), TOKENS), atol=1e-3
    )


def test_what_does_not_go_with_biases():
    with pytest.raises(ConfigError, match=r"models with experts have .* mlp_bias=False; leave both out"):
        replace(CONFIG, experts=4, experts_per_token=2)
    config = replace(CONFIG, parts=Parts(feed_forward=lambda x, gate, up, down: x))
    with pytest.raises(ConfigError, match="for models without mlp_bias"):
        jax.eval_shape(partial(llama_jax.logits, config), random_params(CONFIG), TOKENS)


# -- files ---------------------------------------------------------------------------------------------------------------


def test_a_gguf_as_llama_cpp_converts_it(models, tmp_path):
    """The biases of queries and keys have their rows in the interleaved layout, like the matrices."""
    config, params = models["biases"]
    tensors = make_goldens.random_tensors(config)
    formats.write_gguf(tmp_path / "model.gguf", config, tensors)
    loaded = llama_jax.load(tmp_path / "model.gguf")
    assert loaded.config == config
    same(loaded.params, params)
    # A Qwen under the name of a Llama has no bias of the output projection.
    some = {name: array for name, array in tensors.items() if "o_proj.bias" not in name and "mlp" not in name}
    some |= {name: array for name, array in tensors.items() if "mlp" in name and name.endswith("weight")}
    formats.write_gguf(tmp_path / "qwen.gguf", config, some)
    loaded = llama_jax.load(tmp_path / "qwen.gguf")
    assert loaded.config == replace(config, out_bias=False, mlp_bias=False)
    same(loaded.params, params_of(loaded.config, some))
    assert loaded.config.model_type == "qwen2"
    del some["model.layers.1.self_attn.k_proj.bias"]
    formats.write_gguf(tmp_path / "damaged.gguf", config, some)
    with pytest.raises(CheckpointError, match=r"'blk.1.attn_k.bias' is missing"):
        llama_jax.load(tmp_path / "damaged.gguf")


@pytest.mark.parametrize("kind", FAMILY_MODELS)
def test_settings_mean_what_they_mean_to_transformers(kind, tmp_path):
    """A family whose model in transformers has no such biases ignores the setting, and refuses their tensors."""
    config = FAMILY_MODELS[kind]
    for setting, names in SETTINGS.items():
        found = config_from_dict(config_to_dict(config) | {setting: True})
        assert found == (replace(config, **dict.fromkeys(names, True)) if setting in FAMILIES[kind].features else config)
        assert config_from_dict(config_to_dict(found)) == found
        assert found.model_type == kind
    biased = replace(config, qkv_bias=True, out_bias=True)
    if "attention_bias" not in FAMILIES[kind].features or kind in ("llama", "granite"):
        return
    with pytest.raises(CheckpointError, match=r"out_bias=True .* cannot be stored in GGUF, whose readers ignore them"):
        llama_jax.save(tmp_path / "model.gguf", biased, random_params(biased))


def folder_of(folder, config, drop="", **settings):
    """A folder of a model, without the tensors whose names end in `drop`."""
    tensors = {name: a for name, a in make_goldens.random_tensors(config).items() if not drop or not name.endswith(drop)}
    return write_hf_folder(folder, config, tensors, **settings)


def test_a_qwen_as_a_llama(tmp_path, caplog):
    """transformers has a bias of the output projection as well, and takes zeros where the files have none."""
    config = replace(make_goldens.KINDS["biases"], mlp_bias=False)
    loaded = llama_jax.load(folder_of(tmp_path / "model", config, drop="o_proj.bias"))
    assert loaded.config == replace(config, out_bias=False)
    assert "no layer has o_proj.bias" in caplog.text
    with_zeros = params_of(config, make_goldens.random_tensors(config))
    with_zeros = with_bias(with_zeros, "out_bias", 0 * with_zeros.blocks.attention.out_bias)
    tokens = make_goldens.tokens(config)
    np.testing.assert_allclose(
        jit_logits(loaded.config, loaded.params, tokens), jit_logits(config, with_zeros, tokens), atol=1e-5
    )
    for name in ("layers.1.self_attn.o_proj.bias", "layers.0.self_attn.k_proj.bias"):
        with pytest.raises(CheckpointError, match=f"{name}' is missing"):
            llama_jax.load(folder_of(tmp_path / name, config, drop=name))


def test_an_internlm(tmp_path):
    config = replace(make_goldens.KINDS["biases"], mlp_bias=False, n_kv_heads=4)
    internlm = {
        "model_type": "internlm",
        "bias": True,
        "rotary": {"base": 10_000, "type": "dynamic"},
        "attention_bias": None,
    }
    loaded = llama_jax.load(folder_of(tmp_path / "model", config, rope_parameters=None, **internlm))
    assert loaded.config == config
    same(loaded.params, params_of(config, make_goldens.random_tensors(config)))
    assert open_checkpoint(tmp_path / "model").config.model_type == "llama"
    settings = config_to_dict(config) | internlm | {"rope_parameters": None}
    longer = config_from_dict(settings | {"rotary": {"base": 5e5, "type": "dynamic", "scaling_factor": 2.0}})
    assert (longer.rope_theta, longer.rope_scaling.kind, longer.rope_scaling.factor) == (5e5, "dynamic", 2.0)
    assert config_from_dict(settings | {"bias": False}) == replace(config, qkv_bias=False, out_bias=False)
    with pytest.raises(ConfigError, match="an internlm has type 'dynamic' or 'origin'"):
        config_from_dict(settings | {"rotary": {"type": "yarn"}})
