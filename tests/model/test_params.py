from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import jit_init

import llama_jax
from llama_jax import preset
from llama_jax.model.trees import count, quantize, restack_layers, unstack_layers
from llama_jax.ops.platform import target_platform


def test_initialization():
    config = preset("stories-260k")
    params = jit_init(config, jax.random.key(0))
    blocks = params.blocks
    residual = 0.02 / np.sqrt(2 * config.n_layers)
    for array, std in [
        (params.embedding, 0.02),
        (blocks.attention.qkv, 0.02),
        (blocks.feed_forward.gate, 0.02),
        (blocks.feed_forward.up, 0.02),
        (blocks.attention.out, residual),
        (blocks.feed_forward.down, residual),
    ]:
        np.testing.assert_allclose(np.std(array), std, rtol=0.03)
        assert abs(np.mean(array)) < std / 20
    for norm in (blocks.attention_norm, blocks.ffn_norm, params.final_norm):
        np.testing.assert_array_equal(norm, 1)
    assert params.lm_head is None
    first, second = blocks.attention.qkv[:2]
    assert (first != second).any()


def test_the_key_and_the_dtype_decide():
    config = preset("stories-260k")
    a, b, c = (jit_init(config, jax.random.key(i)) for i in (0, 0, 1))
    np.testing.assert_array_equal(a.embedding, b.embedding)
    assert (a.embedding != c.embedding).any()
    low = jit_init(config, jax.random.key(0), jnp.bfloat16)
    assert {leaf.dtype for leaf in jax.tree.leaves(low)} == {jnp.dtype(jnp.bfloat16)}


def test_layers_of_and_stack_undo_each_other():
    params = jit_init(preset("stories-260k"), jax.random.key(0))
    layers = llama_jax.layers_of(params)
    assert len(layers) == 5
    assert count(params) == 260_032
    jax.tree.map(np.testing.assert_array_equal, params.replace(blocks=llama_jax.stack_layers(layers)), params)


@pytest.mark.slow
@pytest.mark.rotating
@pytest.mark.parametrize("kind", [None, "q4_0"])
def test_layers_apart_are_the_same_model(kind):
    """As a GPU has them: programs whose layers are unrolled read each from its own array."""
    config = replace(preset("stories-260k"), hidden_dim=192)
    params = jit_init(config, jax.random.key(0))
    params = params if kind is None else quantize(params, kind)
    apart = unstack_layers(params)
    assert len(apart.blocks.attention.qkv.stacks) == config.n_layers
    jax.tree.map(np.testing.assert_array_equal, restack_layers(apart), params)
    tokens, found = jnp.asarray([[1, 5, 9, 2]]), []
    for one, platform in ((params, None), (params, "gpu"), (apart, "gpu"), (apart, None)):
        with target_platform(platform):
            cache = llama_jax.init_cache(config, 1, 8)
            found.append(jax.jit(llama_jax.forward, static_argnums=0)(config, one, tokens, cache)[0])
    for other in found[1:]:
        np.testing.assert_allclose(other, found[0], rtol=1e-4, atol=1e-4 if kind is None else 2e-2)  # a CPU rounds inputs
