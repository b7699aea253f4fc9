"""Granite 3, with factors of embeddings, residuals, attention scores and logits."""

from __future__ import annotations

from llama_jax.config.families import shared
from llama_jax.config.families.shared import Architecture, Config, ConfigJson, Family, Fields, Maybe

# The fields of the factors by their keys in GGUF; config.json has the names of the fields.
KEYS = {
    "embedding_scale": "embedding_multiplier",
    "residual_scale": "residual_multiplier",
    "attention.scale": "attention_multiplier",
    "logit_scale": "logits_scaling",
}
MULTIPLIERS = tuple(KEYS.values())


def _read_granite(settings: ConfigJson) -> Fields:
    return shared.read_full_attention(settings) | {name: shared.number_in(settings, name) for name in MULTIPLIERS}


def _write_granite(config: Config, rope: ConfigJson) -> Fields:
    return {name: getattr(config, name) for name in MULTIPLIERS} | {"attention_multiplier": config.score_scale}


def _read_granite_keys(maybe: Maybe, n_layers: int) -> Fields:
    multipliers = {name: maybe(key, 0.0) or None for key, name in KEYS.items()}
    return {name: 1.0 if value is None and name != "attention_multiplier" else value for name, value in multipliers.items()}


def _write_granite_keys(config: Config) -> Fields:
    return {key: float(getattr(config, name)) for key, name in KEYS.items() if getattr(config, name) is not None}


FAMILIES = (
    Family(
        "granite",
        {*MULTIPLIERS, "attention_bias", "mlp_bias"},
        "GraniteForCausalLM",
        dict.fromkeys(MULTIPLIERS, 1.0),
        _read_granite,
        _write_granite,
        gguf=Architecture("granite", True, tuple(KEYS), _read_granite_keys, _write_granite_keys, biases=True),
    ),
)
