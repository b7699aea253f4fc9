"""Compilation of every program of an engine before it serves, so that no request waits for compilation.

On one device programs are lowered one after the other while several threads compile; then each program is run once.
"""

from __future__ import annotations

import contextvars
import os
from collections.abc import Callable, Hashable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any

import jax
import numpy as np

from llama_jax.serving.options import EngineOptions
from llama_jax.serving.programs import Programs, ServingState, StepBatch
from llama_jax.serving.row_sampling import RowSettings
from llama_jax.serving.rows import batch_of, settings_of
from llama_jax.serving.served_model import ServedModel

MAX_THREADS = 8  # each compiles one program, and takes the compiler's memory


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
    calls = list(_calls(model, options, width, numbers))
    ahead = model.static.sharding.mesh is None  # over a mesh only a compiled program knows the sharding of its results

    def run(model: ServedModel) -> ServingState:
        current = state
        for done, (method, args) in enumerate(calls, 1):
            result = getattr(model, method)(current, *args)
            current = result if isinstance(result, ServingState) else result[0]
            if not ahead:
                jax.block_until_ready(current)
                progress(done, len(calls))
        return current

    if ahead:
        compile_ahead(model, run, progress)
    return jax.block_until_ready(run(model))


def _calls(
    model: ServedModel, options: EngineOptions, width: int, numbers: tuple[int, ...]
) -> Iterator[tuple[str, tuple[Any, ...]]]:
    """Methods of a `ServedModel`, and their arguments after the state."""

    def batch(shape: tuple[int, int]) -> tuple[StepBatch, RowSettings]:
        settings = jax.device_put(settings_of([], shape[0], model.config.vocab_size))
        return batch_of([], shape, width, options.rows), settings

    one, *others = options.steps
    burst = "burst", (*batch(one), 1)
    yield from (burst, burst)  # the second on a state that comes from a program, whose layout may differ
    yield from (("step", batch(shape)) for shape in others)
    yield "score", (*batch((1, options.chunk)), np.zeros(options.chunk, np.int32))
    yield "enter", (0, np.zeros(model.vocab, bool))
    if model.draft is not None:
        yield "read_draft", batch(options.steps[-1])[:1]
    for shape in options.steps:
        for number in numbers if shape[0] == shape[1] else ():
            drafts = np.full((shape[0], number if model.draft is None else 2), -1, np.int32)
            yield "verify", (*batch(shape), drafts, number)


def compile_ahead(model: ServedModel, run: Callable[[ServedModel], Any], progress: Callable[[int, int], None]) -> None:
    """Compile every program that `run` calls, for a model on one device, without executing it.

    Tracing and lowering hold the GIL, so only one thread can do them; compiling, or loading from the compilation cache, does
    not block other threads. A program with a stored executable is not even traced.

    Args:
      run: makes the calls, on a model whose programs return shapes instead of arrays.
      progress: called with the number of compiled programs and the total.
    """
    compiling: list[Future[Any]] = []
    results: dict[Hashable, Any] = {}

    def lower(program: Any, *args: Any) -> Any:
        """The shapes of a program's results; compiles the program if necessary."""
        leaves, structure = jax.tree.flatten([arg for arg in args if arg is not model.params])
        key = program, structure, tuple(map(_signature, leaves))
        if key not in results:
            results[key], compile_or_load = program.lower_ahead(*args)
            # In this context, so that the caller's `record_backends` sees the backends of loaded programs.
            compiling.append(threads.submit(contextvars.copy_context().run, compile_or_load))
        return results[key]

    with ThreadPoolExecutor(min(MAX_THREADS, os.cpu_count() or 1), "compiling") as threads:
        run(model.with_programs(Programs(*(partial(lower, program) for program in model.programs))))
        for done, compiled in enumerate(compiling, 1):
            compiled.result()
            progress(done, len(compiling))


def _signature(leaf: Any) -> Hashable:
    """The part of an argument that a program depends on: shape and dtype of an array, all of anything else."""
    return (leaf.shape, leaf.dtype) if isinstance(leaf, (jax.Array, jax.ShapeDtypeStruct, np.ndarray, np.generic)) else leaf
