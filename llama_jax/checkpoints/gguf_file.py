"""The contents of a GGUF file, versions 1 to 3, before they are interpreted as a model: settings and tensors.

Source: ggml-org/ggml, docs/gguf.md.
"""

from __future__ import annotations

import math
import os
import struct
import sys
from array import array
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from llama_jax.checkpoints.tensors import FLOATS, Dense, Tensor, read_bytes
from llama_jax.errors import CheckpointError, reason_of, shown
from llama_jax.storage import Location, StoredPath

# Types of tensors by number: name, numbers in a block, bytes of a block.
TYPES = {
    0: ("F32", 1, 4),
    1: ("F16", 1, 2),
    2: ("Q4_0", 32, 18),
    3: ("Q4_1", 32, 20),
    6: ("Q5_0", 32, 22),
    7: ("Q5_1", 32, 24),
    8: ("Q8_0", 32, 34),
    10: ("Q2_K", 256, 84),
    11: ("Q3_K", 256, 110),
    12: ("Q4_K", 256, 144),
    13: ("Q5_K", 256, 176),
    14: ("Q6_K", 256, 210),
    16: ("IQ2_XXS", 256, 66),
    17: ("IQ2_XS", 256, 74),
    18: ("IQ3_XXS", 256, 98),
    19: ("IQ1_S", 256, 50),
    20: ("IQ4_NL", 32, 18),
    21: ("IQ3_S", 256, 110),
    22: ("IQ2_S", 256, 82),
    23: ("IQ4_XS", 256, 136),
    29: ("IQ1_M", 256, 56),
    30: ("BF16", 1, 2),
    34: ("TQ1_0", 256, 54),
    35: ("TQ2_0", 256, 66),
    39: ("MXFP4", 32, 17),
}
# Types of settings by number: struct's letter, or one of the two below.
SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
STRING, ARRAY = 8, 9
MOST_AXES = 4
# A text or an entry of a table costs up to a hundred bytes here for each of its own. Llama 3's vocabulary has 410,000 texts.
MOST_TEXTS = 1 << 20
MOST_ENTRIES = 1 << 16
READ_AHEAD = 1 << 20  # bytes of a header in a store, which has several million


