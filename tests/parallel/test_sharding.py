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
from llama_jax.parallel.mesh import MeshSizes, make_mesh
from llama_jax.parallel.padding import pad_params, padded_config
from llama_jax.parallel.sharding import (
    batch_spec,
    cache_specs,
    make_constrain,
    param_shapes,
    param_specs,
    train_state_specs,
)
from llama_jax.training.optimizer import adamw

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


def test_specs_have_the_form_of_the_parameters():
    specs, shapes = param_specs(CONFIG, MeshSizes()), param_shapes(CONFIG)
    assert jax.tree.structure(specs) == jax.tree.structure(shapes)
    assert specs.blocks.attention.qkv == P(None, "tensor", None, None, "fsdp")
    assert specs.embedding == P("tensor", "fsdp")
    assert specs.final_norm == P()


@pytest.mark.parametrize(
    ("name", "sizes", "message"),
    [
        (
            "llama-3.1-8b",
            MeshSizes(tensor=64),
            r"n_kv_heads=8 \(of 4 queries each\) cannot be split over tensor=64; 1, 2, 4, 8, 16, 32 would do",
        ),
        ("stories-15m", MeshSizes(tensor=5), "hidden_dim=768 cannot be split over tensor=5; 1, 2, 3, 6 would do"),
        ("stories-110m", MeshSizes(fsdp=5), "dim=768 cannot be split over fsdp=5; 1, 2, 3, 4, 6, 8, 12, "),
    ],
)
def test_what_does_not_divide_is_named_with_what_would(name, sizes, message):
    with pytest.raises(MeshError, match=message):
        param_specs(preset(name), sizes)


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


def test_what_the_optimizer_keeps_lies_with_its_parameter():
    specs = train_state_specs(CONFIG, MeshSizes(), adamw(1e-3))
    (adam,) = (state for state in specs.opt_state if hasattr(state, "mu"))
    assert adam.mu == adam.nu == specs.params == param_specs(CONFIG, MeshSizes())
    assert adam.count == specs.step == P()


def test_points_of_the_model():
    constrain = make_constrain(make_mesh(MeshSizes()))
    x = jnp.ones((2, 3, 4))
    for where in ("embedded", "residual", "hidden", "logits", "lm_head_gradient"):
        assert (constrain(x, where) == x).all()
    with pytest.raises(ValueError, match="the model has no constraint point 'elsewhere'"):
        constrain(x, "elsewhere")
