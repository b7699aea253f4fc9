"""The families of models: what they have that no Llama has, through all subpackages."""

import json
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from adapters import random_adapters
from conftest import jit_init, jit_logits
from family_models import FAMILY_MODELS, PLAIN, SIBLINGS, random_params
from training_options import step_options

import llama_jax
from llama_jax.config import LayerConfig, QueryScaling, RopeScaling
from llama_jax.config.families import FAMILIES
from llama_jax.config.presets import preset
from llama_jax.errors import CheckpointError, ConfigError, MeshError
from llama_jax.formats import load_adapter, save_adapter
from llama_jax.formats.gguf import config_from_fields, read_file
from llama_jax.formats.huggingface import config_from_dict, config_to_dict
from llama_jax.formats.orbax_format import array_name
from llama_jax.model.forward import forward, unembed
from llama_jax.model.forward_options import Positions
from llama_jax.model.lora import Lora, apply_adapters
from llama_jax.model.trees import parameter_count
from llama_jax.ops.platform import target_platform
from llama_jax.parallel.mesh import MeshSizes, make_mesh
from llama_jax.parallel.padding import pad_params, unpad_params
from llama_jax.parallel.sharding import sharded_train_step
from llama_jax.training.batch import Batch
from llama_jax.training.flops import matrix_parameters
from llama_jax.training.optimizer import OptimizerSettings, adamw, make_optimizer
from llama_jax.training.step import init_state, train_step

ROUNDING = 2**-23
TOKENS = np.random.default_rng(0).integers(0, 96, (2, 20), dtype=np.int32)
jit_forward, jit_unembed = (jax.jit(function, static_argnums=0) for function in (forward, unembed))
each = pytest.mark.parametrize("kind", SIBLINGS)
IN_GGUF = [kind for kind in FAMILY_MODELS if kind != "cwm"]
# What llama.cpp has instead of settings: chunks of 8192 tokens, and as many before late queries are scaled.
LLAMA4_IN_GGUF = {
    "layers": (*[LayerConfig(chunk=8192)] * 3, LayerConfig(rope="none")),
    "query_scaling": QueryScaling(0.1, 8192, offset=1, rotated=False),
}
# What compiles for a second or more: the sibling with the most parts without -m slow.
MOST = "mixtral"
long_each = pytest.mark.parametrize(
    "kind", [kind if kind == MOST else pytest.param(kind, marks=pytest.mark.slow) for kind in FAMILY_MODELS]
)


@pytest.fixture(scope="module")
def models():
    return {kind: (config, random_params(config)) for kind, config in FAMILY_MODELS.items()}


def gguf_form(config):
    """A configuration as GGUF can hold it."""
    return replace(config, **LLAMA4_IN_GGUF) if config.model_type == "llama4_text" else config


def same(a, b, norms=0.0):
    """Args: norms: how far norms may be apart; GGUF holds those of Gemma as 1 + w in float32, which costs bits of w."""
    named = [{array_name(path): np.asarray(leaf) for path, leaf in jax.tree.leaves_with_path(tree)} for tree in (a, b)]
    assert named[0].keys() == named[1].keys()
    for name, array in named[0].items():
        np.testing.assert_allclose(array, named[1][name], atol=norms * ("norm" in name), rtol=0, err_msg=name)


@each
def test_the_kind_follows_from_what_a_model_has(kind):
    assert FAMILY_MODELS[kind].model_type == kind
    assert set(FAMILIES) == set(FAMILY_MODELS)
    with pytest.raises(ConfigError, match="no family of models has qk_norm=head and qkv_bias together"):
        _ = replace(PLAIN, qk_norm="head", qkv_bias=True).model_type


