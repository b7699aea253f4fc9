"""Linear maps with a custom transpose: custom gradients for functions that also support forward mode.

A `jax.custom_vjp` function has no forward mode. The tangent of a `jax.custom_jvp` function is transposed by JAX, which
would save the inputs of each iteration of its loops. A custom JVP rule whose tangent is a `linear_map` has both: forward
mode runs `function`, reverse mode `transposed`, and second derivatives are forward mode over either.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero
from jax.extend.core import Primitive, jaxpr_as_fun
from jax.interpreters import ad, batching, mlir

Flat = Callable[..., Any]  # takes arrays: first the residuals, then those in which the map is linear


def linear_map(
    function: Callable[[Any, Any], Any], transposed: Callable[[Any, Any], Any], residuals: Any, changes: Any
) -> Any:
    """`function(residuals, changes)`, transposed by `transposed(residuals, cotangents)`.

    Args:
      function: linear in the second argument.
      transposed: its transpose, with results of the shapes and dtypes of `changes`.
      residuals: a tree of arrays. Reverse mode with respect to it fails if a loop reads it.
      changes: a tree of tangents. A `SymbolicZero` (from rules with `symbolic_zeros`) counts as zeros, and its cotangent is
        dropped.
    """
    fixed, structure = jax.tree.flatten(residuals)
    inputs, input_structure = flattened(changes)
    is_zero = [isinstance(x, SymbolicZero) for x in inputs]
    moving = [x for x, zero in zip(inputs, is_zero, strict=True) if not zero]
    output_structure: Any = None

    def forward(*arrays: jax.Array) -> list[jax.Array]:
        nonlocal output_structure
        given = iter(arrays[len(fixed) :])
        rest = [_zeros(x) if zero else next(given) for x, zero in zip(inputs, is_zero, strict=True)]
        out = function(jax.tree.unflatten(structure, arrays[: len(fixed)]), jax.tree.unflatten(input_structure, rest))
        leaves, output_structure = jax.tree.flatten(out)
        return leaves

    def backward(*arrays: jax.Array) -> list[jax.Array]:
        cotangents = jax.tree.unflatten(output_structure, arrays[len(fixed) :])
        gradients = transposed(jax.tree.unflatten(structure, arrays[: len(fixed)]), cotangents)
        return [x for x, zero in zip(input_structure.flatten_up_to(gradients), is_zero, strict=True) if not zero]

    outputs = _bind(forward, backward, fixed, moving)
    return jax.tree.unflatten(output_structure, outputs)


def directional(function: Callable[[Any], jax.Array], tree: Any, tangents: Any) -> list[jax.Array]:
    """JAX's derivative of `function(tree)` along tangents, as a list of one; an empty list if all are zero.

    JAX also transposes it, and then recomputes `function` instead of saving its intermediate values.

    Args:
      tangents: a `SymbolicZero` or a tangent for each leaf of the tree.
    """
    leaves, structure = flattened(tree)
    changes = structure.flatten_up_to(tangents)
    moved = [i for i, change in enumerate(changes) if not isinstance(change, SymbolicZero)]
    if not moved:
        return []
    of_moved = lambda *some: function(structure.unflatten(replaced(leaves, moved, some)))
    return [jax.jvp(jax.checkpoint(of_moved), [leaves[i] for i in moved], [changes[i] for i in moved])[1]]


def flattened(tree: Any) -> tuple[list[Any], Any]:
    """`jax.tree.flatten`, with the structure typed Any: its type lacks some of its methods."""
    return jax.tree.flatten(tree)


def _zeros(tangent: SymbolicZero) -> Any:
    return ad.instantiate_zeros(ad.Zero(tangent.aval))


def replaced(arrays: Sequence[Any], indices: Sequence[int], by: Sequence[Any]) -> list[Any]:
    """The arrays, with those at `indices` replaced."""
    outputs = list(arrays)
    for i, array in zip(indices, by, strict=True):
        outputs[i] = array
    return outputs


linear_map_p = Primitive("linear_map")
linear_map_p.multiple_results = True


def _bind(function: Flat, transposed: Flat, fixed: Sequence[Any], moving: Sequence[Any]) -> list[jax.Array]:
    jaxpr = jax.make_jaxpr(function)(*fixed, *moving)  # now: lowering happens outside the contexts of tracing
    return linear_map_p.bind(*fixed, *moving, jaxpr=jaxpr, functions=(function, transposed), residuals=len(fixed))


@linear_map_p.def_impl
def _compute(*arrays: jax.Array, jaxpr: Any, functions: Any, residuals: int) -> list[jax.Array]:
    return jaxpr_as_fun(jaxpr)(*arrays)


@linear_map_p.def_abstract_eval
def _output_shapes(*arrays: Any, jaxpr: Any, functions: Any, residuals: int) -> list[Any]:
    return jaxpr.out_avals


def _derivative(primals: Sequence[Any], tangents: Sequence[Any], **settings: Any) -> tuple[Any, Any]:
    run, residuals = jaxpr_as_fun(settings["jaxpr"]), settings["residuals"]
    out = linear_map_p.bind(*primals, **settings)
    moved = [i for i, tangent in enumerate(tangents[:residuals]) if not isinstance(tangent, ad.Zero)]
    changes: list[list[jax.Array]] = []
    if not all(isinstance(tangent, ad.Zero) for tangent in tangents[residuals:]):
        moving = map(ad.instantiate_zeros, tangents[residuals:])
        changes.append(linear_map_p.bind(*primals[:residuals], *moving, **settings))
    if moved:
        of_residuals = lambda *some: run(*replaced(primals, moved, some))
        changes.append(jax.jvp(of_residuals, [primals[i] for i in moved], [tangents[i] for i in moved])[1])
    return out, [sum(terms[1:], terms[0]) for terms in zip(*changes, strict=True)]


def _transpose(cotangents: Sequence[Any], *arrays: Any, jaxpr: Any, functions: Any, residuals: int) -> list[Any]:
    fixed = arrays[:residuals]
    gradients = _bind(functions[1], functions[0], fixed, list(map(ad.instantiate_zeros, cotangents)))
    is_needed = map(ad.is_undefined_primal, arrays[residuals:])
    return [None] * residuals + [x if some else None for some, x in zip(is_needed, gradients, strict=True)]


def _batched(arrays: Sequence[Any], axes: Sequence[Any], *, jaxpr: Any, functions: Any, residuals: int) -> tuple[Any, Any]:
    count = next(x.shape[axis] for x, axis in zip(arrays, axes, strict=True) if axis is not None)
    moved = [x if axis is None else jnp.moveaxis(x, axis, 0) for x, axis in zip(arrays, axes, strict=True)]
    fixed = [None if axis is None else 0 for axis in axes[:residuals]]
    moving = [
        jnp.broadcast_to(x, (count, *jnp.shape(x))) if axis is None else x
        for x, axis in zip(moved[residuals:], axes[residuals:], strict=True)
    ]

    def over_batch(function: Flat) -> Flat:
        def run(*arrays: jax.Array) -> Any:
            return jax.vmap(function, in_axes=(*fixed, *[0] * (len(arrays) - residuals)))(*arrays)

        return run

    function, transposed = map(over_batch, functions)
    outputs = _bind(function, transposed, moved[:residuals], moving)
    return outputs, [0] * len(outputs)


ad.primitive_jvps[linear_map_p] = _derivative
ad.primitive_transposes[linear_map_p] = _transpose
batching.primitive_batchers[linear_map_p] = _batched
mlir.register_lowering(linear_map_p, mlir.lower_fun(_compute, multiple_results=True))
