"""The sharding of all arrays: a partition spec for each, before anything is compiled.

The sharding of a `LlamaParams` is a `LlamaParams` of `PartitionSpec`s. Tensor parallelism: `tensor` shards heads and
features, so that a layer needs one all-reduce after attention and one after the feed-forward (Shoeybi et al. 2019, section
3). Fully sharded data parallelism: `fsdp` shards the axis D, which every matrix has. Data parallelism: `data` and `fsdp`
together shard the batch. Context parallelism: `context` shards the tokens of each row, see `ring_attention`.

`context` also shards everything that `fsdp` shards. Its devices have different tokens and must sum their gradients anyway,
as if they had different rows. So they can also shard the state, like those of `fsdp` (Rajbhandari et al. 2020): for 8
billion parameters on context=8, each has 16 GB instead of 128, and with 16-bit weights there is no additional communication.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from operator import attrgetter
from typing import Any

import jax
import optax
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from llama_jax.config import LlamaConfig
from llama_jax.model.cache import KVCache
from llama_jax.model.forward_options import Sharding, identity
from llama_jax.model.lora import Lora, adapter_shapes, build_adapters
from llama_jax.model.params import LlamaParams, ParamSpec, specs_for
from llama_jax.model.trees import build_tree, is_weight, param_shapes
from llama_jax.ops.attention import HeadSharding
from llama_jax.ops.int8 import Quantized
from llama_jax.ops.moe import ExpertSharding
from llama_jax.ops.weights.layers import MixedStack
from llama_jax.ops.weights.lora import LowRank, LowRankWeight
from llama_jax.ops.weights.quantized_matmul import JoinedWeight, QuantizedWeight, shardings_of_planes
from llama_jax.parallel import padding
from llama_jax.parallel.mesh import MeshSizes, check_divisible
from llama_jax.parallel.ring_attention import (
    BATCH_AND_CONTEXT_AXES,
    BATCH_AXES,
    check_length,
    ring_attention,
    sequence_splitter,
)
from llama_jax.training.step import TrainState, init_state, train_step

# The mesh axes that shard the rows of a batch, and the axes F and D of the experts.
EXPERT_SHARDING = ExpertSharding(BATCH_AND_CONTEXT_AXES, ("tensor",), ("fsdp", "context"))


def param_specs(config: LlamaConfig, sizes: MeshSizes, *, padded: bool = False) -> LlamaParams:
    """A `LlamaParams` of partition specs.

    In training, parameters are stored with the same shapes on every mesh, so that every checkpoint fits every mesh. If
    `tensor` cannot shard the rows of a parameter without padding or copied heads (`pad_params`), `tensor` and `fsdp`
    together shard its columns instead.

    Args:
      padded: whether the specs are for parameters from `pad_params`.

    Raises:
      MeshError: a dimension cannot be split over the mesh; the message gives sizes that work.
    """
    check_model(config, sizes)
    padded_paths = () if padded else _padded_paths(config, sizes)

    def partition(spec: ParamSpec) -> P:
        axes = spec.partition
        if spec.path in padded_paths:
            axes = P(*(None,) * (len(axes) - 1), ("fsdp", "tensor")) if spec.axes.endswith("D") else P()
        axes = _with_context(axes, sizes)
        return P(None, *axes) if spec.in_blocks else axes

    return build_tree(config, partition)


def _with_context(spec: P, sizes: MeshSizes) -> P:
    """The spec with `context` after each `fsdp`, if the mesh has more than one device along `context`."""
    if sizes.context == 1:
        return spec
    partition: list[Any] = []
    for axes in spec:
        names = (axes,) if isinstance(axes, str) else axes or ()
        expanded = tuple(name for axis in names for name in (("fsdp", "context") if axis == "fsdp" else (axis,)))
        partition.append(expanded if len(expanded) > 1 else axes)
    return P(*partition)


def adapter_specs(config: LlamaConfig, sizes: MeshSizes, lora: Lora, *, padded: bool = False) -> LlamaParams:
    """Partition specs of adapters: A is sharded by columns and B by rows, like their matrices, and neither by rank.

    Args:
      padded: as for `param_specs`.

    Raises:
      MeshError: as for `param_specs`.
    """
    specs = param_specs(config, sizes, padded=padded)

    return build_adapters(config, lora, lambda spec, shape: _low_rank_specs(attrgetter(spec.path)(specs), shape))


def _low_rank_specs(matrix: P, low_rank: LowRank) -> LowRank:
    """The partition specs of a matrix's adapter; the matrix's spec must have an entry for each of its axes."""
    magnitude = None if low_rank.magnitude is None else P(*matrix[:-1])
    return LowRank(P(*[None] * (low_rank.a.ndim - 1), matrix[-1]), P(*matrix[:-1], None), magnitude)


def train_state_specs(
    config: LlamaConfig,
    sizes: MeshSizes,
    optimizer: optax.GradientTransformation,
    *,
    ema: bool = False,
    lora: Lora | None = None,
) -> TrainState:
    """A `TrainState` of partition specs: optimizer state is sharded like its parameter.

    With `NamedSharding(mesh, spec)` in place of each spec, it can be passed to `jax.jit` as `out_shardings`.

    Args:
      ema: whether the state has a moving average.
      lora: the settings, if the parameters are adapters.
    """
    params = param_specs(config, sizes) if lora is None else adapter_specs(config, sizes, lora)
    shapes = param_shapes(config) if lora is None else adapter_shapes(config, lora)
    state = jax.eval_shape(lambda params: init_state(optimizer, params), shapes)
    opt_state = optax.tree_map_params(
        optimizer,
        lambda leaf, spec: leaf if _is_masked(leaf) else spec,
        state.opt_state,
        params,
        transform_non_params=lambda _: P(),
        is_leaf=_is_masked,
    )
    average = params if ema else None
    return state.replace(step=P(), params=params, opt_state=opt_state, ema=average, skipped=P(), skipped_in_a_row=P())


def _is_masked(leaf: Any) -> bool:
    """Whether a part of an optimizer has no state for a parameter, such as Muon for parameters that AdamW updates."""
    return isinstance(leaf, optax.MaskedNode)


def cache_specs(config: LlamaConfig, sizes: MeshSizes, batch: int, *, quantized: bool = False) -> KVCache:
    """A `KVCache` of partition specs: rows over `data` and `fsdp`, key/value heads over `tensor`.

    Args:
      config: the configuration of the model on the mesh, see `padded_config`.
      quantized: whether the specs are for an int8 cache.

    Raises:
      MeshError: heads or rows cannot be split over the mesh.
    """
    check_divisible("n_kv_heads", config.n_kv_heads, "tensor", sizes.tensor)
    rows = batch_spec(sizes, batch)
    spec = P(None, *rows, None, "tensor")  # [L, P, page, 2K, H]
    return KVCache(Quantized(spec, spec) if quantized else spec, table=rows, length=rows)


def batch_spec(sizes: MeshSizes, batch: int, length: int | None = None) -> P:
    """The spec of a batch [B, ...]: rows over `data` and `fsdp`.

    Args:
      length: T, target tokens of a row, if a step shards them over `context`, to check it; else None.

    Raises:
      MeshError: the rows of the batch, or the tokens of a row, cannot be split that way.
    """
    check_divisible("batch", batch, "data*fsdp", sizes.rows)
    if length is not None:
        check_length(sizes, length)
    return P(BATCH_AXES)


def check_model(config: LlamaConfig, sizes: MeshSizes) -> None:
    """Raise MeshError, with sizes that work, for a dimension of the model that cannot be split over the mesh."""
    padding.padded_config(config, sizes)
    if _padded_paths(config, sizes):
        axes = "fsdp*tensor" if sizes.context == 1 else "fsdp*context*tensor"
        check_divisible("dim", config.dim, axes, sizes.columns * sizes.tensor)


def _padded_paths(config: LlamaConfig, sizes: MeshSizes) -> tuple[str, ...]:
    """Paths of the parameters that `pad_params` changes."""
    pads_vocab = padding.padded_vocab(config, sizes) != config.vocab_size
    copies_heads = config.n_kv_heads % sizes.tensor != 0
    return tuple(
        spec.path
        for spec in specs_for(config)
        if (spec.has_vocabulary and pads_vocab) or (padding.has_groups(spec) and copies_heads)
    )


def make_constrain(mesh: Mesh) -> Callable[[jax.Array, str], jax.Array]:
    """Make the `Sharding.constrain` of `forward` and the losses for a mesh.

    XLA propagates the parameters' shardings to most activations. Without these constraints, it would keep the whole batch on
    every device instead of gathering the weights. On a mesh with `context`, B is the n * B rows of
    `ring_attention.split_sequence`.
    """
    sizes = MeshSizes(**mesh.shape)
    tensor, batch_shards = sizes.tensor, sizes.rows * sizes.context

    def constrain(x: jax.Array, name: str) -> jax.Array:
        match name:
            case "tokens":  # [B, T]: replicated over fsdp, whose devices each look up their columns of the embedding
                spec = P("data")
            case "embedded":  # [B, T, D] sharded like the embedding; rows over fsdp would gather the embedding
                spec = P("data", None, "fsdp")
            # [B, T, D] between layers, saved for the backward pass: sequence parallelism (Korthikanti et al. 2022, 4.2)
            case "residual":
                # With one row per device, XLA would keep T sharded in the matmuls, and gather their weights for that.
                shards_length = x.shape[1] % tensor == 0 and x.shape[0] > batch_shards
                spec = P(BATCH_AXES, "tensor" if shards_length else None)
            # [B, T, D]: T is not sharded, forward and backward; otherwise weights would be gathered
            case "hidden" | "sublayer_input" | "sublayer_output":
                spec = P(BATCH_AXES)
            case "logits":  # [B, chunk, V]
                spec = P(BATCH_AXES, None, "tensor")
            case "lm_head_sharded":  # [V, D] as stored: cast first and then gathered
                spec = P("tensor", "fsdp")
            case "lm_head_gathered":  # [V, D]: gathered over fsdp once, for all chunks of logits
                spec = P("tensor")
            case "lm_head_gradient":  # [batch_shards, D, V]: each device's sum over its own rows
                spec = P(BATCH_AXES, None, "tensor")
            case _:
                raise ValueError(f"the model has no constraint point {name!r}")
        return lax.with_sharding_constraint(x, NamedSharding(mesh, _with_context(spec, sizes)))

    return constrain


def training_sharding(config: LlamaConfig, mesh: Mesh) -> tuple[LlamaConfig, Sharding]:
    """The configuration of the model on the mesh, and the sharding for training.

    Raises:
      MeshError: a dimension cannot be split over the mesh.
    """
    sizes = MeshSizes(**mesh.shape)
    if sizes.devices == 1:
        return config, Sharding(mesh=mesh.abstract_mesh)
    specs = shardings(mesh, param_specs(config, sizes, padded=True))
    is_padded = bool(_padded_paths(config, sizes))

    def gather_heads(spec: ParamSpec, leaf: Any) -> Any:
        if not padding.has_groups(spec):
            return leaf

        def gather(array: jax.Array) -> jax.Array:
            has_columns = len(spec.partition) > 1 and array.shape[-1] == config.dim  # not a bias or B
            columns = P(*[None] * (array.ndim - 1), spec.partition[-1] if has_columns else None)
            return lax.with_sharding_constraint(array, NamedSharding(mesh, _with_context(columns, sizes)))

        return padding.map_matrix_rows(leaf, gather)

    def prepare_params(params: LlamaParams) -> LlamaParams:
        """Pad the vocabulary and copy key/value heads, if `tensor` requires it; part of the differentiated function."""
        if not is_padded:
            return params
        if config.n_kv_heads % sizes.tensor:  # otherwise XLA cannot follow the heads to their copies and back
            params = padding.map_params(params, gather_heads)
        padded = padding.pad_params(config, sizes, params)
        return lax.with_sharding_constraint(padded, shardings_like(padded, specs))

    uses_ring = sizes.context > 1
    sharding = Sharding(
        constrain=make_constrain(mesh),
        attend=ring_attention(mesh) if uses_ring else None,
        head_sharding=HeadSharding(BATCH_AXES, ("tensor",)),
        experts=EXPERT_SHARDING,
        reorder_batch=sequence_splitter(mesh) if uses_ring else identity,
        prepare_params=prepare_params,
        batch_shards=sizes.rows * sizes.context,
        mesh=mesh.abstract_mesh,
    )
    return padding.padded_config(config, sizes), sharding


def evaluation_sharding(config: LlamaConfig, mesh: Mesh) -> tuple[LlamaConfig, Sharding]:
    """Like `training_sharding`, but for evaluation: rows are sharded over `context` too, instead of the tokens of each row.

    Without a backward pass, a row takes little memory, and no ring attention is needed. The number of rows must be a
    multiple of `batch_shards`.

    Raises:
      MeshError: a dimension cannot be split over the mesh.
    """
    config, sharding = training_sharding(config, mesh)
    if sharding.reorder_batch is identity:
        return config, sharding
    return config, replace(
        sharding, attend=None, head_sharding=HeadSharding((*BATCH_AXES, "context"), ("tensor",)), reorder_batch=identity
    )


def sharded_train_step(config: LlamaConfig, mesh: Mesh) -> Callable[..., tuple[TrainState, dict[str, jax.Array]]]:
    """`train_step` for a mesh, with configuration and sharding bound; the remaining arguments start with the optimizer.

    Call it under `jax.jit`, with a state sharded by `train_state_specs` and rows sharded by P(("data", "fsdp")).

    Raises:
      MeshError: a dimension cannot be split over the mesh.
    """
    config, sharding = training_sharding(config, mesh)
    return partial(train_step, config, sharding=sharding)


def shardings_like(params: LlamaParams, matrices: LlamaParams) -> LlamaParams:
    """Shardings for all arrays in `params`, also of quantized and LoRA weights, given those of the dense matrices."""

    def shard_leaf(leaf: Any, sharding: Any) -> Any:
        if isinstance(leaf, QuantizedWeight):
            return leaf.replace(planes=shardings_of_planes(leaf.form, sharding, leaf.ndim))
        if isinstance(leaf, MixedStack):
            return leaf.replace(stacks=tuple(shard_leaf(stack, sharding) for stack in leaf.stacks))
        if isinstance(leaf, JoinedWeight):
            return leaf.replace(parts=tuple(shard_leaf(part, sharding) for part in leaf.parts))
        if isinstance(leaf, LowRankWeight):
            low_rank_specs = _low_rank_specs(sharding.spec, leaf.low_rank)
            low_rank = jax.tree.map(lambda spec: sharding.update(spec=spec), low_rank_specs)
            factor = None if leaf.factor is None else sharding.update(spec=P(*sharding.spec[:-1]))
            return leaf.replace(base=shard_leaf(leaf.base, sharding), low_rank=low_rank, factor=factor)
        return sharding

    is_leaf = lambda leaf: is_weight(leaf) or isinstance(leaf, LowRankWeight)
    return jax.tree.map(shard_leaf, params, matrices, is_leaf=is_leaf)


def shardings(mesh: Mesh, specs: Any) -> Any:
    """The tree with a `NamedSharding` for each partition spec: for `jax.device_put` and `jax.jit`."""
    return jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs)
