"""The configuration of a Llama: its sizes, validated once. Published configurations are in `presets`."""

from llama_jax.config.llama import LlamaConfig, suggest_context
from llama_jax.config.parts import LayerConfig, Parts, QueryScaling, period
from llama_jax.config.rope import REQUIRED, ROPE_FIELDS, RopeScaling, RopeScalingKind

__all__ = [
    "REQUIRED",
    "ROPE_FIELDS",
    "LayerConfig",
    "LlamaConfig",
    "Parts",
    "QueryScaling",
    "RopeScaling",
    "RopeScalingKind",
    "period",
    "suggest_context",
]
