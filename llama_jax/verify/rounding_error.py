"""Rounding error: how much of the difference of two models it explains, and the error of each quantized matrix."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import numpy as np

from llama_jax.config import LlamaConfig
from llama_jax.errors import CheckpointError
from llama_jax.formats.device_fill import ArraySource, StackedSource
from llama_jax.formats.lazy_tensors import TensorInfo
from llama_jax.model.mixtures import base_format
from llama_jax.model.params import LlamaParams, spec_at
from llama_jax.model.trees import is_weight
from llama_jax.ops.weights.format_spec import bits_of
from llama_jax.ops.weights.formats import with_fallback
from llama_jax.ops.weights.layers import get_layer
from llama_jax.ops.weights.lora import LoraWeight
from llama_jax.ops.weights.quantized_matmul import JoinedWeight, QuantizedWeight

# RMS rounding error of normally distributed weights, relative to their RMS, by storage type: measured with ggml's
# quantizers; int8 is llama2.c's, with one scale per 64 numbers; INT4 has integers from -7 to 7, or (ASYM) between the
# minimum and the maximum of a group. Heavy tails add a third.
ROUNDING = {
    "F64": 0.0,
    "F32": 0.0,
    "F16": 2.1e-4,
    "BF16": 1.7e-3,
    "Q8_0": 5.4e-3,
    "int8": 6.0e-3,
    "INT8": 8.8e-3,
    "Q6_K": 0.018,
    **dict.fromkeys(("FP8", "FP8_128", "FP8_64", "FP8_32"), 0.027),
    "Q5_K": 0.036,
    "Q5_1": 0.038,
    "Q5_0": 0.043,
    "Q4_K": 0.072,
    "IQ4_NL": 0.075,
    "IQ4_XS": 0.076,
    "Q4_1": 0.078,
    "Q4_0": 0.086,
    **dict.fromkeys(("NF4", "NF4_256", "NF4_SINGLE"), 0.092),
    "INT4_ASYM_32": 0.081,
    "INT4_ASYM_64": 0.091,
    "INT4_32": 0.097,
    "INT4_ASYM": 0.101,
    "INT4_64": 0.108,
    **dict.fromkeys(("INT4", "MXFP4"), 0.117),
    "IQ3_S": 0.14,
    "Q3_K": 0.15,
    "IQ3_XXS": 0.18,
    "IQ2_S": 0.25,
    **dict.fromkeys(("Q2_K", "IQ2_XS"), 0.30),
    "IQ2_XXS": 0.35,
    "IQ1_M": 0.45,
    "IQ1_S": 0.49,
    **dict.fromkeys(("TQ1_0", "TQ2_0"), 0.81),  # ternary: for models that were trained this way
}
TENSOR_TYPE_OF_DTYPE = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}  # by dtype
# Difference of two float32 programs in a part, relative to its numbers: 0.2e-6 to 1.5e-6 were measured between XLA and
# torch. The angles of RoPE are products with the position, so that their error grows by one rounding per position.
FLOAT32_ERROR = 1e-6
FLOAT32_PER_POSITION = 2.0**-24
# Largest KL divergence that rounding explains, in multiples of its square: 5 to 80 were measured, for the stories model here
# and for Llama 3 8B by llama.cpp (tools/perplexity/README.md: Q8_0 0.0014 nats, Q6_K 0.0057, Q4_K_M 0.031, Q4_0 0.072,
# Q3_K_M 0.10). At most one nat: beyond it rounding and mistakes cannot be distinguished.
KL_TIMES = 300.0
KL_LIMIT = 1.0


@dataclass(frozen=True)
class Origin:
    """The origin of a trace.

    Attributes:
      name: description of the model.
      config: configuration of the model.
      tensor_types: storage types of its weights: F32, BF16, Q4_K ...
      dtype: dtype of the computation.
      versions: versions of the programs, by name.
      quantized: if its matrices were quantized while reading: name of the quantization, and its RMS error relative to the
        weights' RMS.
    """

    name: str
    config: LlamaConfig
    tensor_types: tuple[str, ...]
    dtype: str
    versions: dict[str, str]
    quantized: tuple[str, float] | None = None


@dataclass(frozen=True)
class Rounding:
    """A rounding by which two equal models may differ: its name, and its size relative to weights and activations."""

    name: str
    weights: float
    activations: float

    def explains(self, added: np.ndarray, left: np.ndarray) -> np.ndarray:
        """Norm [T] of the difference that it explains, from the norms of the part's addition and of its output."""
        floor = FLOAT32_ERROR + FLOAT32_PER_POSITION * np.arange(len(added))
        weights, activations = np.maximum(self.weights, floor), np.maximum(self.activations, floor)
        return (weights + activations) * added + activations * left

    @property
    def kl(self) -> float:
        """The mean KL divergence that it explains, in nats."""
        return min(KL_LIMIT, KL_TIMES * (self.weights**2 + self.activations**2))


EXACT = Rounding("float32", 0.0, 0.0)


def origin_of(name: str, config: LlamaConfig, tensors: Sequence[TensorInfo], dtype: str, versions: dict[str, str]) -> Origin:
    """The origin of a checkpoint's numbers.

    Raises:
      CheckpointError: a tensor of a kind with unknown rounding error.
    """
    tensor_types = tuple(sorted({tensor.storage_type for tensor in tensors}))
    unknown = sorted(set(tensor_types) - ROUNDING.keys())
    if unknown:
        raise CheckpointError(
            f"{name} has tensors of kind {unknown[0]}, with unknown rounding error; known are {', '.join(ROUNDING)}"
        )
    return Origin(name, config, tensor_types, dtype, versions)


