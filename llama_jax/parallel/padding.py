"""Fits a model to a mesh by padding the vocabulary and copying key/value heads, so that both can be divided.

The outputs do not change. Padding and copies exist only in the sharded model: `unembed` gives padding no probability, and
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
from llama_jax.model.params import Llama, ParamSpec, spec_at
from llama_jax.ops.weights.lora import LowRank, LowRankWeight
from llama_jax.ops.weights.quantized_matmul import JoinedWeight, QuantizedWeight
from llama_jax.parallel.mesh import MeshSizes

VOCAB_MULTIPLE = 128  # width of a TPU's vector unit; a multiple of a GPU's matrix tiles


def padded_vocab(config: LlamaConfig, sizes: MeshSizes) -> int:
    """Rows of the embedding and the output projection on a mesh: V or, if `tensor` splits them, the next multiple of
    `tensor` and 128."""
    if sizes.tensor == 1:
        return config.vocab_size
    return -(-config.vocab_size // (multiple := math.lcm(VOCAB_MULTIPLE, sizes.tensor))) * multiple


def padded_config(config: LlamaConfig, sizes: MeshSizes) -> LlamaConfig:
    """The configuration of the model on a mesh: with at least as many key/value heads as `tensor` has splits. The vocabulary
    excludes padding.

    If there are fewer heads, each is stored several times, and the G queries of its group are divided among the copies. This
    costs tensor / K times the cache, but no communication (Pope et al. 2022, section 3.3, shard multi-query attention by
    batch instead).

    Raises:
      MeshError: heads, features or columns cannot be divided; the message gives sizes that work.
    """
    c, tensor = config, sizes.tensor
    if not _divides(c, tensor):
        would_do = ", ".join(str(n) for n in range(1, c.n_heads + 1) if _divides(c, n))
        name = f"n_kv_heads={c.n_kv_heads}" if c.hidden_dim % tensor == 0 else f"hidden_dim={c.hidden_dim}"
        queries = f" (of {c.queries_per_kv_head} queries each)" if c.hidden_dim % tensor == 0 else ""
        raise MeshError(f"{name}{queries} cannot be split over tensor={tensor}; {would_do} would do")
    if c.dim % sizes.columns:
        near = sorted((n for n in range(1, c.dim + 1) if c.dim % n == 0), key=lambda n: abs(n - sizes.columns))[:12]
        axes, would_do = "fsdp" if sizes.context == 1 else "fsdp*context", ", ".join(map(str, sorted(near)))
        raise MeshError(f"dim={c.dim} cannot be split over {axes}={sizes.columns}; {would_do} would do")
    return replace(c, n_kv_heads=max(c.n_kv_heads, tensor))


def _divides(config: LlamaConfig, tensor: int) -> bool:
    heads, queries = config.n_kv_heads, config.queries_per_kv_head
    enough = heads % tensor == 0
    # A norm over all heads together has weights for each head, which are not copied.
    copied = tensor % heads == 0 and queries % (tensor // heads) == 0 and config.qk_norm != "all"
    return (enough or copied) and config.hidden_dim % tensor == 0


def padded_shapes_config(config: LlamaConfig, sizes: MeshSizes) -> LlamaConfig:
    """The configuration whose parameters have the shapes on the mesh: `padded_config`, with padding counted as vocabulary.
    Only for shapes: a computation with it would treat padding as tokens.

    Raises:
      MeshError: the model cannot be padded to fit.
    """
    return replace(padded_config(config, sizes), vocab_size=padded_vocab(config, sizes))


def pad_params(config: LlamaConfig, sizes: MeshSizes, params: Llama) -> Llama:
    """The parameters on a mesh, for `padded_shapes_config(config, sizes)`: padded with zeros, with heads copied.

    Works on arrays on the host (NumPy arrays stay there) or, under `jit` with shardings, on the mesh. `load` with a mesh
    reads directly into this form.

    Raises:
      MeshError: the model cannot be padded to fit.
    """
    return map_params(params, partial(pad_array, padded_shapes_config(config, sizes)))


def has_groups(spec: ParamSpec) -> bool:
    """Whether a parameter has the axes K and G + 2 of key/value heads and their queries, so that heads may be copied."""
    return spec.axes.startswith("K G+2")


def pad_array(target: LlamaConfig, spec: ParamSpec, array: Any) -> Any:
    """One parameter, padded for a mesh.

    Args:
      target: the result of `padded_shapes_config`.
      spec: the parameter's entry in the table.
    """
    if spec.has_vocabulary:
        return _over_planes(array, partial(pad_rows, rows=target.vocab_size))
    return _over_groups(copy_heads, spec, array, target.n_kv_heads) if has_groups(spec) else array


def unpad_params(config: LlamaConfig, params: Llama) -> Llama:
    """Undo `pad_params`: the parameters in the shape of the model's own configuration, without padding and copies."""

    def undone(spec: ParamSpec, array: Any) -> Any:
        if spec.has_vocabulary:
            return _over_planes(array, lambda table: table[: config.vocab_size] if len(table) > config.vocab_size else table)
        return _over_groups(_merge_heads, spec, array, config.n_kv_heads) if has_groups(spec) else array

    return map_params(params, undone)


