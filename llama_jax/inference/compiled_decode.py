"""The compiled programs of a generation, and the loop that runs them: prefill in chunks, then chunks of decode steps."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Float32, Int32

from llama_jax.config import LlamaConfig
from llama_jax.inference.decode import (
    STEPS_PER_CHUNK,
    DecodeSettings,
    DecodeState,
    PrefillState,
    PromptLengths,
    PromptTokens,
    TokenChunk,
    begin_decode,
    decode,
    init_prefill,
    planned_rope_length,
    prefill,
)
from llama_jax.inference.prepare_inputs import MIN_PREFILL_LENGTH, check_logprobs
from llama_jax.model.cache import CacheOptions, KVCache, bucket
from llama_jax.model.forward_options import ComputeOptions, Positions, Sharding
from llama_jax.model.params import LlamaParams
from llama_jax.ops.platform import lowering_platform

MAX_PREFILL_CHUNK = 512  # tokens; longer prompts are prefilled in chunks, which bounds attention scores to [512, S]
MIN_CACHE_CAPACITY = 256  # tokens per row: one program for all short texts
MAX_CHUNKS_PER_CALL = 64  # chunks of STEPS_PER_CHUNK decode steps between two transfers to the host
PackedChunk: TypeAlias = Int32[Array, "B packed"]  # the result of `pack_chunk`, [B, 3 n + 2]

# Inputs are transferred to the device even under a caller's `jax.transfer_guard`.
allow_transfers = functools.partial(jax.transfer_guard_host_to_device, "allow")


def decoding_compute(params: LlamaParams, compute: ComputeOptions, mesh: Any) -> ComputeOptions:
    """`compute` with native code, if a model is decoded on a single CPU in a dtype with native matmuls."""
    first = jax.tree.leaves(params)[0]
    platform = next(iter(first.devices())).platform if isinstance(first, jax.Array) else lowering_platform()
    dtype = str(jnp.dtype(compute.dtype or params.embedding.dtype))
    if platform != "cpu" or (mesh is not None and mesh.size > 1) or dtype not in ("float32", "bfloat16"):
        return compute
    from llama_jax.ops.cpu import native

    return compute if native.compiler() is None else replace(compute, native_code=True)


@dataclass(frozen=True)
class CompiledDecode:
    """The compiled functions of `inference.decode`, bound to the model and the options of a generation.

    Attributes:
      compute: see `decoding_compute`.
    """

    config: LlamaConfig
    params: LlamaParams
    compute: ComputeOptions
    sharding: Sharding

    def stream(
        self, tokens: PromptTokens, lengths: PromptLengths, settings: DecodeSettings, options: CacheOptions, max_chunks: int
    ) -> Iterator[TokenChunk]:
        """See `inference.generate.stream`."""
        capacity, max_chunks = capacity_for(lengths, settings), min(max_chunks, MAX_CHUNKS_PER_CALL)
        prefilled = self.prefill_prompts(tokens, lengths, settings.limit, capacity, options)
        state, packed = self.begin_decode(prefilled, tokens, lengths, settings)
        chunk, done, _ = unpack_chunk(packed)
        yield chunk
        while not done.all():
            state, packed = self.decode(state, max_chunks, max_chunks)
            chunk, done, _ = unpack_chunk(packed)
            yield chunk

    def begin_decode(
        self, prefilled: PrefillState, tokens: PromptTokens, lengths: PromptLengths, settings: DecodeSettings
    ) -> tuple[DecodeState, PackedChunk]:
        with allow_transfers():
            return _begin_decode(
                self.config, self.params, *prefilled, tokens, lengths, settings, self.compute, self.sharding
            )

    def decode(self, state: DecodeState, chunks: int, max_chunks: int) -> tuple[DecodeState, PackedChunk]:
        (device, *_) = state.token.devices()
        decode_on_device = _decode_for(device.platform)
        with allow_transfers():
            return decode_on_device(
                self.config, self.params, state, np.int32(chunks), max_chunks, self.compute, self.sharding
            )

    def prefill_prompts(
        self, tokens: PromptTokens, lengths: PromptLengths, limit: Any, capacity: int, options: CacheOptions
    ) -> PrefillState:
        """Prefill in chunks.

        Args:
          limit: the maximum number of tokens after each prompt, see `planned_rope_length`.
        """
        batch, padded_length = tokens.shape
        chunk_size = prefill_chunk_size(options, padded_length)
        rope_lengths = planned_rope_length(self.config, lengths, limit)
        prefilled = _init_prefill(self.config, self.params, batch, capacity, options, self.sharding, chunk_size)
        for start in range(0, int(lengths.max()), chunk_size):
            positions = Positions(np.clip(lengths - start, 0, chunk_size), rope_lengths=rope_lengths)
            chunk = tokens[:, start : start + chunk_size]
            with allow_transfers():
                prefilled = _prefill(self.config, self.params, prefilled, chunk, positions, self.compute, self.sharding)
        return prefilled


def checked_chunk(
    tokens: Int32[np.ndarray, "B n"], logprobs: Float32[np.ndarray, "B n"], valid: Bool[np.ndarray, "B n"]
) -> TokenChunk:
    """A `TokenChunk` of these arrays; raises GenerationError if the model's logits were NaN."""
    check_logprobs(logprobs, valid)
    return TokenChunk(tokens, logprobs, valid)


