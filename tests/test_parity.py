"""Live comparison with transformers, where torch is installed: more models than the goldens hold, and its own files."""

import json
from dataclasses import replace

import jax
import jax.numpy as jnp
import make_goldens
import numpy as np
import pytest
from conftest import params_of, write_hf_folder
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import llama_jax
from llama_jax import RopeScaling
from llama_jax.formats import huggingface
from llama_jax.formats.huggingface import HF_NAMES, config_from_dict, from_params
from llama_jax.model.forward import forward, unembed
from llama_jax.model.logits import logits

pytestmark = [
    pytest.mark.parity,
    # transformers and torch warn about themselves
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning"),
]

jit_forward = jax.jit(forward, static_argnums=0)
jit_logits = jax.jit(logits, static_argnums=0)


@pytest.fixture(autouse=True)
def needs_torch():
    pytest.importorskip("torch", reason="needs the parity extra")
    pytest.importorskip("transformers", reason="needs the parity extra")


def theirs(config, tensors, tokens):
    import torch

    model = make_goldens.transformers_model(config, tensors)
    with torch.inference_mode():
        return model(torch.from_numpy(np.asarray(tokens)).long()).logits.numpy()


@st.composite
def configs(draw):
    heads = draw(st.sampled_from([1, 2, 3, 4, 8]))
    kv = draw(st.sampled_from([k for k in (1, 2, 3, 4, 8) if heads % k == 0]))
    width = draw(st.sampled_from([2, 6, 8, 16]))
    return replace(
        make_goldens.KINDS[draw(st.sampled_from(["gqa", "linear", "llama3"]))],
        vocab_size=draw(st.sampled_from([50, 129])),
        dim=heads * width,
        n_layers=draw(st.integers(1, 3)),
        n_heads=heads,
        n_kv_heads=kv,
        head_dim=draw(st.sampled_from([width, 4, 10])),
        hidden_dim=draw(st.sampled_from([24, 40])),
        norm_eps=draw(st.sampled_from([1e-6, 1e-5, 1e-3])),
        rope_theta=draw(st.sampled_from([100.0, 10_000.0, 500_000.0])),
        tie_embeddings=draw(st.booleans()),
    )


