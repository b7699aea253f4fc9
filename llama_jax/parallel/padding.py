"""Pads the vocabulary and copies key/value heads, so that `tensor` can shard both evenly.

The outputs do not change. Padding and copies exist only on the mesh: `unembed` gives padding no probability, and
`unpad_params` restores the original shapes of parameters that are saved or returned.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from llama_jax.config import LlamaConfig
from llama_jax.errors import MeshError
from llama_jax.model.params import LlamaParams, ParamSpec, spec_at
from llama_jax.ops.weights.lora import LowRank, LowRankWeight
from llama_jax.ops.weights.quantized_matmul import JoinedWeight, QuantizedWeight
from llama_jax.parallel.mesh import MeshSizes, check_divisible

VOCAB_MULTIPLE = 128  # width of a TPU's vector unit; a multiple of a GPU's matrix tiles


def padded_vocab(config: LlamaConfig, sizes: MeshSizes) -> int:
    """Rows of the embedding and the output projection on a mesh: V, or with `tensor` the next multiple of it and of 128."""
    if sizes.tensor == 1:
        return config.vocab_size
    return -(-config.vocab_size // (multiple := math.lcm(VOCAB_MULTIPLE, sizes.tensor))) * multiple


def padded_config(config: LlamaConfig, sizes: MeshSizes) -> LlamaConfig:
    """The configuration of the model on a mesh: with at least one key/value head per device along `tensor`.

    If there are fewer heads, each is copied, and the G queries of its group are divided among the copies. The cache is then
    tensor / K times as large, but no communication is needed (Pope et al. 2022, section 3.3, shard multi-query attention by
    batch instead). `vocab_size` stays that of the model, without padding.

    Raises:
      MeshError: heads, features or columns cannot be divided; the message gives sizes that work.
    """
    c, tensor = config, sizes.tensor
    if not _can_shard(c, tensor):
        would_do = ", ".join(str(n) for n in range(1, c.n_heads + 1) if _can_shard(c, n))
        name = f"n_kv_heads={c.n_kv_heads}" if c.hidden_dim % tensor == 0 else f"hidden_dim={c.hidden_dim}"
        queries = f" (of {c.queries_per_kv_head} queries each)" if c.hidden_dim % tensor == 0 else ""
        raise MeshError(f"{name}{queries} cannot be split over tensor={tensor}; {would_do} would do")
    check_divisible("dim", c.dim, "fsdp" if sizes.context == 1 else "fsdp*context", sizes.columns)
    return replace(c, n_kv_heads=max(c.n_kv_heads, tensor))


def _can_shard(config: LlamaConfig, tensor: int) -> bool:
    """Whether heads, possibly copied, and features can be sharded over this many devices."""
    heads, queries = config.n_kv_heads, config.queries_per_kv_head
    heads_divide = heads % tensor == 0
    # A norm over all heads together has weights for each head, which are not copied.
    copies_divide = tensor % heads == 0 and queries % (tensor // heads) == 0 and config.qk_norm != "all"
    return (heads_divide or copies_divide) and config.hidden_dim % tensor == 0


def padded_shapes_config(config: LlamaConfig, sizes: MeshSizes) -> LlamaConfig:
    """The configuration whose parameters have the shapes on the mesh: `padded_config`, with the padded `vocab_size`.

    Only for shapes: a computation with it would treat padding as tokens.

    Raises:
      MeshError: the model cannot be padded to fit.
    """
    return replace(padded_config(config, sizes), vocab_size=padded_vocab(config, sizes))


def pad_params(config: LlamaConfig, sizes: MeshSizes, params: LlamaParams) -> LlamaParams:
    """The parameters with the shapes of `padded_shapes_config(config, sizes)`: padded with zeros, with heads copied.

    For NumPy arrays on the host, which stay there, or under `jit` with shardings. `load` with a mesh reads parameters
    directly with these shapes.

    Raises:
      MeshError: the model cannot be padded to fit.
    """
    return map_params(params, partial(pad_array, padded_shapes_config(config, sizes)))


def has_groups(spec: ParamSpec) -> bool:
    """Whether a parameter has the axes K and G + 2 (`Attention.qkv` and its bias), along which heads are copied."""
    return spec.axes.startswith("K G+2")


def pad_array(target: LlamaConfig, spec: ParamSpec, array: Any) -> Any:
    """One parameter, padded for a mesh.

    Args:
      target: the result of `padded_shapes_config`.
      spec: the parameter's `ParamSpec`.
    """
    if spec.has_vocabulary:
        return jax.tree.map(partial(pad_rows, rows=target.vocab_size), array)
    return _map_groups(copy_heads, spec, array, target.n_kv_heads) if has_groups(spec) else array


def unpad_params(config: LlamaConfig, params: LlamaParams) -> LlamaParams:
    """Undo `pad_params`: the parameters in the shape of the model's own configuration, without padding and copies."""

    def unpad_array(spec: ParamSpec, array: Any) -> Any:
        if spec.has_vocabulary:
            rows = lambda table: table[: config.vocab_size] if len(table) > config.vocab_size else table
            return jax.tree.map(rows, array)
        return _map_groups(_merge_heads, spec, array, config.n_kv_heads) if has_groups(spec) else array

    return map_params(params, unpad_array)


