"""Every attention backend of the device, from short to long: time, memory, and the difference from the reference."""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from gpu_parts.plan import Heads
from gpu_parts.run import Row, Run, memory_limit, number
from gpu_parts.timing import seconds, spread, temporary_memory
from llama_jax import ops
from llama_jax.errors import ConfigError
from llama_jax.ops.attention import AttentionMask, KVView

BACKENDS = ("cudnn", "splash", "blockwise", "dense", "reference")
PASSES = ("forward", "forward and backward")
ATTENTION_TOLERANCE = 0.03  # relative to the largest number: bfloat16 rounds queries, weights and results to 8 bits
MEASURED_SECONDS = 0.05  # of all calls of a repetition, so that launching them is not measured


def attention(run: Run) -> Iterator[Row]:
    """Measure every backend at every length: the attention of one layer, for one row."""
    ended: set[tuple[str, str]] = set()  # did not fit; longer ones are skipped
    refused: set[str] = set()
    for tokens in run.plan.heads.lengths:
        for backend in BACKENDS:
            for direction in PASSES:
                if backend in refused:
                    continue
                row = {"backend": backend, "tokens": tokens, "pass": direction}
                if (backend, direction) in ended:
                    yield row | {"skipped": "less did not fit"}
                    continue
                row = run.attempt(
                    row,
                    lambda backend=backend, tokens=tokens, direction=direction: measure_attention(
                        run, backend, tokens, direction
                    ),
                )
                if "RESOURCE_EXHAUSTED" in row.get("error", ""):
                    row["does_not_fit"] = row.pop("error")
                if "does_not_fit" in row:
                    ended.add((backend, direction))
                if "refused" in row:
                    refused.add(backend)
                    row = {"backend": backend, "refused": row["refused"]}
                yield row


def measure_attention(run: Run, backend: str, tokens: int, direction: str) -> Row:
    """Time, memory and share of the matrix rate; at the shortest length also the difference from the reference."""
    heads = run.plan.heads
    shapes = attention_shapes(heads, tokens)[: 3 if direction == PASSES[0] else 4]
    arguments = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes]
    program = jax.jit(functools.partial(attend, backend, heads.width))
    try:
        lowered = program.lower(*arguments)
    except ConfigError as error:
        return {"refused": str(error)}
    start = time.perf_counter()
    compiled = lowered.compile()
    known = {"compile_s": time.perf_counter() - start, **temporary_memory(compiled)}
    plan, limit = compiled.memory_analysis(), memory_limit(run.device)
    if plan is not None and limit is not None:
        planned = plan.argument_size_in_bytes + plan.output_size_in_bytes + plan.temp_size_in_bytes
        if planned > limit:
            return known | {"does_not_fit": f"the plan is {planned / 1e9:.1f} GB, the device gives {limit / 1e9:.1f}"}
    arrays = attention_arrays(arguments)
    jax.block_until_ready(compiled(*arrays))
    once = max(seconds(lambda: compiled(*arrays), 1)[0], 1e-6)
    calls = int(np.clip(MEASURED_SECONDS / once, 1, 50))
    times = seconds(lambda: compiled(*arrays), run.plan.repetitions, calls)
    taken, flop = statistics.median(times), attention_flop(heads, tokens, direction)
    rate = run.found("yardsticks", "value", name="matrix bf16")
    row = {
        "ms": 1e3 * taken,
        "attention_tflop": flop / 1e12,
        **({} if rate is None else {"share_of_matrix": flop / taken / 1e12 / rate}),
        "spread": spread(times),
        **known,
    }
    if tokens != heads.lengths[0]:
        return row
    return row | against_reference(compiled(*arrays), arrays, heads.width)


def attend(
    backend: str, width: int, queries: jax.Array, keys: jax.Array, values: jax.Array, of_mixed: jax.Array | None = None
) -> Any:
    """The result of attention and, if its gradient `of_mixed` is given, the gradients of its arguments."""

    def program(queries: jax.Array, keys: jax.Array, values: jax.Array) -> jax.Array:
        whole = AttentionMask.causal(keys.shape[2])
        return ops.attend(queries, KVView(keys, values), whole, scale=width**-0.5, backend=backend)

    if of_mixed is None:
        return program(queries, keys, values)
    mixed, backward = jax.vjp(program, queries, keys, values)
    return mixed, *backward(of_mixed)


def attention_shapes(heads: Heads, tokens: int) -> tuple[tuple[int, ...], ...]:
    """The shapes of queries, keys, values, and the gradient of the result."""
    rows = (heads.batch, heads.keys, tokens)
    of_queries = (*rows, heads.queries // heads.keys, heads.width)
    return of_queries, (*rows, heads.width), (*rows, heads.width), of_queries


def attention_arrays(arguments: list[jax.ShapeDtypeStruct]) -> list[jax.Array]:
    """Arrays of noise: with zeros a chip draws less power and may clock higher."""
    noise = jax.jit(lambda key, like: jax.random.normal(key, like.shape, like.dtype), static_argnums=1)
    return [noise(jax.random.key(i), argument) for i, argument in enumerate(arguments)]


def attention_flop(heads: Heads, tokens: int, direction: str) -> float:
    forward = 2 * heads.queries * heads.width * heads.batch * tokens**2
    return forward * (1.0 if direction == PASSES[0] else 3.5)


def against_reference(got: Any, arrays: list[jax.Array], width: int) -> Row:
    """The difference of results from the float32 reference, relative to the largest number of each."""
    wide = [array.astype(jnp.float32) for array in arrays]
    with jax.default_matmul_precision("highest"):
        expected = jax.jit(functools.partial(attend, "reference", width))(*wide)
    apart = [
        float(jnp.max(jnp.abs(a.astype(jnp.float32) - b)) / jnp.max(jnp.abs(b)))
        for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True)
    ]
    return {"ok": max(apart) <= ATTENTION_TOLERANCE, "max_diff": number(max(apart))}  # nan is not within any tolerance
