"""The one matrix product of the model."""

from __future__ import annotations

import math
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax


def linear(x: jax.Array, weight: jax.Array, *, out_dtype: jnp.dtype | None = None) -> jax.Array:
    """Project the last axis of `x` onto the rows of `weight`, accumulating in float32.

    Args:
      x: [..., D].
      weight: [*out, D], one row per output feature. Checkpoints store it so, and with one token at a time both
        operands are then read along their contiguous axis.
      out_dtype: dtype of the result, by default that of `x`.

    Returns:
      [..., *out].
    """
    features = weight.shape[-1]
    rows, outputs = math.prod(x.shape[:-1]), math.prod(weight.shape[:-1])
    # Both operands go in as matrices: given a weight of more axes, XLA for CPU transposes a copy of it at every call.
    matrices = x.astype(weight.dtype).reshape(rows, features), weight.reshape(outputs, features)
    if weight.dtype.itemsize > 2:
        product = _product(*matrices)
    elif rows > 1:
        product = _short_product(*matrices)
    else:
        product = lax.platform_dependent(*matrices, cpu=_product_of_one_row, default=_product)
    return product.reshape(x.shape[:-1] + weight.shape[:-1]).astype(out_dtype or x.dtype)


def _product(x: jax.Array, weight: jax.Array) -> jax.Array:
    """[rows, features] times [outputs, features], contracted on the last axis of both."""
    return lax.dot_general(
        x,
        weight,
        (((1,), (1,)), ((), ())),
        # Without it XLA for CPU converts whole bfloat16 weights to float32 before multiplying.
        preferred_element_type=jnp.promote_types(weight.dtype, jnp.float32),
    )


def _product_of_one_row(x: jax.Array, weight: jax.Array) -> jax.Array:
    """The same for one row of 16-bit numbers on a CPU, ten to twenty times faster.

    XLA for CPU has kernels for 16-bit products from two rows on; for one row it converts the whole weight to float32.
    """
    return _product(jnp.pad(x, ((0, 1), (0, 0))), weight)[:1]


@jax.custom_vjp
def _short_product(x: jax.Array, weight: jax.Array) -> jax.Array:
    """The same for 16-bit numbers, of which the gradient's products are as well: by itself JAX makes those of float32."""
    return _product(x, weight)


def _short_gradients(operands: tuple[jax.Array, jax.Array], of_product: jax.Array) -> tuple[jax.Array, jax.Array]:
    x, weight = operands
    of_product = of_product.astype(weight.dtype)
    of_x = lax.dot_general(of_product, weight, (((1,), (0,)), ((), ())), preferred_element_type=jnp.float32)
    return of_x.astype(x.dtype), sum_of_outer(of_product, x).astype(weight.dtype)


_short_product.defvjp(lambda x, weight: (_product(x, weight), (x, weight)), _short_gradients)


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
    """The same for 16-bit numbers on a CPU, two to three times faster; `b` should be the smaller.

    XLA for CPU has no kernel for 16-bit products that contract the first axis of both, and converts both to float32. The
    transpose that makes it the last one of `b` is merged into the product again, unless something stands between the two:
    a row of zeros.
    """
    batch = tuple(range(a.ndim - 2))
    turned = jnp.pad(b.swapaxes(-1, -2), [*[(0, 0)] * len(batch), (0, 1), (0, 0)])
    dimensions = (((b.ndim - 1,), (a.ndim - 2,)), (batch, batch))
    product = lax.dot_general(turned, a, dimensions, preferred_element_type=out_dtype)
    return product[..., :-1, :].swapaxes(-1, -2)
