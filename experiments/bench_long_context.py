"""The cost of long rows: attention by backend and length, a training step, prefill of a long prompt.

    python experiments/bench_long_context.py
    python experiments/bench_long_context.py --sections attention --lengths 512 2048

attention: seconds of every backend that runs here, forward and with gradients, for 8 heads of 64 features in float32, and
  the compiler's plan for temporaries in bytes. The definition ("reference") stores several copies of the [8, T, T] scores
  and is omitted if one copy exceeds 4 GB.
step: one training step of the 15M shape with one row and full rematerialization.
prompt: prefilling a prompt in chunks into a cache with room for all of it, as `generate` does.

All backends take turns in one process; the figures are medians. Parameters are random, which does not affect the results.
Writes ``experiments/results/bench_long_context_cpu.json`` and prints tables.
"""

from __future__ import annotations

import resource
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import tyro
from measuring import describe_run, seconds_of, write_report

import llama_jax
from llama_jax.ops import attend
from llama_jax.ops.attention import AttentionMask, KVView

MAX_SCORE_BYTES = 4 * 2**30
HEADS, WIDTH = 8, 64


@dataclass(frozen=True)
class Arguments:
    """What to measure."""

    sections: tuple[str, ...] = ("step", "prompt", "attention")
    lengths: tuple[int, ...] = (512, 1024, 2048, 4096, 8192, 32_768)
    """Lengths for attention."""
    step: int = 16_384
    """Row length of the training step."""
    prompt: int = 100_000
    """Tokens of the prompt."""
    turns: int = 7
    shape: str = "stories-15m"
    output: Path = Path("experiments/results/bench_long_context_cpu.json")


def temporary_bytes(compiled: Any) -> int:
    return compiled.memory_analysis().temp_size_in_bytes


def peak_bytes() -> int:
    """The peak memory of this process so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def measure_attention(lengths: Sequence[int], turns: int) -> list[dict[str, Any]]:
    rows = []
    for length in lengths:
        shapes = (1, HEADS, length, 1, WIDTH), (1, HEADS, length, WIDTH), (1, HEADS, length, WIDTH)
        arrays = [jax.random.normal(jax.random.key(i), shape) for i, shape in enumerate(shapes)]
        programs = {}
        for backend in ("reference", "dense", "blockwise"):
            if backend != "blockwise" and 4 * HEADS * length**2 > MAX_SCORE_BYTES:
                continue
            forward = partial(attend_rows, backend)
            both = jax.grad(lambda q, k, v, forward=forward: jnp.sum(forward(q, k, v) ** 2), argnums=(0, 1, 2))
            for direction, function in (("forward", forward), ("with gradients", both)):
                programs[backend, direction] = jax.jit(function).lower(*arrays).compile()
        seconds: dict[tuple[str, str], list[float]] = {key: [] for key in programs}
        for _ in range(turns if length < 8192 else min(turns, 2)):
            for key, program in programs.items():
                seconds[key] += seconds_of(partial(program, *arrays), 1)
        for (backend, direction), program in programs.items():
            taken = seconds[backend, direction]
            row = {"length": length, "backend": backend, "what": direction, "seconds": median(taken), "all_seconds": taken}
            rows.append(row | {"temporaries": temporary_bytes(program)})
            memory = f"{temporary_bytes(program) / 2**20:8.1f} MiB"
            print(f"{length:7,} {backend:10} {direction:15} {1e3 * median(taken):10.1f} ms {memory}", flush=True)
    return rows


def attend_rows(backend: Any, queries: jax.Array, keys: jax.Array, values: jax.Array) -> jax.Array:
    """Causal attention of whole rows."""
    return attend(queries, KVView(keys, values), AttentionMask.causal(keys.shape[2]), scale=WIDTH**-0.5, backend=backend)


def long_config(shape: str, length: int) -> llama_jax.LlamaConfig:
    """A preset with another maximum length."""
    return replace(llama_jax.preset(shape), max_seq_len=length)


def measure_step(shape: str, length: int) -> dict[str, Any]:
    config = long_config(shape, length)
    optimizer = llama_jax.make_optimizer(llama_jax.OptimizerSettings(clip_norm=0.0), steps=10)
    state = llama_jax.init_state(optimizer, llama_jax.init(config, jax.random.key(0)))
    tokens = np.random.default_rng(0).integers(0, config.vocab_size, (1, length + 1), dtype=np.int32)
    options = llama_jax.StepOptions(llama_jax.LossOptions(llama_jax.ComputeOptions(remat="full")))
    step = partial(llama_jax.train_step, config, optimizer, options=options)
    compiled = jax.jit(step).lower(state, llama_jax.Batch(tokens)).compile()
    seconds = median(seconds_of(lambda: compiled(state, llama_jax.Batch(tokens)), 2))
    print(
        f"step of {length:,} tokens: {seconds:.1f} s, {temporary_bytes(compiled) / 2**20:.0f} MiB of temporaries", flush=True
    )
    return {"length": length, "seconds": seconds, "temporaries": temporary_bytes(compiled), "peak": peak_bytes()}


def measure_prompt(shape: str, length: int) -> dict[str, Any]:
    config = long_config(shape, 2 * length)
    params = llama_jax.init(config, jax.random.key(0))
    ids = np.random.default_rng(0).integers(0, config.vocab_size, length).tolist()
    began = time.perf_counter()
    next(llama_jax.stream(config, params, [ids], max_new_tokens=1))
    seconds = time.perf_counter() - began
    print(
        f"prompt of {length:,} tokens: {seconds:.1f} s with compiling, {length / seconds:,.0f} tokens/s,"
        f" peak of the process so far {peak_bytes() / 1e9:.2f} GB",
        flush=True,
    )
    return {"length": length, "seconds": seconds, "peak": peak_bytes()}


def main(arguments: Arguments) -> None:
    sections = {
        "step": partial(measure_step, arguments.shape, arguments.step),
        "prompt": partial(measure_prompt, arguments.shape, arguments.prompt),
        "attention": partial(measure_attention, arguments.lengths, arguments.turns),
    }
    report = describe_run(arguments)
    for name in arguments.sections:
        report[name] = sections[name]()
    write_report(arguments.output, report)
    print(f"written to {arguments.output}")


if __name__ == "__main__":
    main(tyro.cli(Arguments, description=__doc__))
