"""The state of a generation, and the pure functions that advance it: prefill, first token, decode.

A `DecodeState` has one row per sequence of the batch. Rows are independent: each has its own position, settings and limit.
`inference.compiled_decode` prefills a batch of prompts and decodes until all rows are done. Everything runs under `jax.jit`;
if the state is donated, the cache is never copied.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import lax
from jaxtyping import Array, Bool, Float, Float32, Int32

from llama_jax.config import LlamaConfig
from llama_jax.inference.sampling import LogitMask, Sampling, sample
from llama_jax.model.cache import CacheOptions, KVCache, init_cache
from llama_jax.model.forward import forward, lm_head_of, unembed
from llama_jax.model.forward_options import ComputeOptions, Positions, Sharding
from llama_jax.model.params import LlamaParams
from llama_jax.ops import exact
from llama_jax.ops.platform import AnyArray

PromptTokens: TypeAlias = Int32[np.ndarray, "B T"]  # on the host, padded on the right
PromptLengths: TypeAlias = Int32[np.ndarray, " B"]
STEPS_PER_CHUNK = 4  # decode steps; the loop can only exit between chunks, so chunks are short


class DecodeSettings(struct.PyTreeNode):
    """Settings for the rows of a batch.

    Attributes:
      sampling: arrays [B], or None for greedy rows, see `sample`.
      limit: int32[B], maximum number of tokens to generate.
      stop: int32[B, n], token ids that end a row, padded with -1.
    """

    sampling: Sampling | None
    limit: Any
    stop: Any


class DecodeState(struct.PyTreeNode):
    """The state of a generation between tokens: an immutable pytree.

    Attributes:
      cache: the KV cache.
      settings: settings for the rows.
      token: int32[B], the last sampled token, the input of the next step.
      seen: bool[B, V] (V with padding), tokens that occur in the prompt or the continuation, for the repetition penalty.
      count: int32[B], tokens generated so far.
      done: bool[B], whether the row has generated a stop token, has reached its limit, or is unused (serving).
    """

    cache: KVCache
    settings: DecodeSettings
    token: jax.Array
    seen: jax.Array
    count: jax.Array
    done: jax.Array


class PrefillState(NamedTuple):
    """Partially prefilled prompts: the cache, and the hidden state [B, D] of each row's last processed token."""

    cache: KVCache
    hidden: jax.Array


class TokenChunk(NamedTuple):
    """The next n tokens of each row: JAX arrays, or NumPy arrays if yielded by `stream`.

    Attributes:
      tokens: int32[B, n].
      logprobs: float32[B, n], log-probability under the model itself, before penalty, temperature and filters.
      valid: bool[B, n]; False after the end of a row.
    """

    tokens: Any
    logprobs: Any
    valid: Any


def init_prefill(
    config: LlamaConfig,
    params: LlamaParams,
    batch: int,
    capacity: int,
    options: CacheOptions = CacheOptions(),
    sharding: Sharding = Sharding(),
    max_tokens_per_pass: int = 1,
) -> PrefillState:
    """An empty cache in the parameters' dtype, and hidden states of zeros; for the arguments see `init_cache`."""
    dtype = params.embedding.dtype
    cache = init_cache(
        config,
        batch,
        capacity,
        jnp.dtype(options.dtype or dtype),
        window=options.window,
        sinks=options.sinks,
        max_tokens_per_pass=max_tokens_per_pass,
    )
    return PrefillState(shard_cache(cache, sharding), sharding.constrain(jnp.zeros((batch, config.dim), dtype), "row"))


def prefill(
    config: LlamaConfig,
    params: LlamaParams,
    prefilled: PrefillState,
    tokens: Int32[AnyArray, "B T"],
    positions: Positions,
    compute: ComputeOptions = ComputeOptions(),
    sharding: Sharding = Sharding(),
) -> PrefillState:
    """Prefill T more tokens of each prompt.

    Args:
      tokens: padded on the right.
      positions: `lengths` int32[B], how many of each row's T tokens are valid (0 if its prompt has ended);
        `rope_lengths` int32[B], see `planned_rope_length`.
    """
    token_hidden, cache = forward(
        config, params, tokens, prefilled.cache, positions=positions, compute=compute, sharding=sharding
    )
    lengths = positions.lengths
    last = jnp.take_along_axis(token_hidden, jnp.maximum(lengths - 1, 0)[:, None, None], axis=1)[:, 0]
    hidden = jnp.where((lengths > 0)[:, None], last, prefilled.hidden)
    return PrefillState(shard_cache(cache, sharding), sharding.constrain(hidden, "row"))


