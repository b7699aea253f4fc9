"""The settings that model families add to those of a Llama in ``config.json``, one record per family.

Source: transformers' configuration class of each family, for the names and the defaults of missing settings.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from llama_jax.config import LayerConfig, LlamaConfig, QueryScaling
from llama_jax.errors import ConfigError, short_repr
from llama_jax.settings import Positive, PositiveNumber, check_value

ConfigJson = Mapping[str, Any]
FULL, SLIDING, CHUNKED = "full_attention", "sliding_attention", "chunked_attention"


@dataclass(frozen=True)
class Family:
    """The settings of a family in ``config.json``.

    Attributes:
      architecture: class name in transformers.
      absent: transformers' defaults for missing settings.
      reads: settings that `fields` reads or that have no effect here, and that `SUPPORTED` rejects in other families.
      fields: maps all settings to fields of `LlamaConfig` other than Llama's.
      constants: fields with the same value in all models of the family, in every file format.
      settings: the inverse of `fields`, from the configuration and its rope settings in Llama's form.
      rope: rewrites rope settings into Llama's form, and others as `fields` reads them.
      interleaved: whether pairs of adjacent features are rotated, so that the rows of q and k are stored interleaved;
        otherwise the halves of a head are rotated.
      scaled_context: whether files state the context with the factor of the rope scaling, see
        `rope_conversion.with_context`.
    """

    architecture: str
    absent: ConfigJson = field(default_factory=dict)
    reads: tuple[str, ...] = ()
    fields: Callable[[ConfigJson], dict[str, Any]] = lambda settings: {}
    settings: Callable[[LlamaConfig, ConfigJson], dict[str, Any]] = lambda config, rope: {}
    rope: Callable[[dict[str, Any]], dict[str, Any]] = lambda settings: settings
    interleaved: bool = False
    scaled_context: bool = False
    constants: ConfigJson = field(default_factory=dict)


def number_in(settings: ConfigJson, name: str) -> float:
    """A setting that is used in arithmetic before the configuration checks it."""
    check_value(name, settings[name], PositiveNumber, ConfigError)
    return float(settings[name])


def object_in(settings: ConfigJson, name: str) -> dict[str, Any]:
    """A setting that is an object, without its null entries; empty if it is null."""
    value = settings.get(name)
    if not isinstance(value, Mapping | None):
        raise ConfigError(f"{name}={short_repr(value)} must be an object")
    return {key: inner for key, inner in (value or {}).items() if inner is not None}


def _layer_types(settings: ConfigJson, usual: Callable[[int], str], other: str = SLIDING) -> list[str]:
    """Each layer's kind of attention."""
    n, layer_types = settings["num_hidden_layers"], settings.get("layer_types")
    if layer_types is None:
        return [usual(i) for i in range(n)]
    is_list = isinstance(layer_types, list) and len(layer_types) == n
    if not is_list or layer_types.count(FULL) + layer_types.count(other) < n:
        raise ConfigError(
            f"layer_types={short_repr(layer_types)} must be a list with {FULL!r} or {other!r} for each of {n} layers"
        )
    return layer_types


def _types_of(config: LlamaConfig) -> list[str]:
    return [FULL if config.layer(i).window is None else SLIDING for i in range(config.n_layers)]


def _window_of(config: LlamaConfig) -> int | None:
    return next((layer.window for layer in config.layer_kinds if layer.window is not None), None)


def _periodic(n: int, last: str, other: str) -> Callable[[int], str]:
    return lambda i: other if (i + 1) % n else last


def _check_uniform(settings: ConfigJson, needed: str) -> None:
    """Raise unless all layers have the same kind of attention."""
    layer_types = settings.get("layer_types")
    is_uniform = isinstance(layer_types, list) and layer_types.count(needed) == len(layer_types)
    if layer_types is not None and not is_uniform:
        raise ConfigError(f"layer_types={short_repr(layer_types)} is not supported; all layers must be {needed!r}")


