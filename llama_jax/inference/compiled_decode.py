"""The compiled programs of a generation, and the loop that runs them: prefill in chunks, then chunks of decoding steps."""

from __future__ import annotations

import contextvars
import functools
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Float32, Int32

from llama_jax import compiled
from llama_jax.compiled import CompiledFunction
from llama_jax.config import LlamaConfig
from llama_jax.inference.checks import check_logprobs, room_before_turning, turning_point
from llama_jax.inference.decode import (
    STEPS_PER_CHUNK,
    DecodeState,
    PrefillState,
    PromptLengths,
    PromptTokens,
    Request,
    TokenChunk,
    begin_decode,
    decode,
    init_prefill,
    prefill,
    with_request,
)
from llama_jax.inference.prepare_inputs import SMALLEST_PREFILL
from llama_jax.model.cache import CacheOptions, KVCache, bucket
from llama_jax.model.forward_options import Compute, Positions, Sharding
from llama_jax.model.params import Llama
from llama_jax.ops.platform import decodes_natively, decoding_context

LARGEST_PREFILL = 512  # longer prompts are prefilled in chunks, so that the scores are at most [512, S]
SMALLEST_CACHE = 256  # tokens: one program for all short texts
LONGEST_CHUNK = 64  # turns of the decode loop between two looks at its result
Packed: TypeAlias = Int32[Array, "B packed"]  # of `pack`

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
        """See `ops.platform.decodes_natively`."""
        return decodes_natively(self.params, self.compute.dtype, self.sharding.mesh)

    def stream(
        self, tokens: PromptTokens, lengths: PromptLengths, request: Request, options: CacheOptions, turns: int
    ) -> Iterator[TokenChunk]:
        room = room_before_turning(self.config, lengths)
        first = request.replace(limit=np.minimum(request.limit, room).astype(np.int32))
        again = turning_point(self.config) or 0 if (request.limit > room).any() else 0
        capacity, most = capacity_for(lengths, request), min(turns, LONGEST_CHUNK)
        self.prepare(tokens, lengths, first, capacity, options, most)
        state, packed = self.start(self.prefill_prompts(tokens, lengths, capacity, options), tokens, lengths, first)
        chunk, done, _ = unpack(packed)
        produced = [chunk]
        yield chunk

        while not done.all() or again:
            if done.all():  # rows that go on beyond the point have waited there for the others
                with transferring():
                    state = _with_request(state, request, self.sharding)
                done = np.asarray(state.done)
                if not done.all():
                    state = state.replace(cache=None)
                    state = state.replace(cache=self.prefill_again(tokens, lengths, produced, again, capacity, options))
                produced, again = [], 0
                continue
            state, packed = self.decode(state, most, most)
            chunk, done, _ = unpack(packed)
            if again:
                produced.append(chunk)
            yield chunk

    def prepare(
        self, tokens: PromptTokens, lengths: PromptLengths, request: Request, capacity: int, options: CacheOptions, most: int
    ) -> None:
        """Make the programs of a first generation beside one another: they are lowered in turn and compiled in threads.

        Over a mesh only a compiled program knows the sharding of its results, and they are made one after another.
        """
        size = prefill_chunk(options, tokens.shape[1])
        empty = self.config, self.params, len(tokens), capacity, options, self.sharding, size
        if self.sharding.mesh is not None or not _init_prefill.wants(*empty):
            return
        model, positions = (self.config, self.params), Positions(np.clip(lengths, 0, size), rope_lengths=lengths)
        (device, *_) = jax.tree.leaves(self.params)[0].devices()
        with ThreadPoolExecutor(3, "compiling") as threads:

            def make(program: CompiledFunction, *args: Any) -> Any:
                result, compile_or_load = program.ahead(*args)
                threads.submit(contextvars.copy_context().run, compile_or_load)  # what it announces is observed
                return result

            prefilled = make(_init_prefill, *empty)
            with decoding_context(self.natively):
                make(_prefill, *model, prefilled, tokens[:, :size], positions, self.compute, self.sharding)
            with decoding_context(self.natively and self.compute.exact):
                state, _ = make(_begin_decode, *model, *prefilled, tokens, lengths, request, self.sharding, self.compute)
            with decoding_context(self.natively):
                make(_decode_for(device.platform), *model, state, np.int32(most), most, self.compute, self.sharding)

    def start(
        self, prefilled: PrefillState, tokens: PromptTokens, lengths: PromptLengths, request: Request
    ) -> tuple[DecodeState, Packed]:
        with decoding_context(self.natively and self.compute.exact), transferring():  # exact: as in a step of an engine
            return _begin_decode(self.config, self.params, *prefilled, tokens, lengths, request, self.sharding, self.compute)

    def decode(self, state: DecodeState, turns: int, most: int) -> tuple[DecodeState, Packed]:
        (device, *_) = state.token.devices()
        decode_there = _decode_for(device.platform)
        with decoding_context(self.natively), transferring():
            return decode_there(self.config, self.params, state, np.int32(turns), most, self.compute, self.sharding)

    def prefill_again(
        self,
        tokens: PromptTokens,
        lengths: PromptLengths,
        produced: Sequence[TokenChunk],
        count: int,
        capacity: int,
        options: CacheOptions,
    ) -> KVCache:
        """The cache of the first `count` tokens of prompts and what they were given, as they are in a longer row."""
        history = np.zeros((len(tokens), bucket(count, SMALLEST_PREFILL)), np.int32)
        new, valid = (np.concatenate([getattr(chunk, name) for chunk in produced], axis=1) for name in ("tokens", "valid"))
        for row, (prompt, length) in enumerate(zip(tokens, lengths, strict=True)):
            history[row, :count] = np.resize(np.append(prompt[:length], new[row][valid[row]]), count)
        return self.prefill_prompts(history, np.full(len(tokens), count, np.int32), capacity, options, longer=1).cache

    def prefill_prompts(
        self, tokens: PromptTokens, lengths: PromptLengths, capacity: int, options: CacheOptions, longer: int = 0
    ) -> PrefillState:
        """Prefill in chunks; the rows are to become `longer` than these tokens."""
        batch, width = tokens.shape
        size = prefill_chunk(options, width)
        prefilled = _init_prefill(self.config, self.params, batch, capacity, options, self.sharding, size)
        for begin in range(0, int(lengths.max()), size):
            positions = Positions(np.clip(lengths - begin, 0, size), rope_lengths=lengths + longer)
            part = tokens[:, begin : begin + size]
            with decoding_context(self.natively), transferring():
                prefilled = _prefill(self.config, self.params, prefilled, part, positions, self.compute, self.sharding)
        return prefilled


