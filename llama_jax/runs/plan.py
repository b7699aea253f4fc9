"""The plan of a run: its steps, batch and length where they follow from its data, and about how long it will take."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

from llama_jax.analysis.hardware import find_hardware
from llama_jax.ops import project
from llama_jax.parallel.mesh import MeshSizes
from llama_jax.runs.log import duration
from llama_jax.runs.recipe import Recipe

if TYPE_CHECKING:
    from llama_jax.runs.tasks.task import Task

EPOCHS = 3.0  # the usual number of passes in fine-tuning, where a recipe names neither steps nor epochs
STEPS_PER_EPOCH = 8  # at least; else few examples would give a handful of updates
LENGTH_MULTIPLE = 16  # of the tokens of a row
WARMUP_SHARE = 10  # the warm-up is at most one in so many steps
UTILIZATION = 0.5  # usual share of the FLOP/s of a datasheet, or of a large matrix product, that a step reaches
FROM_DATA = frozenset(
    {"steps", "epochs", "batch", "length", "optimizer.warmup_steps"}
)  # settings that `fit_to_data` changes


def fit_to_data(recipe: Recipe, mesh: MeshSizes, longest: int, rows: Callable[[int], int], group: int = 1) -> Recipe:
    """The recipe with its steps, and with no longer rows and no larger a batch than the data need; a recipe with `steps` is
    returned as it is.

    Args:
      mesh: divides the batch and the length, which remain its multiples.
      longest: predicted tokens of the longest example.
      rows: of an epoch, given their length.
      group: the batch remains a multiple of it.
    """
    if recipe.steps:
        return recipe
    multiple = LENGTH_MULTIPLE * mesh.context
    length = min(recipe.length, -(-max(longest, 1) // multiple) * multiple)
    count, batch, least = rows(length), recipe.batch, group * recipe.accumulate * mesh.rows
    while count < STEPS_PER_EPOCH * batch and batch % (2 * least) == 0:
        batch //= 2
    steps = max(1, math.ceil((recipe.epochs or EPOCHS) * count / batch))
    warmup = min(recipe.optimizer.warmup_steps, steps // WARMUP_SHARE)
    optimizer = replace(recipe.optimizer, warmup_steps=warmup)
    return replace(recipe, steps=steps, epochs=0.0, batch=batch, length=length, optimizer=optimizer)


def plan_of(recipe: Recipe, task: Task, devices: int) -> str:
    """A line with the steps of a run, and a guess how long they will take: by the FLOPs of the task."""
    steps = f"plan: {recipe.steps:,} steps of {task.tokens:,} tokens"
    if recipe.rewards is not None:  # sampling takes most of the time, and its FLOPs say little about it
        return steps
    hardware = find_hardware(jax.devices()[0].device_kind)
    peak = matmul_flops(recipe.dtype) if hardware is None else hardware.flops
    seconds = recipe.steps * task.flops / (UTILIZATION * peak * devices)
    return f"{steps}, about {duration(seconds)} at {UTILIZATION:.0%} of {peak / 1e9:,.0f} GFLOP/s, besides evaluations"


def matmul_flops(dtype: str, repetitions: int = 5) -> float:
    """FLOP/s of a large matrix product on the first device, for devices without a datasheet, such as CPUs: the fastest of
    some repetitions."""
    rows, size = 512, 1024
    x, weight = jnp.ones((rows, size), dtype), jnp.ones((size, size), dtype)
    multiply = jax.jit(project)
    multiply(x, weight).block_until_ready()
    seconds = []
    for _ in range(repetitions):
        began = time.perf_counter()
        multiply(x, weight).block_until_ready()
        seconds.append(time.perf_counter() - began)
    return 2 * rows * size * size / min(seconds)
