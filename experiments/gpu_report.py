"""Correctness and speed on this machine's accelerator, as one JSON file and one table, in under 8 minutes.

    python experiments/gpu_report.py                                  (PYTHONPATH=. if the package is not installed)
    python experiments/gpu_report.py --sections yardsticks decode --shapes llama-3-8b

Sections, in order of importance, because the time limit cuts from the end:
  training          the library's train step in bfloat16 with AdamW, by remat policy and batch; one process per shape; runs
                    first, because it needs nearly all of the device's memory
  yardsticks        what the device itself can do: copy and read bandwidth, bfloat16 matrix rate
  correctness       a small model compared with the CPU in float32 and bfloat16; generation compared with `logits`
  decode            greedy tokens/s of the library's compiled decode loop, random bfloat16 weights made on the device
  prefill           tokens/s of the library's compiled prefill
  serving           whether other requests change a request's tokens; tokens/s of the engine for requests that arrive at once
  quantized         every format: logits compared with dequantized weights; tokens/s of decoding
  programs          the single-device programs of compile_report: the compiler's plan, with and without the device, and
                    measurements next to it
  attention         every backend of the device, forward and backward, from short to long; the shortest is compared with the
                    reference in float32
  transformers      its decode with a static cache, compiled to CUDA graphs on a GPU; one process per shape
  compiler_options  decode compiled with XLA options that may matter on a GPU
  families          logits, greedy tokens and a training step of a small model of every family, compared with float64 on the
                    CPU: the rows of `docs/support.md`. It takes some minutes; run it by itself, into a separate file
                    (--sections families --device-json gpu_report_families_NAME.json)

With other sections, training has at most TRAINING_SHARE of the time, divided among its shapes. Each shape measures as many
candidates as fit, those with the least memory first. With only `--sections training` it has all of the time. Attention has
ATTENTION_SHARE in the same way, the shortest first. Otherwise sections are cut in the order families, compiler_options,
transformers, attention, programs, prefill, decode.

A section is a file of `gpu_parts`, with a function that takes the `Run` and yields rows as plain dicts; add new sections to
SECTIONS. Without an accelerator the same code runs small shapes, so that it is always tested; they fit into the CPU's
caches, so that their shares are meaningless. The JSON is rewritten after every row, so that a killed run keeps its results.
The exit code is 1 if anything failed, and 0 if measurements were only skipped.
"""

from __future__ import annotations

import datetime
import json
import os
import platform
import re
import sys
import time
from dataclasses import dataclass
from pathlib import Path

# Read when JAX's backend starts. Otherwise JAX would reserve most of the GPU's memory and leave too little for torch in its
# own process.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import jax
from gpu_parts.attention import attention
from gpu_parts.correctness import correctness
from gpu_parts.decode import decode
from gpu_parts.families import families
from gpu_parts.options import compiler_options
from gpu_parts.peer import WORKER, transformers
from gpu_parts.peer_one import transformers_worker
from gpu_parts.plan import GOAL_SHAPE, LARGE, SMALL
from gpu_parts.prefill import prefill
from gpu_parts.programs import programs
from gpu_parts.quantized import quantized
from gpu_parts.run import Row, Run, Section, describe, memory_limit
from gpu_parts.serving import serving
from gpu_parts.table import table
from gpu_parts.training import TRAINING_WORKER, best_training, training
from gpu_parts.training_one import training_worker
from gpu_parts.yardsticks import yardsticks
from measuring import versions, write_report

import llama_jax
from llama_jax.training import flops

GOAL_SHARE = 0.85  # of the copy bandwidth
TRAINING_GOAL = 0.5  # of the published peak
FORMULAS = {
    "copy": "2 * bytes / seconds of `x + 1`: every byte is read once and written once",
    "read": "bytes / seconds of `sum(x)`",
    "matrix": "2 * n**3 / seconds of a bfloat16 product with a float32 result",
    "gb_per_step": "weights (the embedding table only where it is also the head) and the tokens in the cache",
    "share_of_copy": "gb_per_step / seconds per step / copy bandwidth",
    "tflop": "2 * layer parameters * tokens + 2 * L * N * H * B * T**2 for the causal half of attention; no head",
    "share_of_matrix": "tflop / seconds / matrix rate",
    "attention_tflop": "2 * N * H * B * T**2 forward: two products, of which causality needs half; 3.5 times that with"
    " backward, which has five, the scores again among them (Dao 2023, section 4.1)",
    "tflop_per_step": flops.FORMULA,
    "mfu": "tflop_per_step / seconds per step / the device's published dense bfloat16 rate (llama_jax/analysis/hardware.py)",
    "mfu_of_matrix": "tflop_per_step / seconds per step / matrix_tflops, measured as `matrix` in the same process",
    "plan_gb": "XLA's plan of the step: arguments, results that are not updated in place, and temporaries",
    "peak_gb": "the allocator's peak of the process, where this candidate raised it",
    "spread": "(slowest - fastest) / median of the repetitions",
}
SECTIONS: dict[str, Section] = {
    "training": training,
    "yardsticks": yardsticks,
    "correctness": correctness,
    "decode": decode,
    "prefill": prefill,
    "serving": serving,
    "quantized": quantized,
    "programs": programs,
    "attention": attention,
    "transformers": transformers,
    "compiler_options": compiler_options,
    "families": families,
}


