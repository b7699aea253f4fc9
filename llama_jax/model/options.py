"""What the forward pass is told beside model and tokens: frozen bundles, each named once."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, get_args

import jax
from jax.sharding import AbstractMesh

from llama_jax.config.numbers import is_floating
from llama_jax.errors import ConfigError
from llama_jax.ops.attention import AttentionBackend
from llama_jax.ops.cross_entropy import Constrain

Attend = Callable[..., jax.Array]  # (queries, view, seen, *, scale, window), as `ops.attend`
Remat = Literal["none", "dots", "full", "offload"]


class Places(NamedTuple):
    """Where the tokens of a pass stand; None is the usual case.

    Attributes:
      lengths: int32[B], how many of the T tokens of each row are real, padding is on the right; all when None. Only the
        cache's length uses it, and a rope scaling that depends on the length.
      positions: int32[B, T], each token's position in its document, for the rotary embedding; its place in the row and the
        cache when None. Without a cache only.
      segment_ids: int32[B, T], which of the documents packed into a row each token is of: attention does not cross them.
        Without a cache only.
      rope_lengths: int32[B], or int32[B, T] for each token, how long each row is when it has been read whole, for a rope
        scaling that depends on the length ("dynamic" or "longrope"; others are the same at every length). None takes what
        the row has so far, each document of a packed row for itself. What is in the cache stays as it was turned when it
        was read: a prompt that is read in pieces needs its whole length from the first, and while a row grows in decoding,
        its older keys keep the frequencies of when it was shorter, as they do in transformers.
    """

    lengths: Any = None
    positions: Any = None
    segment_ids: Any = None
    rope_lengths: Any = None


@dataclass(frozen=True)
class Compute:
    """How a pass computes.

    Attributes:
      dtype: of the computation, to which parameters are cast where they are used; None takes that of the embedding.
      remat: what the backward pass computes a second time instead of saving it: "none"; "dots", everything in a layer but
        its matmuls with weights and attention by blocks; "full", everything in a layer, so that only the residual stream
        between layers is saved (Chen et al. 2016, section 3); "offload", as "full", and the residual stream waits in the
        host's memory.
      attention: how attention is computed, see `ops.attend`; "auto" takes what `ops.attention.choose` says.
      attend: an attention of your own, with the arguments of `ops.attend`; None takes `ops.attend`, or what the layout has
        in its place. A cache with sinks is read by `ops.attend_with_sinks` whatever this is.

    Raises:
      ConfigError: a dtype that is none of floats; an attention of your own and a way to compute the library's; a way, or a
        rematerialisation, that does not exist.
    """

    dtype: Any = None
    remat: Remat = "none"
    attention: AttentionBackend = "auto"
    attend: Attend | None = None

    def __post_init__(self) -> None:
        if self.dtype is not None and not is_floating(self.dtype):
            raise ConfigError(f"dtype={self.dtype!r} is not a floating-point type; use 'float32', 'bfloat16' or 'float16'")
        if self.remat not in get_args(Remat):
            raise ConfigError(f"remat={self.remat!r} must be one of {', '.join(get_args(Remat))}")
        if self.attention not in get_args(AttentionBackend):
            raise ConfigError(f"attention={self.attention!r} must be one of {', '.join(get_args(AttentionBackend))}")
        if self.attend is not None and self.attention != "auto":
            raise ConfigError(f"attention={self.attention!r} is of the library's attention, and attend gives another")


def unconstrained(x: jax.Array, where: str) -> jax.Array:
    """Leave it to XLA where an activation lies."""
    return x


def identity(x: Any) -> Any:
    """What is there, as it is."""
    return x


@dataclass(frozen=True)
class Layout:
    """Where a pass computes, over which devices; the result does not depend on it. The default is a single device.

    Attributes:
      constrain: told where in the model an activation is, lays it out over the devices; the names are those of the call
        sites, see `parallel.specs` and `inference.placement`.
      attend: takes the place of `ops.attend`: told over which axes rows and heads are cut, or ring attention.
      arrange: puts the rows of a training batch, and the tokens in them, into another order or shape, of which `attend` must
        know: sums over them do not depend on it. See `parallel.ring`.
      fit: makes of the parameters those of the configuration, where a training state keeps them in another shape.
      shares: parts of the rows that lie on different devices, of which `constrain` knows.
      mesh: of the devices; what is traced under it is made for their platform.
      axis_name: of the mapped axis where this runs per device, under `jax.pmap` or `jax.shard_map`: sums are then over all
        of its devices, which have the same state and each their own rows.
    """

    constrain: Constrain = unconstrained
    attend: Attend | None = None
    arrange: Callable[[Any], Any] = identity
    fit: Callable[[Any], Any] = identity
    shares: int = 1
    mesh: AbstractMesh | None = None
    axis_name: str | None = None

    def context(self) -> AbstractContextManager[Any]:
        """The context to trace in, so that `ops.platform.lowering_platform` answers for these devices."""
        return nullcontext() if self.mesh is None else jax.sharding.use_abstract_mesh(self.mesh)
