"""The weights of one layer out of the stacks of all layers."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from llama_jax.ops.layers import PRODUCT, project
from llama_jax.ops.platform import for_cpu, pack_bits, unpack_bits


class MixedStack(struct.PyTreeNode):
    """Matrices [L, *out, D] in several stacks: one for each kind, where that differs from layer to layer; or one for each
    layer, see `apart`.

    Attributes:
      stacks: arrays or quantized weights [l, *out, D].
      places: for each layer, in which stack it is and where.
    """

    stacks: tuple[Any, ...]
    places: tuple[tuple[int, int], ...] = struct.field(pytree_node=False)

    @property
    def shape(self) -> tuple[int, ...]:
        """[L, *out, D]."""
        return (len(self.places), *self.stacks[0].shape[1:])

    @property
    def ndim(self) -> int:
        """The number of axes, with that of layers."""
        return len(self.shape)

    @property
    def dtype(self) -> Any:
        """The dtype of the computation."""
        return self.stacks[0].dtype

    @property
    def sharding(self) -> Any:
        """The sharding of the first stack, and so of all."""
        return self.stacks[0].sharding

    def decoded(self) -> Any:
        """As one array."""
        dense = [stack.decoded() if hasattr(stack, "decoded") else stack for stack in self.stacks]
        return (np if isinstance(dense[0], np.ndarray) else jnp).stack([dense[stack][at] for stack, at in self.places])


class LayerWeight(struct.PyTreeNode):
    """The matrix of one layer, or of one of its experts, which is read where it lies in a stack.

    Attributes:
      stack: [L, *out, D], an array, a `QuantizedWeight` or a `MixedStack`.
      layer: int32[].
      number: int32[], of an expert: the stack is then [L, E, N, D].
    """

    stack: Any
    layer: jax.Array
    number: jax.Array | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """[*out, D]."""
        return self.stack.shape[1 if self.number is None else 2 :]

    @property
    def ndim(self) -> int:
        """The number of axes of the matrix."""
        return len(self.shape)

    @property
    def dtype(self) -> Any:
        """The dtype of the computation."""
        return self.stack.dtype

    def expert(self, number: jax.Array) -> LayerWeight:
        """The matrix of an expert of a layer of them."""
        return self.replace(number=number)

    def project(self, x: jax.Array, out_dtype: Any) -> jax.Array:
        """See `layers.project`."""
        if isinstance(self.stack, MixedStack):
            return self._project_mixed(x, out_dtype)
        *out, columns = self.stack.shape
        axes, at = (1, self.layer) if self.number is None else (2, self.layer * out[1] + self.number)
        shape = math.prod(out[:axes]), math.prod(out[axes:])
        flat = self.stack.reshape(*shape, columns)
        product = _project_in_place(jnp.dtype(out_dtype), x.reshape(-1, columns), flat, at)
        return checkpoint_name(product.reshape(*x.shape[:-1], *out[axes:]), PRODUCT)

    def decoded(self) -> jax.Array:
        """The matrix itself; of a magnitude's rows, never for a matmul."""

        def of_kind(stack: Any, at: jax.Array) -> jax.Array:
            weight = expert_of(stack, at)
            weight = weight if self.number is None else expert_of(weight, self.number)
            return weight.decoded() if hasattr(weight, "decoded") else weight

        return self._by_kind(of_kind) if isinstance(self.stack, MixedStack) else of_kind(self.stack, self.layer)

    def _project_mixed(self, x: jax.Array, out_dtype: Any) -> jax.Array:
        def of_kind(stack: Any, at: jax.Array) -> jax.Array:
            weight = matrix_of(stack, at)
            return project(x, weight if self.number is None else expert_of(weight, self.number), out_dtype=out_dtype)

        return self._by_kind(of_kind)

    def _by_kind(self, of_kind: Callable[[Any, jax.Array], jax.Array]) -> jax.Array:
        """What a function gives for the stack that has the layer, and its place there."""
        which, at = (jnp.asarray(numbers, jnp.int32)[self.layer] for numbers in zip(*self.stack.places, strict=True))
        return lax.switch(which, [partial(of_kind, stack) for stack in self.stack.stacks], at)


def expert_of(weight: Any, group: jax.Array | int) -> Any:
    """The matrix of a group, of an array or a weight [E, N, K]."""
    if hasattr(weight, "expert"):
        return weight.expert(group)
    if isinstance(group, int):
        return jax.tree.map(lambda array: array[group], weight)
    take = partial(lax.dynamic_index_in_dim, index=group, keepdims=False)
    return unpack_bits(jax.tree.map(take, pack_bits(weight)))


