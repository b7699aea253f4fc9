"""The model that a run starts from: one to continue training, or a frozen one under the adapters that it trains."""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from llama_jax.checkpoints import load
from llama_jax.config import LlamaConfig
from llama_jax.model.params import Llama
from llama_jax.model.trees import dequantize
from llama_jax.ops.weights import Kept, QuantizedWeight
from llama_jax.ops.weights.planes import INT4, unpacked
from llama_jax.parallel.mesh import MeshSizes
from llama_jax.parallel.serving import param_shardings
from llama_jax.runs.errors import TrainingError
from llama_jax.runs.recipe import Recipe


@dataclass(frozen=True)
class Base:
    """A frozen model, as the training step reads it.

    Attributes:
      params: with stacked blocks, on the devices of the run.
      note: for checkpoints: the path it was read from, and its digest.
    """

    params: Llama
    note: dict[str, str]


def load_weights(
    recipe: Recipe, weights: str | os.PathLike[str] | None, mesh: MeshSizes, note: dict[str, Any] | None
) -> tuple[Llama | None, Base | None]:
    """The initial parameters of a new run, or None; and the base model of adapters, which a resumed run needs too.

    Blocks are stacked, and each device gets its share as it is read: no device ever holds a whole array.

    Args:
      note: of the checkpoint to resume from.

    Raises:
      TrainingError: the base model of adapters differs from the one that the run began with.
    """
    if recipe.lora is None:
        if weights is None or note is not None:
            return None, None
        places = param_shardings(recipe.model, mesh, fitted=False)
        return _stacked(dequantize(load(weights, "float32", shardings=places).params)), None
    assert weights is not None
    params, found = load_frozen(weights, recipe.model, mesh, recipe.dtype, recipe.quantize)
    before = {} if note is None else note.get("base", {})
    if note is not None and before.get("digest") != found["digest"]:
        raise TrainingError(
            f"{found['path']} is not the model that this run's adapters began with, {before.get('path')}: its weights"
            " differ; resume with the same --weights"
        )
    return None, Base(params, found)


def load_frozen(
    path: str | os.PathLike[str], config: LlamaConfig, mesh: MeshSizes, dtype: str, quantize: Kept
) -> tuple[Llama, dict[str, str]]:
    """A model that a run only reads, blocks stacked, placed as `param_specs` says; and its path and digest.

    Args:
      quantize: "none", or the type in which its matrices are kept.
    """
    kind = None if quantize == "none" else quantize
    params = load(path, dtype, quantize=kind, shardings=param_shardings(config, mesh, fitted=False)).params
    params = _stacked(params if kind is not None else dequantize(params))
    return params, {"path": os.fspath(path), "digest": digest(params)}


def _stacked(params: Llama) -> Llama:
    """`stack`, one matrix at a time, deleting the blocks' own arrays, so that memory never holds the model twice."""
    assert isinstance(params.blocks, tuple)
    blocks = [jax.tree.flatten(block) for block in params.blocks]

    def join(*parts: jax.Array) -> jax.Array:
        place = parts[0].sharding
        if isinstance(place, jax.sharding.NamedSharding):
            place = place.update(spec=jax.sharding.PartitionSpec(None, *place.spec))
        whole = jax.block_until_ready(jax.jit(lambda *parts: jnp.stack(parts), out_shardings=place)(*parts))
        for part in parts:
            part.delete()
        return whole

    arrays = [join(*parts) for parts in zip(*(leaves for leaves, _ in blocks), strict=True)]
    return params.replace(blocks=jax.tree.unflatten(blocks[0][1], arrays))


def digest(params: Any) -> str:
    """A digest of a tree of arrays: a sum over all bits of each array, weighted by their positions in it.

    Sums of integers do not depend on their order, so the digest is the same however the arrays are sharded, and for 4-bit
    integers whether they are `planes.packed` or not. It detects a wrong file, not a forged one.
    """
    sums = {}
    for path, leaf in jax.tree.leaves_with_path(params, is_leaf=lambda leaf: isinstance(leaf, QuantizedWeight)):
        kinds = [plane.dtype for plane in leaf.form.planes] if isinstance(leaf, QuantizedWeight) else [None]
        for (rest, array), dtype in zip(jax.tree.leaves_with_path(leaf), kinds, strict=True):
            is_packed = dtype == INT4 and array.dtype != INT4
            shape = (*array.shape[:-1], 2 * array.shape[-1]) if is_packed else array.shape
            found = int(_sum_of_bits(array, is_packed))
            sums[jax.tree_util.keystr((*path, *rest))] = f"{INT4 if is_packed else array.dtype}{list(shape)} {found}"
    return hashlib.sha256(repr(sorted(sums.items())).encode()).hexdigest()[:32]


@partial(jax.jit, static_argnums=1)
def _sum_of_bits(array: jax.Array, is_packed: bool) -> jax.Array:
    if is_packed:
        array = unpacked(array)
    if array.dtype == INT4:
        array = array.astype(jnp.int8)
    unsigned = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32}[min(array.dtype.itemsize, 4)]
    bits = lax.bitcast_convert_type(array, unsigned).astype(jnp.uint32)  # of 8 bytes two
    place, step = jnp.uint32(1), 1
    for axis in reversed(range(bits.ndim)):
        place += lax.broadcasted_iota(jnp.uint32, bits.shape, axis) * jnp.uint32(step * 2_654_435_762 % 2**32)
        step *= bits.shape[axis]
    return jnp.sum(bits * place, dtype=jnp.uint32)
