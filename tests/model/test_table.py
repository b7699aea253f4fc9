"""The table against what reads it."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import first_layers
from jax.sharding import PartitionSpec as P

import llama_jax
from llama_jax.config.presets import PRESETS, preset
from llama_jax.errors import ConfigError
from llama_jax.formats import gguf, huggingface, llama2c, meta
from llama_jax.formats.huggingface import names_of
from llama_jax.formats.weight_format import parts_of
from llama_jax.model.checks import check_params
from llama_jax.model.params import PARAM_SPECS, shape_of, spec_at, specs_for
from llama_jax.model.trees import build_tree, count, init, param_shapes, parameter_count
from llama_jax.parallel.mesh import MeshSizes
from llama_jax.parallel.padding import pad_params
from llama_jax.parallel.sharding import param_specs

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
# What was trained and published before there was a table.
SPECS = {
    "embedding": P("tensor", "fsdp"),
    "blocks.attention_norm": P(),
    "blocks.attention.qkv": P("tensor", None, None, "fsdp"),
    "blocks.attention.out": P("fsdp", "tensor"),
    "blocks.ffn_norm": P(),
    "blocks.feed_forward.gate": P("tensor", "fsdp"),
    "blocks.feed_forward.up": P("tensor", "fsdp"),
    "blocks.feed_forward.down": P("fsdp", "tensor"),
    "final_norm": P(),
    "lm_head": P("tensor", "fsdp"),
}
PARTS = {"embedding", "attention_norm", "q", "k", "v", "out", "ffn_norm", "gate", "up", "down", "final_norm", "lm_head"}

SIBLINGS = {"q_bias", "k_bias", "v_bias", "query_norm", "key_norm", "router", "expert_gate", "expert_up", "expert_down"}
SIBLINGS |= {
    "out_bias",
    "gate_bias",
    "up_bias",
    "down_bias",
    "attention_post_norm",
    "ffn_post_norm",
    "shared_gate",
    "shared_up",
    "shared_down",
}


def paths_of(tree):
    return [spec_at(path).path for path, _ in jax.tree.leaves_with_path(tree)]


@each
def test_every_leaf_has_one_row_and_every_row_its_leaf(config):
    params = init(config, jax.random.key(0))
    assert sorted(paths_of(params)) == sorted(row.path for row in specs_for(config))
    shapes = param_shapes(config)
    assert jax.tree.structure(shapes) == jax.tree.structure(params)
    for (path, array), shape in zip(jax.tree.leaves_with_path(params), jax.tree.leaves(shapes), strict=True):
        row = {row.path: row for row in specs_for(config)}[spec_at(path).path]
        leading = (config.n_layers,) if row.in_blocks else ()
        assert array.shape == shape.shape == (*leading, *row.shape(config))


@each
def test_places_and_shapes_are_apart(config):
    """Every row has as many mesh axes as it has axes at most, and its shares have as many numbers as it has."""
    paths = [row.path for row in specs_for(config)]
    assert len(set(paths)) == len(paths)
    draws = [row.rng for row in specs_for(config) if row.decays]
    assert len(set(draws)) == len(draws)
    for row in specs_for(config):
        assert len(row.partition) <= len(row.axes.split())
        numbers = sum(np.prod(shape_of(share.axes, config)) for share in parts_of(row))
        assert numbers == np.prod(row.shape(config))
        assert not parts_of(row)[0].width or sum(shape_of(s.width, config)[0] for s in parts_of(row)) == row.shape(config)[1]


def test_specs_are_those_of_before():
    def spec(path, found):
        wanted = SPECS[spec_at(path).path]
        assert found == (P(None, *wanted) if spec_at(path).in_blocks else wanted)

    jax.tree_util.tree_map_with_path(spec, param_specs(UNTIED, MeshSizes()))


TABLES = {
    "huggingface": huggingface.HF_NAMES,
    "gguf": gguf.GGUF_NAMES,
    "meta": meta.META_NAMES,
    "llama2c": llama2c.RUN_C_NAMES,
}


@pytest.mark.parametrize("format", TABLES)
def test_every_format_names_every_tensor_of_a_llama(format):
    found = {name for name in TABLES[format] if name not in ("cos", "sin")}
    assert found == PARTS | (SIBLINGS if format in ("huggingface", "gguf") else set())
    for config in (UNTIED, *KINDS.values()):
        named = names_of(config) if format == "huggingface" else TABLES[format]
        own = [named[share.name] for row in specs_for(config) for share in parts_of(row) if share.name in named]
        assert len(set(own)) == len(own)
    for row in PARAM_SPECS:
        for share in parts_of(row):
            assert share.name not in found or ("{}" in TABLES[format][share.name]) == row.in_blocks


def test_llama2c_stores_all_that_the_table_has():
    assert set(llama2c.LEGACY) - {"cos", "sin"} == set(llama2c.VERSIONED) == set(llama2c.RUN_C_NAMES) - {"cos", "sin"}


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_counts(name):
    config = preset(name)
    assert parameter_count(config) == count(param_shapes(config))


def test_a_tree_of_anything():
    assert build_tree(UNTIED, lambda row: row.path).blocks.feed_forward.up == "blocks.feed_forward.up"
    assert build_tree(TIED, lambda row: "here").lm_head is None


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
        (lambda p: p.replace(lm_head=p.lm_head[:, :32]), r"lm_head is \[512, 32\]"),
        (lambda p: p.replace(lm_head=None), "tie_embeddings=False but the parameters have no lm_head"),
        (lambda p: p.replace(final_norm=p.final_norm[None]), r"final_norm is \[1, 64\]"),
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
