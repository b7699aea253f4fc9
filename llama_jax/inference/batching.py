"""Continuous batching: one state whose rows are replaced while others go on, as a server of requests needs.

Begin with a state of empty rows, `insert` a row whenever a request has been read, and `step` until it is done.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from llama_jax.config import LlamaConfig
from llama_jax.errors import GenerationError
from llama_jax.inference.state import Piece, Reading, Request, State, advance, lay_out
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
    """The state with the only row of `one` in the place of its row `row`, whatever that held.

    Args:
      row: int32[].
      one: a state of a single row, whose cache has at most as many slots; with a window, as many.

    Raises:
      GenerationError: the row has more stop tokens than the state has places for.
    """
    places, stops = state.request.stop.shape[1], one.request.stop.shape[1]
    if stops > places:
        raise GenerationError(
            f"a row with {stops} places for stop tokens does not fit into a state with {places}; make it wider"
        )
    # All places of the row are written: what it held before ends no other request.
    stop = jnp.pad(one.request.stop, [(0, 0), (0, places - stops)], constant_values=-1)
    one = one.replace(request=one.request.replace(stop=stop))

    def put(whole: jax.Array, new: jax.Array, axis: int = 0) -> jax.Array:
        start = [jnp.zeros((), jnp.int32)] * whole.ndim
        start[axis] = row
        return lax.dynamic_update_slice(whole, new.astype(whole.dtype), start)

    stacked = not isinstance(state.cache.k, tuple)
    buffers = jax.tree.map(
        lambda whole, new: put(whole, new, int(stacked)), (state.cache.k, state.cache.v), (one.cache.k, one.cache.v)
    )
    cache = state.cache.replace(k=buffers[0], v=buffers[1], length=put(state.cache.length, one.cache.length))
    rest = jax.tree.map(put, state.replace(cache=None), one.replace(cache=None))
    return rest.replace(cache=cache)


def step(
    config: LlamaConfig, params: Llama, state: State, compute: Compute = Compute(), layout: Layout = Layout()
) -> tuple[State, Piece]:
    """Read the token of every row that is not done, and choose its next one: [B, 1]."""
    state, (token, logprobs, valid) = advance(config, params, state, compute, layout)
    return state, Piece(token[:, None], logprobs[:, None], valid[:, None])