def map_params(params: Llama, change: Callable[[ParamSpec, Any], Any]) -> Llama:
    """Apply a function to each parameter, given its entry in the table."""
    is_leaf = lambda leaf: isinstance(leaf, QuantizedWeight | JoinedWeight | LowRankWeight | LowRank)
    return jax.tree_util.tree_map_with_path(lambda path, leaf: change(spec_at(path), leaf), params, is_leaf=is_leaf)


def _over_planes(leaf: Any, change: Callable[[Any], Any]) -> Any:
    """Apply `change`, which moves whole rows, to an array, or to all planes of a quantized weight (in any formats)."""
    return jax.tree.map(change, leaf)


def over_rows_of(leaf: Any, change: Callable[[Any], Any]) -> Any:
    """Apply `change` to everything with a matrix's rows: an adapted matrix and its B, an adapter's B, or the whole leaf."""
    if isinstance(leaf, LowRankWeight):
        factor = None if leaf.factor is None else _changed_vector(leaf.factor, leaf.ndim, change)
        return leaf.replace(base=change(leaf.base), low_rank=over_rows_of(leaf.low_rank, change), factor=factor)
    if isinstance(leaf, LowRank):
        magnitude = None if leaf.magnitude is None else _changed_vector(leaf.magnitude, leaf.ndim, change)
        return leaf.replace(b=change(leaf.b), magnitude=magnitude)
    return change(leaf)


def _changed_vector(vector: Any, ndim: int, change: Callable[[Any], Any]) -> Any:
    """Apply `change` to a vector with a number for each row of a matrix with `ndim` axes, or one per adapter."""
    return change(vector[..., None])[..., 0] if vector.ndim < ndim else change(vector)


def _over_groups(change: Callable[..., Any], spec: ParamSpec, leaf: Any, heads: int) -> Any:
    if isinstance(leaf, LowRankWeight | LowRank):
        return over_rows_of(leaf, lambda part: _over_groups(change, spec, part, heads))
    leading = leaf.ndim - len(spec.axes.split())
    if isinstance(leaf, JoinedWeight):
        if leaf.shape[leading] != heads:
            raise MeshError(
                f"{spec.path} has several quantization formats, so its heads cannot be copied; load it without a mesh"
            )
        return leaf
    return _over_planes(leaf, lambda array: change(array, heads=heads, leading=leading))


def pad_rows(table: Any, *, rows: int) -> Any:
    """[V, D] padded with rows of zeros at the end: [rows, D]."""
    missing = rows - table.shape[0]
    return _module_of(table).pad(table, ((0, missing), (0, 0))) if missing else table


def copy_heads(qkv: Any, *, heads: int, leading: int) -> Any:
    """[..., K, G + 2, *rest] with K = `heads`: the queries are divided among the copies of their key and value.

    Args:
      leading: number of axes before K.
    """
    layers, (held_heads, entries), rest = qkv.shape[:leading], qkv.shape[leading : leading + 2], qkv.shape[leading + 2 :]
    queries, copies = entries - 2, heads // held_heads
    if copies == 1:
        return qkv
    before = (slice(None),) * (leading + 1)
    asking = qkv[(*before, slice(None, queries))].reshape(*layers, heads, queries // copies, *rest)
    asked = _module_of(qkv).repeat(qkv[(*before, slice(queries, None))], copies, axis=leading)
    return _module_of(qkv).concatenate([asking, asked], axis=leading + 1)


def _merge_heads(qkv: Any, *, heads: int, leading: int) -> Any:
    """Undo `copy_heads`, keeping the first copy of each key and value."""
    layers, (held_heads, entries), rest = qkv.shape[:leading], qkv.shape[leading : leading + 2], qkv.shape[leading + 2 :]
    queries, copies = entries - 2, held_heads // heads
    if held_heads % heads or copies < 2:
        return qkv
    before = (slice(None),) * leading
    asking = qkv[(*before, slice(None), slice(None, queries))].reshape(*layers, heads, queries * copies, *rest)
    asked = qkv[(*before, slice(None, None, copies), slice(queries, None))]
    return _module_of(qkv).concatenate([asking, asked], axis=leading + 1)


def _module_of(array: Any) -> Any:
    """The module whose functions keep an array on its host or device: NumPy or jax.numpy."""
    return np if isinstance(array, np.ndarray) else jnp
