"""Weights in fewer bits than an array of floats has: leaves of `Llama` in the place of matrices."""

from llama_jax.ops.weights.kinds import KINDS, Name, fitting
from llama_jax.ops.weights.planes import Kind, Plane
from llama_jax.ops.weights.weight import JoinedWeight, QuantizedWeight, quantized, shardings_of_planes

__all__ = [
    "KINDS",
    "JoinedWeight",
    "Kind",
    "Name",
    "Plane",
    "QuantizedWeight",
    "fitting",
    "quantized",
    "shardings_of_planes",
]
