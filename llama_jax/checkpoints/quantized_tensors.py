"""The quantised weights of Hugging Face folders: each one tensor made of several in the files.

`read` gives its numbers, `blocks` the same without loss as rows of one of the kinds (`ops.weights`); both unpack only the
requested rows. Layouts: vllm-project/compressed-tensors, `pack_quantized` and
`naive_quantized`; transformers' fine-grained fp8; ModelCloud/GPTQModel, `nn_modules/qlinear`; casper-hansen/AutoAWQ,
`modules/linear/gemm.py`; bitsandbytes, `functional.py`.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

from llama_jax.checkpoints.quantized_config import Scheme
from llama_jax.checkpoints.tensors import FLOATS, Dense, Tensor, read_bytes, read_strips
from llama_jax.errors import CheckpointError
from llama_jax.ops.weights import Kind, nf4
from llama_jax.storage import StoredPath

RAW = FLOATS | {
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "I8": np.dtype("i1"),
    "U8": np.dtype("u1"),
    "I32": np.dtype("<i4"),
    "I64": np.dtype("<i8"),
}
PER_WORD = 8  # integers of 4 bits in one of 32
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # which of eight outputs the nibbles of a word are, from the lowest
NESTED = 256  # blocks of the whole tensor that share a nested factor
ROWS_OF_TURNED = 512  # rows to read at a time of a tensor whose file has them as columns


@dataclass(frozen=True)
class QuantizedTensor(ABC):
    """A weight [rows, columns]; subclasses give its planes, which is all that differs between layouts.

    Attributes:
      name: for messages: the file and the weight's name.
      parts: the tensors that it is made of, by the end of their names.
      shape: rows and columns.
      form: the kind whose planes it gives.
      scheme: of the folder.
    """

    name: str
    parts: Mapping[str, Dense]
    shape: tuple[int, int]
    form: Kind
    scheme: Scheme
    dtype = np.dtype(np.float32)

    @property
    def kind(self) -> str:
        return self.form.name.upper()

    @property
    def nbytes(self) -> int:
        return sum(bytes_of(part) for part in self.parts.values())

    @abstractmethod
    def planes(self, start: int, stop: int) -> tuple[np.ndarray, ...]:
        """Rows [start, stop) as the planes of `form`."""

    def read(self, start: int, stop: int) -> np.ndarray:
        with np.errstate(all="ignore"):  # a damaged factor gives infinity or NaN, found where all tensors are checked
            return self.form.decode(*self.planes(start, stop))

    @property
    def blocks(self) -> Tensor | None:
        """See `tensors.blocks_of`."""
        return RowBytes(self)

    def part(self, end: str, start: int, stop: int) -> np.ndarray:
        """Rows of one of its tensors."""
        return read_rows(self.parts[end], start, stop)

    def grouped(self, values: np.ndarray) -> np.ndarray:
        """Integers of 4 bits plus 8, uint8[rows, columns / 2], as those of the kind, see `planes.packed`."""
        return (values ^ 0x88).reshape(len(values), -1, self.form.block // 2)

    def spread(self, found: np.ndarray, dtype: Any) -> np.ndarray:
        """What the groups of the file share, [rows, groups], for each group of the kind: [rows, columns / block]."""
        columns = self.shape[1]
        width = self.scheme.block[1] if self.scheme.block else self.scheme.group or columns
        return np.repeat(found, width // self.form.block, axis=1)[:, : columns // self.form.block].astype(dtype)


@dataclass(frozen=True)
class RowBytes:
    """The rows of a quantised weight as bytes, see `Kind.to_rows`."""

    weight: QuantizedTensor
    dtype = np.dtype(np.uint8)
    kind = "U8"

    @property
    def shape(self) -> tuple[int, int]:
        rows, columns = self.weight.shape
        return rows, self.weight.form.bytes_of_row(columns)

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape)

    @property
    def rows_at_once(self) -> int:
        """As the weight's, see `ColumnMajor`."""
        return getattr(self.weight, "rows_at_once", 1)

    def read(self, start: int, stop: int) -> np.ndarray:
        return self.weight.form.to_rows(self.weight.planes(start, stop))


# --- layouts ---------------------------------------------------------------------------------------------------------------


