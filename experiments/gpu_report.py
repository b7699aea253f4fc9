"""Correctness and speed on this machine's accelerator, as one JSON file and one table, in a quarter of an hour.

    python experiments/gpu_report.py                                  (PYTHONPATH=. if the package is not installed)
    python experiments/gpu_report.py --sections yardsticks decode --shapes llama-3-8b
    python experiments/gpu_report.py --bundle FOLDER                  for a machine that has only JAX, see below

Sections, in order of worth, because the time limit cuts from the end:
  yardsticks        what the device itself can do: copy and read bandwidth, bfloat16 matrix rate, its clock and power
  decode            greedy tokens/s of the library's compiled decode loop, with random weights made on the device: bfloat16
                    and the most used formats
  matmuls           one quantized product in several ways: the library's, by single weights, by chunks, by a dense matrix
  prefill           tokens/s of the library's compiled prefill
  training          the library's train step in bfloat16 with AdamW, by remat policy and batch
  serving           whether other requests change a request's tokens; tokens/s of the engine for requests that arrive at once
  correctness       a small model compared with the CPU in float32 and bfloat16; generation compared with `logits`; every
                    format compared with dequantized weights
  formats           decoding with the other formats
  programs          the single-device programs of compile_report: the compiler's plan, with and without the device, and
                    measurements next to it
  attention         every backend of the device, forward and backward, from short to long; the shortest is compared with the
                    reference in float32
  transformers      its decode with a static cache, compiled to CUDA graphs on a GPU; one process per shape
  compiler_options  decode compiled with XLA options that may matter on a GPU
  families          logits, greedy tokens and a training step of a small model of every family, compared with float64 on the
                    CPU: the rows of `docs/support.md`. It takes some minutes; run it by itself, into a separate file
                    (--sections families --device-json gpu_report_families_NAME.json)
  published         figures of other projects, for comparison

Each section has its own process, with all of the device's memory, and a crash affects only its rows. The JSON is rewritten
after every row. Run again, the report continues: it keeps rows of the same device, versions and source code, except those
that failed or were skipped. If there are several sections, training and attention have at most a share of the time left.

A section is a file of `gpu_parts`, with a function that takes the `Run` and yields rows as plain dicts; add new sections to
SECTIONS. Without an accelerator the same code runs small shapes, so that it is always tested; they fit into the CPU's
caches, so that their shares are meaningless. The exit code is 1 if anything failed, and 0 if measurements were only skipped.

--bundle copies the library, this script and the packages that they need besides those of JAX into one folder, for the same
operating system and any version of Python. There:

    PYTHONPATH=FOLDER python FOLDER/experiments/gpu_report.py
"""

from __future__ import annotations

import datetime
import hashlib
import json
import os
import platform
import re
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path

# Read when JAX's backend starts. Otherwise JAX would reserve most of the GPU's memory and leave too little for torch in its
# own process.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import jax
from bundle import bundle
from gpu_parts.attention import attention
from gpu_parts.correctness import correctness
from gpu_parts.decode import decode, formats
from gpu_parts.families import families
from gpu_parts.matmuls import matmuls
from gpu_parts.options import compiler_options
from gpu_parts.peer import WORKER, transformers, transformers_worker
from gpu_parts.plan import GOAL_SHAPE, LARGE, SMALL
from gpu_parts.prefill import prefill
from gpu_parts.programs import programs
from gpu_parts.published import published
from gpu_parts.run import RUNNER, Row, Run, Section, describe, is_result, memory_limit
from gpu_parts.serving import serving
from gpu_parts.table import table
from gpu_parts.training import best_training, training
from gpu_parts.yardsticks import yardsticks
from measuring import ROOT, versions, write_report

import llama_jax
from llama_jax.training import flops