def _full_attention(settings: ConfigJson) -> dict[str, Any]:
    _check_uniform(settings, FULL)
    return {}


def _window_fields(settings: ConfigJson) -> dict[str, Any]:
    window = settings.get("sliding_window")
    _check_uniform(settings, FULL if window is None else SLIDING)
    return {"window": window}


def _sliding_window_settings(config: LlamaConfig, rope: ConfigJson) -> dict[str, Any]:
    return {"sliding_window": config.window}


def _ropes(settings: ConfigJson) -> list[int]:
    """Whether each layer has a position embedding."""
    n, ropes, step = settings["num_hidden_layers"], settings.get("no_rope_layers"), settings.get("no_rope_layer_interval", 4)
    if ropes is None:
        check_value("no_rope_layer_interval", step, Positive, ConfigError)
        ropes = [int((i + 1) % step != 0) for i in range(n)]
    if not isinstance(ropes, list) or len(ropes) < n or any(rope not in (0, 1) for rope in ropes):
        raise ConfigError(f"no_rope_layers={short_repr(ropes)} must be a list with 0 or 1 for each of {n} layers")
    return ropes


def _used_window(settings: ConfigJson) -> Any:
    return settings.get("sliding_window") if settings.get("use_sliding_window") else None


def _smollm3_fields(settings: ConfigJson) -> dict[str, Any]:
    ropes, window = _ropes(settings), _used_window(settings)
    layer_types = _layer_types(settings, lambda i: SLIDING if window is not None and not ropes[i] else FULL)
    return {
        "layers": tuple(
            LayerConfig(window if layer_type == SLIDING else None, "model" if rope else "none")
            for layer_type, rope in zip(layer_types, ropes, strict=False)
        )
    }


def _smollm3_settings(config: LlamaConfig, rope: ConfigJson) -> dict[str, Any]:
    layers = [config.layer(i) for i in range(config.n_layers)]
    window = _window_of(config)
    return {
        "no_rope_layers": [int(layer.rope != "none") for layer in layers],
        "layer_types": _types_of(config),
        "use_sliding_window": window is not None,
        "sliding_window": window,
    }


def _mixed_windows(settings: ConfigJson, window: Any, usual: Callable[[int], str]) -> dict[str, Any]:
    """Layers with a window and layers without, otherwise alike."""
    types = _layer_types(settings, usual)
    if window is None and SLIDING in types:
        raise ConfigError(f"layer_types={short_repr(types)} needs a sliding_window, or must be {FULL!r} for all layers")
    return {"layers": tuple(LayerConfig(window if layer_type == SLIDING else None) for layer_type in types)}


def _mixed_settings(config: LlamaConfig, rope: ConfigJson) -> dict[str, Any]:
    return {"sliding_window": _window_of(config), "layer_types": _types_of(config)}


def _rope_by_layer_type(local: str | None) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """Rope settings per kind of layer: full attention has the model's; windows have only a theta.

    Args:
      local: name of the theta of windowed layers in older files; None if they share the other layers' theta.
    """

    def rope(settings: dict[str, Any]) -> dict[str, Any]:
        both = object_in(settings, "rope_parameters")
        if not (FULL in both or SLIDING in both):
            theta = settings.get("rope_theta") if local is None else settings.get(local)
            return settings | {"sliding_theta": theta}
        full, sliding = (object_in(both, layer_type) for layer_type in (FULL, SLIDING))
        rope_type = sliding.get("rope_type", sliding.get("type", "default"))
        if rope_type != "default":
            raise ConfigError(
                f"rope scaling {short_repr(rope_type, 40)} of windowed layers is not supported; it must be 'default'"
            )
        full.setdefault("rope_theta", settings.get("rope_theta"))
        return settings | {
            "rope_parameters": full,
            "sliding_theta": sliding.get("rope_theta", settings.get(local or "rope_theta")),
        }

    return rope


