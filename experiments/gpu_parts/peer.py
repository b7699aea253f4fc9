"""Decoding by transformers, in one process per shape."""

from __future__ import annotations

import importlib.util
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import jax.numpy as jnp

from gpu_parts.decode import mean_length, step_bytes
from gpu_parts.run import RUNNER, Row, Run
from gpu_parts.timing import spread
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


def transformers_worker(
    settings: dict[str, Any], use_gpu: bool, capacity: int, prompt_tokens: int, new_tokens: int, repetitions: int
) -> Row:
    """Decode step by step with argmax, which is faster than `generate` of transformers; the process never starts JAX."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM, StaticCache

    if use_gpu and not torch.cuda.is_available():
        return {"skipped": "this torch has no CUDA"}
    if not use_gpu:
        torch.set_num_threads(1)  # more threads do not help small shapes, and slow them down if others use the cores
    device = torch.device("cuda" if use_gpu else "cpu")
    torch.set_default_dtype(torch.bfloat16)
    with device:
        model = LlamaForCausalLM(LlamaConfig(**settings)).eval()
        prompt = torch.randint(0, settings["vocab_size"], (1, prompt_tokens))
    cache = StaticCache(config=model.config, max_cache_len=capacity)

    def next_token(tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        # transformers 4 reads cache_position, 5 only position_ids.
        out = model(
            tokens,
            position_ids=positions[None],
            cache_position=positions,
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        )
        return out.logits[:, -1:].argmax(-1)

    # A step has many small kernels, which are fast only with a CUDA graph of the whole step.
    step = torch.compile(next_token, mode="reduce-overhead", fullgraph=True) if use_gpu else next_token

    @torch.no_grad()
    def once(steps: int) -> float:
        """Seconds of `steps` steps after a new prefill."""
        cache.reset()
        token = next_token(prompt, torch.arange(prompt_tokens, device=device))
        positions = torch.arange(prompt_tokens, prompt_tokens + steps, device=device)[:, None]
        synchronize()
        start = time.perf_counter()
        for position in positions:
            token = step(token, position).clone()  # a CUDA graph overwrites its result at the next call
        synchronize()
        return time.perf_counter() - start

    def synchronize() -> None:
        if use_gpu:
            torch.cuda.synchronize()

    compile_seconds = once(4)  # the first call compiles, later ones record the graph
    times = [once(new_tokens) / new_tokens for _ in range(repetitions + 1)][1:]
    taken = statistics.median(times)
    return {
        "ms_per_step": 1e3 * taken,
        "tokens_per_s": 1 / taken,
        "spread": spread(times),
        "compile_s": compile_seconds,
        "compiled": use_gpu,
    }
