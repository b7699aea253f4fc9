"""LoRA: a frozen model with learned low-rank updates of its matrices (Hu et al. 2021).

Adapters are a `LlamaParams` with a `LowRank` for each adapted matrix and None elsewhere: a separate tree, which is trained
and saved by itself. `apply_adapters` joins it with the parameters of the base: each adapted matrix becomes an object with
its own matmul, so that every function for models accepts the result.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from operator import attrgetter
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import PRNGKeyArray

from llama_jax.config import LlamaConfig
from llama_jax.errors import ConfigError, short_repr
from llama_jax.model.checks import check_no_hooks
from llama_jax.model.forward_options import Sharding
from llama_jax.model.params import LlamaParams, ParamSpec
from llama_jax.model.trees import build_tree, is_weight
from llama_jax.ops.weights.lora import LoraWeight, LowRank, LowRankWeight, row_lengths
from llama_jax.ops.weights.multi_lora import MultiLoraWeight
from llama_jax.settings import PositiveFloat, PositiveInt, check_fields


class Target(NamedTuple):
    """The path of a matrix in the tree, and its part if the matrix is the fused one of queries, keys and values."""

    path: str
    part: int | None = None


# By PEFT's names, which are those of transformers' modules.
TARGETS: dict[str, Target] = {
    "q_proj": Target("blocks.attention.qkv", 0),
    "k_proj": Target("blocks.attention.qkv", 1),
    "v_proj": Target("blocks.attention.qkv", 2),
    "o_proj": Target("blocks.attention.out"),
    "gate_proj": Target("blocks.feed_forward.gate"),
    "up_proj": Target("blocks.feed_forward.up"),
    "down_proj": Target("blocks.feed_forward.down"),
}


@dataclass(frozen=True)
class Lora:
    """The settings of LoRA adapters (Hu et al. 2021).

    Attributes:
      rank: R, the rank of the matrices A [R, in] and B [out, R] of every adapter.
      alpha: B A is scaled by alpha / R, so that changing the rank does not require changing the learning rate.
      targets: names, in `TARGETS`, of the matrices that have adapters; all by default, as Schulman et al. 2025 ("LoRA
        without regret") recommend.
      rslora: B A is scaled by alpha / sqrt(R), so that high ranks learn as fast as low ones (Kalajdzievski 2023).
      dora: also learn the length of each row of the matrix, separately from its direction (Liu et al. 2024).

    Raises:
      ConfigError: an invalid value, or a target that is not a matrix of a Llama.
    """

    rank: PositiveInt = 16
    alpha: PositiveFloat = 32.0
    targets: tuple[str, ...] = tuple(TARGETS)
    rslora: bool = False
    dora: bool = False

    def __post_init__(self) -> None:
        check_fields(self, ConfigError)
        if not self.targets or not set(self.targets) <= TARGETS.keys() or len(set(self.targets)) < len(self.targets):
            raise ConfigError(f"targets={short_repr(self.targets, 200)} must be some of {', '.join(TARGETS)}, each once")

    @property
    def scale(self) -> float:
        """The factor s of an update s B A."""
        return self.alpha / (math.sqrt(self.rank) if self.rslora else self.rank)


def init_adapters(
    config: LlamaConfig,
    lora: Lora,
    key: PRNGKeyArray,
    dtype: jax.typing.DTypeLike = jnp.float32,
    base: LlamaParams | None = None,
) -> LlamaParams:
    """Initial adapters, which have no effect yet: A uniform within 1 / sqrt(D), B zero, as in PEFT.

    If only some of queries, keys and values are targets, A of the others is also zero: then the gradients of A and B are
    zero, and both stay zero. Their magnitudes also stay constant.

    Args:
      base: for DoRA, the base model: the norms of its rows are the initial magnitudes.

    Raises:
      ConfigError: a target that is not a single matrix in a model of this configuration; DoRA without a base.
    """
    if lora.dora and base is None:
        raise ConfigError("dora=True starts from the lengths of the base's rows; pass the base to init_adapters")

    def magnitude_of(spec: ParamSpec) -> jax.Array:
        lengths = row_lengths(attrgetter(spec.path)(base)).astype(dtype)
        is_target = [name in lora.targets for name in _names_at(spec.path)]
        if len(is_target) == 1:
            return lengths
        groups = config.queries_per_kv_head
        return lengths * jnp.asarray([is_target[0]] * groups + is_target[1:], lengths.dtype)[:, None]  # [L, K, G + 2, H]

    def start(spec: ParamSpec, shape: LowRank) -> LowRank:
        layers, *_, rank, columns = shape.a.shape
        bound = 1 / math.sqrt(columns)

        def draw(name: str) -> jax.Array:
            if name not in lora.targets:
                return jnp.zeros((layers, rank, columns), dtype)
            its_key = jax.random.fold_in(key, list(TARGETS).index(name))
            return jax.random.uniform(its_key, (layers, rank, columns), jnp.float32, -bound, bound).astype(dtype)

        parts = jnp.stack([draw(name) for name in _names_at(spec.path)], axis=1)
        magnitude = magnitude_of(spec) if lora.dora else None
        return LowRank(parts.reshape(shape.a.shape), jnp.zeros(shape.b.shape, dtype), magnitude)

    return build_adapters(config, lora, start)


def adapter_shapes(config: LlamaConfig, lora: Lora, dtype: jax.typing.DTypeLike = jnp.float32) -> LlamaParams:
    """The shapes of `init_adapters`, as `jax.ShapeDtypeStruct`.

    Raises:
      ConfigError: as `init_adapters`.
    """
    return build_adapters(config, lora, lambda spec, shape: shape, dtype)


def build_adapters(
    config: LlamaConfig,
    lora: Lora,
    pair_of: Callable[[ParamSpec, LowRank], Any],
    dtype: jax.typing.DTypeLike = jnp.float32,
) -> LlamaParams:
    """A `LlamaParams` with the result of a function for each matrix that has an adapter, and None elsewhere.

    Args:
      pair_of: a function of the matrix's spec and the shapes, a `LowRank` of `jax.ShapeDtypeStruct`.

    Raises:
      ConfigError: as `init_adapters`.
    """
    of_experts = [name for name in lora.targets if config.experts and "feed_forward" in TARGETS[name].path]
    if of_experts:
        raise ConfigError(
            f"targets: {of_experts[0]} is a matrix of each expert in this model, which cannot have adapters; pass some"
            " of q_proj, k_proj, v_proj, o_proj"
        )
    paths = {TARGETS[name].path for name in lora.targets}

    def leaf(spec: ParamSpec) -> Any:
        if spec.path not in paths:
            return None
        shape = spec.stacked_shape(config)
        a, b = (
            jax.ShapeDtypeStruct(pair_shape, jnp.dtype(dtype)) for pair_shape in _pair_shapes(spec.path, shape, lora.rank)
        )
        magnitude = jax.ShapeDtypeStruct(shape[:-1], jnp.dtype(dtype)) if lora.dora else None
        return pair_of(spec, LowRank(a, b, magnitude))

    return build_tree(config, leaf)


def adapter_count(config: LlamaConfig, lora: Lora) -> int:
    """The number of trained parameters in adapters."""
    widths = {"q_proj": config.queries_per_kv_head, "k_proj": 1, "v_proj": 1}  # of G + 2
    numbers = 0

    def count(spec: ParamSpec, shape: LowRank) -> None:
        nonlocal numbers
        layers, *_, columns = shape.a.shape
        for name in set(_names_at(spec.path)) & set(lora.targets):
            outputs = math.prod(shape.b.shape[1:-1])
            if name in widths:
                outputs = outputs // sum(widths.values()) * widths[name]
            numbers += layers * (lora.rank * (columns + outputs) + lora.dora * outputs)

    build_adapters(config, lora, count)
    return numbers


def apply_adapters(params: LlamaParams, adapters: LlamaParams, lora: Lora) -> LlamaParams:
    """The model with its adapters: parameters for every function for models. Nothing is copied or merged.

    Args:
      params: the base, dense or quantized, on any devices.
      adapters: from `init_adapters` or `load_adapter`.

    Raises:
      ConfigError: adapters of another model; the message names the matrix.
    """
    check_no_hooks(adapters)
    return replace_adapted(params, adapters, lora.rank, partial(_join_pair, lora))


def _join_pair(lora: Lora, matrix: Any, pair: LowRank) -> LoraWeight:
    """A matrix with its adapter."""
    if (pair.magnitude is not None) != lora.dora:
        raise ConfigError(f"dora={lora.dora}, but the adapters have {'a' if pair.magnitude is not None else 'no'} magnitude")
    return LoraWeight(matrix, pair, scale=lora.scale)


def precompute_dora_scale(params: LlamaParams) -> LlamaParams:
    """Adapted parameters for inference: DoRA's factor for each row is computed once, not for every token.

    Parameters without DoRA are returned unchanged; nothing else is copied.
    """
    return jax.tree.map(_with_factor, params, is_leaf=lambda leaf: isinstance(leaf, LowRankWeight))


def _with_factor(leaf: Any) -> Any:
    """A matrix with DoRA's factor in place of the magnitude; any other leaf as it is."""
    if not isinstance(leaf, LowRankWeight) or leaf.low_rank.magnitude is None:
        return leaf
    return leaf.replace(low_rank=leaf.low_rank.replace(magnitude=None), factor=_factors_of(leaf))


def _over_layers(of_one: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Map a function of one layer's adapted matrix over the matrices of all layers, whose formats may differ."""

    def of_all(leaf: LoraWeight | MultiLoraWeight) -> Any:
        return jax.vmap(of_one)(leaf.replace(base=leaf.base.to_dense()) if is_weight(leaf.base) else leaf)

    return jax.jit(of_all)


_factors_of = _over_layers(lambda leaf: leaf.with_dora_scale().factor)
_merge_layers = _over_layers(LoraWeight.to_dense)


def replace_adapted(
    params: LlamaParams, adapters: LlamaParams, rank: int, joined: Callable[[Any, LowRank], Any]
) -> LlamaParams:
    """The parameters, with each matrix that has a pair replaced by `joined(matrix, pair)`, see `apply_adapters`."""
    pairs = {_dotted_name(path): pair for path, pair in jax.tree.leaves_with_path(adapters, is_leaf=_is_pair)}

    def join(path: tuple[Any, ...], leaf: Any) -> Any:
        pair = pairs.pop(_dotted_name(path), None)
        if pair is None:
            return leaf
        needed = _pair_shapes(_path(path), tuple(leaf.shape), rank)
        shapes = tuple(pair.a.shape), tuple(pair.b.shape)
        if shapes != needed:
            raise ConfigError(
                f"adapter of {_dotted_name(path)}: A is {list(shapes[0])} and B is {list(shapes[1])}, but rank={rank} and a"
                f" matrix {list(leaf.shape)} need {list(needed[0])} and {list(needed[1])}; is this the adapter's base?"
            )
        return joined(leaf, pair)

    joined_params = jax.tree_util.tree_map_with_path(
        join, params, is_leaf=lambda leaf: is_weight(leaf) or isinstance(leaf, LowRankWeight)
    )
    if pairs:
        raise ConfigError(f"adapter of {min(pairs)}: the model has no such matrix; is this the adapter's base?")
    return joined_params


def base_of(params: LlamaParams) -> LlamaParams:
    """The model without the adapters that `apply_adapters` added."""
    is_adapted = lambda leaf: isinstance(leaf, LoraWeight)
    return jax.tree.map(lambda leaf: leaf.base if is_adapted(leaf) else leaf, params, is_leaf=is_adapted)


def freeze_base(sharding: Sharding, base: LlamaParams, lora: Lora) -> Sharding:
    """A `Sharding` for training a `TrainState` of adapters: `train_step` joins them with the base.

    Only the parameters in the state are differentiated, so the base has no gradient. Make the base an argument of the
    compiled function, which would otherwise contain a copy of it.

    Args:
      sharding: the sharding of the model.
      base: parameters as in full training, in any dtype or quantized.
    """
    return replace(sharding, prepare_params=lambda adapters: sharding.prepare_params(apply_adapters(base, adapters, lora)))


def merge(params: LlamaParams, adapters: LlamaParams, lora: Lora) -> LlamaParams:
    """The model with the adapters merged into its weights, W + s B A.

    Updates are added in float32, and the sum is rounded once to the dtype of the weight: 16-bit weights lose what they
    cannot represent. Quantized matrices become dense, in the dtype of their computation.

    Raises:
      ConfigError: as `apply_adapters`.
    """
    is_adapted = lambda leaf: isinstance(leaf, LoraWeight)
    joined = apply_adapters(params, adapters, lora)
    return jax.tree.map(lambda leaf: _merge_layers(leaf) if is_adapted(leaf) else leaf, joined, is_leaf=is_adapted)


def _names_at(path: str) -> list[str]:
    """The targets at a path: the matrix, or its parts."""
    return [name for name, target in TARGETS.items() if target.path == path]


def _pair_shapes(path: str, shape: tuple[int, ...], rank: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The shapes of A and B for the matrix at a path, for all layers."""
    parts = len(_names_at(path))
    several = (parts,) if parts > 1 else ()
    return (shape[0], *several, rank, shape[-1]), (*shape[:-1], rank)


def _path(path: tuple[Any, ...]) -> str:
    """The path of a `ParamSpec` from a path in a `LlamaParams`."""
    return ".".join(key.name for key in path if isinstance(key, jax.tree_util.GetAttrKey))


def _dotted_name(path: tuple[Any, ...]) -> str:
    return jax.tree_util.keystr(path, simple=True, separator=".")


def _is_pair(leaf: Any) -> bool:
    return isinstance(leaf, LowRank)
