"""Decoding with quantized weights: its difference from dequantized weights, and its speed."""

from __future__ import annotations

from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np

import llama_jax
from gpu_parts.decode import measure_decode
from gpu_parts.plan import SMALL_GQA
from gpu_parts.run import Row, Run, number
from gpu_parts.weights import noise
from llama_jax.model.trees import dequantize, param_shapes, quantize

# int8 activations round to 7 bits, and 4-bit weights make each such error larger, relative to the largest logit.
TOLERANCE = 0.05


def quantized(run: Run) -> Iterator[Row]:
    """For every format: logits of a small model for one token and for many, and a large model's decode steps."""
    for kind in run.plan.formats:
        for tokens in (1, 48):
            case = {"format": kind, "tokens": tokens}
            yield run.attempt(case, lambda kind=kind, tokens=tokens: compare(kind, tokens))
    config = run.plan.shapes[run.plan.quantized_shape]
    for batch in run.plan.decode_batches:
        for kind in run.plan.formats:
            case = {"shape": run.plan.quantized_shape, "format": kind, "batch": batch}
            yield run.attempt(case, lambda kind=kind, batch=batch: measure(run, config, kind, batch))


def compare(kind: str, tokens: int) -> Row:
    """The difference between logits [1, V] of quantized and of dequantized weights, relative to the largest."""
    with jax.default_matmul_precision("highest"):
        params = quantize(jax.jit(llama_jax.init, static_argnums=0)(SMALL_GQA, jax.random.key(0)), kind)
        ids = np.random.default_rng(0).integers(0, SMALL_GQA.vocab_size, (1, tokens), dtype=np.int32)
        program = jax.jit(lambda params: llama_jax.logits(SMALL_GQA, params, ids)[:, -1])
        got, expected = program(params), program(jax.jit(dequantize)(params))
    apart = float(jnp.max(jnp.abs(got - expected)) / jnp.max(jnp.abs(expected)))
    return {"ok": apart <= TOLERANCE, "max_diff": number(apart), "allowed": TOLERANCE}


def measure(run: Run, config: llama_jax.LlamaConfig, kind: str, batch: int) -> Row:
    """Time decode steps with random weights: their values do not affect the speed."""
    shapes = quantize(param_shapes(config, jnp.bfloat16), kind)
    return measure_decode(run, config, noise(shapes), batch)
