"""Llama, and what Mistral AI, Meta and others made of it: Mistral, Mixtral, Ministral 3, CWM, InternLM 1."""

from __future__ import annotations

from llama_jax.config.families import shared
from llama_jax.config.families.shared import Architecture, Config, ConfigJson, Family, Fields, Maybe
from llama_jax.config.parts import QueryScaling
from llama_jax.errors import ConfigError, short_repr


def read_internlm(settings: ConfigJson) -> ConfigJson:
    """InternLM 1, a Llama with biases. Its dynamic rope scaling by 1 changes nothing within the context."""
    rotary = {"type": "dynamic", "base": 10_000.0, "scaling_factor": 1.0} | shared.object_in(settings, "rotary")
    if rotary["type"] not in ("dynamic", "origin"):
        raise ConfigError(f"rotary={short_repr(rotary, 80)} is not supported; an internlm has type 'dynamic' or 'origin'")
    scaled = rotary["type"] == "dynamic" and rotary["scaling_factor"] != 1
    scaling = {"type": "dynamic", "factor": rotary["scaling_factor"]} if scaled else None
    rope = {"rope_theta": rotary["base"], "rope_scaling": scaling}
    return dict(settings) | rope | {"model_type": "llama", "attention_bias": settings.get("bias", True)}


def _read_mixtral(settings: ConfigJson) -> Fields:
    return shared.read_window(settings) | {
        "experts": settings["num_local_experts"],
        "experts_per_token": settings["num_experts_per_tok"],
    }


def _write_mixtral(config: Config, rope: ConfigJson) -> Fields:
    counts = {"num_local_experts": config.experts, "num_experts_per_tok": config.experts_per_token}
    return shared.write_window(config, rope) | counts


def _read_cwm(settings: ConfigJson) -> Fields:
    return shared.read_mixed_windows(settings, settings.get("sliding_window"), lambda i: i % 4)


def _read_ministral3_rope(settings: Fields) -> Fields:
    rope = shared.object_in(settings, "rope_parameters") or shared.object_in(settings, "rope_scaling")
    beta, context = rope.pop("llama_4_scaling_beta", 0), rope.get("original_max_position_embeddings", 0)
    rope.pop("max_position_embeddings", None)
    rest = {name: value for name, value in settings.items() if name != "rope_scaling"}
    return rest | {"rope_parameters": rope, "query_scaling": None if beta == 0 else QueryScaling(beta, context)}


def _read_ministral3(settings: ConfigJson) -> Fields:
    return shared.read_window(settings) | {"query_scaling": settings["query_scaling"]}


def _write_ministral3(config: Config, rope: ConfigJson) -> Fields:
    scaling = config.query_scaling
    beta_setting = {} if scaling is None else {"llama_4_scaling_beta": scaling.beta}
    return shared.write_window(config, rope) | {"rope_parameters": dict(rope) | beta_setting}


def _read_llama_keys(maybe: Maybe, n_layers: int) -> Fields:
    counts = {"experts": maybe("expert_count", 0), "experts_per_token": maybe("expert_used_count", 0)}
    return shared.read_only_window(maybe, n_layers) | counts


def _write_llama_keys(config: Config) -> Fields:
    counts = {"expert_count": config.experts, "expert_used_count": config.experts_per_token} if config.experts else {}
    return shared.write_only_window(config) | counts


def _read_ministral3_keys(maybe: Maybe, n_layers: int) -> Fields:
    beta, context = maybe("attention.temperature_scale", 0.0), maybe("rope.scaling.original_context_length", 0)
    return {"query_scaling": QueryScaling(beta, context) if beta else None}


def _write_ministral3_keys(config: Config) -> Fields:
    scaling, none = config.query_scaling, shared.refuse_window("mistral3", config)
    if scaling is None:
        return none
    if config.rope_scaling is None or config.rope_scaling.original_max_seq_len != scaling.context:
        readers = "assume the original context of the rope scaling"
        shared.refuse_to_store(f"query_scaling.context={scaling.context}", readers)
    return {"attention.temperature_scale": float(scaling.beta)}


# Families that differ from one of `FAMILIES` only in their settings, which a function translates.
RENAMED = {"internlm": read_internlm}
_LLAMA_DEFAULTS = {"num_key_value_heads": 8, "max_position_embeddings": 131_072}
_LLAMA_GGUF = Architecture(
    "llama", True, ("expert_count", shared.WINDOW_KEY), _read_llama_keys, _write_llama_keys, biases=True
)
FAMILIES = (
    Family("llama", {"attention_bias", "mlp_bias"}, "LlamaForCausalLM", fields=shared.read_full_attention, gguf=_LLAMA_GGUF),
    Family(
        "mistral",
        {"window"},
        "MistralForCausalLM",
        _LLAMA_DEFAULTS | {"sliding_window": 4096},
        shared.read_window,
        shared.write_window,
        gguf=_LLAMA_GGUF,
    ),
    Family(
        "cwm",
        {"window", "layers with a window", "mlp_bias"},
        "CwmForCausalLM",
        _LLAMA_DEFAULTS
        | {
            "head_dim": 128,
            "rms_norm_eps": 1e-5,
            "rope_theta": 1_000_000.0,
            "sliding_window": 8192,
            "rope_scaling": {
                "rope_type": "llama3",
                "factor": 16.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 8192,
            },
        },
        _read_cwm,
        shared.write_mixed_windows,
    ),
    Family(
        "mixtral",
        {"window", "experts"},
        "MixtralForCausalLM",
        _LLAMA_DEFAULTS
        | {"rms_norm_eps": 1e-5, "rope_theta": 1_000_000.0}
        | {"num_local_experts": 8, "num_experts_per_tok": 2, "sliding_window": None},
        _read_mixtral,
        _write_mixtral,
        gguf=_LLAMA_GGUF,
    ),
    Family(
        "ministral3",
        {"query_scaling", "window"},
        "Ministral3ForCausalLM",
        {
            "num_key_value_heads": 8,
            "max_position_embeddings": 262_144,
            "rms_norm_eps": 1e-5,
            "head_dim": 128,
            "sliding_window": None,
            "rope_scaling": {
                "rope_type": "yarn",
                "rope_theta": 1_000_000.0,
                "factor": 16.0,
                "original_max_position_embeddings": 16_384,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
                "llama_4_scaling_beta": 0.1,
            },
        },
        _read_ministral3,
        _write_ministral3,
        _read_ministral3_rope,
        gguf=Architecture(
            "mistral3",
            True,
            ("attention.temperature_scale",),
            _read_ministral3_keys,
            _write_ministral3_keys,
            whole_yarn=True,
        ),
    ),
)
