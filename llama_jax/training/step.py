"""One training step: a pure function from state and batch to state and metrics."""

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
from llama_jax.model.checks import check_no_hooks
from llama_jax.model.forward_options import Sharding, identity
from llama_jax.model.params import Llama
from llama_jax.ops.cross_entropy import LossSums
from llama_jax.ops.platform import update_if
from llama_jax.ops.weights.layers import MixedStack
from llama_jax.training.batch import Batch, predicted_count
from llama_jax.training.loss import LossOptions, TaskSums, total_loss

Loss = Callable[[LlamaConfig, Llama, Any, LossOptions, Sharding], LossSums | TaskSums]
Updatable = tuple[Llama, Any, Llama | None]  # parameters, optimizer state, moving average


class TrainState(struct.PyTreeNode):
    """The state of training between steps: an immutable pytree.

    Attributes:
      step: int32[], steps taken, including skipped ones.
      params: the parameters, in the dtype in which they are updated.
      opt_state: the optimizer state; for AdamW, two numbers per parameter.
      ema: the exponential moving average of the parameters, or None.
      skipped: int32[], number of steps with a non-finite loss or gradients, which changed only `step` and these counters.
      skipped_in_a_row: int32[], consecutive skipped steps up to the last one.
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
    """The state before the first step; with `ema`, including a moving average, which starts as the parameters.

    Args:
      dtype: dtype of the parameters in the state. None converts 16-bit parameters to float32, because most updates would be
        too small to change them (`Compute("bfloat16")` still computes in bfloat16), and keeps others.

    Raises:
      ConfigError: parameters with hooks; add hooks with `Sharding.prepare_params`.
    """
    check_no_hooks(params)
    is_mixed = lambda leaf: isinstance(leaf, MixedStack)
    if any(map(is_mixed, jax.tree.leaves(params, is_leaf=is_mixed))):
        from llama_jax.model.trees import restack_layers

        params = restack_layers(params)
    if dtype is None:
        params = jax.tree.map(lambda x: x.astype(jnp.float32) if x.dtype.itemsize == 2 else x, params)
    else:
        params = jax.tree.map(lambda x: x.astype(dtype), params)
    zero = partial(jnp.zeros, (), jnp.int32)
    moving_average = jax.tree.map(jnp.copy, params) if ema else None  # copied: both are donated to the step
    return TrainState(zero(), params, optimizer.init(params), moving_average, zero(), zero())


@dataclass(frozen=True)
class StepOptions:
    """Options of a training step.

    Attributes:
      loss: how the loss is computed. With `Compute("bfloat16")`, float32 parameters keep updates below bfloat16's resolution
        (Micikevicius et al. 2018, section 3.1).
      accumulate: number of microbatches per batch. They run one after the other, so that only the activations of one are in
        memory; gradients are summed in the parameters' dtype.
      ema_decay: decay of the moving average, with a warm-up: at most (1 + n) / (10 + n) after n updates.
      count: maps a batch to the divisor of its summed loss, float32[]; by default the number of predicted tokens.
      virtual_shards: number of shards of the batch, a power of two, on any number of devices. Their gradients are summed in
        a fixed order, so that losses, gradients and parameters are bit-identical on every mesh of `data` and `fsdp`, and
        under pmap, see `training.exact_gradients`. The optimizer must be elementwise, like AdamW but not Muon. 0: the
        compiler chooses the order.

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
    """One optimizer update on `batch`, to be called under `jax.jit` with the state donated.

    Llama is trained without dropout (Touvron et al. 2023), so a step needs no random numbers.

    Args:
      optimizer: from `make_optimizer`, which clips gradients; or any optax optimizer.
      batch: B rows; every predicted token has the same weight, on any row and device. With a custom loss, any pytree of
        arrays [B, ...]; `options.count` maps it to the divisor of the loss.
      loss: a custom loss, with the arguments of `total_loss`. It returns sums over the predicted tokens: `LossSums` or
        `TaskSums`.

    Returns:
      The next state, and the metrics of this step before the update: "loss", the mean nll in nats per predicted token
      (without z-loss); "grad_norm", the Euclidean norm of all gradients; "tokens", the number of predicted tokens on all
      devices; float32[] each. If the first two are not finite, only the counters of the state change. "skipped" and
      "skipped_in_a_row" are the counters after the step. With `TaskSums` there are also its `metrics`, summed over all rows
      and undivided.

    Raises:
      ConfigError: `accumulate` or `virtual_shards` does not divide the rows; `ema_decay` with a state without a moving
        average.
      MeshError: `virtual_shards` with a mesh that does not divide them, or that has an axis `tensor` or `context`.
    """
    if options.ema_decay and state.ema is None:
        raise ConfigError(
            f"ema_decay={options.ema_decay}, but the state keeps no average; make it with init_state(ema=True)"
        )
    with sharding.context():
        batch = jax.tree.map(jnp.asarray, batch)
        (nll, task_metrics), gradients, count, norm = _gradients(config, state, batch, options, sharding, loss)
        finite = jnp.isfinite(nll) & jnp.isfinite(norm)
        state = _update_state(optimizer, state, gradients, norm, finite, options)
    counters = {"skipped": state.skipped, "skipped_in_a_row": state.skipped_in_a_row}
    return state, {"loss": nll, "grad_norm": norm, "tokens": count, **counters, **task_metrics}


