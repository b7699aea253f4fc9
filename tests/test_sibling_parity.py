"""Live comparison of Mistral, Qwen2, Qwen3 and Mixtral with transformers, where torch is installed."""

import json
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from family_models import FAMILY_MODELS, PLAIN, SIBLINGS, random_params

import llama_jax
from llama_jax.config import LayerConfig, RopeScaling
from llama_jax.config.families import FAMILIES
from llama_jax.config.presets import preset
from llama_jax.formats.huggingface import config_from_dict, config_to_dict
from llama_jax.formats.orbax_format import array_name
from llama_jax.model.forward import forward, unembed
from llama_jax.model.forward_options import ComputeOptions, Positions, Sharding
from llama_jax.model.operations import select_ops

pytestmark = [
    pytest.mark.parity,
    # transformers and torch warn about themselves
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning"),
]

jit_forward, jit_logits = jax.jit(forward, static_argnums=0), jax.jit(llama_jax.logits, static_argnums=0)
MODELS = FAMILY_MODELS | {
    "mistral, wide": replace(SIBLINGS["mistral"], window=40, n_kv_heads=1, head_dim=16),
    "mistral, deep": replace(SIBLINGS["mistral"], window=1, n_layers=3),
    "qwen2, tied": replace(SIBLINGS["qwen2"], tie_embeddings=True, n_heads=8, norm_eps=1e-3),
    "qwen3, untied": replace(SIBLINGS["qwen3"], tie_embeddings=False, n_kv_heads=4, rope_theta=500.0),
    "mixtral, window": replace(SIBLINGS["mixtral"], window=5, experts=6, experts_per_token=3),
    "gemma3_text, scaled": replace(SIBLINGS["gemma3_text"], attention_multiplier=24.0**-0.5, n_layers=6),
    "phi3, window": replace(SIBLINGS["phi3"], window=7, tie_embeddings=True),
    "smollm3, window": replace(SIBLINGS["smollm3"], layers=(*[LayerConfig()] * 3, LayerConfig(6, "none"))),
    "mixtral, one": replace(SIBLINGS["mixtral"], experts=3, experts_per_token=1),
    "llama4_text, one expert": replace(
        SIBLINGS["llama4_text"],
        n_layers=2,
        layers=(LayerConfig(chunk=7), LayerConfig()),
        rope_scaling=RopeScaling("llama3", 4.0, high_freq_factor=1.0, original_max_seq_len=32),
        qk_norm=None,
        query_scaling=None,
        experts_per_token=1,
    ),
    "qwen3_moe, shares of all": replace(SIBLINGS["qwen3_moe"], normalize_expert_weights=False),
    "qwen2, windows": replace(SIBLINGS["qwen2"], layers=(LayerConfig(), LayerConfig(6))),
    "qwen3, windows": replace(SIBLINGS["qwen3"], n_layers=3, layers=(LayerConfig(6), LayerConfig())),
    "qwen3_moe, window": replace(SIBLINGS["qwen3_moe"], window=6),
}
MODELS |= {
    f"{kind}, biases": replace(
        config,
        **dict.fromkeys(("qkv_bias", "out_bias"), "attention_bias" in FAMILIES[kind].features or config.qkv_bias),
        mlp_bias="mlp_bias" in FAMILIES[kind].features,
    )
    for kind, config in FAMILY_MODELS.items()
    if FAMILIES[kind].features & {"attention_bias", "mlp_bias"}
}
LLAMA4_PICTURES = (
    "llama4_text",
    "Llama4",
    {"vision_config": {"vision_output_dim": 32, "projector_input_dim": 32, "projector_output_dim": 32}},
)
TOKENS = np.random.default_rng(1).integers(0, PLAIN.vocab_size, (2, 33), dtype=np.int32)


@pytest.fixture(autouse=True)
def needs_torch():
    pytest.importorskip("torch", reason="needs the parity extra")
    pytest.importorskip("transformers", reason="needs the parity extra")


