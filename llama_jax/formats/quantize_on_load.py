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
    ArraySource,
    FillJob,
    FillTarget,
    StackedSource,
    TensorSlice,
    check_finite,
    fill_by_rows,
    floats_of,
    reads_others,
)
from llama_jax.formats.hf_quantized import Reordered
from llama_jax.formats.lazy_tensors import FLOAT_DTYPES, OrbaxWeightInfo, Tensor, TensorInfo, row_bytes_of
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
        storage_types = ", ".join(sorted({tensor.storage_type for tensor in tensors}))
        raise CheckpointError(
            f"quantize='keep': {where} has no tensor in a supported format ({storage_types}); use {', '.join(ENCODABLE)}"
        )


def describe_quantized_types(
    tensors: Mapping[str, TensorInfo], among: Callable[[TensorInfo], bool] = lambda tensor: True
) -> str:
    """The kinds of a model's quantized tensors, those with the most bytes first: "q4_1 and q8_0"; "" if there are none."""
    sizes: Counter[str] = Counter()
    for tensor in tensors.values():
        if tensor.storage_type not in FLOAT_DTYPES and among(tensor):
            sizes[tensor.storage_type.lower()] += tensor.nbytes
    return " and ".join(storage_type for storage_type, _ in sizes.most_common())


def log_what_becomes_floats(tensors: Mapping[str, TensorInfo], where: Location) -> None:
    """Log a warning for quantized tensors that cannot be kept."""
    if types := describe_quantized_types(tensors, lambda tensor: not can_be_kept(tensor)):
        _log.warning("%s: tensors in %s become floats: these blocks, or their column order, are not supported", where, types)


def can_be_kept(tensor: TensorInfo) -> bool:
    """Whether a tensor is in a quantization format that parameters may have."""
    return isinstance(tensor, OrbaxWeightInfo) or (
        tensor.storage_type.lower() in QUANT_FORMATS and row_bytes_of(tensor) is not None
    )


def kept_formats(array: ArraySource) -> tuple[str | None, ...]:
    """The formats in which `load` keeps the parts of a parameter, None for floats; one entry if all are equal."""
    formats = tuple(part.tensor.storage_type.lower() if can_be_kept(part.tensor) else None for part in array.parts)
    return formats if array.is_quantizable and len(set(formats)) > 1 else (formats[0] if array.is_quantizable else None,)


class ParameterFillJob(NamedTuple):
    """A parameter that is filled layer by layer.

    Attributes:
      fill: reads a layer; called with 0 if there is no layer axis.
      done: returns the parameter.
    """

    fill: Callable[[int], None]
    done: Callable[[], Any]


