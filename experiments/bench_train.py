"""Training speed and memory on this machine's CPU, beside transformers with PyTorch's fused AdamW.

A step is loss, gradients, clipping by global norm and AdamW on random tokens, from the same shape in the same precision:
float32, or bfloat16 (ours by `Compute`, theirs by autocast) with float32 weights. Each peer is a process of its own, made
ready once and then asked in turn for a few steps, so that a change of the machine's speed meets all of them. Absolute
figures depend on the machine and on its other tenants; the ratio of speeds is taken within each turn, and its median and
range are reported. Processor time per step hardly depends on the other tenants, but counts waiting in a loop as work.

    pip install -e ".[parity]"
    python experiments/bench_train.py

What is measured:
  tokens/s      of the bare step, compiled before the first turn, waited for at the end of each turn. llama_jax: `train_step`
                jitted with its state donated, as the training loop calls it.
  seconds       of processor time per step, all threads.
  peak memory   of the process, compilation included (VmHWM of /proc/self/status, so on Linux only).
"""

from __future__ import annotations

import multiprocessing
import os
import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import tyro
from measuring import cpu_name, settings, versions, write_report

Steps = Callable[[int], None]
THREADS = os.cpu_count() or 1
LEARNING_RATE, BETAS, WEIGHT_DECAY, CLIP_NORM = 3e-4, (0.9, 0.95), 0.1, 1.0


@dataclass(frozen=True)
class Arguments:
    """Compare training speed and memory with transformers and PyTorch."""

    shape: str = "stories-15m"
    """The preset to measure, random weights."""
    peers: tuple[str, ...] = ("llama_jax", "torch eager", "torch compiled")
    """Who takes part."""
    dtypes: tuple[str, ...] = ("float32", "bfloat16")
    """Of the computation; weights, gradients and moments are float32."""
    batch: int = 8
    length: int = 256
    steps: int = 2
    """Steps per turn."""
    repetitions: int = 9
    """Turns of each peer; the first is a warm-up and not counted."""
    output: Path = Path("experiments/results/bench_train_cpu.json")


def random_tokens(arguments: Arguments, vocab_size: int) -> np.ndarray:
    shape = arguments.batch, arguments.length + 1
    return np.random.default_rng(0).integers(0, vocab_size, shape, dtype=np.int32)


def ours(arguments: Arguments, dtype: str) -> Steps:
    import jax

    import llama_jax
    from llama_jax import Batch, Compute, LossOptions, OptimizerSettings, StepOptions

    config = llama_jax.preset(arguments.shape)
    settings = OptimizerSettings(
        learning_rate=LEARNING_RATE,
        schedule="constant",
        b1=BETAS[0],
        b2=BETAS[1],
        weight_decay=WEIGHT_DECAY,
        clip_norm=CLIP_NORM,
    )
    optimizer = llama_jax.make_optimizer(settings, arguments.steps * arguments.repetitions)
    state = llama_jax.init_state(optimizer, llama_jax.init(config, jax.random.key(0)))
    batch = Batch(random_tokens(arguments, config.vocab_size))
    options = StepOptions(LossOptions(Compute(dtype)))
    step = jax.jit(partial(llama_jax.train_step, config, optimizer, options=options), donate_argnums=0)

    def run(steps: int) -> None:
        nonlocal state
        for _ in range(steps):
            state, metrics = step(state, batch)
        assert np.isfinite(float(metrics["loss"]))
        jax.block_until_ready(state)

    return run


def transformers(arguments: Arguments, dtype: str, *, compiled: bool) -> Steps:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    import llama_jax
    from llama_jax.checkpoints.huggingface_config import config_to_dict

    torch.set_num_threads(THREADS)
    config = llama_jax.preset(arguments.shape)
    model = LlamaForCausalLM(LlamaConfig(**config_to_dict(config)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=BETAS, weight_decay=WEIGHT_DECAY, fused=True)
    tokens = torch.from_numpy(random_tokens(arguments, config.vocab_size)).long()
    inputs, targets = tokens[:, :-1].contiguous(), tokens[:, 1:].flatten()

    def loss_of(inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype == "bfloat16"):
            logits = model(inputs, use_cache=False).logits
        return torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), targets)

    differentiable = torch.compile(loss_of) if compiled else loss_of

    def run(steps: int) -> None:
        for _ in range(steps):
            loss = differentiable(inputs, targets)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP_NORM)
            optimizer.step()
            optimizer.zero_grad()
        assert np.isfinite(loss.item())

    return run


