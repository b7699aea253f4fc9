"""Weights quantized while they are read, or kept as stored: the dense model is never in memory."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from llama_jax.errors import CheckpointError
from llama_jax.formats.device_fill import (
    ArrayMemory,
    ArrayParts,
    ArrayToFill,
    Filling,
    Part,
    StackParts,
    check,
    fill_by_rows,
    floats_of,
    reads_others,
)
from llama_jax.formats.hf_quantized import Reordered
from llama_jax.formats.lazy_tensors import FLOATS, OrbaxWeightInfo, Tensor, TensorInfo, blocks_of
from llama_jax.model.mixtures import MIXTURES
from llama_jax.ops.weights.format_spec import QuantFormat, fill_planes, regroup
from llama_jax.ops.weights.formats import ENCODABLE, QUANT_FORMATS, FormatName, PureFormatName, format_for, with_fallback
from llama_jax.ops.weights.layers import MixedStack
from llama_jax.ops.weights.quantized_matmul import JoinedWeight, QuantizedWeight, columns_on_each, shardings_of_planes
from llama_jax.storage import Location

Quantization = Literal[FormatName, PureFormatName, "keep"]
_log = logging.getLogger("llama_jax.formats")
ENCODED_AT_ONCE = 1 << 16  # values encoded at a time: 256 KB, a fraction of a core's L2 cache


def check_quantize(quantize: str | None) -> None:
    """Raise CheckpointError for a format that a model cannot be quantized to while it is read."""
    if quantize is None or quantize == "keep" or quantize in MIXTURES:
        return
    if quantize in QUANT_FORMATS:
        raise CheckpointError(
            f"quantize={quantize!r}: this format can only be kept from a GGUF that has it; use 'keep',"
            f" or one of {', '.join(ENCODABLE)}"
        )
    raise CheckpointError(f"quantize={quantize!r} is not one of {', '.join(MIXTURES)}, keep")


def check_kept(tensors: Sequence[TensorInfo], where: Location) -> None:
    """Raise CheckpointError if no tensor of a model is in a supported quantization format, or its columns are permuted."""
    if any(isinstance(tensor, Reordered) for tensor in tensors):
        raise CheckpointError(f"quantize='keep': {where} has reordered columns (desc_act); use {', '.join(ENCODABLE)}")
    if not any(map(can_be_kept, tensors)):
        kinds = ", ".join(sorted({tensor.kind for tensor in tensors}))
        raise CheckpointError(
            f"quantize='keep': {where} has no tensor in a supported format ({kinds}); use {', '.join(ENCODABLE)}"
        )


def quantized_kinds(tensors: Mapping[str, TensorInfo], among: Callable[[TensorInfo], bool] = lambda tensor: True) -> str:
    """The kinds of a model's quantized tensors, those with the most bytes first: "q4_1 and q8_0"; "" if there are none."""
    sizes: Counter[str] = Counter()
    for tensor in tensors.values():
        if tensor.kind not in FLOATS and among(tensor):
            sizes[tensor.kind.lower()] += tensor.nbytes
    return " and ".join(kind for kind, _ in sizes.most_common())


def log_what_becomes_floats(tensors: Mapping[str, TensorInfo], where: Location) -> None:
    """Log a warning for quantized tensors that cannot be kept."""
    if kinds := quantized_kinds(tensors, lambda tensor: not can_be_kept(tensor)):
        _log.warning("%s: tensors in %s become floats: these blocks, or their column order, are not supported", where, kinds)


def can_be_kept(tensor: TensorInfo) -> bool:
    """Whether a tensor is in a quantization format that parameters may have."""
    return isinstance(tensor, OrbaxWeightInfo) or (tensor.kind.lower() in QUANT_FORMATS and blocks_of(tensor) is not None)


def kinds_of(array: ArrayParts) -> tuple[str | None, ...]:
    """The formats in which `load` keeps the parts of a parameter, None for floats; one entry if all are equal."""
    kinds = tuple(part.tensor.kind.lower() if can_be_kept(part.tensor) else None for part in array.parts)
    return kinds if array.is_quantizable and len(set(kinds)) > 1 else (kinds[0] if array.is_quantizable else None,)


class ParameterFill(NamedTuple):
    """A parameter that is filled layer by layer.

    Attributes:
      fill: reads a layer; called with 0 if there is no layer axis.
      done: returns the parameter.
    """

    fill: Callable[[int], None]
    done: Callable[[], Any]