def rounding_between(a: Origin, b: Origin) -> Rounding:
    """The rounding by which two models made from the same weights may differ; `EXACT` if their numbers should be equal."""
    stored = [[tensor_type for tensor_type in origin.tensor_types if ROUNDING[tensor_type]] for origin in (a, b)]
    differing = stored[0] + stored[1] if stored[0] != stored[1] else []
    computed = [TENSOR_TYPE_OF_DTYPE[origin.dtype] for origin in (a, b)]
    if computed[0] != computed[1]:
        differing += computed
    of_weights = {tensor_type: ROUNDING[tensor_type] for tensor_type in differing}
    if a.quantized != b.quantized:
        of_weights |= dict(origin.quantized for origin in (a, b) if origin.quantized)
    of_activations = {tensor_type: ROUNDING[tensor_type] for tensor_type in computed}
    weights, activations = max(of_weights.values(), default=0.0), max(of_activations.values())
    if not weights and not activations:
        return EXACT
    everything = of_weights | of_activations
    return Rounding(max(everything, key=lambda tensor_type: everything[tensor_type]), weights, activations)


def rounding_of(quant_format: str, columns: int) -> float:
    """The relative RMS error of quantizing normally distributed weights while reading; `ROUNDING` has that of stored ones.

    Args:
      quant_format: a kind of `ops.weights`, or "keep": weights stay as stored, and the CPU kernel rounds activations to 8
        bits with one scale per 32, as Q8_0 rounds weights.
      columns: length of the longest rows, a multiple of the kind's block.
    """
    if quant_format == "keep":
        return ROUNDING["Q8_0"]
    form = with_fallback(base_format(quant_format), columns)
    assert form.encode is not None  # `formats.quantize_on_load.check_quantize` refuses the others
    weights = np.random.default_rng(0).standard_normal((16, columns), np.float32)
    error = np.asarray(form.decode(*form.encode(weights)), np.float32) - weights
    return max(float(np.sqrt(np.mean(error**2) / np.mean(weights**2))), ROUNDING["Q8_0"])


BLOCK_NUMBERS = 1 << 22  # numbers compared at a time


class MatrixError(NamedTuple):
    """How a quantized matrix differs from the original.

    Attributes:
      name: such as "embedding" or "attention.qkv".
      layer: index of the layer; None outside the layers.
      quant_format: such as "int8", or "q4_k and q6_k" if its parts have several kinds.
      bits: bits per number in memory, including scales.
      relative: RMS of the differences divided by the RMS of the original.
    """

    name: str
    layer: int | None
    quant_format: str
    bits: float
    relative: float


def matrix_errors(params: LlamaParams, reference: LlamaParams) -> tuple[MatrixError, ...]:
    """The error of every quantized matrix: first those outside the layers, then layer by layer.

    Args:
      params: quantized parameters; matrices with adapters are compared without them.
      reference: the same parameters in floats; or, to save memory, the plan of a checkpoint's parameters from
        `formats.build_params.plan`, which is then read in blocks of rows.
    """
    errors = []
    is_leaf = lambda leaf: is_weight(leaf) or isinstance(leaf, LoraWeight)
    leaves = jax.tree_util.tree_leaves_with_path(params, is_leaf=is_leaf)
    for (path, leaf), dense in zip(leaves, jax.tree.leaves(reference), strict=True):
        weights, row = leaf.base if isinstance(leaf, LoraWeight) else leaf, spec_at(path)
        for layer in range(weights.shape[0]) if row.in_blocks else [None]:
            weight = weights if layer is None else get_layer(weights, layer)
            if isinstance(weight, QuantizedWeight | JoinedWeight):
                exact = dense if layer is None else dense.layers[layer] if isinstance(dense, StackedSource) else dense[layer]
                name = row.path.removeprefix("blocks.")
                errors.append(MatrixError(name, layer, _format_name(weight), _bits(weight), _relative(weight, exact)))
    return tuple(sorted(errors, key=lambda error: -1 if error.layer is None else error.layer))


def _relative(weight: Any, dense: Any) -> float:
    step = max(1, BLOCK_NUMBERS // math.prod(weight.shape[1:]))
    error_total = total = 0.0
    for start in range(0, weight.shape[0], step):
        stop = min(start + step, weight.shape[0])
        exact = dense.rows(start, stop, np.dtype(np.float32)) if isinstance(dense, ArraySource) else dense[start:stop]
        exact = np.asarray(exact, np.float64)
        part = jax.tree.map(lambda plane, start=start, stop=stop: plane[start:stop], weight)
        error_total += float(np.square(np.asarray(part.to_dense(), np.float64) - exact).sum())
        total += float(np.square(exact).sum())
    return math.sqrt(error_total / total) if total else 0.0


def _format_name(weight: Any) -> str:
    if isinstance(weight, QuantizedWeight):
        return weight.quant_format
    parts = [part.quant_format if isinstance(part, QuantizedWeight) else str(part.dtype) for part in weight.parts]
    return " and ".join(dict.fromkeys(parts))


def _bits(weight: Any) -> float:
    total = sum(math.prod(plane.shape) * bits_of(plane.dtype) for plane in jax.tree.leaves(weight))
    return total / math.prod(weight.shape)
