"""Candidates of the train step."""

from __future__ import annotations

import functools
import gc
import math
import statistics
import time
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import llama_jax
from gpu_parts.plan import Training
from gpu_parts.run import Row, Run, memory_limit, number
from gpu_parts.timing import matrix_rate, spread
from llama_jax.analysis.hardware import find_hardware
from llama_jax.training import flops


def training(run: Run) -> Iterator[Row]:
    """Measure every candidate of every shape."""
    rate = functools.cache(lambda: matrix_rate(run.plan.matrix_size, run.plan.repetitions))
    for case in run.plan.trainings:
        config, fits = run.plan.shapes[case.shape], True
        for remat, batch, unroll in case.candidates:
            row = {"shape": case.shape, "parameters": case.parameters, "length": case.length, "remat": remat, "batch": batch}
            row["unroll"] = unroll
            if not fits:
                yield row | {"skipped": "less did not fit"}
                continue
            gc.collect()  # the arrays of a failed candidate may be in a cycle with its traceback
            measure = functools.partial(measure_training, config, case, remat, batch, unroll, run.plan.repetitions)
            row = run.attempt(row, lambda measure=measure: measure(rate()))
            if "RESOURCE_EXHAUSTED" in row.get("error", ""):
                row["does_not_fit"] = row.pop("error")
            fits = "does_not_fit" not in row
            yield row


def measure_training(
    config: llama_jax.LlamaConfig, case: Training, remat: str, batch: int, unroll: bool, repetitions: int, rate: float
) -> Row:
    """Time consecutive steps of the library's train step, as in a run; `rate` is that of a matmul."""
    device, length, parameters = jax.devices()[0], case.length, case.parameters
    peak_before = (device.memory_stats() or {}).get("peak_bytes_in_use", 0)
    settings = llama_jax.OptimizerSettings(learning_rate=1e-4, schedule="constant", clip_norm=0.0)
    optimizer = llama_jax.make_optimizer(settings, 1000)
    options = llama_jax.StepOptions(llama_jax.LossOptions(llama_jax.ComputeOptions(jnp.bfloat16, remat, unroll=unroll)))

    def make() -> Any:
        params = llama_jax.init(config, jax.random.key(0), jnp.dtype(parameters))
        return llama_jax.init_state(optimizer, params, dtype=parameters)

    # Compiled before the state exists, because the compiler's autotuning needs memory as well.
    step = jax.jit(functools.partial(llama_jax.train_step, config, optimizer, options=options), donate_argnums=0)
    tokens = llama_jax.Batch(np.random.default_rng(0).integers(0, config.vocab_size, (batch, length + 1), dtype=np.int32))
    lowered = step.lower(jax.eval_shape(make), tokens)
    start = time.perf_counter()
    compiled = lowered.compile()
    compile_seconds = time.perf_counter() - start
    plan = compiled.memory_analysis()
    planned = 0
    if plan is not None:
        planned = (
            plan.argument_size_in_bytes + plan.output_size_in_bytes - plan.alias_size_in_bytes + plan.temp_size_in_bytes
        )
    known = {"compile_s": compile_seconds, "plan_gb": planned / 1e9}
    limit = memory_limit(device)
    if limit is not None and planned > limit:
        return known | {"does_not_fit": f"the plan is {planned / 1e9:.1f} GB, the device gives {limit / 1e9:.1f}"}

    state = jax.block_until_ready(jax.jit(make)())
    times = []
    for _ in range(repetitions + 1):
        start = time.perf_counter()
        state, metrics = jax.block_until_ready(compiled(state, tokens))
        times.append(time.perf_counter() - start)
    times = times[1:]

    taken, needed = statistics.median(times), flops.step_flops(config, batch, length)
    hardware = find_hardware(device.device_kind)
    peak = (device.memory_stats() or {}).get("peak_bytes_in_use", 0)
    loss = float(metrics["loss"])
    return {
        "ok": math.isfinite(loss),
        "ms_per_step": 1e3 * taken,
        "tokens_per_s": batch * length / taken,
        "tflop_per_step": needed / 1e12,
        "mfu": flops.flops_utilization(needed, taken, 1, hardware.flops if hardware else None),
        "mfu_of_matrix": needed / taken / 1e12 / rate,
        "matrix_tflops": rate,
        **known,
        **({"peak_gb": peak / 1e9} if peak > peak_before else {}),
        "loss": number(loss),
        "spread": spread(times),
    }


def best_training(rows: list[Row], case: Training) -> Row | None:
    """The row of the fastest candidate; None without a published peak to compare with."""
    measured = [row for row in rows if row.get("mfu") and (row["shape"], row["parameters"]) == (case.shape, case.parameters)]
    return max(measured, key=lambda row: row["mfu"], default=None)
