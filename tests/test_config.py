import json
import pickle
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llama_jax import LayerConfig, LlamaConfig, RopeScaling, parameter_count, preset
from llama_jax.config.presets import PRESETS, ffn_hidden_dim
from llama_jax.errors import ConfigError

# As published: model cards, or the number of values in the released files.
PUBLISHED = {
    "llama-7b": 6_738_415_616,
    "llama-13b": 13_015_864_320,
    "llama-30b": 32_528_943_616,
    "llama-65b": 65_285_660_672,
    "llama-2-7b": 6_738_415_616,
    "llama-2-13b": 13_015_864_320,
    "llama-2-70b": 68_976_648_192,
    "codellama-7b": 6_738_546_688,
    "codellama-13b": 13_016_028_160,
    "codellama-34b": 33_743_970_304,
    "codellama-70b": 68_976_910_336,
    "llama-3-8b": 8_030_261_248,
    "llama-3-70b": 70_553_706_496,
    "llama-3.1-8b": 8_030_261_248,
    "llama-3.1-70b": 70_553_706_496,
    "llama-3.1-405b": 405_853_388_800,
    "llama-3.2-1b": 1_235_814_400,
    "llama-3.2-3b": 3_212_749_824,
    "llama-3.3-70b": 70_553_706_496,
    "mistral-7b": 7_241_732_096,
    "mistral-7b-v0.3": 7_248_023_552,
    "mixtral-8x7b": 46_702_792_704,
    "mixtral-8x22b": 140_620_634_112,
    "qwen2.5-0.5b": 494_032_768,
    "qwen2.5-1.5b": 1_543_714_304,
    "qwen2.5-3b": 3_085_938_688,
    "qwen2.5-7b": 7_615_616_512,
    "qwen2.5-14b": 14_770_033_664,
    "qwen2.5-32b": 32_763_876_352,
    "qwen2.5-72b": 72_706_203_648,
    "qwen3-0.6b": 596_049_920,
    "qwen3-1.7b": 1_720_574_976,
    "qwen3-4b": 4_022_468_096,
    "qwen3-8b": 8_190_735_360,
    "qwen3-14b": 14_768_307_200,
    "qwen3-32b": 32_762_123_264,
    "qwen3-30b-a3b": 30_532_122_624,
    "qwen3-235b-a22b": 235_093_634_560,
    "llama-4-scout": 107_769_861_120,
    "tinyllama-1.1b": 1_100_048_384,
    "open-llama-3b": 3_426_473_600,
    "smollm2-135m": 134_515_008,
    "smollm2-360m": 361_821_120,
    "smollm2-1.7b": 1_711_376_384,
    "smollm3-3b": 3_075_098_624,
    "cwm-32b": 32_581_097_472,
    "ministral-3-3b": 3_429_006_336,
    "ministral-3-8b": 8_489_553_920,
    "olmo-2-1b": 1_484_916_736,
    "olmo-2-7b": 7_298_617_344,
    "olmo-2-13b": 13_716_198_400,
    "olmo-2-32b": 32_234_279_936,
    "olmo-3-7b": 7_298_011_136,
    "olmo-3-32b": 32_233_522_176,
    "gemma-3-270m": 268_098_176,
    "gemma-3-1b": 999_885_952,
    "gemma-3-4b": 3_880_263_168,
    "gemma-3-12b": 11_766_034_176,
    "gemma-3-27b": 27_009_346_304,
    "granite-3.3-2b": 2_533_539_840,
    "granite-3.3-8b": 8_170_864_640,
    "phi-3-mini-4k": 3_821_079_552,
    "phi-4": 14_659_507_200,
    "stories-260k": 260_032,
    "stories-15m": 15_191_712,
    "stories-42m": 41_689_600,
    "stories-110m": 109_529_856,
}


def test_every_preset_has_a_published_count():
    assert PRESETS.keys() == PUBLISHED.keys()


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameter_counts(name):
    assert parameter_count(preset(name)) == PUBLISHED[name]


@pytest.mark.parametrize(
    ("dim", "multiple_of", "multiplier", "hidden"),
    [
        (4096, 256, None, 11_008),  # 7B
        (8192, 4096, 1.3, 28_672),  # Llama 2 and 3 70B
        (2048, 256, 1.5, 8192),  # Llama 3.2 1B
        (288, 32, None, 768),  # stories 15M
    ],
)
def test_ffn_rule_gives_the_published_sizes(dim, multiple_of, multiplier, hidden):
    assert ffn_hidden_dim(dim, multiple_of=multiple_of, ffn_dim_multiplier=multiplier) == hidden


SMALL = preset("stories-260k")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dim": 65, "head_dim": 0}, "dim=65 must be a multiple of n_heads=8"),
        ({"n_kv_heads": 3}, "n_heads=8 must be a multiple of n_kv_heads=3"),
        ({"head_dim": 7}, "head_dim=7 must be even"),
        ({"vocab_size": 0}, "vocab_size=0 must be at least 1"),
        ({"norm_eps": float("nan")}, "norm_eps=nan"),
        ({"rope_theta": 1.0}, "rope_theta=1.0"),
        ({"tie_embeddings": 1}, "tie_embeddings=1"),
        ({"rope_scaling": {"factor": 8}}, "rope_scaling="),
    ],
)
def test_impossible_sizes_are_named(changes, message):
    with pytest.raises(ConfigError, match=message):
        replace(SMALL, **changes)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ("ntk-aware", 2.0),
            "kind='ntk-aware' must be one of linear, dynamic, yarn, ",
        ),
        (("yarn", 2.0), "'yarn' needs original_max_seq_len"),
        (("linear", 2.0, None, None, 64), "'linear' does not read original_max_seq_len=64"),
        (("linear", 0.5), "factor=0.5"),
        (("llama3", 8.0, 4.0, 2.0), "high_freq_factor=2.0 must be larger than low_freq_factor=4.0"),
        (("llama3", 8.0, 1.0, float("inf")), "high_freq_factor=inf"),
        (("llama3", 8.0, 1.0, 4.0, 0), "original_max_seq_len=0"),
    ],
)
def test_impossible_scalings_are_named(arguments, message):
    with pytest.raises(ConfigError, match=message):
        RopeScaling(*arguments)


