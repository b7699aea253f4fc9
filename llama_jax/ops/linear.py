"""The one matrix product of the model."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from llama_jax.ops.keeping import keep, restore

WEIGHT = "weight"  # the name of `matrix_of` a weight


def linear(x: jax.Array, weight: jax.Array, *, out_dtype: jnp.dtype | None = None) -> jax.Array:
    """Project the last axis of `x` onto the rows of `weight`, accumulating in float32.

    Args:
      x: [..., D].
      weight: [*out, D], one row per output feature, cast to the dtype of `x`: training keeps it in float32 and computes in
        bfloat16. Checkpoints store it so, and with one token at a time both operands are then read along their
        contiguous axis.
      out_dtype: dtype of the result, by default that of `x`.

    Returns:
      [..., *out].
    """
    rows = math.prod(x.shape[:-1])
    if rows == 1 and x.dtype.itemsize == 2:
        product = lax.platform_dependent(x, weight, cpu=_product_of_one_row, default=_product)
    else:
        product = _product(x, weight)
    return product.astype(out_dtype or x.dtype)


@jax.custom_vjp
def _product(x: jax.Array, weight: jax.Array) -> jax.Array:
    """[..., D] times [*out, D], contracted on the last axis of both: [..., *out], in float32 at least.

    By itself JAX makes the gradient's products of float32 where those of the value are of 16-bit numbers.
    """
    return _product_and_kept(x, weight)[0]


def _product_and_kept(x: jax.Array, weight: jax.Array) -> tuple[jax.Array, Any]:
    matrix = matrix_of(weight, x.dtype)
    product = rows_by(x, matrix).reshape(x.shape[:-1] + weight.shape[:-1])
    return product, (keep(x), matrix, Like(weight.shape, weight.dtype))


def _gradients(kept: Any, of_product: jax.Array) -> tuple[jax.Array, jax.Array]:
    x, matrix, weight = restore(kept)
    of_rows = of_product.astype(x.dtype).reshape(-1, len(matrix))
    return rows_back(of_rows, matrix).reshape(x.shape).astype(x.dtype), weight.filled(sum_of_outer(of_rows, flat(x)))


_product.defvjp(_product_and_kept, _gradients)


class Like(struct.PyTreeNode):
    """Shape and dtype of an array, of which the backward pass needs no more."""

    shape: tuple[int, ...] = struct.field(pytree_node=False)
    dtype: Any = struct.field(pytree_node=False)

    def filled(self, values: jax.Array) -> jax.Array:
        """`values`, as many, in that shape and dtype."""
        return values.reshape(self.shape).astype(self.dtype)


def matrix_of(weight: jax.Array, dtype: jax.typing.DTypeLike) -> jax.Array:
    """A weight [*out, D] as a matrix [outputs, D] in the dtype of the computation: what both passes multiply with.

    Given a weight of more axes, XLA for CPU transposes a copy of it at every product. It goes by a name, so that training
    can make it again in the backward pass instead of keeping a copy for every layer. All products of a pass must take the
    same matrix: where devices hold parts of a weight, XLA gathers it once for each one that it is given.
    """
    return checkpoint_name(flat(weight.astype(dtype)), WEIGHT)


def flat(x: jax.Array) -> jax.Array:
    """[..., D] as a matrix [rows, D]."""
    return x.reshape(math.prod(x.shape[:-1]), x.shape[-1])


def rows_by(x: jax.Array, matrix: jax.Array) -> jax.Array:
    """[..., D] times [outputs, D], contracted on the last axis of both: [rows, outputs], in float32 at least."""
    # Without the type XLA for CPU converts whole bfloat16 weights to float32 before multiplying.
    wide = jnp.promote_types(x.dtype, jnp.float32)
    return lax.dot_general(flat(x), matrix, (((1,), (1,)), ((), ())), preferred_element_type=wide)


def rows_back(of_rows: jax.Array, matrix: jax.Array) -> jax.Array:
    """The gradient [rows, D] of `rows_by` with respect to its rows, from that of its result [rows, outputs]."""
    wide = jnp.promote_types(of_rows.dtype, jnp.float32)
    return lax.dot_general(of_rows, matrix, (((1,), (0,)), ((), ())), preferred_element_type=wide)


def _product_of_one_row(x: jax.Array, weight: jax.Array) -> jax.Array:
    """The same for one row of 16-bit numbers on a CPU, ten to twenty times faster.

    XLA for CPU has kernels for 16-bit products from two rows on; for one row it converts the whole weight to float32.
    """
    product = _product(jnp.pad(flat(x), ((0, 1), (0, 0))), weight)[:1]
    return product.reshape(x.shape[:-1] + weight.shape[:-1])


def sum_of_outer(a: jax.Array, b: jax.Array, out_dtype: jax.typing.DTypeLike | None = None) -> jax.Array:
    """The sum of the outer products of the rows of `a` and `b`: what a weight's gradient is.

    Args:
      a: [*batch, rows, A].
      b: [*batch, rows, B].
      out_dtype: of the sum and the result, by default float32 at least.

    Returns:
      [*batch, A, B].
    """
    wide = out_dtype or jnp.promote_types(a.dtype, jnp.float32)
    plain, padded = partial(_outer, out_dtype=wide), partial(_outer_padded, out_dtype=wide)
    if a.dtype.itemsize > 2:
        return plain(a, b)
    return lax.platform_dependent(a, b, cpu=padded, default=plain)


def _outer(a: jax.Array, b: jax.Array, *, out_dtype: jax.typing.DTypeLike) -> jax.Array:
    batch, rows = tuple(range(a.ndim - 2)), (a.ndim - 2,)
    return lax.dot_general(a, b, ((rows, rows), (batch, batch)), preferred_element_type=out_dtype)


def _outer_padded(a: jax.Array, b: jax.Array, *, out_dtype: jax.typing.DTypeLike) -> jax.Array:
    """The same for 16-bit numbers on a CPU, two to three times faster.

    XLA for CPU has no kernel for 16-bit products that contract the first axis of both, and converts both to float32. The
    transpose that makes it the last one of the smaller is merged into the product again, unless something stands between
    the two: a row of zeros.
    """
    if a.shape[-1] > b.shape[-1]:
        return _outer_padded(b, a, out_dtype=out_dtype).swapaxes(-1, -2)
    batch = tuple(range(a.ndim - 2))
    turned = jnp.pad(a.swapaxes(-1, -2), [*[(0, 0)] * len(batch), (0, 1), (0, 0)])
    dimensions = (((a.ndim - 1,), (a.ndim - 2,)), (batch, batch))
    return lax.dot_general(turned, b, dimensions, preferred_element_type=out_dtype)[..., :-1, :]
