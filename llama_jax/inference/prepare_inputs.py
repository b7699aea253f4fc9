"""Converts prompts, limits and sampling settings to padded arrays, and checks them before anything is computed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jaxtyping import Bool, Float32, Int, Int32, Integer

from llama_jax.config import LlamaConfig, suggest_context
from llama_jax.errors import GenerationError, short_repr
from llama_jax.inference.decode import DecodeSettings, PromptLengths, PromptTokens
from llama_jax.inference.sampling import Sampling
from llama_jax.model.cache import CacheOptions, bucket
from llama_jax.model.checks import check_tokens

MIN_PREFILL_LENGTH = 16  # shorter prompts are padded to this many tokens


def prepare_inputs(
    config: LlamaConfig,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int | Sequence[int],
    sampling: Sampling,
    stop_tokens: Sequence[int],
    cache: CacheOptions = CacheOptions(),
) -> tuple[PromptTokens, PromptLengths, DecodeSettings]:
    """Check the arguments of `generate`; return prompts int32[B, T] padded to a `bucket`, lengths, settings."""
    ids = checked_prompts(config, prompts)
    batch = len(ids)
    limit = checked_limits(max_new_tokens, batch)
    lengths = np.array([len(row) for row in ids], np.int32)
    check_context(config, lengths, limit, cache)
    stop_ids = checked_stop_tokens(config, stop_tokens)
    stop = np.full((batch, bucket(len(stop_ids), 4)), -1, np.int32)
    stop[:, : len(stop_ids)] = stop_ids
    tokens = np.zeros((batch, bucket(int(lengths.max()), MIN_PREFILL_LENGTH)), np.int32)
    for i, row in enumerate(ids):
        tokens[i, : len(row)] = row
    sampling = sampling.per_row(batch)
    return tokens, lengths, DecodeSettings(None if sampling.is_greedy() else sampling, limit, stop)


def checked_prompts(config: LlamaConfig, prompts: Sequence[Sequence[int]]) -> list[np.ndarray]:
    """Each prompt as an array of token ids."""
    if not len(prompts):
        raise GenerationError("no prompts: give at least one sequence of token ids")
    rows = [to_token_ids(f"prompt {i}", prompt) for i, prompt in enumerate(prompts)]
    for i, row in enumerate(rows):
        if not len(row):
            raise GenerationError(f"prompt {i} is empty: give at least one token, such as the tokenizer's bos_id")
        check_tokens(config, row)
    return rows


def checked_stop_tokens(config: LlamaConfig, stop_tokens: Sequence[int]) -> Integer[np.ndarray, " n"]:
    """The ids that can end a row, without those that the model has no row for: they are never generated."""
    ids = to_token_ids("stop_tokens", stop_tokens)
    if (ids < 0).any():
        raise GenerationError(f"stop token {ids.min()} is outside the vocabulary of {config.vocab_size}")
    return ids[ids < config.vocab_size]


def checked_limits(max_new_tokens: int | Sequence[int], batch: int) -> Int32[np.ndarray, " {batch}"]:
    """`max_new_tokens` as int32[B], from one number or one per row."""
    if isinstance(max_new_tokens, np.ndarray | jax.Array):
        max_new_tokens = np.asarray(max_new_tokens).tolist()
    limits: list[Any] = [max_new_tokens]
    if isinstance(max_new_tokens, Sequence) and not isinstance(max_new_tokens, str):
        limits = list(max_new_tokens)
    for limit in limits:
        if isinstance(limit, bool) or not isinstance(limit, int | np.integer) or not 1 <= limit < 2**31:
            raise GenerationError(f"max_new_tokens={limit!r} must be a positive integer")
    if len(limits) not in (1, batch):
        raise GenerationError(f"max_new_tokens has {len(limits)} values for a batch of {batch}: give one, or one per row")
    return np.broadcast_to(np.array(limits, np.int32), batch).copy()


def check_context(
    config: LlamaConfig, lengths: Int[np.ndarray, " B"], limit: Int[np.ndarray, " B"], cache: CacheOptions
) -> None:
    """Raise GenerationError for rows or windows longer than the model's context."""
    if cache.window is not None and cache.window + cache.sinks > config.max_seq_len:
        raise GenerationError(
            f"window={cache.window} and sinks={cache.sinks} exceed the model's context of {config.max_seq_len}; without a"
            " window the whole context is seen"
        )
    longest = int(np.argmax(lengths + limit))
    total = int(lengths[longest]) + int(limit[longest])
    if cache.window is None and total > config.max_seq_len:
        raise GenerationError(
            f"a prompt of {lengths[longest]} tokens and max_new_tokens={limit[longest]} exceed the model's context of "
            f"{config.max_seq_len}; shorten the prompt or generate at most {max(config.max_seq_len - lengths[longest], 0)},"
            f" or use a sliding window (--window, CacheOptions(window=...)){suggest_context(config, total)}"
        )


def check_not_traced(params: Any) -> None:
    """Raise GenerationError inside a transformation of JAX, which cannot trace a loop on the host."""
    if any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(params)):
        raise GenerationError(
            "generate and stream loop on the host, so not in jit, grad or vmap; transform llama_jax.logits"
        )


def check_logprobs(logprobs: Float32[np.ndarray, "B n"], valid: Bool[np.ndarray, "B n"]) -> None:
    """Raise GenerationError if the model's logits were NaN."""
    bad = np.isnan(logprobs) & valid
    if bad.any():
        raise GenerationError(
            f"the model's logits in row {int(np.argwhere(bad)[0, 0])} are NaN: its numbers overflow; try float32"
        )


def to_token_ids(name: str, ids: Sequence[int]) -> Integer[np.ndarray, " n"]:
    """A flat sequence of token ids as an array, or GenerationError."""
    if isinstance(ids, str):
        raise GenerationError(f"{name} is the text {short_repr(ids, 40)}; encode it with the tokenizer first")
    try:
        array = np.asarray(ids)
    except ValueError:  # ragged
        array = np.zeros((), object)
    if array.size == 0 and array.ndim == 1:
        return array.astype(np.int64)
    if array.ndim != 1 or not np.issubdtype(array.dtype, np.integer):
        raise GenerationError(f"{name}={short_repr(ids, 40)} must be a flat sequence of integers, the token ids")
    return array
