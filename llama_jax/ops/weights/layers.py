"""The weights of one layer, read in place from the stacked weights of all layers."""

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
from jaxtyping import Array, Float, Int

from llama_jax.ops.gradients import gradient_of_needed, with_gradient
from llama_jax.ops.layers import MATMUL_OUTPUT, Weight, dense, is_quantized, project
from llama_jax.ops.platform import KernelOptions, has_cpu_variant, pack_bits, unpack_bits


class MixedStack(struct.PyTreeNode):
    """The matrices [L, *out, D] of all layers in several stacks: one per quantization format, or one per layer (`unstack`).

    Attributes:
      stacks: arrays or quantized weights [l, *out, D].
      locations: for each layer (index of its stack, index in that stack).
    """

    stacks: tuple[Any, ...]
    locations: tuple[tuple[int, int], ...] = struct.field(pytree_node=False)

    @property
    def shape(self) -> tuple[int, ...]:
        """[L, *out, D]."""
        return (len(self.locations), *self.stacks[0].shape[1:])

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
        """The sharding of the first stack, which all stacks have."""
        return self.stacks[0].sharding

    def to_dense(self) -> Any:
        """Dequantized, as one array [L, *out, D]."""
        stacks = [dense(stack) for stack in self.stacks]
        return (np if isinstance(stacks[0], np.ndarray) else jnp).stack(
            [stacks[stack][index] for stack, index in self.locations]
        )


class LayerWeight(Weight):
    """A reference to the matrix of one layer (or expert) in a stack; `project` does not copy the matrix.

    Attributes:
      stack: [L, *out, D], an array, a `QuantizedWeight` or a `MixedStack`.
      layer: int32[].
      expert_index: int32[], the expert, for a stack [L, E, N, D]; else None.
    """

    stack: Any
    layer: jax.Array
    expert_index: jax.Array | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """[*out, D]."""
        return self.stack.shape[1 if self.expert_index is None else 2 :]

    @property
    def dtype(self) -> Any:
        """The dtype of the computation."""
        return self.stack.dtype

    def expert(self, expert_index: Int[Array, ""] | int) -> LayerWeight:
        """A reference to the matrix of one expert of this layer."""
        return self.replace(expert_index=expert_index)

    def project(self, x: Float[Array, "*batch D"], out_dtype: Any, kernels: KernelOptions) -> Float[Array, " ..."]:
        """See `ops.layers.project`."""
        if isinstance(self.stack, MixedStack):
            return self._project_mixed(x, out_dtype, kernels)
        *out, columns = self.stack.shape
        axes, index = (1, self.layer) if self.expert_index is None else (2, self.layer * out[1] + self.expert_index)
        shape = math.prod(out[:axes]), math.prod(out[axes:])
        flat = self.stack.reshape(*shape, columns)
        rows = x.reshape(-1, columns)
        if kernels.forward_mode:
            product = project(rows, _copy_entry(flat, index), out_dtype=out_dtype, kernels=kernels)
        else:
            product = _project_in_place((jnp.dtype(out_dtype), kernels), rows, flat, index)
        return checkpoint_name(product.reshape(*x.shape[:-1], *out[axes:]), MATMUL_OUTPUT)

    def to_dense(self) -> Float[Array, " ..."]:
        """The dense matrix, for DoRA's row norms and for gradients; no forward matmul uses it."""

        def dense_from(stack: Any, index: jax.Array) -> jax.Array:
            weight = index_stack(stack, index)
            weight = weight if self.expert_index is None else index_stack(weight, self.expert_index)
            return dense(weight)

        return self._switch_stack(dense_from) if isinstance(self.stack, MixedStack) else dense_from(self.stack, self.layer)

    def _project_mixed(self, x: jax.Array, out_dtype: Any, kernels: KernelOptions) -> jax.Array:
        def project_from(stack: Any, index: jax.Array) -> jax.Array:
            weight = layer_weight(stack, index)
            weight = weight if self.expert_index is None else index_stack(weight, self.expert_index)
            return project(x, weight, out_dtype=out_dtype, kernels=kernels)

        return self._switch_stack(project_from)

    def _switch_stack(self, function: Callable[[Any, jax.Array], jax.Array]) -> jax.Array:
        """`function(stack, index)`, with the stack that contains this layer and the layer's index in it."""
        stack_index, index = (
            jnp.asarray(numbers, jnp.int32)[self.layer] for numbers in zip(*self.stack.locations, strict=True)
        )
        return lax.switch(stack_index, [partial(function, stack) for stack in self.stack.stacks], index)


def index_stack(weight: Any, index: Int[Array, ""] | int) -> Any:
    """Entry `index` of the leading axis of an array or weight."""
    if isinstance(weight, LayerWeight):
        return weight.expert(index)
    if isinstance(index, int):
        return jax.tree.map(lambda array: array[index], weight)
    take = partial(lax.dynamic_index_in_dim, index=index, keepdims=False)
    return unpack_bits(jax.tree.map(take, pack_bits(weight)))


@has_cpu_variant
def multiply_group(
    x: Float[Array, "R K"], weight: Any, group: Int[Array, ""], out_dtype: Any, kernels: KernelOptions
) -> Float[Array, "R N"]:
    """[R, K] times the transpose of one group's matrix [N, K].

    Args:
      weight: [E, N, K], an array or a quantized weight, with E groups.
    """
    return project(x, index_stack(weight, group), out_dtype=out_dtype, kernels=kernels)


