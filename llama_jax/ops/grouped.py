"""Matmuls of rows sorted by group, with one matrix per group: each row is multiplied only by its group's matrix.

JAX's `lax.ragged_dot` is not used. XLA multiplies every row by every group's matrix on a CPU and on a GPU (H100), and on a
TPU (v5e) for the gradient of the matrices. On a TPU it also copies all matrices [E, N, K] at every call (896 MiB for the
eight of Mixtral 8x7B). `jax.experimental.pallas.ops.tpu.megablox` (Gale et al. 2023, MegaBlocks) does neither. On other
platforms, a loop over the groups that have rows multiplies blocks of rows.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from jaxtyping import Array, Float, Int32

from llama_jax.ops.gradients import gradient_of_needed, with_gradient
from llama_jax.ops.layers import MATMUL_OUTPUT, Weight, dense, project, weight_gradient
from llama_jax.ops.platform import (
    KernelOptions,
    has_cpu_variant,
    lowering_platform,
    pack_bits,
    target_platform,
    unpack_bits,
)
from llama_jax.ops.weights.layers import index_stack, multiply_group

MAX_BLOCK_ROWS, MIN_BLOCK_ROWS = 512, 32  # rows per matmul
ROWS_OF_A_GROUP = 8  # rows of a group per row of the smallest block, half of which may be padding
QUANTIZED_BLOCKS = (512, 256, 128, 64, 16, 4, 1)
GPU_ROWS = 2  # with at most this many rows per group, rows are multiplied one by one
KERNEL_ROWS, KERNEL_COLUMNS = (128, 512), 512  # tile of the TPU kernel: minimum and maximum rows, columns


class Gather(NamedTuple):
    """Mesh axes over which the matrices are sharded, under `jax.shard_map`, and the array axis that is sharded."""

    mesh_axes: tuple[str, ...]
    axis: int


def grouped_matmul(
    x: Float[Array, "R K"],
    weight: Any,
    sizes: Int32[Array, " E"],
    *,
    gather: Gather | None = None,
    kernels: KernelOptions = KernelOptions(),
) -> Float[Array, "R N"]:
    """Multiply each row by the matrix of its group, contracting the last axis of both.

    Args:
      x: sorted by group.
      weight: [E, N, K], an array, which is cast to the dtype of `x` as in `layers.project`, or a quantized weight.
      sizes: rows of each group; their sum is R.
      gather: if `weight` is one device's shard: the shards are gathered, and their gradients summed and scattered.
      kernels: see `layers.project`.

    Returns:
      In the dtype of `x`; sums are float32 at least.
    """
    if kernels.forward_mode:
        product = _multiply("rows", x, _cast_and_gather(gather, dense(weight), x.dtype), sizes, x.dtype, kernels)
    elif isinstance(weight, Weight):
        product = _grouped_project(kernels, x, weight, sizes)
    elif gather is not None or x.dtype != weight.dtype:
        product = _cast_and_gathered((gather, kernels, weight.dtype), x, weight, sizes)
    else:
        product = _multiply("rows", x, weight, sizes, x.dtype, kernels)
    return checkpoint_name(product, MATMUL_OUTPUT)


def _cast_and_gather(gather: Gather | None, weight: jax.Array, dtype: Any) -> jax.Array:
    cast = weight.astype(dtype)
    return cast if gather is None else lax.all_gather(cast, gather.mesh_axes, axis=gather.axis, tiled=True)


def _forward_cast(
    settings: tuple[Any, ...], needed: Any, x: jax.Array, weight: jax.Array, sizes: jax.Array
) -> tuple[jax.Array, Any]:
    gather, kernels, _ = settings
    matrices = _cast_and_gather(gather, weight, x.dtype)
    product = _multiply("rows", x, matrices, sizes, x.dtype, kernels)
    return product, (x, matrices if kernels.save_cast_weights else weight, sizes)


def _backward_cast(settings: tuple[Any, ...], needed: Any, residuals: Any, gradient: jax.Array) -> tuple[Any, ...]:
    (gather, kernels, dtype), (x, weight, sizes) = settings, residuals
    matrices = weight if kernels.save_cast_weights else _cast_and_gather(gather, weight, x.dtype)
    dx = _multiply("columns", gradient, matrices, sizes, x.dtype, kernels)
    d_weight = _multiply("outer", gradient, x, sizes, dtype, kernels)
    if gather is not None:
        d_weight = lax.psum_scatter(d_weight, gather.mesh_axes, scatter_dimension=gather.axis, tiled=True)
    return dx, d_weight, None


@with_gradient(_forward_cast, _backward_cast)
def _cast_and_gathered(settings: tuple[Any, ...], x: jax.Array, weight: jax.Array, sizes: jax.Array) -> jax.Array:
    """`grouped_matmul` with an array in another dtype or in shards: the weight's gradient is summed in the weight's dtype.

    Args:
      settings: `gather`; `kernels`; the weight's dtype.
    """
    return _forward_cast(settings, None, x, weight, sizes)[0]


def _grouped_forward(
    kernels: KernelOptions, needed: Any, x: jax.Array, weight: Any, sizes: jax.Array
) -> tuple[jax.Array, Any]:
    multiply_block = partial(multiply_group, out_dtype=x.dtype, kernels=kernels)
    like = jax.ShapeDtypeStruct((len(x), weight.shape[1]), x.dtype)
    return _by_blocks(multiply_block, x, weight, sizes, like, kernels), (x, weight, sizes)


def _grouped_backward(
    kernels: KernelOptions, needed: Any, residuals: Any, gradient: jax.Array
) -> tuple[jax.Array, Any, None]:
    x, weight, sizes = residuals
    columns = x.shape[1]

    def transposed(rows: jax.Array, weight: Any, group: jax.Array) -> jax.Array:
        zeros = jnp.zeros((len(rows), columns), gradient.dtype)
        return jax.vjp(lambda x: project(x, index_stack(weight, group)), zeros)[1](rows)[0]

    dx = _by_blocks(transposed, gradient, weight, sizes, jax.ShapeDtypeStruct(x.shape, gradient.dtype), kernels)
    return dx, gradient_of_needed(lambda weight: grouped_matmul(x, dense(weight), sizes), weight, needed[1], gradient), None


@with_gradient(_grouped_forward, _grouped_backward)
def _grouped_project(kernels: KernelOptions, x: jax.Array, weight: Any, sizes: jax.Array) -> jax.Array:
    """`grouped_matmul` for weights that are not arrays; differentiable in `x` and in the weight's float arrays."""
    return _grouped_forward(kernels, None, x, weight, sizes)[0]