def _gradients(
    config: LlamaConfig, state: TrainState, batch: Any, options: StepOptions, sharding: Sharding, loss: Loss
) -> tuple[tuple[jax.Array, dict[str, jax.Array]], Llama, jax.Array, jax.Array]:
    """(Mean nll, metrics of the task), gradients of the mean loss, divisor, and norm of the gradients, over all devices."""
    params = state.params
    if options.virtual_shards:
        from llama_jax.training.exact_gradients import exact_gradients

        one_device = Sharding(prepare_params=sharding.prepare_params)
        differentiate = partial(_gradients_of_rows, config, options=options, sharding=one_device, loss=loss)
        shards = options.virtual_shards
        return exact_gradients(differentiate, options.count, params, batch, shards, sharding, state.step)
    psum = identity if sharding.axis_name is None else partial(lax.psum, axis_name=sharding.axis_name)
    if sharding.axis_name is not None:  # each device differentiates its share of the mean; psum adds them at the end
        params = _as_varying(params, sharding.axis_name)
    count = psum(options.count(batch))
    metrics, gradients = psum(_gradients_of_rows(config, params, batch, count, options, sharding, loss))
    wide = jax.tree.map(lambda g: g.astype(jnp.promote_types(g.dtype, jnp.float32)), gradients)
    norm = optax.tree.norm(wide)  # in float32: 16-bit squares would overflow or underflow
    return metrics, gradients, count, norm


def _gradients_of_rows(
    config: LlamaConfig,
    params: Llama,
    batch: Any,
    count: jax.Array,
    options: StepOptions,
    sharding: Sharding,
    loss: Loss,
) -> tuple[tuple[jax.Array, dict[str, jax.Array]], Llama]:
    """These rows' share of (mean nll, metrics of the task) and of the gradients; `count` is the divisor for all rows."""

    def mean_loss(params: Llama, batch: Any) -> tuple[jax.Array, Any]:
        sums = loss(config, sharding.prepare_params(params), batch, options.loss, sharding)
        task_metrics = sums.metrics if isinstance(sums, TaskSums) else {}
        return sums.loss / jnp.maximum(count, 1), (sums.nll / jnp.maximum(count, 1), task_metrics)

    differentiate = jax.value_and_grad(mean_loss, has_aux=True)

    def add_microbatch(sums: Any, microbatch: Any) -> tuple[Any, None]:
        (_, metrics), gradients = differentiate(params, microbatch)
        return jax.tree.map(jnp.add, sums, (metrics, gradients)), None

    if options.accumulate == 1:
        (_, metrics), gradients = differentiate(params, batch)
        return metrics, gradients
    stacked = microbatches(batch, options.accumulate)
    shapes = jax.eval_shape(differentiate, params, jax.tree.map(lambda x: x[0], stacked))
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), (shapes[0][1], shapes[1]))
    if sharding.axis_name is not None:
        zeros = _as_varying(zeros, sharding.axis_name)
    return lax.scan(add_microbatch, zeros, stacked)[0]


def _as_varying(tree: Any, axis_name: str) -> Any:
    """The same values, marked as varying over the mapped axis.

    Under `jax.shard_map`, gradients of replicated values would otherwise be psummed in every microbatch.
    """
    return lax.pcast(tree, axis_name, to="varying")


def _update_state(
    optimizer: optax.GradientTransformation,
    state: TrainState,
    gradients: Llama,
    norm: jax.Array,
    finite: jax.Array,
    options: StepOptions,
) -> TrainState:
    """The next state; if not `finite`, only the counters change."""
    apply = optax.with_extra_args_support(optimizer)

    def update(current: Updatable) -> Updatable:
        params, opt_state, ema = current
        with jax.numpy_dtype_promotion("standard"):  # optax relies on it, as in decay**count
            updates, opt_state = apply.update(gradients, opt_state, params, grad_norm=norm)
        params = optax.apply_updates(params, updates)
        if ema is not None:
            ema = _update_ema(ema, params, state.step - state.skipped, options.ema_decay)
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
    """[B, ...] as [parts, B / parts, ...]; if B is sharded, each microbatch has rows of every device.

    Raises:
      ConfigError: `parts` does not divide the rows.
    """
    rows = jax.tree.leaves(batch)[0].shape[0]
    if rows % parts:
        raise ConfigError(f"a batch of {rows} rows cannot be divided into accumulate={parts} equal parts; pass a divisor")
    return jax.tree.map(lambda x: x.reshape(rows // parts, parts, *x.shape[1:]).swapaxes(0, 1), batch)


def _update_ema(ema: Llama, params: Llama, updates: jax.Array, decay: float | jax.Array) -> Llama:
    """Update the EMA (Polyak & Juditsky 1992), with a decay warm-up of (1 + n) / (10 + n)."""
    decay = jnp.minimum(decay, (1.0 + updates) / (10.0 + updates))
    return jax.tree.map(lambda old, new: (old + (1 - decay) * (new - old)).astype(old.dtype), ema, params)
