"""SmolLM3, with layers without RoPE."""

from __future__ import annotations

from llama_jax.config.families import shared
from llama_jax.config.families.shared import Architecture, Config, ConfigJson, Family, Fields, Maybe
from llama_jax.config.parts import LayerConfig
from llama_jax.errors import short_repr

LAYERS = (*[LayerConfig()] * 3, LayerConfig(rope="none"))


def _read_smollm3(settings: ConfigJson) -> Fields:
    ropes, window = shared.read_rope_flags(settings), shared.read_used_window(settings)
    layer_types = shared.read_layer_types(settings, lambda i: window is not None and not ropes[i])
    return {
        "layers": tuple(
            LayerConfig(window if layer_type == shared.SLIDING else None, "model" if rope else "none")
            for layer_type, rope in zip(layer_types, ropes, strict=False)
        )
    }


def _write_smollm3(config: Config, rope: ConfigJson) -> Fields:
    window = shared.find_local_layer(config).window
    return {
        "no_rope_layers": [int(config.layer(i).rope != "none") for i in range(config.n_layers)],
        "layer_types": shared.list_layer_types(config),
        "use_sliding_window": window is not None,
        "sliding_window": window,
    }


def _read_smollm3_keys(maybe: Maybe, n_layers: int) -> Fields:
    return {"layers": LAYERS}


def _write_smollm3_keys(config: Config) -> Fields:
    if config.layers != LAYERS:
        shared.refuse_to_store(
            f"layers={short_repr(config.layers, 200)}", "assume no RoPE in every fourth layer of a SmolLM3"
        )
    return {}


FAMILIES = (
    Family(
        "smollm3",
        {"layers without rope", "window", "layers with a window", "attention_bias", "mlp_bias"},
        "SmolLM3ForCausalLM",
        {
            "num_key_value_heads": 4,
            "max_position_embeddings": 32_768,
            "rope_theta": 2_000_000.0,
            "tie_word_embeddings": True,
            "sliding_window": None,
        },
        _read_smollm3,
        _write_smollm3,
        gguf=Architecture("smollm3", True, (), _read_smollm3_keys, _write_smollm3_keys),
    ),
)