# --- the primitive: linear in both arrays, so its derivatives are the same primitive in another mode -----------------------


class _GroupedSettings(NamedTuple):
    """What the primitive computes, for R rows in E groups, on a platform.

    Attributes:
      mode: "rows": [R, K] by [E, N, K], to [R, N]; "columns": [R, N] by [E, N, K], to [R, K]; "outer": [R, N] and [R, K], to
        the sums of the outer products of each group's rows, [E, N, K].
      dtype: both arrays are cast to it.
    """

    mode: Literal["rows", "columns", "outer"]
    dtype: Any
    out_dtype: Any
    platform: str
    kernels: KernelOptions


def _multiply(mode: Any, a: jax.Array, b: jax.Array, sizes: jax.Array, out_dtype: Any, kernels: KernelOptions) -> jax.Array:
    """Computed in the dtype of `a`."""
    a, b, sizes = _varying_alike(a, b, sizes)
    settings = _GroupedSettings(mode, a.dtype, jnp.dtype(out_dtype), lowering_platform(), kernels)
    return grouped_matmul_p.bind(a, b, sizes, settings=settings)


def _varying_alike(*arrays: jax.Array) -> list[jax.Array]:
    """The same arrays, each varying over the union of their varying axes, for `shard_map`'s check."""
    axes = frozenset().union(*(jax.typeof(array).manual_axis_type.varying for array in arrays))
    missing = [tuple(axes - jax.typeof(array).manual_axis_type.varying) for array in arrays]
    return [lax.pcast(a, more, to="varying") if more else a for a, more in zip(arrays, missing, strict=True)]


grouped_matmul_p = Primitive("grouped_matmul")


@grouped_matmul_p.def_impl
def _compute_grouped(a: jax.Array, b: jax.Array, sizes: jax.Array, *, settings: _GroupedSettings) -> jax.Array:
    """Lowering happens outside the context of tracing, so it is entered again."""
    arrays = a.astype(settings.dtype), b.astype(settings.dtype), sizes
    with target_platform(settings.platform):
        if settings.platform == "tpu":
            return _by_kernel(settings.mode, *arrays, settings.out_dtype)
        return _by_loop(settings.mode, *arrays, settings.out_dtype, settings.kernels)


