"""Tensors in files that are read in runs of rows, and tensors derived from them without reading them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from llama_jax.errors import CheckpointError, reading, short_repr
from llama_jax.ops.platform import lowering_platform
from llama_jax.ops.rotary import half_from_interleaved, interleaved_from_half
from llama_jax.ops.weights.format_spec import QuantFormat, blocks_from_planes
from llama_jax.ops.weights.quantized_matmul import QuantizedWeight
from llama_jax.storage import Location, StoredPath

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
FLOAT_DTYPES = {"F64": np.dtype("<f8"), "F32": np.dtype("<f4"), "F16": np.dtype("<f2"), "BF16": BFLOAT16}
# By name in safetensors. Parameters have float types only, but quantized weights are made of the others. Types that are not
# listed count as bytes.
STORAGE_DTYPES = FLOAT_DTYPES | {
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "BOOL": np.dtype("u1"),
    "I8": np.dtype("i1"),
    "U8": np.dtype("u1"),
    "I16": np.dtype("<i2"),
    "U16": np.dtype("<u2"),
    "I32": np.dtype("<i4"),
    "I64": np.dtype("<i8"),
}


def storage_type_of(dtype: np.dtype) -> str:
    """The name of a storage type, such as BF16; NumPy's name for types other than floats."""
    return next((storage_type for storage_type, known in FLOAT_DTYPES.items() if known == dtype), str(dtype))


def target_dtype(path: Location, dtype: jax.typing.DTypeLike | None, stored: np.dtype) -> np.dtype:
    """The dtype that parameters are read in: `dtype`, or for None the stored one."""
    target = stored if dtype is None else jnp.dtype(dtype)
    if jax.dtypes.canonicalize_dtype(target) != target:
        raise CheckpointError(f"{path}: {target} needs jax_enable_x64; load with dtype='float32'")
    return target


def find_tensor(
    where: Location, tensors: Mapping[str, Tensor], name: str, shape: tuple[int, ...], reader: str, remedy: str = ""
) -> Tensor:
    """A tensor; CheckpointError if it is missing, or has another shape or type.

    Args:
      reader: what needs the shape, and what to do if the tensor is missing or has another: for the message.
    """
    tensor = tensors.get(name)
    if tensor is None:
        problem = f"is missing; {reader} needs it{remedy}"
    elif tensor.shape != shape:
        problem = f"has shape {list(tensor.shape)}; {reader} needs {list(shape)}{remedy}"
    elif tensor.dtype not in FLOAT_DTYPES.values():
        problem = f"is {tensor.storage_type}; a 16- or 32-bit float is needed"
    else:
        return tensor
    raise CheckpointError(f"{where}: tensor {short_repr(name, 120)} {problem}")


def default_dtype(embedding: TensorInfo, stored: np.dtype) -> np.dtype:
    """The default dtype of unquantized parameters, and of the computation.

    Args:
      embedding: if it is quantized, the result is bfloat16 on accelerators and float32, in which kernels compute, on a CPU.
      stored: its dtype, which is the result if it is not quantized; except that float16 gives float32 on a CPU, where XLA
        has no fast matmul for it (a 135M model decodes at an eighth of the speed of float32).
    """
    if lowering_platform() == "cpu":
        return FLOAT_DTYPES["F32"] if stored == FLOAT_DTYPES["F16"] else stored
    return stored if embedding.storage_type in FLOAT_DTYPES else BFLOAT16


class TensorInfo(Protocol):
    """The description of a tensor in a checkpoint."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def storage_type(self) -> str:
        """Its storage type by the format's name: F32, BF16, Q4_K ..."""
        ...

    @property
    def nbytes(self) -> int:
        """Its size in the file."""
        ...


class Unquantized:
    """Base of unquantized tensors: `storage_type` and `nbytes` follow from shape and dtype."""

    @property
    def storage_type(self: Any) -> str:
        return storage_type_of(self.dtype)

    @property
    def nbytes(self: Any) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class OrbaxWeightInfo:
    """The description of a quantized weight in orbax's format."""

    shape: tuple[int, ...]
    dtype: np.dtype
    storage_type: str
    nbytes: int


