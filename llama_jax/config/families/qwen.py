"""Qwen 2 and 3, and Qwen 3 with experts."""

from __future__ import annotations

from functools import partial

from llama_jax.config.families import shared
from llama_jax.config.families.shared import Architecture, Config, ConfigJson, Family, Fields
from llama_jax.errors import ConfigError, short_repr


def _read_qwen(settings: ConfigJson) -> Fields:
    window, first = shared.read_used_window(settings), settings["max_window_layers"]
    if type(first) is not int:
        raise ConfigError(f"max_window_layers={short_repr(first, 40)} must be an integer")
    return shared.read_mixed_windows(settings, window, lambda i: window is not None and i >= first)


def _write_qwen(config: Config, rope: ConfigJson) -> Fields:
    if (window := shared.find_local_layer(config).window) is None:
        return {"use_sliding_window": False}
    types = shared.list_layer_types(config)
    windows = {"sliding_window": window, "max_window_layers": types.index(shared.SLIDING), "layer_types": types}
    return {"use_sliding_window": True} | windows


def _read_moe(settings: ConfigJson) -> Fields:
    for name, supported in (("decoder_sparse_step", 1), ("mlp_only_layers", [])):
        if settings.get(name, supported) not in (supported, None):
            raise ConfigError(f"{name}={short_repr(settings[name], 40)} is not supported: all layers must have experts")
    return shared.read_window({**settings, "sliding_window": shared.read_used_window(settings)}) | {
        "hidden_dim": settings["moe_intermediate_size"],
        "experts": settings.get("num_experts") or settings["num_local_experts"],
        "experts_per_token": settings["num_experts_per_tok"],
        "normalize_expert_weights": settings["norm_topk_prob"],
    }


def _write_moe(config: Config, rope: ConfigJson) -> Fields:
    return _write_qwen(config, rope) | {
        "intermediate_size": config.hidden_dim * config.experts_per_token,  # without experts: as in released models
        "moe_intermediate_size": config.hidden_dim,
        "num_experts": config.experts,
        "num_experts_per_tok": config.experts_per_token,
        "norm_topk_prob": config.normalize_expert_weights,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }


def _write_moe_keys(config: Config) -> Fields:
    if not config.normalize_expert_weights:
        shared.refuse_to_store("normalize_expert_weights=False", "normalize the weights of experts")
    return shared.write_experts(config) | shared.refuse_window("qwen3moe", config)


_QWEN_DEFAULTS = {
    "num_key_value_heads": 32,
    "max_position_embeddings": 32_768,
    "max_window_layers": 28,
    "sliding_window": 4096,
}
FAMILIES = (
    Family(
        "qwen2",
        {"qkv_bias", "window", "layers with a window"},
        "Qwen2ForCausalLM",
        _QWEN_DEFAULTS,
        _read_qwen,
        _write_qwen,
        constants={"qkv_bias": True},
        gguf=Architecture("qwen2", settings=partial(shared.refuse_window, "qwen2")),
    ),
    Family(
        "qwen3",
        {"qk_norm=head", "window", "layers with a window", "attention_bias"},
        "Qwen3ForCausalLM",
        _QWEN_DEFAULTS | {"head_dim": 128},
        _read_qwen,
        _write_qwen,
        constants={"qk_norm": "head"},
        gguf=Architecture("qwen3", settings=partial(shared.refuse_window, "qwen3")),
    ),
    Family(
        "qwen3_moe",
        {"qk_norm=head", "experts", "normalize_expert_weights=False", "window", "attention_bias"},
        "Qwen3MoeForCausalLM",
        {
            "num_key_value_heads": 4,
            "max_position_embeddings": 32_768,
            "moe_intermediate_size": 768,
            "num_local_experts": 128,
            "num_experts_per_tok": 8,
            "norm_topk_prob": False,
            "sliding_window": 4096,
        },
        _read_moe,
        _write_moe,
        constants={"qk_norm": "head"},
        gguf=Architecture("qwen3moe", False, shared.EXPERT_KEYS[:1], shared.read_experts, _write_moe_keys),
    ),
)
