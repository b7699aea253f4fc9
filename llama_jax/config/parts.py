"""How the attention of layers differs, and custom functions that replace parts of every layer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Annotated, Any, Literal, TypeAlias

from llama_jax.errors import ConfigError, short_repr
from llama_jax.settings import NonNegativeInt, PositiveFloat, PositiveInt, above, check_fields

PartFunction: TypeAlias = Callable[..., Any] | str | None
RopeTheta = Annotated[float, above(1)]


@dataclass(frozen=True)
class LayerConfig:
    """The attention of one layer in a model whose layers differ.

    Attributes:
      window: a token attends to itself and the window - 1 tokens before it; None: no window.
      rope: "model": RoPE with the theta and scaling of the model; "unscaled": RoPE without scaling, with `rope_theta`
        (layers with a window in Gemma 3 and OLMo 3); "none": no position embedding (SmolLM3; NoPE: Yang et al. 2025,
        section 3).
      rope_theta: base of the frequencies if `rope` is "unscaled"; None for the model's.
      chunk: size of the attention chunks (Llama 4): a token attends only within its chunk; None: no chunks.

    Raises:
      ConfigError: an invalid value; the message names it.
    """

    window: PositiveInt | None = None
    rope: Literal["model", "unscaled", "none"] = "model"
    rope_theta: RopeTheta | None = None
    chunk: PositiveInt | None = None

    def __post_init__(self) -> None:
        check_fields(self, ConfigError)
        if self.rope_theta is not None and self.rope != "unscaled":
            raise ConfigError(f"rope_theta={self.rope_theta} of a layer needs rope='unscaled'")


@dataclass(frozen=True)
class QueryScaling:
    """Temperature tuning of attention by position: queries times 1 + beta ln(1 + floor((position + offset) / context)).

    Source: Llama 4, in its layers without RoPE, with an offset of 1; Ministral 3, in all layers.

    Attributes:
      beta: the weight of the logarithm.
      context: the original context length; the floor is 0, and so the factor 1, at positions below it.
      offset: added to the position.
      rotated: scale the queries of all layers; if False, only those of layers without RoPE.

    Raises:
      ConfigError: an invalid value; the message names it.
    """

    beta: PositiveFloat
    context: PositiveInt
    offset: NonNegativeInt = 0
    rotated: bool = True

    def __post_init__(self) -> None:
        check_fields(self, ConfigError)


def period(layers: tuple[LayerConfig, ...]) -> tuple[LayerConfig, ...]:
    """The shortest prefix that gives `layers` if repeated and cut to the same length. It must not have a shorter period
    itself: (a, b, a, a) is not reduced to (a, b, a), whose period is (a, b)."""
    n = len(layers)
    for p in range(1, n):
        if all(layers[i] == layers[i % p] for i in range(n)) and len(period(layers[:p])) == p:
            return layers[:p]
    return layers


@dataclass(frozen=True, repr=False)
class Parts:
    """Custom functions that replace parts of every layer; None stands for the library's function.

    They are part of the model's configuration: everything that computes with it calls them. Files hold only their names,
    "module:function". The configuration of a loaded model has these names until `llama_jax.with_parts` finds the functions;
    until then nothing can be computed. The result of each function has the shape and dtype of its first argument.

    Attributes:
      attend: replaces `ops.attend`: ``attend(queries, view, mask, *, scale, window=None)`` with queries [B, K, T, G, H].
      norm: replaces every RMSNorm, also of queries and keys: ``norm(x, weight, eps)`` with x [..., D], weight [D] (ones
        for Llama 4's norm of queries and keys), to which `norm_offset` is already added, and eps `norm_eps`.
      feed_forward: replaces `ops.feed_forward`, in models without experts: ``feed_forward(x, gate, up, down)`` with x
        [B, T, D] and matrices [F, D], [F, D] and [D, F] for `ops.project`: they may be quantized or have adapters.
      rotary: replaces `ops.apply_rotary`: ``rotary(x, cos, sin)`` with x [B, K, T, G + 1, R], the queries of each group
        and their key, and cos and sin float32[B, 1, T, 1, R / 2]; R is `rotary_dim`, or H.

    Raises:
      ConfigError: a value that is neither a function nor None, nor a name.
    """

    attend: PartFunction = None
    norm: PartFunction = None
    feed_forward: PartFunction = None
    rotary: PartFunction = None

    def __post_init__(self) -> None:
        for part, value in vars(self).items():
            if not (value is None or callable(value) or isinstance(value, str)):
                raise ConfigError(f"{part}={short_repr(value, 80)} must be a function or None")

    def __bool__(self) -> bool:
        """Whether any part is replaced."""
        return any(value is not None for value in vars(self).values())

    def __repr__(self) -> str:  # the same in every process, unlike addresses of functions
        named = (f"{part}={_qualified_name(value)!r}" for part, value in vars(self).items() if value is not None)
        return f"Parts({', '.join(named)})"

    @property
    def missing(self) -> dict[str, str]:
        """The names of the functions that have not been found yet."""
        return {part: value for part, value in vars(self).items() if isinstance(value, str)}

    @property
    def names(self) -> Parts:
        """The names of the functions, as files hold them.

        Raises:
          ConfigError: a function that cannot be found by its name: a lambda, a partial or a nested function.
        """
        functions = {part: function_name(part, value) for part, value in vars(self).items()}
        for part, name in functions.items():
            if name is not None and "<" in name:
                raise ConfigError(
                    f"{part}={name} cannot be found again by this name; define it with def at the top of a file"
                )
        return Parts(**functions)

    def over(self, other: Parts) -> Parts:
        """These functions; parts without one take that of `other`."""
        return Parts(**{f.name: getattr(self if getattr(self, f.name) is not None else other, f.name) for f in fields(self)})


def function_name(what: str, function: PartFunction) -> str | None:
    """The name of a function, "module:function"; ConfigError if it has none."""
    if not (function is None or isinstance(function, str) or hasattr(function, "__qualname__")):
        raise ConfigError(
            f"{what}={short_repr(function, 80)} has no name to record; define it with def at the top of a file"
        )
    return None if function is None else _qualified_name(function)


def _qualified_name(function: Any) -> str:
    if isinstance(function, str):
        return function
    return f"{function.__module__}:{getattr(function, '__qualname__', type(function).__qualname__)}"
