import math
from functools import partial

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P

from llama_jax import init_cache, preset
from llama_jax.config.presets import PRESETS
from llama_jax.errors import MeshError
from llama_jax.parallel.mesh import MeshSizes
from llama_jax.parallel.padding import pad_params, padded_config
from llama_jax.parallel.sharding import (
    batch_spec,
    cache_specs,
    param_shapes,
    param_specs,
)

CONFIG = preset("stories-260k")


def ways(spec, sizes):
    """How many ways each axis of an array is split."""
    sizes = dict(sizes.items())
    named = ((axes,) if isinstance(axes, str) else axes or () for axes in spec)
    return [math.prod(sizes[axis] for axis in axes) for axes in named]


powers = st.sampled_from([1, 2, 3, 4, 8, 16, 64])


@given(st.sampled_from(sorted(PRESETS)), st.builds(MeshSizes, powers, powers, powers, powers), st.booleans())
def test_a_mesh_that_is_not_refused_divides_every_array(name, sizes, is_fitted):
    config = preset(name)
    try:
        specs = param_specs(config, sizes, padded=is_fitted)
    except MeshError:
        assert config.dim % sizes.columns or config.n_kv_heads % sizes.tensor or config.hidden_dim % sizes.tensor
        return
    shapes = param_shapes(config)
    if is_fitted:
        shapes = jax.eval_shape(partial(pad_params, config, sizes), shapes)
    for a, spec in zip(jax.tree.leaves(shapes), jax.tree.leaves(specs), strict=True):
        assert all(n % k == 0 for n, k in zip(a.shape, ways(spec, sizes), strict=False))


def test_a_cache_is_of_the_fitted_model():
    config, sizes = preset("llama-3.1-8b"), MeshSizes(tensor=16)
    with pytest.raises(MeshError, match=r"n_kv_heads=8 cannot be split over tensor=16; 1, 2, 4, 8 would do"):
        cache_specs(config, sizes, 64)
    assert cache_specs(padded_config(config, sizes), sizes, 64).length == P(("data", "fsdp"))


def test_the_batch_is_split_over_data_and_fsdp():
    assert batch_spec(MeshSizes(2, 4, 8), 16) == P(("data", "fsdp"))
    with pytest.raises(MeshError, match=r"batch=12 cannot be split over data\*fsdp=8; 1, 2, 3, 4, 6, 12 would do"):
        batch_spec(MeshSizes(2, 4), 12)


def test_the_cache_is_split_by_rows_and_heads():
    specs = cache_specs(CONFIG, MeshSizes(2, 1, 2), 4)
    cache = jax.eval_shape(lambda: init_cache(CONFIG, 4, 16))
    assert jax.tree.structure(specs) == jax.tree.structure(cache)
    assert specs.pages == P(None, ("data", "fsdp"), None, "tensor")  # [L, P, page, 2K, H]
    assert specs.table == specs.length == P(("data", "fsdp"))
    quantized = cache_specs(CONFIG, MeshSizes(2, 1, 2), 4, quantized=True)
    assert jax.tree.structure(quantized) == jax.tree.structure(jax.eval_shape(lambda: init_cache(CONFIG, 4, 16, jnp.int8)))
    assert quantized.pages.values == quantized.pages.scales == specs.pages
