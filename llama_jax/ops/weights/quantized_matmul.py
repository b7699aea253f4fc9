"""Leaves that stand in the place of a matrix of weights: quantized ones, and several side by side."""

from __future__ import annotations

import math
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from llama_jax.ops.layers import PRODUCT, project
from llama_jax.ops.platform import for_cpu, is_divided, lowering_device_kind, lowering_platform
from llama_jax.ops.weights.device_layout import TILES, arranged, in_runs, take
from llama_jax.ops.weights.format_spec import FP8, INT4, QuantField, QuantFormat, halves, unpacked
from llama_jax.ops.weights.formats import QUANT_FORMATS, with_fallback

FEW_TOKENS = 16  # of so many tokens at most, sums of groups are made apart and weighted afterwards
FEW_TOKENS_OF_TPU = 64  # likewise: 340,000 cycles for 14,336 x 4,096 numbers, and for twice as many 630,000
DECODED_AT_ONCE = 1 << 22
GPUS_WITH_FP8 = ("H100", "H200", "H20", "B100", "B200", "B300", "L4", "L40", "RTX 40", "RTX 50", "RTX PRO", "Ada")


class QuantizedWeight(struct.PyTreeNode):
    """A matrix [*out, D] in fewer bits, see `kinds`.

    Attributes:
      planes: the arrays, in the order of the kind.
      kind: its name.
      dtype_name: of the computation: what a matrix of this model would have if it were not quantized.
    """

    planes: tuple[Any, ...]
    kind: str = struct.field(pytree_node=False)
    dtype_name: str = struct.field(pytree_node=False)

    @property
    def form(self) -> QuantFormat:
        """What the kind is."""
        return QUANT_FORMATS[self.kind]

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the matrix."""
        plane, array = max(zip(self.form.planes, self.planes, strict=True), key=lambda pair: pair[0].entries)
        if plane.grouped:
            return (*array.shape[:-2], array.shape[-2] * plane.numbers)
        return (*array.shape[:-1], array.shape[-1] * plane.numbers // plane.entries)

    @property
    def ndim(self) -> int:
        """The number of axes of the matrix."""
        return len(self.shape)

    @property
    def dtype(self) -> np.dtype:
        """The dtype of the computation."""
        return jnp.dtype(self.dtype_name)

    @property
    def sharding(self) -> Any:
        """The sharding of the plane that is sharded as the matrix would be."""
        return self.planes[0].sharding

    def project(self, x: jax.Array, out_dtype: Any) -> jax.Array:
        """See `layers.project`."""
        settings = _Settings(self.kind, x.dtype.name, jnp.dtype(out_dtype).name)
        return checkpoint_name(_project(settings, x, self.planes), PRODUCT)

    def embed(self, rows: jax.Array) -> jax.Array:
        """Some rows, [*rows, ..., D]."""
        decoded = lambda some: self.form.decode(*take(self.form, self.planes, some)).astype(self.dtype)
        return in_runs(decoded, rows)

    def reshape(self, *shape: int) -> QuantizedWeight:
        """The same numbers in a matrix [*out, D] of another `out`."""
        return self.replace(planes=flat_planes(self.form, self.planes, shape[:-1]))

    def arranged(self) -> QuantizedWeight:
        """The same in the order in which its devices are to hold it, see `order`: what makes a weight ends with this."""
        return self.replace(planes=tuple(map(arranged, self.form.planes, self.planes)))

    def decoded(self) -> Any:
        """The matrix itself, of NumPy where the planes are; for tests, comparisons and files, never for a matmul."""
        return self.form.decode(*self.planes).astype(self.dtype)


class JoinedWeight(struct.PyTreeNode):
    """Matrices side by side along the axis after the first of one layer, each of its own kind or an array: [K, sum, H, D].

    Files quantize values in more bits than queries and keys, which here are one weight.
    """

    parts: tuple[Any, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of all parts as one matrix."""
        *before, _, features, columns = self.parts[0].shape
        return (*before, sum(part.shape[-3] for part in self.parts), features, columns)

    @property
    def ndim(self) -> int:
        """The number of axes of the matrix."""
        return len(self.shape)

    @property
    def dtype(self) -> np.dtype:
        """The dtype of the computation."""
        return self.parts[0].dtype

    @property
    def sharding(self) -> Any:
        """The sharding of the first part, and so of all."""
        return self.parts[0].sharding

    def project(self, x: jax.Array, out_dtype: Any) -> jax.Array:
        """See `layers.project`."""
        return jnp.concatenate([project(x, part, out_dtype=out_dtype) for part in self.parts], axis=-2)

    def decoded(self) -> Any:
        """As one matrix."""
        parts = [part.decoded() if hasattr(part, "decoded") else part for part in self.parts]
        return (np if isinstance(parts[0], np.ndarray) else jnp).concatenate(parts, axis=-3)


