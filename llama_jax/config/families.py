"""The model families, by their features beyond Llama's."""

from __future__ import annotations

from typing import Any, Literal

from llama_jax.errors import ConfigError

ModelType = Literal[
    "llama",
    "mistral",
    "qwen2",
    "qwen3",
    "mixtral",
    "qwen3_moe",
    "smollm3",
    "cwm",
    "ministral3",
    "olmo2",
    "olmo3",
    "gemma3_text",
    "granite",
    "phi3",
    "llama4_text",
]

# The features of each family beyond Llama, by the names that `features` returns.
FAMILY_FEATURES: dict[ModelType, set[str]] = {
    "llama": {"attention_bias", "mlp_bias"},
    "mistral": {"window"},
    "cwm": {"window", "layers with a window", "mlp_bias"},
    "smollm3": {"layers without rope", "window", "layers with a window", "attention_bias", "mlp_bias"},
    "qwen2": {"qkv_bias", "window", "layers with a window"},
    "qwen3": {"qk_norm=head", "window", "layers with a window", "attention_bias"},
    "mixtral": {"window", "experts"},
    "qwen3_moe": {"qk_norm=head", "experts", "normalize_expert_weights=False", "window", "attention_bias"},
    "ministral3": {"query_scaling", "window"},
    "olmo2": {"norm=post", "qk_norm=all", "attention_bias"},
    "olmo3": {"norm=post", "qk_norm=all", "window", "layers with a window", "layers with unscaled rope", "attention_bias"},
    "gemma3_text": {
        "norm=both",
        "norm_offset",
        "qk_norm=head",
        "activation",
        "embedding_multiplier",
        "attention_multiplier",
        "window",
        "layers with a window",
        "layers with unscaled rope",
        "attention_bias",
    },
    "granite": {
        "embedding_multiplier",
        "residual_multiplier",
        "attention_multiplier",
        "logits_scaling",
        "attention_bias",
        "mlp_bias",
    },
    "phi3": {"window", "rotary_dim"},
    "llama4_text": {
        "experts with sigmoid scores and a shared expert",
        "qk_norm=l2",
        "query_scaling with offset=1 and rotated=False",
        "layers without rope",
        "layers with chunks",
        "attention_bias",
    },
}
_FIELDS = ("window", "mlp_bias", "norm_offset", "rotary_dim", "attention_multiplier")
_MULTIPLIERS = ("embedding_multiplier", "residual_multiplier", "logits_scaling")


def features(config: Any) -> set[str]:
    """The features of this configuration beyond Llama, by the names in `FAMILY_FEATURES`."""
    features = {name for name in _FIELDS if getattr(config, name)}
    features |= {name for name in _MULTIPLIERS if getattr(config, name) != 1}
    if config.qkv_bias and config.out_bias:
        features.add("attention_bias")  # transformers' setting for both
    else:
        features |= {name for name in ("qkv_bias", "out_bias") if getattr(config, name)}
    features |= {f"norm={config.norm}"} if config.norm != "pre" else set()
    features |= {f"qk_norm={config.qk_norm}"} if config.qk_norm else set()
    features |= {"activation"} if config.activation != "silu" else set()
    features |= {"normalize_expert_weights=False"} if not config.normalize_expert_weights else set()
    if config.experts:
        scores = " with sigmoid scores" if config.expert_scores == "sigmoid" else ""
        features.add(f"experts{scores}{' and a shared expert' if config.shared_expert else ''}")
    if (scaling := config.query_scaling) is not None:
        usual = scaling.rotated and not scaling.offset
        features.add(
            "query_scaling" if usual else f"query_scaling with offset={scaling.offset} and rotated={scaling.rotated}"
        )
    features |= {"layers with chunks"} if any(layer.chunk for layer in config.layers) else set()
    features |= {"layers with a window"} if any(layer.window for layer in config.layers) else set()
    features |= {"layers without rope"} if any(layer.rope == "none" for layer in config.layers) else set()
    features |= {"layers with unscaled rope"} if any(layer.rope == "unscaled" for layer in config.layers) else set()
    return features


def model_type_of(config: Any) -> ModelType:
    """The first family whose features include those of this configuration.

    Raises:
      ConfigError: there is none.
    """
    needed = features(config)
    for model_type, supported in FAMILY_FEATURES.items():
        if needed <= supported:
            return model_type
    raise ConfigError(f"no family of models has {' and '.join(sorted(needed))} together")
