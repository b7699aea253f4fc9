"""An attention of one's own, given as `Compute.attend`."""

from __future__ import annotations

from typing import Any

import jax

from llama_jax.errors import ConfigError
from llama_jax.model.options import Attend
from llama_jax.ops.attention import Seen, View


def checked(attend: Attend) -> Attend:
    """The same, whose result is held against what it must be: one with its axes in another order would be believed."""

    def found(queries: jax.Array, view: View, seen: Seen, **options: Any) -> jax.Array:
        mixed = attend(queries, view, seen, **options)
        kind, wanted = (f"{getattr(x, 'dtype', type(x))}{list(getattr(x, 'shape', ()))}" for x in (mixed, queries))
        if kind != wanted:
            raise ConfigError(f"attend gave {kind}; {wanted} is needed, [B, K, T, G, H] in the dtype of the queries")
        return mixed

    return found
