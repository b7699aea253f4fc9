"""The device's side of the engine: pure functions from one state of rows to the next, and how they are compiled.

Prompts are read one by one into caches of their own, in pieces; a prompt that has been read becomes a row of a pool's state;
and all rows of a pool get a token at a time. Each function has static shapes: numbers of rows and slots are few, so that
every program is known before the first request.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from llama_jax.config import LlamaConfig
from llama_jax.flags import decoding_on_tpu
from llama_jax.inference.batching import empty_state, insert
from llama_jax.inference.speculation.verify import Model, verify
from llama_jax.inference.state import (
    Reading,
    Request,
    State,
    advance,
    choose,
    empty_reading,
    enlarge,
    lay_out,
    logits_of,
    read,
)
from llama_jax.model.adapter_table import choose_adapters
from llama_jax.model.cache import KVCache, over_buffers
from llama_jax.model.forward import forward, unembed
from llama_jax.model.options import Compute, Layout, Places
from llama_jax.model.params import Llama
from llama_jax.serving.requests import MOST_ALTERNATIVES


class Wishes(NamedTuple):
    """What the host says of every row, turn by turn.

    Attributes:
      live: bool[B]; a row that is not is done, whatever it was about to do.
      least: int32[B], tokens before which no stop token is chosen.
      alternatives: int32[B], how many are wanted beside each token.
      constrained: bool[B], whether `allowed` says anything of the row.
      allowed: uint32[B, ceil(V / 32)], bit i % 32 of word i // 32 for token i.
      adapter: int32[B], which of the model's adapters the row uses, -1 for none.
    """

    live: Any
    least: Any
    alternatives: Any
    constrained: Any
    allowed: Any
    adapter: Any

    @classmethod
    def none(cls, rows: int, vocab: int) -> Wishes:
        """Of rows that wish for nothing, and are not live."""
        numbers = np.zeros(rows, np.int32)
        allowed, adapter = np.zeros((rows, -(-vocab // 32)), "u4"), np.full(rows, -1, np.int32)
        return cls(np.zeros(rows, bool), numbers, numbers.copy(), np.zeros(rows, bool), allowed, adapter)


class ChosenTokens(NamedTuple):
    """A token of each row, as the host reads it.

    Attributes:
      token: int32[B].
      logprob: float32[B].
      valid: bool[B]; False for a row that was done before.
      ids, logprobs: [B, A], the most probable tokens, with their log-probabilities; zeros where no row wants any.
    """

    token: Any
    logprob: Any
    valid: Any
    ids: Any
    logprobs: Any


def take_turn(
    config: LlamaConfig, params: Llama, state: State, wishes: Wishes, compute: Compute, layout: Layout
) -> tuple[State, jax.Array]:
    """One more token of every live row; and the packed `ChosenTokens`."""
    params = choose_adapters(params, wishes.adapter)
    state = state.replace(done=state.done | ~wishes.live)
    state, (_, packed, _) = advance(config, params, state, compute, layout, partial(_choose, wishes))
    return _seen_by_host(state, layout), packed


def take_drafts(
    config: LlamaConfig,
    params: Llama,
    state: State,
    wishes: Wishes,
    drafts: jax.Array,
    compute: Compute,
    layout: Layout,
) -> tuple[State, jax.Array]:
    """Up to K + 1 more tokens of every live row: those of int32[B, K] drafts that are its own, and one; packed.

    Each row must have K + 1 slots, also one that is not live: what is read is written there.
    """
    params = choose_adapters(params, wishes.adapter)
    state = state.replace(done=state.done | ~wishes.live)
    state, found = verify(Model(params, config, compute, layout), state, drafts, partial(_choose, wishes))
    return _seen_by_host(state, layout), layout.constrain(found.logprobs, "everywhere")


def begin(
    config: LlamaConfig,
    params: Llama,
    cache: KVCache,
    hidden: jax.Array,
    seen: jax.Array,
    request: Request,
    wishes: Wishes,
    layout: Layout,
) -> tuple[State, jax.Array]:
    """The state of a prompt that has been read, with its first token; and the packed `ChosenTokens`.

    Args:
      seen: bool[1, rows of the output projection], the prompt's tokens.
    """
    state = empty_state(config, params, Reading(cache, hidden), request, layout)
    state = state.replace(seen=layout.constrain(seen, "logits"), done=jnp.zeros(1, bool))
    with layout.context():
        state, packed = _choose(wishes, state, logits_of(config, params, hidden, layout), layout)
    return _seen_by_host(state, layout), packed


def _seen_by_host(state: State, layout: Layout) -> State:
    return state.replace(done=layout.constrain(state.done, "everywhere"))


def _choose(wishes: Wishes, state: State, logits: jax.Array, layout: Layout) -> tuple[State, jax.Array]:
    """`choose` of what is permitted: the state, and the packed `ChosenTokens` with log-probabilities among all tokens."""
    rest, packed = _choose_without_cache(wishes, state.replace(cache=None), logits, layout)
    return rest.replace(cache=state.cache), packed


@partial(jax.jit, static_argnums=3)  # for its trace, which states of any number of slots share; XLA takes it inline
def _choose_without_cache(wishes: Wishes, state: State, logits: jax.Array, layout: Layout) -> tuple[State, jax.Array]:
    valid = ~state.done
    barred = state.count < wishes.least
    scores = lax.cond(
        jnp.any(wishes.constrained | barred),
        lambda: jnp.where(_permitted(state, wishes, barred, logits.shape[-1]), logits, -jnp.inf),
        lambda: logits,
    )
    state, _ = choose(state, layout.constrain(scores, "logits"), layout)
    ids, logprobs = most_probable(logits, jnp.any(wishes.alternatives > 0))
    choice = ChosenTokens(state.token, logprob_of(logits, state.token), valid, ids, logprobs)
    return state, layout.constrain(pack(choice), "everywhere")


def logprob_of(logits: jax.Array, tokens: jax.Array) -> jax.Array:
    """float32[B], of a token in each row [B, V]. Row by row, so that each device looks at its own rows only."""
    return jax.vmap(lambda logits, token: logits[token])(logits, tokens) - jax.nn.logsumexp(logits, axis=-1)


def _permitted(state: State, wishes: Wishes, barred: jax.Array, vocab: int) -> jax.Array:
    """bool[B, V]: what the constraint of each row allows, less its stop tokens where they come too soon."""
    bits = (wishes.allowed[:, :, None] >> jnp.arange(32, dtype=jnp.uint32)) & 1
    bits = bits.reshape(len(barred), -1)[:, :vocab].astype(bool)
    allowed = jnp.pad(bits, [(0, 0), (0, vocab - bits.shape[1])]) | ~wishes.constrained[:, None]
    stop = jnp.where(state.request.stop < 0, vocab, state.request.stop)
    stops = jax.vmap(lambda stop: jnp.zeros(vocab, bool).at[stop].set(True, mode="drop"))(stop)
    return allowed & ~(stops & barred[:, None])


def most_probable(logits: jax.Array, wanted: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The `MOST_ALTERNATIVES` most probable tokens of each row [B, V] and their log-probabilities; zeros if not `wanted`."""
    count = min(MOST_ALTERNATIVES, logits.shape[-1])

    def find() -> tuple[jax.Array, jax.Array]:
        scores, ids = lax.top_k(logits, count)
        return ids.astype(jnp.int32), scores - jax.nn.logsumexp(logits, axis=-1, keepdims=True)

    def skip() -> tuple[jax.Array, jax.Array]:
        return jnp.zeros((len(logits), count), jnp.int32), jnp.zeros((len(logits), count), jnp.float32)

    return lax.cond(wanted, find, skip)


