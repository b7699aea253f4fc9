"""A frozen matrix with a learned low-rank update (LoRA: Hu et al. 2021): W x + s B (A x).

With a magnitude (DoRA: Liu et al. 2024) each row of W + s B A is then scaled to a learned length.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float

from llama_jax.ops.layers import MATMUL_OUTPUT, Weight, dense, project
from llama_jax.ops.platform import KernelOptions


class LowRank(struct.PyTreeNode):
    """Two thin matrices A and B; their product is an update of a matrix [*out, D], of rank at most R.

    Attributes:
      a: [R, D]; or [3, R, D] for the fused matrix of queries, keys and values [K, G + 2, H, D]: one A for each.
      b: [*out, R].
      magnitude: [*out], the length of each row of the updated matrix, 0 for rows that keep theirs; None without DoRA.

    For all layers, the arrays have a leading axis L.
    """

    a: Any
    b: Any
    magnitude: Any = None

    @property
    def ndim(self) -> int:
        """The number of axes of the matrix."""
        return self.b.ndim

    def change(
        self, x: Float[Array, "*batch D"], scale: float, out_dtype: Any, kernels: KernelOptions
    ) -> Float[Array, " ..."]:
        """scale * B (A x): [..., *out]."""
        return self.widened(scale * self.narrowed(x, kernels), out_dtype, kernels)

    def narrowed(self, x: Float[Array, "*batch D"], kernels: KernelOptions) -> Float[Array, " ..."]:
        """A x: [..., R]; for queries, keys and values [..., 3, R]."""
        return project(x, self.a, kernels=kernels)

    def widened(self, thin: Float[Array, "*batch R"], out_dtype: Any, kernels: KernelOptions) -> Float[Array, " ..."]:
        """B times the result of `narrowed`: [..., *out]."""
        if self.a.ndim == 2:
            return project(thin, self.b, out_dtype=out_dtype, kernels=kernels)
        parts = enumerate(_rows_of_parts(self.b))
        return jnp.concatenate(
            [project(thin[..., i, :], b, out_dtype=out_dtype, kernels=kernels) for i, b in parts], axis=-2
        )

    def product(self) -> Float[Array, " ..."]:
        """B A as a matrix [*out, D], for merging; not used in matmuls."""
        if self.a.ndim == 2:
            return jnp.tensordot(self.b, self.a, axes=1, precision="highest")
        parts = (
            jnp.tensordot(b, a, axes=1, precision="highest") for a, b in zip(self.a, _rows_of_parts(self.b), strict=True)
        )
        return jnp.concatenate(list(parts), axis=-3)


def _rows_of_parts(b: jax.Array) -> list[jax.Array]:
    """[K, G + 2, H, R] split into the parts of the queries, of the key and of the value."""
    groups = b.shape[-3] - 2
    return jnp.split(b, [groups, groups + 1], axis=-3)


class LowRankWeight(Weight):
    """A frozen matrix and its low-rank updates: base class of `LoraWeight` and `MultiLoraWeight`.

    Attributes:
      base: the matrix [*out, D], an array or a quantized weight.
      low_rank: the two thin matrices of the update, or of several updates.
      factor: [*out], or [*out, n] for n updates: DoRA's factor of each row if precomputed by `with_dora_scale` (`low_rank`
        then has no magnitude), else None.
    """

    base: Any
    low_rank: LowRank
    factor: Any = None

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the matrix."""
        return self.base.shape

    @property
    def dtype(self) -> np.dtype:
        """The dtype of the matrix."""
        return self.base.dtype

    @property
    def sharding(self) -> Any:
        """The sharding of the matrix."""
        return self.base.sharding


class LoraWeight(LowRankWeight, kw_only=True):
    """A matrix W with a low-rank update: W x + s B (A x).

    W and the update are multiplied separately: W + s B A would be as large as W, would be computed at every step, and in 16
    or fewer bits would lose most of the update.

    Attributes:
      scale: s.
    """

    scale: float = struct.field(pytree_node=False)

    def project(self, x: Float[Array, "*batch D"], out_dtype: Any, kernels: KernelOptions) -> Float[Array, " ..."]:
        """See `ops.layers.project`."""
        product = project(x, self.base, out_dtype=out_dtype, kernels=kernels) + self.low_rank.change(
            x, self.scale, out_dtype, kernels
        )
        factor = self._factor()
        if factor is not None:
            product = (product.astype(jnp.promote_types(product.dtype, factor.dtype)) * factor).astype(out_dtype)
        # Named again, so that `remat="dots"` saves the sum instead of its terms.
        return checkpoint_name(product, MATMUL_OUTPUT)

    def to_dense(self) -> Float[Array, " ..."]:
        """W + s B A of one layer, with DoRA's factors; for files and comparisons, not for matmuls.

        Computed in float32 at least and rounded once to the dtype of W.
        """
        changed, factor = self._changed(), self._factor()
        return (changed if factor is None else changed * factor[..., None]).astype(self.base.dtype)

    def with_dora_scale(self) -> LoraWeight:
        """The same weight (of one layer) with DoRA's factors precomputed, for inference."""
        return self.replace(low_rank=self.low_rank.replace(magnitude=None), factor=self._factor())

    def _changed(self) -> jax.Array:
        """W + s B A in float32 at least."""
        base = dense(self.base)
        wide = jnp.promote_types(base.dtype, jnp.float32)
        change = self.low_rank.replace(a=self.low_rank.a.astype(wide), b=self.low_rank.b.astype(wide)).product()
        return jnp.asarray(base, wide) + self.scale * change

    def _factor(self) -> jax.Array | None:
        """DoRA's factor of each row, magnitude / length: [*out] in float32 at least; None without DoRA.

        The gradient treats the length as a constant (Liu et al. 2024, section 4.3), as in PEFT.
        """
        magnitude = self.low_rank.magnitude
        if magnitude is None:
            return self.factor
        lengths = lax.stop_gradient(jnp.linalg.norm(self._changed(), axis=-1))
        found = jnp.where(magnitude == 0, 1, magnitude / jnp.where(lengths == 0, 1, lengths))
        return found


def row_lengths(matrix: Any) -> Float[Array, " ..."]:
    """The Euclidean length of each row of a matrix [*out, D], an array or a quantized weight: [*out] in float32 at least."""
    array = jnp.asarray(dense(matrix))
    return jnp.linalg.norm(array.astype(jnp.promote_types(array.dtype, jnp.float32)), axis=-1)