class Packed(QuantizedTensor):
    """compressed-tensors, "pack-quantized": eight integers of 4 bits of a row in a word, the first lowest, all plus 8."""

    def planes(self, start: int, stop: int) -> tuple[np.ndarray, ...]:
        values = self.grouped(self.part(".weight_packed", start, stop).view(np.uint8))
        scales = self.spread(self.part(".weight_scale", start, stop), np.float32)
        if self.scheme.symmetric:
            return values, scales
        first = start // PER_WORD
        words = self.part(".weight_zero_point", first, -(-stop // PER_WORD))  # packed along the rows
        zeros = _nibbles(np.ascontiguousarray(words.T)).T[start - first * PER_WORD : stop - first * PER_WORD]
        return values, scales, self.spread(zeros.view(np.int8) - 8, np.int8)


class Scaled(QuantizedTensor):
    """Integers or floats of 8 bits, with one factor, or one for each row, or for each block of rows and columns."""

    def planes(self, start: int, stop: int) -> tuple[np.ndarray, ...]:
        values = self.part(".weight", start, stop)
        end = next(end for end in (".weight_scale", ".weight_scale_inv") if end in self.parts)
        if self.scheme.block is not None:
            high = self.scheme.block[0]
            found = self.part(end, start // high, -(-stop // high))
            scales = found[np.arange(start, stop) // high - start // high]
            values = values.reshape(stop - start, -1, self.form.block)
            return values, self.spread(scales, np.float32)
        scale = self.parts[end]
        if math.prod(scale.shape) == 1:
            flat = Dense(scale.path, scale.offset, (1,), scale.kind)
            return values, np.repeat(read_rows(flat, 0, 1).astype(np.float32), stop - start)
        return values, self.part(end, start, stop).astype(np.float32).reshape(-1)


class ColumnMajor(QuantizedTensor):
    """Base of the layouts whose files store [columns, rows]."""

    @property
    def rows_at_once(self) -> int:
        """Rows to read at a time: of an object in a store all, since few of them take as long."""
        stored = any(isinstance(part.path, StoredPath) for part in self.parts.values())
        return self.shape[0] if stored else ROWS_OF_TURNED

    def in_groups(self, values: np.ndarray, scales: np.ndarray, zeros: np.ndarray) -> tuple[np.ndarray, ...]:
        """uint8[rows, columns / 2] with scales and zeros [groups, rows] of the file."""
        values = self.grouped(values)
        scales = self.spread(scales.T, np.float32)
        if self.scheme.symmetric:
            if (zeros != 8).any():
                raise CheckpointError(
                    f"{self.name} has zeros that are not the middle, but quantization_config says sym=true"
                )
            return values, scales
        return values, scales, self.spread(zeros.T.view(np.int8) - 8, np.int8)


class Gptq(ColumnMajor):
    """GPTQ: eight integers of a column in a word, so that words are [columns / 8, rows], and zeros [groups, rows / 8]."""

    def planes(self, start: int, stop: int) -> tuple[np.ndarray, ...]:
        values, scales, zeros = self._integers(start, stop)
        if not self.scheme.reordered and ".g_idx" in self.parts:
            wanted = np.arange(self.shape[1]) // (self.scheme.group or self.shape[1])
            if not np.array_equal(self.part(".g_idx", 0, self.shape[1]), wanted):
                raise CheckpointError(
                    f"{self.name} has columns in another order, but quantization_config says desc_act=false"
                )
        return self.in_groups(values, scales, zeros)

    def _integers(self, start: int, stop: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """uint8[rows, columns / 2], and scales and zeros [groups, rows]."""
        words = _columns(self.parts[".qweight"], start, stop)
        first, last = start // PER_WORD, -(-stop // PER_WORD)
        packed = _columns(self.parts[".qzeros"], first, last).view(np.uint32)
        if self.scheme.zeros_less_one:  # in the word as a whole, for what was subtracted was borrowed from the next
            packed = packed + np.uint32(0x11111111)
        zeros = _nibbles(packed)[:, start - first * PER_WORD : stop - first * PER_WORD]
        scales = _columns(self.parts[".scales"], start, stop)
        return np.ascontiguousarray(words.T).view(np.uint8), scales, np.ascontiguousarray(zeros)


class Reordered(Gptq):
    """GPTQ with `desc_act`: a group's columns lie apart, so that no kind holds it. Its numbers are read."""

    def read(self, start: int, stop: int) -> np.ndarray:
        values, scales, zeros = self._integers(start, stop)
        group = self.part(".g_idx", 0, self.shape[1])
        if group.min() < 0 or group.max() >= len(scales):
            raise CheckpointError(f"{self.name} has a column of group {int(group.max())}, and {len(scales)} groups")
        with np.errstate(all="ignore"):
            offset = _nibbles(values).T.astype(np.float32) - zeros[group].astype(np.float32)
            return np.ascontiguousarray((scales[group].astype(np.float32) * offset).T)

    @property
    def blocks(self) -> None:
        return None


class Awq(ColumnMajor):
    """AWQ, "gemm": eight outputs of a column in a word, in an order of their own; words and zeros are [..., rows / 8]."""

    def planes(self, start: int, stop: int) -> tuple[np.ndarray, ...]:
        first, last = start // PER_WORD, -(-stop // PER_WORD)
        some = slice(start - first * PER_WORD, stop - first * PER_WORD)
        values, zeros = (self._outputs(end, first, last)[:, some] for end in (".qweight", ".qzeros"))
        scales = _columns(self.parts[".scales"], start, stop)
        values = values[::2] | (values[1::2] << 4)
        return self.in_groups(np.ascontiguousarray(values.T), scales, np.ascontiguousarray(zeros))

    def _outputs(self, end: str, first: int, last: int) -> np.ndarray:
        words = _columns(self.parts[end], first, last)
        nibbles = _nibbles(words).reshape(len(words), -1, PER_WORD)
        out = np.empty_like(nibbles)
        out[..., AWQ_ORDER] = nibbles
        return out.reshape(len(words), -1)


@dataclass(frozen=True)
class Nf4(QuantizedTensor):
    """bitsandbytes: two numbers in a byte, the first one high, and factors for each 64; both of the flattened tensor.

    Attributes:
      offset: of the factors, where they are quantised themselves.
    """

    offset: float = 0.0

    def planes(self, start: int, stop: int) -> tuple[np.ndarray, ...]:
        columns = self.shape[1]
        each = columns // nf4.BLOCK
        weight = self.parts[".weight"]
        values = read_bytes(weight.path, weight.offset + start * columns // 2, (stop - start) * columns // 2)
        values = values.reshape(stop - start, columns // 2)
        absmax = self.part(".weight.absmax", start * each, stop * each).reshape(stop - start, each)
        if ".weight.nested_absmax" not in self.parts:
            return values, absmax
        first, last = start * each // NESTED, -(-stop * each // NESTED)
        nested = self.part(".weight.nested_absmax", first, last)
        found = nested[np.arange(start * each, stop * each) // NESTED - first].reshape(stop - start, each)
        offset = np.full(stop - start, self.offset, np.float32)
        if self.form is nf4.DOUBLE:
            return values, absmax, np.ascontiguousarray(found[:, 0]), offset
        if self.form is nf4.DOUBLE_256:
            return values, absmax, np.ascontiguousarray(found[:, :: 256 // nf4.BLOCK]), offset
        return values, nf4.DYNAMIC[absmax] * found + offset[:, None]


# --- reading ------------------------------------------------------------------------------------------------------------


def bytes_of(part: Dense) -> int:
    return math.prod(part.shape) * RAW[part.kind].itemsize if part.kind in RAW else part.nbytes


def read_rows(part: Dense, start: int, stop: int) -> np.ndarray:
    """Rows of a tensor of any of the types."""
    dtype = RAW[part.kind]
    row = math.prod(part.shape[1:]) * dtype.itemsize
    found = read_bytes(part.path, part.offset + start * row, (stop - start) * row)
    return found.view(dtype).reshape(stop - start, *part.shape[1:])


def _columns(part: Dense, start: int, stop: int) -> np.ndarray:
    """Columns of a matrix: a strip of each of its rows."""
    dtype = RAW[part.kind]
    rows, width = part.shape
    offsets = part.offset + (np.arange(rows) * width + start) * dtype.itemsize
    found = read_strips(part.path, offsets.tolist(), (stop - start) * dtype.itemsize)
    return found.view(dtype)


def _nibbles(words: np.ndarray) -> np.ndarray:
    """Words [..., n] as their eight nibbles, the lowest first: uint8[..., 8 n]."""
    pairs = np.ascontiguousarray(words).view(np.uint8)
    return np.stack([pairs & 15, pairs >> 4], axis=-1).reshape(*words.shape[:-1], -1)
