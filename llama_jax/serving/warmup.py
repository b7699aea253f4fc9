"""Compilation of every program of an engine before it serves, so that no request waits for compilation."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np

from llama_jax.serving.options import EngineOptions
from llama_jax.serving.programs import ServingState, StepBatch
from llama_jax.serving.row_sampling import RowSettings
from llama_jax.serving.rows import batch_of, settings_of_rows
from llama_jax.serving.served_model import ServedModel


def warm(
    model: ServedModel,
    state: ServingState,
    options: EngineOptions,
    width: int,
    numbers: tuple[int, ...],
    progress: Callable[[int, int], None],
) -> ServingState:
    """Run all programs on steps without rows, which do not change the state.

    Args:
      width: maximum number of pages per row.
      numbers: possible numbers of drafts.
      progress: called after each program with the number of finished programs and the total.
    """
    calls = list(_warmup_calls(model, options, width, numbers))
    for done, (method, args) in enumerate(calls, 1):
        result = method(state, *args)
        state = jax.block_until_ready(result if isinstance(result, ServingState) else result[0])
        progress(done, len(calls))
    return state


def _warmup_calls(
    model: ServedModel, options: EngineOptions, width: int, numbers: tuple[int, ...]
) -> Iterator[tuple[Callable[..., Any], tuple[Any, ...]]]:
    """Methods of a `ServedModel`, and their arguments after the state."""

    def batch(shape: tuple[int, int]) -> tuple[StepBatch, RowSettings]:
        settings = jax.device_put(settings_of_rows([], shape[0], model.config.vocab_size))
        return batch_of([], shape, width, options.rows), settings

    single_row, *larger_steps = options.steps
    burst = model.burst, (*batch(single_row), 1)
    yield from (burst, burst)  # the second on a state that comes from a program, whose layout may differ
    yield from ((model.step, batch(shape)) for shape in larger_steps)
    yield model.score, (*batch((1, options.chunk_tokens)), np.zeros(options.chunk_tokens, np.int32))
    yield model.enter, (0, np.zeros(model.vocab, bool))
    if model.draft is not None:
        yield model.read_draft, batch(options.steps[-1])[:1]
    for shape in options.steps:
        for number in numbers if shape[0] == shape[1] else ():
            drafts = np.full((shape[0], number if model.draft is None else 2), -1, np.int32)
            yield model.verify, (*batch(shape), drafts, number)
