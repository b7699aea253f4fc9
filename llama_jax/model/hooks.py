"""Hooks: pure functions that read and replace activations at named points of a forward pass.

They are stored with the parameters, in `LlamaParams.hooks`, and are called wherever the parameters are used: in `forward`, a
loss, `generate`, a server. Without hooks, the compiled programs are unchanged.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.tree_util import Partial
from jaxtyping import Array, Bool, Float

from llama_jax.errors import ConfigError
from llama_jax.model.params import LlamaParams
from llama_jax.ops.attention import KVView

# The shape of the activation at each point. S is the number of keys of a row; with a cache, of its slots.
HOOK_POINTS = {
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
      name: the point, one of `HOOK_POINTS`.
      layer: int32[], the index of the layer; None at points outside the layers.
      positions: int32[B, T], the position of each token; None at "logits".
    """

    name: str
    layer: jax.Array | None
    positions: jax.Array | None


Hook = Callable[[jax.Array, At], tuple[jax.Array, Any]]


def with_hooks(params: LlamaParams, hooks: Mapping[str, Hook]) -> LlamaParams:
    """The parameters with hooks, which every forward pass calls at their points.

    Args:
      hooks: for each point, a pure function of a value and an `At`. It returns a pair: a replacement of the same shape and
        dtype, and a pytree to keep, or None. `logits_and_activations` returns the kept values; other passes drop them.
        Functions are
        static: a new function causes recompilation. The arrays in a callable pytree, such as
        `jax.tree_util.Partial(function, vector)`, are arguments of the programs.

    The points, in the order of a pass:

    - "embedded" [B, T, D], the input of the first layer
    - in each layer "residual_before" [B, T, D]; "queries" [B, T, N, H], "keys" and "values" [B, T, K, H], after RoPE, as
      cached; "scores" [B, N, T, S], scaled, with the lowest finite number where a query does not attend to a key;
      "pattern" [B, N, T, S], their softmax; "heads" [B, T, N, H], the input of the output projection; "attention" [B, T, D],
      which is added to the residual stream; "residual_between" [B, T, D]; "neurons" [B, T, F], the input of the down
      projection; "feed_forward" [B, T, D], which is added to the residual stream; "residual_after" [B, T, D]
    - "final" [B, T, D], the result of `forward`; "logits" [..., V]

    With hooks at "scores" or "pattern", attention is computed without kernels, with all scores in memory.

    Returns:
      The parameters with these hooks added after existing ones. They cannot be saved, sharded or trained.

    Raises:
      ConfigError: an unknown point.
    """
    for name in hooks:
        if name not in HOOK_POINTS:
            raise ConfigError(f"{name!r} is not a hook point; use one of {', '.join(HOOK_POINTS)}")
    existing = params.hooks or {}
    all_hooks = existing | {name: (*existing.get(name, ()), _as_tree(hook)) for name, hook in hooks.items()}
    return params.replace(hooks=all_hooks or None)


def _as_tree(hook: Hook) -> Any:
    """The hook as a pytree of arrays; a function becomes a `Partial`."""
    tree = Partial(hook) if jax.tree_util.all_leaves([hook]) else hook
    return jax.tree.map(lambda leaf: leaf if isinstance(leaf, jax.ShapeDtypeStruct) else jnp.asarray(leaf), tree)


class HookCaller:
    """Calls the hooks of one layer, or those outside the layers, and collects the values that hooks keep.

    Attributes:
      kept: the kept values by point.
    """

    def __init__(self, hooks: Any, positions: jax.Array | None = None, layer: jax.Array | None = None) -> None:
        self._hooks = hooks or {}
        self._positions = positions
        self._layer = layer
        self.kept: dict[str, Any] = {}

    def in_layer(self, layer: jax.Array) -> HookCaller:
        """The same hooks, called in a layer."""
        return HookCaller(self._hooks, self._positions, layer)

    def has(self, *names: str) -> bool:
        """Whether there is a hook at one of these points."""
        return any(name in self._hooks for name in names)

    def __call__(self, name: str, value: jax.Array) -> jax.Array:
        """Call the hooks at a point, and return the replacement of `value`."""
        for hook in self._hooks.get(name, ()):
            result = hook(value, At(name, self._layer, self._positions))
            if not isinstance(result, tuple) or len(result) != 2:
                returned = type(result).__name__
                raise ConfigError(f"the hook at {name!r} returned {returned}; return (value, kept), kept may be None")
            new, kept = result
            types = (f"{getattr(x, 'dtype', type(x).__name__)}{list(getattr(x, 'shape', ()))}" for x in (new, value))
            returned, expected = types
            if returned != expected:
                raise ConfigError(f"the hook at {name!r} returned {returned}; {expected}, [{HOOK_POINTS[name]}], is needed")
            if kept is not None and name in self.kept:
                raise ConfigError(f"two hooks at {name!r} keep values; only one can")
            if kept is not None:
                self.kept[name] = kept
            value = new
        return value

    def at_queries(self, name: str, value: Float[Array, "B K T G H"]) -> Float[Array, "B K T G H"]:
        """`__call__` for hooks whose value is [B, T, N, H]."""
        if not self.has(name):
            return value
        heads = value.swapaxes(1, 2)  # [B, T, K, G, H]
        flat = heads.reshape(*heads.shape[:2], -1, heads.shape[-1])
        return self(name, flat).reshape(heads.shape).swapaxes(1, 2)

    def at_keys(self, name: str, value: Float[Array, "B K T H"]) -> Float[Array, "B K T H"]:
        """`__call__` for hooks whose value is [B, T, K, H]."""
        return self(name, value.swapaxes(1, 2)).swapaxes(1, 2) if self.has(name) else value

    def attend(
        self,
        queries: Float[Array, "B K T G H"],
        view: KVView,
        allowed: Bool[Array, "_ T S"],
        scale: float,
    ) -> Float[Array, "B K T G H"]:
        """Attention by the textbook formula, with hooks at "scores" and "pattern"."""
        from llama_jax.ops.attention.reference import attend_where

        def hook(name: str) -> Callable[[jax.Array], jax.Array]:
            """`__call__` with [B, K, T, G, S], for hooks whose value is [B, N, T, S]."""

            def call(value: jax.Array) -> jax.Array:
                by_head = value.swapaxes(2, 3)  # [B, K, G, T, S]
                flat = by_head.reshape(len(value), -1, *by_head.shape[3:])
                return self(name, flat).reshape(by_head.shape).swapaxes(2, 3)

            return call

        return attend_where(queries, *view, allowed, scale=scale, scores_hook=hook("scores"), pattern_hook=hook("pattern"))
