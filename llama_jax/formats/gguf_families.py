"""The architectures of GGUF, and the settings that each adds to those of a Llama: one record per architecture.

Source: ggml-org/llama.cpp, src/models/*.cpp for what its readers accept, conversion/*.py for what its converter writes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NoReturn

from llama_jax.config import LayerConfig, LlamaConfig, ModelType, QueryScaling
from llama_jax.errors import CheckpointError, ConfigError, short_repr

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
      model_types: the model families with this name in GGUF.
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

    model_types: tuple[ModelType, ...]
    interleaved: bool = False
    reads: tuple[str, ...] = ()
    fields: Callable[[Maybe, int], dict[str, Any]] = lambda maybe, n_layers: {}
    settings: Callable[[LlamaConfig], dict[str, Any]] = lambda config: {}
    fused: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    norm_shift: float = 0.0
    whole_yarn: bool = False
    biases: bool = False


def refuse_to_store(setting: str, readers: str) -> NoReturn:
    raise CheckpointError(f"{setting} cannot be stored in GGUF, whose readers {readers}; write safetensors")


def _read_windows(maybe: Maybe, n_layers: int, period: int) -> list[int | None]:
    """Each layer's window, or None; by default the last layer of each period has none."""
    window, pattern = maybe(WINDOW_KEY, 0) or None, maybe(PATTERN_KEY, period)
    if window is None:
        return [None] * n_layers
    if type(pattern) is int and pattern >= 0:
        pattern = [pattern == 0 or i % pattern < pattern - 1 for i in range(n_layers)]
    pattern = list(pattern) if hasattr(pattern, "__len__") else []
    if len(pattern) != n_layers:
        raise ConfigError(
            f"{PATTERN_KEY}={short_repr(maybe(PATTERN_KEY, None), 40)} must be a number, or true or false for each layer"
        )
    return [window if windowed else None for windowed in pattern]


def _read_only_window(maybe: Maybe, n_layers: int) -> dict[str, Any]:
    return {"window": maybe(WINDOW_KEY, 0) or None}


def _only_window_keys(config: LlamaConfig) -> dict[str, Any]:
    return {} if config.window is None else {WINDOW_KEY: config.window}


def _no_window_keys(config: LlamaConfig) -> dict[str, Any]:
    window = next((layer.window for layer in config.layer_kinds if layer.window is not None), None)
    if window is not None:
        refuse_to_store(f"window={window}", f"support none in {architecture_of(config.model_type)}")
    return {}


def _read_llama(maybe: Maybe, n_layers: int) -> dict[str, Any]:
    counts = {"experts": maybe("expert_count", 0), "experts_per_token": maybe("expert_used_count", 0)}
    return _read_only_window(maybe, n_layers) | counts


def _llama_keys(config: LlamaConfig) -> dict[str, Any]:
    counts = {"expert_count": config.experts, "expert_used_count": config.experts_per_token} if config.experts else {}
    return _only_window_keys(config) | counts


EXPERT_KEYS = ("expert_count", "expert_used_count", "expert_feed_forward_length")


def _read_qwen3moe(maybe: Maybe, n_layers: int) -> dict[str, Any]:
    count, used, width = (maybe(key, 0) for key in EXPERT_KEYS)
    hidden = {"hidden_dim": width} if width else {}
    return {"experts": count, "experts_per_token": used} | hidden


def _qwen3moe_keys(config: LlamaConfig) -> dict[str, Any]:
    if not config.normalize_expert_weights:
        refuse_to_store("normalize_expert_weights=False", "normalize the weights of experts")
    counts = dict(zip(EXPERT_KEYS, (config.experts, config.experts_per_token, config.hidden_dim), strict=True))
    return counts | _no_window_keys(config)


LLAMA4 = (*[LayerConfig(chunk=8192)] * 3, LayerConfig(rope="none"))
LLAMA4_SCALING = QueryScaling(0.1, 8192, offset=1, rotated=False)
LLAMA4_STEP = "interleave_moe_layer_step"
NO_QK_NORM = 128  # experts; llama.cpp identifies the model without q and k norms by this number