def quantized(matrix: Any, kind: str) -> QuantizedWeight:
    """A matrix [*out, D] as a weight of a kind, by the nearest numbers, where the matrix lies.

    Args:
      kind: one that has an `encode`, of whose block D is a multiple; of one with several groups the largest is taken.
    """
    form = with_fallback(kind, columns_on_each(matrix.shape, getattr(matrix, "sharding", None)))
    assert form.encode is not None
    places = shardings_of_planes(form, getattr(matrix, "sharding", None), matrix.ndim)
    encoded = form.encode(np.asarray(matrix, np.float32))
    planes = tuple(jax.device_put(plane, place) for plane, place in zip(encoded, places, strict=True))
    return QuantizedWeight(planes, form.name, str(matrix.dtype)).arranged()


def columns_on_each(shape: tuple[int, ...], sharding: Any) -> int:
    """Numbers of a row that each device holds: groups are not divided among devices."""
    return shape[-1] if sharding is None else sharding.shard_shape(shape)[-1]


def shardings_of_planes(form: QuantFormat, sharding: Any, ndim: int) -> tuple[Any, ...]:
    """Where the planes of a matrix with `ndim` axes lie, given where it would: factors where their numbers are."""
    if not isinstance(sharding, NamedSharding):
        return (sharding,) * len(form.planes)
    spec: list[Any] = [*sharding.spec, *[None] * (ndim - len(sharding.spec))]
    *out, columns = spec
    ends = [(columns, None) if plane.grouped else (columns,) if plane.entries else () for plane in form.planes]
    return tuple(sharding.update(spec=P(*out, *end)) for end in ends)


# --- matmuls -------------------------------------------------------------------------------------------------------------


class _Settings(NamedTuple):
    """Static arguments of a matmul: the format of the weight, and the dtypes of `x` and the result."""

    kind: str
    dtype: str
    out_dtype: str


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _project(settings: _Settings, x: jax.Array, planes: tuple[jax.Array, ...]) -> jax.Array:
    """[..., D] onto the rows of a weight: [..., *out].

    It has a derivative of its own because a weight of integers has none: of a frozen weight only that of `x` is wanted.
    """
    form = QUANT_FORMATS[settings.kind]
    product = multiply(x.reshape(-1, x.shape[-1]), _flat(form, planes), form)
    return product.astype(settings.out_dtype).reshape(*x.shape[:-1], *_out(form, planes))


def _forward(settings: _Settings, x: jax.Array, planes: tuple[jax.Array, ...]) -> tuple[jax.Array, Any]:
    return _project(settings, x, planes), planes


def _backward(settings: _Settings, planes: Any, gradient: jax.Array) -> tuple[jax.Array, None]:
    form = QUANT_FORMATS[settings.kind]
    out = _out(form, planes)
    rows = gradient.reshape(-1, math.prod(out))
    product = multiply_transposed(rows, _flat(form, planes), form)
    return product.astype(settings.dtype).reshape(*gradient.shape[: gradient.ndim - len(out)], -1), None


_project.defvjp(_forward, _backward)


def _columns_of(plane: QuantField) -> int:
    """Axes that stand for the columns."""
    return 2 if plane.grouped else 1 if plane.entries else 0


def _out(form: QuantFormat, planes: tuple[jax.Array, ...]) -> tuple[int, ...]:
    """The axes before the columns."""
    return planes[0].shape[: planes[0].ndim - _columns_of(form.planes[0])]


