"""Settings of a ``config.json`` of the wrong type: an error of one line, in every family."""

import math

import pytest
from test_siblings import PLAIN, SIBLINGS

from llama_jax.errors import ConfigError
from llama_jax.formats.huggingface import config_from_dict, config_to_dict
from llama_jax.formats.huggingface_families import FAMILIES

WRITTEN = {kind: config_to_dict(PLAIN if kind == "llama" else SIBLINGS[kind]) for kind in FAMILIES}
LEAST = ("model_type", "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")
WRONG = [
    *(-1, 0, 10**8, 2**63, 10**400, 1.5, 1e-320, 1e308, math.nan, math.inf, "x", "", True, None, [], [1, 2], ["x"], [None]),
    *({}, {"a": 1}, [[1]], "full_attention", {"full_attention": 3}, {"full_attention": [], "sliding_attention": 1}),
    *({"rope_type": ["x"]}, {"rope_type": "yarn", "factor": "8"}, {"rope_type": "yarn", "llama_4_scaling_beta": []}),
    *({"partial_rotary_factor": math.nan}, {"rope_type": "longrope", "short_factor": "x", "long_factor": [1]}),
]
UNWRITTEN = ("no_rope_layer_interval", "sliding_window_pattern", "rope_scaling", "rope_local_base_freq", "text_config")
NUMBERS = {
    "granite": ("embedding_multiplier", "residual_multiplier", "attention_multiplier", "logits_scaling"),
    "gemma3_text": ("hidden_size", "query_pre_attn_scalar", "num_hidden_layers"),
    "phi3": ("partial_rotary_factor",),
    "smollm3": ("num_hidden_layers",),
    "llama4_text": ("num_hidden_layers", "floor_scale", "attn_scale"),
}


def _error_of(settings):
    try:
        config_from_dict(settings)
    except ConfigError as error:
        return str(error)
    return ""  # any other exception fails the test


@pytest.mark.parametrize("kind", FAMILIES)
def test_a_setting_of_the_wrong_type_is_an_error_of_one_line_or_means_nothing(kind):
    """Each setting, where all are said and where only those that must be are."""
    for base in (WRITTEN[kind], {name: WRITTEN[kind][name] for name in LEAST}):
        for name in (*WRITTEN[kind], *UNWRITTEN):
            for value in WRONG:
                said = _error_of(base | {name: value})
                assert "\n" not in said
                assert len(said) < 700


@pytest.mark.parametrize(("kind", "name"), [(kind, name) for kind, names in NUMBERS.items() for name in names])
@pytest.mark.parametrize("value", ["x", None, [1], math.nan, 0, True])
def test_what_must_be_a_number_is_named(kind, name, value):
    said = {"floor_scale": "context", "attn_scale": "beta"}.get(name, name)
    with pytest.raises(ConfigError, match=f"^{said}=.* must be a (positive integer|finite number)"):
        config_from_dict(WRITTEN[kind] | {name: value, "rope_parameters": None})


@pytest.mark.parametrize(
    ("kind", "changes", "message"),
    [
        ("smollm3", {"no_rope_layers": None, "no_rope_layer_interval": 0}, "no_rope_layer_interval=0 must be a positive"),
        ("llama4_text", {"no_rope_layers": [], "no_rope_layer_interval": "x"}, "no_rope_layer_interval='x' must be"),
        ("gemma3_text", {"sliding_window_pattern": "x"}, "sliding_window_pattern='x' must be a positive integer"),
        ("ministral3", {"rope_parameters": 3}, "rope_parameters=3 must be an object"),
        ("olmo3", {"rope_parameters": {"full_attention": 3}}, "full_attention=3 must be an object"),
        ("phi3", {"head_dim": "x"}, "head_dim='x' must be a positive integer"),
    ],
)
def test_others_are_named(kind, changes, message):
    with pytest.raises(ConfigError, match=message):
        config_from_dict(WRITTEN[kind] | changes)


@pytest.mark.parametrize("kind", FAMILIES)
def test_more_layers_than_any_model_has_are_refused_before_they_are_listed(kind):
    with pytest.raises(ConfigError, match="num_hidden_layers=100000000 must be at most"):
        config_from_dict({name: WRITTEN[kind][name] for name in LEAST} | {"num_hidden_layers": 10**8})