def _read_llama4(maybe: Maybe, n_layers: int) -> dict[str, Any]:
    layers, theta = [LLAMA4[i % 4] for i in range(n_layers)], maybe("rope.freq_base", 10_000.0)
    # llama.cpp uses chunks of 8192 whatever the window is.
    chunks = _read_windows(lambda key, default: 8192 if key == WINDOW_KEY else maybe(key, default), n_layers, 4)
    unsupported = {
        LLAMA4_STEP: maybe(LLAMA4_STEP, 1) != 1,
        PATTERN_KEY: chunks != [layer.chunk for layer in layers],
        WINDOW_KEY: maybe(WINDOW_KEY, 8192) == 0,
        LOCAL_THETA_KEY: maybe(LOCAL_THETA_KEY, theta) != theta,
    }
    for key in (key for key, is_unsupported in unsupported.items() if is_unsupported):
        raise ConfigError(
            f"{key}={short_repr(maybe(key, None), 40)} is not supported; a llama4 has experts in all layers, chunks in three"
            " of four layers, and one theta"
        )
    return _read_qwen3moe(maybe, n_layers) | {
        "layers": tuple(layers),
        "qk_norm": None if maybe("expert_count", 0) == NO_QK_NORM else "l2",
        "query_scaling": LLAMA4_SCALING,
    }


def _llama4_keys(config: LlamaConfig) -> dict[str, Any]:
    if any(config.layer(i) != LLAMA4[i % 4] for i in range(config.n_layers)):
        refuse_to_store(
            f"layers={short_repr(config.layers, 200)}", "assume chunks of 8192 and no RoPE in every fourth layer"
        )
    if config.query_scaling != LLAMA4_SCALING:
        refuse_to_store(f"query_scaling={config.query_scaling}", f"assume {LLAMA4_SCALING}")
    if (config.qk_norm is None) != (config.experts == NO_QK_NORM):
        refuse_to_store(
            f"qk_norm={config.qk_norm!r} with experts={config.experts}",
            f"assume norms unless there are {NO_QK_NORM} experts",
        )
    return _qwen3moe_keys(config) | {LLAMA4_STEP: 1}


SMOLLM3 = (*[LayerConfig()] * 3, LayerConfig(rope="none"))


def _smollm3_keys(config: LlamaConfig) -> dict[str, Any]:
    if config.layers != SMOLLM3:
        refuse_to_store(f"layers={short_repr(config.layers, 200)}", "assume no RoPE in every fourth layer of a SmolLM3")
    return {}


def _read_olmo2(maybe: Maybe, n_layers: int) -> dict[str, Any]:
    windows = _read_windows(maybe, n_layers, 4)
    if not any(windows):
        return {}
    theta = maybe(LOCAL_THETA_KEY, None)
    theta = None if theta == maybe("rope.freq_base", 10_000.0) else theta
    scaled = maybe("rope.scaling.type", "none") != "none"
    local = lambda window: LayerConfig(window, "unscaled", theta) if scaled or theta is not None else LayerConfig(window)
    return {"layers": tuple(LayerConfig() if window is None else local(window) for window in windows)}


def _window_keys(config: LlamaConfig) -> dict[str, Any]:
    layers = [config.layer(i) for i in range(config.n_layers)]
    local = next((layer for layer in layers if layer.window is not None), None)
    if local is None:
        return {}
    theta = config.rope_theta if local.rope_theta is None else local.rope_theta
    windows = {WINDOW_KEY: local.window, PATTERN_KEY: [layer.window is not None for layer in layers]}
    return windows | {LOCAL_THETA_KEY: float(theta)}


GEMMA3_27B_LAYERS = 62  # layers of the model whose scores llama.cpp divides by sqrt(dim / n_heads)