def read_piece(
    config: LlamaConfig,
    params: Llama,
    reading: Reading,
    tokens: jax.Array,
    places: Places,
    adapter: jax.Array,
    compute: Compute,
    layout: Layout,
) -> Reading:
    """`read` a piece of a prompt by the model with an adapter, int32[1]."""
    return read(config, choose_adapters(params, adapter), reading, tokens, places, compute, layout)


def score(
    config: LlamaConfig,
    params: Llama,
    cache: KVCache,
    hidden: jax.Array,
    tokens: jax.Array,
    targets: jax.Array,
    places: Places,
    adapter: jax.Array,
    wanted: jax.Array,
    compute: Compute,
    layout: Layout,
) -> tuple[Reading, jax.Array]:
    """`read` a piece int32[1, C], and what is said of the token after each of its own: C rows of packed `ChosenTokens`.

    Args:
      targets: int32[C], the tokens that follow.
      wanted: bool[], whether alternatives are.
    """
    params = choose_adapters(params, adapter)
    new, cache = forward(config, params, tokens, cache, places=places, compute=compute, layout=layout)
    last = jnp.take_along_axis(new, (places.lengths - 1)[:, None, None], axis=1)[:, 0]
    with layout.context():
        logits = unembed(config, params, new[0]).astype(jnp.float32)  # [C, V]
        choice = ChosenTokens(
            targets,
            logprob_of(logits, targets),
            jnp.arange(len(targets)) < places.lengths[0],
            *most_probable(logits, wanted),
        )
        packed = layout.constrain(pack(choice), "everywhere")
    return Reading(lay_out(cache, layout), layout.constrain(last, "row")), packed