def map_params(params: LlamaParams, change: Callable[[ParamSpec, Any], Any]) -> LlamaParams:
    """Apply a function to each parameter, given its `ParamSpec`."""
    is_leaf = lambda leaf: isinstance(leaf, QuantizedWeight | JoinedWeight | LowRankWeight | LowRank)
    return jax.tree_util.tree_map_with_path(lambda path, leaf: change(spec_at(path), leaf), params, is_leaf=is_leaf)


def map_matrix_rows(leaf: Any, change: Callable[[Any], Any]) -> Any:
    """Apply `change` to the arrays that have a matrix's rows: of a LoRA weight its base and B, of an adapter its B.

    Other leaves have the rows themselves.
    """
    if isinstance(leaf, LowRankWeight):
        factor = None if leaf.factor is None else _map_vector(leaf.factor, leaf.ndim, change)
        return leaf.replace(base=change(leaf.base), low_rank=map_matrix_rows(leaf.low_rank, change), factor=factor)
    if isinstance(leaf, LowRank):
        magnitude = None if leaf.magnitude is None else _map_vector(leaf.magnitude, leaf.ndim, change)
        return leaf.replace(b=change(leaf.b), magnitude=magnitude)
    return change(leaf)


def _map_vector(vector: Any, ndim: int, change: Callable[[Any], Any]) -> Any:
    """Apply `change` to a vector with one number per row of a matrix with `ndim` axes, or per row and adapter."""
    return change(vector[..., None])[..., 0] if vector.ndim < ndim else change(vector)


def _map_groups(change: Callable[..., Any], spec: ParamSpec, leaf: Any, heads: int) -> Any:
    if isinstance(leaf, LowRankWeight | LowRank):
        return map_matrix_rows(leaf, lambda part: _map_groups(change, spec, part, heads))
    leading = leaf.ndim - len(spec.axes.split())
    if isinstance(leaf, JoinedWeight):
        if leaf.shape[leading] != heads:
            raise MeshError(
                f"{spec.path} has several quantization formats, so its heads cannot be copied; load it without a mesh"
            )
        return leaf
    return jax.tree.map(partial(change, heads=heads, leading=leading), leaf)


def pad_rows(table: Any, *, rows: int) -> Any:
    """[V, D] padded with rows of zeros at the end: [rows, D]."""
    missing = rows - table.shape[0]
    return _module_of(table).pad(table, ((0, missing), (0, 0))) if missing else table


def copy_heads(qkv: Any, *, heads: int, leading: int) -> Any:
    """Copy each key/value head until there are `heads`, and divide the queries of its group among the copies.

    [..., K, G + 2, *rest] becomes [..., heads, G K / heads + 2, *rest].

    Args:
      leading: number of axes before K.
    """
    layers, (kv_heads, entries), rest = qkv.shape[:leading], qkv.shape[leading : leading + 2], qkv.shape[leading + 2 :]
    group, copies = entries - 2, heads // kv_heads
    if copies == 1:
        return qkv
    before = (slice(None),) * (leading + 1)
    queries = qkv[(*before, slice(None, group))].reshape(*layers, heads, group // copies, *rest)
    keys_values = _module_of(qkv).repeat(qkv[(*before, slice(group, None))], copies, axis=leading)
    return _module_of(qkv).concatenate([queries, keys_values], axis=leading + 1)


def _merge_heads(qkv: Any, *, heads: int, leading: int) -> Any:
    """Undo `copy_heads`, keeping the first copy of each key and value."""
    layers, (kv_heads, entries), rest = qkv.shape[:leading], qkv.shape[leading : leading + 2], qkv.shape[leading + 2 :]
    group, copies = entries - 2, kv_heads // heads
    if kv_heads % heads or copies < 2:
        return qkv
    before = (slice(None),) * leading
    queries = qkv[(*before, slice(None), slice(None, group))].reshape(*layers, heads, group * copies, *rest)
    keys_values = qkv[(*before, slice(None, None, copies), slice(group, None))]
    return _module_of(qkv).concatenate([queries, keys_values], axis=leading + 1)


def _module_of(array: Any) -> Any:
    """The module whose functions keep an array on its host or device: NumPy or jax.numpy."""
    return np if isinstance(array, np.ndarray) else jnp