def begin_decode(
    config: LlamaConfig,
    params: LlamaParams,
    prefilled: PrefillState,
    tokens: Int32[AnyArray, "B T"],
    lengths: Int32[AnyArray, " B"],
    settings: DecodeSettings,
    compute: ComputeOptions = ComputeOptions(),
    sharding: Sharding = Sharding(),
) -> tuple[DecodeState, TokenChunk]:
    """Sample the first new token of each row, after its prompt of `lengths` tokens. Returns the state and the new tokens."""
    batch = len(tokens)
    seen = mark_seen(jnp.zeros((batch, lm_head_of(config, params).shape[0]), bool), tokens, lengths)
    state = DecodeState(
        cache=shard_cache(prefilled.cache, sharding),
        settings=settings,
        token=jnp.zeros(batch, jnp.int32),
        seen=sharding.constrain(seen, "logits"),
        count=jnp.zeros(batch, jnp.int32),
        done=jnp.zeros(batch, bool),
    )
    with sharding.context():
        logits = compute_logits(config, params, prefilled.hidden, compute, sharding)
        state, logprobs = sample_next(state, logits, sharding, is_exact=compute.exact)
    token, done, logprobs = (sharding.constrain(x, "replicated") for x in (state.token, state.done, logprobs))
    first = TokenChunk(token[:, None], logprobs[:, None], jnp.ones((batch, 1), bool))
    return state.replace(token=token, done=done), first


def mark_seen(
    seen: Bool[Array, "B V"], tokens: Int32[AnyArray, "B T"], lengths: Int32[AnyArray, " B"]
) -> Bool[Array, "B V"]:
    """`DecodeState.seen` with the first `lengths` tokens of each row."""
    batch, padded_length = tokens.shape
    # Every id is a token, so padding gets an index out of range, which the scatter drops.
    token_or_out_of_range = jnp.where(jnp.arange(padded_length)[None] < lengths[:, None], tokens, seen.shape[1])
    return seen.at[jnp.arange(batch)[:, None], token_or_out_of_range].set(True, mode="drop")


def decode(
    config: LlamaConfig,
    params: LlamaParams,
    state: DecodeState,
    chunks: Int32[Array, ""] | np.int32,
    max_chunks: int,
    compute: ComputeOptions = ComputeOptions(),
    sharding: Sharding = Sharding(),
) -> tuple[DecodeState, Int32[Array, ""], TokenChunk]:
    """Run up to `chunks` chunks of `STEPS_PER_CHUNK` decode steps; fewer if all rows are done earlier.

    Args:
      chunks: at most `max_chunks`.
      max_chunks: capacity of the result, in chunks (static).

    Returns:
      The state; the number of chunks run, int32[]; and the tokens, [B, max_chunks * STEPS_PER_CHUNK], whose first
      chunks_run * STEPS_PER_CHUNK columns are filled.
    """
    batch = state.token.shape[0]
    out = tuple(jnp.zeros((batch, max_chunks * STEPS_PER_CHUNK), dtype) for dtype in (jnp.int32, jnp.float32, bool))
    step = lambda state: decode_step(config, params, state, compute, sharding)
    state, chunks_run, out = decode_chunks(step, state, out, chunks)
    state = state.replace(cache=shard_cache(state.cache, sharding), done=sharding.constrain(state.done, "replicated"))
    return state, chunks_run, TokenChunk(*(sharding.constrain(part, "replicated") for part in out))


def decode_chunks(
    step: Callable[[DecodeState], tuple[DecodeState, tuple[jax.Array, ...]]],
    state: DecodeState,
    out: tuple[jax.Array, ...],
    chunks: Int32[Array, ""] | np.int32 | int,
    offset: int = 0,
) -> tuple[DecodeState, Int32[Array, ""], tuple[jax.Array, ...]]:
    """The decode loop: a loop of STEPS_PER_CHUNK steps inside a `while_loop`, which ends when every row is done.

    Args:
      step: maps a state to the next state and the results of this step, arrays [B].
      out: an array [B, n] for each result, into which it is written; n is at least offset + chunks * STEPS_PER_CHUNK.
      offset: the first column to write.
    """

    def run_chunk(carry: Any) -> Any:
        state, chunks_run, out = carry

        def run_step(i: jax.Array, carry: Any) -> Any:
            state, chunk = carry
            state, results = step(state)
            # Not stacked by a scan: XLA for GPUs would write a column by an asynchronous copy, which splits the CUDA graph.
            here = jnp.arange(STEPS_PER_CHUNK) == i
            return state, tuple(jnp.where(here, new[:, None], old) for old, new in zip(chunk, results, strict=True))

        empty = tuple(jnp.zeros((len(array), STEPS_PER_CHUNK), array.dtype) for array in out)
        state, chunk = lax.fori_loop(0, STEPS_PER_CHUNK, run_step, (state, empty))
        column = chunks_run * STEPS_PER_CHUNK
        start = jnp.zeros_like(column), (offset + column if offset else column)
        out = tuple(lax.dynamic_update_slice(array, part, start) for array, part in zip(out, chunk, strict=True))
        return state, chunks_run + 1, out

    def unfinished(carry: Any) -> jax.Array:
        state, chunks_run, _ = carry
        return (chunks_run < chunks) & ~jnp.all(state.done)

    return lax.while_loop(unfinished, run_chunk, (state, jnp.int32(0), out))


