"""Rollouts for reinforcement learning: groups of answers to prompts, sampled by one program."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from llama_jax.config import LlamaConfig
from llama_jax.errors import ConfigError
from llama_jax.inference.compiled_decode import MAX_PREFILL_CHUNK
from llama_jax.inference.decode import (
    STEPS_PER_CHUNK,
    DecodeSettings,
    DecodeState,
    PrefillState,
    compute_logits,
    decode_chunks,
    decode_step,
    planned_rope_length,
    prefill,
    shard_cache,
)
from llama_jax.inference.sampling import Sampling, sample
from llama_jax.model.cache import init_cache, repeat_rows
from llama_jax.model.forward_options import ComputeOptions, Positions, Sharding
from llama_jax.model.params import LlamaParams
from llama_jax.ops import exact
from llama_jax.settings import PositiveFloat, PositiveInt, check_fields


class RolloutPrompts(NamedTuple):
    """The prompts of a batch.

    Attributes:
      tokens: int32[P, W], padded on the right.
      lengths: int32[P], number of tokens of each prompt.
      seeds: uint32[P * group_size], seeds of the answers' random streams; those of one prompt are consecutive.
    """

    tokens: Any
    lengths: Any
    seeds: Any


class Completions(NamedTuple):
    """B = P * group_size answers; those to one prompt are consecutive.

    Attributes:
      tokens: int32[B, A], including the stop token that ended an answer.
      logprobs: float32[B, A], under the distribution (at the temperature) from which the tokens were sampled.
      valid: bool[B, A], False after an answer's end.
      stopped: bool[B], whether a stop token ended the answer; otherwise it was cut off at A tokens.
    """

    tokens: Any
    logprobs: Any
    valid: Any
    stopped: Any


@dataclass(frozen=True)
class RolloutOptions:
    """How answers are sampled, always from the full distribution; a recipe checks these.

    The trainer's log-probabilities are untruncated, so top-k or top-p would bias the importance ratios.

    Attributes:
      group_size: answers per prompt.
      max_new_tokens: A, maximum number of tokens of an answer, including its stop token.
      temperature: above 0; divides the logits.
      stop: tokens that end an answer.
    """

    group_size: PositiveInt
    max_new_tokens: PositiveInt
    temperature: PositiveFloat = 1.0
    stop: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        check_fields(self, ConfigError)


def roll_out(
    config: LlamaConfig,
    params: LlamaParams,
    prompts: RolloutPrompts,
    options: RolloutOptions,
    compute: ComputeOptions = ComputeOptions(),
    sharding: Sharding = Sharding(),
) -> Completions:
    """Sample `group_size` answers to each prompt. Each depends on its own seed, not on the rest of the batch.

    Each prompt is prefilled once, and its answers share its pages in the cache. The loop ends when all answers have ended.
    Jit it with `config`, `options`, `compute` and `sharding` bound: one program for all prompts of at most W tokens.

    Args:
      params: in any form, also with adapters or quantized, on any devices.
      sharding: see `generation_sharding`; P must be divisible by the number of batch shards.
    """
    prefilled = _prefill_prompts(config, params, prompts, options, compute, sharding)
    batch = prompts.tokens.shape[0] * options.group_size
    state = _init_decode_state(prefilled, prompts, options, sharding)
    chunks = -(-options.max_new_tokens // STEPS_PER_CHUNK)

    def sample_at_temperature(state: DecodeState, logits: jax.Array, sharding: Sharding) -> tuple[DecodeState, jax.Array]:
        """`decode.sample_next`, with log-probabilities at the temperature."""

        def choose(logits: jax.Array, rows: DecodeState) -> tuple[jax.Array, jax.Array]:
            token = sample(logits, rows.settings.sampling, rows.seen, rows.count)
            token = jnp.where(rows.done, rows.token, token)
            return token, exact.logprob_of(logits / options.temperature, token)

        token, logprobs = exact.map_row_blocks(
            compute.exact, choose, exact.rows_in_use(state.done), logits, state.replace(cache=None)
        )
        token = jnp.where(state.done, state.token, token)
        count = state.count + ~state.done
        done = state.done | jnp.any(token[:, None] == state.settings.stop, axis=-1) | (count >= state.settings.limit)
        return state.replace(token=token, count=count, done=done), logprobs

    with sharding.context():
        hidden = sharding.constrain(jnp.repeat(prefilled.hidden, options.group_size, axis=0), "row")
        logits = compute_logits(config, params, hidden, compute, sharding)
        state, logprobs = sample_at_temperature(state, logits, sharding)
    first = (state.token, logprobs, jnp.ones(batch, bool))
    out = tuple(jnp.zeros((batch, 1 + chunks * STEPS_PER_CHUNK), part.dtype).at[:, 0].set(part) for part in first)
    step = lambda state: decode_step(config, params, state, compute, sharding, sample_at_temperature)
    _, _, out = decode_chunks(step, state, out, chunks, offset=1)
    tokens, logprobs, valid = (sharding.constrain(part[:, : options.max_new_tokens], "replicated") for part in out)
    ends = jnp.any(tokens[..., None] == jnp.asarray(options.stop, jnp.int32), axis=-1)
    return Completions(tokens, logprobs, valid, jnp.any(ends & valid, axis=1))


def _prefill_prompts(
    config: LlamaConfig,
    params: LlamaParams,
    prompts: RolloutPrompts,
    options: RolloutOptions,
    compute: ComputeOptions,
    sharding: Sharding,
) -> PrefillState:
    """Prefill all prompts in chunks; the cache has the dtype of the computation."""
    tokens, lengths = jnp.asarray(prompts.tokens), jnp.asarray(prompts.lengths)
    batch, padded_length = tokens.shape
    dtype = jnp.dtype(compute.dtype or params.embedding.dtype)
    cache = init_cache(config, batch, padded_length, dtype)
    prefilled = PrefillState(shard_cache(cache, sharding), sharding.constrain(jnp.zeros((batch, config.dim), dtype), "row"))
    rope_lengths = planned_rope_length(config, lengths, options.max_new_tokens)
    for begin in range(0, padded_length, MAX_PREFILL_CHUNK):
        part = tokens[:, begin : begin + MAX_PREFILL_CHUNK]
        positions = Positions(jnp.clip(lengths - begin, 0, part.shape[1]), rope_lengths=rope_lengths)
        prefilled = prefill(config, params, prefilled, part, positions, compute, sharding)
    return prefilled


def _init_decode_state(
    prefilled: PrefillState, prompts: RolloutPrompts, options: RolloutOptions, sharding: Sharding
) -> DecodeState:
    """A state with `group_size` rows for each prompt, before their first tokens."""
    batch = prefilled.hidden.shape[0] * options.group_size
    with sharding.context():
        cache = repeat_rows(prefilled.cache, options.group_size, options.max_new_tokens, sharding.head_sharding)
    sampling = Sampling(temperature=options.temperature).per_row(batch).replace(seed=jnp.asarray(prompts.seeds))
    stop = jnp.broadcast_to(jnp.asarray(options.stop or (-1,), jnp.int32), (batch, max(len(options.stop), 1)))
    return DecodeState(
        cache=shard_cache(cache, sharding),
        settings=DecodeSettings(sampling, jnp.full(batch, options.max_new_tokens, jnp.int32), stop),
        token=jnp.zeros(batch, jnp.int32),
        seen=jnp.zeros((batch, 1), bool),  # for a repetition penalty, which is not used here
        count=jnp.zeros(batch, jnp.int32),
        done=jnp.zeros(batch, bool),
    )
