"""Decoding by transformers, in one process per shape."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from collections.abc import Iterator

import jax.numpy as jnp

from gpu_parts.decode import mean_length, step_bytes
from gpu_parts.run import RUNNER, Row, Run
from llama_jax.formats.huggingface import config_to_dict
from llama_jax.model.trees import param_shapes

WORKER = "--transformers-worker"


def transformers(run: Run) -> Iterator[Row]:
    """Decode with batch 1, in one process per shape, so that torch's memory is freed and a crash affects only one row."""
    missing = [name for name in ("torch", "transformers") if importlib.util.find_spec(name) is None]
    if missing or run.device.platform not in ("cpu", "gpu"):
        yield {"skipped": f"{missing[0]} is not installed" if missing else "only on a GPU or CPU"}
        return
    for shape in run.plan.peer_shapes:
        yield run.attempt({"shape": shape, "batch": 1}, lambda shape=shape: measure_transformers(run, shape))


def measure_transformers(run: Run, shape: str) -> Row:
    plan, config = run.plan, run.plan.shapes[shape]
    request = {
        "settings": config_to_dict(config),
        "use_gpu": run.device.platform == "gpu",
        **{name: getattr(plan, name) for name in ("capacity", "prompt_tokens", "new_tokens", "repetitions")},
    }
    try:
        worker = subprocess.run(
            [sys.executable, str(RUNNER), WORKER, json.dumps(request)],
            capture_output=True,
            text=True,
            timeout=run.time_left(),
        )
    except subprocess.TimeoutExpired:
        return {"skipped": "time limit"}
    if worker.returncode:
        raise RuntimeError(f"the worker ended with {worker.returncode}: {worker.stderr.strip()[-400:]}")
    row = json.loads(worker.stdout.splitlines()[-1])
    if "skipped" in row:
        return row
    step, read = row["ms_per_step"] / 1e3, step_bytes(config, param_shapes(config, jnp.bfloat16), 1, mean_length(plan))
    copy = run.found("yardsticks", "value", name="copy")
    ours = run.found("decode", "tokens_per_s", shape=shape, weights="bfloat16", batch=1)
    return {
        **row,
        **({} if copy is None else {"share_of_copy": read / step / 1e9 / copy}),
        **({} if ours is None else {"llama_jax_over_it": ours / row["tokens_per_s"]}),
    }
