"""Adapters in PEFT's folders and in GGUF: what is written is read again, and what cannot be used is named."""

import json
import os
import shutil

import jax
import jax.numpy as jnp
import make_adapter_goldens as theirs
import make_goldens
import numpy as np
import pytest
from adapters import LORA, random_adapters
from conftest import jit_init, jit_logits, write_hf_folder
from safetensors.numpy import load_file, save_file

import llama_jax
from llama_jax.cli.convert import Convert
from llama_jax.errors import CheckpointError, MeshError
from llama_jax.formats import convert, load_adapter, save_adapter
from llama_jax.formats.gguf import read_file
from llama_jax.model.lora import Lora, apply_adapters, merge
from llama_jax.parallel.mesh import MeshSizes

CONFIG = make_goldens.KINDS["gqa"]
KEY = "base_model.model.model.layers.{}.{}.lora_{}.weight"
SOME = Lora(rank=2, alpha=3.0, targets=("q_proj", "v_proj", "down_proj"), rslora=True)
DORA = Lora(rank=2, targets=("q_proj", "k_proj", "up_proj"), dora=True)


@pytest.mark.parametrize("lora", [LORA, SOME, DORA], ids=["all", "some", "dora"])
@pytest.mark.parametrize("name", ["a", "a.gguf"])
def test_what_is_written_is_read_again(name, lora, tmp_path):
    adapters = random_adapters(CONFIG, lora)
    if lora.dora and name == "a.gguf":
        with pytest.raises(CheckpointError, match=r"dora=True: llama.cpp does not support magnitudes; merge the adapter"):
            save_adapter(tmp_path / name, CONFIG, adapters, lora)
        assert not os.listdir(tmp_path)
        return
    save_adapter(tmp_path / name, CONFIG, adapters, lora, base="some/model")
    found = load_adapter(tmp_path / name, CONFIG)
    assert found.base == "some/model"
    assert (found.lora.rank, set(found.lora.targets)) == (lora.rank, set(lora.targets))
    assert found.lora.scale == pytest.approx(lora.scale, rel=1e-6)  # also of the root of the rank
    jax.tree.map(np.testing.assert_array_equal, found.params, adapters)
    if name == "a":
        assert found.lora == lora
        assert {path.name for path in (tmp_path / "a").iterdir()} == {"adapter_config.json", "adapter_model.safetensors"}


# -- PEFT --------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    folder = tmp_path_factory.mktemp("peft") / "adapter"
    theirs.write_adapter(folder, CONFIG, LORA)
    return folder


@pytest.fixture
def folder(written, tmp_path):
    """One to spoil."""
    return shutil.copytree(written, tmp_path / "adapter")


def change(folder, **settings):
    path = folder / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | settings))


def test_a_model_is_loaded_with_it(hf_folder, written):
    config, joined, _ = llama_jax.load(hf_folder, adapter=written)
    params, found = llama_jax.load(hf_folder).params, load_adapter(written, config)
    tokens = make_goldens.tokens(config)[:, :9]
    wanted = jit_logits(config, apply_adapters(params, found.params, LORA), tokens)
    np.testing.assert_array_equal(jit_logits(config, joined, tokens), wanted)
    assert joined.embedding.dtype == jnp.float32
    mesh = MeshSizes(tensor=4)  # two key/value heads, which are copied
    held, divided, _ = llama_jax.load(hf_folder, adapter=written, mesh=mesh)
    assert len(divided.blocks.attention.qkv.low_rank.b.sharding.device_set) == 4
    np.testing.assert_allclose(jit_logits(held, divided, tokens)[..., : config.vocab_size], wanted, rtol=1e-4, atol=1e-4)
    with pytest.raises(MeshError, match="adapters cannot be sharded by custom shardings"):
        llama_jax.load(hf_folder, adapter=written, shardings=params)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"peft_type": "LOHA"}, "peft_type='LOHA' is not supported; only LORA adapters are supported"),
        ({"use_dora": True}, "layers.0.self_attn.q_proj.lora_magnitude_vector' is missing"),
        ({"modules_to_save": ["lm_head"]}, r"'modules_to_save'=\['lm_head'\] is not supported"),
        ({"layer_replication": [[0, 2], [0, 2]]}, "'layer_replication'=.* is not supported"),
        ({"exclude_modules": ["q_proj"]}, r"selects no adapter of model.layers.0.self_attn.q_proj, but .* has its tensors"),
        ({"target_modules": "(q_proj"}, r"target_modules='\(q_proj' must be a regular expression"),
        ({"exclude_modules": 3}, "exclude_modules=3 must be a regular expression or a list of modules"),
        ({"layers_to_transform": ["0"]}, "layers_to_transform=.* must be a layer or a list of layers"),
        ({"something_new": 3}, "'something_new'=3 is not supported; train an adapter without it"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights='pissa' may have changed the base"),
        ({"target_modules": ["q_proj", "lm_head"]}, "names the target 'lm_head', but .* has no tensor for it in any layer"),
        ({"r": 0}, "adapter_config.json: rank=0 must be at least 1"),
        ({"lora_alpha": "16"}, "adapter_config.json: alpha='16' must be a number, above 0"),
        ({"r": 4}, r"layers.0.self_attn.q_proj.lora_A.weight' has shape \[3, 32\]; an adapter of rank 4 .* needs \[4, 32\]"),
    ],
)
def test_settings_that_are_not_supported(settings, message, folder):
    change(folder, **settings)
    with pytest.raises(CheckpointError, match=message):
        load_adapter(folder, CONFIG)


