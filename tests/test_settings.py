"""Settings are checked by the bounds in their types, and described by their docstrings."""

import math
from dataclasses import dataclass, replace
from typing import Annotated, Literal

import pytest

from llama_jax.errors import UserError
from llama_jax.inference.sampling import Sampling
from llama_jax.settings import Bounds, at_least, check_fields, help_of, number_fields


@dataclass(frozen=True)
class Rate:
    value: Annotated[float, Bounds(0, 1e9)] = 0.5


@dataclass(frozen=True)
class Settings:
    """Settings of a test.

    Attributes:
      first, second: numbers.
    """

    first: Annotated[int, at_least(1)] = 1
    second: Annotated[int, at_least(0)] | None = None
    free: int = -1
    """A number without
    bounds."""
    rate: Rate = Rate()
    kind: Literal["red", "blue"] | None = None
    flag: bool = False
    shares: tuple[Annotated[float, Bounds(0, 2, open_maximum=True)], ...] = ()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({}, None),
        ({"first": 2**31 - 1, "second": 0, "free": -(2**40), "rate": Rate(1e9)}, None),
        ({"first": 0}, "first=0 must be at least 1"),
        ({"first": 2**31}, "first=2147483648 must be at least 1 and at most 2147483647"),
        ({"second": -1}, "second=-1 must be at least 0"),
        ({"second": 1.0}, "second=1.0 must be an integer, at least 0"),
        ({"flag": 1}, "flag=1 must be True or False"),
        ({"shares": (0.5, 2.0)}, r"shares\[1\]=2.0 must be at least 0 and below 2"),
        ({"shares": [0.5]}, r"shares=\[0.5\] must be a tuple, not list"),
        ({"rate": 0.5}, "rate=0.5 must be Rate"),
        ({"kind": "green"}, "kind='green' must be one of red, blue"),
        ({"rate": Rate(-1)}, "rate.value=-1 must be at least 0 and at most 1000000000"),
        ({"rate": Rate(math.nan)}, "rate.value=nan must be at least 0 and at most 1000000000"),
    ],
)
def test_values_out_of_their_bounds_are_named(changes, message):
    settings = replace(Settings(), **changes)
    if message is None:
        return check_fields(settings)
    with pytest.raises(UserError, match=f"^{message}$"):
        check_fields(settings)


def test_help_is_the_text_below_a_field_or_in_the_class():
    assert help_of(Settings) == {"first": "Numbers.", "second": "Numbers.", "free": "A number without bounds."}


def test_a_field_of_sampling_is_an_option_of_commands_and_requests():
    """With its bounds, its default and its help; nothing else declares it."""
    from llama_jax.cli.argv import parse_command
    from llama_jax.cli.generate import Generate
    from llama_jax.serving.http.request_schema import Limits, request_schemas

    limits = Limits(vocab_size=100, known_ids=100, context=64, most_choices=4, longest_prompt=100)
    properties = request_schemas(limits)["/v1/completions"]["properties"]
    options = number_fields(Sampling)
    assert {"temperature", "top_k", "top_p", "min_p", "repetition_penalty", "seed"} <= options.keys()
    for name, option in options.items():
        if name != "seed":  # every program has its own default
            schema = properties[name]
            assert (schema["minimum"], schema["maximum"]) == (option.bounds.minimum, option.bounds.maximum)
            assert schema["description"] == option.help
            flag = "--" + name.replace("_", "-")
            assert getattr(parse_command(Generate, "generate", [flag, "1"]).sampling, name) == 1
