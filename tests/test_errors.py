"""What a message shows of a value that a stranger made."""

from dataclasses import replace

import pytest

import llama_jax
from llama_jax.config import preset
from llama_jax.errors import ConfigError, GenerationError, MeshError, TokenizerError, shown


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


@pytest.mark.parametrize(
    "value",
    [
        None,
        True,
        12,
        -1.5,
        "it's",
        b"bytes",
        [],
        [1, "2", [3]],
        (),
        (1,),
        (1, 2),
        {},
        {"a": [1, {"b": None}], 2: ()},
        {1, 2},
    ],
)
def test_what_is_short_is_shown_whole(value):
    assert shown(value) == repr(value)
    assert shown(value, 3) == repr(value)[:3]


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
    assert shown(value, 40) == expected


def test_a_configuration_shows_it():
    with pytest.raises(ConfigError, match=r"dim=\[\[\[+ must be"):
        replace(preset("llama-2-7b"), dim=shared(60))


def test_misuse_from_python_is_said_in_a_line(models):
    config, params = models["gqa"]
    for error, message, call in (
        (GenerationError, "config is a Llama; give the LlamaConfig first", lambda: generate(params, config, [[1]])),
        (GenerationError, "must be a Sampling", lambda: generate(config, params, [[1]], sampling={"temperature": 0.5})),
        (MeshError, "mesh='tensor=2' must be a MeshSizes", lambda: llama_jax.load(mesh="tensor=2")),
        (ConfigError, "dtype='bf16' is not a floating-point type", lambda: llama_jax.Compute(dtype="bf16")),
        (ConfigError, "dtype='int8' is not a floating-point type", lambda: llama_jax.Compute(dtype="int8")),
        (TokenizerError, r"text=\['a', 'b'\] must be a str", lambda: llama_jax.load().tokenizer.encode(["a", "b"])),
    ):
        with pytest.raises(error, match=message):
            call()


def generate(config, params, prompts, **options):
    return llama_jax.generate(config, params, prompts, max_new_tokens=1, **options)
