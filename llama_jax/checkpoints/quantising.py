"""Weights quantised while they are read, or kept as their files have them: the dense model is never in memory."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

import jax.numpy as jnp
import numpy as np

from llama_jax.checkpoints.exchange import fill_by_rows, reads_others
from llama_jax.checkpoints.fill import ArrayParts, ArrayToFill, Part, fill, fill_targets
from llama_jax.checkpoints.quantized_tensors import Reordered
from llama_jax.checkpoints.stored_weights import StoredWeight
from llama_jax.checkpoints.tensors import FLOATS, Described, blocks_of
from llama_jax.errors import CheckpointError
from llama_jax.ops.rotary_order import half_from_interleaved
from llama_jax.ops.weights import KINDS, JoinedWeight, Kind, Name, QuantizedWeight, fitting, shardings_of_planes
from llama_jax.ops.weights.kinds import MADE
from llama_jax.ops.weights.planes import in_smaller_groups
from llama_jax.ops.weights.weight import columns_on_each
from llama_jax.storage import Location

Quantization = Literal[Name, "keep"]
_log = logging.getLogger("llama_jax.checkpoints")
AT_ONCE = 1 << 16  # numbers that are encoded at a time: 256 KB, which a core's second cache holds several times


def check_quantize(quantize: str | None) -> None:
    """Raise CheckpointError for a kind in which a model cannot be read."""
    if quantize is None or quantize == "keep" or quantize in MADE:
        return
    if quantize in KINDS:
        raise CheckpointError(
            f"quantize={quantize!r}: blocks of this kind are only kept, from a GGUF that has them; use 'keep',"
            f" or one of {', '.join(MADE)}"
        )
    raise CheckpointError(f"quantize={quantize!r} is not one of {', '.join(MADE)}, keep")


def check_kept(tensors: Sequence[Described], where: Location) -> None:
    """Raise CheckpointError if no tensor of a model is quantised in a kind that can be kept, or its columns are permuted."""
    if any(isinstance(tensor, Reordered) for tensor in tensors):
        raise CheckpointError(
            f"quantize='keep': {where} has columns in another order than their groups (desc_act); use {', '.join(MADE)}"
        )
    if not any(map(can_be_kept, tensors)):
        kinds = ", ".join(sorted({tensor.kind for tensor in tensors}))
        raise CheckpointError(
            f"quantize='keep': {where} has no quantised tensor of those that are kept ({kinds}); use {', '.join(MADE)}"
        )


def quantized_kinds(tensors: Mapping[str, Described], among: Callable[[Described], bool] = lambda tensor: True) -> str:
    """The kinds of a model's quantized tensors, the most bytes first, as in "q4_1 and q8_0"; "" where there are none."""
    sizes: Counter[str] = Counter()
    for tensor in tensors.values():
        if tensor.kind not in FLOATS and among(tensor):
            sizes[tensor.kind.lower()] += tensor.nbytes
    return " and ".join(kind for kind, _ in sizes.most_common())


def log_what_becomes_floats(tensors: Mapping[str, Described], where: Location) -> None:
    """Log a line for quantized tensors that cannot be kept."""
    if kinds := quantized_kinds(tensors, lambda tensor: not can_be_kept(tensor)):
        _log.warning("%s: tensors in %s become floats: such blocks, or their order of columns, are not kept", where, kinds)


def can_be_kept(tensor: Described) -> bool:
    """Whether a tensor is quantized in a kind that the parameters may have."""
    return isinstance(tensor, StoredWeight) or (tensor.kind.lower() in KINDS and blocks_of(tensor) is not None)


def fill_weight(array: ArrayParts, dtype: np.dtype, quantize: Quantization | None, sharding: Any) -> Any:
    """A parameter on the devices of `sharding`: an array by `fill`, or a quantised weight in its place.

    Args:
      dtype: of the computation, and of parameters that are not quantised.
      quantize: a kind, into which numbers are rounded to nearest; or "keep": quantised tensors as they are in the files, in
        several parts if queries, keys and values are of different kinds; floats for other tensors.

    Raises:
      CheckpointError: rows that are not made of whole blocks, or what `fill` raises.
    """
    forms = [_kept_as(part) if quantize == "keep" else None for part in array.parts]
    if not array.is_matrix or (quantize in (None, "keep") and not any(forms)):
        exchanged = array.stored and reads_others(array.shape, sharding)
        return (fill_by_rows if exchanged else fill)(array, dtype, sharding)
    if quantize is not None and quantize != "keep":
        form = fitting(quantize, columns_on_each(array.shape, sharding))
        _check_columns(array, form, sharding)
        return _fill_planes(
            array, form, dtype, sharding, lambda start, stop: _encoded(array.rows(start, stop, np.dtype(np.float32)), form)
        )
    if len(set(forms)) > 1:
        parts = [replace(part, columns=None) for part in array.parts]
        shapes = [(array.shape[0], _width(part), *array.shape[2:]) for part in array.parts]
        alone = [
            ArrayParts(shape, (part,), is_matrix=True, stored=array.stored)
            for shape, part in zip(shapes, parts, strict=True)
        ]
        return JoinedWeight(tuple(fill_weight(one, dtype, quantize, sharding) for one in alone))
    assert forms[0] is not None
    form = fitting(forms[0].name, columns_on_each(array.shape, sharding))
    _check_columns(array, form, sharding)
    return _fill_planes(array, form, dtype, sharding, _reading_blocks(array, forms[0], form))


