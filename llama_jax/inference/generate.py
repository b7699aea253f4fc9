"""Generation: a compiled prefill, then compiled chunks of a scan-based decode loop, for a ragged batch of prompts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import lax

from llama_jax.config import LlamaConfig
from llama_jax.errors import GenerationError
from llama_jax.inference.placement import Placement, placement_of
from llama_jax.inference.sampling import Sampling, sample
from llama_jax.model.cache import (
    CacheOptions,
    KVCache,
    bucket,
    drop_batch,
    grow,
    init_cache,
    over_buffers,
    restore_batch,
)
from llama_jax.model.forward import Constrain, check_tokens, forward, head_of, unconstrained, unembed
from llama_jax.model.params import Llama

# Tokens per turn of the scan. Early exit and streaming happen between turns: few enough that neither waits long.
CHUNK = 4
SMALLEST_PREFILL, LARGEST_PREFILL = 16, 512  # longer prompts are read in pieces, so that scores stay [512, S]
SMALLEST_CACHE = 256  # below it a step costs the same


class DecodeState(struct.PyTreeNode):
    """What the decode loop carries: an immutable tree.

    Attributes:
      cache: what the model has read.
      token: int32[B], chosen but not yet read.
      seen: bool[B, rows of the output projection], tokens in the prompt or the continuation, for the repetition penalty.
      count: int32[B], tokens generated so far.
      done: bool[B], the row has met a stop token or its limit.
    """

    cache: KVCache
    token: jax.Array
    seen: jax.Array
    count: jax.Array
    done: jax.Array


class Request(struct.PyTreeNode):
    """What stays the same during a generation.

    Attributes:
      sampling: arrays [B].
      limit: int32[B], tokens to generate at most.
      stop: int32[any], token ids that end a row, filled up with -1.
    """

    sampling: Sampling
    limit: jax.Array | np.ndarray
    stop: jax.Array | np.ndarray


@dataclass(frozen=True)
class Piece:
    """Some more tokens of every row, as `stream` yields them.

    Attributes:
      tokens: int32[B, n].
      logprobs: float32[B, n], log-probability under the model itself (before penalty, temperature and filters).
      valid: bool[B, n]; False behind the end of a row.
    """

    tokens: np.ndarray
    logprobs: np.ndarray
    valid: np.ndarray


@dataclass(frozen=True)
class Generation:
    """The continuation of one prompt.

    Attributes:
      tokens: its ids, without the prompt and without the stop token that ended it.
      logprobs: log-probability of each under the model itself, before penalty, temperature and filters.
      finish_reason: "stop" where a stop token ended it, "length" where `max_new_tokens` did.
    """

    tokens: list[int]
    logprobs: list[float]
    finish_reason: Literal["stop", "length"]


def generate(
    config: LlamaConfig,
    params: Llama,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    sampling: Sampling = Sampling(),
    stop_tokens: Sequence[int] = (),
    cache: CacheOptions = CacheOptions(),
) -> list[Generation]:
    """Continue each prompt. In float32 a row of a batch gets the tokens that it would get alone.

    In 16-bit types a near tie may fall otherwise: XLA sums products of different sizes in different orders.

    Args:
      config, params: the model; a tuple of blocks, as `load` gives it and `llama_jax.unstack` makes it, decodes fastest.
        Where the parameters lie on a mesh, as `load(..., mesh=...)` puts them, the generation runs there.
      prompts: one sequence of token ids per row, of any lengths, as `tokenizer.encode` gives them (it puts the
        begin-of-sequence token before them).
      max_new_tokens: tokens to generate at most.
      sampling: greedy unless said otherwise; fields may differ per row.
      stop_tokens: ids that end a row, such as `tokenizer.stop_ids`; with none, a row ends at `max_new_tokens`.
      cache: how the generation remembers: in int8, or a window of what was last, after which a row may become longer than
        the model's context.

    Returns:
      One `Generation` per prompt: tokens, logprobs and why it ended.

    Raises:
      GenerationError: an empty prompt, an id outside the vocabulary, a length beyond the model's context, or an
        impossible sampling value.
      MeshError: prompts that cannot be divided over the mesh of the parameters.
    """
    pieces = list(
        stream(
            config,
            params,
            prompts,
            max_new_tokens=max_new_tokens,
            sampling=sampling,
            stop_tokens=stop_tokens,
            cache=cache,
            turns=1 << 20,
        )
    )
    return continuations(pieces, stop_tokens)


def stream(
    config: LlamaConfig,
    params: Llama,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    sampling: Sampling = Sampling(),
    stop_tokens: Sequence[int] = (),
    cache: CacheOptions = CacheOptions(),
    turns: int = 1,
) -> Iterator[Piece]:
    """Yield the tokens of every row as they come, in `Piece`s: the first alone, then 4 * `turns` at a time.

    Arguments and errors as for `generate`; errors are raised by the call itself, before the first token is asked for.
    A stop token is yielded as the last valid one of its row.
    """
    tokens, lengths, request = prepare(config, prompts, max_new_tokens, sampling, stop_tokens, cache)
    constrain = placement_of(params)
    if isinstance(constrain, Placement):
        constrain.check_rows(len(prompts))
    return _stream(config, params, tokens, lengths, request, turns, constrain, cache)


def _stream(
    config: LlamaConfig,
    params: Llama,
    tokens: np.ndarray,
    lengths: np.ndarray,
    request: Request,
    turns: int,
    constrain: Constrain,
    options: CacheOptions,
) -> Iterator[Piece]:
    cache, hidden = _read_prompts(config, params, tokens, lengths, constrain, options)
    state, logprobs = _first_token(config, params, cache, hidden, tokens, lengths, request, constrain)
    yield piece_of(*(np.asarray(x)[:, None] for x in (state.token, logprobs, np.ones_like(lengths, bool))))

    filled = int(lengths.max())
    while not np.asarray(state.done).all():
        capacity = bucket(filled + CHUNK, SMALLEST_CACHE)
        if options.window is not None:
            capacity = filled + state.cache.capacity  # the slots are used again: as many turns as the output has room for
        elif capacity > state.cache.capacity:
            state = state.replace(cache=_grow(state.cache, capacity, constrain))
        room = (capacity - filled) // CHUNK
        state, n, *pieces = _decode(config, params, request, state, np.int32(min(room, turns)), constrain=constrain)
        steps = int(n) * CHUNK
        filled += steps
        yield piece_of(*(np.asarray(x)[:, :steps] for x in pieces))


def piece_of(tokens: np.ndarray, logprobs: np.ndarray, valid: np.ndarray) -> Piece:
    """The piece of these tokens; GenerationError where the model's logits were not numbers."""
    bad = np.isnan(logprobs) & valid
    if bad.any():
        raise GenerationError(
            f"the model's logits in row {int(np.argwhere(bad)[0, 0])} are not numbers: its weights overflow; try float32"
        )
    return Piece(tokens, logprobs, valid)


