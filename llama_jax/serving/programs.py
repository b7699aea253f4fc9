"""The device side of the engine: pure functions from one state to the next, and their compilation.

One function prefills chunks of prompts and decodes rows in the same pass. It is compiled for a few numbers of rows and of
tokens, all known before the first request.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax

from llama_jax.config import LlamaConfig
from llama_jax.inference.decode import DecodeState, compute_logits, planned_rope_length
from llama_jax.inference.sampling import sample
from llama_jax.inference.speculation.verify import choose_each
from llama_jax.inference.xla_flags import decode_options_on_tpu
from llama_jax.model.cache import KVCache, init_pages
from llama_jax.model.forward import forward, lm_head_of, unembed
from llama_jax.model.forward_options import ComputeOptions, Positions, Sharding
from llama_jax.model.multi_lora import choose_adapters
from llama_jax.model.params import LlamaParams
from llama_jax.ops import exact
from llama_jax.serving.row_sampling import (
    ChosenTokens,
    RowSettings,
    choose_packed,
    most_probable,
    pack_choices,
    packed_width,
)

BURST = 8  # maximum number of tokens of a row in a turn without drafts


class StaticModel(NamedTuple):
    """The static arguments of a program that describe a model."""

    config: LlamaConfig
    compute: ComputeOptions
    sharding: Sharding


class ServingState(struct.PyTreeNode):
    """The state on the device between steps. Each request that is being served has one of S seats.

    Attributes:
      pages: keys and values, see `KVCache`.
      draft_pages: those of the draft model, with the same tokens in the same pages; None without a draft model.
      token: int32[S], the last sampled token of each seat.
      seen: bool[S, V] (V with padding), tokens that occur in prompt and continuation, for the repetition penalty.
    """

    pages: Any
    draft_pages: Any
    token: jax.Array
    seen: jax.Array


class StepBatch(NamedTuple):
    """The rows of a step: the model processes some tokens of each, and may then sample its next token.

    Attributes:
      tokens: int32[T], the tokens of all rows, concatenated; -1 stands for the last sampled token of the row's seat.
      starts: int32[R + 1]: the tokens of row r are [starts[r], starts[r + 1]).
      seats: int32[R], the seat of each row; S if the row is unused.
      table: int32[R, n], the pages of each row in order.
      lengths: int32[R], tokens of each row that are in the cache already.
      prompts: int32[R], tokens of each row's prompt.
      limits: int32[R], the maximum number of tokens after it.
      counts: int32[R], tokens that each row has generated: the position in its random stream.
      live: bool[R], whether a token of the row is sampled.
    """

    tokens: Any
    starts: Any
    seats: Any
    table: Any
    lengths: Any
    prompts: Any
    limits: Any
    counts: Any
    live: Any


def empty(
    model: StaticModel, params: LlamaParams, draft: StaticModel | None, seats: int, count: int, dtype: str
) -> ServingState:
    """The state before the first step, with `count` pages."""
    drafts = None if draft is None else init_pages(draft.config, count, dtype)
    seen = jnp.zeros((seats, lm_head_of(model.config, params).shape[0]), bool)
    state = ServingState(init_pages(model.config, count, dtype), drafts, jnp.zeros(seats, jnp.int32), seen)
    return _laid_out(state, model.sharding)


def enter(state: ServingState, seat: jax.Array, seen: jax.Array, sharding: Sharding) -> ServingState:
    """Set `seen` bool[V] of seat int32[] for a new request."""
    return state.replace(seen=sharding.constrain(state.seen.at[seat].set(seen), "logits"))


def step(
    model: StaticModel, params: LlamaParams, state: ServingState, batch: StepBatch, settings: RowSettings
) -> tuple[ServingState, jax.Array]:
    """Run the model on the tokens of all rows, and sample a token of each live row: packed `ChosenTokens` [R, 1, n]."""
    sharding = model.sharding
    state, hidden = _read_batch(model, params, state, batch, settings)
    with sharding.context():
        last = hidden[jnp.maximum(batch.starts[1:] - 1, 0)]
        logits = compute_logits(model.config, params, last, model.compute, sharding)
        rows = _rows_to_decode(state, batch, settings, sharding)
        rows, packed = choose_packed(settings, model.compute.exact, rows, logits, sharding)
    return _with_chosen(state, batch, rows, sharding), packed[:, None]


def burst(
    model: StaticModel, params: LlamaParams, state: ServingState, batch: StepBatch, settings: RowSettings, count: jax.Array
) -> tuple[ServingState, jax.Array]:
    """Run `count` int32[] steps, at most `BURST`: packed tokens [R, BURST, n], of which the first `count` are valid."""

    def once(i: jax.Array, carry: tuple[ServingState, StepBatch, jax.Array]) -> tuple[ServingState, StepBatch, jax.Array]:
        state, batch, chosen = carry
        state, packed = step(model, params, state, batch, settings)
        following = batch._replace(
            tokens=jnp.full_like(batch.tokens, -1), lengths=batch.lengths + 1, counts=batch.counts + 1
        )
        return state, following, lax.dynamic_update_slice_in_dim(chosen, packed, i, 1)

    shape = len(batch.seats), BURST, packed_width(lm_head_of(model.config, params).shape[0])
    nothing = model.sharding.constrain(jnp.zeros(shape, jnp.int32), "replicated")
    state, _, chosen = lax.fori_loop(0, count, once, (state, StepBatch(*map(jnp.asarray, batch)), nothing))
    return state, chosen


def verify_drafts(
    model: StaticModel, params: LlamaParams, state: ServingState, batch: StepBatch, settings: RowSettings, drafts: jax.Array
) -> tuple[ServingState, jax.Array]:
    """Up to K + 1 more tokens of every live row, packed: the accepted drafts, and one more token.

    Args:
      batch: one token of each row, live rows first; they have pages for K + 1 tokens.
      drafts: int32[R, K]; -1 for no draft.
    """
    width, sharding = drafts.shape[1] + 1, model.sharding
    tokens = jnp.concatenate([batch.tokens[:, None], jnp.maximum(drafts, 0)], axis=1)
    expanded = batch._replace(tokens=tokens.reshape(-1), starts=batch.starts * width)
    state, hidden = _read_batch(model, params, state, expanded, settings)
    with sharding.context():
        logits = unembed(model.config, params, hidden, model.compute).astype(jnp.float32).reshape(*tokens.shape, -1)
        choose = partial(choose_packed, settings, model.compute.exact)
        rows, chosen = choose_each(_rows_to_decode(state, batch, settings, sharding), logits, drafts, sharding, choose)
    seats = jnp.where(batch.live, batch.seats, len(state.token))
    seen = sharding.constrain(state.seen.at[seats].set(rows.seen, mode="drop"), "logits")
    packed = sharding.constrain(chosen.logprobs, "replicated")
    return _with_chosen(state, batch, rows, sharding).replace(seen=seen), packed


def verify_own_drafts(
    model: StaticModel,
    params: LlamaParams,
    draft: StaticModel,
    draft_params: LlamaParams,
    state: ServingState,
    batch: StepBatch,
    settings: RowSettings,
    last_two: jax.Array,
    count: int,
) -> tuple[ServingState, jax.Array]:
    """`verify_drafts` with `count` tokens of a draft model, whose cache lacks at most the last two tokens of each row.

    The draft model samples with the model's random numbers, so that both agree if their probabilities do. If the first of
    the two tokens is already in its cache, the same keys and values are written again.

    Args:
      last_two: int32[R, 2], the last token in the model's cache and the one after it; -1 for a row without drafts.
    """
    vocab = min(state.seen.shape[-1], lm_head_of(draft.config, draft_params).shape[0])
    sampling, seen = settings.decode.sampling, state.seen[batch.seats][:, :vocab]

    def draw(pages: Any, seen: jax.Array, i: jax.Array, tokens: jax.Array) -> Any:
        """Run the draft model on tokens [R, n], the first at position `lengths + i`, and sample the next one of each row."""
        many = tokens.shape[1]
        read = batch._replace(tokens=tokens.reshape(-1), starts=batch.starts * many, lengths=batch.lengths + i)
        pages, hidden = read_by(draft, draft_params, pages, read)
        with draft.sharding.context():
            last = hidden.reshape(*tokens.shape, -1)[:, -1]
            logits = unembed(draft.config, draft_params, last, draft.compute).astype(jnp.float32)[:, :vocab]
            token = sample(logits, sampling, seen, batch.counts + i + many - 1)
        seen = jax.vmap(lambda seen, token: seen.at[token].set(True))(seen, token)
        return pages, seen, token

    def next_one(carry: Any, i: jax.Array) -> Any:
        pages, seen, token = draw(carry[0], carry[1], i, carry[2][:, None])
        return (pages, seen, token), token

    first = draw(state.draft_pages, seen, jnp.int32(-1), jnp.maximum(last_two, 0))
    (pages, _, _), rest = lax.scan(next_one, first, jnp.arange(1, count, dtype=jnp.int32))
    drafts = jnp.where(last_two[:, :1] < 0, -1, jnp.concatenate([first[2][:, None], rest.T], axis=1))
    return verify_drafts(model, params, state.replace(draft_pages=pages), batch, settings, drafts)


def read_draft(model: StaticModel, params: LlamaParams, pages: Any, batch: StepBatch) -> Any:
    """The draft model's pages with the tokens of a batch."""
    return read_by(model, params, pages, batch)[0]