def parameter_fill(
    parts: ArraySource | StackedSource,
    dtype: np.dtype,
    quantize: Callable[[ArraySource], tuple[str, ...]] | Literal["keep"] | None,
    sharding: Any,
    memory: ArrayMemory,
    *,
    unstack_layers: bool = False,
) -> ParameterFillJob:
    """A parameter on the devices of `sharding` (NumPy arrays if that is None): floats, or a quantized weight.

    Args:
      dtype: of the computation, and of parameters that are not quantized.
      quantize: maps a matrix of a layer to its quantization format, or those of its parts; or "keep": quantized tensors stay
        as in the files, and others become floats. The result has several parts if queries, keys and values have different
        formats, and a stack for each format if layers differ.
      sharding: includes the layer axis if there is one.
      unstack_layers: store each layer of a matrix in separate arrays, see `ops.weights.layers.unstack`.
    """
    stacked = isinstance(parts, StackedSource)
    layers: tuple[ArraySource, ...] = parts.layers if isinstance(parts, StackedSource) else (parts,)

    def formats_of(array: ArraySource) -> tuple[str | None, ...]:
        if quantize is None or not array.is_quantizable:
            return (None,)
        return kept_formats(array) if quantize == "keep" else quantize(array)

    def fill_in_format(arrays: Sequence[ArraySource], quant_format: str | None) -> ParameterFillJob:
        layer_sharding = drop_layer_axis(sharding) if stacked else sharding
        if quant_format is None:
            if arrays[0].stored and reads_others(arrays[0].shape, layer_sharding):
                return _floats_by_rows(arrays, dtype, sharding, stacked)
            target = FillTarget((*[len(arrays)] * stacked, *arrays[0].shape), dtype, sharding)
            filling = FillJob(arrays, [target], floats_of(dtype), memory, stacked=stacked)
            return ParameterFillJob(filling.fill, lambda: filling.done()[0])
        columns = columns_on_each(arrays[0].shape, layer_sharding)
        form = format_for(quant_format, columns) if quantize == "keep" else with_fallback(quant_format, columns)
        check_block_columns(arrays[0].parts[0].label, arrays[0].shape, form, layer_sharding)
        if quantize != "keep":
            return _quantized_fill(arrays, form, dtype, sharding, partial(_put_encoded, form), memory, stacked)
        blocks = [
            replace(array, parts=tuple(replace(part, tensor=_source_blocks(part)) for part in array.parts))
            for array in arrays
        ]
        return _quantized_fill(
            blocks, form, dtype, sharding, partial(_put_stored, QUANT_FORMATS[quant_format], form), memory, stacked
        )

    def fill_in_formats(arrays: Sequence[ArraySource], formats: Sequence[str | None]) -> ParameterFillJob:
        if unstack_layers and stacked and arrays[0].is_quantizable:
            fills = [fill_in_format([array], quant_format) for array, quant_format in zip(arrays, formats, strict=True)]
            return _mixed_fill(fills, tuple((layer, 0) for layer in range(len(arrays))))
        different = list(dict.fromkeys(formats))
        if len(different) == 1:
            return fill_in_format(arrays, formats[0])
        stacks = [
            [array for array, array_format in zip(arrays, formats, strict=True) if array_format == quant_format]
            for quant_format in different
        ]
        before = [formats[:layer].count(quant_format) for layer, quant_format in enumerate(formats)]
        locations = tuple((different.index(quant_format), at) for quant_format, at in zip(formats, before, strict=True))
        return _mixed_fill(
            [fill_in_format(stack, quant_format) for stack, quant_format in zip(stacks, different, strict=True)], locations
        )

    formats_by_layer = [formats_of(array) for array in layers]
    count = max(map(len, formats_by_layer))
    if count == 1:
        return fill_in_formats(layers, [quant_format for (quant_format,) in formats_by_layer])
    sources = [_split_parts(array) for array in layers]
    repeated = [formats if len(formats) == count else formats * count for formats in formats_by_layer]
    return _joined_fill(list(map(fill_in_formats, zip(*sources, strict=True), zip(*repeated, strict=True))))


def drop_layer_axis(sharding: Any) -> Any:
    """The sharding of one layer, from that of all layers."""
    return sharding.update(spec=P(*sharding.spec[1:])) if isinstance(sharding, NamedSharding) else sharding


def _split_parts(array: ArraySource) -> list[ArraySource]:
    """The parts of an array as separate arrays."""
    parts = [replace(part, columns=None) for part in array.parts]
    shapes = [(array.shape[0], _width(part), *array.shape[2:]) for part in array.parts]
    return [replace(array, shape=shape, parts=(part,)) for shape, part in zip(shapes, parts, strict=True)]


def _floats_by_rows(arrays: Sequence[ArraySource], dtype: np.dtype, sharding: Any, stacked: bool) -> ParameterFillJob:
    """Floats in a store; each process reads a part of the rows of each layer, see `fill_by_rows`."""
    layers: list[Any] = [None] * len(arrays)

    def fill(layer: int) -> None:
        layers[layer] = fill_by_rows(arrays[layer], dtype, drop_layer_axis(sharding) if stacked else sharding)

    def done() -> Any:
        if not stacked:
            return layers[0]
        stacked_layers = jax.jit(lambda layers: jnp.stack(layers), out_shardings=sharding)(layers)
        layers.clear()
        return jax.block_until_ready(stacked_layers)

    return ParameterFillJob(fill, done)


def _quantized_fill(
    arrays: Sequence[ArraySource],
    form: QuantFormat,
    dtype: np.dtype,
    sharding: Any,
    put: Callable[[ArraySource, int, int, Sequence[np.ndarray]], None],
    memory: ArrayMemory,
    stacked: bool,
) -> ParameterFillJob:
    """A quantized weight; `put(array, start, stop, planes)` fills contiguous memory with the planes of some rows."""
    shape = (*[len(arrays)] * stacked, *arrays[0].shape)
    shardings = shardings_of_planes(form, sharding, len(shape))
    targets = [
        FillTarget(*plane.packed_shape(shape), plane_sharding)
        for plane, plane_sharding in zip(form.planes, shardings, strict=True)
    ]

    def rows(array: ArraySource, start: int, stop: int, out: Sequence[np.ndarray | None]) -> Sequence[np.ndarray]:
        buffers = [
            np.empty((stop - start, *target.shape[1 + stacked :]), target.dtype) if buffer is None else buffer
            for buffer, target in zip(out, targets, strict=True)
        ]
        put(array, start, stop, buffers)
        return buffers

    filling = FillJob(arrays, targets, rows, memory, stacked=stacked)
    return ParameterFillJob(
        filling.fill, lambda: QuantizedWeight(tuple(filling.done()), form.name, str(dtype)).to_device_layout()
    )


