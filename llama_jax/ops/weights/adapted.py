"""A frozen matrix with a low-rank change that is learnt (Hu et al. 2021, LoRA): W x + s B (A x)."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax.ad_checkpoint import checkpoint_name

from llama_jax.ops.layers import PRODUCT, project


class LowRank(struct.PyTreeNode):
    """Two thin matrices whose product changes a matrix [*out, D] by one of rank R at most.

    Attributes:
      a: [R, D]. Of queries, keys and values, which are one matrix [K, G + 2, H, D], [3, R, D]: each has its own.
      b: [*out, R].

    Stacked layers have a leading axis L on both.
    """

    a: Any
    b: Any

    @property
    def ndim(self) -> int:
        """Of the matrix."""
        return self.b.ndim

    def change(self, x: jax.Array, scale: float, out_dtype: Any) -> jax.Array:
        """[..., D] through both, times `scale`: [..., *out]."""
        thin = scale * project(x, self.a)
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


class AdaptedWeight(struct.PyTreeNode):
    """A matrix in the place of which stand itself and a change of low rank.

    The two are multiplied apart and never added up: W + s B A would be as large as W, would have to be made at every step,
    and in 16 or fewer bits would lose most of the change.

    Attributes:
      base: the matrix [*out, D], an array or a quantised weight.
      low_rank: of its shape.
      scale: s.
    """

    base: Any
    low_rank: LowRank
    scale: float = struct.field(pytree_node=False)

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the matrix."""
        return self.base.shape

    @property
    def ndim(self) -> int:
        """Of the matrix."""
        return self.base.ndim

    @property
    def dtype(self) -> np.dtype:
        """Of the matrix."""
        return self.base.dtype

    @property
    def sharding(self) -> Any:
        """Of the matrix."""
        return self.base.sharding

    def project(self, x: jax.Array, out_dtype: Any) -> jax.Array:
        """See `layers.project`."""
        change = self.low_rank.change(x, self.scale, out_dtype)
        # Named once more, so that with `remat="dots"` the sum is saved and not each of its terms.
        return checkpoint_name(project(x, self.base, out_dtype=out_dtype) + change, PRODUCT)

    def decoded(self) -> jax.Array:
        """W + s B A of one layer, added in float32 at least and rounded once to the dtype of W; never for a matmul."""
        base = self.base.decoded() if hasattr(self.base, "decoded") else self.base
        wide = jnp.promote_types(base.dtype, jnp.float32)
        change = self.low_rank.replace(a=self.low_rank.a.astype(wide), b=self.low_rank.b.astype(wide)).product()
        return (jnp.asarray(base, wide) + self.scale * change).astype(base.dtype)