@each
def test_each_differs_from_a_llama(models, kind):
    """By more than rounding: what is read is used."""
    config, params = models[kind]
    logits = jit_logits(config, params, TOKENS)
    assert np.isfinite(logits).all()
    if kind == "mistral":
        other = jit_logits(replace(config, window=None), params, TOKENS)
        np.testing.assert_allclose(logits[:, :6], other[:, :6], atol=1e-4)
        assert np.abs(logits[:, 6:] - other[:, 6:]).max() > 0.1
        return
    attention, feed_forward = params.blocks.attention, params.blocks.feed_forward
    for leaf in (
        *(attention.qkv_bias, attention.query_norm, attention.key_norm),
        *(feed_forward.router, feed_forward.shared_gate, feed_forward.shared_up, feed_forward.shared_down),
    ):
        if leaf is None:
            continue
        changed = jax.tree.map(lambda a, leaf=leaf: a.at[0].mul(2) if a is leaf else a, params)
        assert np.abs(jit_logits(config, changed, TOKENS) - logits).max() > 1e-3


@pytest.mark.parametrize(
    ("kind", "unrolled"),
    [
        *(pytest.param(*case, marks=pytest.mark.slow) for case in (("mistral", True), ("qwen2", False), ("qwen3", True))),
        *(pytest.param(MOST, unrolled, marks=pytest.mark.slow) for unrolled in (False, True)),
        # Whose layers differ: an index chooses where they are scanned.
        ("gemma3_text", False),
        *(pytest.param(kind, False, marks=pytest.mark.slow) for kind in ("smollm3", "cwm", "olmo3", "llama4_text")),
        *(pytest.param(kind, True, marks=pytest.mark.slow) for kind in ("gemma3_text", "ministral3", "granite", "phi3")),
    ],
)
def test_the_cache_and_pieces_give_the_same(models, kind, unrolled, monkeypatch):
    """Unrolled as for a GPU, but for its kernel, which no CPU runs."""
    monkeypatch.setattr(
        "llama_jax.ops.attention.paged.choose_paged_backend", lambda platform, problem: ("paged blocks", "a test")
    )
    config, params = models[kind]
    want = jit_logits(config, params, TOKENS)
    cache = llama_jax.init_cache(config, 2, 24)
    found = []
    for start, stop in ((0, 9), (9, 10), (10, 19), (19, 20)):
        with target_platform("gpu" if unrolled else None):
            hidden, cache = jit_forward(config, params, TOKENS[:, start:stop], cache)
        found.append(jit_unembed(config, params, hidden))
    np.testing.assert_allclose(np.concatenate(found, axis=1), want, atol=2e-4)


@pytest.mark.parametrize(
    "changes",
    [pytest.param({}, marks=pytest.mark.slow), {"window": None, "layers": (LayerConfig(chunk=5),)}],
    ids=["window", "chunks"],
)
def test_a_ring_of_the_models_own_window_gives_the_same(models, changes):
    config, params = replace(models["mistral"][0], **changes), models["mistral"][1]
    tokens = np.random.default_rng(0).integers(0, 96, (2, 50), dtype=np.int32)  # more than fit into the pages of a row
    cache = llama_jax.init_cache(config, 2, 50, window=6)
    want, found = jit_logits(config, params, tokens), []
    for i in range(tokens.shape[1]):
        hidden, cache = jit_forward(config, params, tokens[:, i : i + 1], cache)
        found.append(jit_unembed(config, params, hidden))
    np.testing.assert_allclose(np.concatenate(found, axis=1), want, atol=2e-4)


@pytest.mark.supports("packed")
@long_each
def test_packed_rows_give_the_same(models, kind):
    config, params = models[kind]
    apart = [jit_logits(config, params, TOKENS[:1, :8]), jit_logits(config, params, TOKENS[:1, 8:])]
    positions = jnp.concatenate([jnp.arange(8), jnp.arange(12)])[None]
    segments = (jnp.arange(20) >= 8).astype(jnp.int32)[None]
    hidden, _ = jit_forward(config, params, TOKENS[:1], positions=Positions(position_ids=positions, segment_ids=segments))
    np.testing.assert_allclose(jit_unembed(config, params, hidden), np.concatenate(apart, axis=1), atol=2e-4)


