"""Where the parameters of a model that generates lie on a mesh; the rest follows from them, see `inference.placement`."""

from __future__ import annotations

from functools import partial

import jax

from llama_jax.config import LlamaConfig
from llama_jax.model.params import Block, Llama
from llama_jax.parallel.fit import Change, changed, copy_heads, laid_out, pad_rows
from llama_jax.parallel.mesh import MeshSizes, make_mesh
from llama_jax.parallel.specs import param_specs, shardings


def param_shardings(config: LlamaConfig, sizes: MeshSizes, *, fitted: bool = True) -> Llama:
    """A `Llama` of shardings, its `blocks` one `Block` that holds for every layer.

    Args:
      fitted: of the parameters that `fit` gives; otherwise of those of `config`.

    Raises:
      MeshError: the model cannot be made to fit, or there are fewer devices.
    """
    specs = param_specs(config, sizes, stacked=False, fitted=fitted)
    assert isinstance(specs.blocks, tuple)
    return shardings(make_mesh(sizes), specs.replace(blocks=specs.blocks[0]))


def fit_on_mesh(config: LlamaConfig, sizes: MeshSizes, params: Llama) -> Llama:
    """What `fit` gives of parameters that lie on the mesh already, array by array: those given are deleted.

    Each device holds its share of the model, and beside it that of one array.
    """
    target, placement = laid_out(config, sizes), param_shardings(config, sizes)
    assert isinstance(placement.blocks, Block)

    def moving(change: Change, place: jax.sharding.Sharding) -> Change:
        run = jax.jit(change, out_shardings=place)

        def move(array: jax.Array) -> jax.Array:
            if array.sharding == place:  # nothing was to be fitted
                return array
            found = jax.block_until_ready(run(array))
            array.delete()
            return found

        return move

    table = moving(partial(pad_rows, rows=target.vocab_size), placement.embedding)
    return changed(params, table, moving(partial(copy_heads, heads=target.n_kv_heads), placement.blocks.attention.qkv))
