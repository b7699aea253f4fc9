"""Quantized weights and their matmuls, and concatenations of weights in several formats."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Float32, Integer

from llama_jax.ops.gradients import gradient_of_needed, with_gradient
from llama_jax.ops.layers import MATMUL_OUTPUT, Weight, dense, project
from llama_jax.ops.platform import (
    AnyArray,
    KernelOptions,
    has_cpu_variant,
    is_partitioned,
    lowering_device_kind,
    lowering_platform,
)
from llama_jax.ops.weights.device_layout import TILES, in_runs, take, to_device_layout
from llama_jax.ops.weights.format_spec import FP8, INT4, QuantField, QuantFormat, unpack_halves, unpack_int4
from llama_jax.ops.weights.formats import QUANT_FORMATS, with_fallback
from llama_jax.ops.weights.words import NIBBLE_SHIFTS, WordDecoder

FEW_TOKENS = 16  # with at most this many tokens, per-group dot products are computed first and scaled afterwards
FEW_TOKENS_OF_TPU = 64  # the same on a TPU
FEW_TOKENS_BY_WORDS = 4  # on a GPU, with at most this many tokens, products are added without a matmul, see `words`
DECODED_AT_ONCE = 1 << 22  # weights dequantized per chunk: 8 MB in 16 bits, which fit the VMEM of a TPU v5e (128 MB)
DECODED_AT_ONCE_ON_GPU = 1 << 24  # 32 MB, which fit the L2 cache of an H100 (50 MB); each chunk launches several kernels
GPUS_WITH_FP8 = ("H100", "H200", "H20", "B100", "B200", "B300", "L4", "L40", "RTX 40", "RTX 50", "RTX PRO", "Ada")


class QuantizedWeight(Weight):
    """A quantized matrix [*out, D], see `formats`.

    Attributes:
      planes: the arrays, in the order of the format.
      quant_format: the name of the format.
      dtype_name: the dtype of the computation, and of dense matrices of the same model.
    """

    is_quantized = True

    planes: tuple[Any, ...]
    quant_format: str = struct.field(pytree_node=False)
    dtype_name: str = struct.field(pytree_node=False)

    @property
    def form(self) -> QuantFormat:
        """Its `QuantFormat`."""
        return QUANT_FORMATS[self.quant_format]

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the matrix."""
        plane, array = max(zip(self.form.planes, self.planes, strict=True), key=lambda pair: pair[0].entries)
        if plane.grouped:
            return (*array.shape[:-2], array.shape[-2] * plane.numbers)
        return (*array.shape[:-1], array.shape[-1] * plane.numbers // plane.entries)

    @property
    def dtype(self) -> np.dtype:
        """The dtype of the computation."""
        return jnp.dtype(self.dtype_name)

    @property
    def sharding(self) -> Any:
        """The sharding of the plane that is sharded like the matrix."""
        return self.planes[0].sharding

    def project(self, x: Float[Array, "*batch D"], out_dtype: Any, kernels: KernelOptions) -> Float[Array, " ..."]:
        """See `ops.layers.project`."""
        settings = _MatmulSettings(self.quant_format, x.dtype.name, jnp.dtype(out_dtype).name, kernels)
        project_rows = _project_dequantized if kernels.forward_mode else _project_quantized
        return checkpoint_name(project_rows(settings, x, self.planes), MATMUL_OUTPUT)

    def embed(self, rows: Integer[Array, "*rows"]) -> Float[Array, "*rows D"]:
        """Look up rows of a table [V, D]."""
        decoded = lambda some: self.form.decode(*take(self.form, self.planes, some)).astype(self.dtype)
        return in_runs(decoded, rows)

    def reshape(self, *shape: int) -> QuantizedWeight:
        """The same weights as a matrix [*out, D] with different axes `out`."""
        return self.replace(planes=flat_planes(self.form, self.planes, shape[:-1]))

    def to_device_layout(self) -> QuantizedWeight:
        """In the memory layout of its devices, see `device_layout`; every constructor ends with this."""
        return self.replace(planes=tuple(map(to_device_layout, self.form.planes, self.planes)))

    def to_dense(self) -> Any:
        """Dequantized, as NumPy or JAX like the planes; for tests and files, not for matmuls."""
        return self.form.decode(*self.planes).astype(self.dtype)


class JoinedWeight(Weight):
    """Matrices of different formats concatenated on axis 1: [K, sum, H, D] (fused QKV from files).

    Some files quantize the value projection with more bits than the others, and here the three are one weight. A stack of
    layers has a leading axis L.
    """

    parts: tuple[Any, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the concatenated matrix."""
        *before, _, features, columns = self.parts[0].shape
        return (*before, sum(part.shape[-3] for part in self.parts), features, columns)

    @property
    def dtype(self) -> np.dtype:
        """The dtype of the computation."""
        return self.parts[0].dtype

    @property
    def sharding(self) -> Any:
        """The sharding of the first part, which all parts have."""
        return self.parts[0].sharding

    def project(self, x: Float[Array, "*batch D"], out_dtype: Any, kernels: KernelOptions) -> Float[Array, " ..."]:
        """See `ops.layers.project`."""
        return jnp.concatenate([project(x, part, out_dtype=out_dtype, kernels=kernels) for part in self.parts], axis=-2)

    def to_dense(self) -> Any:
        """Dequantized, as one matrix."""
        parts = [dense(part) for part in self.parts]
        return (np if isinstance(parts[0], np.ndarray) else jnp).concatenate(parts, axis=-3)


def quantize_matrix(matrix: Float[AnyArray, "*out D"], quant_format: str) -> QuantizedWeight:
    """Quantize a matrix to the nearest values of a format, on the devices and with the sharding of the matrix.

    Args:
      quant_format: an encodable format whose block size divides D; the largest group size that fits is used.
    """
    form = with_fallback(quant_format, columns_on_each(matrix.shape, getattr(matrix, "sharding", None)))
    assert form.encode is not None
    plane_shardings = shardings_of_planes(form, getattr(matrix, "sharding", None), matrix.ndim)
    encoded = form.encode(np.asarray(matrix, np.float32))
    planes = tuple(jax.device_put(plane, sharding) for plane, sharding in zip(encoded, plane_shardings, strict=True))
    return QuantizedWeight(planes, form.name, str(matrix.dtype)).to_device_layout()


def columns_on_each(shape: tuple[int, ...], sharding: Any) -> int:
    """Columns per device; a group is never split over devices."""
    return shape[-1] if sharding is None else sharding.shard_shape(shape)[-1]


def shardings_of_planes(form: QuantFormat, sharding: Any, ndim: int) -> tuple[Any, ...]:
    """Shardings of the planes, given that of the matrix, which has `ndim` axes: scales follow their values."""
    if not isinstance(sharding, NamedSharding):
        return (sharding,) * len(form.planes)
    spec: list[Any] = [*sharding.spec, *[None] * (ndim - len(sharding.spec))]
    *out, columns = spec
    ends = [(columns, None) if plane.grouped else (columns,) if plane.entries else () for plane in form.planes]
    return tuple(sharding.update(spec=P(*out, *end)) for end in ends)


# --- matmuls -------------------------------------------------------------------------------------------------------------


class _MatmulSettings(NamedTuple):
    """Static arguments of a matmul: the format of the weight, the dtypes of `x` and the result, and see `project`."""

    quant_format: str
    dtype: str
    out_dtype: str
    kernels: KernelOptions


def _project_dequantized(settings: _MatmulSettings, x: jax.Array, planes: tuple[jax.Array, ...]) -> jax.Array:
    """`_project_quantized` by one matmul with the dense weight, which JAX differentiates in every mode."""
    matrix = QUANT_FORMATS[settings.quant_format].decode(*planes)
    return jnp.tensordot(x.astype(jnp.float32), matrix, axes=((-1,), (-1,))).astype(settings.out_dtype)


def _project_forward(
    settings: _MatmulSettings, needed: Any, x: jax.Array, planes: tuple[jax.Array, ...]
) -> tuple[jax.Array, Any]:
    form = QUANT_FORMATS[settings.quant_format]
    product = multiply(x.reshape(-1, x.shape[-1]), _as_matrix(form, planes), form, settings.kernels)
    out = product.astype(settings.out_dtype).reshape(*x.shape[:-1], *_out(form, planes))
    return out, (x if any(needed[1]) else None, planes)


def _project_backward(
    settings: _MatmulSettings, needed: Any, residuals: Any, gradient: jax.Array
) -> tuple[jax.Array, tuple[jax.Array | None, ...] | None]:
    (x, planes), form = residuals, QUANT_FORMATS[settings.quant_format]
    out = _out(form, planes)
    rows = gradient.reshape(-1, math.prod(out))
    product = multiply_transposed(rows, _as_matrix(form, planes), form)
    dx = product.astype(settings.dtype).reshape(*gradient.shape[: gradient.ndim - len(out)], -1)
    return dx, gradient_of_needed(lambda planes: _project_dequantized(settings, x, planes), planes, needed[1], gradient)


@with_gradient(_project_forward, _project_backward)
def _project_quantized(settings: _MatmulSettings, x: jax.Array, planes: tuple[jax.Array, ...]) -> jax.Array:
    """Project [..., D] onto the rows of a weight: [..., *out].

    Differentiable in `x` and in planes of floats, such as scales, for which the whole weight is dequantized.
    """
    return _project_forward(settings, (True, (False,) * len(planes)), x, planes)[0]


def _columns_of(plane: QuantField) -> int:
    """Number of axes of a plane that replace the columns."""
    return 2 if plane.grouped else 1 if plane.entries else 0


def _out(form: QuantFormat, planes: tuple[jax.Array, ...]) -> tuple[int, ...]:
    """Sizes of the axes before the columns."""
    return planes[0].shape[: planes[0].ndim - _columns_of(form.planes[0])]


def _as_matrix(form: QuantFormat, planes: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
    """The planes of the weight as a matrix [N, D], N being the product of `out`."""
    return flat_planes(form, planes, (math.prod(_out(form, planes)),))


def flat_planes(form: QuantFormat, planes: tuple[jax.Array, ...], shape: tuple[int, ...]) -> tuple[jax.Array, ...]:
    """The planes with the axes before the columns reshaped to `shape`."""
    ends = [array.shape[array.ndim - _columns_of(plane) :] for plane, array in zip(form.planes, planes, strict=True)]
    return tuple(array.reshape(*shape, *end) for array, end in zip(planes, ends, strict=True))


@has_cpu_variant
def multiply(
    x: Float[Array, "T D"],
    planes: tuple[jax.Array, ...],
    form: QuantFormat,
    kernels: KernelOptions = KernelOptions(),
) -> Float32[Array, "T N"]:
    """[T, D] times the planes of [N, D].

    Row scales: one matmul, scaled afterwards. Group scales with few tokens: per-group matmuls, scaled and summed. Otherwise:
    dequantize chunk by chunk (`_by_chunks`). One row on a TPU is padded to two. A few rows on a GPU are multiplied without a
    matmul, by words if the format has them. docs/notes/quantization.md explains these choices by the compilers' output for
    GPUs and TPUs.
    """
    if not len(x):
        return jnp.zeros((0, len(planes[0])), jnp.float32)
    words = _word_decoder(form)
    # From two rows on, a matmul of integers with a scale per row needs fewer instructions.
    few = 1 if form.has_row_scales else FEW_TOKENS_BY_WORDS
    if words is not None and len(x) <= few and x.shape[1] % len(NIBBLE_SHIFTS) == 0:
        return words.multiply(x, planes)
    if len(x) == 1 and lowering_platform() == "tpu":
        return multiply(jnp.pad(x, ((0, 1), (0, 0))), planes, form, kernels)[:1]
    if scale_after_matmul(form):
        values, scales = planes
        return _dot(x, values.astype(x.dtype)) * scales
    if scale_per_group_sum(form, len(x)):
        values, scales, *zeros = unpack_int4(planes[0]), *planes[1:]
        groups = x.reshape(len(x), *values.shape[1:])
        sums = jnp.einsum("tgi,ngi->gtn", groups, values.astype(x.dtype), preferred_element_type=jnp.float32)
        if zeros:
            sums -= jnp.sum(groups, axis=-1, dtype=jnp.float32).T[..., None] * zeros[0].T[:, None].astype(jnp.float32)
        return jnp.sum(sums * scales.T[:, None], axis=0)
    if len(x) == 1 and lowering_platform() == "gpu" and not is_partitioned():
        # No matmul: one kernel dequantizes in registers and sums the products. For several rows XLA would write the weight.
        return jnp.sum(form.decode(*planes) * x.astype(jnp.float32), axis=-1)[None]
    return _by_chunks(x, planes, form)


def _word_decoder(form: QuantFormat) -> WordDecoder | None:
    """Decodes by words on one GPU, see `words`. On a mesh, XLA would write more of the weights than otherwise."""
    return form.words if lowering_platform() == "gpu" and not is_partitioned() else None


@has_cpu_variant
def scale_after_matmul(form: QuantFormat) -> bool:
    """Whether the stored values are multiplied first, and the result by the scale of each row."""
    return form.has_row_scales and _converts_in_matmul(form)


def _converts_in_matmul(form: QuantFormat) -> bool:
    """Whether the compiler fuses the conversion of the stored values into the matmul.

    For GPUs without fp8 units, XLA first writes a wider copy of the whole weight: 117 MB for 14,336 x 4,096 weights on an
    A100, nothing on an H100 or a TPU (v5e).
    """
    if form.planes[0].dtype != FP8 or lowering_platform() != "gpu":
        return True
    return any(name in lowering_device_kind() for name in GPUS_WITH_FP8)


@has_cpu_variant
def scale_per_group_sum(form: QuantFormat, tokens: int) -> bool:
    """Whether per-group dot products are computed first and scaled afterwards, see `multiply`."""
    few = FEW_TOKENS_OF_TPU if lowering_platform() == "tpu" else FEW_TOKENS
    return form.planes[0].grouped and tokens <= few and _converts_in_matmul(form)


def multiply_transposed(
    gradient: Float[Array, "T N"], planes: tuple[jax.Array, ...], form: QuantFormat
) -> Float32[Array, "T D"]:
    """[T, N] times the planes of [N, D], without a transpose: the gradient of `multiply` with respect to `x`."""
    if scale_after_matmul(form):
        values, scales = planes
        weighted = (gradient * scales).astype(gradient.dtype)
        return jnp.tensordot(weighted, values.astype(gradient.dtype), 1, preferred_element_type=jnp.float32)
    chunks = _Chunks.of(form, planes)
    parts = chunks.divide(gradient, axis=1)  # divided like the rows of the weight

    def products(index: jax.typing.ArrayLike) -> list[jax.Array]:
        part = chunks.take(parts, index, axis=1)
        decoded = chunks.decode(index, gradient.dtype)
        return [jnp.tensordot(part, rows, axes=1, preferred_element_type=jnp.float32) for rows in decoded]

    def add(index: jax.Array, totals: list[jax.Array]) -> list[jax.Array]:
        return [total + product for total, product in zip(totals, products(index), strict=True)]

    # Starts from the first product: an array of zeros would be hoisted and copied per weight (34 MB for 2,048 tokens).
    return chunks.in_order(lax.fori_loop(1, chunks.parts, add, products(0)))


def _by_chunks(x: jax.Array, planes: tuple[jax.Array, ...], form: QuantFormat) -> jax.Array:
    """`multiply` with one part of the rows dequantized at a time."""
    if lowering_platform() == "gpu":  # otherwise weights of one chunk would be dequantized together with other layers'
        x, planes = lax.optimization_barrier((x, planes))
    chunks = _Chunks.of(form, planes)
    columns = chunks.columns_of(x)

    def put(index: jax.Array, out: jax.Array) -> jax.Array:
        product = sum(map(_dot, columns, chunks.decode(index, x.dtype)))
        return lax.dynamic_update_index_in_dim(out, product, index, 1 + chunks.strided)

    # Fully overwritten. Initialized from data, because XLA would hoist constant zeros out of the layer loop (2.8 GB for an
    # 8B model). An array that depends only on `x` would be shared among weights and copied for each (117 MB for 14,336 rows
    # and 2,048 tokens).
    start = 0.0 if is_partitioned() else x[0, 0].astype(jnp.float32) * planes[-1].reshape(-1)[0].astype(jnp.float32)
    out = lax.fori_loop(0, chunks.parts, put, jnp.full((len(x), *chunks.split), start, jnp.float32))
    return out.reshape(len(x), -1)[:, : len(planes[0])]


@has_cpu_variant
def decoded_at_once() -> int:
    """Weights dequantized per chunk."""
    return DECODED_AT_ONCE_ON_GPU if lowering_platform() == "gpu" else DECODED_AT_ONCE


class _Chunks(NamedTuple):
    """The rows of a weight in `parts` parts.

    Parts are contiguous or, if rows are sharded, `strided`: part i takes every `parts`-th row, so that all devices have
    equal shares.
    """

    form: QuantFormat
    planes: tuple[jax.Array, ...]
    columns: int
    rows: int
    parts: int
    strided: bool

    @classmethod
    def of(cls, form: QuantFormat, planes: tuple[jax.Array, ...]) -> _Chunks:
        columns = QuantizedWeight(planes, form.name, "float32").shape[-1]
        total = len(planes[0])
        least = -(-total * columns // decoded_at_once())
        counts = [n for n in range(least, min(2 * least, total) + 1) if total % n == 0] or [least]
        # Parts of whole tiles if possible: otherwise a TPU would write the whole weight, 263 MB for 128,256 rows of `q4_0`.
        count = next((n for n in counts if total // n % TILES[8] == 0), counts[0])
        chunks = cls(form, planes, columns, -(-total // count), count, is_partitioned())
        if chunks.decoder is not None:
            planes = chunks.decoder.read(planes)
        return chunks._replace(planes=tuple(chunks.divide(_as_bits(plane)) for plane in planes))

    @property
    def split(self) -> tuple[int, int]:
        """The two axes that replace the axis of rows."""
        return (self.rows, self.parts) if self.strided else (self.parts, self.rows)

    def divide(self, array: jax.Array, axis: int = 0) -> jax.Array:
        """Split the axis of rows in two; zero-padded if the row count is not a multiple."""
        missing = self.rows * self.parts - array.shape[axis]
        if missing:
            array = jnp.pad(array, [(0, missing if i == axis else 0) for i in range(array.ndim)])
        return array.reshape(*array.shape[:axis], *self.split, *array.shape[axis + 1 :])

    def take(self, array: jax.Array, index: jax.typing.ArrayLike, axis: int = 0) -> jax.Array:
        """Part `index` of an array split by `divide`."""
        return lax.dynamic_index_in_dim(array, index, axis=axis + self.strided, keepdims=False)

    def decode(self, index: jax.typing.ArrayLike, dtype: Any) -> list[jax.Array]:
        """Dequantize a part, as arrays with some of the columns each, see `columns_of`."""
        taken = [self.take(plane, index) for plane in self.planes]
        if self.decoder is not None:
            return [self.decoder.dequantize(taken, dtype)]
        values, *rest = (_from_bits(array, plane.dtype) for array, plane in zip(taken, self.form.planes, strict=True))
        return [
            self.form.decode(some, *rest).astype(dtype) for some in (unpack_halves(values) if self.packed else (values,))
        ]

    def columns_of(self, x: jax.Array) -> list[jax.Array]:
        """The columns of [T, D] that each array of `decode` has: all, possibly in another order; of packed int4 the even and
        the odd ones, which is six times faster on CPUs than interleaving."""
        if self.decoder is not None:
            return [self.decoder.in_word_order(x)]
        return [x[:, i :: 1 + self.packed] for i in range(1 + self.packed)]

    def in_order(self, parts: list[jax.Array]) -> jax.Array:
        """Undo `columns_of`."""
        if self.decoder is not None:
            return self.decoder.in_order(parts[0])
        return jnp.stack(parts, axis=-1).reshape(len(parts[0]), -1)

    @property
    def decoder(self) -> WordDecoder | None:
        """Decodes by words, on one GPU."""
        return _word_decoder(self.form)

    @property
    def packed(self) -> bool:
        """Whether the values are int4 in bytes."""
        return self.form.planes[0].dtype == INT4 and self.planes[0].dtype != INT4


def _as_bits(plane: jax.Array) -> jax.Array:
    """float8 as uint8: XLA for CPU widens whole float8 arrays to slice them."""
    return lax.bitcast_convert_type(plane, jnp.uint8) if plane.dtype == FP8 else plane


def _from_bits(plane: jax.Array, dtype: Any) -> jax.Array:
    return lax.bitcast_convert_type(plane, FP8) if dtype == FP8 else plane


def _dot(x: jax.Array, rows: jax.Array) -> jax.Array:
    return jnp.tensordot(x, rows, axes=((-1,), (-1,)), preferred_element_type=jnp.float32)