@dataclass(frozen=True)
class Arguments:
    """Check and measure llama_jax on the default device."""

    sections: tuple[str, ...] = ()
    """Sections to run, in this order; all by default. The file contains only these."""
    shapes: tuple[str, ...] = ()
    """Model shapes to measure, in sections that have shapes; all by default."""
    time_limit: float = 460.0
    """Time limit in seconds; a measurement that might not end in time is not started."""
    output_folder: Path = Path("experiments/results")
    device_json: str = ""
    """File name in the output folder; by default gpu_report_<device kind>.json."""


def main(arguments: Arguments) -> int:
    """Run the sections, write the JSON, print the tables; return the exit code."""
    device = jax.devices()[0]
    plan = SMALL if device.platform == "cpu" else LARGE
    for what, given, known in (("section", arguments.sections, SECTIONS), ("shape", arguments.shapes, plan.shapes)):
        if unknown := [name for name in given if name not in known]:
            print(f"unknown {what} {unknown[0]!r}; the {what}s are {', '.join(known)}", file=sys.stderr)
            return 2
    sections, plan = arguments.sections or tuple(SECTIONS), plan.limited_to(arguments.shapes)
    run = Run(device, plan, arguments.time_limit, alone=len(sections) == 1)
    name = arguments.device_json or f"gpu_report_{re.sub(r'[^0-9A-Za-z]', '_', device.device_kind)}.json"
    path = arguments.output_folder / name
    settings = {key: value for key, value in vars(run.plan).items() if isinstance(value, int)}
    report = {
        "device": describe_device(device),
        "versions": versions("jax", "jaxlib", "flax", "numpy", "torch", "transformers")
        | {"llama_jax": llama_jax.__version__},
        "settings": settings | {"time_limit": arguments.time_limit},
        "formulas": FORMULAS,
        "sections": run.results,
    }
    print(f"{device.device_kind} ({device.platform}), jax {jax.__version__}")

    for section in sections:
        rows = run.results[section] = []
        start = time.monotonic()
        try:
            for row in SECTIONS[section](run):
                rows.append(row)
                write_report(path, report)
        except Exception as error:
            rows.append({"error": describe(error)})
        print(f"\n{section} ({time.monotonic() - start:.0f} s)\n{table(rows)}", flush=True)
        write_report(path, report)

    report |= goals(run)
    failures = [row for rows in run.results.values() for row in rows if "error" in row or row.get("ok") is False]
    report |= {"seconds": time.monotonic() - run.start, "failures": len(failures)}
    write_report(path, report)
    print(f"\n{len(failures)} failures; {report['seconds']:.0f} s; written to {path}")
    return 1 if failures else 0


def goals(run: Run) -> Row:
    """Print and return the goals for decoding and training, with the measured results, if any."""
    found: Row = {}
    share = run.found("decode", "share_of_copy", shape=GOAL_SHAPE, batch=1)
    if share is not None:
        found["goal"] = {"shape": GOAL_SHAPE, "batch": 1, "share_of_copy": share, "goal": GOAL_SHARE}
        reached = "reached" if share >= GOAL_SHARE else "missed"
        print(f"\ngoal {reached}: {GOAL_SHAPE} with batch 1 runs at {share:.1%} of copy bandwidth, {GOAL_SHARE:.0%} wanted")
    for case in run.plan.trainings:
        best = best_training(run.results.get("training", []), case)
        if best is not None:
            found.setdefault("training_goals", []).append(best | {"goal": TRAINING_GOAL})
            reached = "reached" if best["mfu"] >= TRAINING_GOAL else "missed"
            chosen = f"{case.parameters}, remat {best['remat']}, {best['batch']} rows"
            print(f"goal {reached}: {case.shape} ({chosen}) trains at {best['mfu']:.1%} MFU, {TRAINING_GOAL:.0%} wanted")
    return found


def describe_device(device: jax.Device) -> Row:
    return {
        "kind": device.device_kind,
        "platform": device.platform,
        "platform_version": device.client.platform_version,
        "count": jax.device_count(),
        "memory_limit_bytes": memory_limit(device),
        "xla_flags": os.environ.get("XLA_FLAGS", ""),
        "host": platform.platform(),
        "cores": os.cpu_count(),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }


def command_line() -> Arguments:
    """Parse the arguments; without tyro, the whole report can still be made."""
    try:
        import tyro
    except ImportError:
        if len(sys.argv) > 1:
            sys.exit("options need tyro: pip install tyro")
        return Arguments()
    return tyro.cli(Arguments, description=__doc__)


if __name__ == "__main__":
    if sys.argv[1:2] == [WORKER]:
        print(json.dumps(transformers_worker(**json.loads(sys.argv[2]))))
    elif sys.argv[1:2] == [TRAINING_WORKER]:
        for row in training_worker(**json.loads(sys.argv[2])):
            print(json.dumps(row), flush=True)
    else:
        sys.exit(main(command_line()))
