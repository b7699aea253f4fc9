"""The device side of the engine: pure functions from one state of rows to the next, and their compilation.

Prompts are read one by one into caches of their own, in pieces; a prompt that has been read becomes a row of a pool's state;
and all rows of a pool get one token at a time. Shapes are static: there are few numbers of rows and slots, so that every
program is known before the first request.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from llama_jax import compiled
from llama_jax.config import LlamaConfig
from llama_jax.flags import decoding_on_tpu
from llama_jax.inference.batching import empty_state, insert, insert_cache
from llama_jax.inference.speculation.draft_model import DraftModel, read_more
from llama_jax.inference.speculation.verify import Model, verify
from llama_jax.inference.state import (
    Reading,
    Request,
    State,
    advance,
    empty_reading,
    enlarge,
    lay_out,
    logits_of,
    read,
)
from llama_jax.model.adapter_table import choose_adapters
from llama_jax.model.cache import KVCache, over_buffers
from llama_jax.model.forward import forward, head_of, unembed
from llama_jax.model.options import Compute, Layout, Places
from llama_jax.model.params import Llama
from llama_jax.serving.choosing import (
    ChosenTokens,
    Wishes,
    choose_packed,
    logprob_of,
    most_probable,
    pack,
    packed_width,
)


def take_turn(
    config: LlamaConfig, params: Llama, state: State, wishes: Wishes, compute: Compute, layout: Layout
) -> tuple[State, jax.Array]:
    """One more token of every live row; and the packed `ChosenTokens` [B, 1, any]."""
    params = choose_adapters(params, wishes.adapter)
    found, (_, packed, _) = advance(config, params, _live(state, wishes), compute, layout, partial(choose_packed, wishes))
    return _seen_by_host(found, state, wishes, layout), packed[:, None]


def take_burst(
    config: LlamaConfig,
    params: Llama,
    state: State,
    wishes: Wishes,
    count: jax.Array,
    most: int,
    compute: Compute,
    layout: Layout,
) -> tuple[State, jax.Array]:
    """`take_turn` for `count` tokens, int32[], of at most `most`: [B, most, any], of which the others are not valid."""
    params = choose_adapters(params, wishes.adapter)

    def step(i: jax.Array, carry: tuple[State, jax.Array]) -> tuple[State, jax.Array]:
        state, (_, packed, _) = advance(config, params, carry[0], compute, layout, partial(choose_packed, wishes))
        return state, lax.dynamic_update_slice_in_dim(carry[1], packed[:, None], i, 1)

    width = packed_width(head_of(config, params).shape[0])
    nothing = layout.constrain(jnp.zeros((len(state.done), most, width), jnp.int32), "everywhere")
    found, packed = lax.fori_loop(0, count, step, (_live(state, wishes), nothing))
    return _seen_by_host(found, state, wishes, layout), packed


def take_drafts(
    config: LlamaConfig,
    params: Llama,
    state: State,
    wishes: Wishes,
    drafts: jax.Array,
    compute: Compute,
    layout: Layout,
) -> tuple[State, jax.Array]:
    """Up to K + 1 more tokens of every live row: those of int32[B, K] drafts that the model chooses too, and one; packed.

    Each row must have K + 1 free slots, even if it is not live, because keys and values are written there.
    """
    params = choose_adapters(params, wishes.adapter)
    model = Model(params, config, compute, layout)
    after, found = verify(model, _live(state, wishes), drafts, partial(choose_packed, wishes))
    return _seen_by_host(after, state, wishes, layout), layout.constrain(found.logprobs, "everywhere")


def take_own_drafts(
    config: LlamaConfig,
    params: Llama,
    draft_config: LlamaConfig,
    draft_params: Llama,
    state: State,
    memory: KVCache,
    wishes: Wishes,
    two: jax.Array,
    count: int,
    compute: Compute,
    layout: Layout,
    draft_layout: Layout,
) -> tuple[State, KVCache, jax.Array]:
    """`take_drafts` with `count` tokens from a smaller model, which has read all but at most two tokens of each row.

    Args:
      memory: the draft model's cache of the same rows and slots.
      two: int32[B, 2], the last token that the model has read and the one after it; -1 for a row that is to have no draft.
    """
    draft = DraftModel(draft_config, draft_params, count, draft_layout)
    drafts, memory = draft.propose_after(memory, _live(state, wishes), jnp.maximum(two, 0), count)
    drafts = jnp.where(two[:, :1] < 0, -1, drafts)
    state, packed = take_drafts(config, params, state, wishes, drafts, compute, layout)
    return state, draft.roll_back(memory, state.cache.length), packed


def catch_up(
    config: LlamaConfig,
    params: Llama,
    memory: KVCache,
    tokens: jax.Array,
    starts: jax.Array,
    lengths: jax.Array,
    layout: Layout,
) -> KVCache:
    """The draft model's cache with `lengths`, int32[B], of each row's tokens, int32[B, any], in the slots from `starts`."""
    return read_more(DraftModel(config, params, layout=layout), memory, tokens, starts, lengths, starts + lengths)


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
    """The state of a prompt that has been read, with its first token; and the packed `ChosenTokens` [1, 1, any].

    Args:
      seen: bool[1, rows of the output projection], the prompt's tokens.
    """
    state = empty_state(config, params, Reading(cache, hidden), request, layout)
    state = state.replace(seen=layout.constrain(seen, "logits"), done=jnp.zeros(1, bool))
    with layout.context():
        state, packed = choose_packed(wishes, state, logits_of(config, params, hidden, layout), layout)
    return state.replace(done=layout.constrain(state.done, "everywhere")), packed[:, None]


def _live(state: State, wishes: Wishes) -> State:
    """The state in which rows that are not live are done."""
    return state.replace(done=state.done | ~wishes.live)


def _seen_by_host(state: State, before: State, wishes: Wishes, layout: Layout) -> State:
    """The state after a turn, in which rows that were not live are no more done than `before` it."""
    return state.replace(done=layout.constrain(jnp.where(wishes.live, state.done, before.done), "everywhere"))


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
    """`read` a piece int32[1, C], and score the token after each of its tokens: C rows of packed `ChosenTokens`.

    Args:
      targets: int32[C], the tokens that follow.
      wanted: bool[], whether alternatives are wanted.
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


