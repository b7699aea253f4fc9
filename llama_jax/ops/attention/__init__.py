"""Causal grouped-query attention: one function, several ways to compute it."""

from __future__ import annotations

import functools
import logging
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
from flax import struct

from llama_jax.errors import ConfigError
from llama_jax.ops.attention.blockwise import blockwise, forward_part, merge
from llama_jax.ops.attention.kernels import cudnn, cudnn_refuses, splash, splash_refuses
from llama_jax.ops.attention.reference import reference
from llama_jax.ops.attention.rows import rows
from llama_jax.ops.attention.seen import NO_KEY, OldSeen, Seen, places
from llama_jax.ops.quantized import Quantized, over_rows

Backend = Literal["auto", "reference", "rows", "blockwise", "cudnn", "splash"]
# From so many scores per head on, blocks are faster than whole rows, and from so many queries on
# (experiments/bench_long_context.py); memory is a reason of its own.
MANY_SCORES, MANY_QUERIES = 2**20, 64
MANY_QUANTIZED = 4096  # slots from which on values are better converted block by block
_TAKEN: list[str] = []
KERNELS: dict[str, Backend] = {"gpu": "cudnn", "tpu": "splash"}


def attention(
    queries: jax.Array,
    keys: jax.Array | Quantized,
    values: jax.Array | Quantized,
    query_positions: jax.Array | None = None,
    *,
    scale: float,
    key_positions: jax.Array | None = None,
    segments: tuple[jax.Array, jax.Array] | None = None,
    lengths: jax.Array | None = None,
    window: int | None = None,
    backend: Backend = "auto",
) -> jax.Array:
    """Attend from each query to the keys at its own and earlier positions (Vaswani et al. 2017, section 3.2.1).

    The G queries of a group share their key/value head (Ainslie et al. 2023, section 2.2): K = N is multi-head, K = 1
    multi-query attention. Keys and values are never repeated in memory; the group is an axis of the product.

    Args:
      queries: [*batch, T, G, H]. The batch axes are B and K, or K alone.
      keys, values: [*batch, S, H]; `Quantized` ones, as a cache may have them, are read as they are, by "rows" and
        "blockwise".
      query_positions: int[*batch, T], batch axes of size 1 broadcast. Keys after a query's own position are not seen: that
        one comparison is the causal mask and hides the empty or padded end of a cache as well. None where query t is the
        one of slot t: what is after a block of queries is then not even computed.
      scale: multiplies the scores; 1 / sqrt(H) in every Llama.
      key_positions: int[*batch, S], where the key of each slot stands, 2**31 - 1 for an empty slot; None where slot s holds
        position s.
      segments: int[*batch, T] of the queries and int[*batch, S] of the keys, batch axes of size 1 broadcast: a query sees
        the keys of its own segment only. For several documents packed into a row.
      lengths: int[*batch], how many of the T queries of each row are real: the others see nothing and give zeros.
      window: a query sees only keys less than this many positions before it (Beltagy et al. 2020, section 3.1).
      backend: "reference" is the definition; "rows" makes whole rows of scores, the fastest for short ones; "blockwise" has
        memory that grows with T + S instead of T * S; "cudnn" and "splash" are kernels for GPUs and TPUs. "auto" takes the
        kernel of the device where it can, and else what is fastest for the size; the choice goes to the log, once.

    Returns:
      [*batch, T, G, H] in the dtype of `queries`; softmax in float32. Zeros for a query that sees nothing.

    Raises:
      ConfigError: an unknown backend, or one that cannot compute this; a window of nothing.
    """
    _check(queries, keys, segments, lengths, window)
    ordered = query_positions is None and key_positions is None and queries.shape[-3] == keys.shape[-2]
    seen = places(queries, keys, query_positions, key_positions, segments, lengths)
    quantized = isinstance(keys, Quantized) or isinstance(values, Quantized)
    backend = _choose(queries, keys, seen, ordered, quantized, backend)
    if backend == "blockwise":
        return blockwise(queries, keys, values, seen, scale, window)
    if backend == "rows" or isinstance(keys, Quantized) or isinstance(values, Quantized):
        return rows(queries, keys, values, seen, scale, window, ordered)
    if backend == "reference":
        return reference(queries, keys, values, seen, scale=scale, window=window)
    if backend == "cudnn":
        mixed = cudnn(queries, keys, values, scale=scale, window=window)
    else:
        mixed = splash(queries, keys, values, seen, scale=scale, window=window)
    if lengths is None:
        return mixed
    return jnp.where((jnp.arange(queries.shape[-3]) < lengths[..., None])[..., None, None], mixed, 0)


def _check(
    queries: jax.Array,
    keys: jax.Array | Quantized,
    segments: tuple[jax.Array, jax.Array] | None,
    lengths: jax.Array | None,
    window: int | None,
) -> None:
    """Raise ConfigError for what no backend could compute, or would compute as something else."""
    if window is not None and (not isinstance(window, int) or not 1 <= window < 2**31):
        raise ConfigError(f"window={window!r} must be a whole number from 1, a token sees itself, to 2**31 - 1")
    if not queries.size or 0 in keys.shape:
        raise ConfigError(f"queries {list(queries.shape)} and keys {list(keys.shape)} must not be empty")
    if segments is not None and any(x is None for x in segments):
        raise ConfigError("segments must be given of queries and of keys, or not at all")
    if lengths is not None and lengths.ndim != keys.ndim - 2:
        raise ConfigError(f"lengths {list(lengths.shape)} must have the batch axes of the keys {list(keys.shape)}")


