"""Tokens/s and operations of the library's prefill."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np

import llama_jax
from gpu_parts.run import Row, Run
from gpu_parts.timing import spread, temporary_memory
from gpu_parts.weights import Weights, for_every_case
from llama_jax.inference import compiled_decode as library


def prefill(run: Run) -> Iterator[Row]:
    cases = [{"batch": batch, "tokens": tokens} for batch, tokens in run.plan.prefills]
    for shape, config in run.plan.shapes.items():
        yield from for_every_case(run, {"shape": shape}, Weights(config), cases, measure_prefill)


def measure_prefill(run: Run, config: llama_jax.LlamaConfig, params: llama_jax.LlamaParams, batch: int, tokens: int) -> Row:
    """Time the library's prefill of a prompt into an empty cache."""
    reading = library._init_prefill(config, params, batch, tokens)
    ids = jnp.asarray(np.random.default_rng(0).integers(0, config.vocab_size, (batch, tokens), dtype=np.int32))
    lengths = jnp.full(batch, tokens, jnp.int32)
    positions = llama_jax.Positions(lengths, rope_lengths=lengths)
    lowered = library._prefill.lower(config, params, reading, ids, positions)
    start = time.perf_counter()
    compiled = lowered.compile()
    compile_seconds = time.perf_counter() - start

    times = []
    for _ in range(run.plan.repetitions + 1):
        empty = reading.cache.replace(length=jnp.zeros(batch, jnp.int32))
        reading = jax.block_until_ready(reading._replace(cache=empty))
        start = time.perf_counter()
        reading = jax.block_until_ready(compiled(params, reading, ids, positions))
        times.append(time.perf_counter() - start)
    times = times[1:]

    taken, flop = statistics.median(times), prefill_flop(config, batch, tokens)
    rate = run.found("yardsticks", "value", name="matrix bf16")
    return {
        "ms": 1e3 * taken,
        "tokens_per_s": batch * tokens / taken,
        "tflop": flop / 1e12,
        **({} if rate is None else {"share_of_matrix": flop / taken / 1e12 / rate}),
        "spread": spread(times),
        "compile_s": compile_seconds,
        **temporary_memory(compiled),
    }


def prefill_flop(config: llama_jax.LlamaConfig, batch: int, tokens: int) -> int:
    tables = (1 if config.tie_embeddings else 2) * config.vocab_size * config.dim
    layers = llama_jax.parameter_count(config) - tables
    attention = 2 * config.n_layers * config.n_heads * config.head_dim * batch * tokens**2
    return 2 * layers * batch * tokens + attention
