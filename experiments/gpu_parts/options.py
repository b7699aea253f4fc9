"""Decoding compiled with XLA options that may matter on a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from gpu_parts.decode import measure_decode
from gpu_parts.run import Row, Run
from gpu_parts.weights import Weights

# By name in XLA's debug options. A list replaces the default one; "+WHILE" works only in XLA_FLAGS.
COMMAND_BUFFER = "FUSION,CUBLAS,CUBLASLT,CUDNN,CUSTOM_CALL,DYNAMIC_SLICE_FUSION,CONDITIONAL"
COMPILER_OPTIONS: tuple[dict[str, Any], ...] = (
    {},
    {"xla_gpu_enable_command_buffer": f"{COMMAND_BUFFER},WHILE"},
    {"xla_gpu_enable_command_buffer": f"{COMMAND_BUFFER},WHILE", "xla_gpu_command_buffer_unroll_loops": True},
    {"xla_gpu_enable_command_buffer": ""},
    {"xla_gpu_graph_min_graph_size": 1},
    {"xla_gpu_enable_triton_gemm": False},
    {"xla_gpu_enable_dynamic_slice_fusion": True},
    {"xla_gpu_enable_command_buffer": "+WHILE"},
)


def compiler_options(run: Run) -> Iterator[Row]:
    """Decode with batch 1, compiled with other options. They differ between versions, so a rejection is a result, too."""
    if run.device.platform != "gpu":
        yield {"skipped": "only on a GPU"}
        return
    config = run.plan.shapes[run.plan.options_shape]
    weights = Weights(config)
    for options in COMPILER_OPTIONS:
        row = {"shape": run.plan.options_shape, "batch": 1, "options": " ".join(f"{k}={v}" for k, v in options.items())}
        measure = lambda options=options: measure_decode(run, config, weights.made(), 1, compiler_options=options)
        row = run.attempt(row, measure)
        if options and "INVALID_ARGUMENT" in row.get("error", ""):
            row["refused"] = row.pop("error")
        yield row
