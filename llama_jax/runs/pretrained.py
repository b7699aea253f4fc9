"""The pretrained model of a run: one to continue training, or a frozen base for adapters."""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from llama_jax.config import LlamaConfig
from llama_jax.errors import TrainingError
from llama_jax.formats import load, open_checkpoint
from llama_jax.formats.lazy_tensors import TensorInfo
from llama_jax.formats.quantize_on_load import can_be_kept, describe_quantized_types
from llama_jax.model.params import LlamaParams
from llama_jax.ops.weights.format_spec import INT4, unpack_int4
from llama_jax.ops.weights.formats import FrozenFormatName
from llama_jax.ops.weights.quantized_matmul import QuantizedWeight
from llama_jax.parallel.generation_sharding import param_shardings
from llama_jax.parallel.mesh import MeshSizes
from llama_jax.runs.recipe import Recipe

_log = logging.getLogger("llama_jax.runs")


@dataclass(frozen=True)
class FrozenBase:
    """A frozen model, as used by the training step.

    Attributes:
      params: sharded over the devices of the run.
      metadata: for checkpoints: the path it was loaded from, and its digest.
    """

    params: LlamaParams
    metadata: dict[str, str]


def load_weights(
    recipe: Recipe, weights: str | os.PathLike[str] | None, mesh: MeshSizes, metadata: dict[str, Any] | None
) -> tuple[LlamaParams | None, FrozenBase | None]:
    """The initial parameters of a new run, or None; and the base model of adapters, which a resumed run also needs.

    Each device receives its share as it is read: no device ever holds a whole array.

    Args:
      metadata: from the checkpoint to resume from.

    Raises:
      TrainingError: the base model of adapters differs from the one that the run began with.
    """
    if recipe.lora is None:
        if weights is None or metadata is not None:
            return None, None
        shardings = param_shardings(recipe.model, mesh, padded=False)
        return load(weights, "float32", shardings=shardings).params, None
    assert weights is not None
    params, origin = load_frozen(weights, recipe.model, mesh, recipe.dtype, recipe.quantize)
    before = {} if metadata is None else metadata.get("base", {})
    if metadata is not None and before.get("digest") != origin["digest"]:
        raise TrainingError(
            f"{origin['path']} is not the base model that this run began with, {before.get('path')}: its weights"
            " differ; resume with the same --weights"
        )
    return None, FrozenBase(params, origin)


def load_frozen(
    path: str | os.PathLike[str], config: LlamaConfig, mesh: MeshSizes, dtype: str, quantize: FrozenFormatName | None
) -> tuple[LlamaParams, dict[str, str]]:
    """A model that a run only reads, sharded by `param_specs`; and its path and digest.

    Args:
      quantize: quantization format of its matrices; "none" keeps quantized tensors of the files; None is floats.
    """
    load_format: Any = quantize
    if quantize == "none":
        load_format = "keep" if describe_quantized_types(open_checkpoint(path).tensors, can_be_kept) else None
    params = load(path, dtype, quantize=load_format, shardings=param_shardings(config, mesh, padded=False)).params
    return params, {"path": os.fspath(path), "digest": digest(params)}


def describe_weights(recipe: Recipe, tensors: Mapping[str, TensorInfo]) -> list[str]:
    """A line about how quantized weights are used."""
    quantization = describe_quantized_types(tensors)
    if not quantization:
        return []
    if recipe.lora is None:
        return [f"weights: {quantization}, dequantized to float32 for training"]
    if recipe.quantize != "none":
        return [f"weights: {quantization}, requantized as {recipe.quantize}"]
    dequantized_formats = describe_quantized_types(tensors, lambda tensor: not can_be_kept(tensor))
    dequantized = f" ({dequantized_formats} dequantized to {recipe.dtype})" if dequantized_formats else ""
    return [f"weights: {quantization}, kept as they are under the adapters{dequantized}"]


def digest(params: Any) -> str:
    """A digest of a tree of arrays that depends on every bit and its position.

    Sums of integers do not depend on their order, so the digest is the same for any sharding, and for packed and unpacked
    4-bit integers. It detects a wrong file, not a forged one.
    """
    hashes = {}
    for path, leaf in jax.tree.leaves_with_path(params, is_leaf=lambda leaf: isinstance(leaf, QuantizedWeight)):
        quant_format = leaf.quant_format if isinstance(leaf, QuantizedWeight) else ""
        dtypes = [plane.dtype for plane in leaf.form.planes] if isinstance(leaf, QuantizedWeight) else [None]
        for (rest, array), dtype in zip(jax.tree.leaves_with_path(leaf), dtypes, strict=True):
            is_packed = dtype == INT4 and array.dtype != INT4
            shape = (*array.shape[:-1], 2 * array.shape[-1]) if is_packed else array.shape
            hash_value = int(_hash_of_bits(array, is_packed))
            hashes[jax.tree_util.keystr((*path, *rest))] = (
                f"{quant_format} {INT4 if is_packed else array.dtype}{list(shape)} {hash_value}"
            )
    return hashlib.sha256(repr(sorted(hashes.items())).encode()).hexdigest()[:32]


@partial(jax.jit, static_argnums=1)
def _hash_of_bits(array: jax.Array, is_packed: bool) -> jax.Array:
    """uint32[]: along each axis, the last first, entries are mixed with their positions and the results summed.

    Mixing is a bijection of the 2^32 integers, so one changed entry always changes the sum. A sum of unmixed entries would
    miss changes that cancel: an even number of flipped signs, or swapped rows of numbers whose low bits are zero.
    """
    if is_packed:
        array = unpack_int4(array)
    if array.dtype == INT4:
        array = array.astype(jnp.int8)
    unsigned = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32}[min(array.dtype.itemsize, 4)]
    bits = lax.bitcast_convert_type(array, unsigned).astype(jnp.uint32)  # two for 8 bytes
    while bits.ndim:
        positions = lax.broadcasted_iota(jnp.uint32, bits.shape, bits.ndim - 1)
        bits = jnp.sum(_mix_bits(bits ^ (positions * jnp.uint32(0x9E3779B1))), axis=-1, dtype=jnp.uint32)
    return bits


def _mix_bits(x: jax.Array) -> jax.Array:
    """The finalizer of MurmurHash3 (Appleby), a bijection: each bit of uint32 changes about half of the result's bits."""
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        x = (x ^ (x >> shift)) * jnp.uint32(factor)
    return x ^ (x >> 16)