@for_cpu("multiply_group")
def multiply_group(x: jax.Array, weight: Any, group: jax.Array, out_dtype: Any) -> jax.Array:
    """[R, K] by the matrix [N, K] of one group: [R, N].

    Args:
      weight: [E, N, K], an array or a quantized weight.
    """
    return project(x, expert_of(weight, group), out_dtype=out_dtype)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _project_in_place(out_dtype: Any, x: jax.Array, stack: Any, layer: jax.Array) -> jax.Array:
    """[R, D] by the matrix of a layer [L, N, D]."""
    return multiply_group(x, stack, layer, out_dtype)


def _backward(out_dtype: Any, residuals: Any, gradient: jax.Array) -> tuple[Any, ...]:
    x, stack, layer = residuals
    if hasattr(stack, "project"):
        weight = expert_of(stack, layer)
        return (*jax.vjp(lambda x: project(x, weight, out_dtype=out_dtype), x)[1](gradient), None, None)
    of_slice = lambda x, stack: project(x, expert_of(stack, layer), out_dtype=out_dtype)
    return (*jax.vjp(of_slice, x, stack)[1](gradient), None)


_project_in_place.defvjp(
    lambda out_dtype, x, stack, layer: (_project_in_place(out_dtype, x, stack, layer), (x, stack, layer)), _backward
)


@for_cpu("matrix_of")
def matrix_of(stack: Any, layer: int | jax.Array) -> Any:
    """The matrix of a layer, or another parameter of it.

    Args:
      stack: [L, *out, D], an array, a `QuantizedWeight` or a `MixedStack`.
      layer: int32[], or a number that is known when the program is traced: XLA then reads the slice in place.
    """
    if not isinstance(stack, MixedStack):
        return expert_of(stack, layer)
    if not isinstance(layer, int):
        return LayerWeight(stack, layer)
    which, at = stack.places[layer]
    return matrix_of(stack.stacks[which], at)


@for_cpu("is_held")
def is_held(leaf: Any, *, is_constant: bool) -> bool:
    """Whether a scan over layers reads a matrix by its index, and not as a slice that is an input of each turn.

    Args:
      is_constant: nothing is differentiated for the matrix. The gradient of what is read by its index would be added up in
        an array of all layers at each turn.
    """
    return isinstance(leaf, MixedStack)


def split(
    stacked: Any, held: Callable[[tuple[Any, ...], Any], bool]
) -> tuple[list[Any], Callable[[list[Any], int | jax.Array], Any]]:
    """What a scan over layers has as inputs of each turn, and the function that makes a layer of one turn's and its number.

    Args:
      stacked: a tree of arrays and weights with a leading axis L.
      held: given the path and the leaf, whether it is read by `matrix_of`.
    """
    is_leaf = lambda leaf: hasattr(leaf, "planes") or isinstance(leaf, MixedStack)  # a quantized weight, or several stacks
    leaves, structure = jax.tree.flatten_with_path(stacked, is_leaf=is_leaf)
    stays = [held(path, leaf) for path, leaf in leaves]

    def layer_of(sliced: list[Any], layer: int | jax.Array) -> Any:
        rest = iter(sliced)
        leaves_of_layer = [
            matrix_of(leaf, layer) if own else next(rest) for (_, leaf), own in zip(leaves, stays, strict=True)
        ]
        return jax.tree.unflatten(structure, leaves_of_layer)

    return [leaf for (_, leaf), own in zip(leaves, stays, strict=True) if not own], layer_of


def apart(stack: Any) -> MixedStack:
    """The same matrices [L, *out, D], each layer's in arrays of its own, as a GPU decodes fastest.

    XLA for GPUs copies a slice of an array that a loop carries before it multiplies by it (8B on an H100: 117 MB for each of
    a layer's larger matrices, and of int8 four times its bytes); an array of its own is read where it lies.
    """
    if isinstance(stack, MixedStack):
        layers = [(stack.stacks[which], at) for which, at in stack.places]
    else:
        layers = [(stack, layer) for layer in range(stack.shape[0])]
    alone = tuple(jax.tree.map(partial(_alone, layer=at), one) for one, at in layers)
    return MixedStack(alone, tuple((layer, 0) for layer in range(len(alone))))


def _alone(array: Any, layer: int) -> Any:
    """A layer of an array [L, ...], or of its shape, as [1, ...]."""
    if isinstance(array, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct((1, *array.shape[1:]), array.dtype, sharding=array.sharding)
    return array[layer : layer + 1]


def layer_of(stacked: Any, layer: int) -> Any:
    """One layer of a tree of arrays and weights with a leading axis L."""
    return split(stacked, lambda path, leaf: True)[1]([], layer)
