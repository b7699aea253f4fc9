"""The architectures of GGUF, and the settings that each adds to those of a Llama: one record per architecture.

Source: ggml-org/llama.cpp, src/models/*.cpp for what its readers accept, conversion/*.py for what its converter writes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from llama_jax.config import LayerConfig, LlamaConfig, ModelType, QueryScaling
from llama_jax.errors import CheckpointError, ConfigError, shown

# Returns the setting of a key (without the architecture's prefix), or the given default.
Maybe = Callable[[str, Any], Any]
WINDOW_KEY, PATTERN_KEY, LOCAL_THETA_KEY = (
    "attention.sliding_window",
    "attention.sliding_window_pattern",
    "rope.freq_base_swa",
)


@dataclass(frozen=True)
class Architecture:
    """An architecture of GGUF.

    Attributes:
      kinds: the model families with this name in GGUF.
      interleaved: whether llama.cpp rotates pairs of adjacent features, so that files store the rows of q and k interleaved;
        otherwise it rotates the halves of a head.
      reads: settings that `fields` reads, and that other architectures reject.
      fields: maps the settings and the number of layers to fields of `LlamaConfig` other than Llama's and
        `Family.constants`.
      settings: the inverse of `fields`.
      fused: tensors that hold several parts of a layer, as in `huggingface.FUSED`.
      norm_shift: the constant that files add to norm weights.
      whole_yarn: whether all yarn settings are read; they are fixed in other architectures.
      biases: whether readers add the biases of projections that a file has.
    """

    kinds: tuple[ModelType, ...]
    interleaved: bool = False
    reads: tuple[str, ...] = ()
    fields: Callable[[Maybe, int], dict[str, Any]] = lambda maybe, n_layers: {}
    settings: Callable[[LlamaConfig], dict[str, Any]] = lambda config: {}
    fused: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    norm_shift: float = 0.0
    whole_yarn: bool = False
    biases: bool = False


def _windows(maybe: Maybe, n_layers: int, period: int) -> list[int | None]:
    """Each layer's window, or None; by default the last layer of each period has none."""
    window, pattern = maybe(WINDOW_KEY, 0) or None, maybe(PATTERN_KEY, period)
    if window is None:
        return [None] * n_layers
    if type(pattern) is int and pattern >= 0:
        pattern = [pattern == 0 or i % pattern < pattern - 1 for i in range(n_layers)]
    pattern = list(pattern) if hasattr(pattern, "__len__") else []
    if len(pattern) != n_layers:
        raise ConfigError(
            f"{PATTERN_KEY}={shown(maybe(PATTERN_KEY, None), 40)} must be a number, or true or false for each layer"
        )
    return [window if windowed else None for windowed in pattern]


def _only_window(maybe: Maybe, n_layers: int) -> dict[str, Any]:
    return {"window": maybe(WINDOW_KEY, 0) or None}


def _only_window_settings(config: LlamaConfig) -> dict[str, Any]:
    return {} if config.window is None else {WINDOW_KEY: config.window}


def _no_window_settings(config: LlamaConfig) -> dict[str, Any]:
    window = next((layer.window for layer in config.layer_kinds if layer.window is not None), None)
    if window is not None:
        raise CheckpointError(
            f"window={window} cannot be stored in GGUF, whose readers support none in {architecture_of(config.model_type)};"
            " write safetensors"
        )
    return {}


def _llama(maybe: Maybe, n_layers: int) -> dict[str, Any]:
    counts = {"experts": maybe("expert_count", 0), "experts_per_token": maybe("expert_used_count", 0)}
    return _only_window(maybe, n_layers) | counts


def _llama_settings(config: LlamaConfig) -> dict[str, Any]:
    counts = {"expert_count": config.experts, "expert_used_count": config.experts_per_token} if config.experts else {}
    return _only_window_settings(config) | counts


EXPERT_KEYS = ("expert_count", "expert_used_count", "expert_feed_forward_length")


def _qwen3moe(maybe: Maybe, n_layers: int) -> dict[str, Any]:
    count, used, width = (maybe(key, 0) for key in EXPERT_KEYS)
    hidden = {"hidden_dim": width} if width else {}
    return {"experts": count, "experts_per_token": used} | hidden


def _qwen3moe_settings(config: LlamaConfig) -> dict[str, Any]:
    if not config.normalize_expert_weights:
        raise CheckpointError("llama.cpp normalizes qwen3moe's expert weights; write safetensors")
    counts = dict(zip(EXPERT_KEYS, (config.experts, config.experts_per_token, config.hidden_dim), strict=True))
    return counts | _no_window_settings(config)


