"""The configuration of a Llama: its sizes, validated once. Published configurations are in `presets`."""

from llama_jax.config.families import FAMILY_FEATURES, ModelType
from llama_jax.config.llama import LayerConfig, LlamaConfig, QueryScaling, period, suggest_context
from llama_jax.config.parts import Parts
from llama_jax.config.rope import REQUIRED, ROPE_FIELDS, RopeScaling, RopeScalingKind

__all__ = [
    "FAMILY_FEATURES",
    "REQUIRED",
    "ROPE_FIELDS",
    "LayerConfig",
    "LlamaConfig",
    "ModelType",
    "Parts",
    "QueryScaling",
    "RopeScaling",
    "RopeScalingKind",
    "period",
    "suggest_context",
]
