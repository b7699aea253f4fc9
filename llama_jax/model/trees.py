"""Trees of parameters: random values, shapes, or the results of a function for each parameter."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import fields
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PRNGKeyArray

from llama_jax.config import LlamaConfig
from llama_jax.errors import ConfigError
from llama_jax.model.mixtures import MIXTURES, formats_of_parameter
from llama_jax.model.params import (
    Attention,
    Block,
    FeedForward,
    Leaf,
    LlamaParams,
    ParamSpec,
    is_matrix_in_block,
    spec_at,
    specs_for,
)
from llama_jax.ops.layers import Weight
from llama_jax.ops.weights.format_spec import QuantFormat, bits_of
from llama_jax.ops.weights.formats import QUANT_FORMATS, FormatName, PureFormatName, format_for, with_fallback
from llama_jax.ops.weights.layers import MixedStack, get_layer, unstack
from llama_jax.ops.weights.lora import LowRankWeight
from llama_jax.ops.weights.quantized_matmul import (
    JoinedWeight,
    QuantizedWeight,
    columns_on_each,
    quantize_matrix,
    shardings_of_planes,
)


def init(config: LlamaConfig, key: PRNGKeyArray, dtype: jax.typing.DTypeLike = jnp.float32) -> LlamaParams:
    """Random initial parameters.

    Every matrix is normal with standard deviation 0.02. The two projections into the residual stream are scaled by
    1 / sqrt(2 L), so that its variance does not grow with depth (GPT-2: Radford et al. 2019, section 2.3).
    """
    keys = jax.random.split(key, 6)  # for Llama; parameters added later have other keys, so that these stay the same

    @cache
    def drawn(number: int, shape: tuple[int, ...], std: float) -> jax.Array:
        its_key = keys[number] if number < len(keys) else jax.random.fold_in(key, number)
        return (std * jax.random.normal(its_key, shape, jnp.float32)).astype(dtype)

    def init_leaf(spec: ParamSpec) -> jax.Array:
        shape = spec.stacked_shape(config)
        if not spec.decays:
            return jnp.full(shape, 1 - config.norm_offset if spec.init == "ones" else 0, dtype)
        std = 0.02 if spec.init == "normal" else 0.02 / math.sqrt(2 * config.n_layers)
        number, *half = spec.rng
        if not half:
            return drawn(number, shape, std)
        return drawn(number, (*shape[:-1], 2, shape[-1]), std)[..., half[0], :]

    return build_tree(config, init_leaf)


def build_tree(config: LlamaConfig, leaf_of: Callable[[ParamSpec], Leaf]) -> LlamaParams:
    """A `LlamaParams` with the result of a function for each parameter, and None for those that the configuration lacks."""
    table = {spec.path: spec for spec in specs_for(config)}

    def leaf(path: str) -> Leaf | None:
        return leaf_of(table[path]) if path in table else None

    def node(cls: Any, start: str, **nodes: Any) -> Any:
        leaves = {field.name: start + field.name for field in fields(cls) if field.name not in nodes}
        return cls(**nodes, **{name: leaf(path) for name, path in leaves.items()})

    attention = node(Attention, "blocks.attention.")
    feed_forward = node(FeedForward, "blocks.feed_forward.")
    return node(LlamaParams, "", blocks=node(Block, "blocks.", attention=attention, feed_forward=feed_forward))


def param_shapes(config: LlamaConfig, dtype: jax.typing.DTypeLike = jnp.float32) -> LlamaParams:
    """A `LlamaParams` of `jax.ShapeDtypeStruct`: the shapes that `init` would return, without allocating arrays."""
    return build_tree(config, lambda spec: jax.ShapeDtypeStruct(spec.stacked_shape(config), jnp.dtype(dtype)))


def quantize(params: LlamaParams, quant_format: FormatName | PureFormatName) -> LlamaParams:
    """Quantize the matrices to a format: "int8", "int4", "fp8", "nf4", "q8_0", "q4_0", "q4_k", ...

    Below 6 bits, the embedding and the output projection have a wider format, and "q4_k" and "q5_k" use 6 bits in some
    layers, see `mixtures`; formats with "-pure", such as "q4_0-pure", use one format for all.

    Quantize files while reading them instead (`formats.load`), which never holds the dense model. A tree of
    `jax.ShapeDtypeStruct` leaves, with or without shardings, becomes that of the quantized parameters, for any format.

    Raises:
      ConfigError: a format that is only read from files, or rows that do not consist of whole blocks.
    """
    planned = all(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(params))
    if quant_format not in (*MIXTURES, *(QUANT_FORMATS if planned else ())):
        raise ConfigError(f"quantize={quant_format!r} is not one of {', '.join(MIXTURES)}")

    def of_leaf(path: tuple[Any, ...], leaf: Leaf) -> Leaf:
        spec = spec_at(path)
        if not spec.is_quantizable:
            return leaf
        if isinstance(leaf, LowRankWeight):
            return leaf.replace(base=of_leaf(path, leaf.base))
        layers = leaf.shape[0] if spec.in_blocks else 1
        formats_of_layers = [formats_of_parameter(spec.path, quant_format, layer, layers) for layer in range(layers)]
        if len(set(formats_of_layers)) > 1 or len(formats_of_layers[0]) > 1:
            leaf = leaf.to_dense() if isinstance(leaf, QuantizedWeight | JoinedWeight | MixedStack) else leaf
        return convert_layers(leaf, formats_of_layers, partial(convert, spec))

    def convert(spec: ParamSpec, leaf: Leaf, quant_format: str) -> Leaf:
        form = with_fallback(quant_format, columns_on_each(leaf.shape, leaf.sharding))
        if isinstance(leaf, QuantizedWeight) and leaf.quant_format == form.name:
            return leaf
        if leaf.shape[-1] % form.block:
            raise ConfigError(
                f"{spec.path} has rows of {leaf.shape[-1]} numbers, but {quant_format} needs multiples of {form.block}"
            )
        if not isinstance(leaf, jax.ShapeDtypeStruct):
            return quantize_matrix(leaf.to_dense() if is_weight(leaf) else leaf, quant_format)
        return _planned(leaf, form)

    is_leaf = lambda leaf: is_weight(leaf) or isinstance(leaf, LowRankWeight)
    return jax.tree_util.tree_map_with_path(of_leaf, params, is_leaf=is_leaf)


def convert_layers(leaf: Any, formats_of_layers: Sequence[tuple[Any, ...]], convert: Callable[[Any, Any], Any]) -> Any:
    """Convert the matrices of all layers to formats that may differ between layers and parts.

    Args:
      leaf: an array or its shape.
      formats_of_layers: for each layer, the formats of its parts, or one for all parts.
      convert: converts an array or shape to a weight in one format.
    """
    count = max(map(len, formats_of_layers))
    if count > 1:
        formats_of_parts = [
            quant_formats if len(quant_formats) == count else quant_formats * count for quant_formats in formats_of_layers
        ]
        parts = zip(_split_heads_of_parts(leaf, count), zip(*formats_of_parts, strict=True), strict=True)
        return JoinedWeight(
            tuple(
                convert_layers(part, [(quant_format,) for quant_format in quant_formats], convert)
                for part, quant_formats in parts
            )
        )
    quant_formats = [quant_format for (quant_format,) in formats_of_layers]
    different = list(dict.fromkeys(quant_formats))
    if len(different) == 1:
        return convert(leaf, quant_formats[0])
    layers = {
        quant_format: [layer for layer, format_of_layer in enumerate(quant_formats) if format_of_layer == quant_format]
        for quant_format in different
    }
    locations = tuple(
        (different.index(quant_format), layers[quant_format].index(layer))
        for layer, quant_format in enumerate(quant_formats)
    )
    return MixedStack(
        tuple(convert(_some_layers(leaf, layers[quant_format]), quant_format) for quant_format in different), locations
    )


def _some_layers(leaf: Any, layers: list[int]) -> Any:
    if not isinstance(leaf, jax.ShapeDtypeStruct):
        return leaf[np.asarray(layers)]
    return jax.ShapeDtypeStruct((len(layers), *leaf.shape[1:]), leaf.dtype, sharding=leaf.sharding)


def plan_formats(params: LlamaParams, quant_formats: LlamaParams) -> LlamaParams:
    """A tree of `jax.ShapeDtypeStruct` leaves with a given format for each matrix, as in a file.

    Args:
      quant_formats: for each parameter, a tuple per layer: the format of each of its parts; None for floats.
    """

    def convert(leaf: jax.ShapeDtypeStruct, quant_format: str | None) -> Any:
        return (
            leaf
            if quant_format is None
            else _planned(leaf, format_for(quant_format, columns_on_each(leaf.shape, leaf.sharding)))
        )

    return jax.tree.map(
        lambda leaf, formats_of_layers: convert_layers(leaf, formats_of_layers, convert), params, quant_formats
    )


def _split_heads_of_parts(leaf: Any, count: int) -> list[Any]:
    """Split an array or its shape [..., G + 2, H, D] into the queries and each of the rest."""
    *before, width, features, columns = leaf.shape
    ends = (0, *range(width - count + 1, width + 1))
    if not isinstance(leaf, jax.ShapeDtypeStruct):
        return [leaf[..., first:end, :, :] for first, end in itertools.pairwise(ends)]
    shapes = [(*before, end - first, features, columns) for first, end in itertools.pairwise(ends)]
    return [jax.ShapeDtypeStruct(shape, leaf.dtype, sharding=leaf.sharding) for shape in shapes]


def _planned(leaf: jax.ShapeDtypeStruct, form: QuantFormat) -> QuantizedWeight:
    shardings = shardings_of_planes(form, leaf.sharding, len(leaf.shape))
    shapes = [
        jax.ShapeDtypeStruct(plane.shape(leaf.shape), plane.dtype, sharding=sharding)
        for plane, sharding in zip(form.planes, shardings, strict=True)
    ]
    return QuantizedWeight(tuple(shapes), form.name, str(leaf.dtype)).to_device_layout()


def is_weight(leaf: Any) -> bool:
    """Whether a leaf is a quantized weight, in one format or several."""
    return isinstance(leaf, QuantizedWeight | JoinedWeight | MixedStack)


def dequantize(params: LlamaParams) -> LlamaParams:
    """The parameters with quantized matrices dequantized."""
    return jax.tree.map(lambda leaf: leaf.to_dense() if is_weight(leaf) else leaf, params, is_leaf=is_weight)


def count(params: LlamaParams) -> int:
    """The number of parameters in a tree of arrays, or of shapes from `jax.eval_shape`."""
    is_one = lambda leaf: isinstance(leaf, Weight | MixedStack)
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(params, is_leaf=is_one))


def bytes_in_memory(params: Any) -> int:
    """Bytes of a tree of arrays on all devices together; unlike in `nbytes`, two 4-bit integers take one byte."""
    return sum(math.prod(leaf.shape) * bits_of(leaf.dtype) // 8 for leaf in jax.tree.leaves(params))


def kinds_in_memory(params: Any) -> str:
    """The dtype or formats of a model's matrices, the most common first: "bfloat16", "int8", "q4_k and q6_k"."""
    numbers: Counter[str] = Counter()
    is_quantized = lambda leaf: isinstance(leaf, QuantizedWeight)
    for path, leaf in jax.tree_util.tree_leaves_with_path(params, is_leaf=is_quantized):
        if spec_at(path).is_quantizable:
            numbers[leaf.quant_format if is_quantized(leaf) else str(leaf.dtype)] += math.prod(leaf.shape)
    return " and ".join(quant_format for quant_format, _ in numbers.most_common())