class Tensor(TensorInfo, Protocol):
    """A tensor [rows, ...] in a file. Nothing is in memory until `read`."""

    @property
    def dtype(self) -> np.dtype:
        """The dtype that `read` returns."""
        ...

    def read(self, start: int, stop: int) -> np.ndarray:
        """Rows [start, stop), in memory that the caller may change."""
        ...


def min_rows(tensor: TensorInfo) -> int:
    """The minimum number of rows to read at a time; fewer take as long."""
    return getattr(tensor, "rows_at_once", 1)


def row_bytes_of(tensor: TensorInfo) -> Tensor | None:
    """The rows of a quantized tensor as bytes, uint8[rows, ..., bytes], for `QuantFormat.from_rows`; None for others."""
    return getattr(tensor, "blocks", None)


@dataclass(frozen=True)
class Dense:
    """A tensor that is contiguous in a file.

    It is read without a memory map, whose pages would count as this process's memory until they are released, and cost a
    page fault each.
    """

    path: Location
    offset: int
    shape: tuple[int, ...]
    storage_type: str

    @property
    def dtype(self) -> np.dtype:
        return STORAGE_DTYPES.get(self.storage_type, STORAGE_DTYPES["U8"])

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def read(self, start: int, stop: int) -> np.ndarray:
        row = math.prod(self.shape[1:]) * self.dtype.itemsize
        raw = read_bytes(self.path, self.offset + start * row, (stop - start) * row)
        return raw.view(self.dtype).reshape(stop - start, *self.shape[1:])

    def read_into(self, start: int, out: np.ndarray) -> None:
        """Fill `out`, which is contiguous and of the tensor's dtype, with the rows from `start` on."""
        row = math.prod(self.shape[1:]) * self.dtype.itemsize
        read_bytes(self.path, self.offset + start * row, out.nbytes, out.reshape(-1).view(np.uint8))

    def entry(self, index: int) -> Dense:
        """One matrix of a tensor with three axes."""
        return replace(self, offset=self.offset + index * self.nbytes // self.shape[0], shape=self.shape[1:])


@dataclass(frozen=True)
class Derived:
    """Base of a tensor made from another: attributes that a subclass does not define are the other's."""

    tensor: Tensor

    @property
    def shape(self) -> tuple[int, ...]:
        return self.tensor.shape

    @property
    def dtype(self) -> np.dtype:
        return self.tensor.dtype

    @property
    def storage_type(self) -> str:
        return self.tensor.storage_type

    @property
    def nbytes(self) -> int:
        return self.tensor.nbytes * math.prod(self.shape) // max(1, math.prod(self.tensor.shape))

    @property
    def rows_at_once(self) -> int:
        return min_rows(self.tensor)

    @property
    def blocks(self) -> Tensor | None:
        """The same derivation of the other tensor's `blocks`: rows are moved whole."""
        blocks = row_bytes_of(self.tensor)
        return None if blocks is None else replace(self, tensor=blocks)  # type: ignore[return-value]  # subclasses have `read`


@dataclass(frozen=True, eq=False)
class MappedRows(Derived):
    """A tensor whose row i is row `index[i]` of another, or zeros if that is -1."""

    index: np.ndarray

    @property
    def shape(self) -> tuple[int, ...]:
        return (len(self.index), *self.tensor.shape[1:])

    def read(self, start: int, stop: int) -> np.ndarray:
        index = self.index[start:stop]
        present = index >= 0
        if not present.any():
            return np.zeros((len(index), *self.shape[1:]), self.dtype)
        first = int(index[present].min())
        source = self.tensor.read(first, int(index.max()) + 1)
        if len(source) == len(index) and np.array_equal(index, np.arange(first, first + len(index))):
            return source
        if present.all():
            return source[index - first]
        rows = np.zeros((len(index), *source.shape[1:]), source.dtype)
        rows[present] = source[index[present] - first]
        return rows


def pad_tensor(tensor: Tensor, rows: int) -> Tensor:
    """The tensor, padded with zeros to a number of rows."""
    index = np.arange(rows)
    return MappedRows(tensor, np.where(index < tensor.shape[0], index, -1))


def repeat_heads(tensor: Tensor, head_dim: int, copies: int) -> Tensor:
    """A key or value projection with each head repeated; the copies of a head are adjacent."""
    heads = np.arange(tensor.shape[0]).reshape(-1, head_dim)
    return MappedRows(tensor, np.repeat(heads, copies, axis=0).reshape(-1))


def permute_rope(tensor: Tensor, head_dim: int, *, interleave: bool) -> Tensor:
    """A query or key projection with the rows of each head in the interleaved or half rotary layout."""
    return MappedRows(tensor, _rope_order(tensor.shape[0], head_dim, interleave))


@lru_cache(maxsize=16)
def _rope_order(rows: int, head_dim: int, interleave: bool) -> np.ndarray:
    heads = np.arange(rows).reshape(-1, head_dim, 1)
    return (interleaved_from_half if interleave else half_from_interleaved)(heads).reshape(-1)


@dataclass(frozen=True)
class Offset(Derived):
    """A tensor with a constant added to every entry."""

    shift: float
    blocks = None

    def read(self, start: int, stop: int) -> np.ndarray:
        values = self.tensor.read(start, stop)
        return (values.astype(np.float32) + np.float32(self.shift)).astype(values.dtype)


@dataclass(frozen=True)
class Transposed(Derived):
    """A tensor of matrices, each transposed and sliced to its rows [first, last); None is the end."""

    first: int = 0
    last: int | None = None
    blocks = None

    @property
    def shape(self) -> tuple[int, ...]:
        count, columns, rows = self.tensor.shape
        return (count, len(range(rows)[self.first : self.last]), columns)

    def read(self, start: int, stop: int) -> np.ndarray:
        return np.ascontiguousarray(self.tensor.read(start, stop).swapaxes(1, 2)[:, self.first : self.last])


@dataclass(frozen=True)
class Combined:
    """Base of a tensor made of several of one dtype."""

    parts: Sequence[Tensor]

    @property
    def dtype(self) -> np.dtype:
        return self.parts[0].dtype

    @property
    def storage_type(self) -> str:
        return self.parts[0].storage_type

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.parts)


