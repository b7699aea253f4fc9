"""The process of `training`: times the library's train step with each candidate."""

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
from gpu_parts.plan import SMALL
from gpu_parts.run import Row, Run, memory_limit, number
from gpu_parts.timing import matrix_rate, spread
from llama_jax.analysis.hardware import find_hardware
from llama_jax.formats.huggingface import config_from_dict
from llama_jax.training import flops


def training_worker(
    settings: dict[str, Any],
    row: Row,
    candidates: list[tuple[str, int]],
    repetitions: int,
    matrix_size: int,
    time_limit: float,
) -> Iterator[Row]:
    """Yield a row for every candidate."""
    config = config_from_dict(settings)
    run = Run(jax.devices()[0], SMALL, time_limit)
    rate = functools.cache(lambda: matrix_rate(matrix_size, repetitions))
    fits = True
    for remat, batch in candidates:
        case = row | {"remat": remat, "batch": batch}
        if not fits:
            yield case | {"skipped": "less did not fit"}
            continue
        gc.collect()  # the arrays of a failed candidate may be in a cycle with its traceback
        measure = functools.partial(measure_training, config, row["parameters"], row["length"], remat, batch, repetitions)
        case = run.attempt(case, lambda measure=measure: measure(rate()))
        if "RESOURCE_EXHAUSTED" in case.get("error", ""):
            case["does_not_fit"] = case.pop("error")
        fits = "does_not_fit" not in case
        yield case


def measure_training(
    config: llama_jax.LlamaConfig, parameters: str, length: int, remat: str, batch: int, repetitions: int, rate: float
) -> Row:
    """Time consecutive steps of the library's train step, as in a run; `rate` is that of a matmul."""
    device = jax.devices()[0]
    peak_before = (device.memory_stats() or {}).get("peak_bytes_in_use", 0)
    settings = llama_jax.OptimizerSettings(learning_rate=1e-4, schedule="constant", clip_norm=0.0)
    optimizer = llama_jax.make_optimizer(settings, 1000)
    options = llama_jax.StepOptions(llama_jax.LossOptions(llama_jax.Compute(jnp.bfloat16, remat)))

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