def _joined_fill(parts: Sequence[ParameterFillJob]) -> ParameterFillJob:
    """Parts next to each other, each in its own format."""

    def fill(layer: int) -> None:
        for part in parts:
            part.fill(layer)

    return ParameterFillJob(fill, lambda: JoinedWeight(tuple(part.done() for part in parts)))


def _mixed_fill(stacks: Sequence[ParameterFillJob], locations: tuple[tuple[int, int], ...]) -> ParameterFillJob:
    """Layers in several formats, with a stack for each."""

    def fill(layer: int) -> None:
        stack, at = locations[layer]
        stacks[stack].fill(at)

    return ParameterFillJob(fill, lambda: MixedStack(tuple(stack.done() for stack in stacks), locations))


def put_on_default_device(params: Any) -> Any:
    """Parameters in NumPy arrays on the default device, which takes over their memory if it can: in one call, whose overhead
    is that of ten arrays."""
    is_weight = lambda leaf: isinstance(leaf, QuantizedWeight)
    on_device = jax.device_put(params, may_alias=True)
    return jax.tree.map(lambda leaf: leaf.to_device_layout() if is_weight(leaf) else leaf, on_device, is_leaf=is_weight)


def _source_blocks(part: TensorSlice) -> Tensor:
    blocks = row_bytes_of(part.tensor)
    assert blocks is not None  # by `can_be_kept`
    return blocks


def _put_encoded(form: QuantFormat, array: ArraySource, start: int, stop: int, planes: Sequence[np.ndarray]) -> None:
    """Fill planes with entries [start, stop), few rows at a time: encoding makes several arrays as large as its input."""
    assert form.encode is not None  # `check_quantize` rejects others
    columns = array.shape[-1]
    matrix = array.rows(start, stop, np.dtype(np.float32)).reshape(-1, columns)
    flat = [memory.reshape(plane.packed_shape(matrix.shape)[0]) for plane, memory in zip(form.planes, planes, strict=True)]
    step = max(1, ENCODED_AT_ONCE // columns)
    for first in range(0, len(matrix), step):
        for memory, encoded in zip(flat, form.encode(matrix[first : first + step]), strict=True):
            memory[first : first + step] = encoded


def _width(part: TensorSlice) -> int:
    assert part.columns is not None
    return part.columns.stop - part.columns.start


def check_block_columns(label: object, shape: tuple[int, ...], form: QuantFormat, sharding: Any) -> None:
    """Raise CheckpointError if the rows of a matrix, or a device's part of them, are not whole blocks of a format."""
    columns = shape[-1]
    devices = columns // columns_on_each(shape, sharding)
    if columns % (form.block * devices):
        over = f" on each of {devices} devices" if devices > 1 else ""
        raise CheckpointError(
            f"{label} has rows of {columns} values, but {form.name} needs multiples of {form.block}{over}; pass dtype="
            " (--dtype) for floats"
        )


def _put_stored(
    stored_form: QuantFormat, form: QuantFormat, array: ArraySource, start: int, stop: int, planes: Sequence[np.ndarray]
) -> None:
    """Fill planes of `form`, which may have smaller groups than the tensors' format, with entries [start, stop).

    Blocks run along the columns, so that rows can be permuted like those of floats.
    """
    for part in array.parts:
        per_entry = part.tensor.shape[0] // array.shape[0]
        raw = part.tensor.read(start * per_entry, stop * per_entry)
        targets = [memory if part.columns is None else memory[:, part.columns] for memory in planes]
        raw = raw.reshape(*targets[0].shape[: len(array.shape) - 1], -1)
        if stored_form.is_gguf:
            fill_planes(targets, raw.reshape(*raw.shape[:-1], array.shape[-1] // stored_form.block, -1), stored_form.planes)
        else:
            decoded = stored_form.from_rows(raw, array.shape[-1])
            if stored_form is not form:
                decoded = regroup(decoded, stored_form, form)
            for target, values in zip(targets, decoded, strict=True):
                target[...] = values.reshape(target.shape)
        for target, plane in zip(targets, form.planes, strict=True):
            if jnp.issubdtype(plane.dtype, jnp.floating):
                check_finite(target, target.dtype, part.label)
