"""Leaves of `Llama` in the place of matrices: weights in fewer bits than floats have, and weights with an adapter."""

from llama_jax.ops.weights.adapted import AdaptedWeight, ChangedWeight, LowRank, row_lengths
from llama_jax.ops.weights.kinds import KINDS, Kept, Name, Pure, fitting, with_fallback
from llama_jax.ops.weights.layers import MixedStack, apart, layer_of
from llama_jax.ops.weights.planes import Kind, Plane
from llama_jax.ops.weights.tabled import TabledWeight
from llama_jax.ops.weights.weight import JoinedWeight, QuantizedWeight, quantized, shardings_of_planes

__all__ = [
    "KINDS",
    "AdaptedWeight",
    "ChangedWeight",
    "JoinedWeight",
    "Kept",
    "Kind",
    "LowRank",
    "MixedStack",
    "Name",
    "Plane",
    "Pure",
    "QuantizedWeight",
    "TabledWeight",
    "apart",
    "fitting",
    "layer_of",
    "quantized",
    "row_lengths",
    "shardings_of_planes",
    "with_fallback",
]
