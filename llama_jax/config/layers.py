"""What differs from layer to layer, and what depends on a token's position besides the rotary embedding."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from llama_jax.config.numbers import require_number, require_positive_int
from llama_jax.errors import ConfigError, shown


@dataclass(frozen=True)
class LayerConfig:
    """The attention of one layer in a model whose layers are not all alike.

    Attributes:
      window: a token sees itself and the window - 1 tokens before it; None for all.
      rope: "model", with the theta and the scaling of the model; "unscaled", with a theta alone (the windows of Gemma 3 and
        OLMo 3); "none", no position embedding (SmolLM3; NoPE: Yang et al. 2025, section 3).
      rope_theta: base of the frequencies where `rope` is "unscaled"; None for the model's.
      chunk: a text is divided into chunks of so many positions, and a token sees itself and the earlier tokens of its own
        chunk (Llama 4); None for all.

    Raises:
      ConfigError: an invalid value; the message names it.
    """

    window: int | None = None
    rope: Literal["model", "unscaled", "none"] = "model"
    rope_theta: float | None = None
    chunk: int | None = None

    def __post_init__(self) -> None:
        for name, value in (("window", self.window), ("chunk", self.chunk)):
            if value is not None:
                require_positive_int(name, value)
        if self.rope not in ("model", "unscaled", "none"):
            raise ConfigError(f"rope={shown(self.rope, 40)} of a layer must be 'model', 'unscaled' or 'none'")
        if self.rope_theta is not None:
            if self.rope != "unscaled":
                raise ConfigError(f"rope_theta={shown(self.rope_theta, 40)} of a layer needs rope='unscaled'")
            require_number("rope_theta", self.rope_theta, above=1.0)


@dataclass(frozen=True)
class QueryScaling:
    """Sharper attention at late positions: queries times 1 + beta ln(1 + floor((position + offset) / context)).

    Source: Llama 4, in its layers without RoPE, with an offset of 1; Ministral 3, in all layers.

    Attributes:
      beta: the weight of the logarithm.
      context: tokens before the first step, the context that the model was first trained at.
      offset: added to the position.
      rotated: whether queries that are rotated are scaled too; else only those of layers without a position embedding.

    Raises:
      ConfigError: an invalid value; the message names it.
    """

    beta: float
    context: int
    offset: int = 0
    rotated: bool = True

    def __post_init__(self) -> None:
        require_number("beta", self.beta, above=0.0)
        require_positive_int("context", self.context)
        if type(self.offset) is not int or self.offset < 0:
            raise ConfigError(f"offset={shown(self.offset, 40)} of a query scaling must be an integer of at least 0")
        if not isinstance(self.rotated, bool):
            raise ConfigError(f"rotated={shown(self.rotated, 40)} of a query scaling must be True or False")


def period(layers: tuple[LayerConfig, ...]) -> tuple[LayerConfig, ...]:
    """The shortest beginning of the layers of which they are a repetition, the last one perhaps cut off.

    Of the result it is the result itself: (a, b, a, a) repeats (a, b, a), but that would then be taken for (a, b).
    """
    n = len(layers)
    for p in range(1, n):
        if all(layers[i] == layers[i % p] for i in range(n)) and len(period(layers[:p])) == p:
            return layers[:p]
    return layers
