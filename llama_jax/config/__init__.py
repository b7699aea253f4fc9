"""The configuration of a Llama: its sizes, checked once. The published ones are in `presets`."""

from llama_jax.config.families import FAMILY_FEATURES, Kind
from llama_jax.config.llama import LayerConfig, LlamaConfig, QueryScaling, period
from llama_jax.config.rope import REQUIRED, ROPE_FIELDS, RopeScaling, RopeScalingKind

__all__ = [
    "FAMILY_FEATURES",
    "REQUIRED",
    "ROPE_FIELDS",
    "Kind",
    "LayerConfig",
    "LlamaConfig",
    "QueryScaling",
    "RopeScaling",
    "RopeScalingKind",
    "period",
]
