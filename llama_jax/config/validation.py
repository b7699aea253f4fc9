"""Checks of the numbers of a configuration, with a ConfigError that names the field."""

from __future__ import annotations

import math
from typing import Any

from llama_jax.errors import ConfigError, shown


def require_positive_int(name: str, value: object) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 < value < 2**31:
        raise ConfigError(f"{name}={shown(value, 40)} must be a positive integer below 2**31")


def is_floating(dtype: Any) -> bool:
    """Whether it is the name or the class of a floating-point type that JAX knows."""
    import jax.numpy as jnp  # a configuration alone needs no JAX

    try:
        return bool(jnp.issubdtype(jnp.dtype(dtype), jnp.floating))
    except TypeError:
        return False


def require_number(name: str, value: object, *, minimum: float = -math.inf, above: float = -math.inf) -> None:
    bound = f"at least {minimum:g}" if minimum > -math.inf else f"above {above:g}"
    if isinstance(value, bool) or not isinstance(value, int | float) or not minimum <= value < 1e30 or value <= above:
        raise ConfigError(f"{name}={shown(value, 40)} must be a finite number {bound}")