@pytest.fixture(scope="module", params=MODELS)
def model(request, tmp_path_factory):
    """(config, parameters, transformers' model of the folder that was written, the folder)."""
    import torch
    import transformers

    config = MODELS[request.param]
    params = random_params(config, seed=5)
    folder = tmp_path_factory.mktemp("models") / config.model_type
    llama_jax.save(folder, config, params)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    assert type(theirs).__name__ == FAMILIES[config.model_type].architecture
    return config, params, theirs.eval(), folder


def logits_of(theirs, tokens, **more):
    import torch

    more = {name: torch.from_numpy(np.asarray(value)) for name, value in more.items()}
    with torch.inference_mode():
        return theirs(torch.from_numpy(np.asarray(tokens)).long(), **more).logits.numpy()


@pytest.mark.supports("logits", family="{model}")
def test_whole_rows_and_the_cache(model):
    config, params, theirs, _ = model
    want = logits_of(theirs, TOKENS)
    np.testing.assert_allclose(jit_logits(config, params, TOKENS), want, atol=1e-4, rtol=0)
    cache = llama_jax.init_cache(config, 2, 33)
    found = []
    for start, stop in ((0, 20), (20, 21), (21, 33)):
        hidden, cache = jit_forward(config, params, TOKENS[:, start:stop], cache)
        found.append(unembed(config, params, hidden))
    np.testing.assert_allclose(np.concatenate(found, axis=1), want, atol=1e-4, rtol=0)


@pytest.mark.supports("ragged", family="{model}")
def test_ragged_rows(model):
    """Each row as it is alone, by transformers, where here both are read together and padded."""
    config, params, theirs, _ = model
    lengths, cache = np.array([33, 18]), llama_jax.init_cache(config, 2, 40)
    hidden, cache = jit_forward(config, params, TOKENS, cache, positions=Positions(lengths))
    found = np.asarray(unembed(config, params, hidden))
    hidden, _ = jit_forward(config, params, TOKENS[:, :3], cache)
    after = np.asarray(unembed(config, params, hidden))
    for row, length in enumerate(lengths):
        want = logits_of(theirs, np.concatenate([TOKENS[row, :length], TOKENS[row, :3]])[None])[0]
        np.testing.assert_allclose(found[row, :length], want[:length], atol=1e-4, rtol=0)
        np.testing.assert_allclose(after[row], want[length:], atol=1e-4, rtol=0)


@pytest.mark.supports("packed", family="{model}")
def test_packed_rows(model):
    config, params, theirs, _ = model
    places = np.concatenate([np.arange(20), np.arange(13)])[None].astype(np.int32)
    segments = (np.arange(33) >= 20).astype(np.int32)[None]
    hidden, _ = jit_forward(config, params, TOKENS[:1], positions=Positions(position_ids=places, segment_ids=segments))
    want = [logits_of(theirs, TOKENS[:1, :20]), logits_of(theirs, TOKENS[:1, 20:])]
    np.testing.assert_allclose(unembed(config, params, hidden), np.concatenate(want, axis=1), atol=1e-4, rtol=0)


@pytest.mark.supports("gradients", family="{model}")
def test_gradients(model, tmp_path):
    """Of the mean loss of all parameters, which transformers writes as if they were a model."""
    import torch

    config, params, theirs, _ = model

    def loss(params):
        logits = llama_jax.logits(config, params, TOKENS[:, :-1])
        return -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(logits), TOKENS[:, 1:, None], axis=-1))

    value, found = jax.jit(jax.value_and_grad(loss))(params)
    tokens = torch.from_numpy(TOKENS).long()
    theirs.zero_grad()
    wanted = torch.nn.functional.cross_entropy(theirs(tokens[:, :-1]).logits.flatten(0, 1), tokens[:, 1:].flatten())
    wanted.backward()
    np.testing.assert_allclose(value, wanted.item(), atol=1e-5)
    kept = [parameter.data.clone() for parameter in theirs.parameters()]
    for parameter in theirs.parameters():
        parameter.data.copy_(torch.zeros_like(parameter) if parameter.grad is None else parameter.grad)
    theirs.save_pretrained(tmp_path / "gradients")
    for parameter, data in zip(theirs.parameters(), kept, strict=True):
        parameter.data.copy_(data)
    for (path, a), b in zip(
        jax.tree.leaves_with_path(llama_jax.load(tmp_path / "gradients").params), jax.tree.leaves(found), strict=True
    ):
        np.testing.assert_allclose(b, a, atol=1e-4 * max(1, np.abs(a).max()), err_msg=array_name(path))


