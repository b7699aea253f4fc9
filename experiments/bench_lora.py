"""Training speed and memory of LoRA on this machine's CPU, compared with full training and PEFT with fused AdamW.

Adapters of all seven matrices are trained on a frozen model with random weights. A step is loss, gradients, clipping by
global norm and AdamW on random tokens. With float32 everything is float32. With bfloat16 the frozen model is stored and
computed in bfloat16 (ours by `Compute`, theirs by autocast); adapters, their gradients and moments are float32. For the
method and the columns see `bench_train.py`.

    pip install -e ".[parity]"
    python experiments/bench_lora.py
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import tyro
from bench_train import Peer, Steps, compare, our_optimizer, our_steps, ours, torch_steps, transformers_model


@dataclass(frozen=True)
class Arguments:
    """Compare the training speed and memory of LoRA with full training and PEFT."""

    shape: str = "stories-15m"
    """The preset to measure, with random weights."""
    peers: tuple[str, ...] = ("lora", "full", "peft eager", "peft compiled")
    """Peers to compare."""
    dtypes: tuple[str, ...] = ("float32", "bfloat16")
    """Dtypes of the computation."""
    rank: int = 16
    batch: int = 8
    length: int = 256
    steps: int = 2
    """Steps per turn."""
    repetitions: int = 9
    """Turns of each peer; the first is a warm-up and not counted."""
    output: Path = Path("experiments/results/bench_lora_cpu.json")


def lora(arguments: Arguments, dtype: str) -> Steps:
    import jax

    import llama_jax
    from llama_jax.model.forward_options import Sharding
    from llama_jax.model.lora import with_base

    config, adapters, optimizer = llama_jax.preset(arguments.shape), llama_jax.Lora(arguments.rank), our_optimizer(arguments)
    base = jax.tree.map(lambda x: x.astype(dtype), llama_jax.init(config, jax.random.key(0)))
    state = llama_jax.init_state(optimizer, llama_jax.init_adapters(config, adapters, jax.random.key(1)))
    options = llama_jax.StepOptions(llama_jax.LossOptions(llama_jax.Compute(dtype)))

    def step(base: Any, state: Any, batch: Any) -> Any:
        return llama_jax.train_step(config, optimizer, state, batch, options, with_base(Sharding(), base, adapters))

    return our_steps(partial(jax.jit(step, donate_argnums=1), base), state, arguments, config.vocab_size)


def peft(arguments: Arguments, dtype: str, *, compiled: bool) -> Steps:
    import torch
    from peft import LoraConfig, get_peft_model

    import llama_jax

    adapters = llama_jax.Lora(arguments.rank)
    settings = LoraConfig(
        r=adapters.rank, lora_alpha=adapters.alpha, target_modules=list(adapters.targets), task_type="CAUSAL_LM"
    )
    model = get_peft_model(transformers_model(arguments.shape).to(getattr(torch, dtype)), settings)
    assert {one.dtype for one in model.parameters() if one.requires_grad} == {torch.float32}
    return torch_steps(model.train(), arguments, dtype, compiled=compiled)


PEERS: dict[str, Peer] = {
    "lora": lora,
    "full": ours,
    "peft eager": partial(peft, compiled=False),
    "peft compiled": partial(peft, compiled=True),
}


def main(arguments: Arguments) -> None:
    compare(PEERS, "lora", arguments, ("peft",))


if __name__ == "__main__":
    main(tyro.cli(Arguments, description=__doc__))
