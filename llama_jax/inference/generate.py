"""Generation: a compiled prefill, then compiled chunks of a scan-based decode loop, for a ragged batch of prompts."""

from __future__ import annotations

import contextvars
import functools
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from llama_jax import compiled, ops
from llama_jax.compiled import CompiledFunction
from llama_jax.config import LlamaConfig
from llama_jax.flags import decoding_on_tpu
from llama_jax.inference.checks import check_logprobs, check_turns, room_before_turning, token_ids, turning_point
from llama_jax.inference.decode import (
    STEPS_PER_CHUNK,
    DecodeState,
    PrefillState,
    Request,
    TokenChunk,
    begin_decode,
    decode,
    init_prefill,
    prefill,
    with_request,
)
from llama_jax.inference.drafter import Counts, Drafter, stream_drafted, with_counts
from llama_jax.inference.prepare_inputs import SMALLEST_PREFILL, prepare
from llama_jax.inference.sampling import Sampling
from llama_jax.inference.sharding import check_rows, sharding_of
from llama_jax.model.cache import CacheOptions, KVCache, bucket
from llama_jax.model.forward_options import Compute, Positions, Sharding
from llama_jax.model.params import Llama
from llama_jax.ops.platform import device_elsewhere

LARGEST_PREFILL = 512  # longer prompts are read in pieces, so that the scores are at most [512, S]
SMALLEST_CACHE = 256  # tokens: one program for all short texts
LONGEST_CHUNK = 64  # turns of the decode loop between two looks at its result


@dataclass(frozen=True)
class Generation:
    """The continuation of one prompt.

    Attributes:
      tokens: its ids, without the prompt and without the stop token that ended it.
      logprobs: log-probability of each under the model itself, before penalty, temperature and filters.
      finish_reason: "stop" if a stop token ended it, "length" if `max_new_tokens` did.
      counts: for a generation with a draft: passes, and tokens drafted and accepted.
    """

    tokens: list[int]
    logprobs: list[float]
    finish_reason: Literal["stop", "length"]
    counts: Counts | None = None