def parameter_fill(
    parts: ArrayParts | StackParts,
    dtype: np.dtype,
    quantize: Callable[[ArrayParts], tuple[str, ...]] | Literal["keep"] | None,
    sharding: Any,
    memory: ArrayMemory,
    *,
    unstack_layers: bool = False,
) -> ParameterFill:
    """A parameter on the devices of `sharding` (NumPy arrays if that is None): floats, or a quantized weight.

    Args:
      dtype: of the computation, and of parameters that are not quantized.
      quantize: maps a matrix of a layer to its quantization format, or those of its parts; or "keep": quantized tensors stay
        as in the files, and others become floats. The result has several parts if queries, keys and values have different
        formats, and a stack for each format if layers differ.
      sharding: includes the layer axis if there is one.
      unstack_layers: store each layer of a matrix in separate arrays, see `ops.weights.layers.unstack`.
    """
    stacked = isinstance(parts, StackParts)
    layers: tuple[ArrayParts, ...] = parts.layers if isinstance(parts, StackParts) else (parts,)

    def kinds(array: ArrayParts) -> tuple[str | None, ...]:
        if quantize is None or not array.is_quantizable:
            return (None,)
        return kinds_of(array) if quantize == "keep" else quantize(array)

    def of_kind(arrays: Sequence[ArrayParts], kind: str | None) -> ParameterFill:
        one = of_layer(sharding) if stacked else sharding
        if kind is None:
            if arrays[0].stored and reads_others(arrays[0].shape, one):
                return _floats_by_rows(arrays, dtype, sharding, stacked)
            target = ArrayToFill((*[len(arrays)] * stacked, *arrays[0].shape), dtype, sharding)
            filling = Filling(arrays, [target], floats_of(dtype), memory, stacked=stacked)
            return ParameterFill(filling.fill, lambda: filling.done()[0])
        columns = columns_on_each(arrays[0].shape, one)
        form = format_for(kind, columns) if quantize == "keep" else with_fallback(kind, columns)
        _check_columns(arrays[0], form, one)
        if quantize != "keep":
            return _quantized(arrays, form, dtype, sharding, partial(_encoded, form), memory, stacked)
        blocks = [replace(one, parts=tuple(replace(part, tensor=_blocks(part)) for part in one.parts)) for one in arrays]
        return _quantized(blocks, form, dtype, sharding, partial(_kept, QUANT_FORMATS[kind], form), memory, stacked)

    def of_kinds(arrays: Sequence[ArrayParts], own: Sequence[str | None]) -> ParameterFill:
        if unstack_layers and stacked and arrays[0].is_quantizable:
            alone = [of_kind([one], kind) for one, kind in zip(arrays, own, strict=True)]
            return _mixed(alone, tuple((layer, 0) for layer in range(len(arrays))))
        different = list(dict.fromkeys(own))
        if len(different) == 1:
            return of_kind(arrays, own[0])
        stacks = [[one for one, its in zip(arrays, own, strict=True) if its == kind] for kind in different]
        before = [own[:layer].count(kind) for layer, kind in enumerate(own)]
        locations = tuple((different.index(kind), at) for kind, at in zip(own, before, strict=True))
        return _mixed([of_kind(stack, kind) for stack, kind in zip(stacks, different, strict=True)], locations)

    each = [kinds(array) for array in layers]
    count = max(map(len, each))
    if count == 1:
        return of_kinds(layers, [kind for (kind,) in each])
    alone = [_split_parts(array) for array in layers]
    own = [kinds if len(kinds) == count else kinds * count for kinds in each]
    return _joined([of_kinds(*some) for some in zip(zip(*alone, strict=True), zip(*own, strict=True), strict=True)])


def of_layer(sharding: Any) -> Any:
    """The sharding of one layer, from that of all layers."""
    return sharding.update(spec=P(*sharding.spec[1:])) if isinstance(sharding, NamedSharding) else sharding


def _split_parts(array: ArrayParts) -> list[ArrayParts]:
    """The parts of an array as separate arrays."""
    parts = [replace(part, columns=None) for part in array.parts]
    shapes = [(array.shape[0], _width(part), *array.shape[2:]) for part in array.parts]
    return [replace(array, shape=shape, parts=(part,)) for shape, part in zip(shapes, parts, strict=True)]


def _floats_by_rows(arrays: Sequence[ArrayParts], dtype: np.dtype, sharding: Any, stacked: bool) -> ParameterFill:
    """Floats in a store; each process reads a part of the rows of each layer, see `fill_by_rows`."""
    found: list[Any] = [None] * len(arrays)

    def fill(layer: int) -> None:
        found[layer] = fill_by_rows(arrays[layer], dtype, of_layer(sharding) if stacked else sharding)

    def done() -> Any:
        if not stacked:
            return found[0]
        whole = jax.jit(lambda layers: jnp.stack(layers), out_shardings=sharding)(found)
        found.clear()
        return jax.block_until_ready(whole)

    return ParameterFill(fill, done)