def _unscaled_windows(settings: ConfigJson, usual: Callable[[int], str]) -> tuple[LayerConfig, ...]:
    window, theta = settings.get("sliding_window"), settings["sliding_theta"]
    theta = None if theta == settings["theta"] else theta
    sliding = LayerConfig(window, "unscaled", theta) if theta is not None or settings["scaled"] else LayerConfig(window)
    return tuple(sliding if layer_type == SLIDING else LayerConfig() for layer_type in _layer_types(settings, usual))


def _local_rope(config: LlamaConfig, rope: ConfigJson) -> dict[str, Any]:
    sliding = next((layer for layer in config.layer_kinds if layer.window is not None), LayerConfig())
    local = {"rope_type": "default", "rope_theta": sliding.rope_theta or config.rope_theta}
    return _mixed_settings(config, rope) | {"rope_parameters": {FULL: dict(rope), SLIDING: local}}


def _gemma3_fields(settings: ConfigJson) -> dict[str, Any]:
    scalar, period = number_in(settings, "query_pre_attn_scalar"), settings.get("sliding_window_pattern")
    if period is not None:
        check_value("sliding_window_pattern", period, Positive, ConfigError)
    activation = settings.get("hidden_activation") or "gelu_pytorch_tanh"
    if activation != "gelu_pytorch_tanh":
        raise ConfigError(
            f"hidden_activation={short_repr(activation)} is not supported; gemma3_text has 'gelu_pytorch_tanh'"
        )
    return {
        "layers": _unscaled_windows(settings, _periodic(period or 6, FULL, SLIDING)),
        "embedding_multiplier": float(settings["hidden_size"]) ** 0.5,
        "attention_multiplier": None if scalar == settings["head_dim"] else scalar**-0.5,
    }


def _gemma3_settings(config: LlamaConfig, rope: ConfigJson) -> dict[str, Any]:
    scalar = config.score_scale**-2
    return _local_rope(config, rope) | {
        "query_pre_attn_scalar": round(scalar) if abs(scalar - round(scalar)) < 1e-6 * scalar else scalar,
        "hidden_activation": "gelu_pytorch_tanh",
        "hidden_act": "gelu_pytorch_tanh",
    }


GRANITE_MULTIPLIERS = ("embedding_multiplier", "residual_multiplier", "attention_multiplier", "logits_scaling")


def _granite_fields(settings: ConfigJson) -> dict[str, Any]:
    return _full_attention(settings) | {name: number_in(settings, name) for name in GRANITE_MULTIPLIERS}


def _granite_settings(config: LlamaConfig, rope: ConfigJson) -> dict[str, Any]:
    return {name: getattr(config, name) for name in GRANITE_MULTIPLIERS} | {"attention_multiplier": config.score_scale}


def _ministral3_rope(settings: dict[str, Any]) -> dict[str, Any]:
    rope = object_in(settings, "rope_parameters") or object_in(settings, "rope_scaling")
    beta, context = rope.pop("llama_4_scaling_beta", 0), rope.get("original_max_position_embeddings", 0)
    rope.pop("max_position_embeddings", None)
    rest = {name: value for name, value in settings.items() if name != "rope_scaling"}
    return rest | {"rope_parameters": rope, "query_scaling": None if beta == 0 else QueryScaling(beta, context)}


def _ministral3_settings(config: LlamaConfig, rope: ConfigJson) -> dict[str, Any]:
    scaling = config.query_scaling
    beta_setting = {} if scaling is None else {"llama_4_scaling_beta": scaling.beta}
    return _sliding_window_settings(config, rope) | {"rope_parameters": dict(rope) | beta_setting}


def _phi3_rope(settings: dict[str, Any]) -> dict[str, Any]:
    for name in ("rope_parameters", "rope_scaling"):
        if rope := object_in(settings, name):
            rope_type = rope.get("rope_type", rope.get("type", "default"))
            rope["rope_type"] = "longrope" if rope_type in ("su", "yarn") else rope_type
            settings = settings | {
                "partial_rotary_factor": rope.pop("partial_rotary_factor", settings["partial_rotary_factor"])
            }
            settings |= {name: rope}
    return settings


