"""The single-device programs of compile_report: the compilers' predictions, and measurements.

The programs are compiled for the device and run with random weights. Next to the results are those of `compile_report`, from
the same compiler without a device.
"""

from __future__ import annotations

import functools
import gc
import json
import statistics
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import compile_report
import jax
import jax.numpy as jnp
import numpy as np
from measuring import RESULTS
from program_report import look_at

from gpu_parts.run import Row, Run
from llama_jax.analysis.aot_compile import COMPILABLE_HARDWARE
from llama_jax.analysis.hardware import BY_NAME, find_hardware
from llama_jax.analysis.memory import Program
from llama_jax.inference.decode import STEPS_PER_CHUNK
from llama_jax.ops.attention import record_backends
from llama_jax.parallel.mesh import MeshSizes, make_mesh

Case = compile_report.Case
ONE = "data=1"
SMALL = (
    Case("small-train", "train", "stories-260k", {"cpu": ONE}, 2, 32),
    Case("small-prefill", "prefill", "stories-260k", {"cpu": ONE}, 1, 64),
    Case("small-decode", "decode", "stories-260k", {"cpu": ONE}, 2, 64),
)


def programs(run: Run) -> Iterator[Row]:
    """Yield the compilers' predictions and the measurements of each program."""
    hardware = None if run.plan.small_programs else hardware_of(run.device)
    for case in cases_of(hardware):
        row = {"program": case.name, "batch": case.batch, "length": case.length}
        row |= find_prediction(case, hardware, RESULTS)
        gc.collect()
        row = run.attempt(row, lambda case=case: measure(case, run.device, run.plan.repetitions))
        if "RESOURCE_EXHAUSTED" in row.get("error", ""):
            row["does_not_fit"] = row.pop("error")
        yield row


def hardware_of(device: jax.Device) -> str | None:
    """The short name of a device if the report has its hardware, otherwise None."""
    hardware = find_hardware(device.device_kind)
    return next((name for name in COMPILABLE_HARDWARE if hardware is not None and BY_NAME[name] is hardware), None)


def cases_of(hardware: str | None) -> tuple[Case, ...]:
    """Single-device programs of the report for this hardware, or small ones for other hardware.

    Rollouts and the engine's programs, which `bench_serve` runs, are omitted.
    """
    if hardware is None:
        return SMALL
    cases = (case for case in compile_report.CASES if case.kind in ("train", "prefill", "decode"))
    return tuple(replace(case, hardware={hardware: ONE}) for case in cases if case.hardware.get(hardware) == ONE)


def find_prediction(case: Case, hardware: str | None, folder: Path) -> dict[str, Any]:
    """The report's entry for the program, compiled without the device; empty if there is none."""
    compiler = "tpu" if hardware is not None and hardware.startswith("tpu") else "gpu"
    path = folder / f"compile_report_{compiler}.json"
    rows = json.loads(path.read_text())["programs"] if path.exists() else []
    for row in rows:
        if (row["program"], row["hardware"], row.get("flags", "on")) == (case.name, hardware, "on"):
            return {f"table_{name}": value for name, value in _summary(row).items()}
    return {}


def measure(case: Case, device: jax.Device, repetitions: int) -> dict[str, Any]:
    """Compile the program for the device, run it, and return the plan and the measurements.

    Returns:
      plan_gb, temporaries_gb, read_over_least and kernels_a_layer: from the compiler on this device; ms: of a run, and of a
      token when decoding; read_gb_per_s: bytes that the compiled program reads per measured time; and peak_gb: the
      allocator's peak of the process, if this program raised it.
    """
    program = compile_report.program_of(case, make_mesh(MeshSizes(), [device]))
    started = time.perf_counter()
    with record_backends() as taken:
        compiled = program.compile(flags=False)  # the process has its flags already
    report = look_at(program, compiled, time.perf_counter() - started, taken)
    before = (device.memory_stats() or {}).get("peak_bytes_in_use", 0)
    arguments, times = filled(case, program, repetitions), []
    for _ in range(repetitions + 1):
        start = time.perf_counter()
        result = jax.block_until_ready(compiled(*arguments))
        times.append(time.perf_counter() - start)
        arguments = _next(case, arguments, result)
    times = times[1:]
    taken = statistics.median(times) / (STEPS_PER_CHUNK if case.kind == "decode" else 1)
    peak = (device.memory_stats() or {}).get("peak_bytes_in_use", 0)
    row = {"ms": 1e3 * taken, "spread": (max(times) - min(times)) / statistics.median(times)}
    if report.token is not None:
        row["read_gb_per_s"] = report.token.read / taken / 1e9
    raised = {"peak_gb": peak / 1e9} if peak > before else {}
    return (
        _summary(report.as_dict()) | row | raised | {"compile_s": report.seconds, "attention": "; ".join(report.attention)}
    )


