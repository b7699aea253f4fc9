"""What a caller asks for, checked and made arrays."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from llama_jax.config import LlamaConfig
from llama_jax.errors import GenerationError, shown
from llama_jax.inference.sampling import Sampling
from llama_jax.inference.state import Request
from llama_jax.model.cache import bucket
from llama_jax.model.forward import check_tokens
from llama_jax.model.window import CacheOptions

SMALLEST_PREFILL = 16


def prepare(
    config: LlamaConfig,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int | Sequence[int],
    sampling: Sampling,
    stop_tokens: Sequence[int],
    cache: CacheOptions = CacheOptions(),
) -> tuple[np.ndarray, np.ndarray, Request]:
    """Prompts as tokens int32[B, bucket], padded on the right, lengths int32[B], and the request, after all checks."""
    if not isinstance(config, LlamaConfig):
        raise GenerationError(f"config is a {type(config).__name__}; give the LlamaConfig first, then the parameters")
    if not isinstance(sampling, Sampling):
        raise GenerationError(f"sampling={shown(sampling, 40)} must be a Sampling, such as Sampling(temperature=0.8)")
    rows = _rows(config, prompts)
    limit = _limits(max_new_tokens, len(rows))
    lengths = np.array([len(row) for row in rows], np.int32)
    _check_context(config, lengths, limit, cache)
    ends = token_ids("stop_tokens", stop_tokens)
    check_tokens(config, ends, "stop token")
    stop = np.full((len(rows), bucket(len(ends), 4)), -1, np.int32)
    stop[:, : len(ends)] = ends
    tokens = np.zeros((len(rows), bucket(int(lengths.max()), SMALLEST_PREFILL)), np.int32)
    for i, row in enumerate(rows):
        tokens[i, : len(row)] = row
    return tokens, lengths, Request(sampling.per_row(len(rows)), limit, stop)


def _rows(config: LlamaConfig, prompts: Sequence[Sequence[int]]) -> list[np.ndarray]:
    if isinstance(prompts, str) or not isinstance(prompts, Sequence | np.ndarray | jax.Array):
        raise GenerationError(f"prompts={shown(prompts, 40)} must be a sequence of sequences of token ids")
    if not len(prompts):
        raise GenerationError("no prompts: give at least one sequence of token ids")
    if isinstance(prompts[0], int) or getattr(prompts[0], "ndim", None) == 0:
        raise GenerationError(f"prompts={prompts!r:.40} is one prompt; a batch is needed: give [prompt]")
    rows = [token_ids(f"prompt {i}", prompt) for i, prompt in enumerate(prompts)]
    for i, row in enumerate(rows):
        if not len(row):
            raise GenerationError(f"prompt {i} is empty: give at least one token, such as the tokenizer's bos_id")
        check_tokens(config, row)
    return rows


def _limits(max_new_tokens: int | Sequence[int], batch: int) -> np.ndarray:
    """int32[B], from one number or one per row."""
    if isinstance(max_new_tokens, np.ndarray | jax.Array):
        max_new_tokens = np.asarray(max_new_tokens).tolist()
    each: list[Any] = [max_new_tokens]
    if isinstance(max_new_tokens, Sequence) and not isinstance(max_new_tokens, str):
        each = list(max_new_tokens)
    for limit in each:
        if isinstance(limit, bool) or not isinstance(limit, int | np.integer) or not 1 <= limit < 2**31:
            raise GenerationError(f"max_new_tokens={limit!r} must be a positive integer")
    if len(each) not in (1, batch):
        raise GenerationError(f"max_new_tokens has {len(each)} values for a batch of {batch}: give one, or one per row")
    return np.broadcast_to(np.array(each, np.int32), batch).copy()


def _check_context(config: LlamaConfig, lengths: np.ndarray, limit: np.ndarray, cache: CacheOptions) -> None:
    if cache.window is not None and cache.window + cache.sinks > config.max_seq_len:
        raise GenerationError(
            f"window={cache.window} and sinks={cache.sinks} exceed the model's context of {config.max_seq_len}; without a"
            " window the whole context is seen"
        )
    worst = int(np.argmax(lengths + limit))
    if cache.window is None and lengths[worst] + limit[worst] > config.max_seq_len:
        raise GenerationError(
            f"a prompt of {lengths[worst]} tokens and max_new_tokens={limit[worst]} exceed the model's context of "
            f"{config.max_seq_len}; shorten the prompt or generate at most {max(config.max_seq_len - lengths[worst], 0)},"
            " or let it see a window only (--window, CacheOptions(window=...))"
        )


def token_ids(name: str, ids: Sequence[int]) -> np.ndarray:
    """A flat sequence of token ids as an array, or GenerationError."""
    if isinstance(ids, str):
        raise GenerationError(f"{name} is the text {shown(ids, 40)}; encode it with the tokenizer first")
    try:
        found = np.asarray(ids)
    except ValueError:  # ragged
        found = np.zeros((), object)
    if found.size == 0 and found.ndim == 1:
        return found.astype(np.int64)
    if found.ndim != 1 or not np.issubdtype(found.dtype, np.integer):
        raise GenerationError(f"{name}={shown(ids, 40)} must be a flat sequence of whole numbers, the token ids")
    return found
