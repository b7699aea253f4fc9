"""The sharding of all arrays: a partition spec for each, before anything is compiled.

The sharding of a `Llama` is a `Llama` of `PartitionSpec`s. `tensor` splits heads and features, so that a layer needs one sum
over the devices after attention and one after the feed-forward (Shoeybi et al. 2019, section 3); `fsdp` splits the axis D,
which every matrix has; `data` and `fsdp` together split the batch; `context` splits its rows by tokens, see
`ring_attention`.

`context` also splits everything that `fsdp` splits. Its devices have different tokens and must sum their gradients anyway,
as if they had different rows. So they can also shard the state, like those of `fsdp` (Rajbhandari et al. 2020): for 8
billion parameters on context=8, each has 16 GB instead of 128, and with 16-bit weights there is no additional communication.
"""

from __future__ import annotations

import math
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
from llama_jax.errors import MeshError
from llama_jax.model.cache import KVCache
from llama_jax.model.forward_options import Sharding, identity
from llama_jax.model.lora import Lora, adapter_shapes, build_adapters
from llama_jax.model.params import Llama, ParamSpec, specs_for
from llama_jax.model.trees import build, is_weight, param_shapes
from llama_jax.ops.attention import HeadSharding
from llama_jax.ops.int8 import Quantized
from llama_jax.ops.moe import ExpertSharding
from llama_jax.ops.weights.layers import MixedStack
from llama_jax.ops.weights.lora import LowRank, LowRankWeight
from llama_jax.ops.weights.quantized_matmul import JoinedWeight, QuantizedWeight, shardings_of_planes
from llama_jax.parallel import padding
from llama_jax.parallel.mesh import MeshSizes
from llama_jax.parallel.ring_attention import BATCH, PARTS, check_length, ring_attention, sequence_splitter
from llama_jax.training.step import TrainState, init_state, train_step

EXPERTS = ExpertSharding(
    PARTS, ("tensor",), ("fsdp", "context")
)  # axes that split a step's rows, and F and D of the experts