def _phi3_fields(settings: ConfigJson) -> dict[str, Any]:
    head_dim = settings.get("head_dim") or settings["hidden_size"] // settings["num_attention_heads"]
    check_value("head_dim", head_dim, Positive, ConfigError)
    rotated = int(head_dim * number_in(settings, "partial_rotary_factor"))
    return _window_fields(settings) | {"rotary_dim": None if rotated == head_dim else rotated}


def _phi3_settings(config: LlamaConfig, rope: ConfigJson) -> dict[str, Any]:
    original = config.max_seq_len if config.rope_scaling is None else config.rope_scaling.original_max_seq_len
    return _sliding_window_settings(config, rope) | {
        "partial_rotary_factor": config.rope_dim / config.head_dim,
        "original_max_position_embeddings": original,
    }


def _moe_fields(settings: ConfigJson) -> dict[str, Any]:
    return _window_fields(settings) | {
        "experts": settings["num_local_experts"],
        "experts_per_token": settings["num_experts_per_tok"],
    }


def _moe_settings(config: LlamaConfig, rope: ConfigJson) -> dict[str, Any]:
    counts = {"num_local_experts": config.experts, "num_experts_per_tok": config.experts_per_token}
    return _sliding_window_settings(config, rope) | counts


def _qwen3_moe_fields(settings: ConfigJson) -> dict[str, Any]:
    for name, supported in (("decoder_sparse_step", 1), ("mlp_only_layers", [])):
        if settings.get(name, supported) not in (supported, None):
            raise ConfigError(f"{name}={short_repr(settings[name], 40)} is not supported: all layers must have experts")
    return _window_fields({**settings, "sliding_window": _used_window(settings)}) | {
        "hidden_dim": settings["moe_intermediate_size"],
        "experts": settings.get("num_experts") or settings["num_local_experts"],
        "experts_per_token": settings["num_experts_per_tok"],
        "normalize_expert_weights": settings["norm_topk_prob"],
    }


def _qwen3_moe_settings(config: LlamaConfig, rope: ConfigJson) -> dict[str, Any]:
    return _qwen_settings(config, rope) | {
        "intermediate_size": config.hidden_dim * config.experts_per_token,  # without experts: as in released models
        "moe_intermediate_size": config.hidden_dim,
        "num_experts": config.experts,
        "num_experts_per_tok": config.experts_per_token,
        "norm_topk_prob": config.normalize_expert_weights,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }


def _llama4_fields(settings: ConfigJson) -> dict[str, Any]:
    n, sparse, step = settings["num_hidden_layers"], settings.get("moe_layers"), settings["interleave_moe_layer_step"]
    if step != 1 if sparse is None else sparse != list(range(n)):
        raise ConfigError(
            f"moe_layers={short_repr(sparse, 40)} and interleave_moe_layer_step={short_repr(step, 40)} are not supported:"
            " all layers must have experts"
        )
    ropes, chunk = (
        _ropes({**settings, "no_rope_layers": settings.get("no_rope_layers") or None}),
        settings["attention_chunk_size"],
    )
    layer_types = _layer_types(settings, lambda i: CHUNKED if ropes[i] else FULL, CHUNKED)
    if CHUNKED in layer_types and chunk is None:
        raise ConfigError(f"attention_chunk_size=None must be a positive integer if layers have {CHUNKED!r}")
    layers = zip(layer_types, ropes, strict=False)
    scaled = settings["attn_temperature_tuning"]
    return {
        "layers": tuple(
            LayerConfig(None, "model" if r else "none", chunk=chunk if k == CHUNKED else None) for k, r in layers
        ),
        "qk_norm": "l2" if settings["use_qk_norm"] else None,
        "query_scaling": QueryScaling(settings["attn_scale"], settings["floor_scale"], 1, rotated=False) if scaled else None,
        "experts": settings["num_local_experts"],
        "experts_per_token": settings["num_experts_per_tok"],
    }


