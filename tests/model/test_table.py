"""Parameters are checked against their configuration, and are what they were for a seed."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import first_layers

import llama_jax
from llama_jax.config.presets import PRESETS, preset
from llama_jax.errors import ConfigError
from llama_jax.model.checks import check_params
from llama_jax.model.trees import count, init, param_shapes, parameter_count
from llama_jax.parallel.mesh import MeshSizes
from llama_jax.parallel.padding import pad_params

TIED = preset("stories-260k")
UNTIED = replace(TIED, tie_embeddings=False)
KINDS = {
    "tied": TIED,
    "untied": UNTIED,
    "qwen2": replace(UNTIED, qkv_bias=True),
    "biases": replace(UNTIED, qkv_bias=True, out_bias=True, mlp_bias=True),
    "qwen3": replace(TIED, qk_norm="head"),
    "mixtral": replace(UNTIED, experts=4, experts_per_token=2),
    "olmo2": replace(UNTIED, norm="post", qk_norm="all"),
    "gemma3": replace(TIED, norm="both", norm_offset=1.0, qk_norm="head"),
}
each = pytest.mark.parametrize("config", KINDS.values(), ids=KINDS)


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_counts(name):
    config = preset(name)
    assert parameter_count(config) == count(param_shapes(config))


@each
def test_parameters_of_the_configuration_pass(config):
    params = init(config, jax.random.key(0))
    check_params(config, params)
    check_params(config, param_shapes(config))
    check_params(config, pad_params(config, MeshSizes(tensor=2), params))  # its vocabulary is padded


@pytest.mark.parametrize(
    ("spoil", "named"),
    [
        (lambda p: p.replace(embedding=p.embedding[:500]), r"embedding is \[500, 64\] .* needs \[512, 64\]"),
        (lambda p: p.replace(lm_head=None), "tie_embeddings=False but the parameters have no lm_head"),
        (lambda p: p.replace(final_norm=None), "final_norm is absent"),
    ],
)
def test_what_no_layer_has_is_checked(spoil, named):
    params = spoil(init(UNTIED, jax.random.key(0)))
    with pytest.raises(ConfigError, match=rf"{named}.*"):
        check_params(UNTIED, params)


def test_what_layers_have_is_checked():
    params = init(UNTIED, jax.random.key(0))
    weights = params.blocks.feed_forward
    wrong = params.replace(blocks=params.blocks.replace(feed_forward=weights.replace(up=weights.up[:, :9])))
    with pytest.raises(ConfigError, match=r"blocks\.feed_forward\.up is \[5, 9, 64\] .* needs \[5, 172, 64\]"):
        check_params(UNTIED, wrong)
    with pytest.raises(ConfigError, match=r"blocks.attention_norm is \[4, 64\] .* needs \[5, 64\]"):
        check_params(UNTIED, first_layers(params, 4))
    with pytest.raises(ConfigError, match="tie_embeddings=True but the parameters have an lm_head"):
        check_params(TIED, params)


def test_a_short_table_is_not_believed():
    """A lookup beyond it would give its last row without a word."""
    config = replace(TIED, vocab_size=40)
    params = init(config, jax.random.key(0))
    with pytest.raises(ConfigError, match=r"embedding is \[32, 64\] .* needs \[40, 64\]"):
        check_params(config, params.replace(embedding=params.embedding[:32]))
    check_params(config, params.replace(embedding=jnp.pad(params.embedding, ((0, 24), (0, 0)))))


def test_a_seed_gives_what_it_gave():
    """Of before gate and up were apart, when one array was drawn for both."""
    params = llama_jax.init(UNTIED, jax.random.key(7))
    joined = 0.02 * jax.random.normal(jax.random.split(jax.random.key(7), 6)[3], (5, 172, 2, 64))
    np.testing.assert_array_equal(params.blocks.feed_forward.gate, joined[:, :, 0])
    np.testing.assert_array_equal(params.blocks.feed_forward.up, joined[:, :, 1])
