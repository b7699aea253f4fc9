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
from llama_jax.errors import ConfigError
from llama_jax.model.checks import check_no_hooks
from llama_jax.model.forward_options import Sharding, identity
from llama_jax.model.params import LlamaParams
from llama_jax.ops.cross_entropy import LossSums
from llama_jax.ops.platform import update_if
from llama_jax.ops.weights.layers import MixedStack
from llama_jax.settings import BelowOne, PositiveInt, check_fields
from llama_jax.training.batch import Batch, replace_zero, target_count
from llama_jax.training.loss import LossOptions, total_loss

LossFn = Callable[[LlamaConfig, LlamaParams, Any, LossOptions, Sharding], LossSums]
UpdatedFields = tuple[LlamaParams, Any, LlamaParams | None]  # of a `TrainState`: params, opt_state, ema


class TrainState(struct.PyTreeNode):
    """What a training step reads and returns: an immutable pytree.

    Attributes:
      step: int32[], steps taken, including skipped ones.
      params: the parameters, in the dtype in which they are updated.
      opt_state: the optax state; for AdamW, the first and second moment of each parameter's gradient.
      ema: the exponential moving average of the parameters, or None.
      skipped: int32[], number of steps with a non-finite loss or gradient norm, which change only the counters.
      skipped_in_a_row: int32[], number of consecutive skipped steps up to now; 0 if the last step was not skipped.
    """

    step: Any
    params: LlamaParams
    opt_state: Any
    ema: LlamaParams | None = None
    skipped: Any = 0
    skipped_in_a_row: Any = 0


def init_state(
    optimizer: optax.GradientTransformation,
    params: LlamaParams,
    *,
    ema: bool = False,
    dtype: jax.typing.DTypeLike | None = None,
) -> TrainState:
    """The state before the first step.

    Args:
      params: in any dtype. Matrices in one array per layer (`model.trees.unstack_layers`) are stacked again.
      ema: keep an exponential moving average of the parameters; its initial value is `params`.
      dtype: dtype of the parameters in the state. None converts 16-bit parameters to float32 and keeps others: in 16 bits,
        most updates would round to zero. The forward pass can still compute in bfloat16 (`ComputeOptions("bfloat16")`).

    Raises:
      ConfigError: quantized weights, a `dtype` that cannot be trained, or parameters with hooks; add hooks with
        `Sharding.prepare_params`.
    """
    check_no_hooks(params)
    if not all(_is_trainable(leaf.dtype) for leaf in jax.tree.leaves(params)):
        raise ConfigError('quantized weights cannot be trained; load the model with dtype="float32", or train adapters')
    if dtype is not None and not _is_trainable(dtype):
        raise ConfigError(f"dtype={jnp.dtype(dtype).name} cannot be trained; use float32, float64, bfloat16 or float16")
    is_mixed = lambda leaf: isinstance(leaf, MixedStack)
    if any(map(is_mixed, jax.tree.leaves(params, is_leaf=is_mixed))):
        from llama_jax.model.trees import restack_layers

        params = restack_layers(params)
    if dtype is None:
        params = jax.tree.map(lambda x: x.astype(jnp.float32) if x.dtype.itemsize == 2 else x, params)
    else:
        params = jax.tree.map(lambda x: x.astype(dtype), params)
    # Separate arrays, also for equal values: a step donates all of them, and a buffer can be donated only once.
    moving_average = jax.tree.map(jnp.copy, params) if ema else None
    zero = partial(jnp.zeros, (), jnp.int32)
    return TrainState(zero(), params, optimizer.init(params), moving_average, zero(), zero())


def _is_trainable(dtype: jax.typing.DTypeLike) -> bool:
    """Whether updates can be added to arrays of this dtype: floats of at least 16 bits. The others are parts of quantized
    weights, whose values depend on scales.
    """
    return jnp.issubdtype(dtype, jnp.floating) and jnp.dtype(dtype).itemsize >= 2


