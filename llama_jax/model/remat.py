"""Rematerialization: which values of a layer are saved for the backward pass (Chen et al. 2016)."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
from jax.ad_checkpoint import checkpoint_name

from llama_jax.model.forward_options import Remat
from llama_jax.ops.attention.dense import ATTENTION_OUTPUT
from llama_jax.ops.layers import MATMUL_OUTPUT

LAYER_INPUT = "layer_input"
# The primitive whose results, the output and the softmax's denominators, JAX does not name.
CUDNN_ATTENTION = "dot_product_attention_fwd"


def rematerialize(remat: Remat, layer: Callable[..., Any], *, in_loop: bool) -> Callable[..., Any]:
    """Rematerialize the function of one layer; its first two arguments are the parameters and the residual stream."""
    policies = jax.checkpoint_policies
    names = policies.save_only_these_names(MATMUL_OUTPUT, ATTENTION_OUTPUT)
    policy = {
        # Blockwise attention is expensive for long rows, and its output is cheap to save. Values are selected by name,
        # because JAX's policies do not look inside custom_vjp matmuls.
        "dots": lambda op, *args, **params: op.name.startswith(CUDNN_ATTENTION) or names(op, *args, **params),
        "full": policies.nothing_saveable,
        "offload": policies.save_and_offload_only_these_names(
            names_which_can_be_saved=[],
            names_which_can_be_offloaded=[LAYER_INPUT],
            offload_src="device",
            offload_dst="pinned_host",
        ),
    }[remat]

    # Inside a loop, CSE with the forward pass is impossible, so no barrier is needed.
    return jax.checkpoint(partial(_call_with_named_input, layer), prevent_cse=not in_loop, policy=policy)


def _call_with_named_input(layer: Callable[..., Any], block: Any, hidden: jax.Array, *rest: Any) -> Any:
    return layer(block, checkpoint_name(hidden, LAYER_INPUT), *rest)
