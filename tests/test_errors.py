"""What a message shows of a value that a stranger made."""

from dataclasses import replace

import pytest

from llama_jax.config import preset
from llama_jax.errors import ConfigError, shown


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
