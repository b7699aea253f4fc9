"""The contents of a GGUF file before they are interpreted as a model: settings and tensors.

Source: ggml-org/ggml, docs/gguf.md.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from llama_jax.checkpoints.tensors import FLOATS, Dense, Tensor, read_bytes
from llama_jax.errors import CheckpointError, shown
from llama_jax.gguf_header import Header, open_header
from llama_jax.storage import Location

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
MOST_AXES = 4


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


def read_file(path: Location, *, texts: bool = True) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """All settings by key, see `Header.fields`, and all tensors by name.

    Raises:
      CheckpointError: a damaged file, or a tensor of a type that is not supported.
    """
    with open_header(path, CheckpointError) as header:
        return _read(path, header, texts)


def _read(path: Location, header: Header, texts: bool) -> tuple[dict[str, Any], dict[str, Tensor]]:
    tensor_count = header.tensor_count
    fields = header.fields(texts=texts)
    listed = []
    for _ in range(tensor_count):
        name = header.string()
        axes = header.scalar("I")
        if axes > MOST_AXES:
            raise ValueError(f"tensor {shown(name)} has {axes} axes")
        *sizes, number, offset = header.scalars(header.length * axes + "IQ")
        listed.append((name, tuple(sizes[::-1]), number, offset))

    alignment = fields.get("general.alignment", 32)
    if not isinstance(alignment, int) or alignment < 1:
        raise ValueError(f"alignment {shown(alignment, 40)}")
    start = -(-header.at // alignment) * alignment
    tensors: dict[str, Tensor] = {}
    for name, shape, number, offset in listed:
        if number not in TYPES:
            known = ", ".join(kind for kind, *_ in TYPES.values())
            raise CheckpointError(
                f"{path}: tensor {shown(name)} has type {_type_name(number)}; {known} are read: get the model in one of them"
            )
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
        excess = tensor.offset + tensor.nbytes - header.size
        if excess > 0:
            raise ValueError(f"tensor {shown(name)} ends {excess} bytes after the end of the file")
        tensors[name] = tensor
    total = sum(tensor.nbytes for tensor in tensors.values())
    if total > header.size:
        raise ValueError(f"its tensors have {total} bytes, the file {header.size}")
    return fields, tensors


def _type_name(number: int) -> str:
    from gguf import GGMLQuantizationType

    return next((kind.name for kind in GGMLQuantizationType if kind == number), str(number))