def _project_in_place_forward(
    settings: tuple[Any, KernelOptions], needed: Any, x: jax.Array, stack: Any, layer: jax.Array
) -> tuple[jax.Array, Any]:
    return multiply_group(x, stack, layer, *settings), (x, stack, layer)


def _project_in_place_backward(
    settings: tuple[Any, KernelOptions], needed: Any, residuals: Any, gradient: jax.Array
) -> tuple[jax.Array, Any, None]:
    x, stack, layer = residuals
    multiply = partial(project, out_dtype=settings[0], kernels=settings[1])
    weight, zeros = index_stack(stack, layer), jnp.zeros(x.shape, x.dtype)
    dx = jax.vjp(lambda x: multiply(x, weight), zeros)[1](gradient)[0]
    d_stack = gradient_of_needed(lambda stack: multiply(x, _copy_entry(stack, layer)), stack, needed[1], gradient)
    return dx, d_stack, None


@with_gradient(_project_in_place_forward, _project_in_place_backward)
def _project_in_place(settings: tuple[Any, KernelOptions], x: jax.Array, stack: Any, layer: jax.Array) -> jax.Array:
    """[R, D] times the matrix of one layer of [L, N, D]: [R, N]. Settings: the dtype of the result, and see `project`."""
    return multiply_group(x, stack, layer, *settings)


def _copy_entry(weight: Any, index: jax.Array) -> Any:
    """`index_stack`, differentiable in the weight."""
    return jax.tree.map(partial(lax.dynamic_index_in_dim, index=index, keepdims=False), weight)


@has_cpu_variant
def layer_weight(stack: Any, layer: int | Int[Array, ""]) -> Any:
    """The matrix, or another parameter, of one layer.

    Args:
      stack: [L, *out, D], an array, a `QuantizedWeight` or a `MixedStack`.
      layer: int32[], or a Python int, with which XLA reads the slice in place.
    """
    if not isinstance(stack, MixedStack):
        return index_stack(stack, layer)
    if not isinstance(layer, int):
        return LayerWeight(stack, layer)
    stack_index, index = stack.locations[layer]
    return layer_weight(stack.stacks[stack_index], index)


@has_cpu_variant
def scan_reads_in_place(leaf: Any, *, is_constant: bool) -> bool:
    """Whether a scan over layers closes over this leaf and indexes it by layer, instead of slicing it.

    Args:
      is_constant: whether the leaf is not differentiated. Each iteration would add the gradient of an indexed leaf to an
        array of its full size.
    """
    return isinstance(leaf, MixedStack)


def split_for_scan(
    stacked: Any, is_read_in_place: Callable[[tuple[Any, ...], Any], bool]
) -> tuple[list[Any], Callable[[list[Any], int | jax.Array], Any]]:
    """The leaves that a scan over layers slices, and `layer_params(slices, layer)`, which builds the tree of one layer.

    Args:
      stacked: a tree of arrays and weights with a leading axis L.
      is_read_in_place: `is_read_in_place(path, leaf)` is whether a leaf is indexed by `layer_weight` instead of sliced.
    """
    is_leaf = lambda leaf: isinstance(leaf, MixedStack) or is_quantized(leaf)
    leaves, structure = jax.tree.flatten_with_path(stacked, is_leaf=is_leaf)
    in_place = [is_read_in_place(path, leaf) for path, leaf in leaves]

    def layer_params(slices: list[Any], layer: int | jax.Array) -> Any:
        next_slice = iter(slices)
        layer_leaves = [
            layer_weight(leaf, layer) if indexed else next(next_slice)
            for (_, leaf), indexed in zip(leaves, in_place, strict=True)
        ]
        return jax.tree.unflatten(structure, layer_leaves)

    return [leaf for (_, leaf), indexed in zip(leaves, in_place, strict=True) if not indexed], layer_params


def unstack(stack: Any) -> MixedStack:
    """The same matrices [L, *out, D] as one array per layer, the fastest form for decoding on a GPU.

    XLA for GPUs copies a slice of an array in a loop's carry before multiplying it (8B on an H100: 117 MB for each of the
    larger matrices of a layer, and for int8 four times its bytes). A separate array is read in place.
    """
    if isinstance(stack, MixedStack):
        layers = [(stack.stacks[stack_index], index) for stack_index, index in stack.locations]
    else:
        layers = [(stack, layer) for layer in range(stack.shape[0])]
    separate = tuple(jax.tree.map(partial(_one_layer, layer=index), stacked) for stacked, index in layers)
    return MixedStack(separate, tuple((layer, 0) for layer in range(len(separate))))


def _one_layer(array: Any, layer: int) -> Any:
    """One layer of an array or a `jax.ShapeDtypeStruct` [L, ...], as [1, ...]."""
    if isinstance(array, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct((1, *array.shape[1:]), array.dtype, sharding=array.sharding)
    return array[layer : layer + 1]


def get_layer(stacked: Any, layer: int) -> Any:
    """One layer of a tree of arrays and weights with a leading axis L."""
    return split_for_scan(stacked, lambda path, leaf: True)[1]([], layer)
