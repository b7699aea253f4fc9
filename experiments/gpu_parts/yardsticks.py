"""The device's limits: copy and read bandwidth, bfloat16 matrix rate, clock and power."""

from __future__ import annotations

import shutil
import statistics
import subprocess
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp

from gpu_parts.run import Row, Run
from gpu_parts.timing import matrix_rate, seconds

NVIDIA_SMI = "nvidia-smi"
QUERIES = {
    "clock_mhz": "clocks.sm",
    "clock_limit_mhz": "clocks.max.sm",
    "power_w": "power.draw",
    "power_limit_w": "power.limit",
}


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
    x = jnp.zeros(run.plan.copy_bytes // 4, jnp.float32)
    a = jnp.ones((run.plan.matrix_size,) * 2, jnp.bfloat16)
    for what, program in (("copying", lambda: increment(x)), ("multiplying", jax.jit(lambda: a @ a))):
        yield run.attempt({"name": f"while {what}"}, lambda program=program: clock_and_power(program))


def clock_and_power(program: Callable[[], jax.Array]) -> Row:
    """What the driver reports while the program runs; skipped without NVIDIA's tool."""
    if shutil.which(NVIDIA_SMI) is None:
        return {"skipped": f"no {NVIDIA_SMI}"}
    command = [NVIDIA_SMI, f"--query-gpu={','.join(QUERIES.values())}", "--format=csv,noheader,nounits", "--id=0"]
    query = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    while query.poll() is None:
        jax.block_until_ready([program() for _ in range(10)])
    printed = query.communicate()[0]
    return dict(zip(QUERIES, map(float, printed.split(",")), strict=True))
