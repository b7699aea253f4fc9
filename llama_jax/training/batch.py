"""What a training step is given."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp


class Batch(NamedTuple):
    """Rows of tokens, arrays of numpy or JAX: of each row the first T are read, the last T are predicted.

    Attributes:
      tokens: int32[B, T + 1].
      segment_ids: int32[B, T + 1]: 1 for the tokens of a row's first document, 2 for those of its second, and so on; 0 for
        padding. A token sees, and is predicted from, those of its own segment only. None: every row is one document.
      positions: int32[B, T + 1], from 0 in every segment. None: a token's place in its row.
      mask: bool[B, T + 1], which tokens are to be predicted, such as a chat's replies. None: all.
    """

    tokens: Any
    segment_ids: Any = None
    positions: Any = None
    mask: Any = None


def predicted(batch: Batch) -> jax.Array:
    """bool[B, T]: which of the last T tokens count in the loss."""
    counts = jnp.ones(jnp.shape(batch.tokens[:, 1:]), bool)
    if batch.segment_ids is not None:
        before, after = batch.segment_ids[:, :-1], batch.segment_ids[:, 1:]
        counts &= (before == after) & (after > 0)
    if batch.mask is not None:
        counts &= jnp.asarray(batch.mask[:, 1:], bool)
    return counts