SECTION_WORKER = "--section-worker"
GOAL_SHARE = 0.85  # of the copy bandwidth, bfloat16
GOAL_INT8 = 1.5  # times the tokens/s of bfloat16
TRAINING_GOAL = 0.5  # of the published peak
FORMULAS = {
    "copy": "2 * bytes / seconds of `x + 1`: every byte is read once and written once",
    "read": "bytes / seconds of `sum(x)`",
    "matrix": "2 * n**3 / seconds of a bfloat16 product with a float32 result",
    "gb_per_step": "weights (the embedding table only where it is also the head) and the tokens in the cache",
    "share_of_copy": "gb_per_step / seconds per step / copy bandwidth",
    "gb_per_s": "bytes of the stored matrix / seconds of a product; several different matrices in one program",
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
    "yardsticks": yardsticks,
    "decode": decode,
    "matmuls": matmuls,
    "prefill": prefill,
    "training": training,
    "serving": serving,
    "correctness": correctness,
    "formats": formats,
    "programs": programs,
    "attention": attention,
    "transformers": transformers,
    "compiler_options": compiler_options,
    "families": families,
    "published": published,
}
SHARE, SHARES = 0.6, {"training": 0.5, "attention": 0.3}  # of the time that is left, so that none takes all of it
# Memory that grows in pieces is too fragmented for the largest arrays of training.
MEMORY = {"training": {"XLA_PYTHON_CLIENT_PREALLOCATE": "true", "XLA_PYTHON_CLIENT_MEM_FRACTION": "0.95"}}


@dataclass(frozen=True)
class Arguments:
    """Check and measure llama_jax on the default device."""

    sections: tuple[str, ...] = ()
    """Sections to run, in this order; all by default."""
    shapes: tuple[str, ...] = ()
    """Model shapes to measure, in sections that have shapes; all by default."""
    time_limit: float = 840.0
    """Time limit in seconds; a measurement that might not end in time is not started."""
    output_folder: Path = Path("experiments/results")
    device_json: str = ""
    """File name in the output folder; by default gpu_report_<device kind>.json."""
    bundle: Path | None = None
    """Measure nothing: copy what another machine needs into this folder."""


def main(arguments: Arguments) -> int:
    """Run each section in a process; return the exit code. This process does not use the device."""
    if arguments.bundle is not None:
        bundle(arguments.bundle)
        return 0
    shapes = {**SMALL.shapes, **LARGE.shapes}
    for what, given, known in (("section", arguments.sections, SECTIONS), ("shape", arguments.shapes, shapes)):
        if unknown := [name for name in given if name not in known]:
            print(f"unknown {what} {unknown[0]!r}; the {what}s are {', '.join(known)}", file=sys.stderr)
            return 2
    if arguments.time_limit <= 0:
        print(f"time_limit={arguments.time_limit} must be positive", file=sys.stderr)
        return 2
    sections, start, code = arguments.sections or tuple(SECTIONS), time.monotonic(), 0
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that a section's process ends with this one
    for section in sections:
        left = arguments.time_limit - (time.monotonic() - start)
        limit = max(left * (SHARES.get(section, SHARE) if len(sections) > 1 else 1.0), 0.0)
        request = asdict(replace(arguments, time_limit=limit)) | {"output_folder": str(arguments.output_folder)}
        command = [sys.executable, str(RUNNER), SECTION_WORKER, section, json.dumps(request)]
        try:
            # A measurement that began in time may take longer than the limit, but not without end.
            worker = subprocess.run(command, env={**os.environ, **MEMORY.get(section, {})}, timeout=limit + 120)
            if worker.returncode not in (0, 1):
                print(f"{section}: the process ended with {worker.returncode}", flush=True)
            code |= worker.returncode != 0
        except KeyboardInterrupt:
            print(f"{section}: interrupted; the same command continues it", file=sys.stderr)
            return 130
        except subprocess.TimeoutExpired:
            print(f"{section}: stopped after {limit + 120:.0f} s", flush=True)
            code = 1
    return int(code)


