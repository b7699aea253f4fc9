"""One step of training: a pure function from state and batch to state and metrics."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import struct
from jax import lax
from jaxtyping import Array, Shaped

from llama_jax.config import LlamaConfig
from llama_jax.config.validation import require_positive_int
from llama_jax.errors import ConfigError
from llama_jax.model.forward_options import Sharding, identity
from llama_jax.model.params import Llama
from llama_jax.ops.cross_entropy import LossSums
from llama_jax.ops.platform import update_if
from llama_jax.ops.weights.layers import MixedStack
from llama_jax.training.batch import Batch, predicted_count
from llama_jax.training.loss import LossOptions, TaskSums, total_loss

Loss = Callable[[LlamaConfig, Llama, Any, LossOptions, Sharding], LossSums | TaskSums]
Updated = tuple[Llama, Any, Llama | None]  # parameters, the optimizer's state, and the moving average


class TrainState(struct.PyTreeNode):
    """The state of training between steps: an immutable pytree.

    Attributes:
      step: int32[], steps taken, including skipped ones.
      params: the parameters, in the dtype in which they are updated.
      opt_state: the optimizer's state; for AdamW two numbers per parameter.
      ema: the exponential moving average of the parameters, or None.
      skipped: int32[], steps whose loss or gradients were not finite: they changed nothing but these counters.
      skipped_in_a_row: int32[], how many of the most recent steps in a row were skipped.
    """

    step: Any
    params: Llama
    opt_state: Any
    ema: Llama | None = None
    skipped: Any = 0
    skipped_in_a_row: Any = 0


def init_state(
    optimizer: optax.GradientTransformation,
    params: Llama,
    *,
    ema: bool = False,
    dtype: jax.typing.DTypeLike | None = None,
) -> TrainState:
    """The state before the first step; with `ema` it keeps a moving average as well, which starts as the parameters.

    Args:
      dtype: of the parameters in the state. None converts 16-bit ones, in which most updates would round to nothing, to
        float32 (`Compute("bfloat16")` still computes in bfloat16), and keeps others.
    """
    is_mixed = lambda leaf: isinstance(leaf, MixedStack)
    if any(map(is_mixed, jax.tree.leaves(params, is_leaf=is_mixed))):
        from llama_jax.model.trees import layers_together

        params = layers_together(params)
    if dtype is None:
        params = jax.tree.map(lambda x: x.astype(jnp.float32) if x.dtype.itemsize == 2 else x, params)
    else:
        params = jax.tree.map(lambda x: x.astype(dtype), params)
    zero = partial(jnp.zeros, (), jnp.int32)
    average = jax.tree.map(jnp.copy, params) if ema else None  # copied: both are donated to the step
    return TrainState(zero(), params, optimizer.init(params), average, zero(), zero())


@dataclass(frozen=True)
class StepOptions:
    """Options of a training step.

    Attributes:
      loss: how the loss is computed. With `Compute("bfloat16")`, float32 parameters keep updates below bfloat16's resolution
        (Micikevicius et al. 2018, section 3.1).
      accumulate: number of microbatches of a batch, run one after the other, so that the activations of only one are alive;
        the gradients are summed in the parameters' dtype.
      ema_decay: of the moving average that the state keeps; with a warm-up, at most (1 + n) / (10 + n) after n updates.
      count: maps a batch to the divisor of its summed loss, float32[]; by default the number of predicted tokens.
      virtual_shards: shards into which the batch is divided on any number of devices, a power of two. Their gradients are
        summed in one fixed order, so that losses, gradients and parameters have the same bits on every mesh of `data` and
        `fsdp` and under pmap, see `training.exact_gradients`. The optimizer must compute each number of its state by itself,
        as AdamW does, and Muon does not. 0 leaves the order to the compiler.

    Raises:
      ConfigError: an invalid value.
    """

    loss: LossOptions = LossOptions()
    accumulate: int = 1
    ema_decay: float = 0.0
    count: Callable[[Any], jax.Array] = predicted_count
    virtual_shards: int = 0

    def __post_init__(self) -> None:
        require_positive_int("accumulate", self.accumulate)
        if self.virtual_shards:
            from llama_jax.training.exact_gradients import check_virtual_shards

            check_virtual_shards(self.virtual_shards)
        if not 0 <= self.ema_decay < 1:
            raise ConfigError(f"ema_decay={self.ema_decay} must be at least 0 and below 1")


def train_step(
    config: LlamaConfig,
    optimizer: optax.GradientTransformation,
    state: TrainState,
    batch: Batch | Any,
    options: StepOptions = StepOptions(),
    sharding: Sharding = Sharding(),
    loss: Loss = total_loss,
) -> tuple[TrainState, dict[str, Shaped[Array, ""]]]:
    """One optimizer update on `batch`. Intended for `jax.jit` with the state donated.

    Llama is trained without dropout (Touvron et al. 2023), so a step needs no random numbers.

    Args:
      optimizer: from `make_optimizer`, which clips gradients; or any of optax.
      batch: B rows; every predicted token has the same weight, however the tokens are spread over rows and devices. With
        your own loss, any pytree of arrays [B, ...] for which `options.count` gives the divisor of its losses.
      loss: your own loss, with the arguments and the result of `total_loss`: sums over the predicted tokens; or as
        `TaskSums`.

    Returns:
      The next state, and the metrics of this step before the update: "loss", the mean nll in nats per predicted token
      (without z-loss); "grad_norm", the Euclidean norm of all gradients; "tokens", how many were predicted, on all devices;
      float32[] each. If the first two
      are not finite, only the counters of the state have changed. "skipped" and "skipped_in_a_row" are the counters after
      the step. With `TaskSums` the metrics also have its `metrics`, summed over all rows and undivided.

    Raises:
      ConfigError: rows that cannot be divided by `accumulate` or `virtual_shards`; an `ema_decay` for a state without a
        moving average.
      MeshError: a mesh that `virtual_shards` cannot be divided over, or with an axis `tensor` or `context`.
    """
    if options.ema_decay and state.ema is None:
        raise ConfigError(
            f"ema_decay={options.ema_decay}, but the state keeps no average; make it with init_state(ema=True)"
        )
    with sharding.context():
        batch = jax.tree.map(jnp.asarray, batch)
        (nll, task_metrics), gradients, count, norm = _gradients(config, state, batch, options, sharding, loss)
        finite = jnp.isfinite(nll) & jnp.isfinite(norm)
        state = _updated(optimizer, state, gradients, norm, finite, options)
    counters = {"skipped": state.skipped, "skipped_in_a_row": state.skipped_in_a_row}
    return state, {"loss": nll, "grad_norm": norm, "tokens": count, **counters, **task_metrics}


def _gradients(
    config: LlamaConfig, state: TrainState, batch: Any, options: StepOptions, sharding: Sharding, loss: Loss
) -> tuple[tuple[jax.Array, dict[str, jax.Array]], Llama, jax.Array, jax.Array]:
    """Mean nll and further sums, the gradients of the mean loss, the divisor, and the gradients' norm, over all devices."""
    params = state.params
    if options.virtual_shards:
        from llama_jax.training.exact_gradients import exact_gradients

        alone = Sharding(prepare_params=sharding.prepare_params)
        differentiate = partial(_part_gradients, config, options=options, sharding=alone, loss=loss)
        shards = options.virtual_shards
        return exact_gradients(differentiate, options.count, params, batch, shards, sharding, state.step)
    psum = identity if sharding.axis_name is None else partial(lax.psum, axis_name=sharding.axis_name)
    if sharding.axis_name is not None:  # each device differentiates its part of the mean; they are summed at the end
        params = _as_varying(params, sharding.axis_name)
    count = psum(options.count(batch))
    reported, gradients = psum(_part_gradients(config, params, batch, count, options, sharding, loss))
    wide = jax.tree.map(lambda g: g.astype(jnp.promote_types(g.dtype, jnp.float32)), gradients)
    norm = optax.tree.norm(wide)  # squares of 16 bits would overflow, and lose the small ones
    return reported, gradients, count, norm


