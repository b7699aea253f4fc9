"""Generation with drafts: rounds of plain decoding and rounds of passes with drafts, chosen by a `DraftLength`."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from llama_jax.errors import GenerationError, short_repr
from llama_jax.inference.compiled_decode import (
    MAX_CHUNKS_PER_CALL,
    CompiledDecode,
    allow_transfers,
    capacity_for,
    checked_chunk,
    pack_chunk,
    unpack_chunk,
)
from llama_jax.inference.decode import STEPS_PER_CHUNK, DecodeState, TokenChunk
from llama_jax.inference.drafter import MAX_DRAFT_TOKENS, DraftCounts, DraftedChunk, Drafter, PreparedPrompts
from llama_jax.inference.speculation.draft_length import (
    DraftLength,
    halved_lengths,
    max_passes,
    next_draft_length,
    record_passes,
)
from llama_jax.inference.speculation.verify import PassShape, PassState, VerifierInputs, run_passes
from llama_jax.inference.xla_flags import decode_options_on_tpu
from llama_jax.model.cache import CacheOptions

MAX_PASSES = 16  # with drafts in one call
MIN_COMPILE_SECONDS = 0.1  # a program's first call may include its compilation if it takes longer


def stream_drafted(
    programs: CompiledDecode, drafter: Drafter, prompts: PreparedPrompts, options: CacheOptions, max_chunks: int
) -> Iterator[TokenChunk]:
    """The chunks of `stream` with a drafter.

    Raises:
      GenerationError: `draft` is not a drafter, or cannot draft for this model and these prompts; several processes.
      MeshError: a draft model on other devices.
    """
    if not isinstance(drafter, Drafter):
        raise GenerationError(f"draft={short_repr(drafter, 40)} must be a PromptLookup, a DraftModel or another Drafter")
    if jax.process_count() > 1:
        raise GenerationError(
            f"draft: this is one of {jax.process_count()} processes, which might choose different numbers of drafts;"
            " omit the draft"
        )
    _, lengths, settings = prompts
    drafter.check(programs.config, programs.params, lengths, settings, options)
    return drafted_chunks(programs, drafter, prompts, options, max_chunks, next_draft_length)


def drafted_chunks(
    programs: CompiledDecode,
    drafter: Drafter,
    prompts: PreparedPrompts,
    options: CacheOptions,
    max_chunks: int,
    choose_length: Callable[[DraftLength], int],
) -> Iterator[TokenChunk]:
    """The chunks of `stream` with a drafter that has been checked.

    Args:
      choose_length: the number of tokens to draft in the next passes.
    """
    tokens, lengths, settings = prompts
    capacity = capacity_for(lengths, settings)
    prefilled = programs.prefill_prompts(tokens, lengths, settings.limit, capacity, options)
    state, packed = programs.begin_decode(prefilled, *prompts)
    drafter, drafter_state = drafter.begin(tokens, lengths, capacity, options)
    model = VerifierInputs(programs.params, programs.config, programs.compute, programs.sharding)
    count_accepted = drafter.count_accepted(tokens, lengths)
    draft_length = DraftLength.start(halved_lengths(drafter.tokens), prior=1.0 if count_accepted is None else 0.0)
    chunk, done, _ = unpack_chunk(packed)
    history = append_chunk(start_history(tokens, lengths, capacity), chunk)
    if count_accepted:
        count_accepted(chunk)
    compiled_lengths = set[int]()
    yield chunk

    max_chunks = min(max_chunks, MAX_CHUNKS_PER_CALL)
    while not done.all():
        length = choose_length(draft_length)
        count = max_passes(draft_length, length)
        started = time.perf_counter()
        if length:
            count = min(count, max(max_chunks * STEPS_PER_CHUNK // (length + 1), 1), MAX_PASSES)
            drafter_state = drafter.catch_up(drafter_state, history.tokens, history.lengths)
            run_passes_on_device = _passes_on(_platform(state))
            shape = PassShape(length, MAX_PASSES)
            with allow_transfers():
                state, drafter_state, packed = run_passes_on_device(
                    model, drafter, state, drafter_state, history.tokens, np.int32(count), shape
                )
            chunk, done, taken, counts, observed = _unpack(packed, length)
        else:
            state, packed = programs.decode(state, min(-(-count // STEPS_PER_CHUNK), max_chunks), max_chunks)
            chunk, done, chunks_run = unpack_chunk(packed)
            taken = chunks_run * STEPS_PER_CHUNK
            tokens_of_rows = chunk.valid.sum(axis=1)
            counts = DraftCounts(tokens_of_rows, np.zeros_like(tokens_of_rows), np.zeros_like(tokens_of_rows))
            observed = 0, 0
        seconds = time.perf_counter() - started
        if not done.all():  # otherwise nothing more is generated
            if count_accepted:  # which must see every chunk
                compared = count_accepted(chunk)
                observed = observed if length else compared
            measured = seconds if length in compiled_lengths or seconds < MIN_COMPILE_SECONDS else None
            tokens_per_row = float(chunk.valid.sum() * taken / counts.passes.sum())
            draft_length = record_passes(draft_length, length, taken, tokens_per_row, *observed, measured)
            compiled_lengths.add(length)
            history = append_chunk(history, chunk)
        yield DraftedChunk.of(chunk, counts)


class TokenHistory(NamedTuple):
    """All tokens of the rows: `tokens` int32[B, S], of which the first `lengths` int[B] of each row are defined."""

    tokens: np.ndarray
    lengths: np.ndarray


def start_history(tokens: np.ndarray, lengths: np.ndarray, capacity: int) -> TokenHistory:
    """The prompts, with room for rows of `capacity` tokens and one pass of drafts after them."""
    room = capacity + 1 + MAX_DRAFT_TOKENS
    padded = np.pad(tokens[:, :room], ((0, 0), (0, max(room - tokens.shape[1], 0))))
    return TokenHistory(padded, lengths.astype(np.int64))


def append_chunk(history: TokenHistory, chunk: TokenChunk) -> TokenHistory:
    """A copy with the valid tokens of a chunk."""
    tokens, (rows, columns) = history.tokens.copy(), np.nonzero(chunk.valid)
    ends = history.lengths[:, None] + np.cumsum(chunk.valid, axis=1)
    tokens[rows, ends[rows, columns] - 1] = chunk.tokens[rows, columns]
    return TokenHistory(tokens, ends[:, -1])


def _run_packed(
    model: VerifierInputs,
    drafter: Drafter,
    state: DecodeState,
    drafter_state: Any,
    history: jax.Array,
    passes: jax.Array,
    shape: PassShape,
) -> tuple[DecodeState, Any, jax.Array]:
    """`run_passes` with its results packed into one array, int32[B, (3 * (draft_tokens + 1) + 2) * max_passes + 2]."""
    work, taken, results = run_passes(model, drafter, PassState(state, drafter_state, history), passes, shape)
    counts = jnp.concatenate([results.offered, results.accepted], axis=1)
    packed = jnp.concatenate([counts, pack_chunk(results.chunk, work.state.done, taken)], axis=1)
    return work.state, work.drafter_state, model.sharding.constrain(packed, "replicated")


def _unpack(packed: jax.Array, draft_tokens: int) -> tuple[TokenChunk, np.ndarray, int, DraftCounts, tuple[int, int]]:
    """The chunk, which rows are done, the number of passes, their counts, and the numbers of accepted and examined drafts.

    Raises:
      GenerationError: the model's logits are NaN.
    """
    array, width = jax.device_get(packed), draft_tokens + 1
    most = (array.shape[1] - 2) // (2 + 3 * width)
    offered, accepted, rest = np.split(array, [most, 2 * most], axis=1)
    done, taken = rest[:, -2].astype(bool), int(rest[0, -1])
    parts = (rest[:, i * most * width :][:, : taken * width] for i in range(3))
    tokens, logprobs, valid = map(np.ascontiguousarray, parts)
    chunk = checked_chunk(tokens, logprobs.view(np.float32), valid.astype(bool))
    live = chunk.valid.reshape(len(array), taken, width).any(axis=2)
    offered, accepted = offered[:, :taken], accepted[:, :taken]
    counts = DraftCounts(live.sum(axis=1), offered.sum(axis=1), accepted.sum(axis=1))
    # The drafts of a pass up to the first wrong one; a missing draft counts as wrong.
    examined = accepted + (live & (accepted < draft_tokens))
    return chunk, done, taken, counts, (int(accepted.sum()), int(examined.sum()))


def _platform(state: DecodeState) -> str:
    (device, *_) = state.token.devices()
    return device.platform


@functools.cache
def _passes_on(platform: str) -> Callable[..., tuple[DecodeState, Any, jax.Array]]:
    options = decode_options_on_tpu() if platform == "tpu" else None
    return jax.jit(_run_packed, static_argnums=6, donate_argnums=(2, 3), compiler_options=options)