@dataclass(frozen=True)
class BlockTensor:
    """A tensor [rows, columns] or [entries, rows, columns] in blocks along the columns; `read` gives float32."""

    path: Location
    offset: int
    shape: tuple[int, ...]
    kind: str
    block: tuple[int, int]  # numbers, bytes
    dtype = np.dtype(np.float32)

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) // self.block[0] * self.block[1]

    def read(self, start: int, stop: int) -> np.ndarray:
        from gguf import GGMLQuantizationType, quants

        blocks = self.shape[-1] // self.block[0] * self.block[1]
        row = math.prod(self.shape[1:-1]) * blocks
        found = read_bytes(self.path, self.offset + start * row, (stop - start) * row)
        found = found.reshape(stop - start, *self.shape[1:-1], blocks)
        with np.errstate(all="ignore"):  # a damaged scale gives infinity or NaN, found where all tensors are checked
            return quants.dequantize(found, GGMLQuantizationType[self.kind])

    @property
    def blocks(self) -> Tensor:
        """See `tensors.blocks_of`."""
        width = self.shape[-1] // self.block[0] * self.block[1]
        return Dense(self.path, self.offset, (*self.shape[:-1], width), "U8")

    def entry(self, index: int) -> BlockTensor:
        """One of the tensors that a tensor with three axes holds."""
        return replace(self, offset=self.offset + index * self.nbytes // self.shape[0], shape=self.shape[1:])


def is_gguf(path: Location) -> bool:
    """Whether the file begins as GGUF does."""
    with path.open("rb") as file:
        return file.read(4) == b"GGUF"


def read_file(path: Location) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """All settings by key, with the format's version as ``GGUF.version``, and all tensors by name.

    Raises:
      CheckpointError: a damaged file, or a tensor of a type that is not supported.
    """
    with path.open("rb", buffering=READ_AHEAD if isinstance(path, StoredPath) else -1) as file:
        try:
            return _read(path, _Cursor(file))
        except CheckpointError:
            raise
        except (struct.error, ValueError, KeyError, OverflowError) as error:
            raise CheckpointError(f"{path} is not a whole GGUF file ({reason_of(error)}); copy it again") from None


class _Cursor:
    """Reads a header from its start. Every length in it is checked against the rest of the file before it is used."""

    def __init__(self, file: Any) -> None:
        self.file = file
        self.size = file.seek(0, os.SEEK_END)
        self.texts_left = MOST_TEXTS
        self.at = file.seek(4)  # after the magic
        self.version = self.scalar("I")
        self.length = "I" if self.version == 1 else "Q"

    def take(self, size: int) -> bytes:
        if size > self.size - self.at:
            raise ValueError(f"{size} bytes are announced, {self.size - self.at} are left")
        found = self.file.read(size)
        if len(found) < size:
            raise ValueError("the file ended while it was read")
        self.at += size
        return found

    def scalar(self, letter: str) -> Any:
        return struct.unpack("<" + letter, self.take(struct.calcsize(letter)))[0]

    def string(self) -> str:
        # A vocabulary may hold pieces that are no UTF-8 by themselves.
        return self.take(self.scalar(self.length)).decode("utf-8", "surrogateescape")

    def value(self, kind: int) -> Any:
        if kind == STRING:
            return self.string()
        if kind != ARRAY:
            return self.scalar(SCALARS[kind])
        kind, count = self.scalar("I"), self.scalar(self.length)
        if kind == STRING:
            self.texts_left -= count
            if count > self.size - self.at or self.texts_left < 0:
                raise ValueError(f"{count} strings are announced")
            return [self.string() for _ in range(count)]
        letter = SCALARS[kind]
        # Packed, since a list takes twenty bytes for each of a file's.
        found = array("B" if letter == "?" else letter, self.take(count * struct.calcsize(letter)))
        if sys.byteorder == "big":
            found.byteswap()
        return found


def _read(path: Location, cursor: _Cursor) -> tuple[dict[str, Any], dict[str, Tensor]]:
    if cursor.version not in (1, 2, 3):
        big = cursor.version in (1 << 24, 2 << 24, 3 << 24)
        what = "is in big-endian byte order" if big else f"has version {cursor.version}"
        raise CheckpointError(f"{path} {what}, which is not supported; little-endian versions 1 to 3 are")
    tensor_count, field_count = cursor.scalar(cursor.length), cursor.scalar(cursor.length)
    if max(tensor_count, field_count) > MOST_ENTRIES:
        raise ValueError(f"{field_count} settings and {tensor_count} tensors are announced")
    fields: dict[str, Any] = {"GGUF.version": cursor.version}
    for _ in range(field_count):
        key = cursor.string()
        if key in fields:
            raise ValueError(f"the key {shown(key, 40)} occurs twice")
        fields[key] = cursor.value(cursor.scalar("I"))

    listed = []
    for _ in range(tensor_count):
        name = cursor.string()
        axes = cursor.scalar("I")
        if axes > MOST_AXES:
            raise ValueError(f"tensor {shown(name)} has {axes} axes")
        shape = tuple(cursor.scalar(cursor.length) for _ in range(axes))[::-1]
        listed.append((name, shape, cursor.scalar("I"), cursor.scalar("Q")))

    alignment = fields.get("general.alignment", 32)
    if not isinstance(alignment, int) or alignment < 1:
        raise ValueError(f"alignment {shown(alignment, 40)}")
    start = -(-cursor.at // alignment) * alignment
    tensors: dict[str, Tensor] = {}
    for name, shape, number, offset in listed:
        if number not in TYPES:
            known = ", ".join(kind for kind, *_ in TYPES.values())
            raise CheckpointError(f"{path}: tensor {shown(name)} has type {_type_name(number)}; {known} are read")
        kind, *block = TYPES[number]
        if name in tensors:
            raise ValueError(f"tensor {shown(name)} occurs twice")
        if not shape or shape[-1] % block[0]:
            raise ValueError(f"tensor {shown(name)} of {list(shape)} does not consist of blocks of {block[0]}")
        tensor: Dense | BlockTensor
        if kind in FLOATS:
            tensor = Dense(path, start + offset, shape, kind)
        else:
            tensor = BlockTensor(path, start + offset, shape, kind, (block[0], block[1]))
        excess = tensor.offset + tensor.nbytes - cursor.size
        if excess > 0:
            raise ValueError(f"tensor {shown(name)} ends {excess} bytes after the end of the file")
        tensors[name] = tensor
    total = sum(tensor.nbytes for tensor in tensors.values())
    if total > cursor.size:
        raise ValueError(f"its tensors have {total} bytes, the file {cursor.size}")
    return fields, tensors


def _type_name(number: int) -> str:
    from gguf import GGMLQuantizationType

    return next((kind.name for kind in GGMLQuantizationType if kind == number), str(number))
