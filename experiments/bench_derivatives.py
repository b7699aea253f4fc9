"""Time and memory of derivatives compared with a gradient, for the bundled model in float32 on this machine.

Times are the shortest of several calls of compiled programs; memory is the compiler's plan for temporaries. Long lengths
are only compiled, not run, so that only their memory is measured.

    python experiments/bench_derivatives.py
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import tyro
from jax.tree_util import Partial
from measuring import describe_run, seconds_of, write_rows

import llama_jax
from llama_jax.model.trees import quantize


@dataclass(frozen=True)
class Arguments:
    """Compare the cost of derivatives with that of a gradient."""

    batch: int = 4
    length: int = 256
    calls: int = 5
    lengths: tuple[int, ...] = (2048, 8192)
    """Lengths of a single row at which programs are compiled but not run."""
    output: Path = Path("experiments/results/bench_derivatives_cpu.json")


LONG = ("gradient", "jvp", "Hessian product")  # compiled for long rows


def _add(delta: jax.Array, x: jax.Array, at: Any) -> tuple[jax.Array, None]:
    return x + delta, None


def programs(config: Any) -> dict[str, Callable[..., Any]]:
    """Functions of parameters, a direction and tokens [B, T + 1], by name."""

    def loss(params: Any, tokens: jax.Array, forward_mode: bool = False) -> jax.Array:
        options = llama_jax.LossOptions(llama_jax.ComputeOptions(forward_mode=forward_mode))
        return llama_jax.next_token_loss(config, params, llama_jax.Batch(tokens), options)

    def of_embeddings(params: Any, tokens: jax.Array) -> jax.Array:
        hooked = lambda delta: llama_jax.with_hooks(params, {"embedded": Partial(_add, delta)})
        zeros = jnp.zeros((tokens.shape[0], tokens.shape[1] - 1, config.dim))
        return jax.grad(lambda delta: loss(hooked(delta), tokens))(zeros)

    gradient = jax.grad(loss)
    by_row = jax.vmap(lambda params, row: gradient(params, row[None]), (None, 0))
    return {
        "loss": lambda params, along, tokens: loss(params, tokens),
        "gradient": lambda params, along, tokens: gradient(params, tokens),
        "jvp": lambda params, along, tokens: jax.jvp(partial(loss, tokens=tokens, forward_mode=True), (params,), (along,)),
        "Hessian product": lambda params, along, tokens: jax.jvp(partial(gradient, tokens=tokens), (params,), (along,))[1],
        "gradients by example": lambda params, along, tokens: by_row(params, tokens),
        "gradient of embeddings": lambda params, along, tokens: of_embeddings(params, tokens),
        "gradient of embeddings, int8": lambda params, along, tokens: of_embeddings(params, tokens),
    }


def main(arguments: Arguments) -> None:
    config, params, _ = llama_jax.load(dtype=jnp.float32)
    models = {"int8": quantize(params, "int8")}
    rows: list[dict[str, Any]] = []
    for length in (arguments.length, *arguments.lengths):
        batch = arguments.batch if length == arguments.length else 1
        tokens = jax.random.randint(jax.random.key(0), (batch, length + 1), 0, config.vocab_size)
        for name, function in programs(config).items():
            if length != arguments.length and name not in LONG:
                continue
            inputs = models.get(name.split(", ")[-1], params), params, tokens
            compiled = jax.jit(function).lower(*inputs).compile()
            memory = compiled.memory_analysis()
            row = {"derivative": name, "batch": batch, "length": length, "temporary_mb": memory.temp_size_in_bytes / 1e6}
            if length == arguments.length:
                row["milliseconds"] = 1000 * min(seconds_of(partial(compiled, *inputs), arguments.calls))
            rows.append(row)
            print(
                "  ".join(f"{value:.1f}" if isinstance(value, float) else str(value) for value in row.values()), flush=True
            )
    write_rows(arguments.output, describe_run(arguments), "rows", rows)


if __name__ == "__main__":
    main(tyro.cli(Arguments))