def pack(choice: ChosenTokens) -> jax.Array:
    """All of a choice as one array, int32[B, 3 + 2 A], which is one transfer."""
    as_bits = lambda x: lax.bitcast_convert_type(x, jnp.int32)
    columns = [choice.token[:, None], as_bits(choice.logprob)[:, None], choice.valid[:, None].astype(jnp.int32)]
    return jnp.concatenate([*columns, choice.ids, as_bits(choice.logprobs)], axis=1)


def unpack(packed: jax.Array) -> ChosenTokens:
    """Undo `pack`, waiting for it: arrays of numpy, with whatever leading axes it has."""
    array = np.asarray(packed)
    floats, ends = array.view(np.float32), 3 + (array.shape[-1] - 3) // 2
    return ChosenTokens(array[..., 0], floats[..., 1], array[..., 2].astype(bool), array[..., 3:ends], floats[..., ends:])


def arrange(state: State, order: jax.Array, capacity: int, layout: Layout) -> State:
    """A state of other rows and slots: row i is row order[i] of `state`, or an empty one where that is negative.

    Args:
      order: int32[any].
      capacity: slots of each row; none that is cut off may hold a token of a row that is kept.
    """
    kept = order >= 0
    rows = jnp.maximum(order, 0)
    axis = int(not isinstance(state.cache.k, tuple))

    def of_rest(x: jax.Array) -> jax.Array:
        return jnp.take(x, rows, axis=0, mode="clip")

    cache = over_buffers(lambda buffer: _arranged(buffer, rows, capacity, axis), state.cache).replace(
        length=of_rest(state.cache.length)
    )
    rest = jax.tree.map(of_rest, state.replace(cache=None))
    done = layout.constrain(rest.done | ~kept, "everywhere")
    return rest.replace(cache=lay_out(cache, layout), seen=layout.constrain(rest.seen, "logits"), done=done)


@partial(jax.jit, static_argnums=(2, 3))  # traced once for all layers
def _arranged(buffer: jax.Array, rows: jax.Array, capacity: int, axis: int) -> jax.Array:
    """Some rows of a buffer of a cache, and so many slots of each."""
    buffer = jnp.take(buffer, rows, axis=axis, mode="clip")[..., : min(capacity, buffer.shape[-2]), :]
    missing = capacity - buffer.shape[-2]
    return jnp.pad(buffer, [(0, 0)] * (buffer.ndim - 2) + [(0, missing), (0, 0)]) if missing else buffer


