"""The option --rope: from a text to a configuration."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from make_goldens import KINDS

from llama_jax.cli.options import with_rope
from llama_jax.config import RopeScaling
from llama_jax.errors import UserError

CONFIG = replace(KINDS["gqa"], max_seq_len=64)
PAIRS = CONFIG.head_dim // 2


@pytest.mark.parametrize(
    ("text", "scaling", "context"),
    [
        ("linear:2", RopeScaling("linear", 2), 128),
        ("linear:4.5", RopeScaling("linear", 4.5), 288),
        ("dynamic:4", RopeScaling("dynamic", 4, original_max_seq_len=64), 256),
        ("yarn:4,beta_fast=16", RopeScaling("yarn", 4, original_max_seq_len=64, beta_fast=16), 256),
        (
            "yarn:4,truncate=false,original_max_seq_len=16",
            RopeScaling("yarn", 4, truncate=False, original_max_seq_len=16),
            64,
        ),
        (
            f"longrope:2,short_factor={[1] * PAIRS},long_factor={[1.5] * PAIRS}",
            RopeScaling("longrope", 2, original_max_seq_len=64, short_factor=(1,) * PAIRS, long_factor=(1.5,) * PAIRS),
            128,
        ),
    ],
)
def test_a_text_is_a_rope_scaling_and_a_context(text, scaling, context):
    assert with_rope(CONFIG, text) == replace(CONFIG, rope_scaling=scaling, max_seq_len=context)


def test_a_model_that_has_one_already():
    """The context that it is stretched from is what the model was trained at before."""
    yarn = with_rope(CONFIG, "yarn:4")
    assert with_rope(yarn, "none") == CONFIG
    assert with_rope(yarn, "") == yarn
    assert with_rope(yarn, "dynamic:2") == with_rope(CONFIG, "dynamic:2")
    assert with_rope(with_rope(CONFIG, "linear:4"), "yarn:2") == with_rope(CONFIG, "yarn:2")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "yarn",
            r"rope='yarn' must be none, or KIND:FACTOR such as yarn:4; the kinds are linear, dynamic, yarn, llama3",
        ),
        ("alibi:2", r"rope='alibi:2' must be none, or KIND:FACTOR"),
        ("yarn:four", r"has 'four' instead of a number"),
        ("yarn:2,beta_fast", r"has 'beta_fast' after its factor; the other fields of yarn are: original_max_seq_len"),
        ("linear:2,beta_fast=1", r"has 'beta_fast=1' after its factor; the other fields of linear are: none"),
        ("yarn:2,beta_fast=", r"has '' instead of a number"),
        ("yarn:" + "[" * 5000, r"has '\[\[.* instead of a number"),
    ],
)
def test_what_is_no_rope_scaling(text, message):
    with pytest.raises(UserError, match=message):
        with_rope(CONFIG, text)


@given(st.text(":,=[]0123456789.einfyarln_-", max_size=20).map(lambda text: "yarn:" + text))
def test_any_text_is_one_or_an_error_of_ours(text):
    try:
        found = with_rope(CONFIG, text)
    except UserError:
        return
    assert found.rope_scaling.kind == "yarn"
