"""Random weights of every shape of the plan."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp

import llama_jax
from gpu_parts.run import Row, Run, memory_limit
from llama_jax.model.trees import param_shapes, quantize, unstack_layers


class Weights:
    """Random weights of one shape, in bfloat16 or a quantization format, made on the device at the first use."""

    def __init__(self, config: llama_jax.LlamaConfig, kind: str = "bfloat16"):
        self.config = config
        self.kind = kind
        self.params: llama_jax.LlamaParams | None = None

    def made(self) -> llama_jax.LlamaParams:
        if self.params is None:
            shapes = param_shapes(self.config, jnp.bfloat16)
            self.params = jax.block_until_ready(noise(shapes if self.kind == "bfloat16" else quantize(shapes, self.kind)))
        return self.params


def noise(shapes: llama_jax.LlamaParams) -> llama_jax.LlamaParams:
    """Arrays of these shapes, laid out as `load` does it: small floats, and integers of all bits.

    One array at a time: a program that makes all of them compiles for minutes.
    """

    def fill(key: jax.Array, leaf: jax.ShapeDtypeStruct) -> jax.Array:
        if jnp.issubdtype(leaf.dtype, jnp.integer):
            bits = jax.random.bits(key, leaf.shape, jnp.uint8)
            return bits.astype(leaf.dtype) if leaf.dtype.itemsize <= 1 else (bits % 8).astype(leaf.dtype)
        return (0.02 * jax.random.normal(key, leaf.shape, jnp.bfloat16)).astype(leaf.dtype)

    filled = jax.jit(fill, static_argnums=1)
    leaves, tree = jax.tree.flatten(jax.eval_shape(laid_out, shapes))
    return jax.tree.unflatten(tree, [filled(jax.random.key(i), leaf) for i, leaf in enumerate(leaves)])


def laid_out(params: llama_jax.LlamaParams) -> llama_jax.LlamaParams:
    """The parameters as `load` arranges them for this device: for a GPU, each layer's matrices in separate arrays."""
    return unstack_layers(params) if jax.default_backend() == "gpu" else params


def for_every_case(run: Run, row: Row, weights: Weights, cases: list[Row], measure: Callable[..., Row]) -> Iterator[Row]:
    """Yield `row` with each case and its measurement."""
    for case in cases:
        if fits(run.device, weights.config):
            yield run.attempt(row | case, lambda case=case: measure(run, weights.config, weights.made(), **case))
        else:
            yield row | case | {"skipped": "the weights do not fit into the device's memory"}


def fits(device: jax.Device, config: llama_jax.LlamaConfig) -> bool:
    limit = memory_limit(device)
    return limit is None or 2 * llama_jax.parameter_count(config) < limit
