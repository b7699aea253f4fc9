"""PEFT's folders: what is written is read again, and what cannot be used is named."""

import json
import shutil

import jax
import jax.numpy as jnp
import make_adapter_goldens as theirs
import make_goldens
import numpy as np
import pytest
from adapters import LORA, random_adapters
from conftest import jit_logits
from safetensors.numpy import load_file, save_file

import llama_jax
from llama_jax.errors import CheckpointError, MeshError
from llama_jax.formats import load_adapter, save_adapter
from llama_jax.model.lora import Lora, adapted
from llama_jax.parallel.mesh import MeshSizes
from llama_jax.parallel.padding import pad_params

CONFIG = make_goldens.KINDS["gqa"]
KEY = "base_model.model.model.layers.{}.{}.lora_{}.weight"


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


def change_tensors(folder, **changes):
    path = folder / "adapter_model.safetensors"
    save_file({**load_file(path), **changes}, path)


@pytest.mark.parametrize(
    "lora",
    [
        LORA,
        Lora(rank=2, targets=("q_proj", "v_proj", "down_proj"), rslora=True),
        Lora(rank=2, targets=("q_proj", "k_proj", "up_proj"), dora=True),
    ],
    ids=["all", "some", "dora"],
)
def test_what_is_written_is_read_again(lora, tmp_path):
    adapters = random_adapters(CONFIG, lora)
    save_adapter(tmp_path / "a", CONFIG, adapters, lora, base="some/model")
    found = load_adapter(tmp_path / "a", CONFIG)
    assert (found.lora, found.base) == (lora, "some/model")
    jax.tree.map(np.testing.assert_array_equal, found.params, adapters)
    assert {path.name for path in (tmp_path / "a").iterdir()} == {"adapter_config.json", "adapter_model.safetensors"}


def test_each_tensor_goes_to_its_own_rows(written):
    """By PEFT's names, as transformers has the rows: a head after the other."""
    pair = llama_jax.layers_of(load_adapter(written, CONFIG).params)[1].attention.qkv
    tensors = load_file(written / "adapter_model.safetensors")
    for part, (name, rows) in enumerate({"q": slice(0, 2), "k": slice(2, 3), "v": slice(3, 4)}.items()):
        module = f"self_attn.{name}_proj"
        np.testing.assert_array_equal(pair.a[part], tensors[KEY.format(1, module, "A")])
        heads = tensors[KEY.format(1, module, "B")].reshape(CONFIG.n_kv_heads, -1, CONFIG.head_dim, LORA.rank)
        np.testing.assert_array_equal(pair.b[:, rows], heads)


def test_in_16_bits_it_is_kept_as_it_is(tmp_path):
    adapters = random_adapters(CONFIG, dtype=jnp.bfloat16)
    save_adapter(tmp_path / "a", CONFIG, adapters, LORA)
    found = load_adapter(tmp_path / "a", CONFIG).params
    assert found.blocks.attention.out.a.dtype == jnp.float32
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(a, b.astype(jnp.float32)), found, adapters)


def test_what_a_mesh_holds_is_written_as_the_model_has_it(tmp_path):
    adapters = random_adapters(CONFIG)
    save_adapter(tmp_path / "a", CONFIG, pad_params(CONFIG, MeshSizes(tensor=4), adapters), LORA)
    jax.tree.map(np.testing.assert_array_equal, load_adapter(tmp_path / "a", CONFIG).params, adapters)


