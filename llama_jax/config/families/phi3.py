"""Phi-3 and Phi-4-mini, of which RoPE rotates a part of each head."""

from __future__ import annotations

from llama_jax.config.families import shared
from llama_jax.config.families.shared import Architecture, Config, ConfigJson, Family, Fields, Maybe
from llama_jax.errors import ConfigError
from llama_jax.settings import PositiveInt, check_value


def _read_phi3_rope(settings: Fields) -> Fields:
    for name in ("rope_parameters", "rope_scaling"):
        if rope := shared.object_in(settings, name):
            rope_type = rope.get("rope_type", rope.get("type", "default"))
            rope["rope_type"] = "longrope" if rope_type in ("su", "yarn") else rope_type
            settings = settings | {
                "partial_rotary_factor": rope.pop("partial_rotary_factor", settings["partial_rotary_factor"])
            }
            settings |= {name: rope}
    return settings


def _read_phi3(settings: ConfigJson) -> Fields:
    head_dim = settings.get("head_dim") or settings["hidden_size"] // settings["num_attention_heads"]
    check_value("head_dim", head_dim, PositiveInt, ConfigError)
    rotated = int(head_dim * shared.number_in(settings, "partial_rotary_factor"))
    return shared.read_window(settings) | {"rotary_dim": None if rotated == head_dim else rotated}


def _write_phi3(config: Config, rope: ConfigJson) -> Fields:
    original = config.max_seq_len if config.rope_scaling is None else config.rope_scaling.original_max_seq_len
    return shared.write_window(config, rope) | {
        "partial_rotary_factor": config.rope_dim / config.head_dim,
        "original_max_position_embeddings": original,
    }


def _read_phi3_keys(maybe: Maybe, n_layers: int) -> Fields:
    head_dim = maybe("attention.key_length", 0) or maybe("embedding_length", 1) // maybe("attention.head_count", 1)
    rotated = maybe("rope.dimension_count", head_dim)
    return {"rotary_dim": None if rotated == head_dim else rotated} | shared.read_only_window(maybe, n_layers)


FUSED = {"blk.{}.attn_qkv.weight": ("q", "k", "v"), "blk.{}.ffn_up.weight": ("gate", "up")}
FAMILIES = (
    Family(
        "phi3",
        {"window", "rotary_dim"},
        "Phi3ForCausalLM",
        {"rms_norm_eps": 1e-5, "max_position_embeddings": 4096, "partial_rotary_factor": 1.0, "sliding_window": None},
        _read_phi3,
        _write_phi3,
        _read_phi3_rope,
        gguf=Architecture("phi3", False, (shared.WINDOW_KEY,), _read_phi3_keys, shared.write_only_window, FUSED),
    ),
)
