"""The memory layout of the planes of a weight on a device, and row lookup in a table with that layout.

The axes of a plane are always the same; if a device stores them in another order, only the `Layout` of the JAX array shows
it. 4-bit integers are int4 arrays on accelerators, whose compilers read them packed. XLA for CPU would write each as a byte
before the loop over tokens, and JAX needs bytes to create such an array. So on a CPU they are packed in uint8, see
`pack_int4`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.layout import Format, Layout
from jaxtyping import Array, Float, Integer, Shaped

from llama_jax.ops.platform import TPU_LANES, is_partitioned, lowering_platform
from llama_jax.ops.weights.format_spec import INT4, QuantField, QuantFormat, bits_of, pack_int4, unpack_int4

TILES = {8: 32, 4: 64}  # rows of a TPU's tile, by bits per value
ROWS_AT_ONCE = 64  # rows per lookup on a TPU


def storage_order(plane: QuantField, ndim: int, platform: str) -> tuple[int, ...] | None:
    """The axes of a plane from the slowest to the fastest in memory; None for the default order.

    A TPU's matmul by groups reads weights whose groups are the first axis in memory. From another layout, the compiler would
    write all weights of a model in that order before decoding and keep them: 3.9 GB for Llama 3.1 8B in `int4`. Groups
    smaller than TPU_LANES would be padded; the compiler stores those in another order by itself.
    """
    if platform != "tpu" or not plane.grouped or plane.entries != TPU_LANES:
        return None
    layers = (0,) if ndim > 3 else ()  # slowest, so that the slice of a layer is contiguous
    return (*layers, ndim - 2, *range(len(layers), ndim - 2), ndim - 1)


def to_device_layout(plane: QuantField, array: Any) -> Any:
    """A plane in the memory layout of its devices, with 4-bit integers packed if they need it.

    A `jax.ShapeDtypeStruct` becomes one with that layout. Tracers and arrays without a sharding are returned unchanged.
    """
    if isinstance(array, jax.core.Tracer) or getattr(array, "sharding", None) is None:
        return array
    platform = platform_of(array.sharding)
    if plane.dtype == INT4 and (array.dtype == INT4) == (platform == "cpu"):
        array = _as_the_other(array)
    order = storage_order(plane, array.ndim, platform)
    if order is None:
        return array
    form = Format(Layout(order), array.sharding)
    if isinstance(array, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=form)
    return jax.block_until_ready(jax.device_put(array, form))  # wait: until then both copies are in memory


def platform_of(sharding: Any) -> str:
    """The platform of the devices of a sharding."""
    return next(iter(sharding.device_set)).platform


def _as_the_other(array: Any) -> Any:
    """Pack an int4 array, or unpack a packed array to int4."""
    change = pack_int4 if array.dtype == INT4 else _out_of_bytes
    if isinstance(array, jax.ShapeDtypeStruct):
        shape = jax.eval_shape(change, array)
        return jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=array.sharding)
    return jax.block_until_ready(jax.jit(change, out_shardings=array.sharding)(array))  # wait, as above


def _out_of_bytes(array: jax.Array) -> jax.Array:
    return unpack_int4(array).astype(INT4)


def take(
    form: QuantFormat, tables: tuple[jax.Array, ...], rows: Integer[Array, "*rows"]
) -> tuple[Shaped[Array, " ..."], ...]:
    """Rows of the planes of a table, each [*rows, ...]; int4 may become int8.

    To read a row inside a tile, a TPU's compiler would write the whole table in tiles of 8 rows: 525 MB per token for
    Llama 3. So whole tiles are read, and one row is selected from each.
    """
    if lowering_platform() != "tpu":
        return tuple(table[rows] for table in tables)
    by_groups = storage_order(form.planes[0], 3, "tpu") is not None
    return tuple((_take_groups if by_groups else _take_rows)(table, rows) for table in tables)


def in_runs(embed: Callable[[jax.Array], jax.Array], rows: Integer[Array, "*rows"]) -> Float[Array, "*rows D"]:
    """`embed(rows)`; on a TPU for a few rows at a time, because the tiles for 512 tokens would take 67 MB."""
    if lowering_platform() != "tpu" or rows.size <= ROWS_AT_ONCE or is_partitioned():
        return embed(rows)
    taken = lax.map(embed, rows.reshape(-1), batch_size=ROWS_AT_ONCE)
    return taken.reshape(*rows.shape, *taken.shape[1:])


def _take_rows(table: jax.Array, rows: jax.Array) -> jax.Array:
    """Rows of a table [V, D], by tiles if its values have 8 bits."""
    tile = TILES[8]
    if table.ndim != 2 or table.dtype.itemsize > 1 or len(table) % tile:
        return table[rows]
    return _out_of_tiles(table.reshape(-1, tile, table.shape[-1])[rows // tile], rows % tile)


def _take_groups(table: jax.Array, rows: jax.Array) -> jax.Array:
    """Rows of a table with groups first in memory: [V, groups, 128], or few groups [V, groups], a TPU's default order."""
    groups, rest = table.shape[1], table.shape[2:]
    tile = TILES.get(bits_of(table.dtype)) if rest else TPU_LANES
    if tile is None or len(table) % tile or (not rest and groups >= TPU_LANES) or is_partitioned():
        return table[rows]
    # One axis for groups and tiles, so that the compiler cannot choose another order.
    tiles = jnp.moveaxis(table, 1, 0).reshape(-1, tile, *rest)
    where = jnp.arange(groups) * (len(table) // tile) + (rows // tile)[..., None]
    return _out_of_tiles(tiles[where], (rows % tile)[..., None])


def _out_of_tiles(tiles: jax.Array, rows: jax.Array) -> jax.Array:
    """One row of each tile [*rows, tile, ...], selected by a masked sum: [*rows, ...]."""
    chosen = rows[..., None] == jnp.arange(tiles.shape[rows.ndim])
    selected = jnp.where(chosen.reshape(*chosen.shape, *[1] * (tiles.ndim - chosen.ndim)), tiles, 0)
    return jnp.sum(selected, axis=rows.ndim, dtype=jnp.int8 if tiles.dtype == INT4 else tiles.dtype)