@pytest.mark.supports("{format}")
@pytest.mark.parametrize("format", ["safetensors", pytest.param("orbax", marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", FAMILY_MODELS)
def test_what_is_written_comes_back(models, kind, format, tmp_path):
    config, params = models[kind]
    llama_jax.save(tmp_path / "model", config, params, format=format)
    loaded = llama_jax.load(tmp_path / "model")
    assert loaded.config == config
    same(loaded.params, params)


@pytest.mark.supports("GGUF")
@pytest.mark.parametrize("kind", IN_GGUF)
def test_what_is_written_in_gguf_comes_back(models, kind, tmp_path):
    config, params = gguf_form(models[kind][0]), models[kind][1]
    llama_jax.save(tmp_path / "model.gguf", config, params)
    loaded = llama_jax.load(tmp_path / "model.gguf")
    assert loaded.config == config
    same(loaded.params, params, ROUNDING if config.norm_offset else 0)


@pytest.mark.refuses("GGUF", "Q8_0", family="cwm")
def test_a_cwm_has_no_place_in_gguf(models, tmp_path):
    with pytest.raises(CheckpointError, match="model_type='cwm' cannot be stored in GGUF"):
        llama_jax.save(tmp_path / "model.gguf", *models["cwm"])


@pytest.mark.supports("Q8_0")
@pytest.mark.parametrize(
    "kind",
    [x if x in (MOST, "gemma3_text", "llama4_text") else pytest.param(x, marks=pytest.mark.slow) for x in IN_GGUF],
)
def test_formats_are_converted_into_each_other(models, kind, tmp_path):
    config, params = gguf_form(models[kind][0]), models[kind][1]
    llama_jax.save(tmp_path / "a", config, params)
    llama_jax.convert(tmp_path / "a", tmp_path / "b.gguf", format="gguf")
    llama_jax.convert(tmp_path / "b.gguf", tmp_path / "c")
    same(llama_jax.load(tmp_path / "c").params, params, ROUNDING if config.norm_offset else 0)
    llama_jax.convert(tmp_path / "a", tmp_path / "q.gguf", format="gguf", dtype="q8_0")
    rounded = llama_jax.load(tmp_path / "q.gguf", "float32").params
    for (path, a), b in zip(jax.tree.leaves_with_path(rounded), jax.tree.leaves(params), strict=True):
        np.testing.assert_allclose(a, b, atol=0.02, err_msg=array_name(path))
    llama_jax.convert(tmp_path / "q.gguf", tmp_path / "d")
    same(llama_jax.load(tmp_path / "d").params, rounded, ROUNDING if config.norm_offset else 0)


@pytest.mark.parametrize(
    ("kind", "sizes"),
    [
        *(
            pytest.param(kind, MeshSizes(fsdp=2, tensor=2), marks=[pytest.mark.slow, pytest.mark.supports("mesh")])
            for kind in FAMILY_MODELS
        ),
        *(pytest.param(kind, MeshSizes(tensor=4), marks=pytest.mark.slow) for kind in (MOST, "qwen2", "llama4_text")),
        *(pytest.param(kind, MeshSizes(tensor=4), marks=pytest.mark.nightly) for kind in ("mistral", "qwen3")),
    ],
    ids=str,
)
def test_a_mesh_gives_the_same(models, kind, sizes, tmp_path):
    """With heads that are copied, and a padded vocabulary, read from a file and fitted in memory."""
    config, params = models[kind]
    same(unpad_params(config, pad_params(config, sizes, params)), params)
    want = jit_logits(config, params, TOKENS)
    for format in ("safetensors", "orbax"):
        llama_jax.save(tmp_path / format, config, params, format=format)
        fitted, sharded, _ = llama_jax.load(tmp_path / format, mesh=sizes)
        found = jit_logits(fitted, sharded, TOKENS)[..., : config.vocab_size]
        np.testing.assert_allclose(found, want, atol=2e-4)


@pytest.mark.parametrize(
    ("kind", "optimizer"),
    [
        *(pytest.param(kind, "adamw", marks=pytest.mark.slow) for kind in FAMILY_MODELS),
        *(pytest.param(kind, "muon", marks=pytest.mark.slow) for kind in ("qwen2", "llama4_text")),
        pytest.param(MOST, "muon", marks=pytest.mark.nightly),
    ],
)
@pytest.mark.supports("training")
def test_training_lowers_the_loss(kind, optimizer):
    config = FAMILY_MODELS[kind]
    rule = make_optimizer(OptimizerSettings(name=optimizer, learning_rate=3e-3, schedule="constant"), 20)
    state = init_state(rule, jit_init(config, jax.random.key(0)), ema=True)
    batch = Batch(TOKENS)
    step = jax.jit(partial(train_step, config, rule, options=step_options(ema_decay=0.9)))
    before = state.params
    losses = []
    for _ in range(12):
        state, metrics = step(state, batch)
        losses.append(float(metrics["loss"]))
    assert losses[-1] < losses[0] - 0.3 / config.logits_scaling  # by which logits, and what a step changes, are smaller
    for (path, a), b in zip(jax.tree.leaves_with_path(state.params), jax.tree.leaves(before), strict=True):
        assert np.abs(a - b).max() > 0, f"{array_name(path)} learns nothing"
    assert jax.tree.structure(state.ema) == jax.tree.structure(before)


@pytest.mark.slow
@pytest.mark.rotating
@pytest.mark.parametrize(
    ("kind", "sizes"),
    [
        pytest.param("gemma3_text", MeshSizes(context=2, tensor=2), marks=pytest.mark.supports("context")),
        *(
            pytest.param(kind, sizes, marks=[pytest.mark.slow, pytest.mark.supports(feature)])
            for feature, sizes in (
                ("fsdp, tensor", MeshSizes(fsdp=2, tensor=2)),
                ("context", MeshSizes(fsdp=2, context=2)),
            )
            for kind in FAMILY_MODELS
        ),
    ],
    ids=str,
)
def test_a_step_over_a_mesh_is_that_of_one_device(kind, sizes):
    """Also around a ring, whose attention is then of each window of the layers."""
    config = FAMILY_MODELS[kind]
    optimizer = adamw(1e-3)
    found = []
    for each in (MeshSizes(), sizes):
        state = init_state(optimizer, random_params(config))
        step = jax.jit(partial(sharded_train_step(config, make_mesh(each)), optimizer, options=step_options(remat="full")))
        state, metrics = step(state, Batch(TOKENS[:, :17]))
        found.append((metrics["loss"], metrics["grad_norm"], state.opt_state))
    for a, b in zip(*map(jax.tree.leaves, found), strict=True):
        assert np.linalg.norm(a - b) <= 2e-5 * np.linalg.norm(b)


def test_norms_of_all_heads_are_not_copied():
    """A key/value head that several devices hold would need its part of such a norm as often."""
    with pytest.raises(MeshError, match=r"n_kv_heads=2 .* cannot be split over tensor=4; 1, 2 would do"):
        pad_params(SIBLINGS["olmo2"], MeshSizes(tensor=4), random_params(SIBLINGS["olmo2"]))


@pytest.mark.slow
@pytest.mark.parametrize("quantize", [None, "int8"])
def test_experts_generate_over_a_mesh(models, quantize, tmp_path):
    config, params = models["qwen3_moe"]
    llama_jax.save(tmp_path / "model", config, params)
    found = []
    for mesh in (None, MeshSizes(fsdp=2, tensor=2)):
        config, params, _ = llama_jax.load(tmp_path / "model", mesh=mesh, quantize=quantize)
        rows = llama_jax.generate(config, params, TOKENS[:, :5].tolist(), max_new_tokens=6)
        found.append([row.tokens for row in rows])
    np.testing.assert_array_equal(*found)


def test_adapters_of_llama_4_have_the_rows_of_its_files(models, tmp_path):
    """Which are in the interleaved rotary layout: an adapter added to the file's weights is the adapted model."""
    from safetensors.numpy import load_file, save_file

    config, params = models["llama4_text"]
    lora = Lora(rank=2, targets=("q_proj", "k_proj"))
    adapters = random_adapters(config, lora)
    llama_jax.save(tmp_path / "model", config, params)
    save_adapter(tmp_path / "adapter", config, adapters, lora)
    jax.tree.map(np.testing.assert_array_equal, load_adapter(tmp_path / "adapter", config).params, adapters)
    path = tmp_path / "model" / "model.safetensors"
    tensors, pairs = load_file(path), load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    for i in range(config.n_layers):
        for name in lora.targets:
            module = f"model.layers.{i}.self_attn.{name}"
            a, b = (pairs[f"base_model.model.{module}.lora_{which}.weight"] for which in "AB")
            tensors[f"{module}.weight"] = tensors[f"{module}.weight"] + lora.scale * b @ a
    save_file(tensors, path, {"format": "pt"})
    merged = llama_jax.load(tmp_path / "model").params
    np.testing.assert_allclose(
        jit_logits(config, merged, TOKENS), jit_logits(config, apply_adapters(params, adapters, lora), TOKENS), atol=1e-4
    )


def test_of_experts_a_token_is_multiplied_with_a_few():
    config = preset("mixtral-8x7b")
    one = 3 * config.dim * config.hidden_dim * config.n_layers
    lookup_and_norms = config.vocab_size * config.dim + (2 * config.n_layers + 1) * config.dim
    assert matrix_parameters(config) == parameter_count(config) - 6 * one - lookup_and_norms
    assert matrix_parameters(replace(config, experts_per_token=3)) == matrix_parameters(config) + one
    scout = preset("llama-4-scout")
    assert round(matrix_parameters(scout) / 1e9) == 16  # and the embedding, as it was published


# -- config.json --------------------------------------------------------------------------------------------------------


def settings(kind, **more):
    """The lines of a release's config.json that matter, and some that do not."""
    found = dict(model_type=kind, architectures=[f"{kind.capitalize()}ForCausalLM"], bos_token_id=1, use_cache=True)
    return found | dict(hidden_act="silu", initializer_range=0.02, attention_dropout=0.0, tie_word_embeddings=False) | more


def sizes(hidden, inter, layers, heads, kv, context, vocab, eps, theta):
    found = dict(hidden_size=hidden, intermediate_size=inter, num_hidden_layers=layers, num_attention_heads=heads)
    found |= dict(num_key_value_heads=kv, max_position_embeddings=context, vocab_size=vocab, rms_norm_eps=eps)
    return found | dict(rope_theta=theta)


LLAMA3 = dict(rope_type="llama3", original_max_position_embeddings=8192)
QWEN = dict(use_sliding_window=False, max_window_layers=28)
RELEASES = {
    "mistral-7b": settings("mistral", **sizes(4096, 14_336, 32, 32, 8, 32_768, 32_000, 1e-5, 10_000.0), sliding_window=4096),
    "mistral-7b-v0.3": settings(
        "mistral", **sizes(4096, 14_336, 32, 32, 8, 32_768, 32_768, 1e-5, 1_000_000.0), sliding_window=None
    ),
    "mixtral-8x7b": settings(
        "mixtral",
        **sizes(4096, 14_336, 32, 32, 8, 32_768, 32_000, 1e-5, 1_000_000.0),
        sliding_window=None,
        num_local_experts=8,
        num_experts_per_tok=2,
        output_router_logits=False,
        router_aux_loss_coef=0.02,
    ),
    "qwen2.5-0.5b": settings("qwen2", **sizes(896, 4864, 24, 14, 2, 32_768, 151_936, 1e-6, 1_000_000.0), **QWEN)
    | dict(tie_word_embeddings=True, sliding_window=32_768, use_mrope=False),
    "qwen2.5-7b": settings("qwen2", **sizes(3584, 18_944, 28, 28, 4, 131_072, 152_064, 1e-6, 1_000_000.0), **QWEN)
    | dict(sliding_window=131_072, use_mrope=False),
    "qwen3-0.6b": settings("qwen3", **sizes(1024, 3072, 28, 16, 8, 40_960, 151_936, 1e-6, 1_000_000), **QWEN)
    | dict(tie_word_embeddings=True, head_dim=128, attention_bias=False, rope_scaling=None, sliding_window=None),
    "qwen3-32b": settings("qwen3", **sizes(5120, 25_600, 64, 64, 8, 40_960, 151_936, 1e-6, 1_000_000), **QWEN)
    | dict(head_dim=128, attention_bias=False, rope_scaling=None, sliding_window=None),
    "qwen3-30b-a3b": settings("qwen3_moe", **sizes(2048, 6144, 48, 32, 4, 40_960, 151_936, 1e-6, 1_000_000.0), **QWEN)
    | dict(head_dim=128, attention_bias=False, rope_scaling=None, sliding_window=None, decoder_sparse_step=1)
    | dict(mlp_only_layers=[], moe_intermediate_size=768, norm_topk_prob=True, num_experts=128, num_experts_per_tok=8)
    | dict(output_router_logits=False, router_aux_loss_coef=0.001),
    "llama-4-scout": dict(
        architectures=["Llama4ForConditionalGeneration"],
        model_type="llama4",
        tie_word_embeddings=False,
        vision_config={"hidden_size": 1408},
        text_config=settings("llama4_text", **sizes(5120, 8192, 48, 40, 8, 262_144, 202_048, 1e-5, 500_000.0), head_dim=128)
        | dict(attention_bias=False, attention_chunk_size=8192, attn_scale=0.1, attn_temperature_tuning=4, floor_scale=8192)
        | dict(for_llm_compressor=False, interleave_moe_layer_step=1, intermediate_size_mlp=16_384, no_rope_layers=[])
        | dict(moe_layers=list(range(48)), num_experts_per_tok=1, num_local_experts=16, use_qk_norm=True)
        | dict(output_router_logits=False, router_aux_loss_coef=0.001, router_jitter_noise=0.0)
        | dict(rope_scaling=LLAMA3 | {"factor": 8.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0}),
    ),
}


@pytest.mark.parametrize("name", RELEASES)
def test_released_config_json(name):
    assert config_from_dict(RELEASES[name]) == preset(name)
    assert config_from_dict(config_to_dict(preset(name))) == preset(name)


@pytest.mark.parametrize(
    ("kind", "changes", "message"),
    [
        ("qwen2", {"max_window_layers": None}, "max_window_layers=None must be an integer"),
        ("qwen3", {"layer_types": ["full_attention", "sliding_attention"]}, "layer_types=.* must be 'full_attention'"),
        ("qwen3_moe", {"layer_types": ["sliding_attention"] * 2}, "layer_types=.* must be 'full_attention'"),
        ("mixtral", {"num_experts_per_tok": 5}, "experts_per_token=5 must be at least 1 and at most experts=4"),
        ("qwen3_moe", {"decoder_sparse_step": 2}, "decoder_sparse_step=2 is not supported: all layers must have experts"),
        (
            "llama4_text",
            {"moe_layers": None, "interleave_moe_layer_step": 2},
            "interleave_moe_layer_step=2 are not supported",
        ),
        ("llama4_text", {"layer_types": ["sliding_attention"] * 5}, "layer_types=.* or 'chunked_attention' for each of 5"),
        ("qwen3", {"use_qk_norm": True}, "use_qk_norm=True is not supported; a qwen3 has"),
        ("mistral", {"num_local_experts": 4}, "num_local_experts=4 is not supported; a mistral has"),
        ("qwen2", {"model_type": "qwen2_moe"}, "model_type='qwen2_moe' is not supported"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(kind, changes, message):
    with pytest.raises(ConfigError, match=message):
        config_from_dict(config_to_dict(SIBLINGS[kind]) | changes)


@pytest.mark.parametrize("kinds", ["sliding", "full", "mixed"])
@pytest.mark.parametrize("kind", ["mistral", "ministral3", "mixtral", "phi3", "smollm3", "cwm", "olmo3", "gemma3_text"])
def test_whatever_windows_layers_have_a_model_that_is_read_is_written_as_it_was(kind, kinds):
    written = config_to_dict(SIBLINGS[kind])
    n = written["num_hidden_layers"]
    types = {"sliding": ["sliding_attention"] * n, "full": ["full_attention"] * n}
    types["mixed"] = ["full_attention", *types["sliding"][1:]]
    window = None if kinds == "full" else 7
    if "layer_types" in written:
        written |= {"use_sliding_window": kinds != "full"} if kind == "smollm3" else {}
        written |= {"layer_types": types[kinds], "sliding_window": 7}
    elif kinds != "mixed":
        written |= {"sliding_window": window}
    for more in ({}, {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}, "llama_jax": None}):
        config = config_from_dict(written | more)
        if kinds != "mixed":
            assert {layer.window for layer in config.layer_kinds} == {window}
        assert config_from_dict(config_to_dict(config)) == config


@pytest.mark.parametrize(
    ("changes", "windows"),
    [
        ({"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1}, (None, 7)),
        ({"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 0}, (7, 7)),
        ({"use_sliding_window": False, "sliding_window": 7, "max_window_layers": 0}, (None, None)),
        (
            {"use_sliding_window": True, "sliding_window": 7, "layer_types": ["sliding_attention", "full_attention"]},
            (7, None),
        ),
    ],
)
@pytest.mark.parametrize("kind", ["qwen2", "qwen3", "qwen3_moe"])
def test_windows_of_a_qwen_are_those_of_the_last_layers(kind, changes, windows):
    if kind == "qwen3_moe":  # whose layers are alike
        if "layer_types" in changes:
            return
        windows = (changes["sliding_window"] if changes["use_sliding_window"] else None,) * 2
    config = config_from_dict(config_to_dict(SIBLINGS[kind]) | changes)
    assert (config.layer(0).window, config.layer(1).window) == windows
    assert config_from_dict(config_to_dict(config)) == config
    assert config.model_type == kind


@pytest.mark.parametrize(
    ("kind", "changes", "name", "message"),
    [
        *(
            (kind, {"window": 7}, "m.gguf", "window=7 cannot be stored in GGUF")
            for kind in ("ministral3", "qwen2", "qwen3_moe")
        ),
        ("qwen3_moe", {"normalize_expert_weights": False}, "m.gguf", "normalize_expert_weights=False cannot be stored in"),
        ("llama4_text", {}, "m.gguf", "chunk=6.* cannot be stored in GGUF"),
        (
            "llama4_text",
            LLAMA4_IN_GGUF | {"layers": (LayerConfig(chunk=8192),)},
            "m.gguf",
            "assume chunks of 8192",
        ),
        ("llama4_text", LLAMA4_IN_GGUF | {"query_scaling": None}, "m.gguf", "query_scaling=None cannot be stored in GGUF"),
        (
            "llama4_text",
            LLAMA4_IN_GGUF | {"qk_norm": None},
            "m.gguf",
            "qk_norm=None with experts=4 cannot",
        ),
        ("llama4_text", {"layers": (LayerConfig(chunk=6), LayerConfig(chunk=7))}, "m", "in the config.json of llama4_text"),
    ],
)
def test_what_a_format_has_no_place_for(models, kind, changes, name, message, tmp_path):
    config, params = models[kind]
    with pytest.raises((CheckpointError, ConfigError), match=message):
        llama_jax.save(tmp_path / name, replace(config, **changes), params)


def test_an_olmo_3_of_windows_alone_is_written_in_gguf(models, tmp_path):
    config, params = replace(models["olmo3"][0], layers=(), window=7, rope_scaling=None), models["olmo3"][1]
    llama_jax.save(tmp_path / "model.gguf", config, params)
    assert llama_jax.load(tmp_path / "model.gguf").config == config


@pytest.mark.parametrize(
    ("kind", "missing"),
    [
        ("mixtral", "block_sparse_moe.experts.w1.weight"),
    ],
)
def test_layers_without_experts_are_named(kind, missing, tmp_path):
    llama_jax.save(tmp_path / "model", PLAIN, random_params(PLAIN))
    settings = config_to_dict(SIBLINGS[kind])
    (tmp_path / "model" / "config.json").write_text(json.dumps(settings))
    with pytest.raises(CheckpointError, match=f"'model.layers.0.{missing}' is missing"):
        llama_jax.load(tmp_path / "model")


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("interleave_moe_layer_step", 2, "interleave_moe_layer_step=2 is not supported"),
        ("rope.freq_base_swa", 7.0, "rope.freq_base_swa=7.0 is not supported"),
    ],
)
def test_what_a_gguf_of_llama_4_may_not_say(models, key, value, message, tmp_path):
    config, params = models["llama4_text"]
    llama_jax.save(tmp_path / "model.gguf", gguf_form(config), params)
    fields, tensors = read_file(tmp_path / "model.gguf")
    assert config_from_fields(fields | {"llama4.attention.sliding_window": 99}, tensors) == gguf_form(config)
    with pytest.raises(ConfigError, match=message):
        config_from_fields(fields | {f"llama4.{key}": value}, tensors)


def test_rope_factors_of_llama_4_that_another_program_wrote(models, tmp_path):
    """Without the settings that they were made of: a step instead of a ramp, as in Scout."""
    scaling = RopeScaling("llama3", 16.0, high_freq_factor=1.0)
    config = replace(gguf_form(models["llama4_text"][0]), head_dim=32, rope_scaling=scaling, rope_theta=500_000.0)
    llama_jax.save(tmp_path / "model.gguf", config, random_params(config))
    fields, tensors = read_file(tmp_path / "model.gguf")
    theirs = {key: value for key, value in fields.items() if not key.startswith("llama_jax")}
    assert len(theirs) < len(fields)
    assert config_from_fields(theirs, tensors).rope_scaling == scaling


def test_missing_experts_are_named(models, tmp_path):
    from safetensors.numpy import load_file, save_file

    llama_jax.save(tmp_path / "model", *models["mixtral"])
    path = tmp_path / "model" / "model.safetensors"
    tensors = load_file(path)
    del tensors["model.layers.1.block_sparse_moe.experts.2.w3.weight"]
    save_file(tensors, path, {"format": "pt"})
    with pytest.raises(
        CheckpointError, match=r"layers.1.block_sparse_moe.experts.w3.weight' has only the experts \[0, 1, 3\]"
    ):
        llama_jax.load(tmp_path / "model")


@pytest.mark.parametrize("name", ["qwen2", "qwen3", "qwen3_moe"])
def test_a_qwen_with_a_window_of_no_stated_size_has_the_default(name):
    """As in transformers: `use_sliding_window` without `sliding_window`."""
    settings = config_to_dict(SIBLINGS[name]) | {"use_sliding_window": True, "max_window_layers": 0}
    settings = {name: value for name, value in settings.items() if name not in ("layer_types", "sliding_window")}
    assert config_from_dict(settings).window == 4096
    assert config_from_dict(settings | {"sliding_window": None}).window is None