PEERS = {
    "llama_jax": ours,
    "torch eager": partial(transformers, compiled=False),
    "torch compiled": partial(transformers, compiled=True),
}


def worker(peer: str, dtype: str, arguments: Arguments, pipe) -> None:
    run = PEERS[peer](arguments, dtype)
    run(1)
    pipe.send("ready")
    while pipe.recv() == "turn":
        wall, processor = time.perf_counter(), time.process_time()
        run(arguments.steps)
        pipe.send((time.perf_counter() - wall, time.process_time() - processor))
    pipe.send(peak_memory_mb())


def peak_memory_mb() -> float | None:
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return None
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) / 1024


def measure(dtype: str, arguments: Arguments) -> dict[str, dict]:
    """{peer: {"tokens_per_second": [of each counted turn], "processor_seconds_per_step": [...], "peak_memory_mb": ...}}."""
    spawn = multiprocessing.get_context("spawn")
    workers = {}
    for peer in arguments.peers:
        mine, theirs = spawn.Pipe()
        process = spawn.Process(target=worker, args=(peer, dtype, arguments, theirs))
        process.start()
        theirs.close()  # so that a worker that dies is an EOFError here and not an endless wait
        mine.recv()  # one compiles at a time
        workers[peer] = process, mine
    found: dict[str, dict] = {p: {"tokens_per_second": [], "processor_seconds_per_step": []} for p in workers}
    for repetition in range(arguments.repetitions):
        for peer, (_, pipe) in workers.items():
            pipe.send("turn")
            wall, processor = pipe.recv()
            if repetition:
                tokens = arguments.batch * arguments.length * arguments.steps
                found[peer]["tokens_per_second"].append(tokens / wall)
                found[peer]["processor_seconds_per_step"].append(processor / arguments.steps)
    for peer, (process, pipe) in workers.items():
        pipe.send("end")
        found[peer]["peak_memory_mb"] = pipe.recv()
        process.join()
    return found


def main(arguments: Arguments) -> None:
    report = {
        "machine": {"cpu": cpu_name(), "cores": THREADS, "platform": platform.platform()},
        "versions": versions("jax", "jaxlib", "optax", "torch", "transformers", "numpy"),
        "settings": settings(arguments),
        "load_average": [os.getloadavg()],
        "results": {},
    }
    tokens_per_step = f"{arguments.batch} x {arguments.length} tokens"
    print(f"{arguments.shape}, {tokens_per_step}; the ratio is that of llama_jax's speed to the peer's, turn by turn")
    print(f"{'dtype':9} {'peer':15} {'tokens/s':>9} {'min':>7} {'max':>7} {'CPU s':>6} {'peak MB':>8} {'ratio':>6}  range")
    for dtype in arguments.dtypes:
        report["results"][dtype] = results = measure(dtype, arguments)
        report["load_average"].append(os.getloadavg())
        for peer, figures in results.items():
            speeds = figures["tokens_per_second"]
            own = results["llama_jax"]["tokens_per_second"] if "llama_jax" in results else speeds
            ratios = [a / b for a, b in zip(own, speeds, strict=True)]
            figures["speed_of_llama_jax_over_this"] = statistics.median(ratios)
            print(
                f"{dtype:9} {peer:15} {statistics.median(speeds):9.0f} {min(speeds):7.0f} {max(speeds):7.0f}"
                f" {statistics.median(figures['processor_seconds_per_step']):6.2f} {figures['peak_memory_mb'] or 0:8.0f}"
                f" {statistics.median(ratios):6.2f}  {min(ratios):.2f} to {max(ratios):.2f}",
                flush=True,
            )
    write_report(arguments.output, report)
    print(f"written to {arguments.output}")


if __name__ == "__main__":
    main(tyro.cli(Arguments, description=__doc__))