@grouped_matmul_p.def_abstract_eval
def _grouped_shape(a: Any, b: Any, sizes: Any, *, settings: _GroupedSettings) -> Any:
    shapes = {"rows": (a.shape[0], *b.shape[1:2]), "columns": (a.shape[0], *b.shape[2:])}
    shape = shapes.get(settings.mode, (sizes.shape[0], a.shape[1], b.shape[1]))
    return a.update(shape=shape, dtype=settings.out_dtype, weak_type=False)


def _grouped_transposed(gradient: Any, a: Any, b: Any, sizes: jax.Array, *, settings: _GroupedSettings) -> list[Any]:
    if isinstance(gradient, ad.Zero):
        return [None, None, None]
    of_first = ad.is_undefined_primal(a)
    # The modes and operands that give the gradients of `a` and of `b`.
    gradients: dict[Any, tuple[Any, ...]] = {
        ("rows", True): ("columns", gradient, b),
        ("rows", False): ("outer", gradient, a),
        ("columns", True): ("rows", gradient, b),
        ("columns", False): ("outer", a, gradient),
        ("outer", True): ("rows", b, gradient),
        ("outer", False): ("columns", a, gradient),
    }
    mode, *operands = gradients[settings.mode, of_first]
    settings = settings._replace(mode=mode, out_dtype=(a if of_first else b).aval.dtype)
    cotangent = grouped_matmul_p.bind(*operands, sizes, settings=settings)
    return [cotangent, None, None] if of_first else [None, cotangent, None]


def _grouped_batched(arrays: Any, axes: Any, *, settings: _GroupedSettings) -> tuple[jax.Array, int]:
    """Compute one batch entry after the other."""
    moved = [a if axis is None else jnp.moveaxis(a, axis, 0) for a, axis in zip(arrays, axes, strict=True)]
    count = next(len(a) for a, axis in zip(moved, axes, strict=True) if axis is not None)

    def multiply_entry(index: jax.Array) -> jax.Array:
        entries = (a if axis is None else a[index] for a, axis in zip(moved, axes, strict=True))
        return grouped_matmul_p.bind(*entries, settings=settings)

    return lax.map(multiply_entry, jnp.arange(count)), 0


ad.defjvp(
    grouped_matmul_p,
    lambda tangent, a, b, sizes, *, settings: grouped_matmul_p.bind(tangent, b, sizes, settings=settings),
    lambda tangent, a, b, sizes, *, settings: grouped_matmul_p.bind(a, tangent, sizes, settings=settings),
    None,
)
ad.primitive_transposes[grouped_matmul_p] = _grouped_transposed
batching.primitive_batchers[grouped_matmul_p] = _grouped_batched
mlir.register_lowering(grouped_matmul_p, mlir.lower_fun(_compute_grouped, multiple_results=False))


# --- with a loop -----------------------------------------------------------------------------------------------------------


def _by_loop(mode: Any, a: jax.Array, b: jax.Array, sizes: jax.Array, out_dtype: Any, kernels: KernelOptions) -> jax.Array:
    if mode == "outer":
        return _outer_by_blocks(a, b, sizes, out_dtype)
    if mode == "rows" and lowering_platform() == "gpu" and len(a) <= GPU_ROWS * len(sizes):
        return _row_by_row(a, b, sizes).astype(out_dtype)
    if mode == "rows":
        multiply_block = partial(multiply_group, out_dtype=out_dtype, kernels=kernels)
        return _by_blocks(multiply_block, a, b, sizes, jax.ShapeDtypeStruct((len(a), b.shape[1]), out_dtype), kernels)

    def transposed(rows: jax.Array, weight: jax.Array, group: jax.Array) -> jax.Array:
        wide = jnp.promote_types(rows.dtype, jnp.float32)
        return jnp.tensordot(rows, index_stack(weight, group), 1, preferred_element_type=wide)

    return _by_blocks(transposed, a, b, sizes, jax.ShapeDtypeStruct((len(a), b.shape[2]), out_dtype), kernels)


