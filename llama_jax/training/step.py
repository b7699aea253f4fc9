"""One step of training: a pure function from state and batch to state and metrics."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import struct
from jax import lax

from llama_jax import ops
from llama_jax.config import LlamaConfig
from llama_jax.errors import ConfigError
from llama_jax.model.forward import Attend, Constrain, unconstrained
from llama_jax.model.params import Llama
from llama_jax.training.batch import Batch, predicted
from llama_jax.training.objective import CHUNK, Arrange, Remat, as_it_is, total_loss

Kept = tuple[Llama, Any, Llama | None]  # parameters, what the optimizer keeps, and the average


class TrainState(struct.PyTreeNode):
    """What training carries from step to step: an immutable tree.

    Attributes:
      step: int32[], steps taken, skipped ones included.
      params: the parameters, in the dtype in which they are updated.
      opt_state: what the optimizer keeps; for AdamW two numbers per parameter.
      ema: the exponential moving average of the parameters, or None.
      skipped: int32[], steps whose loss or gradients were not finite: they changed nothing but these counters.
      skipped_in_a_row: int32[], how many of them were the last ones.
    """

    step: Any
    params: Llama
    opt_state: Any
    ema: Llama | None = None
    skipped: Any = 0
    skipped_in_a_row: Any = 0


def init_state(optimizer: optax.GradientTransformation, params: Llama, *, ema: bool = False) -> TrainState:
    """The state before the first step; with `ema` it keeps a moving average as well, which starts as the parameters."""
    zero = partial(jnp.zeros, (), jnp.int32)
    average = jax.tree.map(jnp.copy, params) if ema else None  # copied: both are donated to the step
    return TrainState(zero(), params, optimizer.init(params), average, zero(), zero())


def train_step(
    config: LlamaConfig,
    optimizer: optax.GradientTransformation,
    state: TrainState,
    batch: Batch,
    *,
    dtype: jax.typing.DTypeLike | None = None,
    remat: Remat = "none",
    chunk: int = CHUNK,
    accumulate: int = 1,
    z_loss: float = 0.0,
    clip_norm: float = 0.0,
    ema_decay: float = 0.0,
    axis_name: str | None = None,
    shares: int = 1,
    constrain: Constrain = unconstrained,
    attend: Attend = ops.attention,
    arrange: Arrange = as_it_is,
    fit: Callable[[Llama], Llama] = lambda params: params,
) -> tuple[TrainState, dict[str, jax.Array]]:
    """Update the parameters once, to make `batch` more probable. Meant for `jax.jit` with the state donated.

    Llama is trained without dropout (Touvron et al. 2023), so a step needs no random numbers.

    Args:
      batch: B rows; every predicted token of them counts the same, however they are spread over rows and devices.
      dtype: of the computation: with float32 parameters and "bfloat16", updates smaller than bfloat16 can tell are not
        lost (Micikevicius et al. 2018, section 3.1). None takes that of the parameters.
      accumulate: parts into which the rows are divided, one after the other, so that the activations of only one part are
        alive; the gradients are summed in the parameters' dtype.
      clip_norm: larger gradients are scaled to this Euclidean norm (1.0 for Llama: Touvron et al. 2023, section 2.3);
        0 leaves them.
      ema_decay: of the moving average, when the state keeps one; it is smaller in the first steps, (1 + n) / (10 + n).
      axis_name: of the mapped axis when this runs per device, under `jax.pmap` or `shard_map`: sums are then over all of
        its devices, which have the same state and each their own rows.
      remat, chunk, z_loss, shares, constrain, attend, arrange: see `total_loss`.
      fit: makes of the parameters those of `config`, where the state keeps them in another shape.

    Returns:
      The next state, and the metrics of this step before the update: "loss", nats per predicted token; "grad_norm", the
      Euclidean norm of all gradients; "tokens", how many were predicted, on all devices; float32[] each. If the first two
      are not finite, only the counters of the state have changed. Of these "skipped" and "skipped_in_a_row" are given
      as they are after the step.

    Raises:
      ConfigError: rows that cannot be divided by `accumulate`.
    """
    batch = Batch(*(None if part is None else jnp.asarray(part) for part in batch))
    count = _over(axis_name, jnp.sum(predicted(batch), dtype=jnp.float32))
    total = partial(
        total_loss,
        config,
        dtype=dtype,
        remat=remat,
        chunk=chunk,
        z_loss=z_loss,
        shares=shares,
        constrain=constrain,
        attend=attend,
        arrange=arrange,
    )

    def loss_of(params: Llama, batch: Batch) -> tuple[jax.Array, jax.Array]:
        loss, nll = total(fit(params), batch)
        share = 1 / jnp.maximum(count, 1)
        return loss * share, nll * share

    differentiate = jax.value_and_grad(loss_of, has_aux=True)

    def add(sums: Any, part: Batch) -> tuple[Any, None]:
        (_, nll), gradients = differentiate(state.params, part)
        return jax.tree.map(jnp.add, sums, (nll, gradients)), None

    if accumulate == 1:
        (_, loss), gradients = differentiate(state.params, batch)
    else:
        start = jnp.zeros((), jnp.float32), jax.tree.map(jnp.zeros_like, state.params)
        (loss, gradients), _ = lax.scan(add, start, _parts(batch, accumulate))
    loss, gradients = _over(axis_name, (loss, gradients))

    norm = optax.tree.norm(gradients)
    finite = jnp.isfinite(loss) & jnp.isfinite(norm)

    def update(kept: Kept) -> Kept:
        params, opt_state, ema = kept
        # Here and not before: a scaled copy of all gradients would be as large as the parameters.
        scale = jnp.minimum(1.0, clip_norm / jnp.maximum(norm, 1e-30)) if clip_norm else 1.0
        clipped = jax.tree.map(lambda g: (g * scale).astype(g.dtype), gradients) if clip_norm else gradients
        updates, opt_state = optimizer.update(clipped, opt_state, params)
        params = optax.apply_updates(params, updates)
        return params, opt_state, ema if ema is None else _average(ema, params, state.step - state.skipped, ema_decay)

    # A branch and not a choice between two results: both would be in memory.
    params, opt_state, ema = lax.cond(finite, update, lambda kept: kept, (state.params, state.opt_state, state.ema))
    skipped = 1 - finite.astype(jnp.int32)
    state = TrainState(
        step=state.step + 1,
        params=params,
        opt_state=opt_state,
        ema=ema,
        skipped=state.skipped + skipped,
        skipped_in_a_row=(state.skipped_in_a_row + 1) * skipped,
    )
    counters = {"skipped": state.skipped, "skipped_in_a_row": state.skipped_in_a_row}
    return state, {"loss": loss, "grad_norm": norm, "tokens": count, **counters}


def _over(axis_name: str | None, values: Any) -> Any:
    return values if axis_name is None else lax.psum(values, axis_name)


def _parts(batch: Batch, parts: int) -> Batch:
    """[B, ...] as [parts, B / parts, ...], every part with rows of every device over which B may be split."""
    rows = batch.tokens.shape[0]
    if parts < 1 or rows % parts:
        raise ConfigError(f"a batch of {rows} rows cannot be divided into accumulate={parts} equal parts; give a divisor")
    return jax.tree.map(lambda x: x.reshape(rows // parts, parts, *x.shape[1:]).swapaxes(0, 1), batch)


def _average(ema: Llama, params: Llama, updates: jax.Array, decay: float) -> Llama:
    """Polyak & Juditsky 1992; the first steps, from random parameters, are forgotten sooner."""
    keep = jnp.minimum(decay, (1.0 + updates) / (10.0 + updates))
    return jax.tree.map(lambda old, new: (old + (1 - keep) * (new - old)).astype(old.dtype), ema, params)
