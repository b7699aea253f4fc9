"""What a model family has beyond Llama, in ``config.json`` and in GGUF, and what several families read and write alike.

Sources: transformers' configuration class of each family, for the names and the defaults of missing settings;
ggml-org/llama.cpp, src/models/*.cpp for what its readers accept, conversion/*.py for what its converter writes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NoReturn, TypeAlias

from llama_jax.config.parts import LayerConfig
from llama_jax.errors import CheckpointError, ConfigError, short_repr
from llama_jax.settings import PositiveFloat, PositiveInt, check_value

Config: TypeAlias = Any  # a `LlamaConfig`, whose file imports the families
Fields: TypeAlias = dict[str, Any]
ConfigJson = Mapping[str, Any]
FULL, SLIDING, CHUNKED = "full_attention", "sliding_attention", "chunked_attention"
# Returns the setting of a key of GGUF (without the architecture's prefix), or the given default.
Maybe = Callable[[str, Any], Any]
WINDOW_KEY = "attention.sliding_window"
PATTERN_KEY = "attention.sliding_window_pattern"
LOCAL_THETA_KEY = "rope.freq_base_swa"
EXPERT_KEYS = ("expert_count", "expert_used_count", "expert_feed_forward_length")


@dataclass(frozen=True)
class Architecture:
    """An architecture of GGUF, which several families may have.

    Attributes:
      name: its name in GGUF.
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

    name: str
    interleaved: bool = False
    reads: tuple[str, ...] = ()
    fields: Callable[[Maybe, int], Fields] = lambda maybe, n_layers: {}
    settings: Callable[[Config], Fields] = lambda config: {}
    fused: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    norm_shift: float = 0.0
    whole_yarn: bool = False
    biases: bool = False


@dataclass(frozen=True)
class Family:
    """A model family: its features, its settings in ``config.json``, and its architecture in GGUF.

    Attributes:
      name: `model_type` in transformers.
      features: what its models may have beyond Llama, by the names that `features` returns.
      architecture: class name in transformers.
      absent: transformers' defaults for missing settings. It names all settings that `fields` reads, or that have no effect
        here, and that `huggingface.SUPPORTED` rejects in other families.
      fields: maps all settings to fields of `LlamaConfig` other than Llama's.
      settings: the inverse of `fields`, from the configuration and its rope settings in Llama's form.
      rope: rewrites rope settings into Llama's form, and others as `fields` reads them.
      interleaved: whether pairs of adjacent features are rotated, so that the rows of q and k are stored interleaved;
        otherwise the halves of a head are rotated.
      scaled_context: whether files state the context with the factor of the rope scaling, see
        `rope_conversion.with_context`.
      constants: fields with the same value in all models of the family, in every file format.
      gguf: the architecture in GGUF, or None.
    """

    name: str
    features: set[str]
    architecture: str
    absent: ConfigJson = field(default_factory=dict)
    fields: Callable[[ConfigJson], Fields] = lambda settings: {}
    settings: Callable[[Config, ConfigJson], Fields] = lambda config, rope: {}
    rope: Callable[[Fields], Fields] = lambda settings: settings
    interleaved: bool = False
    scaled_context: bool = False
    constants: ConfigJson = field(default_factory=dict)
    gguf: Architecture | None = None


def number_in(settings: ConfigJson, name: str) -> float:
    """A setting that is used in arithmetic before the configuration checks it."""
    check_value(name, settings[name], PositiveFloat, ConfigError)
    return float(settings[name])


def object_in(settings: ConfigJson, name: str) -> Fields:
    """A setting that is an object, without its null entries; empty if it is null."""
    value = settings.get(name)
    if not isinstance(value, Mapping | None):
        raise ConfigError(f"{name}={short_repr(value)} must be an object")
    return {key: inner for key, inner in (value or {}).items() if inner is not None}


def read_layer_types(settings: ConfigJson, is_local: Callable[[int], Any], local: str = SLIDING) -> list[str]:
    """Each layer's kind of attention; without this setting, `is_local` chooses it by the index."""
    n, layer_types = settings["num_hidden_layers"], settings.get("layer_types")
    if layer_types is None:
        return [local if is_local(i) else FULL for i in range(n)]
    is_list = isinstance(layer_types, list) and len(layer_types) == n
    if not is_list or layer_types.count(FULL) + layer_types.count(local) < n:
        raise ConfigError(
            f"layer_types={short_repr(layer_types)} must be a list with {FULL!r} or {local!r} for each of {n} layers"
        )
    return layer_types


def list_layer_types(config: Config) -> list[str]:
    return [FULL if config.layer(i).window is None else SLIDING for i in range(config.n_layers)]


def find_local_layer(config: Config) -> LayerConfig:
    """The first layer that has a window, or one that has none."""
    return next((layer for layer in config.layer_kinds if layer.window is not None), LayerConfig())


def _check_uniform(settings: ConfigJson, needed: str) -> None:
    """Raise unless all layers have the same kind of attention."""
    layer_types = settings.get("layer_types")
    is_uniform = isinstance(layer_types, list) and layer_types.count(needed) == len(layer_types)
    if layer_types is not None and not is_uniform:
        raise ConfigError(f"layer_types={short_repr(layer_types)} is not supported; all layers must be {needed!r}")


