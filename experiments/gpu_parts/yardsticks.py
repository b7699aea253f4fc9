"""The device's limits: copy and read bandwidth, and bfloat16 matrix rate."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp

from gpu_parts.run import Row, Run
from gpu_parts.timing import matrix_rate, seconds


def yardsticks(run: Run) -> Iterator[Row]:
    """Measure the device's limits with the simplest programs; all shares in other sections are relative to these."""
    repetitions = run.plan.repetitions
    increment, total = jax.jit(lambda x: x + 1), jax.jit(jnp.sum)

    def bandwidth(program: Callable, size: int, passes: int) -> float:
        x = jnp.zeros(size // 4, jnp.float32)
        return passes * size / statistics.median(seconds(lambda: program(x), repetitions, calls=10)) / 1e9

    # The best of two sizes, because neither is best on every device.
    sizes = (run.plan.copy_bytes // 4, run.plan.copy_bytes)
    yield run.attempt(
        {"name": "copy", "unit": "GB/s"}, lambda: {"value": max(bandwidth(increment, size, 2) for size in sizes)}
    )
    yield run.attempt({"name": "read", "unit": "GB/s"}, lambda: {"value": max(bandwidth(total, size, 1) for size in sizes)})
    yield run.attempt(
        {"name": "matrix bf16", "unit": "TFLOP/s"}, lambda: {"value": matrix_rate(run.plan.matrix_size, repetitions)}
    )
