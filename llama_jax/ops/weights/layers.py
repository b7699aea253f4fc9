"""One layer's weights, read in place from the stacked weights of all layers."""

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
from jax.custom_derivatives import SymbolicZero
from jaxtyping import Array, Float, Int

from llama_jax.ops.layers import PRODUCT, project
from llama_jax.ops.linear_map import directional, linear_map
from llama_jax.ops.platform import for_cpu, pack_bits, unpack_bits


class MixedStack(struct.PyTreeNode):
    """Layer matrices in several stacks, one per format or one per layer (`unstack`). It stands for [L, *out, D].

    Attributes:
      stacks: arrays or quantized weights [l, *out, D].
      places: for each layer, (stack, index in it).
    """

    stacks: tuple[Any, ...]
    places: tuple[tuple[int, int], ...] = struct.field(pytree_node=False)

    @property
    def shape(self) -> tuple[int, ...]:
        """[L, *out, D]."""
        return (len(self.places), *self.stacks[0].shape[1:])

    @property
    def ndim(self) -> int:
        """The number of axes, including the axis of layers."""
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
        """Dequantized, as one array [L, *out, D]."""
        dense = [stack.decoded() if hasattr(stack, "decoded") else stack for stack in self.stacks]
        return (np if isinstance(dense[0], np.ndarray) else jnp).stack([dense[stack][at] for stack, at in self.places])


class LayerWeight(struct.PyTreeNode):
    """A reference to one layer's (or expert's) matrix inside a stack, multiplied without copying it.

    Attributes:
      stack: [L, *out, D], an array, a `QuantizedWeight` or a `MixedStack`.
      layer: int32[].
      expert_index: int32[] for the matrix of an expert, of a stack [L, E, N, D]; else None.
    """

    stack: Any
    layer: jax.Array
    expert_index: jax.Array | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """[*out, D]."""
        return self.stack.shape[1 if self.expert_index is None else 2 :]

    @property
    def ndim(self) -> int:
        """The number of axes of the matrix."""
        return len(self.shape)

    @property
    def dtype(self) -> Any:
        """The dtype of the computation."""
        return self.stack.dtype

    def expert(self, expert_index: Int[Array, ""]) -> LayerWeight:
        """A reference to the matrix of one expert of this layer."""
        return self.replace(expert_index=expert_index)

    def project(self, x: Float[Array, "*batch D"], out_dtype: Any) -> Float[Array, " ..."]:
        """See `ops.layers.project`."""
        if isinstance(self.stack, MixedStack):
            return self._project_mixed(x, out_dtype)
        *out, columns = self.stack.shape
        axes, at = (1, self.layer) if self.expert_index is None else (2, self.layer * out[1] + self.expert_index)
        shape = math.prod(out[:axes]), math.prod(out[axes:])
        flat = self.stack.reshape(*shape, columns)
        product = _project_in_place(jnp.dtype(out_dtype), x.reshape(-1, columns), flat, at)
        return checkpoint_name(product.reshape(*x.shape[:-1], *out[axes:]), PRODUCT)

    def decoded(self) -> Float[Array, " ..."]:
        """The dense matrix, for DoRA's row norms and for gradients; never for a forward matmul."""

        def of_kind(stack: Any, at: jax.Array) -> jax.Array:
            weight = index_stack(stack, at)
            weight = weight if self.expert_index is None else index_stack(weight, self.expert_index)
            return weight.decoded() if hasattr(weight, "decoded") else weight

        return self._switch_stack(of_kind) if isinstance(self.stack, MixedStack) else of_kind(self.stack, self.layer)

    def _project_mixed(self, x: jax.Array, out_dtype: Any) -> jax.Array:
        def of_kind(stack: Any, at: jax.Array) -> jax.Array:
            weight = layer_weight(stack, at)
            weight = weight if self.expert_index is None else index_stack(weight, self.expert_index)
            return project(x, weight, out_dtype=out_dtype)

        return self._switch_stack(of_kind)

    def _switch_stack(self, of_kind: Callable[[Any, jax.Array], jax.Array]) -> jax.Array:
        """Call `of_kind(stack, index)` for the stack that holds this layer."""
        which, at = (jnp.asarray(numbers, jnp.int32)[self.layer] for numbers in zip(*self.stack.places, strict=True))
        return lax.switch(which, [partial(of_kind, stack) for stack in self.stack.stacks], at)


def index_stack(weight: Any, index: Int[Array, ""] | int) -> Any:
    """Entry `index` of the leading axis of an array or weight."""
    if hasattr(weight, "expert"):
        return weight.expert(index)
    if isinstance(index, int):
        return jax.tree.map(lambda array: array[index], weight)
    take = partial(lax.dynamic_index_in_dim, index=index, keepdims=False)
    return unpack_bits(jax.tree.map(take, pack_bits(weight)))


@for_cpu("multiply_group")
def multiply_group(x: Float[Array, "R K"], weight: Any, group: Int[Array, ""], out_dtype: Any) -> Float[Array, "R N"]:
    """[rows, in] times one group's matrix [out, in]: [rows, out].

    Args:
      weight: [E, N, K], an array or a quantized weight.
    """
    return project(x, index_stack(weight, group), out_dtype=out_dtype)


