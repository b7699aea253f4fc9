"""The text model of Gemma 3."""

from __future__ import annotations

from llama_jax.config.families import shared
from llama_jax.config.families.shared import Architecture, Config, ConfigJson, Family, Fields, Maybe
from llama_jax.config.parts import LayerConfig
from llama_jax.errors import ConfigError, short_repr
from llama_jax.settings import PositiveInt, check_value

LAYERS_OF_27B = 62  # of the model whose scores llama.cpp divides by sqrt(dim / n_heads)


def _read_gemma3_rope(settings: Fields) -> Fields:
    return shared.read_local_rope(settings, "rope_local_base_freq")


def _read_gemma3(settings: ConfigJson) -> Fields:
    scalar, period = shared.number_in(settings, "query_pre_attn_scalar"), settings.get("sliding_window_pattern")
    if period is not None:
        check_value("sliding_window_pattern", period, PositiveInt, ConfigError)
    activation = settings.get("hidden_activation") or "gelu_pytorch_tanh"
    if activation != "gelu_pytorch_tanh":
        raise ConfigError(
            f"hidden_activation={short_repr(activation)} is not supported; gemma3_text has 'gelu_pytorch_tanh'"
        )
    return shared.read_local_windows(settings, period or 6) | {
        "embedding_multiplier": float(settings["hidden_size"]) ** 0.5,
        "attention_multiplier": None if scalar == settings["head_dim"] else scalar**-0.5,
    }


def _write_gemma3(config: Config, rope: ConfigJson) -> Fields:
    scalar = config.score_scale**-2
    return shared.write_local_windows(config, rope) | {
        "query_pre_attn_scalar": round(scalar) if abs(scalar - round(scalar)) < 1e-6 * scalar else scalar,
        "hidden_activation": "gelu_pytorch_tanh",
        "hidden_act": "gelu_pytorch_tanh",
    }


def _read_gemma3_keys(maybe: Maybe, n_layers: int) -> Fields:
    dim, n_heads, theta = (
        maybe("embedding_length", 1),
        maybe("attention.head_count", 1),
        maybe(shared.LOCAL_THETA_KEY, 10_000.0),
    )
    windows = shared.read_window_keys(maybe, n_layers, 6)
    return {
        "layers": tuple(LayerConfig() if w is None else LayerConfig(w, "unscaled", theta) for w in windows),
        "embedding_multiplier": float(dim) ** 0.5,
        "attention_multiplier": float(dim // n_heads) ** -0.5 if n_layers == LAYERS_OF_27B else None,
    }


def _write_gemma3_keys(config: Config) -> Fields:
    divisor = config.dim // config.n_heads if config.n_layers == LAYERS_OF_27B else config.head_dim
    if abs(config.score_scale**-2 - divisor) > 1e-6 * divisor:
        readers = f"assume {divisor} ** -0.5 for a Gemma 3 of {config.n_layers} layers"
        shared.refuse_to_store(f"attention_multiplier={config.attention_multiplier}", readers)
    return shared.write_window_keys(config)


FAMILIES = (
    Family(
        "gemma3_text",
        {
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
        "Gemma3ForCausalLM",
        {
            "vocab_size": 262_208,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "head_dim": 256,
            "max_position_embeddings": 131_072,
            "tie_word_embeddings": True,
            "query_pre_attn_scalar": 256,
            "sliding_window": 4096,
            "rope_theta": 1_000_000.0,
            "rope_local_base_freq": 10_000.0,
            "hidden_act": "gelu_pytorch_tanh",
        },
        _read_gemma3,
        _write_gemma3,
        _read_gemma3_rope,
        scaled_context=True,
        constants={"norm": "both", "norm_offset": 1.0, "qk_norm": "head", "activation": "gelu"},
        gguf=Architecture("gemma3", False, (shared.WINDOW_KEY,), _read_gemma3_keys, _write_gemma3_keys, norm_shift=1.0),
    ),
)
