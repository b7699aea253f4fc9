"""The one matrix product of the model."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from llama_jax.ops.keeping import keep, restore


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
    if x.dtype.itemsize > 2:
        product = _product(x, weight)
    elif math.prod(x.shape[:-1]) > 1:
        product = _short_product(x, weight)
    else:
        product = lax.platform_dependent(x, weight, cpu=_product_of_one_row, default=_product)
    return product.astype(out_dtype or x.dtype)


def _product(x: jax.Array, weight: jax.Array) -> jax.Array:
    """[..., D] times [*out, D], contracted on the last axis of both: [..., *out], in float32 at least."""
    # Both operands go in as matrices: given a weight of more axes, XLA for CPU transposes a copy of it at every call.
    rows, outputs = _matrix(x), _matrix(weight.astype(x.dtype))
    product = lax.dot_general(
        rows,
        outputs,
        (((1,), (1,)), ((), ())),
        # Without it XLA for CPU converts whole bfloat16 weights to float32 before multiplying.
        preferred_element_type=jnp.promote_types(x.dtype, jnp.float32),
    )
    return product.reshape(x.shape[:-1] + weight.shape[:-1])


def _matrix(x: jax.Array) -> jax.Array:
    return x.reshape(math.prod(x.shape[:-1]), x.shape[-1])


def _product_of_one_row(x: jax.Array, weight: jax.Array) -> jax.Array:
    """The same for one row of 16-bit numbers on a CPU, ten to twenty times faster.

    XLA for CPU has kernels for 16-bit products from two rows on; for one row it converts the whole weight to float32.
    """
    row = _matrix(x)
    product = _product(jnp.pad(row, ((0, 1), (0, 0))), weight)[:1]
    return product.reshape(x.shape[:-1] + weight.shape[:-1])


@jax.custom_vjp
def _short_product(x: jax.Array, weight: jax.Array) -> jax.Array:
    """The same for 16-bit numbers, of which the gradient's products are as well: by itself JAX makes those of float32.

    The weight is cast in here, so that what a scan over layers keeps of it for the backward pass is its own input and
    not a copy.
    """
    return _product(x, weight)


def _short_gradients(kept: Any, of_product: jax.Array) -> tuple[jax.Array, jax.Array]:
    x, weight = restore(kept[0]), kept[1]
    rows, outputs = _matrix(x), _matrix(weight.astype(x.dtype))
    of_rows = of_product.astype(x.dtype).reshape(len(rows), len(outputs))
    of_x = lax.dot_general(of_rows, outputs, (((1,), (0,)), ((), ())), preferred_element_type=jnp.float32)
    of_weight = sum_of_outer(of_rows, rows)
    return of_x.reshape(x.shape).astype(x.dtype), of_weight.reshape(weight.shape).astype(weight.dtype)


_short_product.defvjp(lambda x, weight: (_product(x, weight), (keep(x), weight)), _short_gradients)


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
