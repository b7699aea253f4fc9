"""How a device holds the planes of a weight, and how rows are taken out of a table that lies so.

The axes of a plane are always the same; where a device holds it in another order, only the layout of the array says it.
Integers of 4 bits have their own type on accelerators, whose compilers read it. XLA for CPU does not: it would write each of
them as a byte before the loop over tokens, and JAX would need them so to make an array; so a CPU has them `packed`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.layout import Format, Layout

from llama_jax.ops.platform import TPU_LANES, is_divided, lowering_platform
from llama_jax.ops.weights.format_spec import INT4, QuantField, QuantFormat, bits_of, packed, unpacked

TILES = {8: 32, 4: 64}  # and rows of them, by the bits of a number
ROWS_AT_ONCE = 64  # rows to take


def storage_order(plane: QuantField, ndim: int, platform: str) -> tuple[int, ...] | None:
    """The axes of a plane from the slowest to the fastest; None where they are stored as they are written.

    A TPU's matmul by groups reads a weight whose groups come first. Stored otherwise, the compiler writes all weights of a
    model in that order before it decodes, 3.9 GB of Llama 3.1 8B in `int4`, which stay until the end. Groups smaller than
    its lanes would be filled up to them; those it stores otherwise by itself.
    """
    if platform != "tpu" or not plane.grouped or plane.entries != TPU_LANES:
        return None
    layers = (0,) if ndim > 3 else ()  # whose slices are to lie together
    return (*layers, ndim - 2, *range(len(layers), ndim - 2), ndim - 1)


def arranged(plane: QuantField, array: Any) -> Any:
    """A plane as its devices are to hold it, of integers of 4 bits that are `packed` or not; of a `jax.ShapeDtypeStruct` the
    same, with that layout.

    What is on no device, and what is traced, is given back as it is.
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
    return jax.block_until_ready(jax.device_put(array, form))  # waited for, since each is there twice meanwhile


def platform_of(sharding: Any) -> str:
    """The platform of the devices of a sharding."""
    return next(iter(sharding.device_set)).platform


def _as_the_other(array: Any) -> Any:
    """Integers of 4 bits `packed`, and what is packed as such integers."""
    change = packed if array.dtype == INT4 else _out_of_bytes
    if isinstance(array, jax.ShapeDtypeStruct):
        shape = jax.eval_shape(change, array)
        return jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=array.sharding)
    return jax.block_until_ready(jax.jit(change, out_shardings=array.sharding)(array))  # for the same reason as above


def _out_of_bytes(array: jax.Array) -> jax.Array:
    return unpacked(array).astype(INT4)


def take(form: QuantFormat, tables: tuple[jax.Array, ...], rows: jax.Array) -> tuple[jax.Array, ...]:
    """Some rows of the planes of a table: each [*rows, ...], where integers of 4 bits may have become such of 8.

    To take a row out of the middle of a tile, a TPU's compiler would write the whole table in tiles of 8 rows, 525 MB for
    every token of Llama 3; so whole tiles are taken, and the row out of each.
    """
    if lowering_platform() != "tpu":
        return tuple(table[rows] for table in tables)
    by_groups = storage_order(form.planes[0], 3, "tpu") is not None
    return tuple((_take_groups if by_groups else _take_rows)(table, rows) for table in tables)


def in_runs(embed: Callable[[jax.Array], jax.Array], rows: jax.Array) -> jax.Array:
    """`embed` of some rows, on a TPU of few at a time: of 512 tokens the tiles that are taken are 67 MB."""
    if lowering_platform() != "tpu" or rows.size <= ROWS_AT_ONCE or is_divided():
        return embed(rows)
    taken = lax.map(embed, rows.reshape(-1), batch_size=ROWS_AT_ONCE)
    return taken.reshape(*rows.shape, *taken.shape[1:])


def _take_rows(table: jax.Array, rows: jax.Array) -> jax.Array:
    """Rows of a table of 8-bit numbers, [V, D]; of others as JAX takes them."""
    tile = TILES[8]
    if table.ndim != 2 or table.dtype.itemsize > 1 or len(table) % tile:
        return table[rows]
    return _out_of_tiles(table.reshape(-1, tile, table.shape[-1])[rows // tile], rows % tile)


def _take_groups(table: jax.Array, rows: jax.Array) -> jax.Array:
    """Rows of a table stored groups first: [V, groups, 128], or [V, groups], which a TPU stores so by itself if few."""
    groups, rest = table.shape[1], table.shape[2:]
    tile = TILES.get(bits_of(table.dtype)) if rest else TPU_LANES
    if tile is None or len(table) % tile or (not rest and groups >= TPU_LANES) or is_divided():
        return table[rows]
    # One axis for groups and tiles, so that the compiler has no other order to choose.
    tiles = jnp.moveaxis(table, 1, 0).reshape(-1, tile, *rest)
    where = jnp.arange(groups) * (len(table) // tile) + (rows // tile)[..., None]
    return _out_of_tiles(tiles[where], (rows % tile)[..., None])


def _out_of_tiles(tiles: jax.Array, rows: jax.Array) -> jax.Array:
    """A row of each tile, [*rows, tile, ...]: [*rows, ...]. All but one are added up as zeros."""
    chosen = rows[..., None] == jnp.arange(tiles.shape[rows.ndim])
    selected = jnp.where(chosen.reshape(*chosen.shape, *[1] * (tiles.ndim - chosen.ndim)), tiles, 0)
    return jnp.sum(selected, axis=rows.ndim, dtype=jnp.int8 if tiles.dtype == INT4 else tiles.dtype)