LLAMA4 = (*[LayerConfig(chunk=8192)] * 3, LayerConfig(rope="none"))
LLAMA4_SCALING = QueryScaling(0.1, 8192, offset=1, rotated=False)
LLAMA4_STEP = "interleave_moe_layer_step"
NO_QK_NORM = 128  # experts; llama.cpp identifies the model without q and k norms by this number


def _llama4(maybe: Maybe, n_layers: int) -> dict[str, Any]:
    layers, theta = [LLAMA4[i % 4] for i in range(n_layers)], maybe("rope.freq_base", 10_000.0)
    # llama.cpp uses chunks of 8192 whatever the window is.
    chunks = _windows(lambda key, default: 8192 if key == WINDOW_KEY else maybe(key, default), n_layers, 4)
    if maybe(LLAMA4_STEP, 1) != 1:
        raise ConfigError(f"{LLAMA4_STEP}={shown(maybe(LLAMA4_STEP, 1), 40)} is not supported: all layers must have experts")
    if chunks != [layer.chunk for layer in layers]:
        raise ConfigError(f"{PATTERN_KEY}={shown(maybe(PATTERN_KEY, 4), 40)} is not supported; it must be 4")
    if maybe(WINDOW_KEY, 8192) == 0:
        raise ConfigError(f"{WINDOW_KEY}=0 is not supported; llama4 has chunks")
    if maybe(LOCAL_THETA_KEY, theta) != theta:
        raise ConfigError(
            f"{LOCAL_THETA_KEY}={shown(maybe(LOCAL_THETA_KEY, theta), 40)} is not supported; llama4 has one theta"
        )
    return _qwen3moe(maybe, n_layers) | {
        "layers": tuple(layers),
        "qk_norm": None if maybe("expert_count", 0) == NO_QK_NORM else "l2",
        "query_scaling": LLAMA4_SCALING,
    }


def _llama4_settings(config: LlamaConfig) -> dict[str, Any]:
    fixed = "cannot be stored in GGUF, whose readers assume"
    if any(config.layer(i) != LLAMA4[i % 4] for i in range(config.n_layers)):
        raise CheckpointError(
            f"layers={shown(config.layers, 200)} {fixed} chunks of 8192 and no RoPE in every fourth layer; write safetensors"
        )
    if config.query_scaling != LLAMA4_SCALING:
        raise CheckpointError(f"query_scaling={config.query_scaling} {fixed} {LLAMA4_SCALING}; write safetensors")
    if (config.qk_norm is None) != (config.experts == NO_QK_NORM):
        raise CheckpointError(
            f"qk_norm={config.qk_norm!r} with experts={config.experts} {fixed} norms unless there are {NO_QK_NORM} experts;"
            " write safetensors"
        )
    return _qwen3moe_settings(config) | {LLAMA4_STEP: 1}


SMOLLM3 = (*[LayerConfig()] * 3, LayerConfig(rope="none"))


def _smollm3_settings(config: LlamaConfig) -> dict[str, Any]:
    if config.layers != SMOLLM3:
        raise CheckpointError("GGUF supports layers without RoPE only as every fourth layer of a SmolLM3; write safetensors")
    return {}


def _olmo2(maybe: Maybe, n_layers: int) -> dict[str, Any]:
    windows = _windows(maybe, n_layers, 4)
    if not any(windows):
        return {}
    theta = maybe(LOCAL_THETA_KEY, None)
    theta = None if theta == maybe("rope.freq_base", 10_000.0) else theta
    scaled = maybe("rope.scaling.type", "none") != "none"
    local = lambda window: LayerConfig(window, "unscaled", theta) if scaled or theta is not None else LayerConfig(window)
    return {"layers": tuple(LayerConfig() if window is None else local(window) for window in windows)}


def _window_settings(config: LlamaConfig) -> dict[str, Any]:
    layers = [config.layer(i) for i in range(config.n_layers)]
    local = next((layer for layer in layers if layer.window is not None), None)
    if local is None:
        return {}
    theta = config.rope_theta if local.rope_theta is None else local.rope_theta
    windows = {WINDOW_KEY: local.window, PATTERN_KEY: [layer.window is not None for layer in layers]}
    return windows | {LOCAL_THETA_KEY: float(theta)}


GEMMA3_27B_LAYERS = 62  # layers of the model whose scores llama.cpp divides by sqrt(dim / n_heads)