def score(
    model: StaticModel, params: LlamaParams, state: ServingState, batch: StepBatch, settings: RowSettings, targets: jax.Array
) -> tuple[ServingState, jax.Array]:
    """Prefill a chunk of a single row, and score the token after each of its tokens: T rows of packed `ChosenTokens`.

    Args:
      targets: int32[T], the next token of each token.
    """
    state, hidden = _read_batch(model, params, state, batch, settings)
    with model.sharding.context():
        logits = unembed(model.config, params, hidden, model.compute).astype(jnp.float32)  # [T, V]
        choice = ChosenTokens(
            targets,
            exact.map_row_blocks(model.compute.exact, exact.logprob_of, batch.starts[1], logits, targets),
            jnp.arange(len(targets)) < batch.starts[1],
            *most_probable(model.compute.exact, logits, settings.alternatives[0] > 0, batch.starts[1]),
        )
        return state, model.sharding.constrain(pack_choices(choice), "replicated")


def read_by(
    model: StaticModel, params: LlamaParams, pages: Any, batch: StepBatch, adapter: Any = None
) -> tuple[Any, jax.Array]:
    """The pages with the tokens of a batch, int32[T] and not negative, and their hidden states [T, D].

    Args:
      adapter: int32[R], the index of each row's adapter.
    """
    cache = KVCache(pages, batch.table, batch.lengths)
    row, position = cache.view(1, batch.starts).rows_and_positions(len(batch.tokens))
    if adapter is not None:
        params = choose_adapters(params, adapter[row])
    config, compute, sharding = model
    planned = planned_rope_length(config, batch.prompts, batch.limits)
    positions = Positions(starts=batch.starts, rope_lengths=jnp.maximum(planned[row], position + 1)[:, None])
    hidden, cache = forward(
        config, params, batch.tokens[:, None], cache, positions=positions, compute=compute, sharding=sharding
    )
    return _constrained(cache.pages, sharding), hidden[:, 0]


