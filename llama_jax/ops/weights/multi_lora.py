"""A frozen matrix with several low-rank updates; each row of a batch uses one or none."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float

from llama_jax.errors import ConfigError
from llama_jax.ops.layers import MATMUL_OUTPUT, project
from llama_jax.ops.platform import KernelOptions
from llama_jax.ops.weights.lora import LoraWeight, LowRank, LowRankWeight

MAX_DENSE_ADAPTERS_PER_ROW = 2  # with at most this many adapters per row of a batch, the whole table is multiplied


class MultiLoraWeight(LowRankWeight, kw_only=True):
    """A matrix with n adapters. The adapter of each row is in an array, so that all choices share one program.

    The table is a single pair of rank n R: adapter i has rows i R to (i + 1) R of A, and the same columns of B. With few
    adapters per row of the batch, all of them are multiplied, and the values of other adapters are set to zero between A and
    B: two plain matmuls, which read the table once, in place. With many, each row gathers its own slices, as in Punica
    (Chen et al. 2023), which copies the slices but not the table. Both have static shapes.

    Attributes:
      low_rank: of rank n R, in the dtype of the computation, because a cast would copy it at every step.
      scales: s of each adapter.
      rows: int32[B], the adapter of each row of the batch, negative for no adapter; None until it is set by
        `model.multi_lora.choose_adapters`.
    """

    scales: tuple[float, ...] = struct.field(pytree_node=False)
    rows: Any = None

    @property
    def rank(self) -> int:
        """R of each adapter; adapters of lower rank are padded with zeros."""
        return self.low_rank.b.shape[-1] // len(self.scales)

    def project(self, x: Float[Array, "B *batch D"], out_dtype: Any, kernels: KernelOptions) -> Float[Array, "B ..."]:
        """See `ops.layers.project`; the first axis of `x` is the batch.

        Raises:
          ConfigError: `rows` is not set, or has the wrong length.
        """
        if self.rows is None or self.rows.shape != x.shape[:1]:
            said = "no adapters are set" if self.rows is None else f"the adapters set have shape {list(self.rows.shape)}"
            raise ConfigError(f"{said}, but each of {x.shape[0]} rows of the batch needs one; set them with choose_adapters")
        change = (
            self._change_by_all if len(self.scales) <= MAX_DENSE_ADAPTERS_PER_ROW * len(self.rows) else self._change_by_row
        )
        product = project(x, self.base, out_dtype=out_dtype, kernels=kernels) + change(x, out_dtype, kernels)
        if self.factor is not None:
            factor = jnp.moveaxis(jnp.take(self.factor, jnp.maximum(self.rows, 0), axis=-1), -1, 0)  # [B, *out]
            factor = jnp.where(self.rows.reshape(-1, *[1] * (factor.ndim - 1)) < 0, 1, factor)
            factor = factor.reshape(len(factor), *[1] * (x.ndim - 2), *factor.shape[1:])
            product = (product.astype(jnp.promote_types(product.dtype, factor.dtype)) * factor).astype(out_dtype)
        return checkpoint_name(product, MATMUL_OUTPUT)

    def of_adapter(self, number: int) -> LoraWeight:
        """The matrix with only one of the adapters."""
        columns = slice(number * self.rank, (number + 1) * self.rank)
        magnitude = None if self.low_rank.magnitude is None else self.low_rank.magnitude[..., number]
        pair = LowRank(self.low_rank.a[..., columns, :], self.low_rank.b[..., columns], magnitude)
        return LoraWeight(self.base, pair, scale=self.scales[number])

    def with_dora_scale(self) -> MultiLoraWeight:
        """`LoraWeight.with_dora_scale` for all adapters."""
        factors = [self.of_adapter(number).with_dora_scale().factor for number in range(len(self.scales))]
        return self.replace(low_rank=self.low_rank.replace(magnitude=None), factor=jnp.stack(factors, axis=-1))

    def _change_by_all(self, x: jax.Array, out_dtype: Any, kernels: KernelOptions) -> jax.Array:
        """[B, ..., D] through the whole table: [B, ..., *out]."""
        uses = self.rows[:, None] == jnp.arange(len(self.scales))
        counts = jnp.repeat(jnp.where(uses, jnp.asarray(self.scales, x.dtype), 0), self.rank, axis=1)  # [B, n R]
        thin = self.low_rank.narrowed(x, kernels)
        counts = counts.reshape(len(counts), *[1] * (thin.ndim - 2), -1)
        # Selected, not only multiplied by zero: an overflow in another adapter must not reach this row.
        return self.low_rank.widened(jnp.where(counts == 0, 0, counts * thin), out_dtype, kernels)

    def _change_by_row(self, x: jax.Array, out_dtype: Any, kernels: KernelOptions) -> jax.Array:
        """The same, each row through its own slices of the table."""

        def change_of_row(x: jax.Array, row: jax.Array) -> jax.Array:
            first = jnp.maximum(row, 0)
            begin = first * self.rank
            pair = LowRank(
                lax.dynamic_slice_in_dim(self.low_rank.a, begin, self.rank, axis=self.low_rank.a.ndim - 2),
                lax.dynamic_slice_in_dim(self.low_rank.b, begin, self.rank, axis=self.low_rank.b.ndim - 1),
            )
            thin = jnp.asarray(self.scales, x.dtype)[first] * pair.narrowed(x, kernels)
            return pair.widened(jnp.where(row < 0, 0, thin), out_dtype, kernels)

        if len(x) == 1:  # a gather of one slice copies once more than a slice does
            return change_of_row(x[0], self.rows[0])[None]
        return jax.vmap(change_of_row)(x, self.rows)