@dataclass(frozen=True)
class StepOptions:
    """Options of a training step.

    Attributes:
      loss: how the loss is computed. `ComputeOptions("bfloat16")` with float32 parameters is mixed-precision training with
        master weights (Micikevicius et al. 2018, section 3.1).
      accumulate: gradient accumulation: the number of microbatches per batch. They run one after the other, so that only
        the activations of one are in memory; gradients are summed in the parameters' dtype.
      ema_decay: decay of the moving average, with a warm-up: at most (1 + n) / (10 + n) after n updates.
      count: maps a batch to the divisor of its summed loss, float32[]; by default the number of target tokens, or the sum of
        their weights. For 0 the sum is not divided.
      virtual_shards: number of equal shards of the batch, a power of two, however many devices there are. Their gradients
        are summed in a fixed order, so that losses, gradients and parameters are bit-identical on every mesh of `data` and
        `fsdp`, and under pmap, see `training.exact_gradients`. The optimizer must be elementwise, like AdamW but not Muon.
        0: no virtual shards; the order of the sums depends on the mesh.

    Raises:
      ConfigError: an invalid value.
    """

    loss: LossOptions = LossOptions()
    accumulate: PositiveInt = 1
    ema_decay: BelowOne = 0.0
    count: Callable[[Any], jax.Array] = target_count
    virtual_shards: int = 0

    def __post_init__(self) -> None:
        check_fields(self, ConfigError)
        if self.virtual_shards:
            from llama_jax.training.exact_gradients import check_virtual_shards

            check_virtual_shards(self.virtual_shards)


