"""Running every program of an engine once, so that none is compiled while a request waits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import jax
import numpy as np

from llama_jax.serving.ahead import compile_ahead
from llama_jax.serving.model import ServedModel
from llama_jax.serving.options import EngineOptions
from llama_jax.serving.programs import RowSettings, ServingState, StepBatch
from llama_jax.serving.rows import batch_of, settings_of

Step = Callable[[ServedModel, ServingState], tuple[ServingState, Any]]


def warm(
    model: ServedModel,
    state: ServingState,
    options: EngineOptions,
    width: int,
    numbers: tuple[int, ...],
    progress: Callable[[int, int], None],
) -> ServingState:
    """Run all programs on steps without rows, which leave the state as it is.

    Args:
      width: pages that a row can have.
      numbers: of tokens that rows may draft.
      progress: called after each program with the number done and the total.
    """
    steps = list(_steps(model, options, width, numbers))

    def run(model: ServedModel) -> ServingState:
        found = state
        for done, step in enumerate(steps, 1):
            found, _ = step(model, found)
            if not ahead:
                jax.block_until_ready(found)
                progress(done, len(steps))
        return found

    ahead = model.layout.mesh is None  # over a mesh only a compiled program knows the sharding of its results
    if ahead:
        compile_ahead(model, run, progress)
    return jax.block_until_ready(run(model))


def _steps(model: ServedModel, options: EngineOptions, width: int, numbers: tuple[int, ...]) -> Iterator[Step]:
    def batch(shape: tuple[int, int]) -> tuple[StepBatch, RowSettings]:
        settings = jax.device_put(settings_of([], shape[0], model.config.vocab_size))
        return batch_of([], shape, width, options.rows), settings

    one, *others = options.steps
    first = lambda model, state: model.burst(state, *batch(one), 1)
    yield first
    yield first  # of a state that comes from a program: the first may lie otherwise
    for shape in others:
        yield partial(_step, batch(shape))
    nothing = np.zeros(options.piece, np.int32)
    yield lambda model, state: model.score(state, *batch((1, options.piece)), nothing)
    yield lambda model, state: (model.enter(state, 0, np.zeros(model.vocab, bool)), None)
    if model.draft is not None:
        yield lambda model, state: (model.read_draft(state, batch(options.steps[-1])[0]), None)
    for shape in options.steps:
        for number in numbers if shape[0] == shape[1] else ():
            told = np.full((shape[0], number if model.draft is None else 2), -1, np.int32)
            yield partial(_verify, batch(shape), told, number)


def _step(batch: tuple[StepBatch, RowSettings], model: ServedModel, state: ServingState) -> Any:
    return model.step(state, *batch)


def _verify(
    batch: tuple[StepBatch, RowSettings], told: np.ndarray, number: int, model: ServedModel, state: ServingState
) -> Any:
    return model.verify(state, *batch, told, number)