def _quantized(
    arrays: Sequence[ArrayParts],
    form: QuantFormat,
    dtype: np.dtype,
    sharding: Any,
    put: Callable[[ArrayParts, int, int, Sequence[np.ndarray]], None],
    memory: ArrayMemory,
    stacked: bool,
) -> ParameterFill:
    """A quantized weight; `put(array, start, stop, planes)` fills contiguous memory with the planes of some rows."""
    shape = (*[len(arrays)] * stacked, *arrays[0].shape)
    shardings = shardings_of_planes(form, sharding, len(shape))
    targets = [
        ArrayToFill(*plane.packed_shape(shape), plane_sharding)
        for plane, plane_sharding in zip(form.planes, shardings, strict=True)
    ]

    def rows(array: ArrayParts, start: int, stop: int, out: Sequence[np.ndarray | None]) -> Sequence[np.ndarray]:
        found = [
            np.empty((stop - start, *target.shape[1 + stacked :]), target.dtype) if there is None else there
            for there, target in zip(out, targets, strict=True)
        ]
        put(array, start, stop, found)
        return found

    filling = Filling(arrays, targets, rows, memory, stacked=stacked)
    return ParameterFill(
        filling.fill, lambda: QuantizedWeight(tuple(filling.done()), form.name, str(dtype)).to_device_layout()
    )


def _joined(parts: Sequence[ParameterFill]) -> ParameterFill:
    """Parts next to each other, each in its own format."""

    def fill(layer: int) -> None:
        for part in parts:
            part.fill(layer)

    return ParameterFill(fill, lambda: JoinedWeight(tuple(part.done() for part in parts)))


def _mixed(stacks: Sequence[ParameterFill], locations: tuple[tuple[int, int], ...]) -> ParameterFill:
    """Layers in several formats, with a stack for each."""

    def fill(layer: int) -> None:
        stack, at = locations[layer]
        stacks[stack].fill(at)

    return ParameterFill(fill, lambda: MixedStack(tuple(stack.done() for stack in stacks), locations))


def placed(params: Any) -> Any:
    """Parameters in NumPy arrays on the default device, which takes over their memory if it can: in one call, whose overhead
    is that of ten arrays."""
    is_weight = lambda leaf: isinstance(leaf, QuantizedWeight)
    found = jax.device_put(params, may_alias=True)
    return jax.tree.map(lambda leaf: leaf.to_device_layout() if is_weight(leaf) else leaf, found, is_leaf=is_weight)


def _blocks(part: Part) -> Tensor:
    found = blocks_of(part.tensor)
    assert found is not None  # by `can_be_kept`
    return found


def _encoded(form: QuantFormat, array: ArrayParts, start: int, stop: int, planes: Sequence[np.ndarray]) -> None:
    """Fill planes with entries [start, stop), few rows at a time: encoding makes several arrays as large as its input."""
    assert form.encode is not None  # `check_quantize` rejects others
    columns = array.shape[-1]
    matrix = array.rows(start, stop, np.dtype(np.float32)).reshape(-1, columns)
    flat = [memory.reshape(plane.packed_shape(matrix.shape)[0]) for plane, memory in zip(form.planes, planes, strict=True)]
    step = max(1, ENCODED_AT_ONCE // columns)
    for first in range(0, len(matrix), step):
        for memory, found in zip(flat, form.encode(matrix[first : first + step]), strict=True):
            memory[first : first + step] = found


def _width(part: Part) -> int:
    assert part.columns is not None
    return part.columns.stop - part.columns.start


def _check_columns(array: ArrayParts, form: QuantFormat, sharding: Any) -> None:
    columns = array.shape[-1]
    parts = columns // columns_on_each(array.shape, sharding)
    if columns % (form.block * parts):
        over = f" on each of {parts} devices" if parts > 1 else ""
        raise CheckpointError(
            f"{array.parts[0].label} has rows of {columns} values, but {form.name} needs multiples of {form.block}{over};"
            " pass dtype= (--dtype) for floats"
        )


def _kept(
    kept: QuantFormat, form: QuantFormat, array: ArrayParts, start: int, stop: int, planes: Sequence[np.ndarray]
) -> None:
    """Fill planes of `form`, which may have smaller groups than the tensors' format, with entries [start, stop).

    Blocks run along the columns, so that rows can be permuted like those of floats.
    """
    for part in array.parts:
        per_entry = part.tensor.shape[0] // array.shape[0]
        raw = part.tensor.read(start * per_entry, stop * per_entry)
        targets = [memory if part.columns is None else memory[:, part.columns] for memory in planes]
        raw = raw.reshape(*targets[0].shape[: len(array.shape) - 1], -1)
        if kept.is_gguf:
            fill_planes(targets, raw.reshape(*raw.shape[:-1], array.shape[-1] // kept.block, -1), kept.planes)
        else:
            found = kept.from_rows(raw, array.shape[-1])
            if kept is not form:
                found = regroup(found, kept, form)
            for target, one in zip(targets, found, strict=True):
                target[...] = one.reshape(target.shape)
        for target, plane in zip(targets, form.planes, strict=True):
            if jnp.issubdtype(plane.dtype, jnp.floating):
                check(target, target.dtype, part.label)