def generate(
    config: LlamaConfig,
    params: Llama,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int | Sequence[int],
    sampling: Sampling = Sampling(),
    stop_tokens: Sequence[int] = (),
    cache: CacheOptions = CacheOptions(),
    compute: Compute = Compute(),
    draft: Drafter | None = None,
) -> list[Generation]:
    """Continue each prompt. With float32 weights a row of a batch gets the same tokens as it would alone.

    With 16-bit and quantized weights a near tie may be decided differently: XLA sums products of different sizes in
    different orders, and a CPU rounds activations to 8 bits where weights are in blocks. With a "longrope" scaling all
    frequencies change after the original context: rows that go on beyond it wait there for the others, and are read again,
    as transformers does.

    Args:
      config, params: the model. Where the parameters lie on a mesh, as `load(..., mesh=...)` puts them, the generation runs
        there.
      prompts: one sequence of token ids per row, of any lengths, as `tokenizer.encode` gives them (it puts the
        begin-of-sequence token before them).
      max_new_tokens: maximum number of tokens to generate, one for all rows or one per row.
      sampling: greedy by default; fields may differ per row.
      stop_tokens: ids that end a row, such as `tokenizer.stop_ids`; with none, a row ends at `max_new_tokens`.
      cache: the key/value cache: in int8, or with a sliding window over the last tokens, which lets a row become longer than
        the model's context.
      compute: your own attention, or a dtype; by default the parameters'.
      draft: for speculative decoding, a `PromptLookup` or a `DraftModel`: it drafts tokens, several of which the model
        verifies at once. It changes the speed but, except for near ties, not the tokens.

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
            compute=compute,
            draft=draft,
            turns=LONGEST_CHUNK,
        )
    )
    results = continuations(pieces, stop_tokens)
    return results if draft is None else with_counts(results, pieces)


def stream(
    config: LlamaConfig,
    params: Llama,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int | Sequence[int],
    sampling: Sampling = Sampling(),
    stop_tokens: Sequence[int] = (),
    cache: CacheOptions = CacheOptions(),
    compute: Compute = Compute(),
    draft: Drafter | None = None,
    turns: int = 1,
) -> Iterator[TokenChunk]:
    """Yield the tokens of every row as they come, as `TokenChunk`: the first token alone, then at most 4 * min(`turns`, 64).

    Arguments and errors as for `generate`; errors are raised by the call itself, before the first token is asked for.
    A stop token is yielded as the last valid one of its row.
    """
    check_turns(turns)
    tokens, lengths, request = prepare(config, prompts, max_new_tokens, sampling, stop_tokens, cache)
    sharding, table = Sharding(), params.embedding
    if isinstance(getattr(table, "sharding", None), NamedSharding) or device_elsewhere(table) is not None:
        sharding = sharding_of(params)  # the generation runs where the model lies
        check_rows(sharding, len(prompts))
    run = Run(config, params, compute, sharding)
    if draft is not None:
        return stream_drafted(run, draft, (tokens, lengths, request), cache, int(turns))
    return run.stream(tokens, lengths, request, cache, int(turns))


# What a generation is given is meant to be transferred, whatever a caller's `jax.transfer_guard` says of other transfers.
transferring = functools.partial(jax.transfer_guard_host_to_device, "allow")


@dataclass(frozen=True)
class Run:
    """The compiled functions of `inference.decode`, with the arguments that are the same in all calls of a generation."""

    config: LlamaConfig
    params: Llama
    compute: Compute
    sharding: Sharding

    @functools.cached_property
    def natively(self) -> bool:
        """See `ops.decodes_natively`."""
        return ops.decodes_natively(self.params, self.compute.dtype, self.sharding.mesh)

    def stream(
        self, tokens: np.ndarray, lengths: np.ndarray, request: Request, options: CacheOptions, turns: int
    ) -> Iterator[TokenChunk]:
        room = room_before_turning(self.config, lengths)
        first = request.replace(limit=np.minimum(request.limit, room).astype(np.int32))
        again = turning_point(self.config) or 0 if (request.limit > room).any() else 0
        capacity, most = capacity_for(lengths, request), min(turns, LONGEST_CHUNK)
        self.prepare(tokens, lengths, first, capacity, options, most)
        state, packed = self.start(self.read_prompts(tokens, lengths, capacity, options), tokens, lengths, first)
        piece, done, _ = unpack(packed)
        given = [piece]
        yield piece

        while not done.all() or again:
            if done.all():  # rows that go on beyond the point have waited there for the others
                with transferring():
                    state = _with_request(state, request, self.sharding)
                done = np.asarray(state.done)
                if not done.all():
                    state = state.replace(cache=None)
                    state = state.replace(cache=self.read_again(tokens, lengths, given, again, capacity, options))
                given, again = [], 0
                continue
            state, packed = self.decode(state, most, most)
            piece, done, _ = unpack(packed)
            if again:
                given.append(piece)
            yield piece

    def prepare(
        self, tokens: np.ndarray, lengths: np.ndarray, request: Request, capacity: int, options: CacheOptions, most: int
    ) -> None:
        """Make the programs of a first generation beside one another: they are lowered in turn and compiled in threads.

        Over a mesh only a compiled program knows the sharding of its results, and they are made one after another.
        """
        piece = prefill_chunk(options, tokens.shape[1])
        empty = self.config, self.params, len(tokens), capacity, options, self.sharding, piece
        if self.sharding.mesh is not None or not _init_prefill.wants(*empty):
            return
        model, positions = (self.config, self.params), Positions(np.clip(lengths, 0, piece), rope_lengths=lengths)
        (device, *_) = jax.tree.leaves(self.params)[0].devices()
        with ThreadPoolExecutor(3, "compiling") as threads:

            def make(program: CompiledFunction, *args: Any) -> Any:
                result, compile_or_load = program.ahead(*args)
                threads.submit(contextvars.copy_context().run, compile_or_load)  # what it announces is observed
                return result

            reading = make(_init_prefill, *empty)
            with ops.native_anyway(self.natively):
                make(_prefill, *model, reading, tokens[:, :piece], positions, self.compute, self.sharding)
            state, _ = make(_begin_decode, *model, *reading, tokens, lengths, request, self.sharding)
            with ops.native_anyway(self.natively):
                make(_decode_for(device.platform), *model, state, np.int32(most), most, self.compute, self.sharding)

    def start(
        self, reading: PrefillState, tokens: np.ndarray, lengths: np.ndarray, request: Request
    ) -> tuple[DecodeState, jax.Array]:
        with transferring():
            return _begin_decode(self.config, self.params, *reading, tokens, lengths, request, self.sharding)

    def decode(self, state: DecodeState, turns: int, most: int) -> tuple[DecodeState, jax.Array]:
        (device, *_) = state.token.devices()
        decode_there = _decode_for(device.platform)
        with ops.native_anyway(self.natively), transferring():
            return decode_there(self.config, self.params, state, np.int32(turns), most, self.compute, self.sharding)

    def read_again(
        self,
        tokens: np.ndarray,
        lengths: np.ndarray,
        given: Sequence[TokenChunk],
        count: int,
        capacity: int,
        options: CacheOptions,
    ) -> KVCache:
        """The cache of the first `count` tokens of prompts and what they were given, as they are in a longer row."""
        history = np.zeros((len(tokens), bucket(count, SMALLEST_PREFILL)), np.int32)
        new, valid = (np.concatenate([getattr(piece, name) for piece in given], axis=1) for name in ("tokens", "valid"))
        for row, (prompt, length) in enumerate(zip(tokens, lengths, strict=True)):
            history[row, :count] = np.resize(np.append(prompt[:length], new[row][valid[row]]), count)
        return self.read_prompts(history, np.full(len(tokens), count, np.int32), capacity, options, longer=1).cache

    def read_prompts(
        self, tokens: np.ndarray, lengths: np.ndarray, capacity: int, options: CacheOptions, longer: int = 0
    ) -> PrefillState:
        """Prefill in pieces, of rows that are to become `longer` than these tokens."""
        batch, width = tokens.shape
        piece = prefill_chunk(options, width)
        reading = _init_prefill(self.config, self.params, batch, capacity, options, self.sharding, piece)
        for begin in range(0, int(lengths.max()), piece):
            positions = Positions(np.clip(lengths - begin, 0, piece), rope_lengths=lengths + longer)
            part = tokens[:, begin : begin + piece]
            with ops.native_anyway(self.natively), transferring():
                reading = _prefill(self.config, self.params, reading, part, positions, self.compute, self.sharding)
        return reading


def checked_chunk(tokens: np.ndarray, logprobs: np.ndarray, valid: np.ndarray) -> TokenChunk:
    """The piece of these tokens; GenerationError where the model's logits were NaN."""
    check_logprobs(logprobs, valid)
    return TokenChunk(tokens, logprobs, valid)


