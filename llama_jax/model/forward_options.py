"""The options of a forward pass, in frozen bundles: positions, computation, sharding over devices."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, get_args

import jax
from jax.sharding import AbstractMesh

from llama_jax.config.validation import is_floating
from llama_jax.errors import ConfigError
from llama_jax.ops.attention import AttentionBackend, HeadSharding

Attend = Callable[..., jax.Array]  # (queries, view, seen, *, scale, window), as `ops.attend`
Remat = Literal["none", "dots", "full", "offload"]


class Positions(NamedTuple):
    """Where the tokens of a pass stand; None is the usual case.

    Attributes:
      lengths: int32[B], how many of the T tokens of each row are real, with padding on the right; all when None. Used only
        for the cache's length, and by a rope scaling that depends on the length.
      positions: int32[B, T], each token's position in its document, for the rotary embedding; its place in the row and the
        cache when None. Without a cache only.
      segment_ids: int32[B, T], the number of each token's document among those packed into the row: attention does not
        cross documents. Without a cache only.
      rope_lengths: int32[B], or int32[B, T] for each token, the length of each row when it has been read whole, for a rope
        scaling that depends on the length ("dynamic" or "longrope"; others are the same at every length). None takes the
        length so far, for each document of a packed row by itself. Keys in the cache keep the rotation with which they were
        written: a prompt that is read in pieces needs its whole length from the first piece, and while a row grows in
        decoding its older keys keep the frequencies of the shorter length, as they do in transformers.
      starts: int32[R + 1], for rows that read different numbers of tokens, with a cache only: the tokens are int32[T, 1],
        and row r's next ones are [starts[r], starts[r + 1]) of the T. Tokens from starts[R] on are padding.
    """

    lengths: Any = None
    position_ids: Any = None
    segment_ids: Any = None
    rope_lengths: Any = None
    starts: Any = None


@dataclass(frozen=True)
class Compute:
    """How a pass computes.

    Attributes:
      dtype: of the computation, to which parameters are cast where they are used; None takes that of the embedding.
      remat: what the backward pass recomputes instead of saving it: "none"; "dots", everything in a layer except its
        matmuls with weights and attention by blocks; "full", everything in a layer, so that only the residual stream
        between layers is saved (Chen et al. 2016, section 3); "offload", as "full", with the residual stream kept in the
        host's memory.
      attention: the backend of attention, see `ops.attend`; "auto" uses `ops.attention.choose_backend`.
      attend: an attention of your own, with the arguments of `ops.attend`; None takes `ops.attend`, or the layout's.
      exact: the numbers of a token depend on its own row alone, bit for bit: not on other rows, their number or order,
        padding, the chunks in which a prompt is read, or how many tokens are verified at once, see `ops.exact`. With a cache
        only, and on one device.

    Raises:
      ConfigError: a dtype that is not a floating-point type; both `attend` and a backend of the library's attention; an
        unknown backend or rematerialization; either of them with `exact`.
    """

    dtype: Any = None
    remat: Remat = "none"
    attention: AttentionBackend = "auto"
    attend: Attend | None = None
    exact: bool = False

    def __post_init__(self) -> None:
        if self.dtype is not None and not is_floating(self.dtype):
            raise ConfigError(f"dtype={self.dtype!r} is not a floating-point type; use 'float32', 'bfloat16' or 'float16'")
        if self.remat not in get_args(Remat):
            raise ConfigError(f"remat={self.remat!r} must be one of {', '.join(get_args(Remat))}")
        if self.attention not in get_args(AttentionBackend):
            raise ConfigError(f"attention={self.attention!r} must be one of {', '.join(get_args(AttentionBackend))}")
        if self.attend is not None and self.attention != "auto":
            raise ConfigError(f"attention={self.attention!r} is for the library's attention, which attend replaces")
        if self.exact and (self.attend is not None or self.attention != "auto"):
            raise ConfigError("exact=True has an attention of its own; leave attend and attention out")


def unconstrained(x: jax.Array, where: str) -> jax.Array:
    """Leave the layout of an activation to XLA."""
    return x


def identity(x: Any) -> Any:
    """Return the arguments unchanged."""
    return x


@dataclass(frozen=True)
class Sharding:
    """The devices of a pass and how arrays lie on them; results do not depend on it. The default is a single device.

    Attributes:
      constrain: given the name of an activation, lays it out over the devices; for the names see the call sites,
        `parallel.sharding` and `inference.sharding`.
      attend: replaces `ops.attend`, by ring attention.
      head_sharding: the axes over which rows and heads are divided in attention.
      experts: the axes over which rows and experts' matrices are cut, see `ops.experts`.
      arrange: brings the rows of a training batch, and the tokens in them, into another order or shape, for which `attend`
        is made; sums over tokens do not depend on it. See `parallel.ring_attention`.
      fit: turns parameters into those of the configuration, if a training state keeps them in another shape.
      shares: parts of the rows that lie on different devices, as `constrain` lays them out.
      mesh: of the devices; programs traced under it are made for their platform.
      axis_name: of the mapped axis if this runs per device, under `jax.pmap` or `jax.shard_map`: sums are then over all of
        its devices, which have the same state but different rows.
    """

    constrain: Callable[[jax.Array, str], jax.Array] = unconstrained
    attend: Attend | None = None
    head_sharding: HeadSharding | None = None
    experts: Any = None  # an `ops.moe.ExpertSharding`
    arrange: Callable[[Any], Any] = identity
    fit: Callable[[Any], Any] = identity
    shares: int = 1
    mesh: AbstractMesh | None = None
    axis_name: str | None = None

    def context(self) -> AbstractContextManager[Any]:
        """The context to trace in, so that `ops.platform.lowering_platform` answers for these devices."""
        return nullcontext() if self.mesh is None else jax.sharding.use_abstract_mesh(self.mesh)