def _llama4_settings(config: LlamaConfig, rope: ConfigJson) -> dict[str, Any]:
    layers = [config.layer(i) for i in range(config.n_layers)]
    scaling = config.query_scaling
    return {
        "intermediate_size_mlp": 2 * config.hidden_dim,  # without experts: as in released models
        "interleave_moe_layer_step": 1,
        "moe_layers": list(range(config.n_layers)),
        "no_rope_layers": [int(layer.rope != "none") for layer in layers],
        "layer_types": [FULL if layer.chunk is None else CHUNKED for layer in layers],
        "attention_chunk_size": next((layer.chunk for layer in layers if layer.chunk is not None), 8192),
        "use_qk_norm": config.qk_norm == "l2",
        "attn_temperature_tuning": scaling is not None,
        "attn_scale": 0.1 if scaling is None else scaling.beta,
        "floor_scale": 8192 if scaling is None else scaling.context,
        "num_local_experts": config.experts,
        "num_experts_per_tok": config.experts_per_token,
    }


def _qwen_fields(settings: ConfigJson) -> dict[str, Any]:
    window, first = _used_window(settings), settings["max_window_layers"]
    if type(first) is not int:
        raise ConfigError(f"max_window_layers={short_repr(first, 40)} must be an integer")
    return _mixed_windows(settings, window, lambda i: SLIDING if window is not None and i >= first else FULL)


def _qwen_settings(config: LlamaConfig, rope: ConfigJson) -> dict[str, Any]:
    if (window := _window_of(config)) is None:
        return {"use_sliding_window": False}
    types = _types_of(config)
    windows = {"sliding_window": window, "max_window_layers": types.index(SLIDING), "layer_types": types}
    return {"use_sliding_window": True} | windows


def _internlm(settings: ConfigJson) -> ConfigJson:
    """InternLM 1, a Llama with biases. Its dynamic rope scaling by 1 changes nothing within the context."""
    rotary = {"type": "dynamic", "base": 10_000.0, "scaling_factor": 1.0} | object_in(settings, "rotary")
    if rotary["type"] not in ("dynamic", "origin"):
        raise ConfigError(f"rotary={short_repr(rotary, 80)} is not supported; an internlm has type 'dynamic' or 'origin'")
    scaled = rotary["type"] == "dynamic" and rotary["scaling_factor"] != 1
    scaling = {"type": "dynamic", "factor": rotary["scaling_factor"]} if scaled else None
    rope = {"rope_theta": rotary["base"], "rope_scaling": scaling}
    return dict(settings) | rope | {"model_type": "llama", "attention_bias": settings.get("bias", True)}


# Families that differ from one of `FAMILIES` only in their settings, which a function translates.
RENAMED: dict[str, Callable[[ConfigJson], ConfigJson]] = {"internlm": _internlm}


