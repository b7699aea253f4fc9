"""The model families: one record each."""

from __future__ import annotations

from llama_jax.config.families import gemma3, granite, llama, llama4, olmo, phi3, qwen, smollm3
from llama_jax.config.families.shared import Architecture, Config, Family, refuse_to_store
from llama_jax.errors import ConfigError

_FILES = (llama, smollm3, qwen, olmo, gemma3, granite, phi3, llama4)
# In the order in which `model_type_of` looks for the family of a configuration.
FAMILIES: dict[str, Family] = {family.name: family for file in _FILES for family in file.FAMILIES}
# The architectures of GGUF. Families with the same one have the same `constants`.
ARCHITECTURES: dict[str, Architecture] = {family.gguf.name: family.gguf for family in FAMILIES.values() if family.gguf}

_FIELDS = ("window", "mlp_bias", "norm_offset", "rotary_dim", "attention_multiplier")
_MULTIPLIERS = ("embedding_multiplier", "residual_multiplier", "logits_scaling")


def features(config: Config) -> set[str]:
    """The features of this configuration beyond Llama, by the names in `Family.features`."""
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


def model_type_of(config: Config) -> str:
    """The first family whose features include those of this configuration.

    Raises:
      ConfigError: there is none.
    """
    needed = features(config)
    for family in FAMILIES.values():
        if needed <= family.features:
            return family.name
    raise ConfigError(f"no family of models has {' and '.join(sorted(needed))} together")


def architecture_of(config: Config) -> Architecture:
    """The architecture in GGUF of a configuration's family."""
    model_type = model_type_of(config)
    return FAMILIES[model_type].gguf or refuse_to_store(f"model_type={model_type!r}", "know no architecture for it")
