"""Candidates of the train step, in one process per shape."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator

from gpu_parts.plan import Training
from gpu_parts.run import RUNNER, Row, Run
from llama_jax.formats.huggingface import config_to_dict

TRAINING_WORKER = "--training-worker"
TRAINING_SHARE = 0.4  # of the time limit


def training(run: Run) -> Iterator[Row]:
    """Measure every candidate of every shape, in one process per shape, so that its memory is freed."""
    if run.device.platform not in ("cpu", "gpu"):
        yield {"skipped": "a second process cannot use the device"}
        return
    share = 1.0 if run.alone else TRAINING_SHARE
    end = time.monotonic() + min(share * run.time_limit, run.time_left())
    for i, case in enumerate(run.plan.trainings):
        left = (end - time.monotonic()) / (len(run.plan.trainings) - i)
        row = {"shape": case.shape, "parameters": case.parameters, "length": case.length}
        if left <= 0:
            yield row | {"skipped": "time limit"}
            continue
        yield from train_in_a_process(run, case, row, left)


def train_in_a_process(run: Run, case: Training, row: Row, time_limit: float) -> Iterator[Row]:
    """Yield the rows that a worker prints, including those of a worker that dies or runs out of time."""
    request = {
        "settings": config_to_dict(run.plan.shapes[case.shape]),
        "row": row,
        "candidates": case.candidates,
        "repetitions": run.plan.repetitions,
        "matrix_size": run.plan.matrix_size,
        "time_limit": time_limit,
    }
    # Preallocate the memory: memory that grows in pieces is too fragmented for the largest arrays.
    memory = {"XLA_PYTHON_CLIENT_PREALLOCATE": "true", "XLA_PYTHON_CLIENT_MEM_FRACTION": "0.95"}
    command = [sys.executable, str(RUNNER), TRAINING_WORKER, json.dumps(request)]
    ended = None
    try:
        worker = subprocess.run(
            command, capture_output=True, text=True, timeout=max(time_limit, 1.0), env={**os.environ, **memory}
        )
        printed = worker.stdout
        if worker.returncode:
            ended = {"error": f"the worker ended with {worker.returncode}: {worker.stderr.strip()[-400:]}"}
    except subprocess.TimeoutExpired as late:
        printed = (late.stdout or b"").decode()
        ended = {"skipped": "time limit"}
    for line in printed.splitlines(keepends=True):
        if line.startswith("{") and line.endswith("}\n"):  # others may print too, and the last line may be cut
            yield json.loads(line)
    if ended:
        yield row | ended


def best_training(rows: list[Row], case: Training) -> Row | None:
    """The row of the fastest candidate; None without a published peak to compare with."""
    found = [row for row in rows if row.get("mfu") and (row["shape"], row["parameters"]) == (case.shape, case.parameters)]
    return max(found, key=lambda row: row["mfu"], default=None)