def _part_gradients(
    config: LlamaConfig,
    params: Llama,
    batch: Any,
    count: jax.Array,
    options: StepOptions,
    sharding: Sharding,
    loss: Loss,
) -> tuple[tuple[jax.Array, dict[str, jax.Array]], Llama]:
    """What rows add to the mean nll, the further sums and the gradients, given the divisor of all rows."""

    def mean_loss(params: Llama, batch: Any) -> tuple[jax.Array, Any]:
        sums = loss(config, sharding.prepare_params(params), batch, options.loss, sharding)
        metrics = sums.metrics if isinstance(sums, TaskSums) else {}
        return sums.loss / jnp.maximum(count, 1), (sums.nll / jnp.maximum(count, 1), metrics)

    differentiate = jax.value_and_grad(mean_loss, has_aux=True)

    def add(sums: Any, part: Any) -> tuple[Any, None]:
        (_, reported), gradients = differentiate(params, part)
        return jax.tree.map(jnp.add, sums, (reported, gradients)), None

    if options.accumulate == 1:
        (_, reported), gradients = differentiate(params, batch)
        return reported, gradients
    parts = microbatches(batch, options.accumulate)
    shapes = jax.eval_shape(differentiate, params, jax.tree.map(lambda x: x[0], parts))
    start = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), (shapes[0][1], shapes[1]))
    if sharding.axis_name is not None:
        start = _as_varying(start, sharding.axis_name)
    return lax.scan(add, start, parts)[0]


