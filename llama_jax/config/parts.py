"""A user's own functions in place of parts of every layer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any, TypeAlias

from llama_jax.errors import ConfigError, shown

Part: TypeAlias = Callable[..., Any] | str | None


@dataclass(frozen=True, repr=False)
class Parts:
    """Your own functions in place of parts of every layer; None is the library's.

    They are a part of the model's configuration: everything that computes with it calls them. Files hold their names alone,
    "module:function". The configuration of a loaded model has these names until `llama_jax.with_parts` finds the functions,
    and nothing is computed before. The result of each has the shape and dtype of its first argument.

    Attributes:
      attend: in place of `ops.attend`: ``attend(queries, view, mask, *, scale, window=None)`` with queries [B, K, T, G, H].
      norm: in place of every RMSNorm with a weight, those of queries and keys too: ``norm(x, weight, eps)`` with x [..., D],
        weight [D], to which `norm_offset` is already added, and eps `norm_eps`.
      feed_forward: in place of `ops.feed_forward`, in models without experts: ``feed_forward(x, gate, up, down)`` with x
        [B, T, D] and matrices [F, D], [F, D] and [D, F] for `ops.project`: they may be quantized or have adapters.
      rotary: in place of `ops.apply_rotary`: ``rotary(x, cos, sin)`` with x [B, K, T, G + 1, R], the queries of each group
        and their key, and cos and sin float32[B, 1, T, 1, R / 2]; R is `rotary_dim`, or H.

    Raises:
      ConfigError: a value that is neither a function nor None, nor a name.
    """

    attend: Part = None
    norm: Part = None
    feed_forward: Part = None
    rotary: Part = None

    def __post_init__(self) -> None:
        for part, value in vars(self).items():
            if not (value is None or callable(value) or isinstance(value, str)):
                raise ConfigError(f"{part}={shown(value, 80)} of the parts must be a function of your own, or None")

    def __bool__(self) -> bool:
        """Whether there is any."""
        return any(value is not None for value in vars(self).values())

    def __repr__(self) -> str:  # the same in every process, as addresses of functions are not
        named = (f"{part}={_name(value)!r}" for part, value in vars(self).items() if value is not None)
        return f"Parts({', '.join(named)})"

    @property
    def missing(self) -> dict[str, str]:
        """The names of the functions that have not been found yet."""
        return {part: value for part, value in vars(self).items() if isinstance(value, str)}

    @property
    def names(self) -> Parts:
        """The names of the functions, as files hold them.

        Raises:
          ConfigError: a function that could not be found again by its name: a lambda, a partial, one inside of another.
        """
        found = {part: name_of(part, value) for part, value in vars(self).items()}
        for part, name in found.items():
            if name is not None and "<" in name:
                raise ConfigError(
                    f"{part}={name} cannot be found again by this name; define it with def at the top of a file"
                )
        return Parts(**found)

    def over(self, other: Parts) -> Parts:
        """These functions, and for parts without one those of `other`."""
        return Parts(**{f.name: getattr(self if getattr(self, f.name) is not None else other, f.name) for f in fields(self)})


def name_of(what: str, function: Part) -> str | None:
    """The name of a function, "module:function"; ConfigError where it has none."""
    if not (function is None or isinstance(function, str) or hasattr(function, "__qualname__")):
        raise ConfigError(f"{what}={shown(function, 80)} has no name to record; define it with def at the top of a file")
    return None if function is None else _name(function)


def _name(function: Any) -> str:
    if isinstance(function, str):
        return function
    return f"{function.__module__}:{getattr(function, '__qualname__', type(function).__qualname__)}"
