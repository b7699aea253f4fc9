"""What a forward pass saves for the backward pass."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import jax

from llama_jax.ops import cpu
from llama_jax.ops.cpu import for_cpu

F = TypeVar("F", bound=Callable[..., Any])


def recomputed(function: F) -> F:
    """The same function of arrays, which saves only its arguments for the backward pass and computes the rest again.

    For what is cheap to compute and large to save: elementwise functions and softmaxes (Chen et al. 2016, section 3). It
    can be differentiated in every way that JAX knows, but for 16-bit numbers on a CPU: those in reverse mode only.
    """

    def variant(plain: Callable[..., Any], *args: Any) -> Any:
        return cpu.recomputed(function)(*args) if cpu.is_short(*jax.tree.leaves(args)) else plain(*args)

    # No common subexpressions to be kept apart: layers are scanned where they are trained.
    return for_cpu(variant)(jax.checkpoint(function, prevent_cse=False))  # type: ignore[return-value]
