"""The input of a training step."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float32

from llama_jax.errors import GenerationError


class Batch(NamedTuple):
    """Rows of tokens, numpy or JAX arrays: the first T tokens of each row are read, the last T are predicted.

    Attributes:
      tokens: int32[B, T + 1].
      segment_ids: int32[B, T + 1]: 1 for the tokens of a row's first document, 2 for those of its second, and so on; 0 for
        padding. A token attends to, and is predicted from, tokens of its own segment only. None: every row is one document.
      positions: int32[B, T + 1], from 0 in every segment. None: a token's index in its row.
      mask: bool[B, T + 1], which tokens are to be predicted, such as a chat's replies. None: all.
      noise: uint32[B, T + 1], random numbers from which the noise of each embedding is made, see `LossOptions.neftune`.
    """

    tokens: Any
    segment_ids: Any = None
    positions: Any = None
    mask: Any = None
    noise: Any = None


class NextTokenBatch(NamedTuple):
    """A batch as the model reads it: each token with the target that is predicted from it.

    Attributes:
      tokens: int32[B, T].
      targets: int32[B, T], the tokens after them.
      weights: bool[B, T], which targets count in the loss.
      segment_ids, positions: int32[B, T] of the tokens read, or None as in a `Batch`.
      rope_lengths: int32[B, T], see `forward`; None where it follows from the other three.
      noise: uint32[B, T] of the tokens read, or None as in a `Batch`.
    """

    tokens: jax.Array
    targets: jax.Array
    weights: jax.Array
    segment_ids: jax.Array | None = None
    positions: jax.Array | None = None
    rope_lengths: jax.Array | None = None
    noise: jax.Array | None = None


def checked(batch: Batch) -> Batch:
    """The same as arrays.

    Raises:
      GenerationError: tokens that are not [B, T + 1], or a field with another shape, which would be broadcast.
    """
    arrays = Batch(*(None if part is None else jnp.asarray(part) for part in batch))
    if arrays.tokens.ndim != 2:
        raise GenerationError(f"tokens of a batch are {list(arrays.tokens.shape)}; [B, T + 1] is needed, a row per sequence")
    for name, part in zip(Batch._fields, arrays, strict=True):
        if part is not None and part.shape != arrays.tokens.shape:
            shape, wanted = list(part.shape), list(arrays.tokens.shape)
            raise GenerationError(f"{name} of a batch are {shape}; {wanted}, as the tokens, is needed")
    return arrays


def shift(batch: Batch) -> NextTokenBatch:
    """The first T tokens of each row to read and the last T to predict; for the errors see `checked`."""
    batch = checked(batch)
    read = (batch.segment_ids, batch.positions, batch.noise)
    segment_ids, positions, noise = (None if part is None else part[:, :-1] for part in read)
    return NextTokenBatch(batch.tokens[:, :-1], batch.tokens[:, 1:], predicted(batch), segment_ids, positions, noise=noise)


def predicted(batch: Batch) -> Bool[Array, "B T"]:
    """Which of the last T tokens count in the loss."""
    counts = jnp.ones(jnp.shape(batch.tokens[:, 1:]), bool)
    if batch.segment_ids is not None:
        before, after = batch.segment_ids[:, :-1], batch.segment_ids[:, 1:]
        counts &= (before == after) & (after > 0)
    if batch.mask is not None:
        counts &= jnp.asarray(batch.mask[:, 1:], bool)
    return counts


def predicted_count(batch: Batch) -> Float32[Array, ""]:
    """How many tokens of a batch count in the loss."""
    return jnp.sum(predicted(batch), dtype=jnp.float32)