class RowBlocks(NamedTuple):
    """The block lengths that a group's rows are divided into.

    Attributes:
      lengths: powers of two, the longest first.
      at_once: the rows left after blocks of the longest length form one block, the shortest that holds them: for weights
        that take longer to read than to multiply. Otherwise they form several blocks, each as long as possible; only the
        last may extend beyond the group.
    """

    lengths: tuple[int, ...]
    at_once: bool = False

    @property
    def beyond(self) -> int:
        """The maximum number of rows by which a block extends beyond its group."""
        if not self.at_once:
            return self.lengths[-1] - 1
        return max(length - shorter - 1 for length, shorter in zip(self.lengths, (*self.lengths[1:], 0), strict=True))

    def within(self, rows: int) -> RowBlocks:
        """The same without the lengths that no group of at most `rows` rows needs."""
        pairs = zip(self.lengths, (*self.lengths[1:], 0), strict=True)
        return self._replace(lengths=tuple(length for length, shorter in pairs if shorter < rows))

    def of_group(self, start: jax.Array, size: jax.Array, body: Callable[[int, Any, Any], Any], carry: Any) -> Any:
        """Run `body(length, start, carry)` for each block of a group, in order, and return the last carry."""
        longest, left = self.lengths[0], size % self.lengths[0]
        for length, shorter in zip(self.lengths, (*self.lengths[1:], 0), strict=True):
            if self.at_once:
                count = jnp.where((left > shorter) & (left <= length), 1, 0)
                count += size // longest if length == longest else 0
            else:
                count = size // length if shorter else -(-size // length)
                size = size - count * length
            carry = lax.fori_loop(0, count, lambda i, carry, n=length, at=start: body(n, at + i * n, carry), carry)
            start += count * length
        return carry


