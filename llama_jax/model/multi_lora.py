"""Several adapters of one model: each row of a batch uses one of them, or none.

`adapter_table` adds them to the parameters once; `choose_adapters` selects one for each row of a batch. Both return
parameters for every function for models: `generate`, `forward`, `logits`.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Int

from llama_jax.config import LlamaConfig
from llama_jax.errors import ConfigError, short_repr
from llama_jax.model.lora import TARGETS, Lora, build_adapters, precompute_dora_scale, replace_adapted
from llama_jax.model.params import LlamaParams, ParamSpec
from llama_jax.ops.platform import AnyArray
from llama_jax.ops.weights.lora import LowRank
from llama_jax.ops.weights.multi_lora import MultiLoraWeight


class StackedAdapters(NamedTuple):
    """Several adapters stacked as a single one.

    Attributes:
      params: a `LlamaParams` of `LowRank`, see `MultiLoraWeight`.
      lora: the rank (n times the largest) and all targets.
      scales: the scale of each adapter.
    """

    params: LlamaParams
    lora: Lora
    scales: tuple[float, ...]


def adapter_table(config: LlamaConfig, params: LlamaParams, adapters: Sequence[tuple[LlamaParams, Lora]]) -> LlamaParams:
    """The model with several adapters, numbered from 0, for `choose_adapters`.

    The adapters may have different ranks and targets; they are stored once, in the dtype of the model's computation. The
    base is not copied.

    Args:
      params: dense or quantized, on one device (`load(adapters=...)` reads a table over a mesh).
      adapters: each with its settings, from `load_adapter`.

    Raises:
      ConfigError: no adapters, or one for another model; the message names the matrix.
    """
    return attach_adapter_table(params, stack_adapters(config, adapters, params.embedding.dtype))


def stack_adapters(
    config: LlamaConfig, adapters: Sequence[tuple[LlamaParams, Lora]], dtype: jax.typing.DTypeLike
) -> StackedAdapters:
    """Stack adapters of one model: A and B are concatenated, with lower ranks padded with zeros.

    Raises:
      ConfigError: no adapters, or a target that the model does not have.
    """
    if not adapters:
        raise ConfigError("a table of adapters needs at least one; pass some, or omit the table")
    rank, count = max(lora.rank for _, lora in adapters), len(adapters)
    used = {name for _, lora in adapters for name in lora.targets}
    dora = any(lora.dora for _, lora in adapters)
    whole = Lora(rank=count * rank, targets=tuple(name for name in TARGETS if name in used), dora=dora)

    def join(spec: ParamSpec, shape: LowRank) -> LowRank:
        a = np.zeros((*shape.a.shape[:-2], count, rank, shape.a.shape[-1]), jnp.dtype(dtype))
        b = np.zeros((*shape.b.shape[:-1], count, rank), jnp.dtype(dtype))
        magnitude = np.zeros((*shape.b.shape[:-1], count), np.float32) if dora else None
        for i, (tree, _) in enumerate(adapters):
            pair = attrgetter(spec.path)(tree)
            if pair is None:
                continue
            rank_of_pair, shapes_of_pair = pair.a.shape[-2], (pair.a.shape[:-2], pair.a.shape[-1], pair.b.shape[:-1])
            if shapes_of_pair != (shape.a.shape[:-2], shape.a.shape[-1], shape.b.shape[:-1]):
                raise ConfigError(
                    f"adapter {i} of {spec.path}: A is {list(pair.a.shape)} and B is {list(pair.b.shape)}, which do not"
                    " match the matrix of this model; is it the adapter's base?"
                )
            a[..., i, :rank_of_pair, :] = pair.a
            b[..., i, :rank_of_pair] = pair.b
            if magnitude is not None and pair.magnitude is not None:
                magnitude[..., i] = pair.magnitude
        a, b = a.reshape(shape.a.shape), b.reshape(shape.b.shape)
        return LowRank(jnp.asarray(a), jnp.asarray(b), None if magnitude is None else jnp.asarray(magnitude))

    return StackedAdapters(build_adapters(config, whole, join), whole, tuple(lora.scale for _, lora in adapters))


def attach_adapter_table(params: LlamaParams, table: StackedAdapters) -> LlamaParams:
    """The parameters with a table of adapters, whose arrays are placed like those of one adapter of that rank.

    Raises:
      ConfigError: as `apply_adapters`.
    """
    join = lambda leaf, pair: MultiLoraWeight(leaf, pair, scales=table.scales)
    return precompute_dora_scale(replace_adapted(params, table.params, table.lora.rank, join))


def choose_adapters(params: LlamaParams, rows: Int[AnyArray, " B"] | Sequence[int]) -> LlamaParams:
    """The parameters for a batch whose rows use these adapters: nothing is copied, and all choices share one program.

    Args:
      params: from `adapter_table`; a model without a table is returned unchanged if no row has an adapter.
      rows: for each row of the batch, the number of an adapter, or -1 for none.

    Raises:
      ConfigError: an invalid number of an adapter (not detected under `jit`).
    """
    numbers = rows if isinstance(rows, jax.Array) else np.asarray(rows, np.int32)
    if not isinstance(numbers, jax.core.Tracer):
        check_choice(params, np.asarray(numbers).tolist())

    def choose(leaf: Any) -> Any:
        if not isinstance(leaf, MultiLoraWeight):
            return leaf
        return leaf.replace(rows=jnp.broadcast_to(jnp.asarray(numbers, jnp.int32), (leaf.shape[0], len(numbers))))

    return jax.tree.map(choose, params, is_leaf=lambda leaf: isinstance(leaf, MultiLoraWeight))


def check_choice(params: LlamaParams, rows: Sequence[int]) -> None:
    """Raise ConfigError for an adapter number that does not exist."""
    count = adapters_in(params)
    for number in rows:
        if not -1 <= number < count:
            there = f"0 to {count - 1}" if count else "none"
            raise ConfigError(f"adapter={short_repr(number, 40)}: the model has {there}; pass one of those, or -1 for none")


def adapters_in(params: LlamaParams) -> int:
    """The number of adapters in the table of the parameters."""
    leaves = jax.tree.leaves(params.blocks, is_leaf=lambda leaf: isinstance(leaf, MultiLoraWeight))
    return max((len(leaf.scales) for leaf in leaves if isinstance(leaf, MultiLoraWeight)), default=0)
