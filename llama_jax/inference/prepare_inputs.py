"""Converts prompts, limits and sampling settings to padded arrays."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from llama_jax.config import LlamaConfig
from llama_jax.errors import GenerationError, shown
from llama_jax.inference.checks import check_context, checked_limits, checked_prompts, token_ids
from llama_jax.inference.decode import PromptLengths, PromptTokens, Request
from llama_jax.inference.sampling import Sampling
from llama_jax.model.cache import CacheOptions, bucket
from llama_jax.model.checks import check_tokens

SMALLEST_PREFILL = 16


def prepare_inputs(
    config: LlamaConfig,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int | Sequence[int],
    sampling: Sampling,
    stop_tokens: Sequence[int],
    cache: CacheOptions = CacheOptions(),
) -> tuple[PromptTokens, PromptLengths, Request]:
    """Prompts as tokens, padded on the right to a `bucket`, their lengths, and the request, after all checks."""
    if not isinstance(config, LlamaConfig):
        raise GenerationError(f"config is a {type(config).__name__}; pass the LlamaConfig first, then the parameters")
    if not isinstance(sampling, Sampling):
        raise GenerationError(f"sampling={shown(sampling, 40)} must be a Sampling, such as Sampling(temperature=0.8)")
    rows = checked_prompts(config, prompts)
    limit = checked_limits(max_new_tokens, len(rows))
    lengths = np.array([len(row) for row in rows], np.int32)
    check_context(config, lengths, limit, cache)
    ends = token_ids("stop_tokens", stop_tokens)
    check_tokens(config, ends, "stop token")
    stop = np.full((len(rows), bucket(len(ends), 4)), -1, np.int32)
    stop[:, : len(ends)] = ends
    tokens = np.zeros((len(rows), bucket(int(lengths.max()), SMALLEST_PREFILL)), np.int32)
    for i, row in enumerate(rows):
        tokens[i, : len(row)] = row
    return tokens, lengths, Request(sampling.per_row(len(rows)), limit, stop)
