"""Training speed and memory on this machine's CPU, compared with transformers, PEFT, fused AdamW and earlier commits.

A step is loss, gradients, clipping by global norm and AdamW on random tokens, with the same shape and precision: float32, or
bfloat16 (ours by `ComputeOptions`, theirs by autocast) with float32 weights. Each peer is a separate process that is
prepared once and then runs a few steps in turn, so that changes of the machine's speed affect all peers. Absolute figures
depend on the machine; ratios of speeds are taken within each turn.

    pip install -e ".[parity]"
    python experiments/bench_train.py
    python experiments/bench_train.py --peers llama_jax llama_jax@HEAD~20                     # an earlier commit
    python experiments/bench_train.py --peers lora llama_jax "peft eager" "peft compiled"     # adapters of all matrices

With adapters, a frozen model with random weights is stored and computed in the dtype; adapters, their gradients and moments
are float32. Reported are tokens/s of the bare step, compiled before the first turn, and the peak memory of the process,
compilation included (VmHWM of /proc/self/status, so only on Linux).
"""

from __future__ import annotations

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
from measuring import Measure, describe_run, print_speeds, take_turns, write_report

LEARNING_RATE, BETAS, WEIGHT_DECAY, CLIP_NORM = 3e-4, (0.9, 0.95), 0.1, 1.0
SPEED, MEMORY = "tokens_per_second", "peak_memory_mb"


@dataclass(frozen=True)
class Arguments:
    """Compare training speed and memory with transformers, PEFT and earlier commits."""

    shape: str = "stories-15m"
    """The preset to measure, with random weights."""
    peers: tuple[str, ...] = ("llama_jax", "torch eager", "torch compiled")
    """Peers, the first is the baseline: also lora, "peft eager", "peft compiled", and llama_jax@COMMIT or lora@COMMIT."""
    dtypes: tuple[str, ...] = ("float32", "bfloat16")
    """Dtypes of the computation; trained weights, gradients and moments are float32."""
    rank: int = 16
    """Rank of adapters."""
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


def build_ours(arguments: Arguments, dtype: str, *, lora: bool = False) -> Callable[[], None]:
    """A function that runs a step of `train_step`, of all parameters or of adapters."""
    import jax

    import llama_jax
    from llama_jax.model.forward_options import Sharding
    from llama_jax.model.lora import freeze_base

    config = llama_jax.preset(arguments.shape)
    schedule = {"learning_rate": LEARNING_RATE, "schedule": "constant", "b1": BETAS[0], "b2": BETAS[1]}
    adamw = llama_jax.OptimizerSettings(**schedule, weight_decay=WEIGHT_DECAY, clip_norm=CLIP_NORM)
    optimizer = llama_jax.make_optimizer(adamw, arguments.steps * arguments.repetitions)
    options = llama_jax.StepOptions(llama_jax.LossOptions(llama_jax.ComputeOptions(dtype)))
    params, adapters = llama_jax.init(config, jax.random.key(0)), llama_jax.Lora(arguments.rank)
    base = jax.tree.map(lambda x: x.astype(dtype), params) if lora else None
    trained = llama_jax.init_adapters(config, adapters, jax.random.key(1)) if lora else params
    state, batch = llama_jax.init_state(optimizer, trained), llama_jax.Batch(random_tokens(arguments, config.vocab_size))

    @partial(jax.jit, donate_argnums=1)
    def train(base: Any, state: Any, batch: Any) -> Any:
        sharding = Sharding() if base is None else freeze_base(Sharding(), base, adapters)
        return llama_jax.train_step(config, optimizer, state, batch, options, sharding)

    def step() -> None:
        nonlocal state
        state, metrics = train(base, state, batch)
        assert np.isfinite(float(metrics["loss"]))

    return step


def build_torch(arguments: Arguments, dtype: str, *, compiled: bool, lora: bool = False) -> Callable[[], None]:
    """A function that runs a step of a transformers model; frozen parameters are not updated."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    import llama_jax
    from llama_jax.formats.huggingface import config_to_dict

    torch.set_num_threads(os.cpu_count() or 1)
    model = LlamaForCausalLM(LlamaConfig(**config_to_dict(llama_jax.preset(arguments.shape))))
    if lora:
        from peft import LoraConfig, get_peft_model

        adapters = llama_jax.Lora(arguments.rank)
        sizes = {"r": adapters.rank, "lora_alpha": adapters.alpha, "target_modules": list(adapters.targets)}
        model = get_peft_model(model.to(getattr(torch, dtype)), LoraConfig(**sizes, task_type="CAUSAL_LM")).train()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=LEARNING_RATE, betas=BETAS, weight_decay=WEIGHT_DECAY, fused=True)
    tokens = torch.from_numpy(random_tokens(arguments, model.config.vocab_size)).long()
    inputs, targets = tokens[:, :-1].contiguous(), tokens[:, 1:].flatten()

    def compute_loss(inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype == "bfloat16"):
            logits = model(inputs, use_cache=False).logits
        return torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), targets)

    differentiable = torch.compile(compute_loss) if compiled else compute_loss

    def step() -> None:
        loss = differentiable(inputs, targets)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, CLIP_NORM)
        optimizer.step()
        optimizer.zero_grad()
        assert np.isfinite(loss.item())

    return step


BUILDERS: dict[str, Callable[[Arguments, str], Callable[[], None]]] = {
    "llama_jax": build_ours,
    "lora": partial(build_ours, lora=True),
    "torch eager": partial(build_torch, compiled=False),
    "torch compiled": partial(build_torch, compiled=True),
    "peft eager": partial(build_torch, compiled=False, lora=True),
    "peft compiled": partial(build_torch, compiled=True, lora=True),
}


def build_peer(dtype: str, arguments: Arguments, peer: str) -> dict[str, Measure]:
    step = BUILDERS[peer](arguments, dtype)
    step()

    def speed() -> float:
        start = time.perf_counter()
        for _ in range(arguments.steps):
            step()
        return arguments.batch * arguments.length * arguments.steps / (time.perf_counter() - start)

    return {SPEED: speed, MEMORY: peak_memory_mb}


def peak_memory_mb() -> float:
    """The peak memory of this process; 0 if the system does not say."""
    status = Path("/proc/self/status")
    lines = status.read_text().splitlines() if status.exists() else ["VmHWM: 0"]
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) / 1024


def main(arguments: Arguments) -> None:
    report = describe_run(arguments, "optax", "torch", "transformers", "peft", "numpy") | {"results": {}}
    print(f"{arguments.shape}, {arguments.batch} x {arguments.length} tokens, {report['machine']['cpu']}")
    print(f"{'':30} {'peer':24} {'median/s':>10}  {arguments.peers[0]} over it, within turns")
    for dtype in arguments.dtypes:
        results = take_turns(partial(build_peer, dtype, arguments), arguments.peers, arguments.repetitions, (MEMORY,))
        report["results"][dtype] = results
        print_speeds(dtype, results[SPEED])
        print(", ".join(f"{peer} {statistics.median(values):,.0f} MB" for peer, values in results[MEMORY].items()))
    write_report(arguments.output, report)
    print(f"written to {arguments.output}")


if __name__ == "__main__":
    main(tyro.cli(Arguments, description=__doc__))
