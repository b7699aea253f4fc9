"""The options of a forward pass: positions of tokens, computation, sharding over devices."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh

from llama_jax.errors import ConfigError
from llama_jax.ops.attention import AttentionBackend, HeadSharding
from llama_jax.ops.attention.dispatch import KERNELS
from llama_jax.ops.platform import KernelOptions
from llama_jax.settings import check_fields

Attend = Callable[..., jax.Array]  # (queries, view, mask, *, scale, window), as `ops.attend`
Remat = Literal["none", "dots", "full", "offload"]


class Positions(NamedTuple):
    """Positions of the tokens of a forward pass. None means the default.

    Attributes:
      lengths: int32[B], how many of the T tokens of each row are valid; padding is on the right. None: all. Lengths affect
        only the length of the cache and length-dependent RoPE scaling.
      position_ids: int32[B, T], each token's position in its document, for RoPE. None: consecutive, after the tokens in the
        cache. Only without a cache.
      segment_ids: int32[B, T], the document of each token in a packed row: attention does not cross documents. Only without
        a cache.
      rope_lengths: int32[B], or int32[B, T] for each token, the final length of each row, for length-dependent RoPE scaling
        ("dynamic", "longrope"). None: the length so far, of each document in a packed row. Cached keys keep their rotation:
        chunked prefill must pass the full prompt length from the first chunk on, and while a row grows in decoding, its
        older keys keep the frequencies of a shorter length, as in transformers.
      starts: int32[R + 1] (`cu_seqlens` in FlashAttention), for ragged batches, only with a cache: the tokens are int32[T,
        1], all rows concatenated; row r has the tokens at [starts[r], starts[r + 1]). Tokens from starts[R] on are padding.
    """

    lengths: Any = None
    position_ids: Any = None
    segment_ids: Any = None
    rope_lengths: Any = None
    starts: Any = None


@dataclass(frozen=True)
class ComputeOptions:
    """How a forward pass is computed.

    Attributes:
      dtype: the dtype of the computation, to which parameters are cast when used; None: the dtype of the embedding.
      remat: what the backward pass recomputes instead of saving it: "none"; "dots", everything in a layer except its
        matmuls with weights and blockwise attention; "full", everything in a layer, so that only the residual stream
        between layers is saved (Chen et al. 2016, section 3); "offload", like "full", with the residual stream kept in the
        host's memory.
      unroll: unroll the loop over layers. The loop copies saved activations and gradients into stacks of all layers, which
        takes a tenth of a training step on a GPU; unrolled, a step takes twice as long to compile.
      attention: the attention backend, see `ops.attend`; "auto" uses `ops.attention.choose_backend`.
      native_code: on a CPU, multiply floats and attend with native code, which a C++ compiler compiles once; without one,
        nothing changes. `generate` and servers set it: it makes decoding faster, and other passes hardly.
      exact: batch invariance: a token's results depend, bit for bit, only on its own row, not on other rows, their order,
        padding, the chunks of the prefill, or how many tokens are verified at once, see `ops.exact`. One device only, not
        differentiable.
      forward_mode: use functions that JAX differentiates in every mode: `jax.jvp`, `jax.linearize`, `jax.jacfwd`, and second
        derivatives. Otherwise a pass uses fast functions with custom gradients, for reverse mode. See docs/derivatives.md.

    Raises:
      ConfigError: a dtype that is not a floating-point type; an unknown backend or rematerialization; `exact` with a
        backend; `forward_mode` with `exact` or a kernel.
    """

    dtype: Any = None
    remat: Remat = "none"
    attention: AttentionBackend = "auto"
    exact: bool = False
    unroll: bool = False
    native_code: bool = False
    forward_mode: bool = False

    def __post_init__(self) -> None:
        check_fields(self, ConfigError)
        if self.dtype is not None and not is_floating(self.dtype):
            raise ConfigError(f"dtype={self.dtype!r} is not a floating-point type; use 'float32', 'bfloat16' or 'float16'")
        if self.exact and self.attention != "auto":
            raise ConfigError("exact=True has its own attention; leave attention out")
        if self.forward_mode and (self.exact or self.attention in KERNELS.values()):
            reason = "exact=True" if self.exact else f"attention={self.attention!r}"
            raise ConfigError(f"{reason} has no forward mode; leave it out, or forward_mode=True")

    def kernels(self) -> KernelOptions:
        """The options that select kernels, but for those that depend on the parameters."""
        return KernelOptions(self.exact, self.native_code and not self.forward_mode, forward_mode=self.forward_mode)


def is_floating(dtype: Any) -> bool:
    """Whether this is the name or the class of a floating-point type that JAX knows."""
    try:
        return bool(jnp.issubdtype(jnp.dtype(dtype), jnp.floating))
    except TypeError:
        return False


def unconstrained(x: jax.Array, where: str) -> jax.Array:
    """Leave the sharding of an activation to XLA."""
    return x


def identity(x: Any) -> Any:
    """Return the argument unchanged."""
    return x


@dataclass(frozen=True)
class Sharding:
    """How a forward pass is sharded over devices; results do not depend on it. The default is a single device.

    Attributes:
      constrain: constrains the sharding of an activation, given its name; for the names see `forward`, `parallel.sharding`
        and `inference.sharding`.
      attend: replaces `ops.attend`, for ring attention.
      head_sharding: the mesh axes that shard rows and heads in attention.
      experts: the mesh axes that shard rows and the matrices of experts, see `ops.moe.mixture_of_experts`.
      reorder_batch: permutes or reshapes a training batch for `attend`, without effect on sums over tokens. See
        `parallel.ring_attention`.
      prepare_params: maps the parameters of the training state to those of `forward` (unpadding, LoRA).
      batch_shards: number of shards into which `constrain` divides the rows.
      mesh: the mesh of the devices; programs traced under it are compiled for their platform.
      axis_name: the name of the mapped axis inside `jax.pmap` or `jax.shard_map`: sums are then over all of its devices,
        which have the same state but different rows.
    """

    constrain: Callable[[jax.Array, str], jax.Array] = unconstrained
    attend: Attend | None = None
    head_sharding: HeadSharding | None = None
    experts: Any = None  # an `ops.moe.ExpertSharding`
    reorder_batch: Callable[[Any], Any] = identity
    prepare_params: Callable[[Any], Any] = identity
    batch_shards: int = 1
    mesh: AbstractMesh | None = None
    axis_name: str | None = None

    def context(self) -> AbstractContextManager[Any]:
        """A context for tracing, in which `ops.platform.lowering_platform` is the platform of these devices."""
        return nullcontext() if self.mesh is None else jax.sharding.use_abstract_mesh(self.mesh)