@pytest.mark.supports("safetensors", family="{model}")
def test_what_transformers_writes_is_read(model, tmp_path):
    config, params, theirs, _ = model
    theirs.save_pretrained(tmp_path / "theirs")
    loaded = llama_jax.load(tmp_path / "theirs")
    assert loaded.config == config
    for a, b in zip(jax.tree.leaves(loaded.params), jax.tree.leaves(params), strict=True):
        np.testing.assert_array_equal(a, b)


ONE_OF_EACH = ("mistral-7b", "mixtral-8x7b", "qwen2.5-7b", "qwen3-8b", "smollm3-3b", "cwm-32b", "ministral-3-8b")
ONE_OF_EACH += ("olmo-2-7b", "olmo-3-32b", "gemma-3-1b", "gemma-3-27b", "granite-3.3-8b", "phi-3-mini-4k", "qwen3-30b-a3b")
ONE_OF_EACH += ("llama-4-scout",)


@pytest.mark.parametrize("name", ONE_OF_EACH)
def test_a_preset_is_theirs(name):
    """Its settings, as written here, give a model of as many parameters there, and come back."""
    import torch
    import transformers

    config = preset(name)
    settings = config_to_dict(config)
    theirs = transformers.AutoConfig.for_model(**settings)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(theirs)
    assert sum(p.numel() for p in model.parameters()) == llama_jax.parameter_count(config)
    assert config_from_dict(theirs.to_dict()) == config


@pytest.mark.parametrize(("kind", "name", "more"), [("gemma3_text", "Gemma3", {"mm_tokens_per_image": 4}), LLAMA4_PICTURES])
def test_the_text_of_a_multimodal_model(kind, name, more, tmp_path):
    """A folder of pictures and text, as transformers writes it: the language model alone is read."""
    import torch
    import transformers

    text = config_to_dict(SIBLINGS[kind]) | {"pad_token_id": 0}
    vision = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    vision |= {"image_size": 16, "patch_size": 8} | more.pop("vision_config", {})
    whole = getattr(transformers, f"{name}Config")(text_config=text, vision_config=vision, **more)
    torch.manual_seed(0)
    theirs = getattr(transformers, f"{name}ForConditionalGeneration")(whole).eval()
    theirs.save_pretrained(tmp_path / "whole")
    config, params, _ = llama_jax.load(tmp_path / "whole")
    assert config == SIBLINGS[kind]
    # Not the whole Llama 4, whose forward pass without pictures fails in some versions of transformers.
    language = theirs.language_model if name == "Llama4" else theirs
    np.testing.assert_allclose(jit_logits(config, params, TOKENS), logits_of(language, TOKENS), atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        *(
            (kind, {"use_sliding_window": used, "sliding_window": window, "max_window_layers": first})
            for kind in ("qwen2", "qwen3", "qwen3_moe")
            for used, window, first in (
                (True, 6, 2),
                (True, 6, 1),
                (True, 6, 0),
                (True, None, 1),
                (False, 6, 0),
                (True, 6, 28),
            )
        ),
        *((kind, {"use_sliding_window": True, "sliding_window": 6}) for kind in ("mistral", "phi3")),
        ("llama", {"use_sliding_window": True}),
        *(
            (kind, {"attention_bias": True, "mlp_bias": True})
            for kind in ("qwen2", "mistral", "mixtral", "phi3", "ministral3")
        ),
    ],
)
def test_settings_that_some_families_ignore(kind, settings, tmp_path):
    """In a folder as it was published before transformers wrote the type of each layer."""
    import torch
    import transformers

    config = FAMILY_MODELS[kind]
    params = random_params(config, seed=5)
    llama_jax.save(tmp_path, config, params)
    written = json.loads((tmp_path / "config.json").read_text())
    written = {name: value for name, value in written.items() if name != "layer_types"}
    (tmp_path / "config.json").write_text(json.dumps(written | settings))
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32, attn_implementation="eager")
    found, params, _ = llama_jax.load(tmp_path)
    np.testing.assert_allclose(jit_logits(found, params, TOKENS), logits_of(theirs.eval(), TOKENS), atol=1e-4, rtol=0)