def parameter_count(config: LlamaConfig) -> int:
    """The number of parameters of a Llama with this configuration, without allocating them."""
    return sum(math.prod(spec.stacked_shape(config)) for spec in specs_for(config))


def layers_of(params: LlamaParams) -> tuple[Block, ...]:
    """Each layer's block, with separate arrays."""
    layers = jax.tree.leaves(params.blocks, is_leaf=is_weight)[0].shape[0]  # in adapters most leaves are None
    return tuple(get_layer(params.blocks, layer) for layer in range(layers))


def unstack_layers(params: LlamaParams) -> LlamaParams:
    """The model with each layer's matrices in separate arrays, see `ops.weights.layers.unstack`."""
    is_one = lambda leaf: isinstance(leaf, QuantizedWeight | MixedStack)
    of_leaf = lambda path, leaf: unstack(leaf) if is_matrix_in_block(path) else leaf
    return params.replace(blocks=jax.tree_util.tree_map_with_path(of_leaf, params.blocks, is_leaf=is_one))


def restack_layers(params: LlamaParams) -> LlamaParams:
    """Undo `unstack_layers`: one stack per format."""
    is_mixed = lambda leaf: isinstance(leaf, MixedStack)
    join = lambda leaf: _join_layers([get_layer(leaf, layer) for layer in range(leaf.shape[0])]) if is_mixed(leaf) else leaf
    return params.replace(blocks=jax.tree.map(join, params.blocks, is_leaf=is_mixed))