def _as_varying(tree: Any, axis_name: str) -> Any:
    """The same values, marked as varying between the devices along the axis.

    Under `jax.shard_map`, gradients of replicated values would otherwise be psummed in every microbatch.
    """
    return lax.pcast(tree, axis_name, to="varying")


def _updated(
    optimizer: optax.GradientTransformation,
    state: TrainState,
    gradients: Llama,
    norm: jax.Array,
    finite: jax.Array,
    options: StepOptions,
) -> TrainState:
    """The next state; if the gradients are not finite, the same except for the counters."""
    apply = optax.with_extra_args_support(optimizer)

    def update(before: Updated) -> Updated:
        params, opt_state, ema = before
        with jax.numpy_dtype_promotion("standard"):  # which optax relies on, as in decay**count
            updates, opt_state = apply.update(gradients, opt_state, params, grad_norm=norm)
        params = optax.apply_updates(params, updates)
        if ema is not None:
            ema = _average(ema, params, state.step - state.skipped, options.ema_decay)
        return params, opt_state, ema

    params, opt_state, ema = update_if(finite, update, (state.params, state.opt_state, state.ema))
    skipped = 1 - finite.astype(jnp.int32)
    return TrainState(
        step=state.step + 1,
        params=params,
        opt_state=opt_state,
        ema=ema,
        skipped=state.skipped + skipped,
        skipped_in_a_row=(state.skipped_in_a_row + 1) * skipped,
    )


def microbatches(batch: Any, parts: int) -> Any:
    """[B, ...] as [parts, B / parts, ...]; every part has rows from every device over which B may be sharded.

    Raises:
      ConfigError: rows that cannot be divided into `parts`.
    """
    rows = jax.tree.leaves(batch)[0].shape[0]
    if rows % parts:
        raise ConfigError(f"a batch of {rows} rows cannot be divided into accumulate={parts} equal parts; pass a divisor")
    return jax.tree.map(lambda x: x.reshape(rows // parts, parts, *x.shape[1:]).swapaxes(0, 1), batch)


def _average(ema: Llama, params: Llama, updates: jax.Array, decay: float) -> Llama:
    """Update the EMA (Polyak & Juditsky 1992), with a decay warm-up of (1 + n) / (10 + n)."""
    keep = jnp.minimum(decay, (1.0 + updates) / (10.0 + updates))
    return jax.tree.map(lambda old, new: (old + (1 - keep) * (new - old)).astype(old.dtype), ema, params)
