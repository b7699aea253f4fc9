"""What a forward pass keeps for the backward pass."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax


class Bits(struct.PyTreeNode):
    """An array of 16-bit floating-point numbers as whole numbers of the same bits."""

    bits: jax.Array
    dtype: Any = struct.field(pytree_node=False)


def keep(tree: Any) -> Any:
    """The same tree with 16-bit floating-point arrays as `Bits`, to be undone by `restore`; both cost nothing.

    A scan over layers keeps the arrays of all layers stacked and slices them in the backward pass. XLA for CPU slices no
    bfloat16: it makes a float32 copy of the whole stack, which is three times the memory, and rounds every slice back.
    """

    def packed(x: jax.Array) -> Any:
        short = jnp.issubdtype(x.dtype, jnp.floating) and x.dtype.itemsize == 2
        return Bits(lax.bitcast_convert_type(x, jnp.uint16), x.dtype) if short else x

    return jax.tree.map(packed, tree)


def restore(tree: Any) -> Any:
    """What was given to `keep`."""

    def unpacked(x: Any) -> jax.Array:
        return lax.bitcast_convert_type(x.bits, x.dtype) if isinstance(x, Bits) else x

    return jax.tree.map(unpacked, tree, is_leaf=lambda x: isinstance(x, Bits))
