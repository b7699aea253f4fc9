"""Programs compiled before they are run: lowered one after the other, and compiled by several threads meanwhile."""

from __future__ import annotations

import os
from collections.abc import Callable, Hashable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any

import jax
import numpy as np

from llama_jax.serving.model import ServedModel
from llama_jax.serving.programs import Programs

MOST_THREADS = 8  # of which each compiles a program, and holds what the compiler needs for it


def compile_ahead(model: ServedModel, run: Callable[[ServedModel], None], progress: Callable[[int, int], None]) -> None:
    """Compile every program that `run` calls, of a model on one device: nothing is executed.

    Tracing and lowering are Python's, which one thread at a time can do; a compiler, or reading what it made the last time,
    leaves the other threads alone. The programs then find what was compiled, for JAX keeps it by what was lowered.

    Args:
      run: makes the calls, of a model whose programs give shapes in place of arrays.
      progress: told how many programs are compiled, of how many.
    """
    with ThreadPoolExecutor(min(MOST_THREADS, os.cpu_count() or 1), "compiling") as threads:
        lowering = _Lowering(model, threads)
        run(model.with_programs(Programs(*(partial(lowering.call, program) for program in model.programs))))
        for done, compiled in enumerate(lowering.compiling, 1):
            compiled.result()
            progress(done, len(lowering.compiling))


class _Lowering:
    """What was lowered, and is being compiled."""

    def __init__(self, model: ServedModel, threads: ThreadPoolExecutor) -> None:
        self.compiling: list[Future[Any]] = []
        self._model = model
        self._threads = threads
        self._results: dict[Hashable, Any] = {}

    def call(self, program: Any, *args: Any) -> Any:
        """The shapes that a program gives, which is compiled if it was not yet."""
        leaves, structure = jax.tree.flatten([arg for arg in args if arg is not self._model.params])
        key = program, structure, tuple(map(_kind, leaves))
        if key not in self._results:
            lowered = program.lower(*args)
            self.compiling.append(self._threads.submit(lowered.compile))
            self._results[key] = lowered.out_info
        return self._results[key]


def _kind(leaf: Any) -> Hashable:
    """What of an argument a program depends on: the shape and dtype of an array, and the whole of anything else."""
    return (leaf.shape, leaf.dtype) if isinstance(leaf, (jax.Array, jax.ShapeDtypeStruct, np.ndarray, np.generic)) else leaf
