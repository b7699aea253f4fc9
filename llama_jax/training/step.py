"""One step of training: a pure function from state and batch to state and metrics."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import optax
from flax import struct

from llama_jax.config import LlamaConfig
from llama_jax.model.forward import Constrain, unconstrained
from llama_jax.model.params import Llama
from llama_jax.training.objective import CHUNK, Remat, next_token_loss


class TrainState(struct.PyTreeNode):
    """What training carries from step to step: an immutable tree.

    Attributes:
      step: int32[], steps taken.
      params: the parameters, in the dtype in which they are updated.
      opt_state: what the optimizer keeps; for AdamW two numbers per parameter.
    """

    step: jax.Array
    params: Llama
    opt_state: optax.OptState


def init_state(optimizer: optax.GradientTransformation, params: Llama) -> TrainState:
    """The state before the first step."""
    return TrainState(step=jnp.zeros((), jnp.int32), params=params, opt_state=optimizer.init(params))


def train_step(
    config: LlamaConfig,
    optimizer: optax.GradientTransformation,
    state: TrainState,
    tokens: jax.Array,
    *,
    dtype: jax.typing.DTypeLike | None = None,
    remat: Remat = "none",
    chunk: int = CHUNK,
    constrain: Constrain = unconstrained,
) -> tuple[TrainState, dict[str, jax.Array]]:
    """Update the parameters once, to make `tokens` more probable. Meant for `jax.jit` with the state donated.

    Args:
      tokens: int32[B, T + 1].
      dtype: of the computation: with float32 parameters and "bfloat16", updates smaller than bfloat16 can tell are not
        lost (Micikevicius et al. 2018, section 3.1). None takes that of the parameters.
      remat, chunk, constrain: see `next_token_loss`.

    Returns:
      The next state, and the metrics of this step before the update: "loss" in nats per token and "grad_norm", the
      Euclidean norm of all gradients, float32[] each.
    """

    def loss_of(params: Llama) -> jax.Array:
        return next_token_loss(config, params, tokens, dtype=dtype, remat=remat, chunk=chunk, constrain=constrain)

    loss, gradients = jax.value_and_grad(loss_of)(state.params)
    updates, opt_state = optimizer.update(gradients, state.opt_state, state.params)
    params = optax.apply_updates(state.params, updates)
    metrics = {"loss": loss, "grad_norm": optax.tree.norm(gradients)}
    return TrainState(state.step + 1, params, opt_state), metrics
