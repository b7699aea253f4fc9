"""Greedy tokens/s of the library's decode loop, in bfloat16 and with quantized weights."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import llama_jax
from gpu_parts.plan import Plan
from gpu_parts.run import Row, Run
from gpu_parts.timing import spread, temporary_memory
from gpu_parts.weights import Weights, for_every_case
from llama_jax.inference import compiled_decode as library
from llama_jax.inference.decode import STEPS_PER_CHUNK, DecodeSettings, DecodeState
from llama_jax.model.trees import bytes_in_memory


def decode(run: Run) -> Iterator[Row]:
    """The shapes and weights of the plan, at every batch."""
    for shape, weights in run.plan.decodes:
        yield from decode_with(run, shape, weights, run.plan.decode_batches)


def formats(run: Run) -> Iterator[Row]:
    """One row with the other formats."""
    for weights in run.plan.formats:
        if (run.plan.quantized_shape, weights) not in run.plan.decodes:
            yield from decode_with(run, run.plan.quantized_shape, weights, (1,))


def decode_with(run: Run, shape: str, weights: str, batches: tuple[int, ...]) -> Iterator[Row]:
    """A row per batch; the weights are made at the first measurement."""
    made, cases = Weights(run.plan.shapes[shape], weights), [{"batch": batch} for batch in batches]
    yield from for_every_case(run, {"shape": shape, "weights": weights}, made, cases, measure_decode)


def measure_decode(
    run: Run,
    config: llama_jax.LlamaConfig,
    params: llama_jax.LlamaParams,
    batch: int,
    compiler_options: dict[str, Any] | None = None,
) -> Row:
    """Time `new_tokens` steps of the library's decode loop."""
    plan = run.plan
    state = decode_state(plan, config, params, batch)
    most = plan.new_tokens // STEPS_PER_CHUNK
    lowered = library._decode_for(jax.default_backend()).lower(config, params, state, np.int32(most), most)
    start = time.perf_counter()
    compiled = lowered.compile(compiler_options=compiler_options or {})
    compile_seconds = time.perf_counter() - start

    times = []
    for _ in range(plan.repetitions + 1):
        jax.block_until_ready(state)
        start = time.perf_counter()
        state, packed = jax.block_until_ready(compiled(params, state, np.int32(most)))
        times.append((time.perf_counter() - start) / plan.new_tokens)
        _, _, taken = library.unpack_chunk(packed)
        assert taken == most, "the decode loop ended early"
        state = state.replace(cache=state.cache.replace(length=jnp.full(batch, plan.prompt_tokens, jnp.int32)))
    times = times[1:]  # the first loads the program

    step, read = statistics.median(times), step_bytes(config, params, batch, mean_length(plan))
    copy = run.found("yardsticks", "value", name="copy")
    return {
        "ms_per_step": 1e3 * step,
        "tokens_per_s": batch / step,
        "gb_per_step": read / 1e9,
        **({} if copy is None else {"share_of_copy": read / step / 1e9 / copy}),
        "spread": spread(times),
        "compile_s": compile_seconds,
        **temporary_memory(compiled),
    }


def decode_state(plan: Plan, config: llama_jax.LlamaConfig, params: llama_jax.LlamaParams, batch: int) -> DecodeState:
    """The state of `generate` after a prompt, without compiling a prefill: the speed does not depend on the values.

    The cache holds noise, because with zeros a chip draws less power and may clock higher.
    """
    cache = llama_jax.init_cache(config, batch, plan.capacity, params.embedding.dtype)
    pages = jax.jit(lambda key, like: jax.random.normal(key, like.shape, like.dtype))(jax.random.key(0), cache.pages)
    limit = np.full(batch, 1 << 30, np.int32)  # never reached: every repetition does the same work
    return DecodeState(
        cache=cache.replace(pages=pages, length=jnp.full(batch, plan.prompt_tokens, jnp.int32)),
        settings=DecodeSettings(None, limit, np.full((batch, 4), -1, np.int32)),
        token=jnp.ones(batch, jnp.int32),
        seen=jnp.zeros((batch, config.vocab_size), bool),
        count=jnp.ones(batch, jnp.int32),
        done=jnp.zeros(batch, bool),
    )


def mean_length(plan: Plan) -> int:
    """Tokens in a row of the cache, on average over the measured steps: those that attention has to read."""
    return plan.prompt_tokens + plan.new_tokens // 2


def step_bytes(config: llama_jax.LlamaConfig, params: llama_jax.LlamaParams, batch: int, length: int) -> int:
    """Bytes that a decode step has to read: parameters, or their shapes, and `length` tokens per row of a bfloat16 cache."""
    lookup_only = 0 if params.lm_head is None else bytes_in_memory(params.embedding)
    return bytes_in_memory(params) - lookup_only + llama_jax.cache_bytes(config, batch, length, jnp.bfloat16)