def param_specs(config: LlamaConfig, sizes: MeshSizes, *, padded: bool = False) -> Llama:
    """A `Llama` of partition specs.

    In training, a model keeps its shapes on every mesh, so that every checkpoint fits every mesh. If `tensor` cannot split
    the rows of a parameter, because `pad_params` would have to pad them or copy heads first, `tensor` and `fsdp` together
    split its columns.

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

    return build(config, partition)


def _with_context(spec: P, sizes: MeshSizes) -> P:
    """The spec with `context` after `fsdp`, if the mesh splits over it."""
    if sizes.context == 1:
        return spec
    cut: list[Any] = []
    for axes in spec:
        names = (axes,) if isinstance(axes, str) else axes or ()
        several = tuple(name for axis in names for name in (("fsdp", "context") if axis == "fsdp" else (axis,)))
        cut.append(several if len(several) > 1 else axes)
    return P(*cut)


def adapter_specs(config: LlamaConfig, sizes: MeshSizes, lora: Lora, *, padded: bool = False) -> Llama:
    """Partition specs of adapters: A is split by columns and B by rows, like their matrices, and neither by rank.

    Args:
      padded: as for `param_specs`.

    Raises:
      MeshError: as for `param_specs`.
    """
    specs = param_specs(config, sizes, padded=padded)

    return build_adapters(config, lora, lambda spec, shape: _specs_of_pair(attrgetter(spec.path)(specs), shape))


def _specs_of_pair(matrix: P, pair: LowRank) -> LowRank:
    """The partition specs of a matrix's adapter; the matrix's spec must have an entry for each of its axes."""
    magnitude = None if pair.magnitude is None else P(*matrix[:-1])
    return LowRank(P(*[None] * (pair.a.ndim - 1), matrix[-1]), P(*matrix[:-1], None), magnitude)


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
        lambda kept, spec: kept if _left_out(kept) else spec,
        state.opt_state,
        params,
        transform_non_params=lambda _: P(),
        is_leaf=_left_out,
    )
    average = params if ema else None
    return state.replace(step=P(), params=params, opt_state=opt_state, ema=average, skipped=P(), skipped_in_a_row=P())


def _left_out(kept: Any) -> bool:
    """Whether a part of an optimizer has no state for a parameter, such as Muon for parameters that AdamW updates."""
    return isinstance(kept, optax.MaskedNode)


def cache_specs(config: LlamaConfig, sizes: MeshSizes, batch: int, *, quantized: bool = False) -> KVCache:
    """A `KVCache` of partition specs: rows over `data` and `fsdp`, key/value heads over `tensor`.

    Args:
      config: the configuration of the model on the mesh, see `padded_config`.
      quantized: whether the specs are for an int8 cache.

    Raises:
      MeshError: heads or rows cannot be split over the mesh.
    """
    _check("n_kv_heads", config.n_kv_heads, "tensor", sizes.tensor, config.n_kv_heads)
    rows = batch_spec(sizes, batch)
    spec = P(None, *rows, None, "tensor")  # [L, P, page, 2K, H]
    return KVCache(Quantized(spec, spec) if quantized else spec, table=rows, length=rows)


def batch_spec(sizes: MeshSizes, batch: int, length: int | None = None) -> P:
    """The spec of a batch's first axis: split over `data` and `fsdp`.

    Args:
      length: T, predicted tokens of a row, if a step divides them over `context`; else None.

    Raises:
      MeshError: the rows of the batch, or the tokens of a row, cannot be split that way.
    """
    _check("batch", batch, "data*fsdp", sizes.rows, batch)
    if length is not None:
        check_length(sizes, length)
    return P(BATCH)


def check_model(config: LlamaConfig, sizes: MeshSizes) -> None:
    """Raise MeshError, with sizes that work, for a dimension of the model that cannot be split over the mesh."""
    padding.padded_config(config, sizes)
    if _padded_paths(config, sizes):
        axes = "fsdp*tensor" if sizes.context == 1 else "fsdp*context*tensor"
        _check("dim", config.dim, axes, sizes.columns * sizes.tensor, config.dim)


def _padded_paths(config: LlamaConfig, sizes: MeshSizes) -> tuple[str, ...]:
    """Paths of the parameters that `pad_params` changes."""
    padded = padding.padded_vocab(config, sizes) != config.vocab_size
    copied = config.n_kv_heads % sizes.tensor != 0
    return tuple(r.path for r in specs_for(config) if (r.has_vocabulary and padded) or (padding.has_groups(r) and copied))


def _check(name: str, value: int, axis: str, size: int, fit: int) -> None:
    """Check that `size` divides `fit` (the value itself, or a common divisor of several values), whose divisors work."""
    if value % size:
        small = [n for n in range(1, math.isqrt(fit) + 1) if fit % n == 0]
        nearest = sorted({*small, *(fit // n for n in small)}, key=lambda n: abs(n - size))[:12]
        would_do = ", ".join(map(str, sorted(nearest)))
        raise MeshError(f"{name}={value} cannot be split over {axis}={size}; {would_do} would do")


def constrain_over(mesh: Mesh) -> Callable[[jax.Array, str], jax.Array]:
    """The `constrain` of `forward` and `next_token_loss` for a mesh.

    XLA propagates the parameters' shardings to most activations. Without these constraints, it would keep the whole batch on
    every device instead of gathering the weights. If the mesh splits sequences, rows are those from
    `ring_attention.split_sequence`.
    """
    sizes = MeshSizes(**mesh.shape)
    tensor, shares = sizes.tensor, sizes.rows * sizes.context

    def constrain(x: jax.Array, where: str) -> jax.Array:
        match where:
            case "tokens":  # [B, T]: looked up by all devices with a part of the embedding's columns
                spec = P("data")
            case "embedded":  # [B, T, D] sharded like the table, which a lookup by batch would gather
                spec = P("data", None, "fsdp")
            case "residual":  # [B, T, D] between layers: saved for the backward pass (Korthikanti et al. 2022, section 4.2)
                # With one row per device, XLA would keep T split in the products, and gather their weights for that.
                split = x.shape[1] % tensor == 0 and x.shape[0] > shares
                spec = P(BATCH, "tensor" if split else None)
            # [B, T, D]: whole rows, forward and backward; otherwise weights would be gathered
            case "hidden" | "sublayer_input" | "sublayer_output":
                spec = P(BATCH)
            case "logits":  # [B, T, V]
                spec = P(BATCH, None, "tensor")
            case "lm_head_sharded":  # [V, D] as sharded: cast first and then gathered
                spec = P("tensor", "fsdp")
            case "lm_head_gathered":  # [V, D]: gathered once, for all chunks of logits
                spec = P("tensor")
            case "lm_head_gradient":  # [shares, D, V]: from its own rows, on every device
                spec = P(BATCH, None, "tensor")
            case _:
                raise ValueError(f"the model has no constraint point {where!r}")
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

        return padding.over_rows_of(leaf, gather)

    def fit_params(params: Llama) -> Llama:
        if not is_padded:
            return params
        if config.n_kv_heads % sizes.tensor:  # otherwise XLA cannot follow the heads to their copies and back
            params = padding.map_params(params, gather_heads)
        fitted = padding.pad_params(config, sizes, params)
        return lax.with_sharding_constraint(fitted, shardings_like(fitted, specs))

    ring = sizes.context > 1
    sharding = Sharding(
        constrain=constrain_over(mesh),
        attend=ring_attention(mesh) if ring else None,
        head_sharding=HeadSharding(BATCH, ("tensor",)),
        experts=EXPERTS,
        reorder_batch=sequence_splitter(mesh) if ring else identity,
        prepare_params=fit_params,
        batch_shards=sizes.rows * sizes.context,
        mesh=mesh.abstract_mesh,
    )
    return padding.padded_config(config, sizes), sharding


def evaluation_sharding(config: LlamaConfig, mesh: Mesh) -> tuple[LlamaConfig, Sharding]:
    """Like `training_sharding`, only for evaluation: each row is whole on one device, also along `context`.

    Without a backward pass, a row takes little memory, and keys need not go around a ring. The number of rows must be a
    multiple of `batch_shards`.

    Raises:
      MeshError: a dimension cannot be split over the mesh.
    """
    config, sharding = training_sharding(config, mesh)
    if sharding.reorder_batch is identity:
        return config, sharding
    return config, replace(
        sharding, attend=None, head_sharding=HeadSharding((*BATCH, "context"), ("tensor",)), reorder_batch=identity
    )


def step_over(config: LlamaConfig, mesh: Mesh) -> Callable[..., tuple[TrainState, dict[str, jax.Array]]]:
    """`train_step` over a mesh, with configuration and sharding bound; the remaining arguments start with the optimizer.

    Call it under `jax.jit`, with a state sharded by `train_state_specs` and rows sharded by P(("data", "fsdp")).

    Raises:
      MeshError: a dimension cannot be split over the mesh.
    """
    config, sharding = training_sharding(config, mesh)
    return partial(train_step, config, sharding=sharding)


def shardings_like(params: Llama, matrices: Llama) -> Llama:
    """Shardings for all arrays of the parameters, given those of the matrices they represent."""

    def of(leaf: Any, place: Any) -> Any:
        if isinstance(leaf, QuantizedWeight):
            return leaf.replace(planes=shardings_of_planes(leaf.form, place, leaf.ndim))
        if isinstance(leaf, MixedStack):
            return leaf.replace(stacks=tuple(of(stack, place) for stack in leaf.stacks))
        if isinstance(leaf, JoinedWeight):
            return leaf.replace(parts=tuple(of(part, place) for part in leaf.parts))
        if isinstance(leaf, LowRankWeight):
            pair = jax.tree.map(lambda spec: place.update(spec=spec), _specs_of_pair(place.spec, leaf.low_rank))
            factor = None if leaf.factor is None else place.update(spec=P(*place.spec[:-1]))
            return leaf.replace(base=of(leaf.base, place), low_rank=pair, factor=factor)
        return place

    is_leaf = lambda leaf: is_weight(leaf) or isinstance(leaf, LowRankWeight)
    return jax.tree.map(of, params, matrices, is_leaf=is_leaf)


def shardings(mesh: Mesh, specs: Any) -> Any:
    """The tree with a `NamedSharding` for each partition spec: for `jax.device_put` and `jax.jit`."""
    return jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs)
