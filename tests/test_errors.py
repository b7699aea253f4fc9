"""What a message shows of a value that a stranger made."""

from dataclasses import replace
from functools import partial

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import llama_jax
from llama_jax import ops
from llama_jax.config.presets import preset
from llama_jax.errors import ConfigError, GenerationError, MeshError, TokenizerError, short_repr
from llama_jax.training.loss import next_token_loss


def shared(depth):
    """A list that `repr` would take 2**depth steps for."""
    found = []
    for _ in range(depth):
        found = [found, found]
    return found


def deep(depth):
    found = []
    for _ in range(depth):
        found = [found]
    return found


SMALL = st.none() | st.booleans() | st.integers() | st.text(max_size=9) | st.binary(max_size=9)
NESTED = st.recursive(
    SMALL, lambda inside: st.lists(inside, max_size=3) | st.tuples(inside) | st.dictionaries(SMALL, inside), max_leaves=9
)


@given(NESTED)
def test_what_is_short_is_shown_whole(value):
    assert short_repr(value, 10_000) == repr(value)
    assert short_repr(value, 3) == repr(value)[:3]


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (shared(60), "[" * 40),
        (deep(200_000), "[" * 40),
        ({"a": shared(60)}, "{'a': " + "[" * 34),
        (tuple([shared(60)] * 2), "(" + "[" * 39),
        (10**5000, "<a number of 16610 bits>"),
        ("x" * 10**8, "'" + "x" * 39),
        (list(range(10**6)), str(list(range(40)))[:40]),
    ],
    ids=["shared", "deep", "in a dictionary", "in a tuple", "number", "text", "list"],
)
def test_what_is_endless_is_cut(value, expected):
    assert short_repr(value, 40) == expected


def test_a_configuration_shows_it():
    with pytest.raises(ConfigError, match=r"dim=\[\[\[+ must be"):
        replace(preset("llama-2-7b"), dim=shared(60))


def test_misuse_from_python_is_said_in_a_line():
    for error, message, call in (
        (MeshError, "mesh='tensor=2' must be a MeshSizes", lambda: llama_jax.load(mesh="tensor=2")),
        (ConfigError, "dtype='bf16' is not a floating-point type", lambda: llama_jax.ComputeOptions(dtype="bf16")),
        (ConfigError, "dtype='int8' is not a floating-point type", lambda: llama_jax.ComputeOptions(dtype="int8")),
        (TokenizerError, r"text=\['a', 'b'\] must be a str", lambda: llama_jax.load().tokenizer.encode(["a", "b"])),
    ):
        with pytest.raises(error, match=message):
            call()


def test_an_attention_in_another_order_is_refused(models):
    """Its result has as many numbers, and would be believed."""
    config, params = models["gqa"]
    for message, change in (
        (r"\[1, 5, 2, 2, \d+\]; float32\[1, 2, 5, 2, \d+\] is needed", lambda mixed: mixed.swapaxes(1, 2)),
        ("attend gave float16", lambda mixed: mixed.astype("float16")),
        ("attend gave <class 'NoneType'>", lambda mixed: None),
    ):
        attend = lambda *args, change=change, **options: change(ops.attend(*args, **options))
        own = replace(config, parts=llama_jax.Parts(attend=attend))
        with pytest.raises(ConfigError, match=message):
            jax.eval_shape(partial(llama_jax.logits, own, params, np.array([[1, 2, 3, 4, 5]])))


def test_parts_of_a_batch_that_would_be_broadcast_are_refused(models):
    config, params = models["gqa"]
    tokens = np.arange(18).reshape(3, 6)
    for name in ("loss_mask", "segment_ids", "position_ids"):
        for shape in ((3, 2), (1, 6), (3, 5)):
            with pytest.raises(GenerationError, match=rf"{name} of a batch are \[{shape[0]}, {shape[1]}\]; \[3, 6\]"):
                next_token_loss(config, params, llama_jax.Batch(tokens, **{name: np.ones(shape, int)}))
    with pytest.raises(GenerationError, match=r"tokens of a batch are \[6\]"):
        next_token_loss(config, params, llama_jax.Batch(tokens[0]))


def test_a_target_outside_the_vocabulary_is_no_loss(models):
    config, params = models["gqa"]
    loss = jax.jit(next_token_loss, static_argnums=0)
    for target in (-1, config.vocab_size):
        assert np.isnan(loss(config, params, llama_jax.Batch(np.array([[1, 2, target]]))))


@pytest.mark.slow
def test_float64_parameters_generate(models):
    """In a process that has it switched on; what is drawn is drawn in float32."""
    config, params = models["gqa"]
    sampling = llama_jax.Sampling(temperature=[0.0, 0.9], top_p=0.9, seed=[0, 1])
    with jax.enable_x64(True):
        wide = jax.tree.map(lambda array: array.astype("float64"), params)
        found = llama_jax.generate(config, wide, [[1, 2], [3]], max_new_tokens=4, sampling=sampling)
    wanted = llama_jax.generate(config, params, [[1, 2], [3]], max_new_tokens=4, sampling=sampling)
    assert [row.tokens for row in found] == [row.tokens for row in wanted]


def generate(config, params, prompts, **options):
    return llama_jax.generate(config, params, prompts, max_new_tokens=1, **options)