def continuations(pieces: Sequence[Piece], stop_tokens: Sequence[int]) -> list[Generation]:
    """What all pieces of a generation say of each row."""
    tokens, logprobs, valid = (
        np.concatenate([getattr(piece, name) for piece in pieces], axis=1) for name in ("tokens", "logprobs", "valid")
    )
    stop = set(_ids("stop_tokens", stop_tokens).tolist())
    results = []
    for row in range(len(tokens)):
        ids, scores = tokens[row][valid[row]].tolist(), logprobs[row][valid[row]].tolist()
        stopped = ids[-1] in stop
        end = len(ids) - stopped
        results.append(Generation(ids[:end], scores[:end], "stop" if stopped else "length"))
    return results


def complete(
    config: LlamaConfig, capacity: int, params: Llama, tokens: jax.Array, lengths: jax.Array, request: Request
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """A whole generation as one pure function, for where one program is wanted and not one per step: `pmap`, exporting.

    Args:
      capacity: slots of the cache, from `capacity_for`.
      tokens, lengths, request: as `prepare` gives them.

    Returns:
      Tokens, logprobs and validity, [B, 1 + capacity].
    """
    batch, width = tokens.shape
    piece = min(width, LARGEST_PREFILL)
    cache, hidden = begin(config, params, batch, capacity)
    for start in range(0, width, piece):
        new = jnp.clip(lengths - start, 0, piece)
        cache, hidden = prefill(config, params, cache, tokens[:, start : start + piece], new, hidden, rope_lengths=lengths)
    state, logprobs = first_token(config, params, cache, hidden, tokens, lengths, request)
    first = state.token, logprobs, jnp.ones(batch, bool)
    _, _, *rest = decode(config, params, request, state, (capacity - jnp.max(lengths)) // CHUNK)
    tokens, logprobs, valid = (jnp.concatenate([a[:, None], b], axis=1) for a, b in zip(first, rest, strict=True))
    return tokens, logprobs, valid


def capacity_for(width: int, longest: int, max_new_tokens: int) -> int:
    """Slots for a whole generation: prompts of at most `longest` tokens, padded to `width`, and the last chunk's rest."""
    return bucket(max(width, longest + max_new_tokens + CHUNK), SMALLEST_CACHE)


def begin(
    config: LlamaConfig,
    params: Llama,
    batch: int,
    capacity: int,
    constrain: Constrain = unconstrained,
    options: CacheOptions = CacheOptions(),
) -> tuple[KVCache, jax.Array]:
    """An empty cache and the states [B, D] of no token."""
    dtype = params.embedding.dtype
    cache = init_cache(
        config,
        batch,
        capacity,
        jnp.dtype(options.dtype or dtype),
        stacked=not isinstance(params.blocks, tuple),
        window=options.window,
        sinks=options.sinks,
    )
    return lay_out(cache, constrain), constrain(jnp.zeros((batch, config.dim), dtype), "row")


def lay_out(cache: KVCache, constrain: Constrain) -> KVCache:
    """The same cache where `constrain` wants it."""

    def placed(buffer: jax.Array) -> jax.Array:
        return constrain(buffer, "cache")

    return over_buffers(placed, cache).replace(length=constrain(cache.length, "row"))


def prefill(
    config: LlamaConfig,
    params: Llama,
    cache: KVCache,
    tokens: jax.Array,
    lengths: jax.Array,
    hidden: jax.Array,
    constrain: Constrain = unconstrained,
    rope_lengths: jax.Array | None = None,
) -> tuple[KVCache, jax.Array]:
    """Read T more tokens of each prompt.

    Args:
      tokens: int32[B, T], padded on the right.
      lengths: int32[B], how many of them are real; 0 for a prompt that has ended before.
      hidden: [B, D], the state of the last token read before.
      constrain: lays out the arrays over the devices, see `placement`.
      rope_lengths: int32[B], the lengths of the whole prompts, which a rope scaling that depends on the length needs from
        the first piece on; see `forward`.

    Returns:
      The cache, and the state [B, D] of each row's last token so far.
    """
    new_hidden, cache = forward(
        config, params, tokens, cache, lengths=lengths, constrain=constrain, rope_lengths=rope_lengths
    )
    last = jnp.take_along_axis(new_hidden, jnp.maximum(lengths - 1, 0)[:, None, None], axis=1)[:, 0]
    return lay_out(cache, constrain), constrain(jnp.where((lengths > 0)[:, None], last, hidden), "row")


def decode(
    config: LlamaConfig,
    params: Llama,
    request: Request,
    state: DecodeState,
    turns: jax.Array,
    constrain: Constrain = unconstrained,
) -> tuple[DecodeState, jax.Array, jax.Array, jax.Array, jax.Array]:
    """Generate up to `turns` chunks of tokens: a `lax.scan` per chunk, leaving early when every row is done.

    The cache must have room for them: `turns` * CHUNK slots behind the longest row.

    Returns:
      The state; the chunks generated, int32[]; and their tokens, logprobs and validity, [B, S] with the first
      chunks * CHUNK columns filled.
    """
    batch, capacity = state.token.shape[0], state.cache.capacity

    def step(state: DecodeState, _: None) -> tuple[DecodeState, tuple[jax.Array, jax.Array, jax.Array]]:
        valid = ~state.done
        lengths = valid.astype(jnp.int32)
        hidden, cache = forward(config, params, state.token[:, None], state.cache, lengths=lengths, constrain=constrain)
        state, logprobs = choose(
            config, params, request, state.replace(cache=lay_out(cache, constrain)), hidden[:, 0], constrain
        )
        return state, (state.token, logprobs, valid)

    def turn(carry):
        state, done, out = carry
        state, new = lax.scan(step, state, length=CHUNK)
        at = (jnp.zeros_like(done), done * CHUNK)
        out = tuple(lax.dynamic_update_slice(o, n.T, at) for o, n in zip(out, new, strict=True))
        return state, done + 1, out

    def unfinished(carry):
        state, done, _ = carry
        return (done < turns) & ~jnp.all(state.done)

    out = tuple(jnp.zeros((batch, capacity), dtype) for dtype in (jnp.int32, jnp.float32, bool))
    state = state.replace(cache=drop_batch(state.cache))
    state, done, out = lax.while_loop(unfinished, turn, (state, jnp.int32(0), out))
    state = state.replace(cache=lay_out(restore_batch(state.cache), constrain), done=constrain(state.done, "everywhere"))
    return state, done, *(constrain(o, "everywhere") for o in out)


def choose(
    config: LlamaConfig,
    params: Llama,
    request: Request,
    state: DecodeState,
    hidden: jax.Array,
    constrain: Constrain = unconstrained,
) -> tuple[DecodeState, jax.Array]:
    """The state after one more token, chosen from the hidden states [B, D], and its log-probability float32[B]."""
    logits = constrain(unembed(config, params, hidden), "logits")
    token = sample(logits, request.sampling, state.seen, state.count)
    token = jnp.where(state.done, state.token, token)
    # Row by row, not by pairs of indices: each device then looks at its own rows only.
    logprobs = jax.vmap(lambda logits, token: logits[token])(logits, token) - jax.nn.logsumexp(logits, axis=-1)
    seen = jax.vmap(lambda seen, token: seen.at[token].set(True))(state.seen, token)
    count = state.count + ~state.done
    stopped = jnp.any(token[:, None] == request.stop, axis=-1)
    state = state.replace(
        token=token,
        seen=constrain(seen, "logits"),
        count=count,
        done=state.done | stopped | (count >= request.limit),
    )
    return state, logprobs


def first_token(
    config: LlamaConfig,
    params: Llama,
    cache: KVCache,
    hidden: jax.Array,
    tokens: jax.Array,
    lengths: jax.Array,
    request: Request,
    constrain: Constrain = unconstrained,
) -> tuple[DecodeState, jax.Array]:
    """The decode state after the prompts, with the first token chosen, and that token's log-probability float32[B]."""
    batch, width = tokens.shape
    real = jnp.arange(width) < lengths[:, None]
    vocab = head_of(config, params).shape[0]
    # Padding is sent behind the last column, where it is dropped: no id is free to stand for it.
    columns = jnp.where(real, tokens, vocab)
    seen = jnp.zeros((batch, vocab), bool).at[jnp.arange(batch)[:, None], columns].set(True, mode="drop")
    state = DecodeState(
        cache=cache,
        token=jnp.zeros(batch, jnp.int32),
        seen=constrain(seen, "logits"),
        count=jnp.zeros(batch, jnp.int32),
        done=jnp.zeros(batch, bool),
    )
    state, logprobs = choose(config, params, request, state, hidden, constrain)
    token, done, logprobs = (constrain(x, "everywhere") for x in (state.token, state.done, logprobs))
    return state.replace(token=token, done=done, cache=lay_out(state.cache, constrain)), logprobs


def _enlarged(cache: KVCache, capacity: int, constrain: Constrain) -> KVCache:
    return lay_out(grow(cache, capacity), constrain)


_begin = jax.jit(begin, static_argnums=(0, 2, 3, 4, 5))
_prefill = jax.jit(prefill, static_argnums=0, static_argnames="constrain", donate_argnums=2)
_first_token = jax.jit(first_token, static_argnums=(0, 7))
_decode = jax.jit(decode, static_argnums=0, static_argnames="constrain", donate_argnums=3)
_grow = jax.jit(_enlarged, static_argnums=(1, 2))


def _read_prompts(
    config: LlamaConfig,
    params: Llama,
    tokens: np.ndarray,
    lengths: np.ndarray,
    constrain: Constrain,
    options: CacheOptions,
) -> tuple[KVCache, jax.Array]:
    """Prefill in pieces of at most LARGEST_PREFILL tokens, the cache growing with what is read."""
    batch, width = tokens.shape
    piece = min(width, LARGEST_PREFILL)
    capacity = piece
    if options.window is not None:
        capacity, piece = ring_of(options, width)
    cache, hidden = _begin(config, params, batch, capacity, constrain, options)
    for start in range(0, int(lengths.max()), piece):
        if options.window is None and start + piece > cache.capacity:
            cache = _grow(cache, bucket(start + piece, piece), constrain)
        new = np.clip(lengths - start, 0, piece)
        cache, hidden = _prefill(
            config,
            params,
            cache,
            tokens[:, start : start + piece],
            new,
            hidden,
            constrain=constrain,
            rope_lengths=lengths,
        )
    return cache, hidden


def ring_of(options: CacheOptions, longest: int) -> tuple[int, int]:
    """Slots of a cache with a window, and how many tokens of a prompt are read at once: decoding pays for both."""
    window = options.window or 0
    piece = min(bucket(min(window, longest), SMALLEST_PREFILL), LARGEST_PREFILL)
    return options.sinks + window + piece - 1, piece


def prepare(
    config: LlamaConfig,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    sampling: Sampling,
    stop_tokens: Sequence[int],
    cache: CacheOptions = CacheOptions(),
) -> tuple[np.ndarray, np.ndarray, Request]:
    """Prompts as tokens int32[B, bucket], padded on the right, lengths int32[B], and the request, after all checks."""
    tokens, lengths = _pack(config, prompts, max_new_tokens, cache)
    batch = len(prompts)
    ends = _ids("stop_tokens", stop_tokens)
    check_tokens(config, ends, "stop token")
    stop = np.full(bucket(len(ends), 4), -1, np.int32)
    stop[: len(ends)] = ends
    return tokens, lengths, Request(sampling.per_row(batch), np.full(batch, max_new_tokens, np.int32), stop)


def _pack(
    config: LlamaConfig, prompts: Sequence[Sequence[int]], max_new_tokens: int, cache: CacheOptions
) -> tuple[np.ndarray, np.ndarray]:
    """Prompts as tokens int32[B, bucket], padded on the right, and lengths int32[B], after all checks."""
    if isinstance(prompts, str) or not isinstance(prompts, Sequence | np.ndarray):
        raise GenerationError(f"prompts={prompts!r:.40} must be a sequence of sequences of token ids")
    if not len(prompts):
        raise GenerationError("no prompts: give at least one sequence of token ids")
    rows = [_ids(f"prompt {i}", prompt) for i, prompt in enumerate(prompts)]
    if isinstance(max_new_tokens, bool) or not isinstance(max_new_tokens, int | np.integer) or max_new_tokens < 1:
        raise GenerationError(f"max_new_tokens={max_new_tokens!r} must be a positive whole number")
    lengths = np.array([len(row) for row in rows], np.int32)
    if not lengths.all():
        raise GenerationError(
            f"prompt {int(np.argmin(lengths))} is empty: give at least one token, such as the tokenizer's bos_id"
        )
    longest = int(lengths.max())
    if cache.window is not None and cache.window + cache.sinks > config.max_seq_len:
        raise GenerationError(
            f"window={cache.window} and sinks={cache.sinks} exceed the model's context of {config.max_seq_len}; without a"
            " window the whole context is seen"
        )
    if cache.window is None and longest + max_new_tokens > config.max_seq_len:
        raise GenerationError(
            f"a prompt of {longest} tokens and max_new_tokens={max_new_tokens} exceed the model's context of "
            f"{config.max_seq_len}; shorten the prompt or generate at most {max(config.max_seq_len - longest, 0)}"
        )
    tokens = np.zeros((len(rows), bucket(longest, SMALLEST_PREFILL)), np.int32)
    for i, row in enumerate(rows):
        check_tokens(config, row)
        tokens[i, : len(row)] = row
    return tokens, lengths


def _ids(name: str, ids: Sequence[int]) -> np.ndarray:
    """A flat sequence of token ids as an array, or GenerationError."""
    if isinstance(ids, str):
        raise GenerationError(f"{name} is the text {ids!r:.40}; encode it with the tokenizer first")
    try:
        found = np.asarray(ids)
    except ValueError:  # ragged
        found = np.zeros((), object)
    if found.size == 0 and found.ndim == 1:
        return found.astype(np.int64)
    if found.ndim != 1 or not np.issubdtype(found.dtype, np.integer):
        raise GenerationError(f"{name}={ids!r:.40} must be a flat sequence of whole numbers, the token ids")
    return found