@partial(jax.custom_jvp, nondiff_argnums=(0,))
def _project_in_place(out_dtype: Any, x: jax.Array, stack: Any, layer: jax.Array) -> jax.Array:
    """[R, D] times the matrix of one layer of [L, N, D]: [R, N]. Differentiable in `x` and in arrays of floats."""
    return multiply_group(x, stack, layer, out_dtype)


@partial(_project_in_place.defjvp, symbolic_zeros=True)
def _project_in_place_jvp(out_dtype: Any, primals: Any, tangents: Any) -> tuple[jax.Array, jax.Array]:
    (x, stack, layer), (d_x, d_stack, _) = primals, tangents

    def gradient_of_x(residuals: Any, gradient: jax.Array) -> jax.Array:
        weight, zeros = index_stack(*residuals), jnp.zeros(x.shape, x.dtype)
        return jax.vjp(lambda x: project(x, weight, out_dtype=out_dtype), zeros)[1](gradient)[0]

    def project_rows(x: jax.Array) -> jax.Array:
        forward = lambda residuals, x: _project_in_place(out_dtype, x, *residuals)
        return linear_map(forward, gradient_of_x, (stack, layer), x)

    take = partial(lax.dynamic_index_in_dim, index=layer, keepdims=False)
    changes = directional(lambda stack: project(x, jax.tree.map(take, stack), out_dtype=out_dtype), stack, d_stack)
    if not isinstance(d_x, SymbolicZero):
        changes.append(project_rows(d_x))
    return project_rows(x), sum(changes[1:], changes[0])


@for_cpu("layer_weight")
def layer_weight(stack: Any, layer: int | Int[Array, ""]) -> Any:
    """The matrix, or another parameter, of one layer.

    Args:
      stack: [L, *out, D], an array, a `QuantizedWeight` or a `MixedStack`.
      layer: int32[], or a Python int, for which XLA reads the slice in place.
    """
    if not isinstance(stack, MixedStack):
        return index_stack(stack, layer)
    if not isinstance(layer, int):
        return LayerWeight(stack, layer)
    which, at = stack.places[layer]
    return layer_weight(stack.stacks[which], at)


@for_cpu("stays_stacked")
def stays_stacked(leaf: Any, *, is_constant: bool) -> bool:
    """Whether the scan over layers indexes this leaf in place instead of slicing it.

    Args:
      is_constant: the leaf is not differentiated. The gradient of an indexed stack would be a full-size accumulation at each
        iteration.
    """
    return isinstance(leaf, MixedStack)


def split_stacked(
    stacked: Any, held: Callable[[tuple[Any, ...], Any], bool]
) -> tuple[list[Any], Callable[[list[Any], int | jax.Array], Any]]:
    """Split a stacked tree into the leaves that a scan slices and a function `rebuild_layer(slices, index)` of one layer.

    Args:
      stacked: a tree of arrays and weights with a leading axis L.
      held: given the path and the leaf, whether the leaf stays stacked, and is indexed by `layer_weight`.
    """
    is_leaf = lambda leaf: hasattr(leaf, "planes") or isinstance(leaf, MixedStack)  # a quantized weight or several stacks
    leaves, structure = jax.tree.flatten_with_path(stacked, is_leaf=is_leaf)
    stays = [held(path, leaf) for path, leaf in leaves]

    def rebuild_layer(sliced: list[Any], layer: int | jax.Array) -> Any:
        rest = iter(sliced)
        leaves_of_layer = [
            layer_weight(leaf, layer) if own else next(rest) for (_, leaf), own in zip(leaves, stays, strict=True)
        ]
        return jax.tree.unflatten(structure, leaves_of_layer)

    return [leaf for (_, leaf), own in zip(leaves, stays, strict=True) if not own], rebuild_layer


def unstack(stack: Any) -> MixedStack:
    """The same matrices [L, *out, D] with separate arrays for each layer, with which a GPU decodes fastest.

    XLA for GPUs copies a slice of an array in a loop's carry before it is multiplied (8B on an H100: 117 MB for each of a
    layer's larger matrices, and four times its bytes for int8); a separate array is read in place.
    """
    if isinstance(stack, MixedStack):
        layers = [(stack.stacks[which], at) for which, at in stack.places]
    else:
        layers = [(stack, layer) for layer in range(stack.shape[0])]
    separate = tuple(jax.tree.map(partial(_one_layer, layer=at), one) for one, at in layers)
    return MixedStack(separate, tuple((layer, 0) for layer in range(len(separate))))


def _one_layer(array: Any, layer: int) -> Any:
    """One layer of an array or a `jax.ShapeDtypeStruct` [L, ...], as [1, ...]."""
    if isinstance(array, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct((1, *array.shape[1:]), array.dtype, sharding=array.sharding)
    return array[layer : layer + 1]


def get_layer(stacked: Any, layer: int) -> Any:
    """One layer of a tree of arrays and weights with a leading axis L."""
    return split_stacked(stacked, lambda path, leaf: True)[1]([], layer)