def pack_chunk(chunk: TokenChunk, done: Bool[Array, " B"], chunks_run: Int32[Array, ""]) -> PackedChunk:
    """Tokens, logprobs (bitcast), validity, done and the chunk count as one array, for a single device-to-host copy."""
    logprobs = jax.lax.bitcast_convert_type(chunk.logprobs, jnp.int32)
    done_and_count = jnp.stack([done.astype(jnp.int32), jnp.full(done.shape, chunks_run)], axis=1)
    return jnp.concatenate([chunk.tokens, logprobs, chunk.valid.astype(jnp.int32), done_and_count], axis=1)


def unpack_chunk(packed: PackedChunk) -> tuple[TokenChunk, Bool[np.ndarray, " B"], int]:
    """Undo `pack_chunk`, and wait for the device: the tokens, which rows are done, and the number of chunks run.

    Raises:
      GenerationError: the model's logits were NaN.
    """
    array = jax.device_get(packed)
    n = (array.shape[1] - 2) // 3
    *parts, _ = np.split(array, [n, 2 * n, 3 * n], axis=1)
    done, chunks_run = array[:, -2].astype(bool), int(array[0, -1])
    columns = chunks_run * STEPS_PER_CHUNK or 1  # `begin_decode_packed` packs a count of 0 with one token
    tokens, logprobs, valid = (np.ascontiguousarray(part[:, :columns]) for part in parts)
    return checked_chunk(tokens, logprobs.view(np.float32), valid.astype(bool)), done, chunks_run


def begin_decode_packed(
    config: LlamaConfig, params: LlamaParams, cache: KVCache, hidden: Float[Array, "B D"], *rest: Any
) -> tuple[DecodeState, PackedChunk]:
    """`begin_decode` with a packed result. Cache and hidden are separate arguments, because only the cache is donated."""
    state, first = begin_decode(config, params, PrefillState(cache, hidden), *rest)
    return state, pack_chunk(first, state.done, jnp.int32(0))


def decode_packed(*args: Any) -> tuple[DecodeState, PackedChunk]:
    """`decode`, with a packed result."""
    state, chunks_run, chunk = decode(*args)
    return state, pack_chunk(chunk, state.done, chunks_run)


_init_prefill = jax.jit(init_prefill, static_argnums=(0, 2, 3, 4, 5, 6))
_prefill = jax.jit(prefill, static_argnums=(0, 5, 6), donate_argnums=2)
_begin_decode = jax.jit(begin_decode_packed, static_argnums=(0, 7, 8), donate_argnums=2)


def capacity_for(lengths: PromptLengths, settings: DecodeSettings) -> int:
    """The capacity of the cache in tokens per row: the longest prompt with the largest limit, rounded up."""
    return round_capacity(int(lengths.max()), int(settings.limit.max()))


def round_capacity(prompt_length: int, new_tokens: int) -> int:
    """The capacity for `prompt_length + new_tokens` tokens, rounded up so that few programs are compiled.

    Up to 2,048 tokens it is a power of two; above that a multiple of an eighth of the next power of two, at least 512.
    """
    length = prompt_length + new_tokens
    power_of_two = bucket(length, MIN_CACHE_CAPACITY)
    if power_of_two <= 8 * MIN_CACHE_CAPACITY:
        return power_of_two
    multiple = max(power_of_two // 8, MAX_PREFILL_CHUNK)
    return -(-length // multiple) * multiple


def prefill_chunk_size(options: CacheOptions, prompt_length: int) -> int:
    """Prompt tokens per prefill call. With a window it is the limit, rounded up: pages hold one window and one chunk."""
    if options.window is None:
        return min(prompt_length, MAX_PREFILL_CHUNK)
    return min(bucket(min(options.window, prompt_length), MIN_PREFILL_LENGTH), MAX_PREFILL_CHUNK)


@functools.cache
def _decode_for(platform: str) -> Callable[..., tuple[DecodeState, PackedChunk]]:
    options = None
    if platform == "tpu":
        from llama_jax.inference.xla_flags import decode_options_on_tpu

        options = decode_options_on_tpu()
    return jax.jit(decode_packed, static_argnums=(0, 4, 5, 6), donate_argnums=2, compiler_options=options)
