"""The text model of Llama 4, with experts in all layers."""

from __future__ import annotations

from llama_jax.config.families import shared
from llama_jax.config.families.shared import Architecture, Config, ConfigJson, Family, Fields, Maybe
from llama_jax.config.parts import LayerConfig, QueryScaling
from llama_jax.errors import ConfigError, short_repr

# What llama.cpp assumes.
LAYERS = (*[LayerConfig(chunk=8192)] * 3, LayerConfig(rope="none"))
SCALING = QueryScaling(0.1, 8192, offset=1, rotated=False)
STEP_KEY = "interleave_moe_layer_step"
NO_QK_NORM = 128  # experts; llama.cpp identifies the model without q and k norms by this number


def _read_llama4(settings: ConfigJson) -> Fields:
    n, sparse, step = settings["num_hidden_layers"], settings.get("moe_layers"), settings["interleave_moe_layer_step"]
    if step != 1 if sparse is None else sparse != list(range(n)):
        raise ConfigError(
            f"moe_layers={short_repr(sparse, 40)} and interleave_moe_layer_step={short_repr(step, 40)} are not supported:"
            " all layers must have experts"
        )
    ropes = shared.read_rope_flags({**settings, "no_rope_layers": settings.get("no_rope_layers") or None})
    chunk = settings["attention_chunk_size"]
    layer_types = shared.read_layer_types(settings, lambda i: ropes[i], shared.CHUNKED)
    if shared.CHUNKED in layer_types and chunk is None:
        raise ConfigError(f"attention_chunk_size=None must be a positive integer if layers have {shared.CHUNKED!r}")
    layers = zip(layer_types, ropes, strict=False)
    scaled = settings["attn_temperature_tuning"]
    return {
        "layers": tuple(
            LayerConfig(None, "model" if r else "none", chunk=chunk if k == shared.CHUNKED else None) for k, r in layers
        ),
        "qk_norm": "l2" if settings["use_qk_norm"] else None,
        "query_scaling": QueryScaling(settings["attn_scale"], settings["floor_scale"], 1, rotated=False) if scaled else None,
        "experts": settings["num_local_experts"],
        "experts_per_token": settings["num_experts_per_tok"],
    }


def _write_llama4(config: Config, rope: ConfigJson) -> Fields:
    layers = [config.layer(i) for i in range(config.n_layers)]
    scaling = config.query_scaling
    return {
        "intermediate_size_mlp": 2 * config.hidden_dim,  # without experts: as in released models
        "interleave_moe_layer_step": 1,
        "moe_layers": list(range(config.n_layers)),
        "no_rope_layers": [int(layer.rope != "none") for layer in layers],
        "layer_types": [shared.FULL if layer.chunk is None else shared.CHUNKED for layer in layers],
        "attention_chunk_size": next((layer.chunk for layer in layers if layer.chunk is not None), 8192),
        "use_qk_norm": config.qk_norm == "l2",
        "attn_temperature_tuning": scaling is not None,
        "attn_scale": 0.1 if scaling is None else scaling.beta,
        "floor_scale": 8192 if scaling is None else scaling.context,
        "num_local_experts": config.experts,
        "num_experts_per_tok": config.experts_per_token,
    }


def _read_llama4_keys(maybe: Maybe, n_layers: int) -> Fields:
    layers, theta = [LAYERS[i % 4] for i in range(n_layers)], maybe("rope.freq_base", 10_000.0)
    # llama.cpp uses chunks of 8192 whatever the window is.
    chunks = shared.read_window_keys(
        lambda key, default: 8192 if key == shared.WINDOW_KEY else maybe(key, default), n_layers, 4
    )
    unsupported = {
        STEP_KEY: maybe(STEP_KEY, 1) != 1,
        shared.PATTERN_KEY: chunks != [layer.chunk for layer in layers],
        shared.WINDOW_KEY: maybe(shared.WINDOW_KEY, 8192) == 0,
        shared.LOCAL_THETA_KEY: maybe(shared.LOCAL_THETA_KEY, theta) != theta,
    }
    for key in (key for key, is_unsupported in unsupported.items() if is_unsupported):
        raise ConfigError(
            f"{key}={short_repr(maybe(key, None), 40)} is not supported; a llama4 has experts in all layers, chunks in three"
            " of four layers, and one theta"
        )
    return shared.read_experts(maybe, n_layers) | {
        "layers": tuple(layers),
        "qk_norm": None if maybe("expert_count", 0) == NO_QK_NORM else "l2",
        "query_scaling": SCALING,
    }


def _write_llama4_keys(config: Config) -> Fields:
    if any(config.layer(i) != LAYERS[i % 4] for i in range(config.n_layers)):
        shared.refuse_to_store(
            f"layers={short_repr(config.layers, 200)}", "assume chunks of 8192 and no RoPE in every fourth layer"
        )
    if config.query_scaling != SCALING:
        shared.refuse_to_store(f"query_scaling={config.query_scaling}", f"assume {SCALING}")
    if (config.qk_norm is None) != (config.experts == NO_QK_NORM):
        shared.refuse_to_store(
            f"qk_norm={config.qk_norm!r} with experts={config.experts}",
            f"assume norms unless there are {NO_QK_NORM} experts",
        )
    return shared.write_experts(config) | {STEP_KEY: 1}


FAMILIES = (
    Family(
        "llama4_text",
        {
            "experts with sigmoid scores and a shared expert",
            "qk_norm=l2",
            "query_scaling with offset=1 and rotated=False",
            "layers without rope",
            "layers with chunks",
            "attention_bias",
        },
        "Llama4ForCausalLM",
        {
            "num_key_value_heads": 8,
            "max_position_embeddings": 131_072,
            "head_dim": 128,
            "rms_norm_eps": 1e-5,
            "rope_theta": 500_000.0,
            "num_local_experts": 16,
            "num_experts_per_tok": 1,
            "interleave_moe_layer_step": 1,
            "attention_chunk_size": 8192,
            "use_qk_norm": True,
            "attn_temperature_tuning": True,
            "attn_scale": 0.1,
            "floor_scale": 8192,
        },
        _read_llama4,
        _write_llama4,
        interleaved=True,
        constants={"expert_scores": "sigmoid", "shared_expert": True},
        gguf=Architecture("llama4", True, (shared.EXPERT_KEYS[0], shared.WINDOW_KEY), _read_llama4_keys, _write_llama4_keys),
    ),
)
