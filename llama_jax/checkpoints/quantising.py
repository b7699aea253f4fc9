"""Weights quantised while they are read, or kept as their files have them: the dense model is never in memory."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from llama_jax.checkpoints.exchange import fill_by_rows, reads_others
from llama_jax.checkpoints.fill import ArrayMemory, ArrayParts, ArrayToFill, Part, check, fill, fill_targets
from llama_jax.checkpoints.quantized_tensors import Reordered
from llama_jax.checkpoints.stored_weights import StoredWeight
from llama_jax.checkpoints.tensors import FLOATS, Described, Tensor, blocks_of
from llama_jax.errors import CheckpointError
from llama_jax.model.mixtures import MIXTURES
from llama_jax.ops.weights import (
    KINDS,
    JoinedWeight,
    Kind,
    Name,
    Pure,
    QuantizedWeight,
    fitting,
    shardings_of_planes,
    with_fallback,
)
from llama_jax.ops.weights.kinds import MADE
from llama_jax.ops.weights.planes import in_smaller_groups, split_into
from llama_jax.ops.weights.weight import columns_on_each
from llama_jax.storage import Location

Quantization = Literal[Name, Pure, "keep"]
_log = logging.getLogger("llama_jax.checkpoints")
AT_ONCE = 1 << 16  # numbers that are encoded at a time: 256 KB, which a core's second cache holds several times


def check_quantize(quantize: str | None) -> None:
    """Raise CheckpointError for a kind in which a model cannot be read."""
    if quantize is None or quantize == "keep" or quantize in MIXTURES:
        return
    if quantize in KINDS:
        raise CheckpointError(
            f"quantize={quantize!r}: blocks of this kind are only kept, from a GGUF that has them; use 'keep',"
            f" or one of {', '.join(MADE)}"
        )
    raise CheckpointError(f"quantize={quantize!r} is not one of {', '.join(MIXTURES)}, keep")


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


def kinds_of(array: ArrayParts) -> tuple[str | None, ...]:
    """The kinds in which `load` keeps the parts of a parameter, None for floats; of parts of one kind that alone."""
    kinds = tuple(part.tensor.kind.lower() if can_be_kept(part.tensor) else None for part in array.parts)
    return kinds if array.is_matrix and len(set(kinds)) > 1 else (kinds[0] if array.is_matrix else None,)


def fill_weight(
    array: ArrayParts,
    dtype: np.dtype,
    quantize: tuple[str, ...] | Literal["keep"] | None,
    sharding: Any,
    memory: ArrayMemory,
) -> Any:
    """A parameter on the devices of `sharding`, of NumPy's arrays where it is None: one by `fill`, or a quantised weight.

    Args:
      dtype: of the computation, and of parameters that are not quantised.
      quantize: the kind into which numbers are rounded, or that of each part; or "keep": quantised tensors as they are in
        the files, floats for other tensors. In several parts if queries, keys and values are of different kinds.

    Raises:
      CheckpointError: rows that are not made of whole blocks, or what `fill` raises.
    """
    forms = [_kept_as(part) if quantize == "keep" else None for part in array.parts]
    if not array.is_matrix or (quantize in (None, "keep") and not any(forms)):
        if array.stored and reads_others(array.shape, sharding):
            return fill_by_rows(array, dtype, sharding)
        return fill(array, dtype, sharding, memory)
    kinds = quantize if isinstance(quantize, tuple) else None
    if kinds is not None and len(kinds) == 1:
        form = with_fallback(kinds[0], columns_on_each(array.shape, sharding))
        _check_columns(array, form, sharding)
        return _fill_planes(array, form, dtype, sharding, partial(_encoded, array, form), memory)
    if kinds is not None or len(set(forms)) > 1:
        parts = [replace(part, columns=None) for part in array.parts]
        shapes = [(array.shape[0], _width(part), *array.shape[2:]) for part in array.parts]
        alone = [replace(array, shape=shape, parts=(part,)) for shape, part in zip(shapes, parts, strict=True)]
        each = [quantize] * len(parts) if kinds is None else [(kind,) for kind in kinds]
        filled = [fill_weight(one, dtype, own, sharding, memory) for one, own in zip(alone, each, strict=True)]
        return JoinedWeight(tuple(filled))
    assert forms[0] is not None
    form = fitting(forms[0].name, columns_on_each(array.shape, sharding))
    _check_columns(array, form, sharding)
    blocks = replace(array, parts=tuple(replace(part, tensor=_blocks(part)) for part in array.parts))
    return _fill_planes(blocks, form, dtype, sharding, partial(_kept, blocks, forms[0], form), memory)


def placed(params: Any) -> Any:
    """Parameters of NumPy's arrays on the default device, which takes over their memory if it can: in one call, since each
    costs as much as ten arrays in it."""
    is_weight = lambda leaf: isinstance(leaf, QuantizedWeight)
    found = jax.device_put(params, may_alias=True)
    return jax.tree.map(lambda leaf: leaf.arranged() if is_weight(leaf) else leaf, found, is_leaf=is_weight)


def _blocks(part: Part) -> Tensor:
    found = blocks_of(part.tensor)
    assert found is not None  # by `can_be_kept`
    return found


def _encoded(array: ArrayParts, form: Kind, start: int, stop: int, planes: Sequence[np.ndarray]) -> None:
    """Fill planes with entries [start, stop), few rows at a time: encoding makes several arrays as large as its input."""
    assert form.encode is not None  # `check_quantize` refuses the others
    columns = array.shape[-1]
    matrix = array.rows(start, stop, np.dtype(np.float32)).reshape(-1, columns)
    flat = [memory.reshape(plane.packed(matrix.shape)[0]) for plane, memory in zip(form.planes, planes, strict=True)]
    step = max(1, AT_ONCE // columns)
    for first in range(0, len(matrix), step):
        for memory, found in zip(flat, form.encode(matrix[first : first + step]), strict=True):
            memory[first : first + step] = found


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
    array: ArrayParts,
    form: Kind,
    dtype: np.dtype,
    sharding: Any,
    put: Callable[[int, int, Sequence[np.ndarray]], None],
    memory: ArrayMemory,
) -> QuantizedWeight:
    """A weight whose planes a function fills, given the first and the last of some rows, and contiguous memory for them."""
    places = shardings_of_planes(form, sharding, len(array.shape))
    targets = [ArrayToFill(*plane.packed(array.shape), place) for plane, place in zip(form.planes, places, strict=True)]

    def rows(start: int, stop: int, out: Sequence[np.ndarray | None]) -> Sequence[np.ndarray]:
        found = [
            np.empty((stop - start, *target.shape[1:]), target.dtype) if there is None else there
            for there, target in zip(out, targets, strict=True)
        ]
        put(start, stop, found)
        return found

    return QuantizedWeight(tuple(fill_targets(array, targets, rows, memory)), form.name, str(dtype)).arranged()


def _kept(array: ArrayParts, kept: Kind, form: Kind, start: int, stop: int, planes: Sequence[np.ndarray]) -> None:
    """Fill planes of `form`, which may have smaller groups, with entries [start, stop) of tensors of a kind.

    Blocks lie along the columns, so that rows may be moved as those of floats are.
    """
    for part in array.parts:
        per_entry = part.tensor.shape[0] // array.shape[0]
        raw = part.tensor.read(start * per_entry, stop * per_entry)
        holes = [memory if part.columns is None else memory[:, part.columns] for memory in planes]
        raw = raw.reshape(*holes[0].shape[: len(array.shape) - 1], -1)
        if part.interleaved:
            *heads, rows, _ = raw.shape
            raw = raw.reshape(*heads, rows // 2, 2, -1).swapaxes(-3, -2)
            holes = [hole.reshape(*heads, 2, rows // 2, *hole.shape[len(heads) + 1 :]) for hole in holes]
        if kept.of_gguf:
            split_into(holes, raw.reshape(*raw.shape[:-1], array.shape[-1] // kept.block, -1), kept.planes)
        else:
            found = kept.from_rows(raw, array.shape[-1])
            for hole, one in zip(holes, in_smaller_groups(found, kept, form) if kept is not form else found, strict=True):
                hole[...] = one.reshape(hole.shape)
        for hole, plane in zip(holes, form.planes, strict=True):
            if jnp.issubdtype(plane.dtype, jnp.floating):
                check(hole, hole.dtype, part.label)
