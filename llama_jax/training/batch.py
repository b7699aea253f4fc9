"""The input of a training step: rows of tokens, and the inputs and targets made from them."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Shaped

from llama_jax.errors import GenerationError


class Batch(NamedTuple):
    """Rows of T + 1 tokens, NumPy or JAX arrays: the first T tokens are inputs, the last T are targets.

    Attributes:
      tokens: int32[B, T + 1].
      segment_ids: int32[B, T + 1]: 1 for the tokens of a row's first document, 2 for those of its second, and so on; 0 for
        padding. A token attends to, and is predicted from, only tokens of its segment. None: every row is one document.
      position_ids: int32[B, T + 1], from 0 in every segment. None: a token's index in its row.
      loss_mask: bool[B, T + 1] (or integers, 0 and 1), tokens that count in the loss as targets, such as the replies of a
        chat. None: all. Floats are weights, at least 0: each target's loss is multiplied by its weight, and a mean over
        targets is divided by the sum of the weights instead of their number.
      noise: uint32[B, T + 1], random bits, from which NEFTune's noise on each token's embedding is generated, see
        `LossOptions.neftune`. None: no noise.
    """

    tokens: Any
    segment_ids: Any = None
    position_ids: Any = None
    loss_mask: Any = None
    noise: Any = None


class NextTokenBatch(NamedTuple):
    """Inputs and targets of a `Batch`: each token and the one after it.

    Attributes:
      tokens: int32[B, T].
      targets: int32[B, T], the tokens after them.
      target_mask: bool[B, T], which targets count in the loss; or float[B, T], their weights; see `target_mask`.
      segment_ids, position_ids: int32[B, T] of the inputs, or None as in a `Batch`.
      rope_lengths: int32[B, T], see `Positions.rope_lengths`; None: computed from `position_ids` and `segment_ids`.
      noise: uint32[B, T] of the inputs, or None as in a `Batch`.
    """

    tokens: jax.Array
    targets: jax.Array
    target_mask: jax.Array
    segment_ids: jax.Array | None = None
    position_ids: jax.Array | None = None
    rope_lengths: jax.Array | None = None
    noise: jax.Array | None = None


def checked_batch(batch: Batch) -> Batch:
    """The batch with its fields as JAX arrays.

    Raises:
      GenerationError: tokens are not [B, T + 1]; a field has a different shape, which would be broadcast; or a value of the
        loss mask is neither 0, 1 nor a weight (under `jax.jit`, values are not checked).
    """
    arrays = Batch(*(None if field is None else jnp.asarray(field) for field in batch))
    if arrays.tokens.ndim != 2:
        raise GenerationError(f"tokens of a batch are {list(arrays.tokens.shape)}; [B, T + 1] is needed, a row per sequence")
    for name, field in zip(Batch._fields, arrays, strict=True):
        if field is not None and field.shape != arrays.tokens.shape:
            shape, expected = list(field.shape), list(arrays.tokens.shape)
            raise GenerationError(f"{name} of a batch are {shape}; {expected}, as the tokens, is needed")
    if arrays.loss_mask is not None and not isinstance(arrays.loss_mask, jax.core.Tracer):
        _check_weights(np.asarray(arrays.loss_mask))
    return arrays


def _check_weights(loss_mask: Shaped[np.ndarray, "B tokens"]) -> None:
    """Raise GenerationError for a value that is neither 0, 1 nor a weight."""
    if jnp.issubdtype(loss_mask.dtype, jnp.floating):
        is_valid, need = np.isfinite(loss_mask) & (loss_mask >= 0), "a weight must be finite and at least 0"
    else:
        is_valid, need = (loss_mask == 0) | (loss_mask == 1), "integers must be 0 or 1; pass weights as floats"
    if not is_valid.all():
        row, column = np.argwhere(~is_valid)[0]
        raise GenerationError(f"loss_mask[{row}, {column}]={loss_mask[row, column]} of a batch: {need}")


def to_next_token_batch(batch: Batch) -> NextTokenBatch:
    """The first T tokens of each row as inputs, and the last T as targets; raises as `checked_batch`."""
    batch = checked_batch(batch)
    fields = (batch.segment_ids, batch.position_ids, batch.noise)
    segment_ids, position_ids, noise = (None if field is None else field[:, :-1] for field in fields)
    tokens, targets = batch.tokens[:, :-1], batch.tokens[:, 1:]
    return NextTokenBatch(tokens, targets, target_mask(batch), segment_ids, position_ids, noise=noise)


def target_mask(batch: Batch) -> Bool[Array, "B T"] | Float[Array, "B T"]:
    """Which of the T targets count in the loss: those in the same segment as their input, and in the loss mask.

    For a loss mask of floats, the weights of the targets, in float32 at least; 0 for targets that do not count.
    """
    mask = jnp.ones(jnp.shape(batch.tokens[:, 1:]), bool)
    if batch.segment_ids is not None:
        inputs, targets = batch.segment_ids[:, :-1], batch.segment_ids[:, 1:]
        mask &= (inputs == targets) & (targets > 0)
    if batch.loss_mask is None:
        return mask
    weights = jnp.asarray(batch.loss_mask[:, 1:])
    if jnp.issubdtype(weights.dtype, jnp.floating):
        return jnp.where(mask, weights.astype(jnp.promote_types(weights.dtype, jnp.float32)), 0)
    return mask & weights.astype(bool)


def target_count(batch: Batch) -> Float[Array, ""]:
    """The number of targets that count in the loss, or the sum of their weights; float32 at least."""
    mask = target_mask(batch)
    return jnp.sum(mask, dtype=jnp.float32 if mask.dtype == bool else mask.dtype)


def apply_weights(values: Float[Array, "*shape"], mask: Shaped[Array, "*#shape"]) -> Float[Array, "*shape"]:
    """Values that are 0 for targets that do not count, times the weights if a `target_mask` has weights."""
    return values if mask.dtype == bool else values * mask.astype(values.dtype)


def replace_zero(divisor: jax.typing.ArrayLike) -> jax.Array:
    """The divisor of a mean over targets, or 1 where it is 0: without targets, the mean is 0."""
    return jnp.where(divisor == 0, 1, divisor)
