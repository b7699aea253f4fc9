"""The two orders in which the rows of query and key projections are stored, see `apply_rotary`."""

from __future__ import annotations

from typing import TypeVar

import jax
import numpy as np

ArrayLike = TypeVar("ArrayLike", np.ndarray, jax.Array)


def half_from_interleaved(weight: ArrayLike) -> ArrayLike:
    """Reorder the rows of a query or key projection from the interleaved to the half layout.

    Args:
      weight: [..., H, D], rows of one head on the axis before the last.

    Returns:
      The same shape: rows (0, 2, 4, ..., 1, 3, 5, ...).
    """
    *heads, head_dim, features = weight.shape
    return weight.reshape(*heads, head_dim // 2, 2, features).swapaxes(-3, -2).reshape(weight.shape)


def interleaved_from_half(weight: ArrayLike) -> ArrayLike:
    """Undo `half_from_interleaved`."""
    *heads, head_dim, features = weight.shape
    return weight.reshape(*heads, 2, head_dim // 2, features).swapaxes(-3, -2).reshape(weight.shape)
