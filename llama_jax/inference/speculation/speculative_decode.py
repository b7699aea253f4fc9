"""Generation with drafts: chunks of plain decoding and chunks of passes with drafts, chosen by a `Pace`."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from llama_jax.errors import GenerationError, shown
from llama_jax.inference.compiled_decode import (
    MAX_CHUNKS_PER_CALL,
    CompiledDecode,
    allow_transfers,
    capacity_for,
    checked_chunk,
    pack,
    unpack,
)
from llama_jax.inference.decode import STEPS_PER_CHUNK, DecodeState, TokenChunk
from llama_jax.inference.drafter import MAX_DRAFT_TOKENS, DraftCounts, DraftedChunk, Drafter, PreparedPrompts
from llama_jax.inference.speculation.draft_length import Pace
from llama_jax.inference.speculation.verify import Model, PassState, Size, run_passes
from llama_jax.model.cache import CacheOptions
from llama_jax.ops.platform import decoding_context
from llama_jax.xla_flags import decode_options_on_tpu

MAX_PASSES, MAX_CHUNKS = 16, 64  # maximum passes or chunks of steps before the number of drafts may change
HOST = 0.0005  # fixed seconds per chunk on the host, counted as at most half of the chunk's time
COMPILING = 0.1  # minimum seconds of a program's first chunk if it includes compilation


def stream_drafted(
    programs: CompiledDecode, drafter: Drafter, prompts: PreparedPrompts, options: CacheOptions, max_chunks: int
) -> Iterator[TokenChunk]:
    """The chunks of `stream` with a drafter.

    Raises:
      GenerationError: `draft` is not a drafter, or cannot draft for this model and these prompts; several processes.
      MeshError: a draft model on other devices.
    """
    if not isinstance(drafter, Drafter):
        raise GenerationError(f"draft={shown(drafter, 40)} must be a PromptLookup, a DraftModel or another Drafter")
    if jax.process_count() > 1:
        raise GenerationError(
            f"draft: this is one of {jax.process_count()} processes, which might choose different numbers of drafts;"
            " omit the draft"
        )
    _, lengths, settings = prompts
    drafter.check(programs.config, programs.params, lengths, settings, options)
    return drafted_chunks(programs, drafter, prompts, options, max_chunks)


def drafted_chunks(
    programs: CompiledDecode,
    drafter: Drafter,
    prompts: PreparedPrompts,
    options: CacheOptions,
    max_chunks: int,
    pace: Pace | None = None,
) -> Iterator[TokenChunk]:
    """The chunks of `stream` with a drafter that has been checked.

    Args:
      pace: decides how many tokens to draft; by default `Pace.of` the drafter's tokens.
    """
    tokens, lengths, settings = prompts
    capacity = capacity_for(lengths, settings)
    prefilled = programs.prefill_prompts(tokens, lengths, settings.limit, capacity, options)
    state, packed = programs.begin_decode(prefilled, *prompts)
    drafter, drafter_state = drafter.begin(tokens, lengths, capacity, options)
    model = Model(programs.params, programs.config, programs.compute, programs.sharding)
    count_accepted = drafter.count_accepted(tokens, lengths)
    pace = pace or Pace.of(drafter.tokens, count_accepted is None)
    number, ahead = pace.choose(), None
    if not number:
        state, ahead = _start(programs, state, pace.length(0), max_chunks)
    chunk, done, _ = unpack(packed)
    text = _Text.of(tokens, lengths, capacity).with_chunk(chunk)
    if count_accepted:
        count_accepted(chunk)
    met, seen = set[int](), time.perf_counter()
    yield chunk

    while not done.all():
        if number:
            width = number + 1
            count = min(pace.length(number), max(max_chunks * STEPS_PER_CHUNK // width, 1), MAX_PASSES)
            text = text.written()
            drafter_state = drafter.catch_up(drafter_state, text.history, text.lengths)
            passes = _passes_on(_platform(state))
            started = time.perf_counter()
            with decoding_context(programs.use_native_code), allow_transfers():
                state, drafter_state, packed = passes(
                    model, drafter, state, drafter_state, text.history, np.int32(count), Size(number, MAX_PASSES)
                )
        else:
            started = seen if ahead is not None else time.perf_counter()
            state, packed = (state, ahead) if ahead is not None else _start(programs, state, pace.length(0), max_chunks)

        ahead = None
        if pace.goes_on(number):
            state, ahead = _start(programs, state, STEPS_PER_CHUNK if number else pace.length(0), max_chunks)
        if number:
            chunk, done, taken, counts, looked_at = _unpack(packed, number)
        else:
            chunk, done, taken = unpack(packed)
            taken *= STEPS_PER_CHUNK
            tokens_of_rows = chunk.valid.sum(axis=1)
            counts = DraftCounts(tokens_of_rows, np.zeros_like(tokens_of_rows), np.zeros_like(tokens_of_rows))
        seen = time.perf_counter()
        if not done.all():  # otherwise nothing more is generated
            would_be = count_accepted(chunk) if count_accepted else (0, 0)
            right = (int(counts.accepted.sum()), looked_at) if number else would_be
            seconds = max(seen - started - HOST, (seen - started) / 2)
            counts_for = number in met or seconds < COMPILING
            pace = pace.observe(number, taken, counts.passes.sum() / taken, *right, seconds if counts_for else None)
            met.add(number)
            text = text.with_chunk(chunk)
            number = 0 if ahead is not None else pace.choose()
        yield DraftedChunk.of(chunk, counts)


def _start(programs: CompiledDecode, state: DecodeState, steps: int, max_chunks: int) -> tuple[DecodeState, jax.Array]:
    """Start `steps` steps of plain decoding."""
    return programs.decode(
        state, min(steps // STEPS_PER_CHUNK, max_chunks, MAX_CHUNKS), min(max_chunks, MAX_CHUNKS_PER_CALL)
    )


@dataclass(frozen=True)
class _Text:
    """All tokens of the rows, written to an array only when a drafter needs them, which is rare in text without repetition.

    Attributes:
      history: int32[B, S].
      lengths: int[B], number of tokens of each row.
      waiting: the last chunks, not yet in the history.
    """

    history: np.ndarray
    lengths: np.ndarray
    waiting: tuple[TokenChunk, ...] = ()

    @classmethod
    def of(cls, tokens: np.ndarray, lengths: np.ndarray, capacity: int) -> _Text:
        """The prompts, with room for rows of `capacity` tokens and one pass of drafts after them."""
        room = capacity + 1 + MAX_DRAFT_TOKENS
        return cls(np.pad(tokens[:, :room], ((0, 0), (0, max(room - tokens.shape[1], 0)))), lengths.astype(np.int64))

    def with_chunk(self, chunk: TokenChunk) -> _Text:
        return replace(self, lengths=self.lengths + chunk.valid.sum(axis=1), waiting=(*self.waiting, chunk))

    def written(self) -> _Text:
        """The text with all chunks in the history."""
        history = self.history.copy()
        ends = self.lengths - sum(chunk.valid.sum(axis=1) for chunk in self.waiting)
        for chunk in self.waiting:
            for row, (tokens, valid) in enumerate(zip(chunk.tokens, chunk.valid, strict=True)):
                new = tokens[valid]
                history[row, ends[row] : ends[row] + len(new)] = new
                ends[row] += len(new)
        return _Text(history, self.lengths)


def _run_packed(
    model: Model, drafter: Drafter, state: DecodeState, drafter_state: Any, history: jax.Array, passes: jax.Array, size: Size
) -> tuple[DecodeState, Any, jax.Array]:
    """`run_passes` with its results packed into one array, int32[B, 3 * most * (drafted + 1) + 2 * most + 2]."""
    work, taken, results = run_passes(model, drafter, PassState(state, drafter_state, history), passes, size)
    counts = jnp.concatenate([results.offered, results.accepted], axis=1)
    packed = jnp.concatenate([counts, pack(results.chunk, work.state.done, taken)], axis=1)
    return work.state, work.drafter_state, model.sharding.constrain(packed, "replicated")


def _unpack(packed: jax.Array, drafted: int) -> tuple[TokenChunk, np.ndarray, int, DraftCounts, int]:
    """The chunk, which rows are done, the number of passes, their counts, and how many drafts were examined.

    Raises:
      GenerationError: the model's logits are NaN.
    """
    array, width = jax.device_get(packed), drafted + 1
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
    return chunk, done, taken, counts, int((accepted + (live & (accepted < drafted))).sum())


def _platform(state: DecodeState) -> str:
    (device, *_) = state.token.devices()
    return device.platform


@functools.cache
def _passes_on(platform: str) -> Callable[..., tuple[DecodeState, Any, jax.Array]]:
    options = decode_options_on_tpu() if platform == "tpu" else None
    return jax.jit(_run_packed, static_argnums=6, donate_argnums=(2, 3), compiler_options=options)
