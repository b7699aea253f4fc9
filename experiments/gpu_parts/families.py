"""A small model of every family: logits, greedy tokens and a training step, compared with float64 on the CPU."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import jax
import numpy as np
from family_models import FAMILY_MODELS, random_params

import llama_jax
from gpu_parts.correctness import compared, greedy_agreement
from gpu_parts.run import Row, Run, number

TOKENS = np.random.default_rng(0).integers(0, 96, (2, 20), dtype=np.int32)
# At most eight layers in float32: some hundred times the rounding error of one operation, 6e-8.
LOGITS_TOLERANCE = 1e-4  # relative to the largest logit
STEP_TOLERANCE = 1e-3  # relative to the norm of the change; Adam also divides by gradients that are mostly rounding errors
LOSS_TOLERANCE = 1e-5  # relative to the loss


def families(run: Run) -> Iterator[Row]:
    """Yield the rows of docs/support.md, three per family: a feature, and whether it is `ok`."""
    for kind in FAMILY_MODELS:
        for feature, measure in (("logits", logits), ("generate", generate), ("training step", training_step)):
            yield run.attempt({"family": kind, "feature": feature}, partial(measure, kind, run.device))


def logits(kind: str, device: jax.Device) -> Row:
    config, params = FAMILY_MODELS[kind], random_params(FAMILY_MODELS[kind])
    program = partial(jax.jit(llama_jax.logits, static_argnums=0), config)
    expected = in_float64(lambda: program(as_float64(params), TOKENS))
    # A GPU would otherwise multiply float32 matrices in TensorFloat-32.
    with jax.default_matmul_precision("highest"):
        return compared(np.asarray(program(*jax.device_put((params, TOKENS), device))), expected, LOGITS_TOLERANCE)


def generate(kind: str, device: jax.Device) -> Row:
    """Compare greedy tokens of a ragged batch with the cache with the argmax of logits of whole rows."""
    config, params = FAMILY_MODELS[kind], random_params(FAMILY_MODELS[kind])
    with jax.default_matmul_precision("highest"), jax.default_device(device):
        prompts = [TOKENS[0, :5].tolist(), TOKENS[1, :11].tolist()]
        return greedy_agreement(config, jax.device_put(params, device), prompts, new_tokens=8)


def training_step(kind: str, device: jax.Device) -> Row:
    """Compare the loss and the change of the parameters of an AdamW step."""
    config, params = FAMILY_MODELS[kind], random_params(FAMILY_MODELS[kind])
    optimizer = llama_jax.make_optimizer(llama_jax.OptimizerSettings(learning_rate=1e-2, schedule="constant"), 10)

    @jax.jit
    def step(params: llama_jax.LlamaParams, tokens: Any) -> Any:
        state = llama_jax.init_state(optimizer, params)
        state, metrics = llama_jax.train_step(config, optimizer, state, llama_jax.Batch(tokens))
        change = jax.tree.map(lambda after, before: (after - before).ravel(), state.params, params)
        return metrics["loss"], jax.numpy.concatenate(jax.tree.leaves(change))

    loss, change = in_float64(lambda: step(as_float64(params), TOKENS))
    with jax.default_matmul_precision("highest"):
        found_loss, found = step(*jax.device_put((params, TOKENS), device))
    difference = np.linalg.norm(np.asarray(found) - change) / np.linalg.norm(change)
    loss_difference = abs(float(found_loss) - float(loss)) / float(loss)
    return {
        "ok": bool(difference <= STEP_TOLERANCE and loss_difference <= LOSS_TOLERANCE),
        "loss": number(found_loss),
        "loss_difference": number(loss_difference),
        "change_difference": number(difference),
        "allowed": STEP_TOLERANCE,
    }


def in_float64(compute: Any) -> Any:
    """The result of a function on the CPU in 64 bits, as NumPy arrays."""
    with jax.enable_x64(True), jax.default_device(jax.devices("cpu")[0]):
        return jax.tree.map(np.asarray, compute())


def as_float64(params: llama_jax.LlamaParams) -> llama_jax.LlamaParams:
    return jax.tree.map(lambda leaf: jax.numpy.asarray(np.asarray(leaf), jax.numpy.float64), params)