def filled(case: Case, program: Program, repetitions: int) -> tuple[Any, ...]:
    """Arguments on the device: random weights and tokens, and a cache that is full after the last run."""
    first = program.arguments[0]
    weights = {id(leaf) for leaf in jax.tree.leaves(first.params if case.kind == "train" else first)}
    random = np.random.default_rng(0)

    def fill(leaf: Any, number: int) -> jax.Array:
        if id(leaf) in weights and jnp.issubdtype(leaf.dtype, jnp.floating):
            return jax.device_put(_weights(jax.random.key(number), leaf.shape, leaf.dtype), leaf.sharding)
        if case.kind != "decode" and leaf.ndim == 2 and leaf.dtype == jnp.int32:  # tokens that every vocabulary has
            return jax.device_put(random.integers(0, 32, leaf.shape, dtype=np.int32), leaf.sharding)
        return jnp.zeros(leaf.shape, leaf.dtype, device=leaf.sharding)

    leaves, tree = jax.tree.flatten(program.arguments)
    made = [fill(leaf, number) for number, leaf in enumerate(leaves)]
    arguments = jax.tree.unflatten(tree, made)
    if case.kind == "train":
        state, batch = arguments
        position_ids = np.broadcast_to(np.arange(case.length + 1, dtype=np.int32), batch.tokens.shape)
        ones = np.ones_like(position_ids)  # one document per row
        like = batch.tokens.sharding
        if batch.segment_ids is not None:
            batch = batch._replace(segment_ids=jax.device_put(ones, like), position_ids=jax.device_put(position_ids, like))
        return state, batch
    if case.kind == "prefill":
        params, reading, tokens, positions = arguments
        lengths = jax.device_put(np.full(case.batch, tokens.shape[1], np.int32), positions.lengths.sharding)
        return params, reading, tokens, positions._replace(lengths=lengths, rope_lengths=lengths)
    params, state, turns = arguments
    ahead = max(case.length - STEPS_PER_CHUNK * (repetitions + 2), 0)
    length = jax.device_put(np.full(case.batch, ahead, np.int32), state.cache.length.sharding)
    limit = jax.device_put(np.full(case.batch, 1 << 30, np.int32), state.settings.limit.sharding)
    stop = jax.device_put(np.full(state.settings.stop.shape, -1, np.int32), state.settings.stop.sharding)
    state = state.replace(cache=state.cache.replace(length=length), settings=state.settings.replace(limit=limit, stop=stop))
    return params, state, jax.device_put(np.int32(1), turns.sharding)


@functools.partial(jax.jit, static_argnums=(1, 2))  # compiled once for each shape
def _weights(key: jax.Array, shape: tuple[int, ...], dtype: Any) -> jax.Array:
    return 0.02 * jax.random.normal(key, shape, dtype)


def _next(case: Case, arguments: tuple[Any, ...], result: Any) -> tuple[Any, ...]:
    """The arguments of the next run: donated ones are replaced by results of the last run."""
    if case.kind == "train":
        return result[0], *arguments[1:]
    if case.kind == "prefill":
        length = jax.device_put(np.zeros(case.batch, np.int32), result.cache.length.sharding)
        return arguments[0], result._replace(cache=result.cache.replace(length=length)), *arguments[2:]
    return arguments[0], result[0], *arguments[2:]


def _summary(row: dict[str, Any]) -> dict[str, Any]:
    """The figures of a report's row that are compared with measurements."""
    if "bytes_per_device" not in row:
        return {"refused_there": row.get("refused", row.get("error", ""))}
    memory, token = row["bytes_per_device"], row["token"]
    summary = {"plan_gb": memory["total"] / 1e9, "temporaries_gb": (memory["temporaries"] + memory["gradients"]) / 1e9}
    if token:
        summary |= {"read_over_least": token["read_ratio"], "kernels_a_layer": token["kernels_per_layer"]}
    return summary
