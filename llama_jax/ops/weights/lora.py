"""A frozen matrix with a low-rank change that is learned (Hu et al. 2021, LoRA): W x + s B (A x).

With a magnitude (Liu et al. 2024, DoRA) each row of W + s B A is then made as long as that says.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from llama_jax.ops.layers import PRODUCT, project


class LowRank(struct.PyTreeNode):
    """Two thin matrices whose product changes a matrix [*out, D] by one of rank R at most.

    Attributes:
      a: [R, D]. Of queries, keys and values, which are one matrix [K, G + 2, H, D], [3, R, D]: each has its own.
      b: [*out, R].
      magnitude: [*out], the length of each row of the changed matrix, 0 for rows that keep their own; None without DoRA.

    Of all layers they have a leading axis L.
    """

    a: Any
    b: Any
    magnitude: Any = None

    @property
    def ndim(self) -> int:
        """The number of axes of the matrix."""
        return self.b.ndim

    def change(self, x: jax.Array, scale: float, out_dtype: Any) -> jax.Array:
        """[..., D] through both, times `scale`: [..., *out]."""
        return self.widened(scale * self.narrowed(x), out_dtype)

    def narrowed(self, x: jax.Array) -> jax.Array:
        """[..., D] through A: [..., R]; of queries, keys and values [..., 3, R]."""
        return project(x, self.a)

    def widened(self, thin: jax.Array, out_dtype: Any) -> jax.Array:
        """What `narrowed` gave through B: [..., *out]."""
        if self.a.ndim == 2:
            return project(thin, self.b, out_dtype=out_dtype)
        parts = enumerate(_rows_of_parts(self.b))
        return jnp.concatenate([project(thin[..., i, :], b, out_dtype=out_dtype) for i, b in parts], axis=-2)

    def product(self) -> jax.Array:
        """The change as a matrix [*out, D], for merging; never for a matmul."""
        if self.a.ndim == 2:
            return jnp.tensordot(self.b, self.a, axes=1, precision="highest")
        parts = (
            jnp.tensordot(b, a, axes=1, precision="highest") for a, b in zip(self.a, _rows_of_parts(self.b), strict=True)
        )
        return jnp.concatenate(list(parts), axis=-3)


def _rows_of_parts(b: jax.Array) -> list[jax.Array]:
    """[K, G + 2, H, R] as those of the queries, of the key and of the value."""
    groups = b.shape[-3] - 2
    return jnp.split(b, [groups, groups + 1], axis=-3)


class LowRankWeight(struct.PyTreeNode):
    """A frozen matrix and its low-rank changes: base of `LoraWeight` and `MultiLoraWeight`.

    Attributes:
      base: the matrix [*out, D], an array or a quantized weight.
      low_rank: the two thin matrices of the change, or of several changes.
      factor: [*out], or [*out, n] of n changes: what a magnitude makes of each row, where it was computed once
        (`with_dora_scale`). Nothing then changes it, and `low_rank` has no magnitude any more. None without magnitudes.
    """

    base: Any
    low_rank: LowRank
    factor: Any = None

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the matrix."""
        return self.base.shape

    @property
    def ndim(self) -> int:
        """The number of axes of the matrix."""
        return self.base.ndim

    @property
    def dtype(self) -> np.dtype:
        """The dtype of the matrix."""
        return self.base.dtype

    @property
    def sharding(self) -> Any:
        """The sharding of the matrix."""
        return self.base.sharding


class LoraWeight(LowRankWeight, kw_only=True):
    """A matrix W with a low-rank change: W x + s B (A x).

    The two are multiplied apart and never added up: W + s B A would be as large as W, would have to be made at every step,
    and in 16 or fewer bits would lose most of the change.

    Attributes:
      scale: s.
    """

    scale: float = struct.field(pytree_node=False)

    def project(self, x: jax.Array, out_dtype: Any) -> jax.Array:
        """See `layers.project`."""
        product = project(x, self.base, out_dtype=out_dtype) + self.low_rank.change(x, self.scale, out_dtype)
        factor = self._factor()
        if factor is not None:
            product = (product.astype(jnp.promote_types(product.dtype, factor.dtype)) * factor).astype(out_dtype)
        # Named once more, so that with `remat="dots"` the sum is saved and not each of its terms.
        return checkpoint_name(product, PRODUCT)

    def decoded(self) -> jax.Array:
        """W + s B A of one layer, its rows as long as a magnitude says; for files and comparisons, never for a matmul.

        It is added in float32 at least and rounded once to the dtype of W.
        """
        changed, factor = self._changed(), self._factor()
        return (changed if factor is None else changed * factor[..., None]).astype(self.base.dtype)

    def with_dora_scale(self) -> LoraWeight:
        """The same of one layer with what its magnitude makes of each row computed: for inference, where it stays."""
        return self.replace(low_rank=self.low_rank.replace(magnitude=None), factor=self._factor())

    def _changed(self) -> jax.Array:
        """W + s B A in float32 at least."""
        base = self.base.decoded() if hasattr(self.base, "decoded") else self.base
        wide = jnp.promote_types(base.dtype, jnp.float32)
        change = self.low_rank.replace(a=self.low_rank.a.astype(wide), b=self.low_rank.b.astype(wide)).product()
        return jnp.asarray(base, wide) + self.scale * change

    def _factor(self) -> jax.Array | None:
        """What each row is multiplied by: its magnitude over its length, [*out] in float32 at least; None without any.

        The length is taken for a constant where this is differentiated (Liu et al. 2024, section 4.3), as in PEFT.
        """
        magnitude = self.low_rank.magnitude
        if magnitude is None:
            return self.factor
        lengths = lax.stop_gradient(jnp.linalg.norm(self._changed(), axis=-1))
        found = jnp.where(magnitude == 0, 1, magnitude / jnp.where(lengths == 0, 1, lengths))
        return found


def row_lengths(matrix: Any) -> jax.Array:
    """The Euclidean length of each row of a matrix [*out, D], an array or a quantized weight: [*out] in float32 at least."""
    dense = matrix.decoded() if hasattr(matrix, "decoded") else jnp.asarray(matrix)
    return jnp.linalg.norm(dense.astype(jnp.promote_types(dense.dtype, jnp.float32)), axis=-1)
