"""Trees of parameters: random ones, their shapes, or whatever a function gives for each row of the table."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable
from dataclasses import fields
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp

from llama_jax.config import LlamaConfig
from llama_jax.errors import ConfigError
from llama_jax.model.mixtures import MIXTURES, differs_by_layer, kinds_of_parameter
from llama_jax.model.params import Attention, Block, FeedForward, Leaf, Llama, Row, row_at, rows
from llama_jax.ops.weights import (
    ChangedWeight,
    JoinedWeight,
    Kind,
    Name,
    Pure,
    QuantizedWeight,
    fitting,
    quantized,
    shardings_of_planes,
    with_fallback,
)
from llama_jax.ops.weights.kinds import KINDS
from llama_jax.ops.weights.planes import bits_of
from llama_jax.ops.weights.weight import columns_on_each


def init(config: LlamaConfig, key: jax.Array, dtype: jax.typing.DTypeLike = jnp.float32) -> Llama:
    """Random parameters with stacked blocks, as modern Llamas start training.

    Every matrix is normal with standard deviation 0.02; the two projections that end in the residual stream are scaled by
    1 / sqrt(2 L), so that its variance does not grow with depth (GPT-2: Radford et al. 2019, section 2.3).
    """
    keys = jax.random.split(key, 6)  # of Llama's; what came later has keys of its own, so that these stay the same

    @cache
    def drawn(number: int, shape: tuple[int, ...], std: float) -> jax.Array:
        its_key = keys[number] if number < len(keys) else jax.random.fold_in(key, number)
        return (std * jax.random.normal(its_key, shape, jnp.float32)).astype(dtype)

    def start(row: Row, layer: int) -> jax.Array:
        shape = row.shape_of_all(config)
        if not row.decays:
            return jnp.full(shape, 1 - config.norm_offset if row.start == "ones" else 0, dtype)
        std = 0.02 if row.start == "normal" else 0.02 / math.sqrt(2 * config.n_layers)
        number, *half = row.draw
        if not half:
            return drawn(number, shape, std)
        return drawn(number, (*shape[:-1], 2, shape[-1]), std)[..., half[0], :]

    return build(config, start)


def build(config: LlamaConfig, leaf_of: Callable[[Row, int], Leaf], *, stacked: bool = True) -> Llama:
    """A `Llama` with what a function gives for each row of the table, and None for what the configuration has not.

    Args:
      leaf_of: given a row and a layer: 0 for what stands outside the blocks, and for stacked ones.
      stacked: whether the blocks are one, or a tuple.
    """
    table = {row.path: row for row in rows(config)}

    def leaf(path: str, layer: int) -> Leaf | None:
        return leaf_of(table[path], layer) if path in table else None

    def node(kind: Any, start: str, layer: int, **nodes: Any) -> Any:
        leaves = {field.name: start + field.name for field in fields(kind) if field.name not in nodes}
        return kind(**nodes, **{name: leaf(path, layer) for name, path in leaves.items()})

    def block(layer: int) -> Block:
        attention = node(Attention, "blocks.attention.", layer)
        feed_forward = node(FeedForward, "blocks.feed_forward.", layer)
        return node(Block, "blocks.", layer, attention=attention, feed_forward=feed_forward)

    blocks = block(0) if stacked else tuple(block(i) for i in range(config.n_layers))
    return node(Llama, "", 0, blocks=blocks)


def param_shapes(config: LlamaConfig, dtype: jax.typing.DTypeLike = jnp.float32, *, stacked: bool = True) -> Llama:
    """A `Llama` of `jax.ShapeDtypeStruct`: what `init` would give, without allocating it."""

    def shape(row: Row, layer: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(row.shape_of_all(config) if stacked else row.shape(config), jnp.dtype(dtype))

    return build(config, shape, stacked=stacked)


def quantize(params: Llama, kind: Name | Pure) -> Llama:
    """The parameters with their matrices in fewer bits: "int8", "int4", "fp8", "nf4", "q8_0", "q4_0", "q4_k", ...

    With less than 6 bits the embedding and the output projection get a wider kind, and "q4_k" and "q5_k" give some layers 6
    bits, see `mixtures`; "q4_0-pure" is one kind for all.

    A file is better quantised while it is read (`checkpoints.load`), without ever holding the dense model. A tree of
    `jax.ShapeDtypeStruct` leaves, with or without shardings, becomes that of the quantised parameters, of any kind.

    Raises:
      ConfigError: a kind that cannot be made here, or rows that do not consist of whole blocks.
    """
    planned = all(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(params))
    if kind not in (*MIXTURES, *(KINDS if planned else ())):
        raise ConfigError(f"quantize={kind!r} is not one of {', '.join(MIXTURES)}")
    layers = len(params.blocks) if isinstance(params.blocks, tuple) else None
    if layers is None and differs_by_layer(kind):
        raise ConfigError(f"quantize={kind!r} differs from layer to layer, and these layers are stacked; use '{kind}-pure'")

    def of_leaf(path: tuple[Any, ...], leaf: Leaf) -> Leaf:
        row = row_at(path)
        if not row.is_matrix:
            return leaf
        if isinstance(leaf, ChangedWeight):
            return leaf.replace(base=of_leaf(path, leaf.base))
        layer = next((key.idx for key in path if isinstance(key, jax.tree_util.SequenceKey)), 0)
        own = kinds_of_parameter(row.path, kind, layer, layers or 1)
        if len(own) > 1:
            leaf = leaf.decoded() if isinstance(leaf, QuantizedWeight | JoinedWeight) else leaf
            return JoinedWeight(
                tuple(in_kind(row, part, each) for part, each in zip(_parts(leaf, len(own)), own, strict=True))
            )
        return in_kind(row, leaf, own[0])

    def in_kind(row: Row, leaf: Leaf, own: str) -> Leaf:
        form = with_fallback(own, columns_on_each(leaf.shape, leaf.sharding))
        if isinstance(leaf, QuantizedWeight) and leaf.kind == form.name:
            return leaf
        if leaf.shape[-1] % form.block:
            raise ConfigError(f"{row.path} has rows of {leaf.shape[-1]} numbers, and {own} needs multiples of {form.block}")
        if not isinstance(leaf, jax.ShapeDtypeStruct):
            return quantized(leaf.decoded() if isinstance(leaf, QuantizedWeight | JoinedWeight) else leaf, own)
        return _planned(leaf, form)

    is_weight = lambda leaf: isinstance(leaf, QuantizedWeight | JoinedWeight | ChangedWeight)
    return jax.tree_util.tree_map_with_path(of_leaf, params, is_leaf=is_weight)


def planned_in_kinds(params: Llama, kinds: Llama) -> Llama:
    """A tree of `jax.ShapeDtypeStruct` leaves as it is where matrices have kinds of their own, as in a file.

    Args:
      kinds: a tuple for each parameter: the kind of each of its parts side by side, None for floats.
    """

    def of_leaf(leaf: jax.ShapeDtypeStruct, own: tuple[str | None, ...]) -> Any:
        if len(set(own)) > 1:
            parts = _parts(leaf, len(own))
            return JoinedWeight(tuple(of_leaf(part, (kind,)) for part, kind in zip(parts, own, strict=True)))
        return leaf if own[0] is None else _planned(leaf, fitting(own[0], columns_on_each(leaf.shape, leaf.sharding)))

    return jax.tree.map(of_leaf, params, kinds)


def _parts(leaf: Any, count: int) -> list[Any]:
    """An array or its shape [..., G + 2, H, D] as that of queries, and the rest one by one."""
    *before, width, features, columns = leaf.shape
    ends = (0, *range(width - count + 1, width + 1))
    if not isinstance(leaf, jax.ShapeDtypeStruct):
        return [leaf[..., first:end, :, :] for first, end in itertools.pairwise(ends)]
    shapes = [(*before, end - first, features, columns) for first, end in itertools.pairwise(ends)]
    return [jax.ShapeDtypeStruct(shape, leaf.dtype, sharding=leaf.sharding) for shape in shapes]


def _planned(leaf: jax.ShapeDtypeStruct, form: Kind) -> QuantizedWeight:
    places = shardings_of_planes(form, leaf.sharding, len(leaf.shape))
    shapes = [
        jax.ShapeDtypeStruct(plane.shape(leaf.shape), plane.dtype, sharding=place)
        for plane, place in zip(form.planes, places, strict=True)
    ]
    return QuantizedWeight(tuple(shapes), form.name, str(leaf.dtype)).arranged()


def dequantize(params: Llama) -> Llama:
    """The parameters with the numbers that quantised matrices stand for."""
    is_weight = lambda leaf: isinstance(leaf, QuantizedWeight | JoinedWeight)
    return jax.tree.map(lambda leaf: leaf.decoded() if is_weight(leaf) else leaf, params, is_leaf=is_weight)


def count(params: Llama) -> int:
    """How many numbers the parameters hold; works on the shapes that `jax.eval_shape` gives as well."""
    is_weight = lambda leaf: hasattr(leaf, "project")
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(params, is_leaf=is_weight))


def bytes_in_memory(params: Any) -> int:
    """Bytes of a tree of arrays over all devices that divide it: of integers of 4 bits two are in a byte, whatever their
    `nbytes` says."""
    return sum(math.prod(leaf.shape) * bits_of(leaf.dtype) // 8 for leaf in jax.tree.leaves(params))


def kinds_in_memory(params: Any) -> str:
    """As what the matrices of a model are kept, most numbers first: "bfloat16", "int8", "q4_k and q6_k"."""
    numbers: Counter[str] = Counter()
    is_weight = lambda leaf: isinstance(leaf, QuantizedWeight)
    for path, leaf in jax.tree_util.tree_leaves_with_path(params, is_leaf=is_weight):
        if row_at(path).is_matrix:
            numbers[leaf.kind if is_weight(leaf) else str(leaf.dtype)] += math.prod(leaf.shape)
    return " and ".join(kind for kind, _ in numbers.most_common())


def parameter_count(config: LlamaConfig) -> int:
    """How many parameters a Llama of this configuration has, without allocating any."""
    return sum(math.prod(row.shape_of_all(config)) for row in rows(config))


def unstack(params: Llama) -> Llama:
    """The same parameters with a tuple of blocks, one per layer; each array is copied out of its stack."""
    if isinstance(params.blocks, tuple):
        return params
    stacked = params.blocks
    layers = jax.tree.leaves(stacked)[0].shape[0]  # of adapters most places hold None
    blocks = tuple(jax.tree.map(lambda a, i=i: a[i], stacked) for i in range(layers))
    is_weight = lambda leaf: isinstance(leaf, QuantizedWeight)
    arrange = lambda leaf: leaf.arranged() if is_weight(leaf) else leaf
    return params.replace(blocks=jax.tree.map(arrange, blocks, is_leaf=is_weight))


def stack(params: Llama) -> Llama:
    """The same parameters with one block whose arrays have a leading axis L."""
    if isinstance(params.blocks, Block):
        return params
    return params.replace(blocks=jax.tree.map(lambda *arrays: jnp.stack(arrays), *params.blocks))
