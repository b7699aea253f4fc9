"""Arrays from a store over several processes: each reads its part of the rows, and devices exchange what they need.

A file holds a matrix row by row. If it is sharded by columns a process would have to fetch every row whole, on eight hosts
eight times the bytes that it keeps, or a range of bytes for each row. The network between the devices is faster: the rows
are divided among all devices as they are read, and one program brings each number to its place.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from llama_jax.checkpoints.fill import ArrayParts, Part, fill
from llama_jax.checkpoints.tensors import Padded
from llama_jax.ops.rotary_order import half_from_interleaved

MOST_READ = 1.05  # bytes that a process may read of an array, for each that it keeps


def reads_others(
    shape: tuple[int, ...], sharding: Any, process_of: Callable[[Any], int] = lambda device: device.process_index
) -> bool:
    """Whether a process that reads whole rows would read more of an array than it keeps; the same in all processes."""
    if not isinstance(sharding, NamedSharding):
        return False
    held: dict[int, set[tuple[tuple[int, int], ...]]] = {}
    for device, place in sharding.devices_indices_map(shape).items():
        cut = tuple(each.indices(size)[:2] for each, size in zip(place, shape, strict=True))
        held.setdefault(process_of(device), set()).add(cut)
    if len(held) == 1:
        return False
    row = math.prod(shape[1:])
    for places in held.values():
        kept = sum(math.prod(stop - start for start, stop in place) for place in places)
        rows = {place[0] for place in places}  # those of different places do not overlap
        if sum(stop - start for start, stop in rows) * row > MOST_READ * kept:
            return True
    return False


def fill_by_rows(array: ArrayParts, dtype: np.dtype, sharding: NamedSharding) -> jax.Array:
    """As `fill`, with each device reading an equal part of the rows. All processes must call it, in the same order.

    While it runs a device holds its share of the array twice.
    """
    mesh = Mesh(sharding.mesh.devices.reshape(-1), ("rows",), axis_types=(AxisType.Auto,))
    apart = NamedSharding(mesh, P("rows"))
    program = _program(array.shape, tuple(_Piece.of(part) for part in array.parts), sharding)
    found = program([fill(_alone(part, mesh.size), dtype, apart) for part in array.parts])
    return jax.block_until_ready(found)


class _Piece(NamedTuple):
    """The fields of a `Part` that determine where its rows go."""

    shape: tuple[int, ...]
    columns: tuple[int, int] | None
    interleaved: bool

    @classmethod
    def of(cls, part: Part) -> _Piece:
        columns = None if part.columns is None else (part.columns.start, part.columns.stop)
        return cls(part.tensor.shape, columns, part.interleaved)


def _alone(part: Part, devices: int) -> ArrayParts:
    """The tensor of a part as an array of its own, with as many rows as can be divided."""
    rows, *rest = part.tensor.shape
    padded = -(-rows // devices) * devices
    tensor = part.tensor if padded == rows else Padded(part.tensor, padded)
    return ArrayParts((padded, *rest), (Part(part.label, tensor),), stored=True)


@cache
def _program(shape: tuple[int, ...], pieces: tuple[_Piece, ...], sharding: NamedSharding) -> Callable[[Any], jax.Array]:
    """Brings the rows of tensors to their places, as `ArrayParts.rows` does on the host."""

    def arrange(tensors: list[jax.Array]) -> jax.Array:
        found = []
        for tensor, piece in zip(tensors, pieces, strict=True):
            width = shape[1:] if piece.columns is None else (piece.columns[1] - piece.columns[0], *shape[2:])
            hole = (shape[0], *width)
            tensor = tensor[: piece.shape[0]]
            if piece.interleaved:
                vector = len(piece.shape) == 1
                tensor = half_from_interleaved(tensor.reshape(*hole, 1) if vector else tensor.reshape(hole))
            found.append(tensor.reshape(hole))
        return found[0] if len(found) == 1 else jnp.concatenate(found, axis=1)

    return jax.jit(arrange, out_shardings=sharding)