@dataclass(frozen=True)
class Joined(Combined):
    """Parts of one tensor, each in a separate file, concatenated along `axis` (0 or 1)."""

    axis: int

    @property
    def shape(self) -> tuple[int, ...]:
        shape = list(self.parts[0].shape)
        shape[self.axis] = sum(part.shape[self.axis] for part in self.parts)
        return tuple(shape)

    def read(self, start: int, stop: int) -> np.ndarray:
        if self.axis == 1:
            return np.concatenate([part.read(start, stop) for part in self.parts], axis=1)
        pieces, first = [], 0
        for part in self.parts:
            rows = part.shape[0]
            low, high = max(start - first, 0), min(stop - first, rows)
            if low < high:
                pieces.append(part.read(low, high))
            first += rows
        return pieces[0] if len(pieces) == 1 else np.concatenate(pieces)

    @property
    def blocks(self) -> Joined | None:
        """The parts' blocks, if all are quantized and joined by rows."""
        blocks = [block_tensor for part in self.parts if (block_tensor := row_bytes_of(part)) is not None]
        is_complete = (
            self.axis == 0 and len(blocks) == len(self.parts) and len({part.storage_type for part in self.parts}) == 1
        )
        return Joined(blocks, 0) if is_complete else None


@dataclass(frozen=True)
class Stacked(Combined):
    """Tensors of one shape, stacked along a new leading axis."""

    @property
    def shape(self) -> tuple[int, ...]:
        return (len(self.parts), *self.parts[0].shape)

    def read(self, start: int, stop: int) -> np.ndarray:
        return np.stack([part.read(0, part.shape[0]) for part in self.parts[start:stop]])

    @property
    def blocks(self) -> Stacked | None:
        """The parts' blocks, if all are quantized."""
        blocks = [row_bytes_of(part) for part in self.parts]
        return (
            None
            if any(part_blocks is None for part_blocks in blocks)
            else Stacked([part_blocks for part_blocks in blocks if part_blocks is not None])
        )

    def entry(self, index: int) -> Tensor:
        return self.parts[index]