def take_row(state: State, row: jax.Array, layout: Layout) -> State:
    """The state of one row alone, which goes on: int32[] `row`."""
    return arrange(state, row[None], state.cache.capacity, layout).replace(done=jnp.zeros(1, bool))


def cut(cache: KVCache, start: jax.Array, size: int) -> tuple[Any, Any]:
    """A copy of `size` slots of a cache of one row: keys and values [layers, K, size, ...]."""
    layers = int(not isinstance(cache.k, tuple))  # axes before that of the rows

    def of(x: jax.Array) -> jax.Array:  # [(L,) 1, K, S, ...]
        return jnp.squeeze(lax.dynamic_slice_in_dim(x, start, size, layers + 2), layers)

    k, v = jax.tree.map(of, (cache.k, cache.v))
    if layers:
        return k, v
    return jax.tree.map(lambda *each: jnp.stack(each), *k), jax.tree.map(lambda *each: jnp.stack(each), *v)


def paste(cache: KVCache, piece: tuple[Any, Any], start: jax.Array) -> KVCache:
    """The cache of one row with what `cut` gave in the slots from `start` on: it has then read all up to their end."""
    layers = int(not isinstance(cache.k, tuple))

    def put(x: jax.Array, new: jax.Array) -> jax.Array:
        return lax.dynamic_update_slice_in_dim(x, jnp.expand_dims(new, layers), start, layers + 2)

    def put_all(old: Any, new: Any) -> Any:
        if layers:
            return jax.tree.map(put, old, new)
        return tuple(jax.tree.map(put, layer, jax.tree.map(lambda x, i=i: x[i], new)) for i, layer in enumerate(old))

    k, v = (put_all(old, new) for old, new in zip((cache.k, cache.v), piece, strict=True))
    size = jax.tree.leaves(piece)[0].shape[2]
    return cache.replace(k=k, v=v, length=jnp.full_like(cache.length, start + size))


class Programs(NamedTuple):
    """The functions of this file, compiled when they are first called with new shapes; states and caches are donated."""

    take_turn: Callable[..., Any]
    take_drafts: Callable[..., Any]
    begin: Callable[..., Any]
    read: Callable[..., Any]
    score: Callable[..., Any]
    empty_reading: Callable[..., Any]
    empty_state: Callable[..., Any]
    enlarge: Callable[..., Any]
    arrange: Callable[..., Any]
    take_row: Callable[..., Any]
    insert: Callable[..., Any]
    cut: Callable[..., Any]
    paste: Callable[..., Any]


@functools.cache
def programs_for(platform: str) -> Programs:
    """The programs for "cpu", "gpu" or "tpu"."""
    options = decoding_on_tpu() if platform == "tpu" else None
    return Programs(
        take_turn=jax.jit(take_turn, static_argnums=(0, 4, 5), donate_argnums=2, compiler_options=options),
        take_drafts=jax.jit(take_drafts, static_argnums=(0, 5, 6), donate_argnums=2, compiler_options=options),
        begin=jax.jit(begin, static_argnums=(0, 7), donate_argnums=2),
        read=jax.jit(read_piece, static_argnums=(0, 6, 7), donate_argnums=2),
        score=jax.jit(score, static_argnums=(0, 9, 10), donate_argnums=2),
        empty_reading=jax.jit(empty_reading, static_argnums=(0, 2, 3, 4, 5)),
        empty_state=jax.jit(empty_state, static_argnums=(0, 4)),
        enlarge=jax.jit(enlarge, static_argnums=(1, 2)),
        arrange=jax.jit(arrange, static_argnums=(2, 3)),
        take_row=jax.jit(take_row, static_argnums=2),
        insert=jax.jit(insert, donate_argnums=0),
        cut=jax.jit(cut, static_argnums=2),
        paste=jax.jit(paste, donate_argnums=0),
    )
