"""The loss: how surprised the model is by each next token."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from llama_jax import ops
from llama_jax.config import LlamaConfig
from llama_jax.errors import ConfigError
from llama_jax.model.forward import Attend, Constrain, forward, head_of, unconstrained
from llama_jax.model.params import Block, Llama
from llama_jax.ops.attention.blockwise import MIXED
from llama_jax.ops.cross_entropy import Surprise
from llama_jax.ops.linear import WEIGHT
from llama_jax.training.batch import Batch, Shifted, predicted, shift

Remat = Literal["none", "dots", "full", "offload"]
Arrange = Callable[[Shifted], Shifted]
CHUNK = 64
LAYER_INPUT = "layer_input"


def as_it_is(rows: Shifted) -> Shifted:
    """Rows as the batch has them."""
    return rows


def next_token_loss(
    config: LlamaConfig,
    params: Llama,
    batch: Batch,
    *,
    dtype: jax.typing.DTypeLike | None = None,
    remat: Remat = "none",
    chunk: int = CHUNK,
    z_loss: float = 0.0,
    shares: int = 1,
    constrain: Constrain = unconstrained,
    attend: Attend = ops.attention,
    arrange: Arrange = as_it_is,
) -> jax.Array:
    """Mean negative log-likelihood of every predicted token given those before it in its segment, in nats: float32[].

    It is 0 where nothing is to be predicted. For the arguments and errors see `total_loss`.
    """
    total = total_loss(
        config,
        params,
        batch,
        dtype=dtype,
        remat=remat,
        chunk=chunk,
        z_loss=z_loss,
        shares=shares,
        constrain=constrain,
        attend=attend,
        arrange=arrange,
    )
    return total.loss / jnp.maximum(jnp.sum(predicted(batch)), 1)


def total_loss(
    config: LlamaConfig,
    params: Llama,
    batch: Batch,
    *,
    dtype: jax.typing.DTypeLike | None = None,
    remat: Remat = "none",
    chunk: int = CHUNK,
    z_loss: float = 0.0,
    shares: int = 1,
    constrain: Constrain = unconstrained,
    attend: Attend = ops.attention,
    arrange: Arrange = as_it_is,
) -> Surprise:
    """The sums over all predicted tokens: to be divided by their number, wherever the other rows of the batch are.

    The logits [B, T, V] would be the largest array of a training step: `ops.cross_entropy` makes them by chunks.

    Args:
      dtype: of the computation; None takes that of the parameters. The logarithm and the sums are float32 at least, and
        gradients have the dtype of `params`.
      remat: what the backward pass computes a second time instead of keeping it: "none"; "dots", everything in a layer but
        its matrix products with weights and attention by blocks; "full", everything in a layer, so that only the residual
        stream between layers is kept (Chen et al. 2016, section 3); "offload", as "full", and the residual stream waits in
        the host's memory.
      chunk: positions of each row whose logits are held at a time.
      z_loss: see `ops.cross_entropy`; 1e-4 is usual.
      shares: parts of the rows that lie on different devices, of which `constrain` knows.
      constrain: see `forward`; here it is told of "hidden", what `forward` gave, and of what `ops.cross_entropy` tells it.
      attend: see `forward`.
      arrange: puts the rows, and the tokens in them, into another order or shape, of which `attend` must know: the sums do
        not depend on it. See `parallel.ring`.

    Raises:
      ConfigError: another `remat`.
      GenerationError: tokens that are not int[B, T + 1] with T of at least 1.
    """
    rows = arrange(shift(batch))
    hidden, _ = forward(
        config,
        params,
        rows.tokens,
        dtype=dtype,
        positions=rows.positions,
        segment_ids=rows.segment_ids,
        rope_lengths=rows.rope_lengths,
        constrain=constrain,
        attend=attend,
        wrap_layer=_rematerialise(remat, stacked=not isinstance(params.blocks, tuple)),
    )
    hidden = constrain(hidden, "hidden")
    weights = rows.weights.astype(jnp.promote_types(hidden.dtype, jnp.float32))
    return ops.cross_entropy(
        hidden,
        head_of(config, params),
        rows.targets,
        weights,
        chunk=chunk,
        z_loss=z_loss,
        vocab_size=config.vocab_size,
        shares=shares,
        constrain=constrain,
    )


def _rematerialise(remat: Remat, *, stacked: bool) -> Callable[[Callable], Callable]:
    """What `forward` does to the function of a layer."""
    if remat not in get_args(Remat):
        raise ConfigError(f"remat={remat!r} must be one of {', '.join(get_args(Remat))}")
    policies = jax.checkpoint_policies
    policy = {
        # Weights are there already, in their own dtype and place: what was made of them needs no keeping.
        "none": policies.save_anything_except_these_names(WEIGHT),
        # Attention by blocks takes longest of all where rows are long, and what is kept of it is no more than one product.
        "dots": policies.save_from_both_policies(
            policies.dots_with_no_batch_dims_saveable, policies.save_only_these_names(MIXED)
        ),
        "full": policies.nothing_saveable,
        "offload": policies.save_and_offload_only_these_names(
            names_which_can_be_saved=[],
            names_which_can_be_offloaded=[LAYER_INPUT],
            offload_src="device",
            offload_dst="pinned_host",
        ),
    }[remat]

    def wrap_layer(layer: Callable) -> Callable:
        def named(block: Block, hidden: jax.Array, *rest: Any) -> Any:
            return layer(block, checkpoint_name(hidden, LAYER_INPUT), *rest)

        # Of a scan nothing can be merged with the forward pass: the barrier that prevents it would only cost.
        return jax.checkpoint(named, prevent_cse=not stacked and remat != "none", policy=policy)

    return wrap_layer
