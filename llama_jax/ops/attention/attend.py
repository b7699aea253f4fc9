"""Causal grouped-query attention: one function, several ways to compute it."""

from __future__ import annotations

import contextlib
import contextvars
import logging
from collections.abc import Iterator
from functools import partial

import jax
import jax.numpy as jnp

from llama_jax.errors import ConfigError
from llama_jax.ops.attention.blockwise import blockwise, forward_part, merge
from llama_jax.ops.attention.choose import Backend, Division, Problem, choose, mesh_in_force
from llama_jax.ops.attention.kernels import cudnn, over_devices, splash
from llama_jax.ops.attention.reference import reference
from llama_jax.ops.attention.rows import rows
from llama_jax.ops.attention.view import NO_KEY, Seen, View
from llama_jax.ops.platform import lowering_device_kind, lowering_platform
from llama_jax.ops.quantized import Quantized, over_rows

_OBSERVED: contextvars.ContextVar[dict[str, str] | None] = contextvars.ContextVar("attention", default=None)


def attend(
    queries: jax.Array,
    view: View,
    seen: Seen,
    *,
    scale: float,
    window: int | None = None,
    backend: Backend = "auto",
    division: Division | None = None,
) -> jax.Array:
    """Attend from each query to the keys at its own and earlier positions (Vaswani et al. 2017, section 3.2.1).

    The G queries of a group share their key/value head (Ainslie et al. 2023, section 2.2): K = N is multi-head, K = 1
    multi-query attention. Keys and values are never repeated in memory; the group is an axis of the matmul.

    Args:
      queries: [B, K, T, G, H].
      view: of keys and values [B, K, S, H]. `Quantized` ones are read as they are, by "rows" and "blockwise".
      seen: where queries and keys stand. Keys after a query's own position are not seen: that one comparison is the causal
        mask and hides the empty or padded end of a cache as well.
      scale: multiplies the scores; 1 / sqrt(H) in every Llama.
      window: a query sees only keys less than this many positions before it (Beltagy et al. 2020, section 3.1).
      backend: "reference" is the definition; "rows" makes whole rows of scores, the fastest for short ones, and can be
        differentiated in every way; "blockwise" has memory that grows with T + S instead of T * S; "cudnn" and "splash" are
        kernels for GPUs and TPUs. "auto" takes what `choose` says.
      division: over which axes of the mesh in force rows and heads are cut; without it no kernel is taken on a mesh.

    Returns:
      [B, K, T, G, H] in the dtype of `queries`; softmax in float32 at least. Zeros for a query that sees nothing.

    Raises:
      ConfigError: an unknown backend, or one that cannot compute this; a window of nothing; shapes that do not belong
        together.
    """
    keys, values = view.read()
    _check(queries, keys, seen, window)
    problem = Problem(
        queries.shape,
        keys.shape,
        queries.dtype,
        seen.ordered,
        seen.query_segments is not None,
        isinstance(keys, Quantized) or isinstance(values, Quantized),
        mesh_in_force(),
        division,
    )
    name, why = choose(lowering_platform(), lowering_device_kind(), problem, backend)
    announce(name, why)
    if name == "blockwise":
        return blockwise(queries, keys, values, seen, scale, window)
    if name == "rows":
        return rows(queries, keys, values, seen, scale, window)
    if name == "reference":
        return reference(queries, keys, values, seen, scale=scale, window=window)
    kernel = {"cudnn": cudnn, "splash": splash}[name]
    return over_devices(partial(kernel, scale=scale, window=window), division)(queries, keys, values, seen)


def attend_with_sinks(
    queries: jax.Array,
    sink_queries: jax.Array,
    view: View,
    seen: Seen,
    *,
    sinks: int,
    scale: float,
    window: int | None = None,
) -> jax.Array:
    """Attention to a window and to the first tokens of the text (Xiao et al. 2023, section 3.2). Not for training.

    By blocks, on every platform. Arguments and result as for `attend`, and

    Args:
      sink_queries: [B, K, T, G, H], the queries as the sinks are to see them: turned for a position within the cache.
      sinks: slots at the front, which hold the positions before `sinks`.
    """
    keys, values = view.read()
    _check(queries, keys, seen, window)
    announce("blockwise", "with sinks")
    first = seen.key_positions < sinks  # also of a cache that is not a ring

    def of(queries: jax.Array, chosen: jax.Array, last: int | None, window: int | None) -> tuple[jax.Array, jax.Array]:
        part = seen.replace(key_positions=jnp.where(chosen, seen.key_positions, NO_KEY)).part(slice(None), slice(last))
        own_keys, own_values = (over_rows(lambda x: x[:, :, :last], x) for x in (keys, values))
        return forward_part(queries, own_keys, own_values, part, scale=scale, window=window)

    mixed, _ = merge(of(sink_queries, first, sinks, None), of(queries, ~first, None, window))
    return mixed.astype(queries.dtype)


def _check(queries: jax.Array, keys: jax.Array | Quantized, seen: Seen, window: int | None) -> None:
    """Raise ConfigError for what no backend could compute, or would compute as something else."""
    if window is not None and (not isinstance(window, int) or not 1 <= window < 2**31):
        raise ConfigError(f"window={window!r} must be a whole number from 1, a token sees itself, to 2**31 - 1")
    if queries.ndim != 5 or len(keys.shape) != 4 or queries.shape[:2] != keys.shape[:2]:
        raise ConfigError(
            f"queries {list(queries.shape)} and keys {list(keys.shape)} must be [B, K, T, G, H] and [B, K, S, H]"
        )
    if not queries.size or 0 in keys.shape:
        raise ConfigError(f"queries {list(queries.shape)} and keys {list(keys.shape)} must not be empty")
    if (seen.query_segments is None) != (seen.key_segments is None):
        raise ConfigError("segments must be given of queries and of keys, or not at all")
    batch, new, slots = queries.shape[0], queries.shape[2], keys.shape[2]
    for what, x, length in (
        ("query_positions", seen.query_positions, new),
        ("key_positions", seen.key_positions, slots),
        ("query_segments", seen.query_segments, new),
        ("key_segments", seen.key_segments, slots),
    ):
        if x is not None and tuple(x.shape) not in ((batch, length), (1, length)):
            raise ConfigError(f"{what} are {list(x.shape)}; [{batch}, {length}] or [1, {length}] is needed")
    if seen.ordered and new != slots:
        raise ConfigError(f"ordered rows have as many queries as keys, not {new} and {slots}")


@contextlib.contextmanager
def observed() -> Iterator[dict[str, str]]:
    """Collects within it which ways of computing attention are taken, each with the reason of its first time.

    Programs choose when they are traced: what was compiled before is not seen again.
    """
    taken: dict[str, str] = {}
    before = _OBSERVED.set(taken)
    try:
        yield taken
    finally:
        _OBSERVED.reset(before)


def announce(name: str, why: str) -> None:
    """Say which way of computing attention was taken, and why: to the log, and to who observes, where once."""
    taken = _OBSERVED.get()
    if taken is None or name not in taken:
        logging.getLogger("llama_jax.attention").info("attention: %s (%s)", name, why)
    if taken is not None:
        taken.setdefault(name, why)
