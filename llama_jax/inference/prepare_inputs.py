"""Converts prompts, limits and sampling settings to padded arrays."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from llama_jax.config import LlamaConfig
from llama_jax.inference.checks import check_context, checked_limits, checked_prompts, checked_stop_tokens
from llama_jax.inference.decode import DecodeSettings, PromptLengths, PromptTokens
from llama_jax.inference.sampling import Sampling
from llama_jax.model.cache import CacheOptions, bucket

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
