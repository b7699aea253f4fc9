"""OLMo 2 and 3, with norms after attention and feed-forward."""

from __future__ import annotations

from llama_jax.config.families import shared
from llama_jax.config.families.shared import Architecture, ConfigJson, Family, Fields, Maybe
from llama_jax.config.parts import LayerConfig


def _read_olmo3(settings: ConfigJson) -> Fields:
    return shared.read_local_windows(settings, 4)


def _read_olmo_keys(maybe: Maybe, n_layers: int) -> Fields:
    windows = shared.read_window_keys(maybe, n_layers, 4)
    if not any(windows):
        return {}
    theta = maybe(shared.LOCAL_THETA_KEY, None)
    theta = None if theta == maybe("rope.freq_base", 10_000.0) else theta
    scaled = maybe("rope.scaling.type", "none") != "none"
    local = lambda window: LayerConfig(window, "unscaled", theta) if scaled or theta is not None else LayerConfig(window)
    return {"layers": tuple(LayerConfig() if window is None else local(window) for window in windows)}


_CONSTANTS = {"norm": "post", "qk_norm": "all"}
_OLMO_GGUF = Architecture("olmo2", False, (shared.WINDOW_KEY,), _read_olmo_keys, shared.write_window_keys)
FAMILIES = (
    Family(
        "olmo2",
        {"norm=post", "qk_norm=all", "attention_bias"},
        "Olmo2ForCausalLM",
        {"rms_norm_eps": 1e-5},
        fields=shared.read_full_attention,
        constants=_CONSTANTS,
        gguf=_OLMO_GGUF,
    ),
    Family(
        "olmo3",
        {"norm=post", "qk_norm=all", "window", "layers with a window", "layers with unscaled rope", "attention_bias"},
        "Olmo3ForCausalLM",
        {"rms_norm_eps": 1e-5, "rope_theta": 500_000.0, "sliding_window": 4096},
        _read_olmo3,
        shared.write_local_windows,
        shared.read_local_rope,
        constants=_CONSTANTS,
        gguf=_OLMO_GGUF,
    ),
)
