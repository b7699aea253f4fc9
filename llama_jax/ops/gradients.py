"""Functions with a custom gradient: fast in reverse mode, with an error in forward mode that names the option for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import jax
from flax import struct
from jax.custom_derivatives import CustomVJPPrimal, SymbolicZero
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

F = TypeVar("F", bound=Callable[..., Any])


class _StaticResidual(struct.PyTreeNode):
    """Python values that the forward function leaves for the backward function."""

    value: Any = struct.field(pytree_node=False)


def with_gradient(forward: Callable[..., Any], backward: Callable[..., Any]) -> Callable[[F], F]:
    """Decorator of `function(settings, *args)`, with static settings and trees of arrays: sets its gradient.

    A pass with `ComputeOptions(forward_mode=True)` calls other functions, which JAX can differentiate in every mode.

    Args:
      forward: `forward(settings, needed, *args)`, with the result of the function and the residuals. `needed` is the tree of
        `args` with a bool for each array, whether its gradient is needed.
      backward: `backward(settings, needed, residuals, cotangents)`, with a gradient for each argument. None counts as zero,
        also in place of a part of an argument.
    """

    def decorate(function: F) -> F:
        rule: Any = jax.custom_vjp(function, nondiff_argnums=(0,))

        def run_forward(settings: Any, *primals: Any) -> tuple[Any, Any]:
            is_leaf = lambda x: isinstance(x, CustomVJPPrimal)
            leaves, structure = jax.tree.flatten(primals, is_leaf=is_leaf)
            needed = structure, tuple(leaf.perturbed for leaf in leaves)
            args = jax.tree.unflatten(structure, [leaf.value for leaf in leaves])
            out, residuals = forward(settings, jax.tree.unflatten(*needed), *args)
            return out, (residuals, _StaticResidual(needed))

        def run_backward(settings: Any, saved: Any, cotangents: Any) -> Any:
            residuals, needed = saved
            instantiate = lambda x: ad.instantiate_zeros(ad.Zero(x.aval)) if isinstance(x, SymbolicZero) else x
            cotangents = jax.tree.map(instantiate, cotangents, is_leaf=lambda x: isinstance(x, SymbolicZero))
            return backward(settings, jax.tree.unflatten(*needed.value), residuals, cotangents)

        rule.defvjp(run_forward, run_backward, symbolic_zeros=True)

        def call(settings: Any, *args: Any) -> Any:
            return rule(settings, *jax.tree.map(_in_reverse_mode, args))

        return call  # type: ignore[return-value]  # of the same signature

    return decorate


def _flatten(tree: Any) -> tuple[list[Any], Any]:
    """`jax.tree.flatten`, with the structure typed Any: its type lacks some of its methods."""
    return jax.tree.flatten(tree)


def gradient_of_needed(function: Callable[[Any], jax.Array], tree: Any, needed: Any, cotangent: jax.Array) -> Any:
    """The gradient of `function(tree)` by JAX: the tree with None for what is not needed, or None."""
    leaves, structure = _flatten(tree)
    indices = [i for i, is_needed in enumerate(jax.tree.leaves(needed)) if is_needed]
    if not indices:
        return None

    def of_needed(*arrays: jax.Array) -> jax.Array:
        replaced = dict(zip(indices, arrays, strict=True))
        return function(structure.unflatten([replaced.get(i, leaf) for i, leaf in enumerate(leaves)]))

    gradients = dict(zip(indices, jax.vjp(of_needed, *(leaves[i] for i in indices))[1](cotangent), strict=True))
    return structure.unflatten([gradients.get(i) for i in range(len(leaves))])


def _raise_in_forward_mode(*_: Any, **__: Any) -> Any:
    raise TypeError(
        "forward-mode differentiation (jvp, linearize, jacfwd) needs ComputeOptions(forward_mode=True); so do second"
        " derivatives of quantized weights and of 16-bit floats"
    )


_reverse_mode_p = Primitive("reverse_mode")
_reverse_mode_p.def_impl(_raise_in_forward_mode)
_reverse_mode_p.def_abstract_eval(lambda x: x)
mlir.register_lowering(_reverse_mode_p, _raise_in_forward_mode)
ad.deflinear(_reverse_mode_p, lambda cotangent: [cotangent])
batching.defvectorized(_reverse_mode_p)


@jax.custom_jvp
def _in_reverse_mode(x: jax.Array) -> jax.Array:
    """The same array. JAX transposes its tangent in reverse mode, and evaluates it, an error, in forward mode."""
    return x


_in_reverse_mode.defjvp(lambda primals, tangents: (primals[0], _reverse_mode_p.bind(tangents[0])))