def test_all_that_peft_writes_by_default_is_accepted(folder):
    """The fields of PEFT 0.21, with values that switch nothing on."""
    none = (
        *("alora_invocation_tokens", "arrow_config", "auto_mapping", "corda_config", "eva_config", "exclude_modules"),
        *("kasa_config", "layer_replication", "layers_pattern", "layers_to_transform", "lora_ga_config", "megatron_config"),
        *("modules_to_save", "monteclora_config", "revision", "target_parameters", "trainable_token_indices", "use_bdlora"),
        "velora_config",
    )
    false = "ensure_weight_tying", "fan_in_fan_out", "lora_bias", "use_dora", "use_qalora", "use_rslora"
    others = {"alpha_pattern": {}, "rank_pattern": {}, "loftq_config": {}, "bias": "none", "megatron_core": "megatron.core"}
    others |= {"qalora_group_size": 16, "peft_version": "0.21.2", "init_lora_weights": "mica"}
    change(folder, **dict.fromkeys(none), **dict.fromkeys(false, False), **others)
    assert load_adapter(folder, CONFIG).lora == LORA
    change(folder, ensure_weight_tying=True, fan_in_fan_out=True, eva_config={"rho": 2.0}, layers_pattern="layers")
    assert load_adapter(folder, CONFIG).lora == LORA


ATTENTION = ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj"]
MODULES = [*ATTENTION, "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"]