def arrange(state: State, order: jax.Array, capacity: int, layout: Layout) -> State:
    """A state with other rows and slots: row i is row order[i] of `state`, or empty where that is negative.

    Args:
      order: int32[any].
      capacity: slots of each row; slots that are cut off must not hold a token of a row that is kept.
    """
    kept = order >= 0
    rows = jnp.maximum(order, 0)
    cache = _cache_of(state.cache, rows, capacity)
    rest = jax.tree.map(lambda x: jnp.take(x, rows, axis=0, mode="clip"), state.replace(cache=None))
    done = layout.constrain(rest.done | ~kept, "everywhere")
    return rest.replace(cache=lay_out(cache, layout), seen=layout.constrain(rest.seen, "logits"), done=done)


def arrange_cache(cache: KVCache, order: jax.Array, capacity: int, layout: Layout) -> KVCache:
    """The same for a cache alone."""
    return lay_out(_cache_of(cache, jnp.maximum(order, 0), capacity), layout)


def _cache_of(cache: KVCache, rows: jax.Array, capacity: int) -> KVCache:
    axis = int(not isinstance(cache.k, tuple))
    arranged = over_buffers(lambda buffer: _arranged(buffer, rows, capacity, axis), cache)
    return arranged.replace(length=jnp.take(cache.length, rows, axis=0, mode="clip"))


@partial(jax.jit, static_argnums=(2, 3))  # traced once for all layers
def _arranged(buffer: jax.Array, rows: jax.Array, capacity: int, axis: int) -> jax.Array:
    """Some rows of a cache buffer, with this many slots each."""
    buffer = jnp.take(buffer, rows, axis=axis, mode="clip")[..., : min(capacity, buffer.shape[-2]), :]
    missing = capacity - buffer.shape[-2]
    return jnp.pad(buffer, [(0, 0)] * (buffer.ndim - 2) + [(0, missing), (0, 0)]) if missing else buffer


def take_row(state: State, row: jax.Array, layout: Layout) -> State:
    """The state of the single row `row`, int32[], which continues."""
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
    """The cache of one row with the result of `cut` in the slots from `start` on; its length is then their end."""
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
    take_burst: Callable[..., Any]
    take_drafts: Callable[..., Any]
    take_own_drafts: Callable[..., Any]
    catch_up: Callable[..., Any]
    begin: Callable[..., Any]
    read: Callable[..., Any]
    score: Callable[..., Any]
    empty_reading: Callable[..., Any]
    empty_state: Callable[..., Any]
    enlarge: Callable[..., Any]
    arrange: Callable[..., Any]
    arrange_cache: Callable[..., Any]
    take_row: Callable[..., Any]
    insert: Callable[..., Any]
    insert_cache: Callable[..., Any]
    cut: Callable[..., Any]
    paste: Callable[..., Any]


@functools.cache
def programs_for(platform: str) -> Programs:
    """The programs for "cpu", "gpu" or "tpu"."""
    options = decoding_on_tpu() if platform == "tpu" else None
    return Programs(
        take_turn=compiled.jit(take_turn, static_argnums=(0, 4, 5), donate_argnums=2, compiler_options=options),
        take_burst=compiled.jit(take_burst, static_argnums=(0, 5, 6, 7), donate_argnums=2, compiler_options=options),
        take_drafts=compiled.jit(take_drafts, static_argnums=(0, 5, 6), donate_argnums=2, compiler_options=options),
        take_own_drafts=compiled.jit(
            take_own_drafts, static_argnums=(0, 2, 8, 9, 10, 11), donate_argnums=(4, 5), compiler_options=options
        ),
        catch_up=compiled.jit(catch_up, static_argnums=(0, 6), donate_argnums=2),
        begin=compiled.jit(begin, static_argnums=(0, 7), donate_argnums=2),
        read=compiled.jit(read_piece, static_argnums=(0, 6, 7), donate_argnums=2),
        score=compiled.jit(score, static_argnums=(0, 9, 10), donate_argnums=2),
        empty_reading=compiled.jit(empty_reading, static_argnums=(0, 2, 3, 4, 5)),
        empty_state=compiled.jit(empty_state, static_argnums=(0, 4)),
        enlarge=compiled.jit(enlarge, static_argnums=(1, 2)),
        arrange=compiled.jit(arrange, static_argnums=(2, 3)),
        arrange_cache=compiled.jit(arrange_cache, static_argnums=(2, 3)),
        take_row=compiled.jit(take_row, static_argnums=2),
        insert=compiled.jit(insert, donate_argnums=0),
        insert_cache=compiled.jit(insert_cache, donate_argnums=0),
        cut=compiled.jit(cut, static_argnums=2),
        paste=compiled.jit(paste, donate_argnums=0),
    )
