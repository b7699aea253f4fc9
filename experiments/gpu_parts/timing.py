"""Timing of programs, and the compiler's plan of their memory."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from gpu_parts.run import Row


def seconds(program: Callable[[], Any], repetitions: int, calls: int = 1) -> list[float]:
    """Seconds per call of each repetition. `calls` are queued at once, which hides the cost of launching them."""
    jax.block_until_ready(program())
    times = []
    for _ in range(repetitions):
        start = time.perf_counter()
        for _ in range(calls):
            result = program()
        jax.block_until_ready(result)
        times.append((time.perf_counter() - start) / calls)
    return times


def spread(times: list[float]) -> float:
    return (max(times) - min(times)) / statistics.median(times)


def matrix_rate(n: int, repetitions: int) -> float:
    """TFLOP/s of a square bfloat16 product."""
    a, b = (jax.random.normal(jax.random.key(i), (n, n), jnp.bfloat16) for i in range(2))
    product = jax.jit(lambda a, b: jnp.matmul(a, b, preferred_element_type=jnp.float32))
    return 2 * n**3 / statistics.median(seconds(lambda: product(a, b), repetitions, calls=10)) / 1e12


def temporary_memory(compiled: Any) -> Row:
    """Megabytes that the program needs in addition to arguments and results, for example copies of weights or cache."""
    analysis = compiled.memory_analysis()
    return {} if analysis is None else {"temp_mb": analysis.temp_size_in_bytes / 1e6}