def _gemma3(maybe: Maybe, n_layers: int) -> dict[str, Any]:
    dim, n_heads, theta = maybe("embedding_length", 1), maybe("attention.head_count", 1), maybe(LOCAL_THETA_KEY, 10_000.0)
    windows = _windows(maybe, n_layers, 6)
    return {
        "layers": tuple(LayerConfig() if w is None else LayerConfig(w, "unscaled", theta) for w in windows),
        "embedding_multiplier": float(dim) ** 0.5,
        "attention_multiplier": float(dim // n_heads) ** -0.5 if n_layers == GEMMA3_27B_LAYERS else None,
    }


def _gemma3_settings(config: LlamaConfig) -> dict[str, Any]:
    divisor = config.dim // config.n_heads if config.n_layers == GEMMA3_27B_LAYERS else config.head_dim
    if abs(config.score_scale**-2 - divisor) > 1e-6 * divisor:
        raise CheckpointError(
            f"attention_multiplier={config.attention_multiplier} cannot be stored in GGUF, whose readers assume"
            f" {divisor} ** -0.5 for a Gemma 3 of {config.n_layers} layers; write safetensors"
        )
    return _window_settings(config)


GRANITE = {
    "embedding_scale": "embedding_multiplier",
    "residual_scale": "residual_multiplier",
    "attention.scale": "attention_multiplier",
    "logit_scale": "logits_scaling",
}


def _granite(maybe: Maybe, n_layers: int) -> dict[str, Any]:
    found = {name: maybe(key, 0.0) or None for key, name in GRANITE.items()}
    return {name: 1.0 if value is None and name != "attention_multiplier" else value for name, value in found.items()}


def _granite_settings(config: LlamaConfig) -> dict[str, Any]:
    return {key: float(getattr(config, name)) for key, name in GRANITE.items() if getattr(config, name) is not None}


def _mistral3(maybe: Maybe, n_layers: int) -> dict[str, Any]:
    beta, context = maybe("attention.temperature_scale", 0.0), maybe("rope.scaling.original_context_length", 0)
    return {"query_scaling": QueryScaling(beta, context) if beta else None}


def _mistral3_settings(config: LlamaConfig) -> dict[str, Any]:
    scaling, none = config.query_scaling, _no_window_settings(config)
    if scaling is None:
        return none
    if config.rope_scaling is None or config.rope_scaling.original_max_seq_len != scaling.context:
        raise CheckpointError(f"query_scaling.context={scaling.context} must be the original context of the rope scaling")
    return {"attention.temperature_scale": float(scaling.beta)}


def _phi3(maybe: Maybe, n_layers: int) -> dict[str, Any]:
    head_dim = maybe("attention.key_length", 0) or maybe("embedding_length", 1) // maybe("attention.head_count", 1)
    rotated = maybe("rope.dimension_count", head_dim)
    return {"rotary_dim": None if rotated == head_dim else rotated} | _only_window(maybe, n_layers)


PHI3_FUSED = {"blk.{}.attn_qkv.weight": ("q", "k", "v"), "blk.{}.ffn_up.weight": ("gate", "up")}
ARCHITECTURES: dict[str, Architecture] = {
    "llama": Architecture(
        ("llama", "mistral", "mixtral"), True, ("expert_count", WINDOW_KEY), _llama, _llama_settings, biases=True
    ),
    "qwen2": Architecture(("qwen2",), settings=_no_window_settings),
    "qwen3": Architecture(("qwen3",), settings=_no_window_settings),
    "qwen3moe": Architecture(("qwen3_moe",), False, EXPERT_KEYS[:1], _qwen3moe, _qwen3moe_settings),
    "smollm3": Architecture(("smollm3",), True, (), lambda maybe, n: {"layers": SMOLLM3}, _smollm3_settings),
    "olmo2": Architecture(("olmo2", "olmo3"), False, (WINDOW_KEY,), _olmo2, _window_settings),
    "gemma3": Architecture(("gemma3_text",), False, (WINDOW_KEY,), _gemma3, _gemma3_settings, norm_shift=1.0),
    "granite": Architecture(("granite",), True, tuple(GRANITE), _granite, _granite_settings, biases=True),
    "mistral3": Architecture(
        ("ministral3",), True, ("attention.temperature_scale",), _mistral3, _mistral3_settings, whole_yarn=True
    ),
    "phi3": Architecture(("phi3",), False, (WINDOW_KEY,), _phi3, _only_window_settings, PHI3_FUSED),
    "llama4": Architecture(("llama4_text",), True, (EXPERT_KEYS[0], WINDOW_KEY), _llama4, _llama4_settings),
}
# Settings that change what is computed; values other than 0 are rejected unless the architecture reads them.
REFUSED = (
    "expert_count",
    WINDOW_KEY,
    "attention.temperature_scale",
    "final_logit_softcapping",
    "attn_logit_softcapping",
    "embedding_scale",
    "residual_scale",
    "attention.scale",
    "logit_scale",
    "attention.clamp_kqv",
)


def architecture_of(kind: ModelType) -> str:
    """The architecture's name in GGUF for a model family."""
    for name, architecture in ARCHITECTURES.items():
        if kind in architecture.kinds:
            return name
    raise CheckpointError(f"GGUF has no architecture for {kind}; write safetensors")