def _encoded(matrix: np.ndarray, form: Kind) -> Sequence[np.ndarray]:
    """The planes of float32[*out, D], few rows at a time: encoding makes several arrays as large as what is given to it."""
    assert form.encode is not None  # `check_quantize` refuses the others
    rows = matrix.reshape(-1, matrix.shape[-1])
    planes = [np.empty(*plane.packed(rows.shape)) for plane in form.planes]
    step = max(1, AT_ONCE // rows.shape[-1])
    for start in range(0, len(rows), step):
        for plane, found in zip(planes, form.encode(rows[start : start + step]), strict=True):
            plane[start : start + step] = found
    return [found.reshape(plane.packed(matrix.shape)[0]) for found, plane in zip(planes, form.planes, strict=True)]


def _width(part: Part) -> int:
    assert part.columns is not None
    return part.columns.stop - part.columns.start


def _kept_as(part: Part) -> Kind | None:
    """The kind of the blocks that a tensor has, if it is one that is kept."""
    return KINDS[part.tensor.kind.lower()] if can_be_kept(part.tensor) else None


def _check_columns(array: ArrayParts, form: Kind, sharding: Any) -> None:
    columns = array.shape[-1]
    parts = columns // columns_on_each(array.shape, sharding)
    if columns % (form.block * parts):
        over = f" on each of {parts} devices" if parts > 1 else ""
        raise CheckpointError(
            f"{array.parts[0].label} has rows of {columns} numbers, and {form.name} needs multiples of {form.block}{over};"
            " pass dtype= (--dtype) for floats"
        )


def _fill_planes(
    array: ArrayParts, form: Kind, dtype: np.dtype, sharding: Any, rows: Callable[[int, int], Sequence[np.ndarray]]
) -> QuantizedWeight:
    places = shardings_of_planes(form, sharding, len(array.shape))
    targets = [ArrayToFill(*plane.packed(array.shape), place) for plane, place in zip(form.planes, places, strict=True)]

    def write(start: int, stop: int, out: Sequence[np.ndarray | None]) -> Sequence[np.ndarray]:
        found = rows(start, stop)
        for memory, run in zip(out, found, strict=True):
            if memory is not None:
                memory[...] = run
        return found

    return QuantizedWeight(tuple(fill_targets(array, targets, write)), form.name, str(dtype)).arranged()


def _reading_blocks(array: ArrayParts, kept: Kind, form: Kind) -> Callable[[int, int], Sequence[np.ndarray]]:
    """Reads rows of a kind as planes of `form`, which may have smaller groups.

    Blocks lie along the columns, so that rows may be moved as those of floats are.
    """

    def rows(start: int, stop: int) -> Sequence[np.ndarray]:
        shape = (stop - start, *array.shape[1:])
        out = [np.empty(*plane.packed(shape)) for plane in form.planes]
        for part in array.parts:
            per_entry = part.tensor.shape[0] // array.shape[0]
            blocks = blocks_of(part.tensor)
            assert blocks is not None
            raw = blocks.read(start * per_entry, stop * per_entry)
            planes = kept.from_rows(raw, array.shape[-1])
            if kept is not form:
                planes = in_smaller_groups(planes, kept, form)
            for found, memory in zip(planes, out, strict=True):
                hole = memory if part.columns is None else memory[:, part.columns]
                found = found.reshape(hole.shape)
                if jnp.issubdtype(found.dtype, jnp.floating) and not np.isfinite(found).all():
                    raise CheckpointError(f"{part.label} holds NaN or infinity; the file is damaged")
                hole[...] = half_from_interleaved(found) if part.interleaved else found
        return out

    return rows
