"""The option ``--rope``: another rope scaling for a model, to try a context extension without training."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

from llama_jax.errors import UserError, shown

if TYPE_CHECKING:
    from llama_jax.config import LlamaConfig, RopeScalingKind

SPLIT = re.compile(r",(?![^\[]*\])")  # commas outside of brackets


def with_rope(config: LlamaConfig, text: str) -> LlamaConfig:
    """The configuration with another rope scaling and the context that follows from it.

    Args:
      text: ``KIND:FACTOR`` and further fields of `RopeScaling`, as in ``yarn:4,beta_fast=16``; ``none`` leaves out the
        model's own; an empty one changes nothing. `original_max_seq_len` is the model's own context unless it is given.

    Raises:
      UserError: a text that is no rope scaling.
      ConfigError: an impossible one.
    """
    from llama_jax.config import ROPE_FIELDS, RopeScaling

    if not text:
        return config
    original = _trained(config)
    if text == "none":
        return replace(config, rope_scaling=None, max_seq_len=original)
    first, *rest = SPLIT.split(text)
    kind, colon, number = first.partition(":")
    fields = ROPE_FIELDS.get(kind)
    if fields is None or not colon:
        kinds = ", ".join(ROPE_FIELDS)
        raise UserError(f"rope={shown(text)} must be none, or KIND:FACTOR as in yarn:4 with one of the kinds {kinds}")
    given: dict[str, Any] = {}
    for part in rest:
        name, equals, value = part.partition("=")
        if name not in fields or not equals:
            has = ", ".join(fields) or "none"
            raise UserError(
                f"rope={shown(text)} has {shown(part, 40)} after its factor; the further fields of {kind} are: {has}"
            )
        given[name] = _value(text, value)
    if "original_max_seq_len" in fields:
        given.setdefault("original_max_seq_len", original)
    scaling = RopeScaling(cast("RopeScalingKind", kind), _value(text, number), **given)  # a key of the table
    context = scaling.extended_max_seq_len or int(original * scaling.factor)
    return replace(config, rope_scaling=scaling, max_seq_len=context)


def _trained(config: LlamaConfig) -> int:
    """Tokens of the context without the model's rope scaling."""
    scaling = config.rope_scaling
    if scaling is None:
        return config.max_seq_len
    return scaling.original_max_seq_len or max(int(config.max_seq_len / scaling.factor), 1)


def _value(text: str, value: str) -> Any:
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        raise UserError(f"rope={shown(text)} has {shown(value, 40)} where a number is needed, or true or false") from None


def say_beyond(config: LlamaConfig, lengths: Sequence[int]) -> None:
    """Report on stderr which lengths are beyond the model's context, where that is allowed."""
    beyond = [f"{length:,}" for length in sorted(lengths) if length > config.max_seq_len]
    if beyond:
        print(
            f"llama-jax: {', '.join(beyond)}: beyond the model's context of {config.max_seq_len:,} tokens, for which it was"
            " not made; this measures what happens",
            file=sys.stderr,
        )
