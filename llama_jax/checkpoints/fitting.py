"""A checkpoint as if it had been written for the fitted model of a mesh, so that each device reads its own rows."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from llama_jax.checkpoints.assemble import plan
from llama_jax.checkpoints.names import shares_of
from llama_jax.checkpoints.tensors import Derived, Opened, Padded
from llama_jax.model.params import TABLE, rows
from llama_jax.parallel.fit import laid_out
from llama_jax.parallel.mesh import MeshSizes


@dataclass(frozen=True)
class Copied(Derived):
    """A key or value projection with each head repeated: its copies follow one another."""

    head_dim: int
    copies: int

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.tensor.shape[0] * self.copies, *self.tensor.shape[1:])

    def read(self, start: int, stop: int) -> np.ndarray:
        width = self.head_dim * self.copies  # rows that come of one head
        first, last = start // width, -(-stop // width)
        heads = self.tensor.read(first * self.head_dim, last * self.head_dim).reshape(-1, self.head_dim, *self.shape[1:])
        rows = np.repeat(heads, self.copies, axis=0).reshape(-1, *self.shape[1:])
        return rows[start - first * width : stop - first * width]


def fit_opened(opened: Opened, sizes: MeshSizes) -> Opened:
    """The same checkpoint with the configuration and the tensors of the fitted model, see `parallel.fit`.

    Raises:
      MeshError: the model cannot be made to fit.
      CheckpointError: a tensor that is missing, unexpected or of the wrong shape.
    """
    config, target = opened.config, laid_out(opened.config, sizes)
    plan(opened)  # errors about the file name the file's own shapes
    copies = target.n_kv_heads // config.n_kv_heads
    tensors = dict(opened.tensors)
    if target.vocab_size != config.vocab_size:
        tables = {opened.names[share.name] for row in TABLE if row.has_vocabulary for share in shares_of(row)} & set(tensors)
        tensors |= {name: Padded(tensors[name], target.vocab_size) for name in tables}
    if copies > 1:
        shares = [share.name for row in rows(config) for share in shares_of(row) if share.axes.startswith("K*H")]
        heads = [opened.names[name].format(i) for i in range(config.n_layers) for name in shares]
        tensors |= {name: Copied(tensors[name], config.head_dim, copies) for name in heads}
    return replace(opened, config=target, tensors=tensors)
