"""Generation for a batch of prompts of any length: a compiled prefill, then compiled chunks of decode steps."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from jax.sharding import NamedSharding

from llama_jax.config import LlamaConfig
from llama_jax.errors import GenerationError
from llama_jax.inference.compiled_decode import MAX_CHUNKS_PER_CALL, CompiledDecode, decoding_compute
from llama_jax.inference.decode import TokenChunk
from llama_jax.inference.drafter import DraftCounts, Drafter, with_counts
from llama_jax.inference.prepare_inputs import check_not_traced, prepare_inputs, to_token_ids
from llama_jax.inference.sampling import Sampling
from llama_jax.inference.sharding import check_row_shards, sharding_of
from llama_jax.model.cache import CacheOptions
from llama_jax.model.forward_options import ComputeOptions, Sharding
from llama_jax.model.params import LlamaParams
from llama_jax.ops.platform import nondefault_device
from llama_jax.settings import at_least


@dataclass(frozen=True)
class Generation:
    """The continuation of one prompt.

    Attributes:
      tokens: the generated token ids, without the prompt and without the stop token.
      logprobs: log-probability of each token under the model itself, before penalty, temperature and filters.
      finish_reason: "stop" at a stop token, "length" at `max_new_tokens`.
      counts: with speculative decoding, the numbers of passes, drafted tokens and accepted tokens; else None.
    """

    tokens: list[int]
    logprobs: list[float]
    finish_reason: Literal["stop", "length"]
    counts: DraftCounts | None = None


def generate(
    config: LlamaConfig,
    params: LlamaParams,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int | Sequence[int],
    sampling: Sampling = Sampling(),
    stop_tokens: Sequence[int] = (),
    cache: CacheOptions = CacheOptions(),
    compute: ComputeOptions = ComputeOptions(),
    draft: Drafter | None = None,
) -> list[Generation]:
    """Continue each prompt. With float32 weights, a prompt gets the same tokens in a batch as alone.

    With 16-bit or quantized weights, near ties may resolve differently: XLA's order of sums depends on the shapes, and CPU
    kernels for block-quantized weights round activations to 8 bits. LongRoPE's factors are chosen for the prompt and
    `max_new_tokens` together, see `inference.decode.planned_rope_length`.

    Args:
      config, params: the model. If the parameters are sharded over a mesh (`load(..., mesh=...)`), generation runs on it.
      prompts: one sequence of token ids per row, of any length, from `tokenizer.encode` (with the begin-of-sequence token).
      max_new_tokens: maximum number of tokens to generate, one for all rows or one per row.
      sampling: greedy by default; each field is one value or one per row.
      stop_tokens: ids that end a row, such as `tokenizer.stop_ids`; without any, a row ends at `max_new_tokens`.
      cache: options of the KV cache: int8, or a sliding window, which lets a row become longer than the model's context.
      compute: the dtype of the computation (by default that of the parameters), or a custom attention function.
      draft: for speculative decoding, a `PromptLookup` or a `DraftModel`: several draft tokens are verified in one pass.
        It changes the speed but, except for near ties, not the tokens.

    Returns:
      One `Generation` per prompt: tokens, logprobs and why it ended.

    Raises:
      GenerationError: an empty prompt, an id outside the vocabulary, a length beyond the model's context, an invalid
        sampling value, or NaN logits.
      ConfigError: parameters that do not match the configuration; a model whose custom attention is missing.
      MeshError: prompts that cannot be divided over the mesh of the parameters.
    """
    chunks = list(
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
            max_chunks=MAX_CHUNKS_PER_CALL,
        )
    )
    results = to_generations(chunks, stop_tokens)
    return results if draft is None else with_counts(results, chunks)


def stream(
    config: LlamaConfig,
    params: LlamaParams,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int | Sequence[int],
    sampling: Sampling = Sampling(),
    stop_tokens: Sequence[int] = (),
    cache: CacheOptions = CacheOptions(),
    compute: ComputeOptions = ComputeOptions(),
    draft: Drafter | None = None,
    max_chunks: int = 1,
) -> Iterator[TokenChunk]:
    """Yield the tokens of all rows as `TokenChunk`: the first token, then up to 4 * min(max_chunks, 64) tokens at a time.

    Arguments and errors as for `generate`. Invalid arguments raise in the call itself. During iteration, NaN logits raise
    GenerationError, and parameters that do not match the configuration raise ConfigError. A stop token is yielded as the
    last valid token of its row.
    """
    at_least(1).check("max_chunks", max_chunks, GenerationError)
    check_not_traced(params)
    tokens, lengths, settings = prepare_inputs(config, prompts, max_new_tokens, sampling, stop_tokens, cache)
    sharding, embedding = Sharding(), params.embedding
    if isinstance(getattr(embedding, "sharding", None), NamedSharding) or nondefault_device(embedding) is not None:
        sharding = sharding_of(params)  # generation runs on the devices of the parameters
        check_row_shards(sharding, len(prompts))
    programs = CompiledDecode(config, params, decoding_compute(params, compute, sharding.mesh), sharding)
    if draft is not None:
        from llama_jax.inference.speculation.speculative_decode import stream_drafted

        return stream_drafted(programs, draft, (tokens, lengths, settings), cache, int(max_chunks))
    return programs.stream(tokens, lengths, settings, cache, int(max_chunks))


def to_generations(chunks: Sequence[TokenChunk], stop_tokens: Sequence[int]) -> list[Generation]:
    """One `Generation` per row, from all chunks."""
    tokens, logprobs, valid = (
        np.concatenate([getattr(chunk, name) for chunk in chunks], axis=1) for name in ("tokens", "logprobs", "valid")
    )
    stop_ids = set(to_token_ids("stop_tokens", stop_tokens).tolist())
    results = []
    for row in range(len(tokens)):
        ids, row_logprobs = tokens[row][valid[row]].tolist(), logprobs[row][valid[row]].tolist()
        stopped = ids[-1] in stop_ids
        end = len(ids) - stopped
        results.append(Generation(ids[:end], row_logprobs[:end], "stop" if stopped else "length"))
    return results