def _read_gemma3(maybe: Maybe, n_layers: int) -> dict[str, Any]:
    dim, n_heads, theta = maybe("embedding_length", 1), maybe("attention.head_count", 1), maybe(LOCAL_THETA_KEY, 10_000.0)
    windows = _read_windows(maybe, n_layers, 6)
    return {
        "layers": tuple(LayerConfig() if w is None else LayerConfig(w, "unscaled", theta) for w in windows),
        "embedding_multiplier": float(dim) ** 0.5,
        "attention_multiplier": float(dim // n_heads) ** -0.5 if n_layers == GEMMA3_27B_LAYERS else None,
    }


def _gemma3_keys(config: LlamaConfig) -> dict[str, Any]:
    divisor = config.dim // config.n_heads if config.n_layers == GEMMA3_27B_LAYERS else config.head_dim
    if abs(config.score_scale**-2 - divisor) > 1e-6 * divisor:
        readers = f"assume {divisor} ** -0.5 for a Gemma 3 of {config.n_layers} layers"
        refuse_to_store(f"attention_multiplier={config.attention_multiplier}", readers)
    return _window_keys(config)


GRANITE = {
    "embedding_scale": "embedding_multiplier",
    "residual_scale": "residual_multiplier",
    "attention.scale": "attention_multiplier",
    "logit_scale": "logits_scaling",
}


def _read_granite(maybe: Maybe, n_layers: int) -> dict[str, Any]:
    multipliers = {name: maybe(key, 0.0) or None for key, name in GRANITE.items()}
    return {name: 1.0 if value is None and name != "attention_multiplier" else value for name, value in multipliers.items()}


def _granite_keys(config: LlamaConfig) -> dict[str, Any]:
    return {key: float(getattr(config, name)) for key, name in GRANITE.items() if getattr(config, name) is not None}


def _read_mistral3(maybe: Maybe, n_layers: int) -> dict[str, Any]:
    beta, context = maybe("attention.temperature_scale", 0.0), maybe("rope.scaling.original_context_length", 0)
    return {"query_scaling": QueryScaling(beta, context) if beta else None}


def _mistral3_keys(config: LlamaConfig) -> dict[str, Any]:
    scaling, none = config.query_scaling, _no_window_keys(config)
    if scaling is None:
        return none
    if config.rope_scaling is None or config.rope_scaling.original_max_seq_len != scaling.context:
        readers = "assume the original context of the rope scaling"
        refuse_to_store(f"query_scaling.context={scaling.context}", readers)
    return {"attention.temperature_scale": float(scaling.beta)}


def _read_phi3(maybe: Maybe, n_layers: int) -> dict[str, Any]:
    head_dim = maybe("attention.key_length", 0) or maybe("embedding_length", 1) // maybe("attention.head_count", 1)
    rotated = maybe("rope.dimension_count", head_dim)
    return {"rotary_dim": None if rotated == head_dim else rotated} | _read_only_window(maybe, n_layers)


PHI3_FUSED = {"blk.{}.attn_qkv.weight": ("q", "k", "v"), "blk.{}.ffn_up.weight": ("gate", "up")}
ARCHITECTURES: dict[str, Architecture] = {
    "llama": Architecture(
        ("llama", "mistral", "mixtral"), True, ("expert_count", WINDOW_KEY), _read_llama, _llama_keys, biases=True
    ),
    "qwen2": Architecture(("qwen2",), settings=_no_window_keys),
    "qwen3": Architecture(("qwen3",), settings=_no_window_keys),
    "qwen3moe": Architecture(("qwen3_moe",), False, EXPERT_KEYS[:1], _read_qwen3moe, _qwen3moe_keys),
    "smollm3": Architecture(("smollm3",), True, (), lambda maybe, n: {"layers": SMOLLM3}, _smollm3_keys),
    "olmo2": Architecture(("olmo2", "olmo3"), False, (WINDOW_KEY,), _read_olmo2, _window_keys),
    "gemma3": Architecture(("gemma3_text",), False, (WINDOW_KEY,), _read_gemma3, _gemma3_keys, norm_shift=1.0),
    "granite": Architecture(("granite",), True, tuple(GRANITE), _read_granite, _granite_keys, biases=True),
    "mistral3": Architecture(
        ("ministral3",), True, ("attention.temperature_scale",), _read_mistral3, _mistral3_keys, whole_yarn=True
    ),
    "phi3": Architecture(("phi3",), False, (WINDOW_KEY,), _read_phi3, _only_window_keys, PHI3_FUSED),
    "llama4": Architecture(("llama4_text",), True, (EXPERT_KEYS[0], WINDOW_KEY), _read_llama4, _llama4_keys),
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


def architecture_of(model_type: ModelType) -> str:
    """The architecture's name in GGUF for a model family."""
    for name, architecture in ARCHITECTURES.items():
        if model_type in architecture.model_types:
            return name
    refuse_to_store(f"model_type={model_type!r}", "know no architecture for it")