def compute_logits(
    config: LlamaConfig, params: LlamaParams, hidden: Float[Array, "*batch D"], compute: ComputeOptions, sharding: Sharding
) -> Float32[Array, "*batch V"]:
    """Logits in float32, also for a float64 model, because sampling uses 32-bit random numbers."""
    return sharding.constrain(unembed(config, params, hidden, compute).astype(jnp.float32), "logits")


def sample_next(
    state: DecodeState,
    logits: Float32[Array, "B V"],
    sharding: Sharding,
    logit_mask: LogitMask | None = None,
    *,
    is_exact: bool = False,
) -> tuple[DecodeState, Float32[Array, " B"]]:
    """Sample the next token of each row that is not done. Returns the next state and `TokenChunk.logprobs` of the tokens."""
    sample_rows = _sample_in_blocks if is_exact else _sample
    token, logprobs = sample_rows(state, logits, logit_mask)
    seen = jax.vmap(lambda seen, token: seen.at[token].set(True))(state.seen, token)
    count = state.count + (~state.done).astype(jnp.int32)
    stopped = jnp.any(token[:, None] == state.settings.stop, axis=-1)
    state = state.replace(
        token=token,
        seen=sharding.constrain(seen, "logits"),
        count=count,
        done=state.done | stopped | (count >= state.settings.limit),
    )
    return state, logprobs


def _sample(state: DecodeState, logits: jax.Array, logit_mask: LogitMask | None) -> tuple[jax.Array, jax.Array]:
    """A token for each row (a finished row repeats its last one) and its log-probability, both [B]."""
    token = sample(logits, state.settings.sampling, state.seen, state.count, logit_mask)
    token = jnp.where(state.done, state.token, token)
    return token, exact.logprob_of(logits, token)


def _sample_in_blocks(state: DecodeState, logits: jax.Array, mask: LogitMask | None) -> tuple[jax.Array, jax.Array]:
    """`_sample`, one block of rows at a time."""
    masked = logits if mask is None else lax.cond(mask.needed, mask.apply, lambda logits: logits, logits)

    def sample_block(state: DecodeState, logits: jax.Array, masked: jax.Array) -> tuple[jax.Array, jax.Array]:
        return _sample(state, logits, None if mask is None else LogitMask(jnp.bool_(True), lambda _: masked))

    size, in_use = exact.row_block_size(), exact.rows_in_use(state.done)
    token, logprobs = exact.map_blocks(sample_block, size, in_use, state.replace(cache=None), logits, masked)
    return jnp.where(state.done, state.token, token), logprobs


def decode_step(
    config: LlamaConfig,
    params: LlamaParams,
    state: DecodeState,
    compute: ComputeOptions,
    sharding: Sharding,
    sample_fn: Callable[[DecodeState, Float32[Array, "B V"], Sharding], tuple[DecodeState, Any]] | None = None,
) -> tuple[DecodeState, tuple[Int32[Array, " B"], Any, Bool[Array, " B"]]]:
    """Run the model on the last token of each row, and sample the next token of rows that are not done.

    Args:
      sample_fn: `sample_next` by default.

    Returns:
      The next state, and (token, logprob, valid), each [B]; rows that were done before are not valid.
    """
    valid = ~state.done
    positions = Positions(valid.astype(jnp.int32), rope_lengths=decode_rope_lengths(config, state))
    hidden, cache = forward(
        config, params, state.token[:, None], state.cache, positions=positions, compute=compute, sharding=sharding
    )
    sample_fn = sample_fn or partial(sample_next, is_exact=compute.exact)
    with sharding.context():
        logits = compute_logits(config, params, hidden[:, 0], compute, sharding)
        state, logprobs = sample_fn(state.replace(cache=shard_cache(cache, sharding)), logits, sharding)
    return state, (state.token, logprobs, valid)


def planned_rope_length(config: LlamaConfig, length: Any, limit: Any) -> Any:
    """`Positions.rope_lengths` for prefilling `length` tokens of a row that may get `limit` more.

    "longrope" has one list of factors for rows within the original context and one for longer rows. It is chosen for the
    final length, because keys in the cache keep their rotation. The frequencies of "dynamic" change with the length so far.
    """
    scaling = config.rope_scaling
    return length + limit if scaling is not None and scaling.kind == "longrope" else length


def decode_rope_lengths(config: LlamaConfig, state: DecodeState) -> Int32[Array, " B"] | None:
    """`Positions.rope_lengths` for decoding: final lengths for "longrope" (`planned_rope_length`), else None."""
    scaling = config.rope_scaling
    if scaling is None or scaling.kind != "longrope":
        return None
    prompt_lengths = state.cache.length - (state.count - 1)  # the last sampled token is not in the cache yet
    return prompt_lengths + state.settings.limit


def shard_cache(cache: KVCache, sharding: Sharding) -> KVCache:
    """The cache with sharding constraints on its arrays."""
    pages = jax.tree.map(lambda x: sharding.constrain(x, "cache"), cache.pages)
    table, length = (sharding.constrain(x, "row") for x in (cache.table, cache.length))
    return cache.replace(pages=pages, table=table, length=length)