def test_a_model_is_loaded_with_it(hf_folder, written):
    config, joined, _ = llama_jax.load(hf_folder, adapter=written)
    params, found = llama_jax.load(hf_folder).params, load_adapter(written, config)
    tokens = make_goldens.tokens(config)[:, :9]
    wanted = jit_logits(config, adapted(params, found.params, LORA), tokens)
    np.testing.assert_array_equal(jit_logits(config, joined, tokens), wanted)
    assert joined.embedding.dtype == jnp.float32
    mesh = MeshSizes(tensor=4)  # two key/value heads, which are copied
    held, divided, _ = llama_jax.load(hf_folder, adapter=written, mesh=mesh)
    assert len(divided.blocks.attention.qkv.low_rank.b.sharding.device_set) == 4
    np.testing.assert_allclose(jit_logits(held, divided, tokens)[..., : config.vocab_size], wanted, rtol=1e-4, atol=1e-4)
    with pytest.raises(MeshError, match="an adapter can be laid out over a mesh"):
        llama_jax.load(hf_folder, adapter=written, shardings=params)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"peft_type": "LOHA"}, "peft_type='LOHA' is not supported; adapters are read of the type LORA"),
        ({"use_dora": True}, "layers.0.self_attn.q_proj.lora_magnitude_vector' is missing"),
        ({"modules_to_save": ["lm_head"]}, r"'modules_to_save'=\['lm_head'\] is not supported"),
        ({"rank_pattern": {"q_proj": 4}}, "'rank_pattern'={'q_proj': 4} is not supported"),
        ({"alpha_pattern": {"q_proj": 4}}, "'alpha_pattern'=.* is not supported"),
        ({"bias": "lora_only"}, "'bias'='lora_only' is not supported"),
        ({"something_new": 3}, "'something_new'=3 is not supported; train an adapter without it"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights='pissa' may have changed the base"),
        ({"target_modules": ["q_proj", "lm_head"]}, "names the target 'lm_head', for which .* has no tensor of layer 0"),
        ({"r": 0}, "adapter_config.json: rank=0 must be a positive integer"),
        ({"r": None}, "adapter_config.json: rank=None must be a positive integer"),
        ({"lora_alpha": "16"}, "adapter_config.json: alpha='16' must be a finite number"),
        ({"r": 4}, r"layers.0.self_attn.q_proj.lora_A.weight' has shape \[3, 32\], rank 4 and this base need \[4, 32\]"),
    ],
)
def test_settings_that_are_not_supported(settings, message, folder):
    change(folder, **settings)
    with pytest.raises(CheckpointError, match=message):
        load_adapter(folder, CONFIG)


def test_settings_that_change_nothing(folder):
    change(
        folder, target_modules="all-linear", lora_dropout=0.1, task_type="CAUSAL_LM", inference_mode=True, rank_pattern={},
        modules_to_save=None, bias="none", use_dora=False, init_lora_weights=True, peft_version="0.18", loftq_config={},
        base_model_name_or_path="a/base",
    )  # fmt: skip
    assert load_adapter(folder, CONFIG).lora == LORA


def test_tensors_that_do_not_fit(folder):
    key = KEY.format(1, "mlp.down_proj", "B")
    change(folder, base_model_name_or_path="a/base")
    tensors = load_file(folder / "adapter_model.safetensors")
    path = folder / "adapter_model.safetensors"

    def refused(changed, message, config=CONFIG):
        save_file(changed, path)
        with pytest.raises(CheckpointError, match=message):
            load_adapter(folder, config)

    refused({k: v for k, v in tensors.items() if k != key}, f"{key}' is missing; is this the adapter's base, .* on 'a/base'")
    head = "base_model.model.lm_head.lora_A.weight"
    refused(tensors | {head: tensors[key]}, rf"tensor '{head}' is no part of a LoRA of this base \(1 such\)")
    refused(tensors | {key: tensors[key] * np.nan}, f"{key}' holds NaN or infinity")
    refused(tensors | {key: tensors[key].astype(np.int32)}, f"{key}' is I32; a float of 16 or 32 bits is needed")
    refused(tensors, r"shape \[56, 3\], rank 3 and this base need \[64, 3\]", make_goldens._config(hidden_dim=64))
    refused(tensors, r"layers.2.self_attn.q_proj.lora_A.weight' is missing", make_goldens._config(n_layers=3))
    refused(tensors, r"layers.1.* is no part of a LoRA of this base \(14 such\)", make_goldens._config(n_layers=1))
    refused({}, "adapter_config.json names the target 'q_proj', for which")


def test_folders_that_hold_none(hf_folder, folder, tmp_path):
    with pytest.raises(CheckpointError, match=r"nowhere does not exist; pass a folder that PEFT or train wrote"):
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


def test_what_is_there_is_kept(folder, tmp_path):
    adapters = random_adapters(CONFIG)
    with pytest.raises(CheckpointError, match="exists; remove it, or replace it"):
        save_adapter(folder, CONFIG, adapters, LORA)
    save_adapter(folder, CONFIG, adapters, LORA, overwrite=True)
    jax.tree.map(np.testing.assert_array_equal, load_adapter(folder, CONFIG).params, adapters)
    (folder / "mine.txt").write_text("kept")
    with pytest.raises(CheckpointError, match=r"holds more than a model \(mine.txt\)"):
        save_adapter(folder, CONFIG, adapters, LORA, overwrite=True)
    broken = jax.tree.map(lambda a: a * jnp.nan, adapters)
    with pytest.raises(CheckpointError, match="holds NaN or infinity"):
        save_adapter(tmp_path / "new", CONFIG, broken, LORA)
    assert not (tmp_path / "new").exists()
