"""Generation: a compiled prefill, then compiled chunks of a scan-based decode loop, for a ragged batch of prompts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from jax.sharding import NamedSharding

from llama_jax.config import LlamaConfig
from llama_jax.inference.checks import check_max_chunks, token_ids
from llama_jax.inference.compiled_decode import MAX_CHUNKS_PER_CALL, Run
from llama_jax.inference.decode import TokenChunk
from llama_jax.inference.drafter import Counts, Drafter, with_counts
from llama_jax.inference.prepare_inputs import prepare_inputs
from llama_jax.inference.sampling import Sampling
from llama_jax.inference.sharding import check_rows, sharding_of
from llama_jax.model.cache import CacheOptions
from llama_jax.model.forward_options import Compute, Sharding
from llama_jax.model.params import Llama
from llama_jax.ops.platform import nondefault_device


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

    With 16-bit or quantized weights a near tie may resolve differently: XLA sums in another order for other shapes, and CPU
    kernels for block-quantized weights round activations to 8 bits. With LongRoPE, rows that exceed the original context
    wait for the others there and are prefilled again with the long factors, as in transformers.

    Args:
      config, params: the model. If the parameters are sharded over a mesh (`load(..., mesh=...)`), generation runs on it.
      prompts: one sequence of token ids per row, of any lengths, as `tokenizer.encode` gives them (it puts the
        begin-of-sequence token before them).
      max_new_tokens: maximum number of tokens to generate, one for all rows or one per row.
      sampling: greedy by default; each field is one value or one per row.
      stop_tokens: ids that end a row, such as `tokenizer.stop_ids`; with none, a row ends at `max_new_tokens`.
      cache: options of the KV cache: int8, or a sliding window, which lets a row become longer than the model's context.
      compute: your own attention, or a dtype; by default the parameters'.
      draft: for speculative decoding, a `PromptLookup` or a `DraftModel`: several drafted tokens are verified in one pass.
        It changes the speed but, except for near ties, not the tokens.

    Returns:
      One `Generation` per prompt: tokens, logprobs and why it ended.

    Raises:
      GenerationError: an empty prompt, an id outside the vocabulary, a length beyond the model's context, an invalid
        sampling value, or logits that are NaN.
      ConfigError: parameters that do not match the configuration; a model trained with a custom attention that is missing.
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
    params: Llama,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int | Sequence[int],
    sampling: Sampling = Sampling(),
    stop_tokens: Sequence[int] = (),
    cache: CacheOptions = CacheOptions(),
    compute: Compute = Compute(),
    draft: Drafter | None = None,
    max_chunks: int = 1,
) -> Iterator[TokenChunk]:
    """Yield the tokens of every row as they come, as `TokenChunk`: the first alone, then up to 4 * min(`max_chunks`, 64).

    Arguments and errors as for `generate`. Invalid arguments raise in the call itself; NaN logits raise GenerationError, and
    parameters that do not match the configuration ConfigError, during iteration. A stop token is yielded as the last valid
    one of its row.
    """
    check_max_chunks(max_chunks)
    tokens, lengths, request = prepare_inputs(config, prompts, max_new_tokens, sampling, stop_tokens, cache)
    sharding, table = Sharding(), params.embedding
    if isinstance(getattr(table, "sharding", None), NamedSharding) or nondefault_device(table) is not None:
        sharding = sharding_of(params)  # generation runs on the devices of the parameters
        check_rows(sharding, len(prompts))
    run = Run(config, params, compute, sharding)
    if draft is not None:
        from llama_jax.inference.speculation.speculative_decode import stream_drafted

        return stream_drafted(run, draft, (tokens, lengths, request), cache, int(max_chunks))
    return run.stream(tokens, lengths, request, cache, int(max_chunks))


def to_generations(chunks: Sequence[TokenChunk], stop_tokens: Sequence[int]) -> list[Generation]:
    """One `Generation` per row, from all chunks."""
    tokens, logprobs, valid = (
        np.concatenate([getattr(chunk, name) for chunk in chunks], axis=1) for name in ("tokens", "logprobs", "valid")
    )
    stop = set(token_ids("stop_tokens", stop_tokens).tolist())
    results = []
    for row in range(len(tokens)):
        ids, scores = tokens[row][valid[row]].tolist(), logprobs[row][valid[row]].tolist()
        stopped = ids[-1] in stop
        end = len(ids) - stopped
        results.append(Generation(ids[:end], scores[:end], "stop" if stopped else "length"))
    return results