def run_section(section: str, arguments: Arguments) -> int:
    """Measure one section, add its rows to the JSON, print its table; return the exit code."""
    device = jax.devices()[0]
    plan = (SMALL if device.platform == "cpu" else LARGE).limited_to(arguments.shapes)
    name = arguments.device_json or f"gpu_report_{re.sub(r'[^0-9A-Za-z]', '_', device.device_kind)}.json"
    path = arguments.output_folder / name
    report = read_report(path, device, plan)
    results = report["sections"]
    before = [row for row in results.pop(section, []) if is_result(row)]
    run = Run(device, plan, arguments.time_limit, results, before=before)
    rows = results[section] = []
    try:
        for row in SECTIONS[section](run):
            rows.append(row)
            write_report(path, report | {"sections": results | {section: rows + run.before}})
    except Exception as error:
        rows.append({"error": describe(error)})
    print(f"\n{section} on {device.device_kind} ({time.monotonic() - run.start:.0f} s)\n{table(rows)}", flush=True)
    report["goals"] = goals(run)
    if section in ("decode", "training"):
        for line in report["goals"]:
            print(f"goal {line}", flush=True)
    results[section] = rows + run.before
    failed = ["error" in row or row.get("ok") is False for rows in results.values() for row in rows]
    report["failures"] = sum(failed)
    write_report(path, report)
    return int(any("error" in row or row.get("ok") is False for row in rows))


def read_report(path: Path, device: jax.Device, plan: object) -> Row:
    """The report in a file, to be continued; an empty one if it is damaged, or of another device, versions or source."""
    settings = {key: value for key, value in vars(plan).items() if isinstance(value, int)}
    found = versions("jax", "jaxlib", "flax", "numpy", "torch", "transformers") | {"llama_jax": llama_jax.__version__}
    report = {
        "device": describe_device(device),
        "versions": found | {"source": digest_source()},
        "settings": settings,
        "formulas": FORMULAS,
        "sections": {},
    }
    if not path.is_file():
        return report
    with suppress(ValueError, AttributeError, KeyError):  # not a report
        before = json.loads(path.read_text("utf-8"))
        same = before.get("device", {}).get("kind") == device.device_kind
        if same and all(before.get(key) == report[key] for key in ("versions", "settings")):
            return report | {"sections": before["sections"]}
    path.replace(path.with_suffix(".old.json"))
    print(f"{path} cannot be continued here; it is now {path.stem}.old.json", flush=True)
    return report


def digest_source() -> str:
    """The first digits of a digest of the library's and this report's source code."""
    digest = hashlib.sha256()
    for folder in (ROOT / "llama_jax", ROOT / "experiments" / "gpu_parts"):
        for file in sorted(folder.rglob("*.py")):
            digest.update(file.read_bytes())
    return digest.hexdigest()[:12]


def goals(run: Run) -> list[str]:
    """The goals for decoding and training that were measured, and whether they were reached."""
    lines = []

    def judge(what: str, value: float, goal: float) -> None:
        lines.append(f"{'reached' if value >= goal else 'missed'}: {what} {value:.2f}, {goal} wanted")

    share = run.found("decode", "share_of_copy", shape=GOAL_SHAPE, weights="bfloat16", batch=1)
    if share is not None:
        judge(f"{GOAL_SHAPE} in bfloat16, one row, share of the copy bandwidth", share, GOAL_SHARE)
    speeds = [
        run.found("decode", "tokens_per_s", shape=GOAL_SHAPE, weights=weights, batch=1) for weights in ("bfloat16", "int8")
    ]
    if speeds[0] is not None and speeds[1] is not None:
        judge(f"{GOAL_SHAPE} in int8, one row, over bfloat16", speeds[1] / speeds[0], GOAL_INT8)
    for case in run.plan.trainings:
        best = best_training(run.results.get("training", []), case)
        if best is not None:
            chosen = f"{case.parameters}, remat {best['remat']}, {best['batch']} rows"
            judge(f"training {case.shape} ({chosen}), MFU", best["mfu"], TRAINING_GOAL)
    return lines


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


def from_request(output_folder: str, sections: list[str], shapes: list[str], **rest: object) -> Arguments:
    """The arguments that `main` passed to this process."""
    return Arguments(output_folder=Path(output_folder), sections=tuple(sections), shapes=tuple(shapes), **rest)


if __name__ == "__main__":
    if sys.argv[1:2] == [WORKER]:
        print(json.dumps(transformers_worker(**json.loads(sys.argv[2]))))
    elif sys.argv[1:2] == [SECTION_WORKER]:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # the process that started this one reports it
        sys.exit(run_section(sys.argv[2], from_request(**json.loads(sys.argv[3]))))
    else:
        sys.exit(main(command_line()))
