"""What one layer's queries may read, as it lies in memory."""

from __future__ import annotations

from typing import Any

import jax
from flax import struct
from jax import lax

from llama_jax.ops.quantized import Quantized, over_rows


class View(struct.PyTreeNode):
    """Keys and values where they are kept, so that a kernel can read them there.

    Attributes:
      keys, values: [B, K, S, H], arrays or `Quantized`; or those of all layers [L, B, K, S, H], with `layer`.
      layer: int32[], which of the stacked layers; None where they are of one.
      lengths: int32[B]: slots [0, lengths) of each row hold its keys in order of position. None where that is not so, in a
        ring, or where all do, in fresh rows.
    """

    keys: Any
    values: Any
    layer: Any = None
    lengths: Any = None

    @classmethod
    def of(cls, keys: jax.Array | Quantized, values: jax.Array | Quantized) -> View:
        """Of fresh keys and values [B, K, T, H], which no cache holds."""
        return cls(keys, values)

    def read(self) -> tuple[Any, Any]:
        """Keys and values [B, K, S, H] of the layer, in the form in which they are kept."""
        if self.layer is None:
            return self.keys, self.values

        def of_layer(x: jax.Array) -> jax.Array:
            return lax.dynamic_index_in_dim(x, self.layer, keepdims=False)

        return over_rows(of_layer, self.keys), over_rows(of_layer, self.values)
