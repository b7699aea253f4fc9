"""Programs compiled before they are run: lowered one after the other, while several threads compile."""

from __future__ import annotations

import os
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from functools import partial
from typing import Any

import jax
import numpy as np

from llama_jax.serving.model import ServedModel
from llama_jax.serving.programs import Programs

MOST_THREADS = 8  # each compiles one program, and holds the memory that the compiler needs


def compile_ahead(
    model: ServedModel,
    steps: Callable[[ServedModel], Sequence[Callable[[], Any]]],
    progress: Callable[[int, int], None],
) -> None:
    """Compile every program that `steps` call, for a model on one device: nothing is executed.

    Tracing and lowering hold Python's lock, so one thread at a time can do them; compiling, or loading from the compilation
    cache, does not block other threads. JAX later finds the compiled programs, because it keeps them by their lowered form.

    Args:
      steps: gives functions that make the calls, on a model whose programs return shapes instead of arrays.
      progress: called with the number of compiled programs and the total, which is at most the steps until all are lowered.
    """
    with ThreadPoolExecutor(min(MOST_THREADS, os.cpu_count() or 1), "compiling") as threads:
        lowering = _Lowering(model, threads)
        calls = steps(model.with_programs(Programs(*(partial(lowering.call, program) for program in model.programs))))
        for left, step in zip(reversed(range(len(calls))), calls, strict=True):
            step()
            progress(sum(map(Future.done, lowering.compiling)), len(lowering.compiling) + left)
        for compiled in as_completed(lowering.compiling):
            compiled.result()
            progress(sum(map(Future.done, lowering.compiling)), len(lowering.compiling))


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
            lowered = program.lower(*args)
            self.compiling.append(self._threads.submit(lowered.compile))
            self._results[key] = lowered.out_info
        return self._results[key]


def _kind(leaf: Any) -> Hashable:
    """The part of an argument that a program depends on: shape and dtype of an array, all of anything else."""
    return (leaf.shape, leaf.dtype) if isinstance(leaf, (jax.Array, jax.ShapeDtypeStruct, np.ndarray, np.generic)) else leaf
