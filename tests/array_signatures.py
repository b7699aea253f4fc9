"""Under the tests arrays have the dtypes and shapes that signatures say; see --jaxtyping-packages in pyproject.toml."""

from __future__ import annotations

from typing import Any, get_args

from beartype import beartype
from jaxtyping import AbstractArray


def checked(function: Any) -> Any:
    """By beartype what a signature says of arrays. Else it is for mypy: tests pass wrong values to see which error comes."""
    local, of_fields = "<locals>" in function.__qualname__, function.__name__ == "__init__"
    if local or of_fields:  # trees of anything may have the form of a dataclass of arrays
        return function
    hints = function.__annotations__
    function.__annotations__ = {name: hint if _has_array(hint) else Any for name, hint in hints.items()}
    return beartype(function) if any(map(_has_array, hints.values())) else function


def _has_array(hint: Any) -> bool:
    return (isinstance(hint, type) and issubclass(hint, AbstractArray)) or any(map(_has_array, get_args(hint)))
