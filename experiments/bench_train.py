"""Training speed and memory on this machine's CPU, compared with transformers and PyTorch's fused AdamW.

A step is loss, gradients, clipping by global norm and AdamW on random tokens, with the same shape and precision: float32, or
bfloat16 (ours by `Compute`, theirs by autocast) with float32 weights. Each peer is a separate process that is prepared once
and then runs a few steps in turn, so that changes of the machine's speed affect all peers. Absolute figures depend on the
machine and on its other load; the ratio of speeds is computed within each turn, and its median and range are reported. CPU
time per step hardly depends on other load, but counts busy waiting as work.

    pip install -e ".[parity]"
    python experiments/bench_train.py

What is measured:
  tokens/s      of the bare step, compiled before the first turn; each turn waits for its last step. llama_jax: jitted
                `train_step` with donated state, as in the training loop.
  CPU s         CPU seconds per step, all threads.
  peak MB       peak memory of the process, including compilation (VmHWM of /proc/self/status, so only on Linux).
"""

from __future__ import annotations

import multiprocessing
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import tyro
from measuring import machine, settings, versions, write_report

Steps = Callable[[int], None]
Peer = Callable[[Any, str], Steps]  # from the arguments and the dtype of the computation
THREADS = os.cpu_count() or 1
LEARNING_RATE, BETAS, WEIGHT_DECAY, CLIP_NORM = 3e-4, (0.9, 0.95), 0.1, 1.0


@dataclass(frozen=True)
class Arguments:
    """Compare training speed and memory with transformers and PyTorch."""

    shape: str = "stories-15m"
    """The preset to measure, with random weights."""
    peers: tuple[str, ...] = ("llama_jax", "torch eager", "torch compiled")
    """Peers to compare."""
    dtypes: tuple[str, ...] = ("float32", "bfloat16")
    """Dtypes of the computation; weights, gradients and moments are float32."""
    batch: int = 8
    length: int = 256
    steps: int = 2
    """Steps per turn."""
    repetitions: int = 9
    """Turns of each peer; the first is a warm-up and not counted."""
    output: Path = Path("experiments/results/bench_train_cpu.json")


def random_tokens(arguments: Any, vocab_size: int) -> np.ndarray:
    shape = arguments.batch, arguments.length + 1
    return np.random.default_rng(0).integers(0, vocab_size, shape, dtype=np.int32)


def our_optimizer(arguments: Any) -> Any:
    import llama_jax

    settings = llama_jax.OptimizerSettings(
        learning_rate=LEARNING_RATE,
        schedule="constant",
        b1=BETAS[0],
        b2=BETAS[1],
        weight_decay=WEIGHT_DECAY,
        clip_norm=CLIP_NORM,
    )
    return llama_jax.make_optimizer(settings, arguments.steps * arguments.repetitions)


def ours(arguments: Any, dtype: str) -> Steps:
    import jax

    import llama_jax

    config, optimizer = llama_jax.preset(arguments.shape), our_optimizer(arguments)
    state = llama_jax.init_state(optimizer, llama_jax.init(config, jax.random.key(0)))
    options = llama_jax.StepOptions(llama_jax.LossOptions(llama_jax.Compute(dtype)))
    step = jax.jit(partial(llama_jax.train_step, config, optimizer, options=options), donate_argnums=0)
    return our_steps(step, state, arguments, config.vocab_size)


def our_steps(step: Callable[..., Any], state: Any, arguments: Any, vocab_size: int) -> Steps:
    """Return a function that runs steps of a compiled function of state and batch, like `train_step`."""
    import jax

    import llama_jax

    batch = llama_jax.Batch(random_tokens(arguments, vocab_size))

    def run(steps: int) -> None:
        nonlocal state
        for _ in range(steps):
            state, metrics = step(state, batch)
        assert np.isfinite(float(metrics["loss"]))
        jax.block_until_ready(state)

    return run


def transformers(arguments: Any, dtype: str, *, compiled: bool) -> Steps:
    return torch_steps(transformers_model(arguments.shape), arguments, dtype, compiled=compiled)