def _blocks_of_floats(rows: int, groups: int) -> RowBlocks:
    """Blocks for groups of similar size; about a sixteenth of the computed rows is then padding."""
    smallest = _largest_power_of_two(min(MIN_BLOCK_ROWS, max(1, rows // (ROWS_OF_A_GROUP * groups))))
    largest = _largest_power_of_two(min(MAX_BLOCK_ROWS, max(1, rows)))
    return RowBlocks(tuple(1 << i for i in range(largest.bit_length() - 1, smallest.bit_length() - 2, -1)))


@has_cpu_variant
def choose_row_blocks(weight: Any, rows: int, groups: int, kernels: KernelOptions) -> RowBlocks:
    """Blocks for rows that are multiplied by a weight [E, N, K]."""
    if not isinstance(weight, Weight):
        return _blocks_of_floats(rows, groups)
    return RowBlocks(QUANTIZED_BLOCKS, at_once=True).within(rows)


def _largest_power_of_two(n: int) -> int:
    """The largest power of two that is at most n."""
    return 1 << (n.bit_length() - 1)


def _for_each_group(sizes: jax.Array, body: Callable[[jax.Array, jax.Array, jax.Array, Any], Any], carry: Any) -> Any:
    """Run `body(group, start, size, carry)` for each group that has rows, in order, and return the last carry."""
    starts = jnp.cumsum(sizes) - sizes
    with_rows = jnp.argsort(sizes == 0, stable=True)

    def step(index: jax.Array, carry: Any) -> Any:
        group = with_rows[index]
        return body(group, starts[group], sizes[group], carry)

    return lax.fori_loop(0, jnp.sum(sizes > 0), step, carry)


def _by_blocks(
    multiply_block: Callable[[jax.Array, Any, jax.Array], jax.Array],
    x: jax.Array,
    weight: Any,
    sizes: jax.Array,
    out: Any,
    kernels: KernelOptions,
) -> jax.Array:
    """Apply `multiply_block(rows, weight, group)` to blocks of each group's rows; returns an array like `out`.

    A block that extends beyond its group also writes rows of later groups, which overwrite them.
    """
    rows, groups = len(x), len(sizes)
    blocks = choose_row_blocks(weight, rows, groups, kernels)
    padded = pack_bits(jnp.pad(x, [(0, blocks.beyond), (0, 0)]))
    results = pack_bits(jnp.zeros_like(x, out.dtype, (rows + blocks.beyond, out.shape[1])))  # with the varying axes of `x`

    def of_block(group: jax.Array, length: int, start: jax.Array, results: Any) -> Any:
        product = multiply_block(_slice(padded, start, length), weight, group)
        put = partial(lax.dynamic_update_slice_in_dim, start_index=start, axis=0)
        return jax.tree.map(put, results, pack_bits(product.astype(out.dtype)))

    def of_group(group: jax.Array, start: jax.Array, size: jax.Array, results: Any) -> Any:
        return blocks.of_group(start, size, partial(of_block, group), results)

    if rows <= groups and lowering_platform() != "cpu":
        # A loop of static length: otherwise a GPU waits for the host before each iteration.
        group_of = _groups_of_rows(sizes, rows)
        results = lax.fori_loop(0, rows, lambda i, results: of_block(group_of[i], 1, i, results), results)
    else:
        results = _for_each_group(sizes, of_group, results)
    return unpack_bits(results)[:rows]


def _slice(array: Any, start: jax.Array, length: int) -> jax.Array:
    return unpack_bits(jax.tree.map(lambda bits: lax.dynamic_slice_in_dim(bits, start, length), array))


def _row_by_row(x: jax.Array, weight: jax.Array, sizes: jax.Array) -> jax.Array:
    """Few rows on a GPU, as sums of products: XLA fuses them with the slice of the weights; a matmul would copy it."""
    wide = jnp.promote_types(x.dtype, jnp.float32)

    def multiply_row(row: tuple[jax.Array, jax.Array]) -> jax.Array:
        numbers, group = row
        return jnp.sum(index_stack(weight, group).astype(wide) * numbers.astype(wide), axis=-1)

    return lax.map(multiply_row, (x, _groups_of_rows(sizes, len(x))))


def _groups_of_rows(sizes: jax.Array, rows: int) -> jax.Array:
    return jnp.searchsorted(jnp.cumsum(sizes), jnp.arange(rows), side="right", method="compare_all")


def _outer_by_blocks(a: jax.Array, b: jax.Array, sizes: jax.Array, out_dtype: Any) -> jax.Array:
    wide = jnp.promote_types(a.dtype, jnp.float32)
    blocks = _blocks_of_floats(len(a), len(sizes))
    padded = [pack_bits(jnp.pad(array, [(0, blocks.beyond), (0, 0)])) for array in (a, b)]

    def of_group(group: jax.Array, start: jax.Array, size: jax.Array, out: Any) -> Any:
        def add(length: int, at: jax.Array, total: jax.Array) -> jax.Array:
            rows, others = (_slice(array, at, length) for array in padded)
            if length == blocks.lengths[-1] > 1:  # the last
                rows = jnp.where((at + jnp.arange(length) < start + size)[:, None], rows, 0)
            return total + weight_gradient(rows, others, wide)

        total = blocks.of_group(start, size, add, jnp.zeros_like(a, wide, (a.shape[1], b.shape[1])))
        put = partial(lax.dynamic_update_index_in_dim, index=group, axis=0)
        return jax.tree.map(put, out, pack_bits(total.astype(out_dtype)))

    empty = pack_bits(jnp.zeros_like(a, out_dtype, (len(sizes), a.shape[1], b.shape[1])))
    return unpack_bits(_for_each_group(sizes, of_group, empty))


# --- with the TPU kernel ---------------------------------------------------------------------------------------------------


def _by_kernel(
    mode: Any, a: jax.Array, b: jax.Array, sizes: jax.Array, out_dtype: Any, *, interpret: bool = False
) -> jax.Array:
    from jax.experimental.pallas.ops.tpu.megablox.gmm import gmm, tgmm

    rows, (least, most) = len(a), KERNEL_ROWS
    # A tile with rows of two groups is computed twice, so short groups need short tiles.
    tile = max(least, min(most, _largest_power_of_two(max(1, rows // (2 * ROWS_OF_A_GROUP * len(sizes))))))
    tile = min(tile, -(-rows // 16) * 16)
    padding = [(0, -rows % tile), (0, 0)]
    a, options = jnp.pad(a, padding), dict(preferred_element_type=out_dtype, interpret=interpret)
    if mode == "outer":
        b = jnp.pad(b, padding)
        tiles = (min(KERNEL_COLUMNS, width) for width in (a.shape[1], b.shape[1]))
        return tgmm(a.swapaxes(0, 1), b, sizes, tiling=(tile, *tiles), **options)
    tiles = (min(KERNEL_COLUMNS, width) for width in (b.shape[:0:-1] if mode == "rows" else b.shape[1:]))
    return gmm(a, b, sizes, tiling=(tile, *tiles), transpose_rhs=mode == "rows", **options)[:rows]