@pytest.mark.parametrize("dora", [False, True], ids=["lora", "dora"])
@pytest.mark.parametrize(
    ("settings", "selected"),
    [
        ({"exclude_modules": ["v_proj"]}, [MODULES[:2] + MODULES[3:]] * 2),
        ({"exclude_modules": ["layers.0.self_attn.q_proj", "model.layers.1.mlp.up_proj", "lm_head"]},
         [MODULES[1:], [*ATTENTION, "mlp.gate_proj", "mlp.down_proj"]]),
        ({"exclude_modules": "q_proj"}, [MODULES] * 2),  # a regular expression matches whole names
        ({"exclude_modules": r".*\.layers\.0\..*"}, [[], MODULES]),
        ({"exclude_modules": r".*\.mlp\..*", "target_modules": "all-linear"}, [ATTENTION] * 2),
        ({"target_modules": r"model\.layers\.1\.self_attn\.[qk]_proj"}, [[], ATTENTION[:2]]),
        ({"target_modules": ["model.layers.0.self_attn.q_proj", "1.mlp.up_proj"]}, [["self_attn.q_proj"], ["mlp.up_proj"]]),
        ({"layers_to_transform": 0}, [MODULES, []]),
        ({"layers_to_transform": [1], "layers_pattern": "layers"}, [[], MODULES]),
        ({"layers_to_transform": [1], "target_modules": ["k_proj", "model.layers.0.self_attn.q_proj"]},
         [["self_attn.q_proj"], ["self_attn.k_proj"]]),
    ],
    ids=str,
)  # fmt: skip
def test_modules_without_an_adapter_are_those_that_peft_leaves_out(settings, selected, dora, tmp_path):
    lora = Lora(rank=2, alpha=3.0, dora=dora)
    theirs.write_adapter(tmp_path / "a", CONFIG, lora)
    change(tmp_path / "a", **settings)
    tensors = load_file(tmp_path / "a" / "adapter_model.safetensors")
    stems = {f".layers.{layer}.{module}." for layer, modules in enumerate(selected) for module in modules}
    kept = {name: array for name, array in tensors.items() if any(stem in name for stem in stems)}
    save_file(kept, tmp_path / "a" / "adapter_model.safetensors")
    found = load_adapter(tmp_path / "a", CONFIG)
    save_adapter(tmp_path / "again", CONFIG, found.params, found.lora)
    written = load_file(tmp_path / "again" / "adapter_model.safetensors")
    assert written.keys() == kept.keys()
    jax.tree.map(np.testing.assert_array_equal, written, kept)
    again = load_adapter(tmp_path / "again", CONFIG)
    assert again.lora == found.lora
    jax.tree.map(np.testing.assert_array_equal, again.params, found.params)
    missing = min(kept)
    save_file({name: array for name, array in kept.items() if name != missing}, tmp_path / "a" / "adapter_model.safetensors")
    with pytest.raises(CheckpointError, match=f"{missing}' is missing"):
        load_adapter(tmp_path / "a", CONFIG)


def test_tensors_that_do_not_fit(folder):
    key = KEY.format(1, "mlp.down_proj", "B")
    change(folder, base_model_name_or_path="a/base")
    tensors = load_file(folder / "adapter_model.safetensors")
    path = folder / "adapter_model.safetensors"

    def refused(changed, message, config=CONFIG):
        save_file(changed, path)
        with pytest.raises(CheckpointError, match=message):
            load_adapter(folder, config)

    refused(
        {k: v for k, v in tensors.items() if k != key}, f"{key}' is missing; .* is this the adapter's base, .* on 'a/base'"
    )
    head = "base_model.model.lm_head.lora_A.weight"
    refused(tensors | {head: tensors[key]}, rf"tensor '{head}' does not belong to a LoRA of this base \(1 such\)")
    refused(tensors | {key: tensors[key] * np.nan}, f"{key}' holds NaN or infinity")
    refused(tensors | {key: tensors[key].astype(np.int32)}, f"{key}' is I32; a 16- or 32-bit float is needed")
    refused(
        tensors, r"shape \[56, 3\]; an adapter of rank 3 of this base needs \[64, 3\]", make_goldens._config(hidden_dim=64)
    )
    refused(tensors, r"layers.2.self_attn.q_proj.lora_A.weight' is missing", make_goldens._config(n_layers=3))
    refused(tensors, r"layers.1.* does not belong to a LoRA of this base \(14 such\)", make_goldens._config(n_layers=1))
    refused({}, "adapter_config.json names the target 'q_proj', but")