@pytest.mark.parametrize(
    ("kind", "changes", "message"),
    [
        ("yarn", {"beta_fast": 1.0}, "beta_fast=1.0 must be larger than beta_slow=1.0"),
        ("yarn", {"truncate": 1}, "truncate=1 must be True or False"),
        ("yarn", {"mscale": 1.0}, "mscale=1.0 and mscale_all_dim=None go together"),
        ("yarn", {"mscale": 1.0, "mscale_all_dim": 1.0, "attention_factor": 2.0}, "exclude each other"),
        ("yarn", {"short_factor": (1.0,)}, "'yarn' does not read short_factor="),
        ("longrope", {}, "'longrope' needs short_factor"),
        ("longrope", {"short_factor": 2.0, "long_factor": [1.0]}, "short_factor=2.0 must be a tuple"),
        ("longrope", {"short_factor": [1.0, 0.0], "long_factor": [1.0]}, r"short_factor\[1\]=0.0"),
    ],
)
def test_fields_of_scalings_that_cannot_be(kind, changes, message):
    with pytest.raises(ConfigError, match=message):
        RopeScaling(kind, 2.0, **{"original_max_seq_len": 64} | changes)


def test_fields_that_are_not_given_are_those_of_the_kind():
    assert RopeScaling("llama3", 8.0) == RopeScaling("llama3", 8.0, 1.0, 4.0, 8192)
    yarn = RopeScaling("yarn", 4.0, original_max_seq_len=64)
    assert (yarn.beta_fast, yarn.beta_slow, yarn.truncate, yarn.attention_factor) == (32.0, 1.0, True, None)
    assert yarn == RopeScaling("yarn", 4.0, original_max_seq_len=64, beta_fast=32, beta_slow=1, truncate=True)
    longrope = RopeScaling("longrope", 4.0, original_max_seq_len=64, short_factor=[1] * 4, long_factor=[2] * 4)
    assert hash(replace(SMALL, rope_scaling=longrope)) == hash(replace(SMALL, rope_scaling=replace(longrope)))


def test_scalings_that_do_not_fit_the_heads_are_named():
    longrope = RopeScaling("longrope", 4.0, original_max_seq_len=64, short_factor=[1] * 3, long_factor=[2] * 3)
    with pytest.raises(ConfigError, match="short_factor has 3 numbers, head_dim=8 needs 4"):
        replace(SMALL, rope_scaling=longrope)
    with pytest.raises(ConfigError, match="head_dim=2 is too small for rope scaling kind='dynamic'"):
        replace(SMALL, head_dim=2, rope_scaling=RopeScaling("dynamic", 2.0, original_max_seq_len=8))


def test_a_config_is_hashable_and_frozen():
    assert hash(SMALL) == hash(replace(SMALL))
    with pytest.raises(AttributeError):
        SMALL.dim = 1


def test_head_dim_follows_from_dim_unless_given():
    assert SMALL.head_dim == 8
    assert replace(SMALL, head_dim=10).head_dim == 10


def test_head_dim_follows_another_dim_where_it_followed_the_old_one():
    """And a configuration that was given the same number explicitly is an equal one, so it does the same."""
    half = SMALL.dim // 2
    for config in (SMALL, replace(SMALL, head_dim=8), replace(SMALL, max_seq_len=8)):
        assert replace(config, dim=half).head_dim == 4
        assert replace(config, n_heads=SMALL.n_heads * 2).head_dim == 4
        assert replace(config, dim=half).hidden_dim == SMALL.hidden_dim
    assert replace(SMALL, head_dim=10, dim=half).head_dim == replace(replace(SMALL, head_dim=10), dim=half).head_dim == 10
    with pytest.raises(ConfigError, match="dim=33 must be a multiple of n_heads=8, or set head_dim"):
        replace(SMALL, dim=33)
    assert (repr(SMALL.head_dim), json.dumps(SMALL.head_dim), SMALL) == ("8", "8", pickle.loads(pickle.dumps(SMALL)))
    assert isinstance(SMALL, LlamaConfig)


def test_unknown_preset_lists_those_there_are():
    with pytest.raises(ConfigError, match=r"unknown preset 'llama-9b'.*llama-2-7b"):
        preset("llama-9b")


@given(st.lists(st.sampled_from([LayerConfig(), LayerConfig(8), LayerConfig(rope="none")]), min_size=1, max_size=9))
def test_every_layer_is_the_one_that_was_given(layers):
    config = replace(preset("stories-260k"), n_layers=len(layers), layers=tuple(layers))
    for same in (config, replace(config, max_seq_len=64), replace(replace(config, rope_theta=5.0), rope_theta=6.0)):
        assert [same.layer(i) for i in range(len(layers))] == layers