@dataclass(frozen=True)
class ArrayTensor(Unquantized):
    """An array in memory, viewed as a tensor: the tensor's rows are the array's leading axes."""

    array: np.ndarray
    view_shape: tuple[int, ...] | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        return self.array.shape if self.view_shape is None else self.view_shape

    @property
    def dtype(self) -> np.dtype:
        return self.array.dtype

    def read(self, start: int, stop: int) -> np.ndarray:
        leading = self.array.shape[: self.array.ndim - len(self.shape) + 1]
        return self.array[np.unravel_index(np.arange(start, stop), leading)]

    def entry(self, index: int) -> ArrayTensor:
        """One matrix of a tensor with three axes."""
        return ArrayTensor(self.array[index])


@dataclass(frozen=True)
class QuantizedArrayTensor:
    """A quantized weight in memory as a tensor: `read` returns floats, `blocks` the bytes of a GGUF."""

    weight: QuantizedWeight
    shape: tuple[int, ...]

    @property
    def dtype(self) -> np.dtype:
        return self.weight.dtype

    @property
    def storage_type(self) -> str:
        return self.weight.quant_format.upper()

    @property
    def nbytes(self) -> int:
        return sum(plane.nbytes for plane in self.weight.planes)

    def read(self, start: int, stop: int) -> np.ndarray:
        return self._rows(start, stop).to_dense()

    @property
    def blocks(self) -> RowBytes | None:
        return RowBytes(self) if self.weight.form.is_gguf else None

    @property
    def form(self) -> QuantFormat:
        return self.weight.form

    def planes(self, start: int, stop: int) -> tuple[np.ndarray, ...]:
        return self._rows(start, stop).planes

    def _rows(self, start: int, stop: int) -> QuantizedWeight:
        leading = self.weight.shape[: self.weight.ndim - len(self.shape) + 1]
        where = np.unravel_index(np.arange(start, stop), leading)
        return self.weight.replace(planes=tuple(plane[where] for plane in self.weight.planes))


@dataclass(frozen=True)
class RowBytes:
    """The rows of a quantized weight as bytes, see `row_bytes_of`.

    Attributes:
      weight: a tensor with a `form`, whose `planes(start, stop)` returns the planes of some rows.
    """

    weight: Any
    dtype = np.dtype(np.uint8)
    storage_type = "U8"

    @property
    def shape(self) -> tuple[int, ...]:
        return (*self.weight.shape[:-1], self.weight.form.bytes_of_row(self.weight.shape[-1]))

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape)

    @property
    def rows_at_once(self) -> int:
        return min_rows(self.weight)

    def read(self, start: int, stop: int) -> np.ndarray:
        form, planes = self.weight.form, self.weight.planes(start, stop)
        raw = blocks_from_planes(planes, form) if form.is_gguf else form.to_rows(planes)
        return raw.reshape(stop - start, *self.shape[1:])


def read_bytes(path: Location, offset: int, count: int, out: np.ndarray | None = None) -> np.ndarray:
    """`count` bytes of a file from `offset`: uint8[count], in `out` if given."""
    buffer = np.empty(count, np.uint8) if out is None else out
    with reading(path, CheckpointError), path.open("rb", buffering=0) as file:
        _fill(buffer, file, path, offset)
    return buffer


def _fill(buffer: np.ndarray, file: Any, path: Location, offset: int) -> None:
    file.seek(offset)
    filled, count = 0, len(buffer)
    while filled < count:
        got = file.readinto(buffer[filled:].data)
        if not got:
            raise CheckpointError(
                f"{path} ends at byte {offset + filled}, but {offset + count} bytes are needed; copy it again"
            )
        filled += got


def read_strips(path: Location, offsets: Sequence[int], count: int) -> np.ndarray:
    """`count` bytes of a file from each of ascending offsets: uint8[offsets, count]. For errors see `read_bytes`."""
    if isinstance(path, StoredPath):  # one request for the whole span instead of thousands
        span = read_bytes(path, offsets[0], offsets[-1] + count - offsets[0])
        return np.stack([span[offset - offsets[0] :][:count] for offset in offsets])
    strips = np.empty((len(offsets), count), np.uint8)
    with reading(path, CheckpointError), path.open("rb", buffering=0) as file:
        for strip, offset in zip(strips, offsets, strict=True):
            _fill(strip, file, path, offset)
    return strips
