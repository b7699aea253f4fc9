"""Causal grouped-query attention: one function, several ways to compute it."""

from __future__ import annotations

import functools
import logging
from typing import Literal, get_args

import jax
import jax.numpy as jnp

from llama_jax.errors import ConfigError
from llama_jax.ops.attention.blockwise import blockwise
from llama_jax.ops.attention.kernels import cudnn, cudnn_refuses, splash, splash_refuses
from llama_jax.ops.attention.reference import reference
from llama_jax.ops.attention.rows import rows
from llama_jax.ops.attention.seen import Seen, places

Backend = Literal["auto", "reference", "rows", "blockwise", "cudnn", "splash"]
# From so many scores per head on, blocks are faster than whole rows, and from so many queries on
# (experiments/bench_attention.py); memory is a reason of its own.
MANY_SCORES, MANY_QUERIES = 2**20, 64
KERNELS: dict[str, Backend] = {"gpu": "cudnn", "tpu": "splash"}


def attention(
    queries: jax.Array,
    keys: jax.Array,
    values: jax.Array,
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
      keys, values: [*batch, S, H].
      query_positions: int[*batch, T], batch axes of size 1 broadcast. Keys after a query's own position are not seen: that
        one comparison is the causal mask and hides the empty or padded end of a cache as well. None where query t is the
        one of slot t, T = S: what is after a block of queries is then not even computed.
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
      ConfigError: an unknown backend, or one that cannot compute this.
    """
    ordered = query_positions is None and key_positions is None
    seen = places(queries, keys, query_positions, key_positions, segments, lengths)
    backend = _choose(queries, keys, seen, ordered, backend)
    if backend == "reference":
        return reference(queries, keys, values, seen, scale=scale, window=window)
    if backend == "blockwise":
        return blockwise(queries, keys, values, seen, scale, window)
    if backend == "rows":
        return rows(queries, keys, values, seen, scale, window, ordered)
    if backend == "cudnn":
        mixed = cudnn(queries, keys, values, scale=scale, window=window)
    else:
        mixed = splash(queries, keys, values, seen, scale=scale, window=window)
    if lengths is None:
        return mixed
    return jnp.where((jnp.arange(queries.shape[-3]) < lengths[..., None])[..., None, None], mixed, 0)


def _choose(queries: jax.Array, keys: jax.Array, seen: Seen, ordered: bool, backend: Backend) -> Backend:
    """The backend to take for "auto", the given one otherwise."""
    if backend not in get_args(Backend):
        raise ConfigError(f"attention backend={backend!r} must be one of {', '.join(get_args(Backend))}")
    if backend in ("reference", "rows", "blockwise"):
        return backend
    platform = jax.default_backend()
    refusals = {
        "cudnn": cudnn_refuses(queries, seen, ordered, platform),
        "splash": splash_refuses(queries, ordered, platform),
    }
    if backend in refusals:
        if refusals[backend]:
            raise ConfigError(f"attention backend={backend!r}: {refusals[backend]}")
        return backend
    new, slots = queries.shape[-3], keys.shape[-2]
    plain: Backend = "blockwise" if new >= MANY_QUERIES and new * slots >= MANY_SCORES else "rows"
    if new == 1 or platform not in KERNELS:
        _announce(plain, f"on {platform}")
        return plain
    kernel = KERNELS[platform]
    refusal = refusals[kernel]
    _announce(plain if refusal else kernel, refusal or f"on {platform}")
    return plain if refusal else kernel


@functools.lru_cache(maxsize=256)
def _announce(backend: str, why: str) -> None:
    """Say which way was taken, once."""
    logging.getLogger("llama_jax.attention").info("attention: %s (%s)", backend, why)
