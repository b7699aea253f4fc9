"""Continuous batching: one state whose rows are replaced while others continue, as a server needs.

Start with a state of empty rows, `insert` a row whenever a prompt has been read, and `step` until it is done.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from llama_jax.config import LlamaConfig
from llama_jax.errors import GenerationError
from llama_jax.inference.state import Piece, Reading, Request, State, advance, lay_out
from llama_jax.model.cache import KVCache
from llama_jax.model.forward import head_of
from llama_jax.model.options import Compute, Layout
from llama_jax.model.params import Llama


def empty_state(config: LlamaConfig, params: Llama, reading: Reading, request: Request, layout: Layout = Layout()) -> State:
    """A state of rows that are all done, to be inserted into: `reading` has an empty cache of B rows."""
    batch = reading.hidden.shape[0]
    return State(
        cache=lay_out(reading.cache.replace(fresh=False), layout),
        request=request,
        token=jnp.zeros(batch, jnp.int32),
        seen=layout.constrain(jnp.zeros((batch, head_of(config, params).shape[0]), bool), "logits"),
        count=jnp.zeros(batch, jnp.int32),
        done=jnp.ones(batch, bool),
    )


def insert(state: State, row: jax.Array, one: State) -> State:
    """The state with its row `row`, whatever it held, replaced by the only row of `one`.

    Args:
      row: int32[].
      one: a state of a single row, whose cache has at most as many slots; with a window, exactly as many.

    Raises:
      GenerationError: `one` is not a single row, or its cache differs: dtype, window, sinks, slots; or it has more
        stop tokens than the state has room for; or the state has no such row, where the row number is known.
    """
    _check(state, row, one)
    places, stops = state.request.stop.shape[1], one.request.stop.shape[1]
    if stops > places:
        raise GenerationError(
            f"a row with {stops} places for stop tokens does not fit into a state with {places}; make it wider"
        )
    # All stop-token places of the row are written, so that its old stop tokens cannot end the new request.
    stop = jnp.pad(one.request.stop, [(0, 0), (0, places - stops)], constant_values=-1)
    one = one.replace(request=one.request.replace(stop=stop))

    cache = insert_cache(state.cache, row, one.cache)
    rest = jax.tree.map(lambda whole, new: _put(whole, new, row, 0), state.replace(cache=None), one.replace(cache=None))
    return rest.replace(cache=cache)


def insert_cache(cache: KVCache, row: jax.Array, one: KVCache) -> KVCache:
    """The cache with its row `row` replaced by the only row of `one`, of the same kind and with at most as many slots."""
    buffers = jax.tree.map(lambda whole, new: _put(whole, new, row, 1), (cache.k, cache.v), (one.k, one.v))
    return cache.replace(k=buffers[0], v=buffers[1], length=_put(cache.length, one.length, row, 0))


def _put(whole: jax.Array, new: jax.Array, row: jax.Array, axis: int) -> jax.Array:
    start = [jnp.zeros((), jnp.int32)] * whole.ndim
    start[axis] = row
    return lax.dynamic_update_slice(whole, new.astype(whole.dtype), start)


def _check(state: State, row: jax.Array, one: State) -> None:
    rows, new = len(state.done), len(one.done)
    if new != 1:
        raise GenerationError(f"a state of {new} rows cannot be inserted; give one of a single row")
    if not isinstance(row, jax.core.Tracer) and not 0 <= int(row) < rows:
        raise GenerationError(f"row={int(row)} is not one of the state's {rows} rows")
    ours, theirs = state.cache, one.cache
    for name in ("window", "sinks"):
        if getattr(ours, name) != getattr(theirs, name):
            wanted = getattr(ours, name)
            raise GenerationError(f"a row whose cache has {name}={getattr(theirs, name)} does not fit into {name}={wanted}")
    kinds = [(jax.tree.structure(cache.k), jax.tree.leaves(cache.k)[0].dtype) for cache in (ours, theirs)]
    if kinds[0] != kinds[1]:
        raise GenerationError("a row whose cache is of another dtype does not fit: both int8 or not")
    if theirs.capacity > ours.capacity or (ours.window is not None and theirs.capacity != ours.capacity):
        raise GenerationError(
            f"a row whose cache has {theirs.capacity} slots does not fit into {ours.capacity}; `grow` the state's first,"
            " and with a window give both as many"
        )


def step(
    config: LlamaConfig, params: Llama, state: State, compute: Compute = Compute(), layout: Layout = Layout()
) -> tuple[State, Piece]:
    """Read the token of every row that is not done, and choose its next one: [B, 1]."""
    state, (token, logprobs, valid) = advance(config, params, state, compute, layout)
    return state, Piece(token[:, None], logprobs[:, None], valid[:, None])