def stack_layers(blocks: Sequence[Block]) -> Block:
    """Stack the blocks of all layers: arrays with a leading axis L, in NumPy if the blocks are."""
    is_one = lambda leaf: isinstance(leaf, QuantizedWeight)
    layers = [jax.tree.flatten(block, is_leaf=is_one) for block in blocks]
    return jax.tree.unflatten(
        layers[0][1],
        [_join_layers(leaves) for leaves in zip(*(formats_of_layers for formats_of_layers, _ in layers), strict=True)],
    )


def _join_layers(leaves: Sequence[Any]) -> Any:
    forms = [(jax.tree.structure(leaf), [array.dtype for array in jax.tree.leaves(leaf)]) for leaf in leaves]
    different = [form for i, form in enumerate(forms) if form not in forms[:i]]
    join = lambda *arrays: (np if isinstance(arrays[0], np.ndarray) else jnp).stack(arrays)
    stacks = [
        jax.tree.map(join, *(leaf for leaf, form_of_layer in zip(leaves, forms, strict=True) if form_of_layer == form))
        for form in different
    ]
    stacks = [stack.to_device_layout() if isinstance(stack, QuantizedWeight) else stack for stack in stacks]
    locations = tuple((different.index(form), forms[:layer].count(form)) for layer, form in enumerate(forms))
    return stacks[0] if len(stacks) == 1 else MixedStack(tuple(stacks), locations)
