"""The configuration of a Llama: its sizes, checked once. The published ones are in `presets`."""

from llama_jax.config.families import KINDS, Kind
from llama_jax.config.llama import LayerConfig, LlamaConfig, QueryScaling, period
from llama_jax.config.rope import NEEDED, ROPE_FIELDS, RopeScaling, RopeScalingKind

__all__ = [
    "KINDS",
    "NEEDED",
    "ROPE_FIELDS",
    "Kind",
    "LayerConfig",
    "LlamaConfig",
    "QueryScaling",
    "RopeScaling",
    "RopeScalingKind",
    "period",
]
