"""A generation with drafts: pieces of plain decoding and pieces of passes over drafts, as its `Pace` decides."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from llama_jax import ops
from llama_jax.flags import decoding_on_tpu
from llama_jax.inference.decode import STEPS_PER_CHUNK, DecodeState, TokenChunk
from llama_jax.inference.drafter import MOST_DRAFTED, Counts, DraftedChunk, Drafter, Prompts
from llama_jax.inference.generate import LONGEST_CHUNK, Run, capacity_for, checked_chunk, pack, transferring, unpack
from llama_jax.inference.speculation.draft_length import Pace
from llama_jax.inference.speculation.verify import Model, PassState, Size, run_passes
from llama_jax.model.cache import CacheOptions

MOST_PASSES, MOST_TURNS = 16, 64  # of a piece; after it the number of drafts may change
HOST = 0.0005  # fixed seconds per piece, at most half of its time
COMPILING = 0.1  # least seconds of a program's first piece if the program is compiled in it


def drafted_chunks(
    run: Run, drafter: Drafter, prompts: Prompts, options: CacheOptions, turns: int, pace: Pace | None = None
) -> Iterator[TokenChunk]:
    """The pieces of `stream` with a draft that has been checked.

    Args:
      pace: decides how many tokens are drafted; by default `Pace.of` the drafter's tokens.
    """
    tokens, lengths, request = prompts
    capacity = capacity_for(lengths, request)
    state, packed = run.start(run.read_prompts(tokens, lengths, capacity, options), *prompts)
    drafter, memory = drafter.begin(tokens, lengths, capacity, options)
    model = Model(run.params, run.config, run.compute, run.sharding)
    hindsight = drafter.hindsight(tokens, lengths)
    pace = pace or Pace.of(drafter.tokens, hindsight is None)
    number, ahead = pace.choose(), None
    if not number:
        state, ahead = _start(run, state, pace.length(0), turns)
    piece, done, _ = unpack(packed)
    text = _Text.of(tokens, lengths, capacity).with_piece(piece)
    if hindsight:
        hindsight(piece)
    met, seen = set[int](), time.perf_counter()
    yield piece

    while not done.all():
        if number:
            width = number + 1
            count = min(pace.length(number), max(turns * STEPS_PER_CHUNK // width, 1), MOST_PASSES)
            text = text.written()
            memory = drafter.follow(memory, text.history, text.known)
            passes = _passes_on(_platform(state))
            started = time.perf_counter()
            with ops.native_anyway(run.natively), transferring():
                state, memory, packed = passes(
                    model, drafter, state, memory, text.history, np.int32(count), Size(number, MOST_PASSES)
                )
        else:
            started = seen if ahead is not None else time.perf_counter()
            state, packed = (state, ahead) if ahead is not None else _start(run, state, pace.length(0), turns)

        ahead = None
        if pace.goes_on(number):
            state, ahead = _start(run, state, STEPS_PER_CHUNK if number else pace.length(0), turns)
        if number:
            piece, done, taken, counts, looked_at = _unpack(packed, number)
        else:
            piece, done, taken = unpack(packed)
            taken *= STEPS_PER_CHUNK
            given = piece.valid.sum(axis=1)
            counts = Counts(given, np.zeros_like(given), np.zeros_like(given))
        seen = time.perf_counter()
        if not done.all():  # otherwise no more tokens are chosen
            would_be = hindsight(piece) if hindsight else (0, 0)
            right = (int(counts.accepted.sum()), looked_at) if number else would_be
            seconds = max(seen - started - HOST, (seen - started) / 2)
            counts_for = number in met or seconds < COMPILING
            pace = pace.observe(number, taken, counts.passes.sum() / taken, *right, seconds if counts_for else None)
            met.add(number)
            text = text.with_piece(piece)
            number = 0 if ahead is not None else pace.choose()
        yield DraftedChunk.of(piece, counts)


def _start(run: Run, state: DecodeState, steps: int, turns: int) -> tuple[DecodeState, jax.Array]:
    """Start this many steps of plain decoding."""
    return run.decode(state, min(steps // STEPS_PER_CHUNK, turns, MOST_TURNS), min(turns, LONGEST_CHUNK))


@dataclass(frozen=True)
class _Text:
    """All tokens of the rows, written only when a drafter needs them: most pieces of a story are never needed.

    Attributes:
      history: int32[B, S].
      known: int[B], how many tokens there are.
      waiting: the last pieces, which are not in the history yet.
    """

    history: np.ndarray
    known: np.ndarray
    waiting: tuple[TokenChunk, ...] = ()

    @classmethod
    def of(cls, tokens: np.ndarray, lengths: np.ndarray, capacity: int) -> _Text:
        """The prompts, with room for rows of `capacity` tokens and the drafts of a pass after them."""
        room = capacity + 1 + MOST_DRAFTED
        return cls(np.pad(tokens[:, :room], ((0, 0), (0, max(room - tokens.shape[1], 0)))), lengths.astype(np.int64))

    def with_piece(self, piece: TokenChunk) -> _Text:
        return replace(self, known=self.known + piece.valid.sum(axis=1), waiting=(*self.waiting, piece))

    def written(self) -> _Text:
        """The text with nothing waiting."""
        history = self.history.copy()
        ends = self.known - sum(piece.valid.sum(axis=1) for piece in self.waiting)
        for piece in self.waiting:
            for row, (tokens, valid) in enumerate(zip(piece.tokens, piece.valid, strict=True)):
                new = tokens[valid]
                history[row, ends[row] : ends[row] + len(new)] = new
                ends[row] += len(new)
        return _Text(history, self.known)


def _run_packed(
    model: Model, drafter: Drafter, state: DecodeState, memory: Any, history: jax.Array, passes: jax.Array, size: Size
) -> tuple[DecodeState, Any, jax.Array]:
    """`run_passes`, with its results as one array, int32[B, 3 * most * (drafted + 1) + 2 * most + 2]."""
    work, taken, found = run_passes(model, drafter, PassState(state, memory, history), passes, size)
    counts = jnp.concatenate([found.offered, found.accepted], axis=1)
    packed = jnp.concatenate([counts, pack(found.piece, work.state.done, taken)], axis=1)
    return work.state, work.memory, model.sharding.constrain(packed, "everywhere")


def _unpack(packed: jax.Array, drafted: int) -> tuple[TokenChunk, np.ndarray, int, Counts, int]:
    """The piece, which rows are done, the passes, their counts, and how many drafts were looked at.

    Raises:
      GenerationError: the model's logits are NaN.
    """
    array, width = jax.device_get(packed), drafted + 1
    most = (array.shape[1] - 2) // (2 + 3 * width)
    offered, accepted, rest = np.split(array, [most, 2 * most], axis=1)
    done, taken = rest[:, -2].astype(bool), int(rest[0, -1])
    parts = (rest[:, i * most * width :][:, : taken * width] for i in range(3))
    tokens, logprobs, valid = map(np.ascontiguousarray, parts)
    piece = checked_chunk(tokens, logprobs.view(np.float32), valid.astype(bool))
    live = piece.valid.reshape(len(array), taken, width).any(axis=2)
    offered, accepted = offered[:, :taken], accepted[:, :taken]
    counts = Counts(live.sum(axis=1), offered.sum(axis=1), accepted.sum(axis=1))
    # The drafts of a pass up to the first wrong one; a missing draft counts as wrong.
    return piece, done, taken, counts, int((accepted + (live & (accepted < drafted))).sum())


def _platform(state: DecodeState) -> str:
    (device, *_) = state.token.devices()
    return device.platform


@functools.cache
def _passes_on(platform: str) -> Callable[..., tuple[DecodeState, Any, jax.Array]]:
    options = decoding_on_tpu() if platform == "tpu" else None
    return jax.jit(_run_packed, static_argnums=6, donate_argnums=(2, 3), compiler_options=options)
