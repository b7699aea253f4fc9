"""Checks of the arguments of attention."""

from __future__ import annotations

import jax

from llama_jax.errors import ConfigError
from llama_jax.ops.attention.mask import AttentionMask


def check_shapes(queries: jax.Array, keys: jax.Array, mask: AttentionMask, window: int | None) -> None:
    """Raise ConfigError for arguments that no backend can compute, or that backends would misinterpret."""
    if window is not None and (not isinstance(window, int) or not 1 <= window < 2**31):
        raise ConfigError(f"window={window!r} must be an integer from 1 (a token sees itself) to 2**31 - 1")
    if queries.ndim != 5 or len(keys.shape) != 4 or queries.shape[:2] != keys.shape[:2]:
        raise ConfigError(
            f"queries {list(queries.shape)} and keys {list(keys.shape)} must be [B, K, T, G, H] and [B, K, S, H]"
        )
    if not queries.size or 0 in keys.shape:
        raise ConfigError(f"queries {list(queries.shape)} and keys {list(keys.shape)} must not be empty")
    if (mask.query_segments is None) != (mask.key_segments is None):
        raise ConfigError("segments must be set for both queries and keys, or for neither")
    batch, new, slots = queries.shape[0], queries.shape[2], keys.shape[2]
    for what, x, length in (
        ("query_positions", mask.query_positions, new),
        ("key_positions", mask.key_positions, slots),
        ("query_segments", mask.query_segments, new),
        ("key_segments", mask.key_segments, slots),
    ):
        if x is not None and tuple(x.shape) not in ((batch, length), (1, length)):
            raise ConfigError(f"{what} are {list(x.shape)}; [{batch}, {length}] or [1, {length}] is needed")
    if mask.ordered and new != slots:
        raise ConfigError(f"ordered rows must have as many queries as keys, not {new} and {slots}")