_MISTRAL_DEFAULTS = {"num_key_value_heads": 8, "max_position_embeddings": 131_072}
_WIDE = _MISTRAL_DEFAULTS | {"head_dim": 128, "rms_norm_eps": 1e-5}
_QWEN = {"num_key_value_heads": 32, "max_position_embeddings": 32_768, "max_window_layers": 28}
_SMALL = {"num_key_value_heads": 4, "max_position_embeddings": 32_768}
_HEADS = {"head_dim": 128}
_OLMO = {"norm": "post", "qk_norm": "all"}
FAMILIES: dict[str, Family] = {
    "llama": Family("LlamaForCausalLM", fields=_full_attention),
    "mistral": Family(
        "MistralForCausalLM",
        _MISTRAL_DEFAULTS | {"sliding_window": 4096},
        ("sliding_window",),
        _window_fields,
        _sliding_window_settings,
    ),
    "qwen2": Family(
        "Qwen2ForCausalLM", _QWEN, ("sliding_window",), _qwen_fields, _qwen_settings, constants={"qkv_bias": True}
    ),
    "qwen3": Family(
        "Qwen3ForCausalLM", _QWEN | _HEADS, ("sliding_window",), _qwen_fields, _qwen_settings, constants={"qk_norm": "head"}
    ),
    "mixtral": Family(
        "MixtralForCausalLM",
        _MISTRAL_DEFAULTS
        | {"rms_norm_eps": 1e-5, "rope_theta": 1_000_000.0}
        | {"num_local_experts": 8, "num_experts_per_tok": 2},
        ("sliding_window", "num_local_experts"),
        _moe_fields,
        _moe_settings,
    ),
    "qwen3_moe": Family(
        "Qwen3MoeForCausalLM",
        _SMALL | {"moe_intermediate_size": 768, "num_local_experts": 128, "num_experts_per_tok": 8, "norm_topk_prob": False},
        ("sliding_window", "num_local_experts"),
        _qwen3_moe_fields,
        _qwen3_moe_settings,
        constants={"qk_norm": "head"},
    ),
    "smollm3": Family(
        "SmolLM3ForCausalLM",
        _SMALL | {"rope_theta": 2_000_000.0, "tie_word_embeddings": True},
        ("sliding_window",),
        _smollm3_fields,
        _smollm3_settings,
    ),
    "cwm": Family(
        "CwmForCausalLM",
        _WIDE
        | {
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
        ("sliding_window",),
        lambda settings: _mixed_windows(settings, settings.get("sliding_window"), lambda i: SLIDING if i % 4 else FULL),
        _mixed_settings,
    ),
    "ministral3": Family(
        "Ministral3ForCausalLM",
        {
            "num_key_value_heads": 8,
            "max_position_embeddings": 262_144,
            "rms_norm_eps": 1e-5,
            "head_dim": 128,
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
        ("sliding_window",),
        lambda settings: _window_fields(settings) | {"query_scaling": settings["query_scaling"]},
        _ministral3_settings,
        _ministral3_rope,
    ),
    "olmo2": Family("Olmo2ForCausalLM", {"rms_norm_eps": 1e-5}, (), _full_attention, constants=_OLMO),
    "olmo3": Family(
        "Olmo3ForCausalLM",
        {"rms_norm_eps": 1e-5, "rope_theta": 500_000.0, "sliding_window": 4096},
        ("sliding_window",),
        lambda settings: {"layers": _unscaled_windows(settings, _periodic(4, FULL, SLIDING))},
        _local_rope,
        _rope_by_layer_type(None),
        constants=_OLMO,
    ),
    "gemma3_text": Family(
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
        },
        ("sliding_window", "hidden_act"),
        _gemma3_fields,
        _gemma3_settings,
        _rope_by_layer_type("rope_local_base_freq"),
        scaled_context=True,
        constants={"norm": "both", "norm_offset": 1.0, "qk_norm": "head", "activation": "gelu"},
    ),
    "granite": Family(
        "GraniteForCausalLM",
        dict.fromkeys(GRANITE_MULTIPLIERS, 1.0),
        GRANITE_MULTIPLIERS,
        _granite_fields,
        _granite_settings,
    ),
    "phi3": Family(
        "Phi3ForCausalLM",
        {"rms_norm_eps": 1e-5, "max_position_embeddings": 4096, "partial_rotary_factor": 1.0},
        ("sliding_window", "partial_rotary_factor"),
        _phi3_fields,
        _phi3_settings,
        _phi3_rope,
    ),
    "llama4_text": Family(
        "Llama4ForCausalLM",
        _WIDE
        | {
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
        ("num_local_experts", "use_qk_norm"),
        _llama4_fields,
        _llama4_settings,
        interleaved=True,
        constants={"expert_scores": "sigmoid", "shared_expert": True},
    ),
}