def continuations(pieces: Sequence[TokenChunk], stop_tokens: Sequence[int]) -> list[Generation]:
    """The generations of all rows, from all pieces."""
    tokens, logprobs, valid = (
        np.concatenate([getattr(piece, name) for piece in pieces], axis=1) for name in ("tokens", "logprobs", "valid")
    )
    stop = set(token_ids("stop_tokens", stop_tokens).tolist())
    results = []
    for row in range(len(tokens)):
        ids, scores = tokens[row][valid[row]].tolist(), logprobs[row][valid[row]].tolist()
        stopped = ids[-1] in stop
        end = len(ids) - stopped
        results.append(Generation(ids[:end], scores[:end], "stop" if stopped else "length"))
    return results


def pack(produced: TokenChunk, done: jax.Array, taken: jax.Array) -> jax.Array:
    """Everything that the host needs after a piece as one array, int32[B, 3 n + 2], for a single transfer."""
    logprobs = jax.lax.bitcast_convert_type(produced.logprobs, jnp.int32)
    last = jnp.stack([done.astype(jnp.int32), jnp.full(done.shape, taken)], axis=1)
    return jnp.concatenate([produced.tokens, logprobs, produced.valid.astype(jnp.int32), last], axis=1)


def unpack(packed: jax.Array) -> tuple[TokenChunk, np.ndarray, int]:
    """The piece, which rows are done, and the turns taken: undo `pack`, and wait for the device.

    Raises:
      GenerationError: the model's logits were not numbers.
    """
    array = jax.device_get(packed)
    *parts, _ = np.split(array, [(array.shape[1] - 2) // 3 * i for i in (1, 2, 3)], axis=1)
    done, taken = array[:, -2].astype(bool), int(array[0, -1])
    columns = taken * STEPS_PER_CHUNK or 1  # the first piece has no turn
    tokens, logprobs, valid = (np.ascontiguousarray(part[:, :columns]) for part in parts)
    return checked_chunk(tokens, logprobs.view(np.float32), valid.astype(bool)), done, taken


def begin_decode_packed(
    config: LlamaConfig, params: Llama, cache: KVCache, hidden: jax.Array, *rest: Any
) -> tuple[DecodeState, jax.Array]:
    """`start`, with the reading as two arguments, because only the cache can be donated; the result is packed."""
    state, produced = begin_decode(config, params, PrefillState(cache, hidden), *rest)
    return state, pack(produced, state.done, jnp.int32(0))


def decode_packed(*args: Any) -> tuple[DecodeState, jax.Array]:
    """`decode`, with a packed result."""
    state, taken, produced = decode(*args)
    return state, pack(produced, state.done, taken)


_init_prefill = compiled.jit(init_prefill, static_argnums=(0, 2, 3, 4, 5, 6))
_prefill = compiled.jit(prefill, static_argnums=(0, 5, 6), donate_argnums=2)
_begin_decode = compiled.jit(begin_decode_packed, static_argnums=(0, 7), donate_argnums=2)
_with_request = compiled.jit(with_request, static_argnums=2)


def capacity_for(lengths: np.ndarray, request: Request) -> int:
    """Tokens that a row of the cache has room for: the longest prompt with the most new tokens."""
    return whole_capacity(int(lengths.max()), int(request.limit.max()))


def whole_capacity(longest: int, new: int) -> int:
    """Tokens of a row with room for a prompt and its continuation: few sizes, for programs; more of long ones."""
    wanted = bucket(longest + new, SMALLEST_CACHE)
    step = max(wanted // 8, LARGEST_PREFILL)
    return wanted if wanted <= 8 * SMALLEST_CACHE else -(-(longest + new) // step) * step


def prefill_chunk(options: CacheOptions, longest: int) -> int:
    """Prompt tokens that are read at once. With a window they take pages of their own."""
    if options.window is None:
        return min(longest, LARGEST_PREFILL)
    return min(bucket(min(options.window, longest), SMALLEST_PREFILL), LARGEST_PREFILL)


@functools.cache
def _decode_for(platform: str) -> CompiledFunction:
    options = decoding_on_tpu() if platform == "tpu" else None
    return compiled.jit(decode_packed, static_argnums=(0, 4, 5, 6), donate_argnums=2, compiler_options=options)
