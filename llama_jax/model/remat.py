"""Rematerialization: which values of a layer are saved for the backward pass (Chen et al. 2016)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from jax.ad_checkpoint import checkpoint_name

from llama_jax.model.forward_options import Remat
from llama_jax.ops.attention.dense import ATTENTION_OUTPUT
from llama_jax.ops.layers import PRODUCT
from llama_jax.ops.platform import recomputing

LAYER_INPUT = "layer_input"


def rematerialize(remat: Remat, layer: Callable[..., Any]) -> Callable[..., Any]:
    """The function of one layer, whose first two arguments are its parameters and the residual stream."""
    policies = jax.checkpoint_policies
    policy = {
        # Attention by blocks takes longest of all where rows are long, and what is saved of it is no more than one matmul.
        # By names: a policy of JAX's own does not see into a matmul with a derivative of its own.
        "dots": policies.save_only_these_names(PRODUCT, ATTENTION_OUTPUT),
        "full": policies.nothing_saveable,
        "offload": policies.save_and_offload_only_these_names(
            names_which_can_be_saved=[],
            names_which_can_be_offloaded=[LAYER_INPUT],
            offload_src="device",
            offload_dst="pinned_host",
        ),
    }[remat]

    def named(block: Any, hidden: jax.Array, *rest: Any) -> Any:
        with recomputing(True):
            return layer(block, checkpoint_name(hidden, LAYER_INPUT), *rest)

    # Nothing of a scan over layers can be merged with the forward pass: the barrier that prevents it would only cost.
    return jax.checkpoint(named, prevent_cse=False, policy=policy)