@settings(max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(configs(), st.integers(0, 1000))
def test_random_models(config, seed):
    tensors = make_goldens.random_tensors(config, seed)
    tokens = np.random.default_rng(seed).integers(0, config.vocab_size, (2, 33), dtype=np.int32)
    params = params_of(config, tensors)
    want = theirs(config, tensors, tokens)
    np.testing.assert_allclose(jit_logits(config, params, tokens), want, atol=1e-4, rtol=0)

    cache = llama_jax.init_cache(config, 2, 33)
    first, cache = jit_forward(config, params, tokens[:, :20], cache)
    second, cache = jit_forward(config, params, tokens[:, 20:], cache)
    cached = unembed(config, params, jnp.concatenate([first, second], axis=1))
    np.testing.assert_allclose(cached, want, atol=1e-4, rtol=0)


@pytest.mark.parametrize("name", make_goldens.ROPES)
def test_the_goldens_of_rope_are_what_transformers_gives(name):
    with np.load(make_goldens.GOLDENS / "ropes.npz") as kept:
        for i, length in enumerate(make_goldens.ROPE_LENGTHS):
            frequencies, factor = make_goldens.transformers_frequencies(make_goldens.ROPES[name], length)
            np.testing.assert_allclose(frequencies, kept[f"{name} frequencies"][i], rtol=1e-6)
            assert factor == pytest.approx(kept[f"{name} factor"][i])


@pytest.mark.parametrize(
    "scaling",
    [
        RopeScaling("dynamic", 4.0, original_max_seq_len=16),
        RopeScaling("yarn", 4.0, original_max_seq_len=16),
        RopeScaling(
            "longrope", 4.0, original_max_seq_len=16, short_factor=[1.0] * 8, long_factor=[1.5 + i for i in range(8)]
        ),
    ],
    ids=lambda scaling: scaling.kind,
)
def test_models_of_every_scaling_as_they_are_saved(scaling):
    """What transformers makes of what is written; and step by step, beyond the context.

    Kinds that depend on the length keep keys in the cache as they were turned when they were read, there as here.
    """
    import torch

    config = replace(make_goldens.KINDS["gqa"], head_dim=16, rope_theta=500.0, rope_scaling=scaling)
    tensors, tokens = make_goldens.random_tensors(config), make_goldens.tokens(config, batch=1, length=40)
    params = params_of(config, tensors)
    np.testing.assert_allclose(jit_logits(config, params, tokens), theirs(config, tensors, tokens), atol=2e-4, rtol=0)
    model = make_goldens.transformers_model(config, tensors)
    with torch.inference_mode():
        ids = torch.from_numpy(tokens).long()
        past = model(ids[:, :12]).past_key_values
        want = [model(ids[:, i : i + 1], past_key_values=past).logits.numpy() for i in range(12, 40)]
    hidden, cache = jit_forward(config, params, tokens[:, :12], llama_jax.init_cache(config, 1, 40))
    for i in range(12, 40):
        hidden, cache = jit_forward(config, params, tokens[:, i : i + 1], cache)
        np.testing.assert_allclose(unembed(config, params, hidden), want[i - 12], atol=2e-4, rtol=0)


@pytest.mark.parametrize("kind", make_goldens.KINDS)
def test_the_goldens_are_what_transformers_gives(kind, goldens):
    config = make_goldens.KINDS[kind]
    got = theirs(config, make_goldens.random_tensors(config), make_goldens.tokens(config))
    np.testing.assert_allclose(got, goldens[kind], atol=1e-5, rtol=0)


def test_greedy_generation_equals_transformers():
    import torch

    config = make_goldens.KINDS["llama3"]
    tensors = make_goldens.random_tensors(config)
    prompt = [5, 9, 17, 3]
    model = make_goldens.transformers_model(config, tensors)
    want = model.generate(torch.tensor([prompt]), max_new_tokens=30, do_sample=False, eos_token_id=None, pad_token_id=0)
    got = llama_jax.generate(config, params_of(config, tensors), [prompt], max_new_tokens=30)[0].tokens
    assert got == want[0, len(prompt) :].tolist()


def vllm_context(config):
    """The context that vLLM derives from a configuration of transformers (`_get_and_verify_max_len`, config/model.py)."""
    ropes, context = config.rope_parameters, config.max_position_embeddings
    ropes = {"": ropes} if "rope_type" in ropes else ropes
    if "gemma3" in config.model_type:
        return context
    factor = 1.0
    for rope in ropes.values():
        if rope["rope_type"] not in ("su", "longrope", "llama3"):
            factor = rope.get("factor", factor)
            if rope["rope_type"] == "yarn":
                context = rope["original_max_position_embeddings"]
    return int(context * factor)


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
LINEAR = {"rope_type": "linear", "factor": 4.0}
SLIDING = {"rope_type": "default", "rope_theta": 10_000.0}
ONE_ROPE = [
    ("Qwen2", 16, YARN),
    ("Qwen3", 20, YARN),
    ("Llama", 16, {"rope_type": "yarn", "factor": 4.0}),
    ("Llama", 64, YARN | {"mscale": 1.0, "mscale_all_dim": 0.7}),
    ("Llama", 16, LINEAR),
    ("Llama", 16, {"rope_type": "dynamic", "factor": 4.0}),
]
ROPES_BY_LAYER = [  # only in transformers 5
    ("Olmo3", 16, {"full_attention": YARN, "sliding_attention": SLIDING}),
    ("Gemma3Text", 64, {"full_attention": LINEAR, "sliding_attention": SLIDING}),
]


@pytest.mark.parametrize(
    ("kind", "stated", "rope", "old"),
    [(*case, False) for case in ONE_ROPE + ROPES_BY_LAYER] + [(*case, True) for case in ONE_ROPE],
)
def test_a_folder_as_published_has_the_extended_context(kind, stated, rope, old, tmp_path):
    """vLLM's context, also in what is written again; and transformers' logits within the original context and beyond it."""
    import torch
    import transformers

    sizes = {"vocab_size": 96, "hidden_size": 32, "intermediate_size": 56, "num_hidden_layers": 2, "head_dim": 16}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": stated}
    sizes |= {"pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 2}
    given = {name: {"rope_theta": 500.0} | of_layers for name, of_layers in rope.items() if isinstance(of_layers, dict)}
    settings = getattr(transformers, f"{kind}Config")(**sizes, rope_parameters=given or {"rope_theta": 500.0} | rope)
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(settings).float().eval()
    model.save_pretrained(tmp_path / "model")
    path = tmp_path / "model" / "config.json"
    written = json.loads(path.read_text())
    if old:
        written |= {"rope_scaling": rope, "rope_theta": written.pop("rope_parameters")["rope_theta"]}
        path.write_text(json.dumps(written))
    config, params, _ = llama_jax.load(tmp_path / "model", "float32")
    assert config.max_seq_len == vllm_context(transformers.AutoConfig.from_pretrained(tmp_path / "model")) == 64
    llama_jax.save(tmp_path / "again", config, params)
    assert vllm_context(transformers.AutoConfig.from_pretrained(tmp_path / "again")) == 64
    assert llama_jax.load(tmp_path / "again").config == config
    for length in (12, 60):
        tokens = make_goldens.tokens(config, batch=1, length=length)
        with torch.inference_mode():
            want = model(torch.from_numpy(tokens).long()).logits.numpy()
        np.testing.assert_allclose(jit_logits(config, params, tokens), want, atol=2e-4, rtol=0)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", ["gqa", "tied", "llama3"])
@pytest.mark.parametrize("shard", ["5GB", "20KB"])
def test_folders_that_transformers_saves(kind, shard, dtype, tmp_path):
    import torch

    config = make_goldens.KINDS[kind]
    tensors = make_goldens.random_tensors(config)
    model = make_goldens.transformers_model(config, tensors).to(getattr(torch, dtype))
    model.save_pretrained(tmp_path, max_shard_size=shard)
    assert (tmp_path / "model.safetensors.index.json").exists() == (shard == "20KB")
    found, params, _ = llama_jax.load(tmp_path)
    assert found == config == config_from_dict(json.loads((tmp_path / "config.json").read_text()))
    for a, b in zip(jax.tree.leaves(params), jax.tree.leaves(params_of(config, tensors, jnp.dtype(dtype))), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("kind", ["gqa", "tied", "llama3", "linear", "head_dim", "biases"])
@pytest.mark.parametrize("largest", [5_000_000_000, 20_000])
def test_transformers_reads_what_is_saved(kind, largest, tmp_path):
    import torch
    import transformers

    config = make_goldens.KINDS[kind]
    params = params_of(config, make_goldens.random_tensors(config))
    huggingface.write_huggingface(tmp_path, from_params(config, params, None), None, largest_file=largest)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    tokens = make_goldens.tokens(config)
    with torch.inference_mode():
        want = model(torch.from_numpy(tokens).long()).logits.numpy()
    np.testing.assert_allclose(jit_logits(config, params, tokens), want, atol=1e-4, rtol=0)


@pytest.mark.parametrize("kind", ["gqa", "tied"])
def test_a_backbone_that_transformers_saves(kind, tmp_path):
    """Transformers would draw the output projection of an untied model at random."""
    config = make_goldens.KINDS[kind]
    tensors = make_goldens.random_tensors(config)
    make_goldens.transformers_model(config, tensors).model.save_pretrained(tmp_path)
    if config.tie_embeddings:
        assert_loads(tmp_path, config, tensors)
        return
    with pytest.raises(llama_jax.CheckpointError, match=r"tensor 'lm_head.weight' is missing"):
        llama_jax.load(tmp_path)


def test_a_head_beside_tied_embeddings(tmp_path):
    config = make_goldens.KINDS["tied"]
    tensors = make_goldens.random_tensors(config)
    head = tensors[HF_NAMES["embedding"]] + 0.1
    assert_logits_of(write_hf_folder(tmp_path / "model", config, tensors | {HF_NAMES["lm_head"]: head}))


def test_biases_that_a_folder_lacks(tmp_path):
    """The output projection has biases of 0, as transformers initializes them, for a Qwen under the names of a Llama."""
    config = replace(make_goldens.KINDS["biases"], mlp_bias=False)
    tensors = {name: a for name, a in make_goldens.random_tensors(config).items() if not name.endswith("o_proj.bias")}
    assert_logits_of(write_hf_folder(tmp_path / "model", config, tensors))


def test_an_adapter_of_a_model_with_biases(tmp_path):
    """PEFT multiplies DoRA's magnitudes into the product with the matrix, not into the bias."""
    peft = pytest.importorskip("peft", reason="needs the parity extra")
    import torch

    config = make_goldens.KINDS["biases"]
    base = make_goldens.transformers_model(config, make_goldens.random_tensors(config))
    settings = peft.LoraConfig(r=3, lora_alpha=6, target_modules=["q_proj", "o_proj", "down_proj"], use_dora=True)
    model = peft.get_peft_model(base, settings)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.add_(0.2 * torch.randn_like(parameter))
    model.save_pretrained(tmp_path / "adapter")
    write_hf_folder(tmp_path / "model", config)
    found, params, _ = llama_jax.load(tmp_path / "model", adapter=tmp_path / "adapter")
    tokens = make_goldens.tokens(config)
    with torch.inference_mode():
        want = model(torch.from_numpy(tokens).long()).logits.numpy()
    np.testing.assert_allclose(jit_logits(found, params, tokens), want, atol=1e-4, rtol=0)


def assert_logits_of(folder):
    """The logits of a folder's model are those of transformers."""
    import torch
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    config, params, _ = llama_jax.load(folder)
    tokens = make_goldens.tokens(config)
    with torch.inference_mode():
        want = model(torch.from_numpy(tokens).long()).logits.numpy()
    np.testing.assert_allclose(jit_logits(config, params, tokens), want, atol=1e-4, rtol=0)


def assert_loads(path, config, tensors):
    found, params, _ = llama_jax.load(path)
    assert found == config
    for a, b in zip(jax.tree.leaves(params), jax.tree.leaves(params_of(config, tensors)), strict=True):
        np.testing.assert_array_equal(a, b)