@pytest.mark.parametrize("kind", SIBLINGS)
def test_settings_that_are_not_there(kind):
    """Mean what they mean to transformers."""
    import transformers

    least = dict(
        model_type=kind, vocab_size=32, hidden_size=64, num_hidden_layers=2, num_attention_heads=32, intermediate_size=8
    )
    assert config_from_dict(least) == config_from_dict(transformers.AutoConfig.for_model(**least).to_dict())


def test_generation_within_and_beyond_the_original_context_of_a_longrope(tmp_path):
    """A row that crosses it is another matter: transformers changes the factors there, by the length so far."""
    import torch
    import transformers

    rope = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 32, "partial_rotary_factor": 1.0}
    rope |= {"short_factor": [1.0, 1.1, 1.2, 1.3], "long_factor": [1.5, 2.5, 3.5, 4.5]}
    sizes = dict(vocab_size=50, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1)
    sizes |= dict(intermediate_size=48, max_position_embeddings=128, original_max_position_embeddings=32)
    theirs = transformers.Phi3Config(**sizes, pad_token_id=0, bos_token_id=0, eos_token_id=None, rope_parameters=rope)
    torch.manual_seed(0)
    peer = transformers.AutoModelForCausalLM.from_config(theirs, dtype=torch.float32, attn_implementation="eager").eval()
    with torch.no_grad():
        for parameter in peer.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.3 + (parameter.ndim == 1))
    peer.save_pretrained(tmp_path)
    config, params, _ = llama_jax.load(tmp_path)
    for length, limit in ((20, 12), (33, 20)):
        prompt = np.random.default_rng(0).integers(1, 50, length).tolist()
        expected = peer.generate(torch.tensor([prompt]), max_new_tokens=limit, do_sample=False)[0, length:].tolist()
        (generated,) = llama_jax.generate(config, params, [prompt], max_new_tokens=limit)
        assert generated.tokens == expected


@pytest.mark.parametrize("model_type", FAMILIES)
def test_a_norm_rounds_where_the_family_does(model_type):
    """In bfloat16 to the bit: before the weight, or only after it."""
    torch = pytest.importorskip("torch", reason="needs the parity extra")
    transformers = pytest.importorskip("transformers", reason="needs the parity extra")
    config = SIBLINGS.get(model_type, PLAIN)
    settings = transformers.AutoConfig.for_model(**config_to_dict(config) | {"pad_token_id": None})
    theirs = transformers.AutoModelForCausalLM.from_config(settings)
    rng = np.random.default_rng(0)
    x, weight = rng.standard_normal((64, config.dim)), 1 + 0.3 * rng.standard_normal(config.dim)
    norm = theirs.model.norm.to(torch.bfloat16)
    norm.weight.data = torch.tensor(weight, dtype=torch.bfloat16)
    expected = norm(torch.tensor(x, dtype=torch.bfloat16)).detach().float().numpy()
    options = jnp.asarray(weight, jnp.bfloat16), config.norm_eps, config.norm_offset
    table = select_ops(config, random_params(config), ComputeOptions(), Sharding())
    normed = table.norm(jnp.asarray(x, jnp.bfloat16), *options, nan_on_overflow=False)
    np.testing.assert_array_equal(np.asarray(normed, np.float32), expected)
