"""The error of each quantised matrix of a model."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax
import numpy as np

from llama_jax.formats.device_fill import ArrayParts, StackParts
from llama_jax.model.params import Llama, row_at
from llama_jax.model.trees import is_weight
from llama_jax.ops.weights import AdaptedWeight, JoinedWeight, QuantizedWeight, layer_of
from llama_jax.ops.weights.planes import bits_of

RUN = 1 << 22  # numbers that are compared at a time


class MatrixError(NamedTuple):
    """How a quantised matrix differs from the original.

    Attributes:
      name: "embedding", "attention.qkv".
      layer: None for what stands outside of the layers.
      kind: "int8"; of parts in several kinds "q4_k and q6_k".
      bits: in memory for each number, factors included.
      relative: root mean square of the differences over that of the numbers.
    """

    name: str
    layer: int | None
    kind: str
    bits: float
    relative: float


def matrix_errors(params: Llama, reference: Llama) -> tuple[MatrixError, ...]:
    """The error of every quantised matrix: of those outside of the layers, and then layer by layer.

    Args:
      params: adapted matrices are compared without their adapters.
      reference: the same in floats; or, so that it need not be in memory, the plan of a checkpoint's parameters from
        `checkpoints.assemble.plan`, which is then read in runs of rows.
    """
    found = []
    is_leaf = lambda leaf: is_weight(leaf) or isinstance(leaf, AdaptedWeight)
    given = jax.tree_util.tree_leaves_with_path(params, is_leaf=is_leaf)
    for (path, leaf), dense in zip(given, jax.tree.leaves(reference), strict=True):
        weights, row = leaf.base if isinstance(leaf, AdaptedWeight) else leaf, row_at(path)
        for layer in range(weights.shape[0]) if row.in_blocks else [None]:
            weight = weights if layer is None else layer_of(weights, layer)
            if isinstance(weight, QuantizedWeight | JoinedWeight):
                exact = dense if layer is None else dense.layers[layer] if isinstance(dense, StackParts) else dense[layer]
                name = row.path.removeprefix("blocks.")
                found.append(MatrixError(name, layer, _kind(weight), _bits(weight), _relative(weight, exact)))
    return tuple(sorted(found, key=lambda error: -1 if error.layer is None else error.layer))


def _relative(weight: Any, dense: Any) -> float:
    step = max(1, RUN // math.prod(weight.shape[1:]))
    wrong = whole = 0.0
    for start in range(0, weight.shape[0], step):
        stop = min(start + step, weight.shape[0])
        exact = dense.rows(start, stop, np.dtype(np.float32)) if isinstance(dense, ArrayParts) else dense[start:stop]
        exact = np.asarray(exact, np.float64)
        kept = jax.tree.map(lambda plane, start=start, stop=stop: plane[start:stop], weight)
        wrong += float(np.square(np.asarray(kept.decoded(), np.float64) - exact).sum())
        whole += float(np.square(exact).sum())
    return math.sqrt(wrong / whole) if whole else 0.0


def _kind(weight: Any) -> str:
    if isinstance(weight, QuantizedWeight):
        return weight.kind
    parts = [part.kind if isinstance(part, QuantizedWeight) else str(part.dtype) for part in weight.parts]
    return " and ".join(dict.fromkeys(parts))


def _bits(weight: Any) -> float:
    total = sum(math.prod(plane.shape) * bits_of(plane.dtype) for plane in jax.tree.leaves(weight))
    return total / math.prod(weight.shape)