def train_step(
    config: LlamaConfig,
    optimizer: optax.GradientTransformation,
    state: TrainState,
    batch: Batch | Any,
    options: StepOptions = StepOptions(),
    sharding: Sharding = Sharding(),
    loss: LossFn = total_loss,
) -> tuple[TrainState, dict[str, Shaped[Array, ""]]]:
    """One training step: gradients of the mean loss over `batch`, and an optimizer update.

    Call it under `jax.jit`, with the state donated. Llama is trained without dropout (Touvron et al. 2023), so a step needs
    no random numbers.

    Args:
      optimizer: from `make_optimizer`, which clips gradients; or any optax optimizer.
      batch: B rows. Every target token has the same weight, or that of `Batch.loss_mask`, whatever its row, microbatch and
        device. With a custom loss, any pytree of arrays [B, ...]; `options.count` maps it to the divisor of the loss.
      loss: a custom loss, with the arguments and the result of `total_loss`; `LossSums.metrics` may hold more metrics.

    Returns:
      The next state, and the metrics of this step, float32[] each: "loss", the mean nll in nats per target token before the
      update, without z-loss; "grad_norm", the global norm of the gradients before clipping; "tokens", the divisor of the
      loss: the number of target tokens on all devices, or the sum of their weights. If "loss" or "grad_norm" is not finite,
      the step is skipped: only the counters of the state change. "skipped" and "skipped_in_a_row", int32[], are the counters
      after the step. There are also the `metrics` of a custom loss, summed over all rows, without division.

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
        (nll, task_metrics), gradients, divisor, grad_norm = _gradients(config, state, batch, options, sharding, loss)
        is_finite = jnp.isfinite(nll) & jnp.isfinite(grad_norm)
        state = _update_state(optimizer, state, gradients, grad_norm, is_finite, options)
    counters = {"skipped": state.skipped, "skipped_in_a_row": state.skipped_in_a_row}
    return state, {"loss": nll, "grad_norm": grad_norm, "tokens": divisor, **counters, **task_metrics}


def _gradients(
    config: LlamaConfig, state: TrainState, batch: Any, options: StepOptions, sharding: Sharding, loss: LossFn
) -> tuple[tuple[jax.Array, dict[str, jax.Array]], LlamaParams, jax.Array, jax.Array]:
    """((mean nll, metrics of a custom loss), gradients of the mean loss, divisor, global norm), each over all devices."""
    params = state.params
    if options.virtual_shards:
        from llama_jax.training.exact_gradients import exact_gradients

        one_device = Sharding(prepare_params=sharding.prepare_params)
        grad_fn = partial(_accumulated_gradients, config, options=options, sharding=one_device, loss=loss)
        shards = options.virtual_shards
        return exact_gradients(grad_fn, options.count, params, batch, shards, sharding, state.step)
    psum = identity if sharding.axis_name is None else partial(lax.psum, axis_name=sharding.axis_name)
    if sharding.axis_name is not None:  # under pmap: gradients of this device's rows, which psum adds once at the end
        params = _as_varying(params, sharding.axis_name)
    divisor = psum(options.count(batch))
    metrics, gradients = psum(_accumulated_gradients(config, params, batch, divisor, options, sharding, loss))
    in_float32 = jax.tree.map(lambda g: g.astype(jnp.promote_types(g.dtype, jnp.float32)), gradients)
    grad_norm = optax.tree.norm(in_float32)  # 16-bit squares would overflow or underflow
    return metrics, gradients, divisor, grad_norm


def _accumulated_gradients(
    config: LlamaConfig,
    params: LlamaParams,
    batch: Any,
    divisor: jax.Array,
    options: StepOptions,
    sharding: Sharding,
    loss: LossFn,
) -> tuple[tuple[jax.Array, dict[str, jax.Array]], LlamaParams]:
    """((nll, metrics of a custom loss), gradients) of these rows, with the divisor of all rows, so that parts add up."""
    divisor = replace_zero(divisor)

    def mean_loss(params: LlamaParams, batch: Any) -> tuple[jax.Array, Any]:
        sums = loss(config, sharding.prepare_params(params), batch, options.loss, sharding)
        return sums.loss / divisor, (sums.nll / divisor, sums.metrics)

    grad_fn = jax.value_and_grad(mean_loss, has_aux=True)

    def add_microbatch(sums: Any, microbatch: Any) -> tuple[Any, None]:
        (_, metrics), gradients = grad_fn(params, microbatch)
        return jax.tree.map(jnp.add, sums, (metrics, gradients)), None

    if options.accumulate == 1:
        (_, metrics), gradients = grad_fn(params, batch)
        return metrics, gradients
    stacked = microbatches(batch, options.accumulate)
    (_, metrics), gradients = jax.eval_shape(grad_fn, params, jax.tree.map(lambda x: x[0], stacked))
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), (metrics, gradients))
    if sharding.axis_name is not None:
        zeros = _as_varying(zeros, sharding.axis_name)
    return lax.scan(add_microbatch, zeros, stacked)[0]


def _as_varying(tree: Any, axis_name: str) -> Any:
    """The same values, marked as varying over the mapped axis.

    Under `jax.shard_map` or `jax.pmap`, gradients of replicated values would otherwise be psummed in every microbatch.
    """
    return lax.pcast(tree, axis_name, to="varying")


def _update_state(
    optimizer: optax.GradientTransformation,
    state: TrainState,
    gradients: LlamaParams,
    grad_norm: jax.Array,
    is_finite: jax.Array,
    options: StepOptions,
) -> TrainState:
    """The next state; if not `is_finite`, only the counters change."""
    optimizer_with_args = optax.with_extra_args_support(optimizer)

    def update(fields: UpdatedFields) -> UpdatedFields:
        params, opt_state, ema = fields
        with jax.numpy_dtype_promotion("standard"):  # optax relies on it, as in decay**count
            updates, opt_state = optimizer_with_args.update(gradients, opt_state, params, grad_norm=grad_norm)
        params = optax.apply_updates(params, updates)
        if ema is not None:
            ema = _update_ema(ema, params, state.step - state.skipped, options.ema_decay)
        return params, opt_state, ema

    params, opt_state, ema = update_if(is_finite, update, (state.params, state.opt_state, state.ema))
    skipped = 1 - is_finite.astype(jnp.int32)
    return TrainState(
        step=state.step + 1,
        params=params,
        opt_state=opt_state,
        ema=ema,
        skipped=state.skipped + skipped,
        skipped_in_a_row=(state.skipped_in_a_row + 1) * skipped,
    )


def microbatches(batch: Any, accumulate: int) -> Any:
    """[B, ...] as [accumulate, B / accumulate, ...]; if B is sharded, each microbatch has rows of every device.

    Raises:
      ConfigError: `accumulate` does not divide the rows.
    """
    rows = jax.tree.leaves(batch)[0].shape[0]
    if rows % accumulate:
        raise ConfigError(
            f"a batch of {rows} rows cannot be divided into accumulate={accumulate} equal parts; pass a divisor"
        )
    return jax.tree.map(lambda x: x.reshape(rows // accumulate, accumulate, *x.shape[1:]).swapaxes(0, 1), batch)


def _update_ema(ema: LlamaParams, params: LlamaParams, num_updates: jax.Array, decay: float | jax.Array) -> LlamaParams:
    """The next EMA (Polyak & Juditsky 1992). Decay warm-up: at most (1 + n) / (10 + n) after n updates."""
    decay = jnp.minimum(decay, (1.0 + num_updates) / (10.0 + num_updates))
    return jax.tree.map(lambda old, new: (old + (1 - decay) * (new - old)).astype(old.dtype), ema, params)
