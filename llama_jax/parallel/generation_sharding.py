"""Sharding of the parameters for generation on a mesh; all other shardings follow from it, see `inference.sharding`."""

from __future__ import annotations

from functools import partial
from operator import attrgetter
from typing import Any

import jax
from jax.sharding import Mesh

from llama_jax.config import LlamaConfig
from llama_jax.inference.sharding import GenerationConstraints
from llama_jax.model.forward_options import Sharding
from llama_jax.model.params import LlamaParams, ParamSpec
from llama_jax.ops.attention import HeadSharding
from llama_jax.ops.weights.quantized_matmul import JoinedWeight, QuantizedWeight, shardings_of_planes
from llama_jax.parallel.mesh import MeshSizes, make_mesh
from llama_jax.parallel.padding import has_groups, map_params, pad_array, padded_shapes_config
from llama_jax.parallel.ring_attention import BATCH_AXES
from llama_jax.parallel.sharding import EXPERT_SHARDING, param_specs, shardings, training_sharding


def param_shardings(config: LlamaConfig, sizes: MeshSizes, *, padded: bool = True) -> LlamaParams:
    """A `LlamaParams` of shardings for generation.

    Args:
      padded: whether the shardings are for parameters from `pad_params` instead of those of `config`.

    Raises:
      MeshError: the model cannot be padded to fit, or there are too few devices.
    """
    return shardings(make_mesh(sizes), param_specs(config, sizes, padded=padded))


def pad_on_mesh(config: LlamaConfig, sizes: MeshSizes, params: LlamaParams) -> LlamaParams:
    """`pad_params` for parameters that are already on the mesh, array by array, deleting the given arrays.

    Each device holds its share of the model, and in addition its share of one array.
    """
    target, placement = padded_shapes_config(config, sizes), param_shardings(config, sizes)

    def move(spec: ParamSpec, array: Any) -> Any:
        sharding = attrgetter(spec.path)(placement)
        if array.sharding == sharding or not (spec.has_vocabulary or has_groups(spec)):  # nothing to pad
            return array
        if isinstance(array, QuantizedWeight):
            sharding = array.replace(planes=shardings_of_planes(array.form, sharding, array.ndim))
        if isinstance(array, JoinedWeight):
            return pad_array(target, spec, array)  # unchanged, or rejected
        padded = jax.block_until_ready(jax.jit(partial(pad_array, target, spec), out_shardings=sharding)(array))
        jax.tree.map(lambda given: given.delete(), array)
        return padded.to_device_layout() if isinstance(padded, QuantizedWeight) else padded

    return map_params(params, move)


def generation_sharding(config: LlamaConfig, mesh: Mesh) -> tuple[LlamaConfig, Sharding]:
    """The configuration and sharding for generation with a model that trains over a mesh.

    The parameters stay sharded as in training, with the same `Sharding.prepare_params`. Rows are sharded over `data` and
    `fsdp`; heads and the vocabulary, over `tensor`.

    Raises:
      MeshError: a dimension that cannot be split over the mesh.
    """
    padded_config, training = training_sharding(config, mesh)
    if mesh.size == 1:
        return padded_config, Sharding(mesh=mesh.abstract_mesh)
    constraints = GenerationConstraints(mesh, BATCH_AXES, ("tensor",), ("tensor",), ("fsdp",))
    return padded_config, Sharding(
        constraints,
        head_sharding=HeadSharding(BATCH_AXES, ("tensor",)),
        experts=EXPERT_SHARDING._replace(batch=BATCH_AXES),
        prepare_params=training.prepare_params,
        mesh=mesh.abstract_mesh,
    )
