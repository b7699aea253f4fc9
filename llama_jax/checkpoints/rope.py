"""A rope scaling in formats with fewer kinds: an equivalent one of theirs, and a note of its kind here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any

import numpy as np

from llama_jax.config import LlamaConfig, RopeScaling
from llama_jax.errors import ConfigError, shown
from llama_jax.model.rope import rotary_frequencies

NOTE = "llama_jax"  # under which a file keeps it


def in_known_kinds(config: LlamaConfig) -> LlamaConfig:
    """A configuration of the same frequencies and attention factor without the kinds that only this library names.

    "ntk" is a larger theta, and "by_parts" is "yarn" with an attention factor of 1.
    """
    scaling = config.rope_scaling
    if scaling is None:
        return config
    if scaling.kind == "ntk":
        theta = config.rope_theta * scaling.factor ** (config.head_dim / (config.head_dim - 2))
        return replace(config, rope_theta=theta, rope_scaling=None)
    if scaling.kind == "by_parts":
        return replace(config, rope_scaling=replace(scaling, kind="yarn", attention_factor=1.0))
    return config


def note_of(config: LlamaConfig) -> dict[str, Any]:
    """What `with_note` makes the configuration of again, as JSON holds it."""
    assert config.rope_scaling is not None
    scaling = {name: value for name, value in asdict(config.rope_scaling).items() if value is not None}
    return {"max_seq_len": config.max_seq_len, "rope_theta": config.rope_theta, "rope_scaling": scaling}


def with_note(found: LlamaConfig, note: Any) -> LlamaConfig:
    """The configuration of a file from its own settings and our note.

    Raises:
      ConfigError: an invalid note, or one that contradicts the settings.
    """
    try:
        scaling = RopeScaling(**note["rope_scaling"])
        noted = replace(found, max_seq_len=note["max_seq_len"], rope_theta=note["rope_theta"], rope_scaling=scaling)
        whole = isinstance(note, Mapping) and len(note) == 3
    except (KeyError, TypeError):
        whole = False
    if not whole:
        raise ConfigError(f"{NOTE}={shown(note, 80)} is not a note of this library; remove it")
    # Of a dynamic scaling others name the original context alone.
    same_context = found.max_seq_len == (scaling.extended_max_seq_len if scaling.kind == "dynamic" else noted.max_seq_len)
    if not same_context or not same_rotation(found, noted):
        raise ConfigError(f"{NOTE}={shown(note, 200)} contradicts the rope settings beside it; remove it, or correct them")
    return noted


def same_rotation(a: LlamaConfig, b: LlamaConfig) -> bool:
    """Whether two configurations have the same rotations at short and long lengths, except for rounding to float32."""
    for length in (1, 1 << 30):
        (ours, our_factor), (theirs, their_factor) = (rotary_frequencies(config, length) for config in (a, b))
        if not np.allclose(ours, theirs, rtol=1e-5, atol=0) or not np.isclose(our_factor, their_factor, rtol=1e-5):
            return False
    return True
