"""The families of models, by what they have beyond Llama."""

from __future__ import annotations

from typing import Any, Literal

from llama_jax.errors import ConfigError

Kind = Literal["llama", "mistral", "qwen2", "qwen3", "mixtral"]

# What the families of models have beyond Llama.
KINDS: dict[Kind, set[str]] = {
    "llama": set(),
    "mistral": {"window"},
    "qwen2": {"qkv_bias"},
    "qwen3": {"qk_norm"},
    "mixtral": {"window", "experts"},
}


def kind_of(config: Any) -> Kind:
    """The first of the families that has all that a model of this configuration has.

    Raises:
      ConfigError: none has.
    """
    here = {name for name in ("window", "qkv_bias", "qk_norm", "experts") if getattr(config, name)}
    for kind, features in KINDS.items():
        if here <= features:
            return kind
    raise ConfigError(f"no family of models has {' and '.join(sorted(here))} together")
