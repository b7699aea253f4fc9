"""Programs compiled before they are run: lowered one after the other, while several threads compile."""

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

MOST_THREADS = 8  # each compiles one program, and holds the memory that the compiler needs


def compile_ahead(model: ServedModel, run: Callable[[ServedModel], Any], progress: Callable[[int, int], None]) -> None:
    """Compile every program that `run` calls, for a model on one device: nothing is executed.

    Tracing and lowering hold Python's lock, so one thread at a time can do them; compiling, or loading from the compilation
    cache, does not block other threads. A program whose executable is stored is not even traced.

    Args:
      run: makes the calls, on a model whose programs return shapes instead of arrays.
      progress: called with the number of compiled programs and the total.
    """
    with ThreadPoolExecutor(min(MOST_THREADS, os.cpu_count() or 1), "compiling") as threads:
        lowering = _Lowering(model, threads)
        run(model.with_programs(Programs(*(partial(lowering.call, program) for program in model.programs))))
        for done, compiled in enumerate(lowering.compiling, 1):
            compiled.result()
            progress(done, len(lowering.compiling))


class _Lowering:
    """The programs that were lowered and are being compiled."""

    def __init__(self, model: ServedModel, threads: ThreadPoolExecutor) -> None:
        self.compiling: list[Future[Any]] = []
        self._model = model
        self._threads = threads
        self._results: dict[Hashable, Any] = {}

    def call(self, program: Any, *args: Any) -> Any:
        """The shapes of a program's results; the program is compiled if it was not yet."""
        leaves, structure = jax.tree.flatten([arg for arg in args if arg is not self._model.params])
        key = program, structure, tuple(map(_kind, leaves))
        if key not in self._results:
            self._results[key], compile_or_load = program.ahead(*args)
            self.compiling.append(self._threads.submit(compile_or_load))
        return self._results[key]


def _kind(leaf: Any) -> Hashable:
    """The part of an argument that a program depends on: shape and dtype of an array, all of anything else."""
    return (leaf.shape, leaf.dtype) if isinstance(leaf, (jax.Array, jax.ShapeDtypeStruct, np.ndarray, np.generic)) else leaf