def transformers_model(shape: str) -> Any:
    """A transformers model with random weights."""
    from transformers import LlamaConfig, LlamaForCausalLM

    import llama_jax
    from llama_jax.formats.huggingface import config_to_dict

    return LlamaForCausalLM(LlamaConfig(**config_to_dict(llama_jax.preset(shape))))


def torch_steps(model: Any, arguments: Any, dtype: str, *, compiled: bool) -> Steps:
    """Return a function that runs steps of a transformers model; frozen parameters are not updated."""
    import torch

    torch.set_num_threads(THREADS)
    learnt = [one for one in model.parameters() if one.requires_grad]
    optimizer = torch.optim.AdamW(learnt, lr=LEARNING_RATE, betas=BETAS, weight_decay=WEIGHT_DECAY, fused=True)
    tokens = torch.from_numpy(random_tokens(arguments, model.config.vocab_size)).long()
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
            torch.nn.utils.clip_grad_norm_(learnt, CLIP_NORM)
            optimizer.step()
            optimizer.zero_grad()
        assert np.isfinite(loss.item())

    return run


PEERS: dict[str, Peer] = {
    "llama_jax": ours,
    "torch eager": partial(transformers, compiled=False),
    "torch compiled": partial(transformers, compiled=True),
}


def worker(peer: Peer, dtype: str, arguments: Any, pipe: Any) -> None:
    run = peer(arguments, dtype)
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


def measure(peers: dict[str, Peer], dtype: str, arguments: Any) -> dict[str, dict]:
    """For each peer: "tokens_per_second" and "processor_seconds_per_step" of each turn, and "peak_memory_mb"."""
    spawn = multiprocessing.get_context("spawn")
    workers = {}
    for peer in arguments.peers:
        mine, theirs = spawn.Pipe()
        process = spawn.Process(target=worker, args=(peers[peer], dtype, arguments, theirs))
        process.start()
        theirs.close()  # if a worker dies, recv() then raises EOFError instead of waiting forever
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


def compare(peers: dict[str, Peer], own: str, arguments: Any, packages: tuple[str, ...]) -> None:
    """Measure, print a table and write the report; `own` is the peer whose speed is divided by the other speeds."""
    report = {
        "machine": machine(),
        "versions": versions("jax", "jaxlib", "optax", "torch", "transformers", "numpy", *packages),
        "settings": settings(arguments),
        "load_average": [os.getloadavg()],
        "results": {},
    }
    key = f"speed_of_{own.replace(' ', '_')}_over_this"
    print(f"{arguments.shape}, {arguments.batch} x {arguments.length} tokens, {report['machine']['cpu']}")
    print(f"ratio: speed of {own} / speed of the peer, within each turn")
    print(f"{'dtype':9} {'peer':15} {'tokens/s':>9} {'min':>7} {'max':>7} {'CPU s':>6} {'peak MB':>8} {'ratio':>6}  range")
    for dtype in arguments.dtypes:
        report["results"][dtype] = results = measure(peers, dtype, arguments)
        report["load_average"].append(os.getloadavg())
        for peer, figures in results.items():
            speeds = figures["tokens_per_second"]
            ratios = [a / b for a, b in zip(results.get(own, figures)["tokens_per_second"], speeds, strict=True)]
            figures[key] = statistics.median(ratios)
            print(
                f"{dtype:9} {peer:15} {statistics.median(speeds):9.0f} {min(speeds):7.0f} {max(speeds):7.0f}"
                f" {statistics.median(figures['processor_seconds_per_step']):6.2f} {figures['peak_memory_mb'] or 0:8.0f}"
                f" {statistics.median(ratios):6.2f}  {min(ratios):.2f} to {max(ratios):.2f}",
                flush=True,
            )
    write_report(arguments.output, report)
    print(f"written to {arguments.output}")


def main(arguments: Arguments) -> None:
    compare(PEERS, "llama_jax", arguments, ())


if __name__ == "__main__":
    main(tyro.cli(Arguments, description=__doc__))