def read_full_attention(settings: ConfigJson) -> Fields:
    _check_uniform(settings, FULL)
    return {}


def read_window(settings: ConfigJson) -> Fields:
    window = settings.get("sliding_window")
    _check_uniform(settings, FULL if window is None else SLIDING)
    return {"window": window}


def write_window(config: Config, rope: ConfigJson) -> Fields:
    return {"sliding_window": config.window}


def read_used_window(settings: ConfigJson) -> Any:
    return settings.get("sliding_window") if settings.get("use_sliding_window") else None


def read_mixed_windows(settings: ConfigJson, window: Any, is_local: Callable[[int], Any]) -> Fields:
    """Layers with a window and layers without, otherwise alike."""
    types = read_layer_types(settings, is_local)
    if window is None and SLIDING in types:
        raise ConfigError(f"layer_types={short_repr(types)} needs a sliding_window, or must be {FULL!r} for all layers")
    return {"layers": tuple(LayerConfig(window if layer_type == SLIDING else None) for layer_type in types)}


def write_mixed_windows(config: Config, rope: ConfigJson) -> Fields:
    return {"sliding_window": find_local_layer(config).window, "layer_types": list_layer_types(config)}


def read_local_windows(settings: ConfigJson, period: int) -> Fields:
    """Layers with a window have RoPE without scaling and a theta of their own; by default the last of a period has none."""
    window, theta = settings.get("sliding_window"), settings["sliding_theta"]
    theta = None if theta == settings["theta"] else theta
    sliding = LayerConfig(window, "unscaled", theta) if theta is not None or settings["scaled"] else LayerConfig(window)
    types = read_layer_types(settings, lambda i: (i + 1) % period)
    return {"layers": tuple(sliding if layer_type == SLIDING else LayerConfig() for layer_type in types)}


def write_local_windows(config: Config, rope: ConfigJson) -> Fields:
    local = {"rope_type": "default", "rope_theta": find_local_layer(config).rope_theta or config.rope_theta}
    return write_mixed_windows(config, rope) | {"rope_parameters": {FULL: dict(rope), SLIDING: local}}


def read_local_rope(settings: Fields, older_name: str = "rope_theta") -> Fields:
    """Rope settings per kind of layer: full attention has the model's; windows have only a theta.

    Args:
      older_name: the setting of the theta of windowed layers in older files.
    """
    both = object_in(settings, "rope_parameters")
    if not (FULL in both or SLIDING in both):
        return settings | {"sliding_theta": settings.get(older_name)}
    full, sliding = (object_in(both, layer_type) for layer_type in (FULL, SLIDING))
    rope_type = sliding.get("rope_type", sliding.get("type", "default"))
    if rope_type != "default":
        raise ConfigError(
            f"rope scaling {short_repr(rope_type, 40)} of windowed layers is not supported; it must be 'default'"
        )
    full.setdefault("rope_theta", settings.get("rope_theta"))
    theta = sliding.get("rope_theta", settings.get(older_name))
    return settings | {"rope_parameters": full, "sliding_theta": theta}


def read_rope_flags(settings: ConfigJson) -> list[int]:
    """Whether each layer has a position embedding."""
    n, ropes, step = settings["num_hidden_layers"], settings.get("no_rope_layers"), settings.get("no_rope_layer_interval", 4)
    if ropes is None:
        check_value("no_rope_layer_interval", step, PositiveInt, ConfigError)
        ropes = [int((i + 1) % step != 0) for i in range(n)]
    if not isinstance(ropes, list) or len(ropes) < n or any(rope not in (0, 1) for rope in ropes):
        raise ConfigError(f"no_rope_layers={short_repr(ropes)} must be a list with 0 or 1 for each of {n} layers")
    return ropes


def refuse_to_store(setting: str, readers: str) -> NoReturn:
    raise CheckpointError(f"{setting} cannot be stored in GGUF, whose readers {readers}; write safetensors")


def read_window_keys(maybe: Maybe, n_layers: int, period: int) -> list[int | None]:
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


def write_window_keys(config: Config) -> Fields:
    local = find_local_layer(config)
    if local.window is None:
        return {}
    pattern = [layer_type == SLIDING for layer_type in list_layer_types(config)]
    return {WINDOW_KEY: local.window, PATTERN_KEY: pattern, LOCAL_THETA_KEY: float(local.rope_theta or config.rope_theta)}


def read_only_window(maybe: Maybe, n_layers: int) -> Fields:
    return {"window": maybe(WINDOW_KEY, 0) or None}


def write_only_window(config: Config) -> Fields:
    return {} if config.window is None else {WINDOW_KEY: config.window}


def refuse_window(name: str, config: Config) -> Fields:
    """No settings, of an architecture without windows."""
    window = find_local_layer(config).window
    if window is not None:
        refuse_to_store(f"window={window}", f"support none in {name}")
    return {}


def read_experts(maybe: Maybe, n_layers: int) -> Fields:
    count, used, width = (maybe(key, 0) for key in EXPERT_KEYS)
    hidden = {"hidden_dim": width} if width else {}
    return {"experts": count, "experts_per_token": used} | hidden


def write_experts(config: Config) -> Fields:
    return dict(zip(EXPERT_KEYS, (config.experts, config.experts_per_token, config.hidden_dim), strict=True))