def test_folders_that_hold_none(hf_folder, folder, tmp_path):
    with pytest.raises(CheckpointError, match=r"nowhere does not exist; pass a folder written by PEFT or train"):
        llama_jax.load_adapter(tmp_path / "nowhere", llama_jax.preset("stories-260k"))
    with pytest.raises(CheckpointError, match=r"holds no adapter: it has no adapter_config.json"):
        load_adapter(hf_folder, CONFIG)
    (folder / "adapter_model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"has no adapter_model.safetensors; save the adapter as safetensors"):
        load_adapter(folder, CONFIG)
    (folder / "adapter_model.safetensors").write_bytes(b"12")
    with pytest.raises(CheckpointError, match="is not a whole safetensors file"):
        load_adapter(folder, CONFIG)
    (folder / "adapter_config.json").write_text("[]")
    with pytest.raises(CheckpointError, match="holds a list, not an object"):
        load_adapter(folder, CONFIG)


# -- GGUF --------------------------------------------------------------------------------------------------------------


def test_beside_a_model_in_gguf_it_changes_the_same_rows(tmp_path):
    """What llama.cpp does: B A of the file, times alpha / R, added to the weights of the file."""
    from gguf import GGUFReader

    params = jit_init(CONFIG, jax.random.key(0))
    adapters = random_adapters(CONFIG)
    llama_jax.save(tmp_path / "base.gguf", CONFIG, params)
    llama_jax.save(tmp_path / "merged.gguf", CONFIG, merge(params, adapters, LORA))
    save_adapter(tmp_path / "a.gguf", CONFIG, adapters, LORA)
    readers = [GGUFReader(tmp_path / f"{name}.gguf") for name in ("base", "merged", "a")]
    base, merged, pairs = ({tensor.name: tensor.data for tensor in reader.tensors} for reader in readers)
    fields = {name: field.contents() for name, field in readers[2].fields.items()}
    assert (fields["general.type"], fields["adapter.type"], fields["adapter.lora.alpha"]) == ("adapter", "lora", LORA.alpha)
    changed = {name.removesuffix(".lora_a") for name in pairs if name.endswith(".lora_a")}
    assert {name for name in base if np.abs(base[name] - merged[name]).max() > 1e-3} == changed
    for name in changed:
        change = LORA.scale * pairs[f"{name}.lora_b"] @ pairs[f"{name}.lora_a"]
        np.testing.assert_allclose(base[name] + change, merged[name], atol=1e-5)


def test_adapters_are_converted_both_ways(calling, tmp_path):
    base = write_hf_folder(tmp_path / "base", CONFIG)
    theirs.write_adapter(tmp_path / "peft", CONFIG, LORA)
    with pytest.raises(CheckpointError, match=r"does not name its base; pass the base's folder or file as base \(--base\)"):
        convert(tmp_path / "peft", tmp_path / "a.gguf")
    calling(Convert, tmp_path / "peft", tmp_path / "a.gguf", "--base", base, "--dtype", "float16")
    assert {tensor.storage_type for tensor in read_file(tmp_path / "a.gguf")[1].values()} == {"F16"}
    calling(Convert, tmp_path / "a.gguf", tmp_path / "again")  # it says where its base is
    before, after = (load_adapter(tmp_path / name, CONFIG) for name in ("peft", "again"))
    assert (after.lora, after.base) == (before.lora, str(base))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-6), after.params, before.params)


def test_an_adapter_in_another_place(tmp_path):
    base = write_hf_folder(tmp_path / "base", CONFIG)
    adapters = random_adapters(CONFIG)
    save_adapter(tmp_path / "a.gguf", CONFIG, adapters, LORA, base="a/hub")
    with pytest.raises(CheckpointError, match=r"is an adapter; pass its base as the model"):
        llama_jax.load(tmp_path / "a.gguf")
    with pytest.raises(CheckpointError, match=r"was trained on 'a/hub', which was not found; pass the base"):
        convert(tmp_path / "a.gguf", tmp_path / "peft")
    with pytest.raises(CheckpointError, match="is an adapter: write it as safetensors or gguf, in a 16- or 32-bit float"):
        convert(tmp_path / "a.gguf", tmp_path / "b.gguf", dtype="q8_0", base=base)
    with pytest.raises(CheckpointError, match=r"an adapter in GGUF is a file named .gguf; for PEFT it is a folder"):
        convert(tmp_path / "a.gguf", tmp_path / "b", format="gguf", base=base)
    with pytest.raises(CheckpointError, match=r"is for an adapter, but .* is a model"):
        convert(base, tmp_path / "b.gguf", base=base)
    with pytest.raises(CheckpointError, match="an adapter of rank 3 of this base needs"):
        load_adapter(tmp_path / "a.gguf", make_goldens._config(hidden_dim=64))
    with pytest.raises(CheckpointError, match=r"general.architecture='llama', but an adapter of this base has 'qwen2'"):
        load_adapter(tmp_path / "a.gguf", make_goldens._config(qkv_bias=True))
    llama_jax.save(tmp_path / "model.gguf", CONFIG, jit_init(CONFIG, jax.random.key(0)))
    with pytest.raises(CheckpointError, match="holds no adapter"):
        load_adapter(tmp_path / "model.gguf", CONFIG)
