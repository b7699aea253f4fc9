"""Weights in fewer bits than an array of floats has: leaves of `Llama` in the place of matrices."""

from llama_jax.ops.weights.kinds import KINDS, Kind, Name
from llama_jax.ops.weights.weight import JoinedWeight, QuantizedWeight, quantized, shardings_of_planes

__all__ = ["KINDS", "JoinedWeight", "Kind", "Name", "QuantizedWeight", "quantized", "shardings_of_planes"]
