"""How a generation may remember less: a cache in int8, or of a window, whose slots are a ring."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import jax
import jax.numpy as jnp

from llama_jax.errors import GenerationError
from llama_jax.ops.attention.view import NO_KEY


@dataclass(frozen=True)
class CacheOptions:
    """How a generation remembers.

    Attributes:
      dtype: "int8" for a quarter of float32's bytes, each head and position with a factor of its own; None takes that of the
        parameters.
      window: tokens see only so many positions back, and the cache needs no more room however long the text becomes.
      sinks: first tokens that stay visible, without which the loss of a model that was trained to see all tokens rises
        sharply (Xiao et al. 2023, section 3.1); 4 are usual. With a window only.

    Raises:
      GenerationError: a value that cannot be.
    """

    dtype: Literal["int8"] | None = None
    window: int | None = None
    sinks: int = 0

    def __post_init__(self) -> None:
        if self.dtype not in (None, "int8"):
            raise GenerationError(f"dtype={self.dtype!r} of the cache must be 'int8', or None for that of the parameters")
        check_window(self.window, self.sinks)


def check_window(window: int | None, sinks: int, capacity: int | None = None) -> None:
    """Raise GenerationError for a window or sinks that cannot be, or that a cache has no room for."""
    for name, value, least in (("window", window, 1), ("sinks", sinks, 0)):
        if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < least):
            raise GenerationError(f"{name}={value!r} must be an integer of at least {least}")
    if window is None and sinks:
        raise GenerationError(f"sinks={sinks} are for a cache with a window; without one every token is kept")
    if window is not None and capacity is not None and capacity < sinks + window:
        raise GenerationError(f"capacity={capacity} is less than window={window} and sinks={sinks} together")


def ring_slots(length: jax.Array, new: int, capacity: int, sinks: int) -> jax.Array:
    """The slot of each of the next `new` tokens of rows of `length` int32[B] tokens: int32[B, T].

    The slots of a cache with a window are a ring after those of the sinks: the token at position p >= sinks is in slot
    sinks + (p - sinks) mod (S - sinks). Nothing is ever moved; what is overwritten is out of every window to come, as long
    as no more tokens are read at once than `init_cache` says. That is also true of the padding after a row's last token.
    """
    positions = length[:, None] + jnp.arange(new, dtype=jnp.int32)[None]
    ring = sinks + (positions - sinks) % (capacity - sinks)
    return jnp.where(positions < sinks, positions, ring)


def ring_positions(length: jax.Array, new: int, capacity: int, sinks: int) -> jax.Array:
    """int32[B, S], which position each slot holds once `new` tokens are written."""
    slots = jnp.arange(capacity, dtype=jnp.int32)
    last = length[:, None] + new - 1
    with jax.numpy_rank_promotion("allow"):  # of the slots, [S], to the rows'
        held = last - (last - slots) % (capacity - sinks)  # the latest position of each slot of the ring
        held = jnp.where(held < sinks, NO_KEY, held)
        return jnp.where(slots < sinks, jnp.where(slots <= last, slots, NO_KEY), held)
