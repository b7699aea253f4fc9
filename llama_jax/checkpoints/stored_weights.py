"""Quantised weights in the orbax format: their planes as arrays, and a file with the kind of each.

Integers of 4 bits are written two in a byte, floats of 8 bits as bytes: not every reader of arrays has these types.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from llama_jax.checkpoints.tensors import FLOATS
from llama_jax.config import LlamaConfig
from llama_jax.errors import CheckpointError, shown
from llama_jax.files import read_object
from llama_jax.model.params import Llama, row_at
from llama_jax.model.trees import in_kinds, is_weight
from llama_jax.ops.weights import KINDS, JoinedWeight, MixedStack, Plane, QuantizedWeight, shardings_of_planes
from llama_jax.ops.weights.order import arranged
from llama_jax.ops.weights.planes import FP8, INT4, packed
from llama_jax.ops.weights.weight import columns_on_each
from llama_jax.storage import Location

FILE = "quantized.json"
# By the name of a weight: its kind, None of floats; of a joined one a list of those of its parts; of layers that differ
# {"layers": [the kind of each]}.
Kinds = Mapping[str, Any]


@dataclass(frozen=True)
class StoredWeight:
    """A quantised weight, as `inspect` names it."""

    shape: tuple[int, ...]
    dtype: np.dtype
    kind: str
    nbytes: int


def kinds_of(params: Llama, name_of: Callable[[tuple[Any, ...]], str]) -> dict[str, Any]:
    """The kinds of the weights that are quantised."""
    weights = jax.tree.leaves_with_path(params, is_leaf=is_weight)
    return {name_of(path): _kind_of(leaf) for path, leaf in weights if is_weight(leaf)}


def _kind_of(leaf: Any) -> Any:
    if isinstance(leaf, JoinedWeight):
        return [_kind_of(part) for part in leaf.parts]
    if isinstance(leaf, MixedStack):
        kinds = [_kind_of(stack) for stack in leaf.stacks]
        return {"layers": [kinds[stack] for stack, _ in leaf.places]}
    return getattr(leaf, "kind", None)


def write_kinds(folder: Path, kinds: Kinds, dtype: str) -> None:
    """Write the file if something is quantised."""
    if kinds:
        (folder / FILE).write_text(json.dumps({"dtype": dtype, "kinds": kinds}, indent=1) + "\n")


def read_kinds(folder: Path) -> tuple[Kinds, str]:
    """The kinds, and the type of the computation; none where there is no such file.

    Raises:
      CheckpointError: a damaged file, or a kind that is not known.
    """
    if not (folder / FILE).exists():
        return {}, "float32"
    found = read_object(folder / FILE, CheckpointError)
    kinds, dtype = found.get("kinds"), found.get("dtype")
    if not isinstance(kinds, dict) or dtype not in {str(each) for each in FLOATS.values()}:
        raise CheckpointError(f"{folder / FILE} has no kinds, or no type ({shown(dtype, 40)}); copy it again")
    for name, kind in kinds.items():
        for each in _single_kinds(kind):
            if not (isinstance(each, str) and each in KINDS) and (each is not None or each is kind):
                raise CheckpointError(
                    f"{folder / FILE} has {shown(name, 60)} in the kind {shown(each, 40)}, which is not known"
                )
    return kinds, dtype


def _single_kinds(kind: Any) -> list[Any]:
    if isinstance(kind, dict) and isinstance(layers := kind.get("layers"), list):
        return layers
    return [one for each in kind for one in _single_kinds(each)] if isinstance(kind, list) else [kind]


def with_kinds(config: LlamaConfig, shapes: Llama, kinds: Kinds, name_of: Callable[..., str], where: Location) -> Llama:
    """Shapes of a model's matrices, with those of the stored planes in the place of each that is quantised.

    Raises:
      CheckpointError: what is no matrix, or does not consist of whole blocks.
    """
    left = set(kinds)

    def change(path: tuple[Any, ...], leaf: jax.ShapeDtypeStruct) -> Any:
        kind, row = kinds.get(name_of(path)), row_at(path)
        if kind is None:
            return leaf
        left.discard(name_of(path))
        layers = leaf.shape[0] if row.in_blocks else 1
        is_joined, parts = isinstance(kind, list), kind if isinstance(kind, list) else [kind]
        own = [one["layers"] if isinstance(one, dict) else [one] * layers for one in parts]
        possible = row.is_matrix and (not is_joined or (len(parts) == 3 and row.axes == "K G+2 H D"))
        if not possible or any(len(one) != layers for one in own):
            raise CheckpointError(
                f"{where / FILE} has {name_of(path)} in {shown(kind, 40)}, which is impossible; copy it again"
            )
        return in_kinds(leaf, list(zip(*own, strict=True)), lambda leaf, kind: of_kind(leaf, kind, name_of(path)))

    def of_kind(leaf: jax.ShapeDtypeStruct, kind: str | None, name: str) -> Any:
        if kind is None:
            return leaf
        form, shape = KINDS[kind], leaf.shape
        if shape[-1] % form.block:
            raise CheckpointError(f"{where / FILE} has {name} in {kind}, and its rows of {shape[-1]} are no whole blocks")
        return QuantizedWeight(tuple(_stored(plane, shape) for plane in form.planes), kind, "float32")

    found = jax.tree_util.tree_map_with_path(change, shapes)
    if left:
        raise CheckpointError(f"{where / FILE} names {shown(min(left), 60)}, which this model does not have; copy it again")
    return found


def _stored(plane: Plane, shape: tuple[int, ...]) -> jax.ShapeDtypeStruct:
    found, dtype = plane.packed(shape)
    return jax.ShapeDtypeStruct(found, np.dtype(np.uint8) if dtype == FP8 else dtype)


def placed(shape: Any, target: np.dtype, place: Any, where: Location) -> Any:
    """The request to orbax for a parameter to be placed at `place`: floats cast, planes as they are."""
    if isinstance(shape, JoinedWeight | MixedStack):
        is_inner = lambda leaf: leaf is not shape and is_weight(leaf)
        return jax.tree.map(lambda part: placed(part, target, place, where), shape, is_leaf=is_inner)
    if not isinstance(shape, QuantizedWeight):
        return jax.ShapeDtypeStruct(shape.shape, target, sharding=place)
    form, matrix = shape.form, matrix_of(shape)
    columns = columns_on_each(matrix, place)
    if columns % form.block:
        over = f" on each of {matrix[-1] // columns} devices"
        raise CheckpointError(
            f"{where} has rows of {matrix[-1]} numbers, and {form.name} needs multiples of {form.block}{over}"
        )
    places = shardings_of_planes(form, place, len(matrix))
    planes = [jax.ShapeDtypeStruct(one.shape, one.dtype, sharding=at) for one, at in zip(shape.planes, places, strict=True)]
    return QuantizedWeight(tuple(planes), shape.kind, str(target))


def matrix_of(stored: QuantizedWeight) -> tuple[int, ...]:
    """The shape of the matrix that stored planes are of."""
    first, array = stored.form.planes[0], stored.planes[0]
    if first.grouped:
        return (*array.shape[:-2], array.shape[-2] * first.numbers)
    return (*array.shape[:-1], array.shape[-1] * first.numbers // first.entries)


def to_arrays(params: Llama) -> Llama:
    """The parameters with their planes as they are written."""
    return _over_planes(params, _to_bytes)


def from_arrays(params: Llama) -> Llama:
    """The inverse of `to_arrays`."""
    return _over_planes(params, _from_bytes)


def _over_planes(params: Llama, change: Callable[[Any, Plane], Any]) -> Llama:
    def changed(leaf: Any) -> Any:
        if not isinstance(leaf, QuantizedWeight):
            return leaf
        planes = zip(leaf.planes, leaf.form.planes, strict=True)
        return leaf.replace(planes=tuple(change(array, plane) for array, plane in planes))

    return jax.tree.map(changed, params, is_leaf=lambda leaf: isinstance(leaf, QuantizedWeight))


def _to_bytes(array: Any, plane: Plane) -> Any:
    if plane.dtype == FP8:
        return lax.bitcast_convert_type(array, jnp.uint8)
    return jax.jit(packed)(array) if array.dtype == INT4 else array


def _from_bytes(array: jax.Array, plane: Plane) -> jax.Array:
    if plane.dtype == FP8:
        return arranged(plane, lax.bitcast_convert_type(array, FP8))
    found = arranged(plane, array)
    if found is not array:
        array.delete()
    return found