def checked_chunk(
    tokens: Int32[np.ndarray, "B n"], logprobs: Float32[np.ndarray, "B n"], valid: Bool[np.ndarray, "B n"]
) -> TokenChunk:
    """The chunk of these tokens; GenerationError where the model's logits were NaN."""
    check_logprobs(logprobs, valid)
    return TokenChunk(tokens, logprobs, valid)


def pack(produced: TokenChunk, done: Bool[Array, " B"], taken: Int32[Array, ""]) -> Packed:
    """Everything that the host needs after a chunk of n tokens as one array [B, 3 n + 2], for a single transfer."""
    logprobs = jax.lax.bitcast_convert_type(produced.logprobs, jnp.int32)
    last = jnp.stack([done.astype(jnp.int32), jnp.full(done.shape, taken)], axis=1)
    return jnp.concatenate([produced.tokens, logprobs, produced.valid.astype(jnp.int32), last], axis=1)


def unpack(packed: Packed) -> tuple[TokenChunk, Bool[np.ndarray, " B"], int]:
    """The chunk, which rows are done, and the turns taken: undo `pack`, and wait for the device.

    Raises:
      GenerationError: the model's logits were not numbers.
    """
    array = jax.device_get(packed)
    *parts, _ = np.split(array, [(array.shape[1] - 2) // 3 * i for i in (1, 2, 3)], axis=1)
    done, taken = array[:, -2].astype(bool), int(array[0, -1])
    columns = taken * STEPS_PER_CHUNK or 1  # the first chunk has no turn
    tokens, logprobs, valid = (np.ascontiguousarray(part[:, :columns]) for part in parts)
    return checked_chunk(tokens, logprobs.view(np.float32), valid.astype(bool)), done, taken


def begin_decode_packed(
    config: LlamaConfig, params: Llama, cache: KVCache, hidden: Float[Array, "B D"], *rest: Any
) -> tuple[DecodeState, Packed]:
    """`begin_decode` with the prefill as two arguments, because only the cache can be donated; the result is packed."""
    state, produced = begin_decode(config, params, PrefillState(cache, hidden), *rest)
    return state, pack(produced, state.done, jnp.int32(0))


def decode_packed(*args: Any) -> tuple[DecodeState, Packed]:
    """`decode`, with a packed result."""
    state, taken, produced = decode(*args)
    return state, pack(produced, state.done, taken)


_init_prefill = compiled.jit(init_prefill, static_argnums=(0, 2, 3, 4, 5, 6))
_prefill = compiled.jit(prefill, static_argnums=(0, 5, 6), donate_argnums=2)
_begin_decode = compiled.jit(begin_decode_packed, static_argnums=(0, 7, 8), donate_argnums=2)
_with_request = compiled.jit(with_request, static_argnums=2)


def capacity_for(lengths: PromptLengths, request: Request) -> int:
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
    options = None
    if platform == "tpu":
        from llama_jax.xla_flags import decode_options_on_tpu

        options = decode_options_on_tpu()
    return compiled.jit(decode_packed, static_argnums=(0, 4, 5, 6), donate_argnums=2, compiler_options=options)
