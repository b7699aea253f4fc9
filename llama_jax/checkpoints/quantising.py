"""Weights quantised while they are read, or kept in the blocks of their file: the dense model is never in memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np

from llama_jax.checkpoints.fill import Array, Part, Target, fill, fill_targets
from llama_jax.checkpoints.tensors import Described, blocks_of
from llama_jax.errors import CheckpointError
from llama_jax.ops.rotary_order import half_from_interleaved
from llama_jax.ops.weights import KINDS, JoinedWeight, Kind, Name, QuantizedWeight, shardings_of_planes
from llama_jax.ops.weights.kinds import split

Quantization = Literal[Name, "keep"]
AT_ONCE = 1 << 16  # numbers that are encoded at a time: 256 KB, which a core's second cache holds several times
WRITABLE = tuple(name for name in get_args(Name) if KINDS[name].encode is not None)


def check_quantize(quantize: str | None) -> None:
    """Raise CheckpointError for what a model cannot be read as."""
    if quantize is None or quantize == "keep" or quantize in WRITABLE:
        return
    if quantize in KINDS:
        raise CheckpointError(
            f"quantize={quantize!r}: blocks of this kind are only kept, from a GGUF that has them; use 'keep',"
            f" or one of {', '.join(WRITABLE)}"
        )
    raise CheckpointError(f"quantize={quantize!r} is not one of {', '.join(WRITABLE)}, keep")


def check_kept(tensors: Iterable[Described], where: Path) -> None:
    """Raise CheckpointError where no tensor of a model is in blocks that could be kept."""
    if not any(KINDS.get(tensor.kind.lower()) is not None and blocks_of(tensor) is not None for tensor in tensors):
        kinds = ", ".join(sorted({tensor.kind for tensor in tensors}))
        known = ", ".join(name.upper() for name, form in KINDS.items() if form.of_gguf)
        raise CheckpointError(
            f"quantize='keep': {where} has no tensor in blocks of {known} ({kinds}); use {', '.join(WRITABLE)}"
        )


def fill_weight(array: Array, dtype: np.dtype, quantize: Quantization | None, sharding: Any) -> Any:
    """A parameter on the devices of `sharding`: `fill`, or what stands in the place of its array.

    Args:
      dtype: of the computation, and of what is not quantised.
      quantize: a kind, by the nearest numbers; or "keep": blocks of a GGUF as they are, in several parts where queries, keys
        and values are of different kinds, and floats where a tensor has none that are kept.

    Raises:
      CheckpointError: rows that are not made of whole blocks, or what `fill` raises.
    """
    if quantize is None or not array.is_matrix:
        return fill(array, dtype, sharding)
    if quantize != "keep":
        form = KINDS[quantize]
        _check_columns(array, form, sharding)
        return _fill_planes(
            array, form, dtype, sharding, lambda start, stop: _encoded(array.rows(start, stop, np.dtype(np.float32)), form)
        )
    forms = [_kept_as(part) for part in array.parts]
    if len(set(forms)) > 1:
        parts = [replace(part, columns=None) for part in array.parts]
        shapes = [(array.shape[0], _width(part), *array.shape[2:]) for part in array.parts]
        alone = [Array(shape, (part,), is_matrix=True) for shape, part in zip(shapes, parts, strict=True)]
        return JoinedWeight(tuple(fill_weight(one, dtype, quantize, sharding) for one in alone))
    if forms[0] is None:
        return fill(array, dtype, sharding)
    _check_columns(array, forms[0], sharding)
    return _fill_planes(array, forms[0], dtype, sharding, _reading_blocks(array, forms[0]))


def _encoded(matrix: np.ndarray, form: Kind) -> Sequence[np.ndarray]:
    """The planes of float32[*out, D], few rows at a time: encoding makes several arrays as large as what is given to it."""
    assert form.encode is not None  # `check_quantize` refuses the others
    rows = matrix.reshape(-1, matrix.shape[-1])
    planes = [np.empty(plane.shape(rows.shape), plane.dtype) for plane in form.planes]
    step = max(1, AT_ONCE // rows.shape[-1])
    for start in range(0, len(rows), step):
        for plane, found in zip(planes, form.encode(rows[start : start + step]), strict=True):
            plane[start : start + step] = found
    return [found.reshape(plane.shape(matrix.shape)) for found, plane in zip(planes, form.planes, strict=True)]


def _width(part: Part) -> int:
    assert part.columns is not None
    return part.columns.stop - part.columns.start


def _kept_as(part: Part) -> Kind | None:
    """The kind of the blocks that a tensor has, if it is one that is kept."""
    form = KINDS.get(part.tensor.kind.lower())
    return form if form is not None and blocks_of(part.tensor) is not None else None


def _check_columns(array: Array, form: Kind, sharding: Any) -> None:
    columns, parts = array.shape[-1], 1
    if sharding is not None:
        parts = columns // sharding.shard_shape(array.shape)[-1]
    if columns % (form.block * parts):
        over = f" on each of {parts} devices" if parts > 1 else ""
        raise CheckpointError(
            f"{array.parts[0].label} has rows of {columns} numbers, and {form.name} needs multiples of {form.block}{over}"
        )


def _fill_planes(
    array: Array, form: Kind, dtype: np.dtype, sharding: Any, rows: Callable[[int, int], Sequence[np.ndarray]]
) -> QuantizedWeight:
    places = shardings_of_planes(form, sharding, len(array.shape))
    targets = [
        Target(plane.shape(array.shape), np.dtype(plane.dtype), place)
        for plane, place in zip(form.planes, places, strict=True)
    ]

    def write(start: int, stop: int, out: Sequence[np.ndarray | None]) -> Sequence[np.ndarray]:
        found = rows(start, stop)
        for memory, run in zip(out, found, strict=True):
            if memory is not None:
                memory[...] = run
        return found

    return QuantizedWeight(tuple(fill_targets(array, targets, write)), form.name, str(dtype))


def _reading_blocks(array: Array, form: Kind) -> Callable[[int, int], Sequence[np.ndarray]]:
    """Reads rows as planes; the blocks lie along the columns, so that rows may be moved as those of floats are."""

    def rows(start: int, stop: int) -> Sequence[np.ndarray]:
        shape = (stop - start, *array.shape[1:])
        out = [np.empty(plane.shape(shape), plane.dtype) for plane in form.planes]
        for part in array.parts:
            per_entry = part.tensor.shape[0] // array.shape[0]
            blocks = blocks_of(part.tensor)
            assert blocks is not None
            raw = blocks.read(start * per_entry, stop * per_entry)
            count = array.shape[-1] // form.block
            for plane, found, memory in zip(
                form.planes, split(raw.reshape(*raw.shape[:-1], count, -1), form.planes), out, strict=True
            ):
                hole = memory if part.columns is None else memory[:, part.columns]
                found = found.reshape(hole.shape)
                if plane.dtype == np.float16 and not np.isfinite(found).all():
                    raise CheckpointError(f"{part.label} holds NaN or infinity; the file is damaged")
                hole[...] = half_from_interleaved(found) if part.interleaved else found
        return out

    return rows
