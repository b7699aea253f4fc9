"""The configuration of a Llama: its sizes, checked once, and the published ones."""

from llama_jax.config.families import KINDS, Kind
from llama_jax.config.llama import LayerConfig, LlamaConfig, QueryScaling, period
from llama_jax.config.presets import PRESETS, SHAPE_FIELDS, ffn_hidden_dim, preset
from llama_jax.config.rope import NEEDED, ROPE_FIELDS, RopeScaling, RopeScalingKind

__all__ = [
    "KINDS",
    "NEEDED",
    "PRESETS",
    "ROPE_FIELDS",
    "SHAPE_FIELDS",
    "Kind",
    "LayerConfig",
    "LlamaConfig",
    "QueryScaling",
    "RopeScaling",
    "RopeScalingKind",
    "ffn_hidden_dim",
    "period",
    "preset",
]
