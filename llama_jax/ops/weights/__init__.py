"""Leaves of `Llama` in the place of matrices: weights in fewer bits than floats have, and weights with an adapter."""

from llama_jax.ops.weights.format_spec import QuantField, QuantFormat
from llama_jax.ops.weights.formats import (
    QUANT_FORMATS,
    FormatName,
    FrozenFormatName,
    PureFormatName,
    format_for,
    with_fallback,
)
from llama_jax.ops.weights.layers import MixedStack, apart, layer_of
from llama_jax.ops.weights.lora import LoraWeight, LowRank, LowRankWeight, row_lengths
from llama_jax.ops.weights.multi_lora import MultiLoraWeight
from llama_jax.ops.weights.quantized_matmul import JoinedWeight, QuantizedWeight, quantized, shardings_of_planes

__all__ = [
    "QUANT_FORMATS",
    "FormatName",
    "FrozenFormatName",
    "JoinedWeight",
    "LoraWeight",
    "LowRank",
    "LowRankWeight",
    "MixedStack",
    "MultiLoraWeight",
    "PureFormatName",
    "QuantField",
    "QuantFormat",
    "QuantizedWeight",
    "apart",
    "format_for",
    "layer_of",
    "quantized",
    "row_lengths",
    "shardings_of_planes",
    "with_fallback",
]
