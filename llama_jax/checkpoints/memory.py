"""Parameters in memory in the form of a checkpoint's tensors, to be written to a file."""

from __future__ import annotations

import math
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import Any

import jax
import numpy as np

from llama_jax.checkpoints.beside import About
from llama_jax.checkpoints.huggingface import names_of
from llama_jax.checkpoints.names import shares_of
from llama_jax.checkpoints.tensors import Opened, kind_of
from llama_jax.config import LlamaConfig
from llama_jax.model.params import BLOCKS, Llama, Row, rows, shape_of
from llama_jax.model.trees import layers_of
from llama_jax.ops.weights import JoinedWeight, QuantizedWeight
from llama_jax.ops.weights.planes import join
from llama_jax.tokenizers import Tokenizer


@dataclass(frozen=True)
class Held:
    """An array in the shape of a tensor, whose rows are its leading axes, and which is not copied for it."""

    array: np.ndarray
    seen_as: tuple[int, ...] | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        return self.array.shape if self.seen_as is None else self.seen_as

    @property
    def dtype(self) -> np.dtype:
        return self.array.dtype

    @property
    def kind(self) -> str:
        return kind_of(self.dtype)

    @property
    def nbytes(self) -> int:
        return self.array.nbytes

    def read(self, start: int, stop: int) -> np.ndarray:
        leading = self.array.shape[: self.array.ndim - len(self.shape) + 1]
        return self.array[np.unravel_index(np.arange(start, stop), leading)]

    def entry(self, index: int) -> Held:
        """One of the tensors that a tensor with three axes holds."""
        return Held(self.array[index])


@dataclass(frozen=True)
class HeldBlocks:
    """A quantised weight of NumPy's arrays in the shape of a tensor: `read` gives floats, `blocks` the bytes of a GGUF."""

    weight: QuantizedWeight
    shape: tuple[int, ...]

    @property
    def dtype(self) -> np.dtype:
        return self.weight.dtype

    @property
    def kind(self) -> str:
        return self.weight.kind.upper()

    @property
    def nbytes(self) -> int:
        return sum(plane.nbytes for plane in self.weight.planes)

    def read(self, start: int, stop: int) -> np.ndarray:
        return self._rows(start, stop).decoded()

    @property
    def blocks(self) -> HeldBytes | None:
        return HeldBytes(self) if self.weight.form.of_gguf else None

    def _rows(self, start: int, stop: int) -> QuantizedWeight:
        leading = self.weight.shape[: self.weight.ndim - len(self.shape) + 1]
        where = np.unravel_index(np.arange(start, stop), leading)
        return self.weight.replace(planes=tuple(plane[where] for plane in self.weight.planes))


@dataclass(frozen=True)
class HeldBytes:
    """The blocks of a quantised weight, see `tensors.blocks_of`."""

    held: HeldBlocks
    dtype = np.dtype(np.uint8)
    kind = "U8"

    @property
    def shape(self) -> tuple[int, ...]:
        return (*self.held.shape[:-1], self.held.nbytes // math.prod(self.held.shape[:-1]))

    @property
    def nbytes(self) -> int:
        return self.held.nbytes

    def read(self, start: int, stop: int) -> np.ndarray:
        rows = self.held._rows(start, stop)
        return join(rows.planes, rows.form).reshape(stop - start, *self.shape[1:])


def from_params(config: LlamaConfig, params: Llama, tokenizer: Tokenizer | None, about: About = About()) -> Opened:
    """The parameters under Hugging Face's names, as if they had been opened."""
    on_host = params.replace(blocks=jax.tree.map(np.asarray, params.blocks))
    tensors: dict[str, Held | HeldBlocks] = {}
    names = names_of(config)

    def put(row: Row, node: Any, layer: int = 0) -> None:
        leaf, first = jax.tree.map(np.asarray, attrgetter(row.path.removeprefix(BLOCKS))(node)), 0
        for i, share in enumerate(shares_of(row)):
            held, shape = leaf, shape_of(share.axes, config)
            if isinstance(leaf, JoinedWeight):  # its parts are the shares
                held = leaf.parts[i]
            elif share.width:
                last = first + shape_of(share.width, config)[0]
                held, first = jax.tree.map(lambda array, some=slice(first, last): array[:, some], leaf), last
            quantized = isinstance(held, QuantizedWeight)
            tensors[names[share.name].format(layer)] = HeldBlocks(held, shape) if quantized else Held(held, shape)

    layers = layers_of(on_host)
    for row in rows(config):
        if not row.in_blocks:
            put(row, params)
            continue
        for i in range(config.n_layers):
            put(row, layers[i], i)
    where = Path("parameters")
    return Opened("parameters in memory", where, config, tensors, names, False, lambda: tokenizer, lambda: about)
