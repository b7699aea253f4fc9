"""Parameters in memory, seen as the tensors of a checkpoint: what is written to a file."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import jax
import numpy as np

from llama_jax.checkpoints.huggingface import NAMES
from llama_jax.checkpoints.tensors import FLOATS, Opened
from llama_jax.config import LlamaConfig
from llama_jax.model.params import Block, Llama
from llama_jax.tokenizers import Tokenizer


@dataclass(frozen=True)
class Held:
    """An array [..., columns] whose leading axes are the rows of a tensor; a vector is its own rows."""

    array: np.ndarray

    @property
    def shape(self) -> tuple[int, ...]:
        *rows, columns = self.array.shape
        return (math.prod(rows), columns) if rows else (columns,)

    @property
    def dtype(self) -> np.dtype:
        return self.array.dtype

    @property
    def kind(self) -> str:
        return next((kind for kind, dtype in FLOATS.items() if dtype == self.dtype), str(self.dtype))

    @property
    def nbytes(self) -> int:
        return self.array.nbytes

    def read(self, start: int, stop: int) -> np.ndarray:
        rows = np.arange(start, stop)
        return self.array[np.unravel_index(rows, self.array.shape[:-1])] if self.array.ndim > 1 else self.array[rows]


def from_params(config: LlamaConfig, params: Llama, tokenizer: Tokenizer | None) -> Opened:
    """The parameters under Hugging Face's names, as if they had been opened."""
    stacked = jax.tree.map(np.asarray, params.blocks) if isinstance(params.blocks, Block) else None
    groups = config.queries_per_kv_head
    tensors: dict[str, Held] = {}

    def put(part: str, array: np.ndarray, layer: int = 0) -> None:
        tensors[NAMES[part].format(layer)] = Held(array)

    put("embedding", np.asarray(params.embedding))
    for i in range(config.n_layers):
        block = params.blocks[i] if isinstance(params.blocks, tuple) else jax.tree.map(lambda a, i=i: a[i], stacked)
        qkv = np.asarray(block.attention.qkv)
        put("attention_norm", np.asarray(block.attention_norm), i)
        put("q", qkv[:, :groups], i)
        put("k", qkv[:, groups], i)
        put("v", qkv[:, groups + 1], i)
        put("out", np.asarray(block.attention.out), i)
        put("ffn_norm", np.asarray(block.ffn_norm), i)
        put("gate", np.asarray(block.feed_forward.gate), i)
        put("up", np.asarray(block.feed_forward.up), i)
        put("down", np.asarray(block.feed_forward.down), i)
    put("final_norm", np.asarray(params.final_norm))
    if params.lm_head is not None:
        put("lm_head", np.asarray(params.lm_head))
    return Opened("parameters in memory", Path("parameters"), config, tensors, NAMES, False, lambda: tokenizer)
