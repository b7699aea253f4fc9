"""Random weights of every shape of the plan."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp

import llama_jax
from gpu_parts.run import Row, Run, memory_limit


class Weights:
    """Random bfloat16 weights of one shape, made on the device at the first use."""

    def __init__(self, config: llama_jax.LlamaConfig):
        self.config = config
        self.params: llama_jax.Llama | None = None

    def made(self) -> llama_jax.Llama:
        if self.params is None:
            make = jax.jit(llama_jax.init, static_argnums=(0, 2))
            self.params = jax.block_until_ready(make(self.config, jax.random.key(0), jnp.bfloat16))
        return self.params


def for_every_shape(run: Run, cases: list[Row], measure: Callable[..., Row]) -> Iterator[Row]:
    """Yield a row for every shape and case."""
    for shape, config in run.plan.shapes.items():
        weights = Weights(config)
        for case in cases:
            row = {"shape": shape, **case}
            if not fits(run.device, config):
                yield row | {"skipped": "the weights do not fit into the device's memory"}
                continue
            yield run.attempt(row, lambda weights=weights, case=case: measure(run, weights.config, weights.made(), **case))


def fits(device: jax.Device, config: llama_jax.LlamaConfig) -> bool:
    limit = memory_limit(device)
    return limit is None or 2 * llama_jax.parameter_count(config) < limit
