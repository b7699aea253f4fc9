"""Hooks: pure functions that read and replace values at named points of a pass.

They are part of the parameters, `Llama.hooks`, and so apply wherever these are used: in `forward`, a loss, `generate`, a
server. Without hooks the compiled programs are the same as if there were none.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
from jax.tree_util import Partial
from jaxtyping import Array, Bool, Float

from llama_jax.errors import ConfigError
from llama_jax.model.params import Llama
from llama_jax.ops.attention import KVView
from llama_jax.ops.attention.reference import attend_where

# The shape of the value at each point; S are the keys of a row, with a cache all its slots.
POINTS = {
    "embedded": "B T D",
    "residual_before": "B T D",
    "queries": "B T N H",
    "keys": "B T K H",
    "values": "B T K H",
    "scores": "B N T S",
    "pattern": "B N T S",
    "heads": "B T N H",
    "attention": "B T D",
    "residual_between": "B T D",
    "neurons": "B T F",
    "feed_forward": "B T D",
    "residual_after": "B T D",
    "final": "B T D",
    "logits": "... V",
}


class At(NamedTuple):
    """Where a hook is called.

    Attributes:
      name: the point, one of `POINTS`.
      layer: int32[], the index of the layer; None outside the layers.
      positions: int32[B, T], the position of each token; None at "logits".
    """

    name: str
    layer: jax.Array | None
    positions: jax.Array | None


Hook = Callable[[jax.Array, At], tuple[jax.Array, Any]]


def with_hooks(params: Llama, hooks: Mapping[str, Hook]) -> Llama:
    """The parameters with hooks, which are called wherever a pass reaches their points.

    Args:
      hooks: for each point a pure function from a value and an `At` to a value of the same shape and dtype, and a pytree to
        keep, or None. `observe` returns what is kept; other passes drop it. A function is a static part of compiled
        programs: a new one compiles them anew. A callable pytree, such as `jax.tree_util.Partial(function, vector)`, has its
        arrays among their arguments.

    The points, in the order of a pass:

    - "embedded" [B, T, D], the input of the first layer
    - in each layer "residual_before" [B, T, D]; "queries" [B, T, N, H], "keys" and "values" [B, T, K, H], after RoPE, as
      they are cached; "scores" [B, N, T, S], scaled, -inf where a key is not visible, and their softmax, "pattern"
      [B, N, T, S]; "heads" [B, T, N, H], the results of the heads before the output projection; "attention" [B, T, D], as
      it is added to the residual stream; "residual_between" [B, T, D]; "neurons" [B, T, F], the input of the down
      projection; "feed_forward" [B, T, D], as it is added; "residual_after" [B, T, D]
    - "final" [B, T, D], the result of `forward`; "logits" [..., V]

    Hooks at "scores" and "pattern" replace the attention kernels by plain attention, which holds all scores in memory.

    Returns:
      Parameters with these hooks after those that they had. Save, shard and train parameters without hooks.

    Raises:
      ConfigError: an unknown point.
    """
    for name in hooks:
        if name not in POINTS:
            raise ConfigError(f"{name!r} is not a point of a pass; hooks can be at {', '.join(POINTS)}")
    before = params.hooks or {}
    return params.replace(hooks=before | {name: (*before.get(name, ()), _as_tree(hook)) for name, hook in hooks.items()})


def _as_tree(hook: Hook) -> Any:
    """A hook as a pytree: a function is wrapped."""
    return Partial(hook) if jax.tree_util.all_leaves([hook]) else hook


class HookCaller:
    """Calls the hooks of a layer, or of what is outside the layers, and collects what they keep.

    Attributes:
      kept: by point.
    """

    def __init__(self, hooks: Any, positions: jax.Array | None = None, layer: jax.Array | None = None) -> None:
        self._hooks = hooks or {}
        self._positions = positions
        self._layer = layer
        self.kept: dict[str, Any] = {}

    def has(self, *names: str) -> bool:
        """Whether there is a hook at one of these points."""
        return any(name in self._hooks for name in names)

    def __call__(
        self,
        name: str,
        value: jax.Array,
        view: Callable[[jax.Array], jax.Array] | None = None,
        undo: Callable[[jax.Array], jax.Array] | None = None,
    ) -> jax.Array:
        """The value after the hooks at a point.

        Args:
          view, undo: from the value to what hooks see, and back.
        """
        if name not in self._hooks:
            return value
        seen = value if view is None else view(value)
        for hook in self._hooks[name]:
            result = hook(seen, At(name, self._layer, self._positions))
            if not isinstance(result, tuple) or len(result) != 2:
                raise ConfigError(
                    f"the hook at {name!r} returned {type(result).__name__}; return (value, kept), kept may be None"
                )
            new, kept = result
            found, wanted = (f"{getattr(x, 'dtype', type(x).__name__)}{list(getattr(x, 'shape', ()))}" for x in (new, seen))
            if found != wanted:
                raise ConfigError(f"the hook at {name!r} returned {found}; {wanted}, [{POINTS[name]}], is needed")
            if kept is not None and name in self.kept:
                raise ConfigError(f"two hooks at {name!r} keep something; only one can")
            if kept is not None:
                self.kept[name] = kept
            seen = new
        return seen if undo is None else undo(seen)

    def attend(
        self,
        queries: Float[Array, "B K T G H"],
        view: KVView,
        allowed: Bool[Array, "_ T S"],
        scale: float,
    ) -> Float[Array, "B K T G H"]:
        """Plain attention with the hooks at "scores" and "pattern"."""
        batch, kv_heads, new, groups, _ = queries.shape

        def by_head(x: jax.Array) -> jax.Array:
            return x.swapaxes(2, 3).reshape(batch, kv_heads * groups, new, -1)

        def by_group(x: jax.Array) -> jax.Array:
            return x.reshape(batch, kv_heads, groups, new, -1).swapaxes(2, 3)

        def at(name: str) -> Callable[[jax.Array], jax.Array]:
            return lambda x: self(name, x, by_head, by_group)

        return attend_where(queries, *view, allowed, scale=scale, scores_hook=at("scores"), pattern_hook=at("pattern"))
