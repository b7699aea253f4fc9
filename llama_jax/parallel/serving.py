"""Where the parameters of a model that generates lie on a mesh; the rest follows from them, see `inference.placement`."""

from __future__ import annotations

from functools import partial
from operator import attrgetter
from typing import Any

import jax
from jax.sharding import Mesh

from llama_jax.config import LlamaConfig
from llama_jax.inference.placement import Placement
from llama_jax.model.options import Layout
from llama_jax.model.params import Llama, Row
from llama_jax.ops.attention import Division
from llama_jax.ops.weights import JoinedWeight, QuantizedWeight, shardings_of_planes
from llama_jax.parallel.fit import changed, fit_array, has_groups, laid_out
from llama_jax.parallel.mesh import MeshSizes, make_mesh
from llama_jax.parallel.ring import BATCH
from llama_jax.parallel.specs import EXPERTS, layout_over, param_specs, shardings


def param_shardings(config: LlamaConfig, sizes: MeshSizes, *, fitted: bool = True) -> Llama:
    """A `Llama` of shardings.

    Args:
      fitted: of the parameters that `fit` gives; otherwise of those of `config`.

    Raises:
      MeshError: the model cannot be made to fit, or there are fewer devices.
    """
    return shardings(make_mesh(sizes), param_specs(config, sizes, fitted=fitted))


def fit_on_mesh(config: LlamaConfig, sizes: MeshSizes, params: Llama) -> Llama:
    """What `fit` gives of parameters that lie on the mesh already, array by array: those given are deleted.

    Each device holds its share of the model, and beside it that of one array.
    """
    target, placement = laid_out(config, sizes), param_shardings(config, sizes)

    def move(row: Row, array: Any) -> Any:
        place = attrgetter(row.path)(placement)
        if array.sharding == place or not (row.has_vocabulary or has_groups(row)):  # nothing was to be fitted
            return array
        if isinstance(array, QuantizedWeight):
            place = array.replace(planes=shardings_of_planes(array.form, place, array.ndim))
        if isinstance(array, JoinedWeight):
            return fit_array(target, row, array)  # as it is, or refused
        found = jax.block_until_ready(jax.jit(partial(fit_array, target, row), out_shardings=place)(array))
        jax.tree.map(lambda given: given.delete(), array)
        return found.arranged() if isinstance(found, QuantizedWeight) else found

    return changed(params, move)


def layout_to_generate(config: LlamaConfig, mesh: Mesh) -> tuple[LlamaConfig, Layout]:
    """How a model that trains over a mesh generates there, with the parameters as they lie: its configuration, and a layout
    whose `fit` is that of the training. Rows are cut over `data` and `fsdp`, heads and the vocabulary over `tensor`.

    Raises:
      MeshError: a dimension that cannot be split over the mesh.
    """
    held, training = layout_over(config, mesh)
    if mesh.size == 1:
        return held, Layout(mesh=mesh.abstract_mesh)
    placement = Placement(mesh, BATCH, ("tensor",), ("tensor",), ("fsdp",))
    return held, Layout(
        placement,
        division=Division(BATCH, ("tensor",)),
        experts=EXPERTS._replace(batch=BATCH),
        fit=training.fit,
        mesh=mesh.abstract_mesh,
    )
