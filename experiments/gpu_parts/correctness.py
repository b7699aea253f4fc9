"""A small model compared with the CPU and with dequantized weights, and generation compared with repeated `logits`."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

import llama_jax
from gpu_parts.plan import SMALL_GQA
from gpu_parts.run import Row, Run, number
from llama_jax.model.trees import dequantize, quantize

CHECK_TOKENS = (4, 48)
FLOAT32_TOLERANCE = 1e-4  # of the largest logit
# bfloat16 rounds every product to 8 bits, about 0.4 %: four layers of that stay within a few percent of the largest logit.
BFLOAT16_TOLERANCE = 0.05
# int8 activations round to 7 bits, and 4-bit weights make each such error larger, relative to the largest logit.
QUANTIZED_TOLERANCE = 0.05
BFLOAT16_AGREEMENT = 0.9  # of the positions; random weights have many near ties


def correctness(run: Run) -> Iterator[Row]:
    """Compare `logits` on this device with the CPU, and `generate` with `logits`.

    If the device is the CPU, this still compares bfloat16 with float32.
    """
    cpu, config = jax.devices("cpu")[0], SMALL_GQA

    @functools.cache  # computed by the first check that runs, so that nothing is computed if no time is left
    def params(dtype: jnp.dtype) -> llama_jax.LlamaParams:
        with jax.default_device(cpu):
            return jax.jit(llama_jax.init, static_argnums=(0, 2))(config, jax.random.key(0), dtype)

    tokens = np.random.default_rng(0).integers(0, config.vocab_size, CHECK_TOKENS, dtype=np.int32)
    program = jax.jit(llama_jax.logits, static_argnums=0)

    def on(device: jax.Device, params: llama_jax.LlamaParams) -> np.ndarray:
        with jax.default_device(device):  # the platform to trace for
            return np.asarray(program(config, jax.device_put(params, device), jax.device_put(tokens, device)))

    def float32() -> Row:
        # A GPU would otherwise multiply float32 matrices in TensorFloat-32.
        with jax.default_matmul_precision("highest"):
            expected, got = on(cpu, params(jnp.float32)), on(run.device, params(jnp.float32))
        return compared(got, expected, FLOAT32_TOLERANCE)

    def bfloat16() -> Row:
        with jax.default_matmul_precision("highest"):
            expected = on(cpu, jax.tree.map(lambda x: x.astype(jnp.float32), params(jnp.bfloat16)))
        row = compared(on(run.device, params(jnp.bfloat16)), expected, BFLOAT16_TOLERANCE)
        row["ok"] = row["ok"] and row["top1_agreement"] >= BFLOAT16_AGREEMENT
        theirs = compared(on(cpu, params(jnp.bfloat16)), expected, BFLOAT16_TOLERANCE)
        return row | {"cpu_max_abs_diff": theirs["max_abs_diff"]}

    def greedy() -> Row:
        with jax.default_matmul_precision("highest"):
            here = jax.device_put(params(jnp.float32), run.device)
            return greedy_agreement(config, here, [tokens[0, :5].tolist(), tokens[1, :11].tolist()])

    for check, name in ((float32, "float32 logits"), (bfloat16, "bfloat16 logits"), (greedy, "float32 greedy tokens")):
        yield run.attempt({"check": name}, check)
    for kind in run.plan.formats:
        for count in (1, 3, 48):
            yield run.attempt(
                {"check": "quantized logits", "format": kind, "tokens": count}, partial(quantized, kind, count)
            )


def quantized(kind: str, tokens: int) -> Row:
    """The difference between logits [1, V] of quantized and of dequantized weights."""
    with jax.default_matmul_precision("highest"):
        params = quantize(jax.jit(llama_jax.init, static_argnums=0)(SMALL_GQA, jax.random.key(0)), kind)
        ids = np.random.default_rng(0).integers(0, SMALL_GQA.vocab_size, (1, tokens), dtype=np.int32)
        program = jax.jit(lambda params: llama_jax.logits(SMALL_GQA, params, ids)[:, -1])
        got, expected = program(params), program(jax.jit(dequantize)(params))
    return compared(np.asarray(got), np.asarray(expected), QUANTIZED_TOLERANCE)


def compared(got: np.ndarray, expected: np.ndarray, tolerance: float) -> Row:
    """The difference of two sets of logits [B, T, V]; `tolerance` is relative to the largest expected one."""
    difference, scale = np.abs(got - expected).max(), np.abs(expected).max()
    return {
        "ok": bool(difference <= tolerance * scale),
        "max_abs_diff": number(difference),
        "allowed": number(tolerance * scale),
        "max_abs_logit": number(scale),
        "top1_agreement": float((got.argmax(-1) == expected.argmax(-1)).mean()),
    }


def greedy_agreement(
    config: llama_jax.LlamaConfig, params: llama_jax.LlamaParams, prompts: list[list[int]], new_tokens: int = 16
) -> Row:
    """Whether `generate` returns the same tokens as the argmax of `logits` of the growing sequence."""
    program = jax.jit(llama_jax.logits, static_argnums=0)
    # Padded to one length for a single program: later positions cannot change earlier ones.
    padded = np.zeros((len(prompts), max(map(len, prompts)) + new_tokens), np.int32)
    for row, prompt in zip(padded, prompts, strict=True):
        row[: len(prompt)] = prompt
    rows, ends = np.arange(len(prompts)), np.array([len(prompt) for prompt in prompts])
    for step in range(new_tokens):
        best = np.asarray(program(config, params, padded)).argmax(-1)
        padded[rows, ends + step] = best[rows, ends + step - 1]
    expected = [padded[i, end : end + new_tokens].tolist() for i, end in enumerate(ends)]
    got = [row.tokens for row in llama_jax.generate(config, params, prompts, max_new_tokens=new_tokens)]
    same = [a == b for mine, theirs in zip(got, expected, strict=True) for a, b in zip(mine, theirs, strict=True)]
    return {"ok": all(same), "top1_agreement": sum(same) / len(same)}