def _flat(form: QuantFormat, planes: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
    """The planes of the matrix [N, D], N being all of `out`."""
    return flat_planes(form, planes, (math.prod(_out(form, planes)),))


def flat_planes(form: QuantFormat, planes: tuple[jax.Array, ...], shape: tuple[int, ...]) -> tuple[jax.Array, ...]:
    """The planes of a matrix whose axes before the columns are given another shape."""
    ends = [array.shape[array.ndim - _columns_of(plane) :] for plane, array in zip(form.planes, planes, strict=True)]
    return tuple(array.reshape(*shape, *end) for array, end in zip(planes, ends, strict=True))


@for_cpu("multiply_quantized")
def multiply(x: jax.Array, planes: tuple[jax.Array, ...], form: QuantFormat) -> jax.Array:
    """[T, D] by the planes of [N, D]: float32[T, N].

    What the compilers for H100 and TPU (v5e) make of it, for 14,336 x 4,096 numbers: of a factor for each row one kernel
    that reads the integers as they lie. A factor for each group is fused with no matmul on a GPU, and on a TPU with none
    that is not made by groups: a dense copy, 117 MB, would be written and read. So the groups are multiplied apart and
    their sums weighted: on a TPU in one kernel that writes no sums, if the groups come first, and on a GPU with 1.8 MB of
    them for a row and 15 for eight; of more rows that would be larger than the weight itself, which is decoded by chunks
    that stay in the caches. A single row a TPU multiplies without its matrix unit, in 650,000 to 700,000 cycles by the
    compiler's own count where two rows take 40,000 (int8) and 93,000 (int4): so a row of zeros is added.
    """
    if len(x) == 1 and lowering_platform() == "tpu":
        return multiply(jnp.pad(x, ((0, 1), (0, 0))), planes, form)[:1]
    if factor_afterwards(form):
        values, scales = planes
        return _dot(x, values.astype(x.dtype)) * scales
    if groups_apart(form, len(x)):
        values, scales, *zeros = unpacked(planes[0]), *planes[1:]
        groups = x.reshape(len(x), *values.shape[1:])
        sums = jnp.einsum("tgi,ngi->gtn", groups, values.astype(x.dtype), preferred_element_type=jnp.float32)
        if zeros:
            sums -= jnp.sum(groups, axis=-1, dtype=jnp.float32).T[..., None] * zeros[0].T[:, None].astype(jnp.float32)
        return jnp.sum(sums * scales.T[:, None], axis=0)
    if len(x) == 1 and lowering_platform() == "gpu" and not is_divided():
        # No matmul: one kernel decodes in registers and adds the products. Of several rows XLA writes what is decoded.
        return jnp.sum(form.decode(*planes) * x.astype(jnp.float32), axis=-1)[None]
    return _by_chunks(x, planes, form)


@for_cpu("factor_afterwards")
def factor_afterwards(form: QuantFormat) -> bool:
    """Whether a weight is multiplied as it lies, and the result by the factor of each row."""
    return form.has_row_factors and _is_read_as_it_lies(form)


def _is_read_as_it_lies(form: QuantFormat) -> bool:
    """Whether the compiler converts a weight's numbers on their way into the matmul.

    For GPUs without units for floats of 8 bits XLA writes a wider copy of the whole weight first: 117 MB of 14,336 x 4,096
    numbers for an A100, and none for an H100 and a TPU (v5e).
    """
    if form.planes[0].dtype != FP8 or lowering_platform() != "gpu":
        return True
    return any(name in lowering_device_kind() for name in GPUS_WITH_FP8)


@for_cpu("groups_apart")
def groups_apart(form: QuantFormat, tokens: int) -> bool:
    """Whether the groups of a weight are multiplied apart, see `multiply`."""
    few = FEW_TOKENS_OF_TPU if lowering_platform() == "tpu" else FEW_TOKENS
    return form.planes[0].grouped and tokens <= few and _is_read_as_it_lies(form)


def multiply_transposed(gradient: jax.Array, planes: tuple[jax.Array, ...], form: QuantFormat) -> jax.Array:
    """[T, N] by the planes of [N, D]: float32[T, D], the derivative of `multiply` for its first argument."""
    if factor_afterwards(form):
        values, scales = planes
        weighted = (gradient * scales).astype(gradient.dtype)
        return jnp.tensordot(weighted, values.astype(gradient.dtype), 1, preferred_element_type=jnp.float32)
    chunks = _Chunks.of(form, planes)
    parts = chunks.divide(gradient, axis=1)  # as the rows of the weight are

    def products(index: jax.typing.ArrayLike) -> list[jax.Array]:
        part = chunks.take(parts, index, axis=1)
        decoded = chunks.decode(index, gradient.dtype)
        return [jnp.tensordot(part, rows, axes=1, preferred_element_type=jnp.float32) for rows in decoded]

    def add(index: jax.Array, totals: list[jax.Array]) -> list[jax.Array]:
        return [total + product for total, product in zip(totals, products(index), strict=True)]

    # The sum begins with the first part. Zeros would be made once for all weights, and copied for each, 34 MB of 2,048 rows.
    return jnp.stack(lax.fori_loop(1, chunks.parts, add, products(0)), axis=-1).reshape(len(gradient), -1)


def _by_chunks(x: jax.Array, planes: tuple[jax.Array, ...], form: QuantFormat) -> jax.Array:
    """`multiply` by a part of the decoded rows after the other."""
    chunks = _Chunks.of(form, planes)

    def put(index: jax.Array, out: jax.Array) -> jax.Array:
        decoded = chunks.decode(index, x.dtype)
        product = sum(_dot(x[:, i :: len(decoded)], rows) for i, rows in enumerate(decoded))
        return lax.dynamic_update_index_in_dim(out, product, index, 1 + chunks.apart)

    # All of it is written over. Zeros would be made when the program begins, for all layers at once: 2.8 GB of an 8B model;
    # what depends on `x` alone would be made once for all weights that read it, and copied for each, 117 MB of 14,336 rows
    # and 2,048 tokens.
    start = 0.0 if is_divided() else x[0, 0].astype(jnp.float32) * planes[-1].reshape(-1)[0].astype(jnp.float32)
    out = lax.fori_loop(0, chunks.parts, put, jnp.full((len(x), *chunks.split), start, jnp.float32))
    return out.reshape(len(x), -1)[:, : len(planes[0])]


@for_cpu("decoded_at_once")
def decoded_at_once() -> int:
    """Numbers of a weight: 8 MB in 16 bits, which the caches of an H100 (50 MB) and a TPU (128 MB on a v5e) hold."""
    return DECODED_AT_ONCE


class _Chunks(NamedTuple):
    """The rows of a weight in `parts`, each a run of them; `apart`, where devices have rows, each part has every `parts`-th
    row, so that each device has its share of it."""

    form: QuantFormat
    planes: tuple[jax.Array, ...]
    columns: int
    rows: int
    parts: int
    apart: bool

    @classmethod
    def of(cls, form: QuantFormat, planes: tuple[jax.Array, ...]) -> _Chunks:
        columns = QuantizedWeight(planes, form.name, "float32").shape[-1]
        total = len(planes[0])
        least = -(-total * columns // decoded_at_once())
        counts = [n for n in range(least, min(2 * least, total) + 1) if total % n == 0] or [least]
        # Of whole tiles, where it can be: a TPU would write the whole weight otherwise, 263 MB of 128,256 rows of `q4_0`.
        count = next((n for n in counts if total // n % TILES[8] == 0), counts[0])
        chunks = cls(form, planes, columns, -(-total // count), count, is_divided())
        return chunks._replace(planes=tuple(chunks.divide(_as_bits(plane)) for plane in planes))

    @property
    def split(self) -> tuple[int, int]:
        """The axis of rows as two."""
        return (self.rows, self.parts) if self.apart else (self.parts, self.rows)

    def divide(self, array: jax.Array, axis: int = 0) -> jax.Array:
        """The axis of rows as two; with zeros at its end where the rows are no multiple, as a prime number of them."""
        missing = self.rows * self.parts - array.shape[axis]
        if missing:
            array = jnp.pad(array, [(0, missing if i == axis else 0) for i in range(array.ndim)])
        return array.reshape(*array.shape[:axis], *self.split, *array.shape[axis + 1 :])

    def take(self, array: jax.Array, index: jax.typing.ArrayLike, axis: int = 0) -> jax.Array:
        """A part of what was divided."""
        return lax.dynamic_index_in_dim(array, index, axis=axis + self.apart, keepdims=False)

    def decode(self, index: jax.typing.ArrayLike, dtype: Any) -> list[jax.Array]:
        """The numbers of a part; of integers of 4 bits that are packed every other one apart: on a CPU it takes six times as
        long to decode them side by side."""
        taken = [self.take(plane, index) for plane in self.planes]
        values, *rest = (_from_bits(array, plane.dtype) for array, plane in zip(taken, self.form.planes, strict=True))
        is_packed = self.form.planes[0].dtype == INT4 and values.dtype != INT4
        return [self.form.decode(some, *rest).astype(dtype) for some in (halves(values) if is_packed else (values,))]


def _as_bits(plane: jax.Array) -> jax.Array:
    """Floats of 8 bits as integers: XLA for CPU moves no others, and would make a whole plane wider to cut a part of it."""
    return lax.bitcast_convert_type(plane, jnp.uint8) if plane.dtype == FP8 else plane


def _from_bits(plane: jax.Array, dtype: Any) -> jax.Array:
    return lax.bitcast_convert_type(plane, FP8) if dtype == FP8 else plane


def _dot(x: jax.Array, rows: jax.Array) -> jax.Array:
    return jnp.tensordot(x, rows, axes=((-1,), (-1,)), preferred_element_type=jnp.float32)