def _read_batch(
    model: StaticModel, params: LlamaParams, state: ServingState, batch: StepBatch, settings: RowSettings
) -> tuple[ServingState, jax.Array]:
    row, _ = KVCache(state.pages, batch.table, batch.lengths).view(1, batch.starts).rows_and_positions(len(batch.tokens))
    chosen = state.token[jnp.minimum(batch.seats, len(state.token) - 1)]
    batch = batch._replace(tokens=jnp.where(batch.tokens < 0, chosen[row], batch.tokens))
    pages, hidden = read_by(model, params, state.pages, batch, settings.adapter)
    return state.replace(pages=pages), hidden


def _rows_to_decode(state: ServingState, batch: StepBatch, settings: RowSettings, sharding: Sharding) -> DecodeState:
    """The rows of a batch as a `DecodeState`; rows that are not live are done."""
    seen = sharding.constrain(state.seen[jnp.minimum(batch.seats, len(state.token) - 1)], "logits")
    token = jnp.zeros(len(batch.seats), jnp.int32)
    return DecodeState(None, settings.decode, token, seen, jnp.asarray(batch.counts), ~jnp.asarray(batch.live))  # type: ignore[arg-type]


def _with_chosen(state: ServingState, batch: StepBatch, rows: DecodeState, sharding: Sharding) -> ServingState:
    """The state with the last sampled token of each live row."""
    seats = jnp.where(batch.live, batch.seats, len(state.token))
    token = sharding.constrain(state.token.at[seats].set(rows.token, mode="drop"), "replicated")
    seen = sharding.constrain(state.seen.at[seats, rows.token].set(True, mode="drop"), "logits")
    return state.replace(token=token, seen=seen)


def _laid_out(state: ServingState, sharding: Sharding) -> ServingState:
    return ServingState(
        _constrained(state.pages, sharding),
        _constrained(state.draft_pages, sharding),
        sharding.constrain(state.token, "replicated"),
        sharding.constrain(state.seen, "logits"),
    )


def _constrained(pages: Any, sharding: Sharding) -> Any:
    return jax.tree.map(lambda x: sharding.constrain(x, "pages"), pages)


class Programs(NamedTuple):
    """The functions of this file under `jit`, with states donated."""

    empty: Callable[..., Any]
    enter: Callable[..., Any]
    step: Callable[..., Any]
    burst: Callable[..., Any]
    score: Callable[..., Any]
    verify_drafts: Callable[..., Any]
    verify_own_drafts: Callable[..., Any]
    read_draft: Callable[..., Any]


@functools.cache
def programs_for(platform: str) -> Programs:
    """The programs for "cpu", "gpu" or "tpu"."""
    options = decode_options_on_tpu() if platform == "tpu" else None
    return Programs(
        empty=jax.jit(empty, static_argnums=(0, 2, 3, 4, 5)),
        enter=jax.jit(enter, static_argnums=3, donate_argnums=0),
        step=jax.jit(step, static_argnums=0, donate_argnums=2, compiler_options=options),
        burst=jax.jit(burst, static_argnums=0, donate_argnums=2, compiler_options=options),
        score=jax.jit(score, static_argnums=0, donate_argnums=2),
        verify_drafts=jax.jit(verify_drafts, static_argnums=0, donate_argnums=2, compiler_options=options),
        verify_own_drafts=jax.jit(verify_own_drafts, static_argnums=(0, 2, 8), donate_argnums=4, compiler_options=options),
        read_draft=jax.jit(read_draft, static_argnums=0, donate_argnums=2),
    )