def attention_with_sinks(
    queries: jax.Array,
    sink_queries: jax.Array,
    keys: jax.Array | Quantized,
    values: jax.Array | Quantized,
    query_positions: jax.Array,
    *,
    sinks: int,
    window: int | None,
    scale: float,
    key_positions: jax.Array | None = None,
) -> jax.Array:
    """Attention to a window and to the first tokens of the text (Xiao et al. 2023, section 3.2). Not for training.

    Arguments and result as for `attention`, and

    Args:
      sink_queries: [*batch, T, G, H], the queries as the sinks are to see them: turned for a position within the cache.
      sinks: slots at the front, which hold the positions before `sinks`.
    """
    announce("blockwise", "with sinks")
    seen = places(queries, keys, query_positions, key_positions, None, None)
    first = seen.key_positions < sinks  # also of a cache that is not a ring

    def of(queries: jax.Array, chosen: jax.Array, last: int | None, window: int | None) -> tuple[jax.Array, jax.Array]:
        part = seen._replace(key_positions=jnp.where(chosen, seen.key_positions, NO_KEY)).part(slice(None), slice(last))
        own_keys, own_values = (over_rows(lambda x: x[..., :last, :], x) for x in (keys, values))
        return forward_part(queries, own_keys, own_values, part, scale=scale, window=window)

    mixed, _ = merge(of(sink_queries, first, sinks, None), of(queries, ~first, None, window))
    return mixed.astype(queries.dtype)


def _choose(
    queries: jax.Array, keys: jax.Array | Quantized, seen: Seen, ordered: bool, quantized: bool, backend: Backend
) -> Backend:
    """The backend to take for "auto", the given one otherwise."""
    if backend not in get_args(Backend):
        raise ConfigError(f"attention backend={backend!r} must be one of {', '.join(get_args(Backend))}")
    if quantized and backend not in ("auto", "rows", "blockwise"):
        raise ConfigError(f"attention backend={backend!r} reads no quantized keys and values; rows and blockwise do")
    if backend in ("reference", "rows", "blockwise"):
        return backend
    device = jax.devices()[0]
    platform = device.platform
    refusals = {
        "cudnn": cudnn_refuses(queries, seen, ordered, device),
        "splash": splash_refuses(queries, ordered, device),
    }
    if backend in refusals:
        if refusals[backend]:
            raise ConfigError(f"attention backend={backend!r}: {refusals[backend]}")
        return backend
    new, slots = queries.shape[-3], keys.shape[-2]
    many = new >= MANY_QUERIES and new * slots >= MANY_SCORES
    plain: Backend = "blockwise" if many or (quantized and slots >= MANY_QUANTIZED) else "rows"
    if new == 1 or quantized or platform not in KERNELS:
        announce(plain, f"on {platform}")
        return plain
    kernel = KERNELS[platform]
    refusal = refusals[kernel]
    announce(plain if refusal else kernel, refusal or f"on {platform}")
    return plain if refusal else kernel


@functools.lru_cache(maxsize=256)
def announce(backend: str, why: str) -> None:
    """Say to the log, once, which way of computing attention was taken, and why."""
    _TAKEN.append(backend)
    logging.getLogger("llama_jax.attention").info("attention: %s (%s)", backend, why)


def backends_taken() -> tuple[str, ...]:
    """What "auto" has chosen in this process so far, in the order in which it first did; for reports."""
    return tuple(dict.fromkeys(_TAKEN))


class View(struct.PyTreeNode):
    keys: Any
    values: Any
    layer: Any = None
    lengths: Any = None

    @classmethod
    def of(cls, keys, values):
        return cls(keys, values)

    def read(self):
        if self.layer is None:
            return self.keys, self.values
        f = lambda x: jax.lax.dynamic_index_in_dim(x, self.layer, keepdims=False)
        return over_rows(f, self.keys), over_rows(f, self.values)


def attend(queries, view, seen, *, scale, window=None, backend="auto", division=None):
    keys, values = view.read()
    e = lambda x: None if x is None else x[:, None]
    segs = None if seen.query_segments is None else (e(seen.query_segments), e(seen.key_segments))
    if seen.ordered:
        return attention(queries, keys, values, scale=scale, segments=segs, window=window, backend=backend)
    pos, kpos = e(seen.query_positions), e(seen.key_positions)
    one = queries.shape[0] == 1
    if one:
        queries, pos, kpos = queries[0], pos[0], kpos[0]
        keys, values = over_rows(lambda x: x[0], keys), over_rows(lambda x: x[0], values)
    out = attention(
        queries, keys, values, pos, scale=scale, key_positions=kpos, segments=segs, window=window, backend=backend
    )
    return out[None] if one else out


def attend_with_sinks(queries, sink_queries, view, seen, *, sinks, scale, window=None):
    keys, values = view.read()
    return attention_with_sinks(
        queries,
        sink_queries,
        keys,
        values,
        seen.query_positions[:, None],
        sinks=sinks,
        window=window,
        scale=scale,
        key_positions=seen.key_positions[:, None],
    )


from typing import NamedTuple


class Division(NamedTuple):
    rows: tuple
    heads: tuple
